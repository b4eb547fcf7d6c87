"""File formats other than Hugging Face folders and gptkit's own, one module per format.

A module is imported only when its format is needed. A format that can be read recognises its files, reads the tree
from their headers, and says where every tensor is. A format that can be written turns a tree into a plan: the files,
their headers, and the place of every tensor. Its leaves declare the names and layouts of its tensors, as those of a
family do (`architectures`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ...architectures import Architecture, BoundLeaf
from ...components import ModelSpec
from ..companions import Companion
from ..targets import FORMATS

if TYPE_CHECKING:
    from ..tree import Origin
    from ..weights import Checkpoint, Weights
    from ..write import FolderPlan


ALL_RANKS = "Put the files of all ranks of one training step into the folder, and no other files."
"""The hint for a checkpoint of several ranks whose files do not fit."""


@dataclass(frozen=True)
class Opened:
    """A checkpoint of another format whose headers were read."""

    spec: ModelSpec
    origin: Origin
    """The family, and a config.json for it that is made from the files' metadata."""
    leaves: list[BoundLeaf]
    """The leaves of the tree. Their names are those in the files, or in `architecture`."""
    weights: Weights
    files: tuple[Path, ...]
    texts: Mapping[str, bytes] = field(default_factory=dict)
    """The small files that are stored inside the weight file (tokenizer.json, …), by name."""
    notes: list[str] = field(default_factory=list)
    architecture: Architecture | None = None
    """The family whose tensor names the files have. Its older names, buffers and a tied head are then allowed too."""
    format: str = ""
    """The name of the format, if only the content of the files shows it."""
    home: Path | None = None
    """The folder of the tokenizer files, if the format does not determine it."""


@dataclass(frozen=True)
class Request:
    """A checkpoint to be written in another format."""

    source: Checkpoint
    asked: str | None
    """The value of --dtype."""
    companions: tuple[Companion, ...]
    """The other files of the source's folder, such as those of the tokenizer."""
    max_shard_bytes: int


class Format(Protocol):
    """A module of this folder. `plan` is None if the format is only read, and `read` is None if it is only written.

    A module may also have `tensors`, which maps a path to the `Weights` of a file of any architecture.
    """

    finds: Callable[[Path, frozenset[str] | None], Path | None] | None
    """Return the path to give to `describe` and `read`: the file itself, a file in the folder, or the folder.

    It gets the path and, for a folder, the names of the files in it (None for a file). It looks at names and first
    bytes, and returns None if nothing is of this format.
    """
    describe: Callable[[Path], tuple[ModelSpec, Origin, list[str]]] | None
    """Return the tree, its origin, and the fields that are not understood, without numpy or torch if possible."""
    read: Callable[[Path, bool], Opened] | None
    """Open the files and read only their headers; the second argument is allow_pickle."""
    plan: Callable[[Request], FolderPlan] | None


def format_named(name: str) -> Format:
    """Return the format of this name, which is one of `targets.FORMATS`."""
    module, _, inside = FORMATS[name].partition(":")
    loaded = importlib.import_module(module)
    format_: Format = getattr(loaded, inside) if inside else loaded
    return format_
