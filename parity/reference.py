"""transformers as the reference: its own class, loaded from files that it reads without remote code."""

from __future__ import annotations

import contextlib
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ..converter.checkpoint import Checkpoint
from ..converter.convert import plan_conversion
from ..converter.publish import Staging
from ..converter.write import execute
from ..errors import CannotExpress, CheckpointError, GptkitError

__all__ = ["load_reference", "reference_folder"]


@contextlib.contextmanager
def reference_folder(checkpoint: Checkpoint) -> Iterator[Path]:
    """A folder that `AutoModelForCausalLM.from_pretrained` loads: the checkpoint's own where it can be, else the
    checkpoint converted to HF files in a temporary place.

    Raises:
        CannotExpress: no transformers class computes this tree.

    """
    architecture = checkpoint.architecture
    if architecture is None:
        raise CannotExpress("this tree never had a transformers class to compare with")
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
            files, tensors = execute(plan, checkpoint.tensors(), staging)
            staging.commit({}, files=files, tensors=tensors)
        yield target


def load_reference(folder: Path, dtype: torch.dtype, attention: str) -> Any:
    """The transformers model in `folder`, in eval mode.

    Built by from_pretrained(dtype=…): `model.to(dtype)` would round its rotary frequencies too.

    Raises:
        CheckpointError: transformers left a tensor at random or had no use for one.
        GptkitError: it cannot load the folder at all.

    """
    import transformers

    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # transformers' advice to its own users
            model, info = transformers.AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=dtype,
                attn_implementation=attention,
                output_loading_info=True,
                local_files_only=True,
                trust_remote_code=False,
            )
    except (OSError, ValueError, RuntimeError, TypeError, KeyError, ImportError) as error:
        reason = str(error).strip().splitlines()
        raise GptkitError(f"transformers cannot load {folder.name}: {reason[0] if reason else error!r}") from error
    finally:
        transformers.logging.set_verbosity(level)
        transformers.logging.enable_progress_bar()
    for kind in ("missing_keys", "mismatched_keys"):
        if info.get(kind):
            names = ", ".join(str(name) for name in list(info[kind])[:5])
            raise CheckpointError(f"transformers left tensors at random ({kind.split('_')[0]}): {names}")
    return model.eval()
