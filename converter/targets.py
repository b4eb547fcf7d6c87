"""What a checkpoint is written as, parsed once: `--to`, `--as` and `save`'s, for their help, errors and the shell too.

Nothing is imported until a word is to be understood.
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
"""The module of each format (see `formats.Format`), and behind a colon what in it is the format where it is not all of
it; those of plugins included."""


READ_ONLY = "trained"
"""The one that is read, and not written: what training programs leave (its module tells whose it is)."""


def register(format_: str, module: str) -> None:
    """Make a format known, with the full name of its module; raises UsageError where there is one of its name."""
    if format_ in FORMATS or format_ in ("local", "hf", "tree"):
        raise UsageError(f"the format {format_} already exists")
    FORMATS[format_] = module


FOLDERS = ("local", "hf", "hf:FAMILY", "hf:auto")
"""gptkit's own format and Hugging Face files, which a tree is written as that is not in files yet."""


def targets() -> tuple[str, ...]:
    """Every value of `--to`."""
    return (*FOLDERS, *(name for name in FORMATS if name != READ_ONLY))


@dataclass(frozen=True, slots=True)
class Target:
    """What a checkpoint is written as.

    kind: gptkit's own format ("local"), Hugging Face files ("hf"), or one of `FORMATS`. family: of Hugging Face files
    the family, or "auto" for the first that can hold the tree; None for the one that the tree came from.
    """

    kind: str
    family: str | None = None

    def __str__(self) -> str:
        return self.kind if self.family is None else f"{self.kind}:{self.family}"


def target(to: str | Target, known: Sequence[str] | None = None) -> Target:
    """What a word of those `known` (None: all) stands for; UsageError, and UnknownFamily for "hf:" and no family."""
    if isinstance(to, Target):
        return to
    from ..architectures import ARCHITECTURES, named

    known = targets() if known is None else known
    kind, _, family = to.partition(":")
    if kind == "hf" and family:
        return Target("hf", family if family == "auto" else named(family).name)
    if to in known:
        return Target(to)
    hint = f"known: {', '.join(known)}" + ("; gptkit convert goes on from there." if known == FOLDERS else "")
    raise UsageError(f"unknown format {to!r}", f"did you mean hf:{to}?" if to in ARCHITECTURES else hint)
