"""Write the language model of a composite checkpoint as a separate checkpoint. The tensors keep their bytes.

A composite checkpoint has several models, such as a language model and a vision tower.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from ..architectures.composite import text_config, text_names
from ..errors import CheckpointError, UsageError, shown
from .resolve import Reference, resolve
from .rewrite import rewrite
from .scan import scan
from .targets import target, with_config

_PARTS = ("text",)
"""The parts of a composite checkpoint that `extract` can write."""


@dataclass(frozen=True)
class Extracted:
    """The result of `extract`."""

    reference: str
    """The text with which the user named the composite checkpoint."""
    out: Path
    family: str
    """The model family of the language model."""
    names: dict[str, str]
    """New tensor names -> the names in the composite checkpoint."""
    left: tuple[str, ...]
    """The names of the tensors that are not part of the language model and were left out."""


def extract(
    part: str,
    model: str | Path | Reference,
    out: str | Path,
    *,
    config: str | None = None,
    force: bool = False,
    offline: bool = False,
) -> Extracted:
    """Write a part of a composite checkpoint as a separate checkpoint.

    Args:
        part: "text", the language model.
        model: the composite checkpoint, which must have safetensors files.
        out: the folder to make.
        config: "transformers4" for a config.json and tokenizer files that programs for transformers 4 read too; see
            `converter.compatibility`.
        force: replace an existing checkpoint folder.
        offline: use only local files and the hub's cache.

    Raises:
        InvalidInput: the model is not a composite checkpoint, or its language model is of an unknown family,
            quantised or incomplete.
        UsageError: an unknown part; `out` exists or cannot be made.
    """
    if part not in _PARTS:
        raise UsageError(
            f"{shown(part, 40)} is not a part that gptkit can extract", f"Choose one of: {', '.join(_PARTS)}"
        )
    older = target(with_config("hf", config)).config is not None
    resolved = resolve(model, offline=offline, companions=True)
    assert resolved.path is not None
    files = replace(scan(resolved.path), resolved=resolved, revision=resolved.revision)
    problems = [*files.broken.values(), files.index_error, files.config_error]
    if files.config is None or any(problems):
        why = next(filter(None, problems), f"{resolved.text} has no config.json")
        raise CheckpointError(why, f"Run gptkit audit {resolved.text} to list all problems of this checkpoint.")
    family, text = text_config(files.config)
    names, text = text_names(family, text, files.tensors)
    rewrite(files, names, out, force, text, family=family, older=older)
    left = tuple(name for name in files.tensors if name not in names)
    return Extracted(resolved.text, Path(out), family.name, names, left)
