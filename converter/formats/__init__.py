"""File formats other than Hugging Face folders and gptkit's own, one module per format.

A module is imported only when its format is needed. A format that can be read recognises its files, reads the model's
tree of components from their headers, and says where every tensor is. A format that can be written turns a tree into a
plan: the files, their headers, and the place of every tensor. Every format has a table of its tensors (leaves), as
every model family does (`architectures`): the names of the tensors, the parameters in them and the order of their axes.
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
"""The hint in errors about a checkpoint of several ranks whose files do not match."""


@dataclass(frozen=True)
class Opened:
    """A checkpoint whose headers were read."""

    spec: ModelSpec
    """The tree of components."""
    origin: Origin
    """The model family, and its config.json, which may be made from the metadata in the files."""
    leaves: list[BoundLeaf]
    """The tensors that the model needs, under the names that the format or `architecture` uses."""
    weights: Weights
    """All tensors in the files."""
    files: tuple[Path, ...]
    texts: Mapping[str, bytes] = field(default_factory=dict)
    """The small files that are stored inside the weight file (tokenizer.json, …), by name."""
    notes: list[str] = field(default_factory=list)
    architecture: Architecture | None = None
    """The family whose tensor names the files have; None if the names are those of the format.

    With a family, the files may also have its older tensor names, buffers, and a copy of a tied head.
    """
    format: str = ""
    """The name of the format, if it was recognised by the content of the files; otherwise empty."""
    home: Path | None = None
    """The folder of the tokenizer's files, if it is not the folder or file that was opened."""


@dataclass(frozen=True)
class Request:
    """A checkpoint that will be written in another format."""

    source: Checkpoint
    asked: str | None
    """The value of --dtype; None keeps the stored dtypes."""
    companions: tuple[Companion, ...]
    """The other files of the source's folder, such as those of the tokenizer."""
    max_shard_bytes: int
    """The largest size of a weight file in bytes."""


class Format(Protocol):
    """The functions that a module of this folder has. `plan` is None if gptkit cannot write the format.

    The other three are None if gptkit cannot read it. A module may also have a function `tensors`. It returns the
    `Weights` of a file, also if gptkit does not know the model's architecture.
    """

    finds: Callable[[Path, frozenset[str] | None], Path | None] | None
    """Return the path to give to `describe` and `read`, or None if the file or folder is not of this format.

    The returned path is the given file, a file in the given folder, or the folder. The second argument has the names of
    the files in the folder; it is None for a file. A format is recognised by file names and the first bytes of files.
    """
    describe: Callable[[Path], tuple[ModelSpec, Origin, list[str]]] | None
    """Return the tree of components, its origin, and the names of config fields that gptkit does not know.

    If possible, this imports neither numpy nor torch.
    """
    read: Callable[[Path, bool], Opened] | None
    """Open the files and read only their headers. The second argument is `allow_pickle`."""
    plan: Callable[[Request], FolderPlan] | None
    """Plan the files of a checkpoint in this format."""


def format_named(name: str) -> Format:
    """Return the format of this name, which is one of `targets.FORMATS`."""
    module, _, inside = FORMATS[name].partition(":")
    loaded = importlib.import_module(module, __package__)
    format_: Format = getattr(loaded, inside) if inside else loaded
    return format_
