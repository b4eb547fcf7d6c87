"""transformers as the reference: its own class, loaded from files that it reads without remote code."""

from __future__ import annotations

import contextlib
import json
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from ..architectures import BY_MODEL_TYPE
from ..converter.checkpoint import Checkpoint
from ..converter.convert import plan_conversion
from ..converter.publish import Staging
from ..converter.write import execute
from ..errors import CannotExpress, CheckpointError, GptkitError

NO_CLASS = "this tree never had a transformers class to compare with"


@contextlib.contextmanager
def reference_folder(checkpoint: Checkpoint) -> Iterator[Path]:
    """A folder that `AutoModelForCausalLM.from_pretrained` loads: the checkpoint's own where it can be, else the
    checkpoint converted to HF files in a temporary place. Raises CannotExpress where no transformers class computes it.
    """
    architecture = checkpoint.architecture
    if architecture is None:
        raise CannotExpress(NO_CLASS)
    readable = checkpoint.format == "hf" and checkpoint.path.is_dir() and not checkpoint.notes
    if readable and architecture.export_config(checkpoint.spec, checkpoint.origin.config) is None:
        yield checkpoint.path
        return
    try:
        plan = plan_conversion(checkpoint, "hf")
    except CannotExpress as error:
        raise CannotExpress(
            error.message, "compare with the checkpoint it was made from: gptkit verify ORIGINAL THIS"
        ) from error
    with tempfile.TemporaryDirectory(prefix="gptkit-reference-") as parent:
        target = Path(parent) / "hf"
        with Staging(target) as staging:
            files = execute(plan, checkpoint.tensors(), staging)
            staging.commit({}, files=files)
        yield target


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' advice to its own users, its progress bars and its warnings."""
    from transformers import logging

    level = logging.get_verbosity()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        try:
            yield
        finally:
            logging.set_verbosity(level)
            logging.enable_progress_bar()


def logits_of(model: Any, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    """The logits (B, T, V) of transformers' model or of gptkit's."""
    given = model(input_ids=input_ids, attention_mask=attention_mask)
    logits: Tensor = getattr(given, "logits", given)
    return logits


def load_reference(folder: Path, dtype: torch.dtype, attention: str) -> Any:
    """The transformers model in `folder`, in eval mode, of from_pretrained(dtype=…): `model.to(dtype)` would round
    its rotary frequencies too. Raises CheckpointError where transformers left a tensor at random or had no use for one,
    and GptkitError where it cannot load the folder at all.
    """
    import transformers

    config = json.loads((folder / "config.json").read_text("utf-8"))
    if (own := own_reference(config, dtype, attention)) is not None:
        stored = {name: each for file in sorted(folder.glob("*.safetensors")) for name, each in load_file(file).items()}
        unexpected = own.load_state_dict(stored, strict=False).unexpected_keys
        missing = [name for name, _ in own.named_parameters() if name not in stored]  # a tied one has one name here
        if missing or unexpected:
            raise CheckpointError(f"the family's own model and {folder.name} differ in {(missing + unexpected)[:5]}")
        return own.eval()
    try:
        with quiet():
            model, info = transformers.AutoModelForCausalLM.from_pretrained(
                folder,
                **class_options(dtype, attention),
                output_loading_info=True,
                local_files_only=True,
                trust_remote_code=False,
            )
    except (OSError, ValueError, RuntimeError, TypeError, KeyError, ImportError) as error:
        reason = str(error).strip().splitlines()
        raise GptkitError(f"transformers cannot load {folder.name}: {reason[0] if reason else error!r}") from error
    for kind, what in (
        ("missing_keys", "left tensors at random (missing)"),
        ("mismatched_keys", "left tensors at random (mismatched)"),
        ("unexpected_keys", "has no use for tensors"),
    ):
        if info.get(kind):
            names = ", ".join(str(name) for name in list(info[kind])[:5])
            raise CheckpointError(f"transformers {what}: {names}")
    compute_experts_plainly(model)
    forget_lengths(model)
    # from_pretrained leaves parameters where they lie in the mapped file, at any multiple of 8 bytes, and fp32 products
    # sum in another order there than on torch's 64 (up to 1e-5 in logits): a difference of files, not of models.
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model.eval()


def class_options(dtype: torch.dtype, attention: str) -> dict[str, Any]:
    """How transformers is to build a class; its default way to compute a mixture of experts has no fp64."""
    experts = "eager" if dtype == torch.float64 else None
    return {"dtype": dtype, "attn_implementation": attention, "experts_implementation": experts}


def own_reference(config: Mapping[str, Any], dtype: torch.dtype, attention: str) -> Any:
    """The model of a family that brings its own (`Architecture.model`), its weights not filled; None of any other."""
    family = BY_MODEL_TYPE.get(str(config.get("model_type")))
    if family is None or not family.model:
        return None
    module, _, name = family.model.partition(":")
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return getattr(import_module(module), name)(config, attention)
    finally:
        torch.set_default_dtype(before)


def compute_experts_plainly(model: Any) -> None:
    """Compute experts of rows of no multiple of 16 bytes one by one: torch's grouped product raises on such."""
    stacked = [each for each in model.parameters() if each.ndim == 3]
    if any(each.shape[dim] * each.element_size() % 16 for each in stacked for dim in (1, 2)):
        model.set_experts_implementation("eager")


def forget_lengths(model: Any) -> None:
    """Have every pass with dynamic rotary scaling be as the first: it keeps the longest sequence's base, and that of
    each kind of layer where these have positions of their own.
    """

    def forget(module: Any, prefixes: list[str]) -> None:
        for prefix in prefixes:
            setattr(module, f"{prefix}inv_freq", getattr(module, f"{prefix}original_inv_freq").clone())
            setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)

    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        by_prefix = {f"{kind}_": each for kind, each in kinds.items()} if isinstance(kinds, dict) else {"": kinds}
        dynamic = [prefix for prefix, each in by_prefix.items() if "dynamic" in str(each)]
        if dynamic:
            module.register_forward_pre_hook(lambda module, *_, prefixes=dynamic: forget(module, prefixes))
