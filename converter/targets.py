"""Parse the name of an output format, such as "gguf" or "hf:FAMILY": the values of `--to`, `--as` and of `save`.

The name of Hugging Face files may end with the form of their config, as in "hf:llama@transformers4" (`--config`).

This module is also used for help texts, errors and shell completion. To be fast, it imports the model families only
when a name is parsed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import UsageError, shown

FORMATS = {
    name: f".{inside}"
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
"""The name of a format -> the module with its functions (see `formats.Format`): a full name, or a name in
`converter.formats` that begins with a dot. Plugins may add formats.

With "MODULE:NAME", an object of this name in the module has the functions."""


READ_ONLY = "trained"
"""The only format that gptkit reads but does not write: checkpoints of training programs."""


def register(format_: str, module: str) -> None:
    """Register a format of a plugin. `module` is the full name of its module.

    Raises UsageError if there is already a format of this name.
    """
    if format_ in FORMATS or format_ in ("local", "hf", "tree"):
        raise UsageError(f"a format with the name {format_} is already registered")
    FORMATS[format_] = module


FOLDERS = ("local", "hf", "hf:FAMILY", "hf:auto")
"""gptkit's own format and Hugging Face files: the formats that `save` and `swap` can write."""


def targets() -> tuple[str, ...]:
    """Return every value of `--to`."""
    return (*FOLDERS, *(name for name in FORMATS if name != READ_ONLY))


CONFIGS = ("transformers4",)
"""The values of `--config`: the oldest library that has to read config.json and the tokenizer's files.

By default, gptkit writes the fields that transformers 5 reads. See `compatibility` for the others."""


@dataclass(frozen=True, slots=True)
class Target:
    """A format in which a checkpoint can be written."""

    kind: str
    """gptkit's own format ("local"), Hugging Face files ("hf"), or one of `FORMATS`."""
    family: str | None = None
    """The family of Hugging Face files. None means that of the original, "auto" the first that can store the model."""
    config: str | None = None
    """One of `CONFIGS`, or None if only transformers 5 has to read the files."""

    def __str__(self) -> str:
        name = self.kind if self.family is None else f"{self.kind}:{self.family}"
        return name if self.config is None else f"{name}@{self.config}"


def with_config(to: str, config: str | None) -> str:
    """Return the name of an output format with a form of config (`--config`), or `to` itself if `config` is None.

    Raises UsageError if there is no such form, or if the format has no config.json.
    """
    if config is None:
        return to
    if config not in CONFIGS:
        raise UsageError(f"--config {shown(config, 40)}: gptkit does not know this form", _FORMS)
    name = to.partition("@")[0]
    if name.partition(":")[0] != "hf":
        raise UsageError(
            f"--config {config} works only with Hugging Face files, not with the format {shown(name, 40)}",
            "Use the format hf or hf:FAMILY, such as hf:llama.",
        )
    return f"{name}@{config}"


_FORMS = f"Choose one of: {', '.join(CONFIGS)}. Without --config, transformers 5 can read the files."


def target(to: str | Target, known: Sequence[str] | None = None) -> Target:
    """Parse the name of an output format.

    `known` are the allowed names, by default all of them. Raises UsageError; UnknownFamily for "hf:NAME" if there is no
    family of this name.
    """
    if isinstance(to, Target):
        return to
    from ..architectures import ARCHITECTURES, named

    known = targets() if known is None else known
    name, at, config = to.partition("@")
    if at:
        with_config(name, config)
    kind, _, family = name.partition(":")
    if kind == "hf" and family:
        return Target("hf", family if family == "auto" else named(family).name, config or None)
    if name in known:
        return Target(name, config=config or None)
    hint = f"Choose one of {', '.join(known)}." + (
        " gptkit convert can convert the result to other formats." if known == FOLDERS else ""
    )
    raise UsageError(f"unknown format {to!r}", f"Did you mean hf:{to}?" if to in ARCHITECTURES else hint)
