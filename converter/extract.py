"""extract: the language model of a composite checkpoint written as a checkpoint of its own, its bytes as they are."""

from dataclasses import dataclass, replace
from pathlib import Path

from ..architectures.composite import text_config, text_names
from ..errors import CheckpointError, UsageError, shown
from .resolve import Reference, resolve
from .rewrite import rewrite
from .scan import scan

_PARTS = ("text",)
"""What can be extracted."""


@dataclass(frozen=True)
class Extracted:
    """What was written: the family that it is of, its tensors with the name that each had, and those left out."""

    reference: str
    out: Path
    family: str
    names: dict[str, str]
    left: tuple[str, ...]


def extract(
    part: str, model: str | Path | Reference, out: str | Path, *, force: bool = False, offline: bool = False
) -> Extracted:
    """Write a part of a composite checkpoint as a checkpoint of its own.

    Args:
        part: "text", the language model.
        model: the composite checkpoint, of safetensors files.
        out: the folder to make.
        force: replace an existing checkpoint folder.
        offline: use local files and the hub's cache alone.

    Raises:
        InvalidInput: it is no composite, or its language model is of no family known here, quantised or not whole.
        UsageError: an unknown part; `out` exists or cannot be made.
    """
    if part not in _PARTS:
        raise UsageError(f"{shown(part, 40)} is not a part that gptkit can extract", f"known: {', '.join(_PARTS)}")
    resolved = resolve(model, offline=offline, companions=True)
    assert resolved.path is not None
    files = replace(scan(resolved.path), resolved=resolved, revision=resolved.revision)
    problems = [*files.broken.values(), files.index_error, files.config_error]
    if files.config is None or any(problems):
        why = next(filter(None, problems), f"{resolved.text} has no config.json")
        raise CheckpointError(why, "gptkit audit lists everything that is wrong with it.")
    family, config = text_config(files.config)
    names, config = text_names(family, config, files.tensors)
    rewrite(files, names, out, force, config)
    left = tuple(name for name in files.tensors if name not in names)
    return Extracted(resolved.text, Path(out), family.name, names, left)
