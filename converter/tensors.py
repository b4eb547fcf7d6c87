"""A checkpoint: a tree, and where in its files every shared tensor lies (`checkpoint.open_checkpoint` opens one)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np

from ..architectures import Architecture, BoundLeaf, named
from ..architectures.layout import IDENTITY
from ..components import ModelSpec
from ..display import Shown
from .safetensors import DTYPES
from .tree import Origin
from .weights import Weights


class Tree(Protocol):
    """A tree and its tensors by shared name, whether they lie in files (a `Checkpoint`) or are made when asked for."""

    spec: ModelSpec

    def tensor(self, name: str) -> tuple[np.ndarray, str]:
        """A tensor to be read only: (array in its carrier dtype, dtype)."""
        ...

    def release(self) -> None:
        """Let go of what reading brought into memory (pages of mapped files)."""
        ...


@dataclass
class Checkpoint(Shown):
    """An opened checkpoint.

    Attributes:
        reference, path, revision: what was asked for, where it lies, and the commit if it came from the hub.
        format: "hf", "local" for gptkit's own, or the name of another (`converter.formats`).
        spec: the tree.
        leaves: the files' tensors, each with the shared tensors it holds.
        dtype: the dtype to compute in unless told otherwise, by safetensors' name.
        dtypes: each leaf's stored dtype, by its checkpoint name.
        notes: what a person should know: buffers dropped, a head stored twice, unknown config fields.
        texts: small files that the weight file holds inside (a tokenizer in a GGUF), by name.
        missing: shared tensors of the tree that the files lack; none unless it was opened as a `partial` one.
        extra: the leaves of `leaves` that have no place in the tree, under their own names; none unless `partial`.
    """

    reference: str
    path: Path
    revision: str | None
    format: str
    spec: ModelSpec
    leaves: list[BoundLeaf]
    dtype: str
    origin: Origin
    notes: list[str] = field(default_factory=list)
    files: tuple[Path, ...] = ()
    texts: Mapping[str, bytes] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    extra: tuple[BoundLeaf, ...] = ()
    _weights: Weights = field(repr=False, default=None)  # type: ignore[assignment]
    _found: dict[str, str] = field(repr=False, default_factory=dict)

    def __repr__(self) -> str:
        layers = f"{len(self.spec.blocks):,} layers"
        return f"<checkpoint {self.reference} ({self.format}): {len(self.leaves):,} tensors, {layers}>"

    @property
    def folder(self) -> Path:
        """Where the files that travel with the weights lie."""
        return self.path if self.path.is_dir() else self.path.parent

    @property
    def architecture(self) -> Architecture | None:
        """The family it belongs or belonged to."""
        return None if self.origin.family is None else named(self.origin.family)

    @property
    def dtypes(self) -> dict[str, str]:
        """Each leaf's stored dtype, by its checkpoint name."""
        return {leaf.checkpoint: self.dtype_of(leaf) for leaf in self.leaves}

    def dtype_of(self, leaf: BoundLeaf) -> str:
        """The stored dtype of a leaf's tensor."""
        return self._weights.info[self._found[leaf.checkpoint]][0]

    @property
    def fetched(self) -> bool:
        """Whether the weights can be read; with headers alone they cannot."""
        return self._weights.fetched

    def nbytes_of(self, leaf: BoundLeaf) -> int:
        """The bytes of a leaf's tensor in its carrier dtype."""
        return math.prod(leaf.shape) * DTYPES[self.dtype_of(leaf)].itemsize

    def stored_of(self, leaf: BoundLeaf) -> tuple[str, int]:
        """A leaf's element type in its file, which for quantised ones is their format's own, and its bytes there."""
        return self._weights.blocks.get(self._found[leaf.checkpoint]) or (self.dtype_of(leaf), self.nbytes_of(leaf))

    def span(self, leaf: BoundLeaf) -> tuple[Path, int] | None:
        """The file that holds a leaf's tensor byte for byte, and where it begins; None where it is made on reading."""
        return self._weights.span(self._found[leaf.checkpoint])

    def read(self, leaf: BoundLeaf) -> np.ndarray:
        """A leaf's tensor as it lies in its file, in the carrier dtype; a memory-mapped view where it can be."""
        return self._weights.read(self._found[leaf.checkpoint])

    def release(self) -> None:
        """Give pages of the files that were read back to the system, where memory is short."""
        self._weights.release()

    def tensors(self) -> Iterator[tuple[str, np.ndarray, str]]:
        """Every shared tensor in the files' order: (shared name, array in its carrier dtype, dtype)."""
        for leaf in self.leaves:
            dtype = self.dtype_of(leaf)
            for name, array in zip(leaf.shared, leaf.to_shared(self.read(leaf)), strict=True):
                yield name, array, dtype

    def tensor(self, name: str) -> tuple[np.ndarray, str]:
        """One shared tensor: (array in its carrier dtype, dtype)."""
        leaf = self._holder[name]
        return leaf.to_shared(self.read(leaf))[leaf.shared.index(name)], self.dtype_of(leaf)

    @cached_property
    def _holder(self) -> dict[str, BoundLeaf]:
        """Shared name -> the leaf that holds it."""
        return {name: leaf for leaf in self.leaves for name in leaf.shared}

    def shared_dtypes(self) -> dict[str, str]:
        """Every shared tensor's stored dtype."""
        return {name: self.dtype_of(leaf) for leaf in self.leaves for name in leaf.shared}


def identity_leaves(spec: ModelSpec) -> list[BoundLeaf]:
    """The leaves of gptkit's own format: every shared tensor under its own name."""
    return [
        BoundLeaf(parameter.name, parameter.shape, (parameter.name,), (parameter.shape,), IDENTITY, {})
        for parameter in spec.parameters()
    ]
