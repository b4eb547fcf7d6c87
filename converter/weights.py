"""Give access to the tensors of a checkpoint's files by their names: dtype, shape, place in the file, and values.

Files are memory-mapped when they are first read. They must not be truncated while an array that views them is in use:
the system answers a read past a file's end with SIGBUS.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Collection, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np

from ..architectures import Architecture, BoundLeaf, named
from ..architectures.base import CARRIED
from ..architectures.layout import IDENTITY
from ..components import ModelSpec, Shape
from ..components.ranges import some_of
from ..display import Shown
from ..errors import CheckpointError, shown
from .dtypes import F8, FLOATS, INTEGERS, parse_dtype
from .index import Stored as Stored
from .safetensors import DTYPES
from .tree import Origin

PIECE = 1 << 19
"""Bytes of a tensor that are computed at a time on reading. They stay in a core's cache until they are written."""


class Weights:
    """The tensors of files.

    `info` has the dtype and shape that a tensor has when it is read, by name. `blocks` has the type and the number of
    bytes in the file of tensors whose values are computed on reading. `fetched` is False if only the headers were
    downloaded.
    """

    def __init__(self, tensors: Mapping[str, Stored], fetched: bool = True) -> None:
        self.fetched = fetched
        self.info = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
        self.blocks = {name: (stored.kind, stored.nbytes) for name, stored in tensors.items() if stored.kind}
        self._tensors = dict(tensors)
        self._maps: dict[Path, mmap.mmap] = {}
        self._ends: dict[Path, int] = {}  # the least size of every file
        for stored in tensors.values():
            if stored.path is not None:
                self._ends[stored.path] = max(self._ends.get(stored.path, 0), stored.start + stored.nbytes)

    def check(self) -> None:
        """Raise CheckpointError if a tensor claims more bytes than its file has."""
        for name, tensor in self._tensors.items():
            where = f"{tensor.path}: {shown(name, 80)}"
            if tensor.count * tensor.itemsize > tensor.nbytes:
                raise CheckpointError(
                    f"{where} should have {tensor.count:,} elements, but the file is too short for them"
                )
            if tensor.count and (tensor.offset + tensor.reach) * tensor.itemsize > tensor.nbytes:
                raise CheckpointError(f"{where}: its shape needs more bytes than the file has for this tensor")
            if tensor.path is not None:
                self._mapped(tensor.path)

    def with_more(self, tensors: Mapping[str, Stored], alone: bool = False, without: Collection[str] = ()) -> Weights:
        """Return the weights with more tensors.

        `info` then lists all tensors except `without`; with `alone` only the new ones. Tensors that it does not list
        can still be read.
        """
        more = copy(self)
        more._tensors = {**self._tensors, **tensors}
        info = {name: (stored.dtype, stored.shape) for name, stored in tensors.items()}
        more.info = (
            info if alone else {name: stored for name, stored in (self.info | info).items() if name not in without}
        )
        more.blocks = self.blocks | {
            name: (stored.kind, stored.nbytes) for name, stored in tensors.items() if stored.kind
        }
        more._ends = dict(self._ends)
        for stored in tensors.values():
            if stored.path is not None:
                more._ends[stored.path] = max(more._ends.get(stored.path, 0), stored.start + stored.nbytes)
        return more

    def some(self, names: Iterable[str]) -> dict[str, Stored]:
        """Return where these tensors are stored, by name."""
        return {name: self._tensors[name] for name in names}

    def numeric(self) -> Weights:
        """Return the same weights, but tensors of types that fp64 cannot represent become tensors of bytes."""
        other_types = {
            name: stored for name, stored in self._tensors.items() if stored.dtype not in (*FLOATS, *INTEGERS, *F8)
        }
        as_bytes = {
            name: replace(stored, dtype="U8", shape=(stored.nbytes,), kind=stored.dtype)
            for name, stored in other_types.items()
        }
        return self.with_more(as_bytes)

    def place(self, name: str) -> tuple[Path, int]:
        """Return a tensor's file, and the offset of its first byte. A tensor that is in no file has an empty path."""
        tensor = self._tensors[name]
        return tensor.path or Path(), tensor.place

    def span(self, name: str) -> tuple[Path, int] | None:
        """Return the file and first byte of a tensor that is stored unchanged and contiguous, so that its bytes can be
        copied.

        Return None for any other tensor.
        """
        tensor = self._tensors[name]
        plain = tensor.path is not None and tensor.decode is None and tensor.pieces is None and tensor.contiguous
        return self.place(name) if plain else None

    def read(self, name: str) -> np.ndarray:
        """Return the tensor in its carrier dtype (bf16 as uint16), if possible as a read-only view of its file."""
        if not self.fetched:
            raise RuntimeError(f"{name}: only the headers of this checkpoint were fetched")
        tensor = self._tensors[name]
        carrier, itemsize = DTYPES[tensor.dtype].carrier, tensor.itemsize
        if tensor.pieces is not None:
            whole, at = np.empty(tensor.count, carrier), 0
            for piece in tensor.pieces(PIECE):
                whole[at : at + piece.size] = piece.reshape(-1)
                at += piece.size
            return whole.reshape(tensor.shape)
        if tensor.path is None and tensor.decode is not None:
            return tensor.decode(np.empty(0, np.uint8))
        if tensor.path is None or not tensor.count:
            zeros = np.zeros(tensor.shape, carrier)
            zeros.flags.writeable = False
            return zeros
        data = self._mapped(tensor.path)
        if tensor.decode is not None:
            with np.errstate(all="ignore"):  # infinite scales and NaN are reported where they matter
                return tensor.decode(np.frombuffer(data, np.uint8, tensor.nbytes, tensor.start)).reshape(tensor.shape)
        flat = np.frombuffer(data, carrier, tensor.reach, tensor.place)
        flat.flags.writeable = False
        if tensor.contiguous:
            return flat.reshape(tensor.shape)
        strides = [stride * itemsize for stride in tensor.strides or ()]
        return np.ascontiguousarray(np.lib.stride_tricks.as_strided(flat, tensor.shape, strides, writeable=False))

    def pieces(self, name: str) -> Iterator[np.ndarray] | None:
        """Yield a dequantised tensor in contiguous pieces of whole rows.

        Return None for any other tensor, which `read` returns as a view or computes at once.
        """
        make = self._tensors[name].pieces
        return None if make is None else make(PIECE)

    def same(self, name: str, other: str) -> bool:
        """Return whether two tensors have the same bytes. So NaN equals NaN, and -0 differs from 0."""
        if self.info[name] != self.info[other]:
            return False
        if self.span(name) == self.span(other) is not None:
            return True
        rows = 4096  # a few MB at a time: neither tensor is ever in memory as a whole
        ours, theirs = np.atleast_1d(self.read(name)), np.atleast_1d(self.read(other))

        def part(array: np.ndarray, start: int) -> np.ndarray:
            return np.ascontiguousarray(array[start : start + rows]).view(np.uint8)

        return all(np.array_equal(part(ours, start), part(theirs, start)) for start in range(0, len(ours), rows))

    def _mapped(self, path: Path) -> mmap.mmap:
        if path not in self._maps:
            try:
                with path.open("rb") as file:
                    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except (OSError, ValueError) as error:
                raise CheckpointError(f"cannot map {path} into memory: {error}") from error
            if len(mapped) < self._ends[path]:
                raise CheckpointError(f"{path} is truncated: {self._ends[path]} bytes expected, {len(mapped)} found")
            self._maps[path] = mapped
        return self._maps[path]

    def release(self, name: str | None = None) -> None:
        """Release the memory of pages that were read, of all files or of one tensor. Views stay valid: they read the
        pages again.
        """
        if name is None:
            parts = [(mapped, 0, len(mapped)) for mapped in list(self._maps.values())]  # other threads may map more
        else:
            tensor = self._tensors[name]
            start = tensor.start // mmap.PAGESIZE * mmap.PAGESIZE
            mapped = None if tensor.path is None else self._maps.get(tensor.path)
            parts = [] if mapped is None else [(mapped, start, tensor.start + tensor.nbytes - start)]
        for mapped, start, nbytes in parts:
            if hasattr(mapped, "madvise") and nbytes:
                mapped.madvise(mmap.MADV_DONTNEED, start, nbytes)


class Tree(Protocol):
    """A tree, and its tensors by shared name. They are read from files (`Checkpoint`) or computed on request."""

    spec: ModelSpec

    def tensor(self, name: str) -> tuple[np.ndarray, str]:
        """Return a read-only tensor: (array in its carrier dtype, dtype)."""
        ...

    def release(self) -> None:
        """Release the memory that reading used (pages of mapped files)."""
        ...


@dataclass(kw_only=True)
class TensorFiles:
    """The tensors of weight files, by the names in the files.

    Attributes:
        reference, path, revision: what the user gave, the local path, and the commit if it came from the hub.
        format: "hf", "local" for gptkit's own, or the name of another (`converter.formats`).
        leaves: the tensors, each with the shared tensors that it stores; without a known family, each stores itself.
        origin: where they come from, with the text of their config.json.
        notes: notes for the user, such as dropped buffers, a head stored twice or unknown config fields.
        texts: small files stored inside the weight file (a tokenizer in a GGUF), by name.
        home: the folder of the tokenizer's files, if it is not the folder that was opened.
    """

    reference: str
    path: Path
    revision: str | None
    format: str
    leaves: list[BoundLeaf]
    origin: Origin
    notes: list[str] = field(default_factory=list)
    files: tuple[Path, ...] = ()
    texts: Mapping[str, bytes] = field(default_factory=dict)
    home: Path | None = None
    _weights: Weights = field(repr=False, default=None)  # type: ignore[assignment]
    _names: dict[str, str] = field(repr=False, default_factory=dict)

    def __repr__(self) -> str:
        return f"<tensors of {self.reference} ({self.format}): {len(self.leaves):,}>"

    @property
    def folder(self) -> Path:
        """Return the folder of the tokenizer and other files of the model."""
        return self.home or (self.path if self.path.is_dir() else self.path.parent)

    @property
    def dtypes(self) -> dict[str, str]:
        """Return every leaf's stored dtype, by its checkpoint name."""
        return {leaf.checkpoint: self.dtype_of(leaf) for leaf in self.leaves}

    def dtype_of(self, leaf: BoundLeaf) -> str:
        return self._weights.info[self._names[leaf.checkpoint]][0]

    @property
    def fetched(self) -> bool:
        """Return whether the weights can be read; False if only the headers were downloaded."""
        return self._weights.fetched

    def nbytes_of(self, leaf: BoundLeaf) -> int:
        """Return the size in bytes of a leaf's tensor in its carrier dtype."""
        return math.prod(leaf.shape) * DTYPES[self.dtype_of(leaf)].itemsize

    def stored_of(self, leaf: BoundLeaf) -> tuple[str, int]:
        """Return the element type and the number of bytes of a leaf's tensor in its file.

        A quantised tensor has a type of its format, such as GGUF's Q8_0.
        """
        return self._weights.blocks.get(self._names[leaf.checkpoint]) or (self.dtype_of(leaf), self.nbytes_of(leaf))

    def span(self, leaf: BoundLeaf) -> tuple[Path, int] | None:
        """Return the file and first byte of a leaf's tensor if its bytes can be copied, else None (`Weights.span`)."""
        return self._weights.span(self._names[leaf.checkpoint])

    def read(self, leaf: BoundLeaf) -> np.ndarray:
        """Return a leaf's tensor as stored, in the carrier dtype, if possible as a memory-mapped view."""
        return self._weights.read(self._names[leaf.checkpoint])

    def pieces(self, leaf: BoundLeaf) -> Iterator[np.ndarray] | None:
        """Yield a leaf's dequantised tensor in pieces of whole rows. Return None for any other tensor, as
        `Weights.pieces`.
        """
        return self._weights.pieces(self._names[leaf.checkpoint])

    def release(self, leaf: BoundLeaf | None = None) -> None:
        """Release the memory of pages that were read, of all files or of one leaf."""
        self._weights.release(None if leaf is None else self._names[leaf.checkpoint])

    def tensors(self) -> Iterator[tuple[str, np.ndarray, str]]:
        """Yield every shared tensor in the order of the files: (shared name, array in its carrier dtype, dtype)."""
        for leaf in self.leaves:
            dtype = self.dtype_of(leaf)
            for name, array in zip(leaf.shared, leaf.to_shared(self.read(leaf)), strict=True):
                yield name, array, dtype

    def tensor(self, name: str) -> tuple[np.ndarray, str]:
        """Return one shared tensor: (array in its carrier dtype, dtype)."""
        leaf = self._holder[name]
        return leaf.to_shared(self.read(leaf))[leaf.shared.index(name)], self.dtype_of(leaf)

    @cached_property
    def _holder(self) -> dict[str, BoundLeaf]:
        """Return, for every shared name, the leaf that stores it."""
        return {name: leaf for leaf in self.leaves for name in leaf.shared}

    def shared_dtypes(self, asked: str | None = None) -> dict[str, str]:
        """Return the dtype of every shared tensor: `asked`, or by default the stored one."""
        all_of_them = None if asked is None else parse_dtype(asked)
        kept = {leaf.checkpoint for leaf in getattr(self, "carried_leaves", ()) if self.dtype_of(leaf) not in FLOATS}
        return {
            name: self.dtype_of(leaf) if all_of_them is None or leaf.checkpoint in kept else all_of_them
            for leaf in self.leaves
            for name in leaf.shared
        }


@dataclass(kw_only=True)
class Checkpoint(TensorFiles, Shown):
    """An opened checkpoint of a family, or of a tree.

    Attributes:
        spec: the tree.
        dtype: the default dtype to compute in, by safetensors' name.
        missing: shared tensors of the tree that the files lack; only with `partial`.
        extra: leaves in `leaves` that have no place in the tree, under their own names; only with `partial`.
        carried: tensors that gptkit does not compute but conversions copy, by group; not in `leaves`.
    """

    spec: ModelSpec
    dtype: str
    missing: tuple[str, ...] = ()
    extra: tuple[BoundLeaf, ...] = ()
    carried: Mapping[str, tuple[BoundLeaf, ...]] = field(default_factory=dict)

    def __repr__(self) -> str:
        layers = f"{len(self.spec.blocks):,} layers"
        return f"<checkpoint {self.reference} ({self.format}): {len(self.leaves):,} tensors, {layers}>"

    @property
    def carried_leaves(self) -> tuple[BoundLeaf, ...]:
        """The leaves in `carried`."""
        return tuple(leaf for leaves in self.carried.values() for leaf in leaves)

    @property
    def carried_notes(self) -> list[str]:
        """Return one line of text for every group of tensors that are copied along."""
        lines = []
        for group, leaves in self.carried.items():
            number = sum(math.prod(leaf.shape) for leaf in leaves)
            names = some_of([leaf.checkpoint for leaf in leaves], 3, ", …")
            lines.append(
                f"{number:,} parameters that {CARRIED[group]} ({group}), which gptkit does not compute: {names}"
            )
        return lines

    @property
    def architecture(self) -> Architecture | None:
        """Return the family that the checkpoint came from, or None without one."""
        return None if self.origin.family is None else named(self.origin.family)


def identity_leaves(spec: ModelSpec) -> list[BoundLeaf]:
    """Return the leaves of gptkit's own format: every shared tensor under its own name."""
    return own_leaves((parameter.name, parameter.shape) for parameter in spec.parameters())


def own_leaves(shapes: Iterable[tuple[str, Shape]]) -> list[BoundLeaf]:
    """Return a leaf for each tensor, which stores it under its own name and in its own shape."""
    return [BoundLeaf(name, shape, (name,), (shape,), IDENTITY, {}) for name, shape in shapes]
