"""Parse the name of an output format: the values of `--to`, `--as` and `save`.

This module is also used for help texts, errors and shell completion, so it imports nothing else until it parses.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import UsageError

FORMATS = {
    name: f"gptkit.converter.formats.{inside}"
    for name, inside in (
        ("gguf", "gguf"),
        ("llama2c", "llama2c"),
        ("llama2c_v1", "llama2c:VERSION_1"),
        ("nanogpt", "nanogpt"),
        ("nanogpt_tanh", "nanogpt:TANH"),
        ("dcp", "dcp"),
        ("trained", "trained"),
    )
}
"""The module of every format (see `formats.Format`), also of plugins. A name after a colon is the format's object in
the module; otherwise the module itself is the format."""


READ_ONLY = "trained"
"""The only format that is not written: checkpoints of training programs."""


def register(format_: str, module: str) -> None:
    """Register a format with the full name of its module. Raises UsageError if the name exists already."""
    if format_ in FORMATS or format_ in ("local", "hf", "tree"):
        raise UsageError(f"a format with the name {format_} is already registered")
    FORMATS[format_] = module


FOLDERS = ("local", "hf", "hf:FAMILY", "hf:auto")
"""gptkit's own format and Hugging Face files: the formats for a model that is not yet in files."""


def targets() -> tuple[str, ...]:
    """Return every value of `--to`."""
    return (*FOLDERS, *(name for name in FORMATS if name != READ_ONLY))


@dataclass(frozen=True, slots=True)
class Target:
    """A format in which a checkpoint can be written."""

    kind: str
    """gptkit's own format ("local"), Hugging Face files ("hf"), or one of `FORMATS`."""
    family: str | None = None
    """For Hugging Face files: a family, "auto" for the first that can express the tree, or None for the original's."""

    def __str__(self) -> str:
        return self.kind if self.family is None else f"{self.kind}:{self.family}"


def target(to: str | Target, known: Sequence[str] | None = None) -> Target:
    """Parse one of the `known` names (None: all).

    Raises UsageError; UnknownFamily for "hf:NAME" without such a family.
    """
    if isinstance(to, Target):
        return to
    from ..architectures import ARCHITECTURES, named

    known = targets() if known is None else known
    kind, _, family = to.partition(":")
    if kind == "hf" and family:
        return Target("hf", family if family == "auto" else named(family).name)
    if to in known:
        return Target(to)
    hint = f"Choose one of {', '.join(known)}." + (
        " gptkit convert can convert the result to other formats." if known == FOLDERS else ""
    )
    raise UsageError(f"unknown format {to!r}", f"Did you mean hf:{to}?" if to in ARCHITECTURES else hint)
