"""Save a model in memory as a checkpoint folder, with its history."""

import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..converter.checkpoint import Checkpoint, identity_leaves
from ..converter.companions import companions_in
from ..converter.convert import adapted, plan_conversion
from ..converter.dtypes import HF_NAMES, parse_dtype, widest
from ..converter.outline import Outline
from ..converter.publish import Staging
from ..converter.targets import FOLDERS, Target, target, with_config
from ..converter.transfer import transfer
from ..converter.tree import Origin
from ..converter.weights import Stored, Weights
from ..converter.write import FolderPlan
from ..errors import InvalidInput, UsageError
from ..version import __version__
from .decoder import Decoder
from .load import as_array

_FROM_MEMORY = "from memory: its weights as a program left them, trained or edited"
_SHOWN = 4


def save(
    model: Decoder,
    folder: str | Path,
    as_: str = "local",
    *,
    config: str | None = None,
    dtype: torch.dtype | str | None = None,
    force: bool = False,
    max_shard_bytes: int | None = None,
    record: dict[str, Any] | None = None,
    about: dict[str, Any] | None = None,
) -> Path:
    """Write a model in memory as a checkpoint folder, which appears complete or not at all.

    Besides the weights, the folder has the tokenizer and the config.json that `load` read, a manifest for `gptkit
    check`, and a history. The history is that of the loaded checkpoint, with an entry that says that the model was
    saved from memory.

    Args:
        model: the model that `load` returned, or a `Decoder` built from a `ModelSpec`, on any device.
        folder: the folder to make.
        as_: "local" for gptkit's own format, or a format of Hugging Face files: "hf" for the family that the model was
            loaded from, "hf:FAMILY" for another family that can represent the model, or "hf:auto" for the first family
            that can.
        config: "transformers4" for Hugging Face files that programs for transformers 4 read too; see
            `converter.compatibility`.
        dtype: the dtype in which to store every tensor; by default its dtype in memory.
        force: replace an existing checkpoint folder in one step; it may be the folder that the model was loaded from.
        max_shard_bytes: the largest size of a weight file; by default the files are those of the original, or of 5 GB.
        record: an entry for the history that says how the weights were made, as JSON values.
        about: additional keys of the manifest.

    Returns:
        The folder.

    Raises:
        UsageError: `folder` exists, or its parent does not; the format or dtype is unknown; the model is not a
            `Decoder`.
        InvalidInput: the model's parameters are not those of its `spec` (because it was wrapped or changed), or they
            have no values.
        CheckpointError: a value does not fit `dtype`.
        CannotExpress: the family cannot represent the model.
        GptkitError: there is too little space on the disk, or a write fails; nothing is published.
    """
    to = target(with_config(as_, config), FOLDERS)
    with Staging(Path(folder), force) as staging:
        source, to, plan = _planned(model, to, dtype, max_shard_bytes, record)
        done = transfer(plan, source, staging)
        manifest = {
            "gptkit": __version__,
            "format": str(to),
            "source": {"reference": source.origin.reference, "revision": source.revision},
            "history": list(source.origin.history),
            **(about or {}),
        }
        staging.commit(manifest, files=done.files)
    return Path(folder)


def require_form(model: Decoder, as_: str, dtype: torch.dtype | str | None = None) -> None:
    """Raise the errors that `save` would raise for a model in this format, without writing anything."""
    _planned(model, target(as_, FOLDERS), dtype)


def _planned(
    model: Decoder,
    to: Target,
    dtype: torch.dtype | str | None,
    max_shard_bytes: int | None = None,
    record: dict[str, Any] | None = None,
) -> tuple[Checkpoint, Target, FolderPlan]:
    """Return the model as a checkpoint, the target format with its family, and the plan of the folder's files.

    If `to` is a target without a family, such as "hf:auto", the family is chosen here. `record` is an entry for the
    history; see `save`.
    """
    stored = None if dtype is None else HF_NAMES[parse_dtype(str(dtype))]
    source, to = adapted(_in_memory(model, stored, record), to)
    return source, to, plan_conversion(source, to, stored, max_shard_bytes)


def _in_memory(model: Decoder, dtype: str | None = None, about: dict[str, Any] | None = None) -> Checkpoint:
    """Return the model's parameters as a checkpoint, to be stored in `dtype` (torch's name).

    Raises the same errors as `save`.
    """
    if not isinstance(model, Decoder):
        raise UsageError(
            f"gptkit.save needs a model that gptkit.load returned, not a {type(model).__name__}",
            "Unwrap the model first: pass model.module of a parallel model, or model._orig_mod of a compiled model.",
        )
    parameters = dict(model.named_parameters(remove_duplicate=False))
    declared = {parameter.name: parameter.shape for parameter in model.spec.parameters()}
    wrong = [f"{name} is missing" for name in declared if name not in parameters]
    wrong += [f"{name} is not part of it" for name in parameters if name not in declared]
    wrong += [
        f"{name} has the shape {list(parameters[name].shape)}, expected {list(shape)}"
        for name, shape in declared.items()
        if name in parameters and tuple(parameters[name].shape) != shape
    ]
    wrong += [f"{name} has no values (meta device)" for name, parameter in parameters.items() if parameter.is_meta]
    if wrong:
        more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise InvalidInput(
            f"the model's parameters do not match its architecture: {'; '.join(wrong[:_SHOWN])}{more}",
            "Before saving, merge adapters (such as LoRA) into the weights, and remove parameters that you added.",
        )
    stored = {}
    for name in declared:
        parameter = parameters[name]
        stored[name] = Stored(
            None, parse_dtype(str(parameter.dtype)), tuple(parameter.shape), decode=partial(_values, parameter)
        )
    weights = Weights(stored)
    compute = widest([tensor.dtype for tensor in stored.values()])
    source = model.source or Outline(model.spec, Origin())
    record = {**(about or {"saved": _FROM_MEMORY}), "dtype": dtype or HF_NAMES[compute], "gptkit": __version__}
    return Checkpoint(
        reference=source.origin.reference or "the model in memory",
        path=Path(),
        revision=source.revision,
        format="memory",
        spec=model.spec,
        leaves=identity_leaves(model.spec),
        dtype=compute,
        origin=replace(source.origin, history=(*source.origin.history, record)),
        texts={**_tokenizer(source.path), **source.texts},
        _weights=weights,
        _names={name: name for name in declared},
    )


def _values(parameter: Tensor, _data: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return a parameter as an array. A bf16 parameter becomes uint16, because numpy has no bf16."""
    return as_array(parameter.contiguous())[0]


def _tokenizer(folder: Path | None) -> dict[str, bytes]:
    """Return the contents, by file name, of the files next to the weights in a folder, such as the tokenizer's."""
    if folder is None:
        return {}
    if not folder.is_dir():  # deleted since the model was loaded; saving the weights is more important
        warnings.warn(f"{folder} no longer exists, so the model is saved without its tokenizer", stacklevel=4)
        return {}
    return {path.name: path.read_bytes() for path in companions_in(folder)}
