"""Tensors by the name they have in a checkpoint's files: what each is, where its bytes lie, the array that it is.

Files are memory-mapped when they are first read from. They must not be truncated while an array of theirs is in use:
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
"""Bytes of a tensor that are made at a time, of what is made on reading: they stay in a core's cache until written."""


class Weights:
    """The tensors of files. info: each one's dtype, once read, and shape. blocks: of those made on reading, type and
    bytes in the file. fetched: whether the files are here, or only headers.
    """

    def __init__(self, tensors: Mapping[str, Stored], fetched: bool = True) -> None:
        self.fetched = fetched
        self.info = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
        self.blocks = {name: (each.kind, each.nbytes) for name, each in tensors.items() if each.kind}
        self._tensors = dict(tensors)
        self._maps: dict[Path, mmap.mmap] = {}
        self._ends: dict[Path, int] = {}  # what each file has at least
        for each in tensors.values():
            if each.path is not None:
                self._ends[each.path] = max(self._ends.get(each.path, 0), each.start + each.nbytes)

    def check(self) -> None:
        """Raise CheckpointError where a tensor claims more than its file has."""
        for name, tensor in self._tensors.items():
            where = f"{tensor.path}: {shown(name, 80)}"
            if tensor.count * tensor.itemsize > tensor.nbytes:
                raise CheckpointError(f"{where} should have {tensor.count:,} elements, but the file ends before them")
            if tensor.count and (tensor.offset + tensor.reach) * tensor.itemsize > tensor.nbytes:
                raise CheckpointError(f"{where}: its shape needs more bytes than the file has for it")
            if tensor.path is not None:
                self._mapped(tensor.path)

    def with_more(self, tensors: Mapping[str, Stored], alone: bool = False, without: Collection[str] = ()) -> Weights:
        """The same, and these; with `alone` no others are told, and never those `without` which it is to be."""
        more = copy(self)
        more._tensors = {**self._tensors, **tensors}
        info = {name: (each.dtype, each.shape) for name, each in tensors.items()}
        more.info = info if alone else {name: each for name, each in (self.info | info).items() if name not in without}
        more.blocks = self.blocks | {name: (each.kind, each.nbytes) for name, each in tensors.items() if each.kind}
        more._ends = dict(self._ends)
        for each in tensors.values():
            if each.path is not None:
                more._ends[each.path] = max(more._ends.get(each.path, 0), each.start + each.nbytes)
        return more

    def some(self, names: Iterable[str]) -> dict[str, Stored]:
        """Return where these tensors are stored, by name."""
        return {name: self._tensors[name] for name in names}

    def numeric(self) -> Weights:
        """The same, every tensor of numbers that fp64 holds: one of any other type is the bytes that it has."""
        apart = {name: each for name, each in self._tensors.items() if each.dtype not in (*FLOATS, *INTEGERS, *F8)}
        as_bytes = {
            name: replace(each, dtype="U8", shape=(each.nbytes,), kind=each.dtype) for name, each in apart.items()
        }
        return self.with_more(as_bytes)

    def place(self, name: str) -> tuple[Path, int]:
        """The file that holds the tensor, and where in it the tensor begins; of what lies nowhere no file."""
        tensor = self._tensors[name]
        return tensor.path or Path(), tensor.place

    def span(self, name: str) -> tuple[Path, int] | None:
        """The same of a tensor whose bytes lie there as `info` says they are, None for any other."""
        tensor = self._tensors[name]
        plain = tensor.path is not None and tensor.decode is None and tensor.pieces is None and tensor.contiguous
        return self.place(name) if plain else None

    def read(self, name: str) -> np.ndarray:
        """The tensor in its carrier dtype (bf16 as uint16), a read-only view of its file where it can be."""
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
            with np.errstate(all="ignore"):  # scales that are infinite or not numbers are told where they matter
                return tensor.decode(np.frombuffer(data, np.uint8, tensor.nbytes, tensor.start)).reshape(tensor.shape)
        flat = np.frombuffer(data, carrier, tensor.reach, tensor.place)
        flat.flags.writeable = False
        if tensor.contiguous:
            return flat.reshape(tensor.shape)
        strides = [stride * itemsize for stride in tensor.strides or ()]
        return np.ascontiguousarray(np.lib.stride_tricks.as_strided(flat, tensor.shape, strides, writeable=False))

    def pieces(self, name: str) -> Iterator[np.ndarray] | None:
        """The tensor some whole rows at a time, each contiguous; None where it is a view, or made at once."""
        make = self._tensors[name].pieces
        return None if make is None else make(PIECE)

    def same(self, name: str, other: str) -> bool:
        """Whether two tensors hold the same bytes, so that NaN equals NaN and -0 is not 0."""
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
        """Give the pages that were read back to the system, of all files or of the bytes that a tensor is made of;
        views stay valid and read them again.
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
    """A tree and its tensors by shared name, whether they lie in files (a `Checkpoint`) or are made when asked for."""

    spec: ModelSpec

    def tensor(self, name: str) -> tuple[np.ndarray, str]:
        """A tensor to be read only: (array in its carrier dtype, dtype)."""
        ...

    def release(self) -> None:
        """Let go of what reading brought into memory (pages of mapped files)."""
        ...


@dataclass(kw_only=True)
class TensorFiles:
    """The tensors of weight files by the names that they have, whatever they compute.

    Attributes:
        reference, path, revision: what was asked for, where it lies, and the commit if it came from the hub.
        format: "hf", "local" for gptkit's own, or the name of another (`converter.formats`).
        leaves: the files' tensors, each with the shared tensors it holds; those of no known family hold themselves.
        origin: where they come from, with the text of their config.json.
        notes: what a person should know: buffers dropped, a head stored twice, unknown config fields.
        texts: small files that the weight file holds inside (a tokenizer in a GGUF), by name.
        home: the folder of the model's tokenizer files, where what was opened is not known to be it.
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
    _found: dict[str, str] = field(repr=False, default_factory=dict)

    def __repr__(self) -> str:
        return f"<tensors of {self.reference} ({self.format}): {len(self.leaves):,}>"

    @property
    def folder(self) -> Path:
        """Where the files that travel with the weights lie."""
        return self.home or (self.path if self.path.is_dir() else self.path.parent)

    @property
    def dtypes(self) -> dict[str, str]:
        """Each leaf's stored dtype, by its checkpoint name."""
        return {leaf.checkpoint: self.dtype_of(leaf) for leaf in self.leaves}

    def dtype_of(self, leaf: BoundLeaf) -> str:
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

    def pieces(self, leaf: BoundLeaf) -> Iterator[np.ndarray] | None:
        """The same some whole rows at a time, of what can be made so; None where it is a view, or made at once."""
        return self._weights.pieces(self._found[leaf.checkpoint])

    def release(self, leaf: BoundLeaf | None = None) -> None:
        """Give pages of the files that were read back to the system, or of one leaf's bytes, where memory is short."""
        self._weights.release(None if leaf is None else self._found[leaf.checkpoint])

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

    def shared_dtypes(self, asked: str | None = None) -> dict[str, str]:
        """Every shared tensor's dtype: its stored one, or the one that is asked for, in the user's words."""
        all_of_them = None if asked is None else parse_dtype(asked)
        kept = {leaf.checkpoint for leaf in getattr(self, "beside", ()) if self.dtype_of(leaf) not in FLOATS}
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
        dtype: the dtype to compute in unless told otherwise, by safetensors' name.
        missing: shared tensors of the tree that the files lack; none unless it was opened as a `partial` one.
        extra: the leaves of `leaves` that have no place in the tree, under their own names; none unless `partial`.
        carried: tensors that are not computed and that conversions carry along, by their group: not in `leaves`.
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
    def beside(self) -> tuple[BoundLeaf, ...]:
        """All that is carried along."""
        return tuple(leaf for leaves in self.carried.values() for leaf in leaves)

    @property
    def told(self) -> list[str]:
        """What is carried along, in words, a line for each group."""
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
        """The family it belongs or belonged to."""
        return None if self.origin.family is None else named(self.origin.family)


def identity_leaves(spec: ModelSpec) -> list[BoundLeaf]:
    """The leaves of gptkit's own format: every shared tensor under its own name."""
    return own_leaves((parameter.name, parameter.shape) for parameter in spec.parameters())


def own_leaves(shapes: Iterable[tuple[str, Shape]]) -> list[BoundLeaf]:
    """The leaves of tensors that stand for themselves, by their own names."""
    return [BoundLeaf(name, shape, (name,), (shape,), IDENTITY, {}) for name, shape in shapes]
