"""File formats beside Hugging Face folders and gptkit's own: a module each, imported when one is met or asked for.

A format that can be read tells whether a path is one of its files, what tree lies there (from headers alone), and
where each tensor is. One that can be written turns a tree into a plan: the files, their headers, every tensor's place.
How its tensors are named and laid out is declared as leaves, as the families' own checkpoints are (`architectures`).
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


@dataclass(frozen=True)
class Opened:
    """What a format finds in its files.

    origin: family, and a config.json for it made from what the files say, so that every other command can go on.
    leaves: the files' tensors by their own names, or by the names of `architecture`, whose checkpoints may have older
    ones, buffers, and a tied head that was stored; texts: small files that lie inside (tokenizer.json, …), by name;
    format: whose it turned out to be, where only what is in the files says so; home: the folder that the model's
    tokenizer files lie in, where that is not told by the format.
    """

    spec: ModelSpec
    origin: Origin
    leaves: list[BoundLeaf]
    weights: Weights
    files: tuple[Path, ...]
    texts: Mapping[str, bytes] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    architecture: Architecture | None = None
    format: str = ""
    home: Path | None = None


@dataclass(frozen=True)
class Request:
    """What a format is asked to write; `asked` is --dtype in the user's words, `companions` lie beside the source."""

    source: Checkpoint
    asked: str | None
    companions: tuple[Companion, ...]
    max_shard_bytes: int


class Format(Protocol):
    """A module of this folder. `plan` is None for formats that are only read, `read` for those only written.

    One whose files tell their tensors whatever model they are of has `tensors`, from a path to `Weights`, as well.
    """

    finds: Callable[[Path, frozenset[str] | None], Path | None] | None
    """What of a path is of this format, by names and first bytes: a file itself (the names of a folder's files are None
    then), the one in a folder, or the folder; None where nothing is. What it gives is what `describe` and `read` get.
    """
    describe: Callable[[Path], tuple[ModelSpec, Origin, list[str]]] | None
    """The tree, where it came from, and fields that are not understood; without numpy or torch where that can be."""
    read: Callable[[Path, bool], Opened] | None
    """Opens it, reading headers alone; the second argument is allow_pickle."""
    plan: Callable[[Request], FolderPlan] | None


def format_named(name: str) -> Format:
    """A format by its name, which is one of `targets.FORMATS`."""
    module, _, inside = FORMATS[name].partition(":")
    found = importlib.import_module(module)
    format_: Format = getattr(found, inside) if inside else found
    return format_
