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
"""The number of bytes that are dequantised at a time. They stay in a core's cache until they are written."""


class Weights:
    """The tensors in files, which are read on demand.

    Attributes:
        info: the dtype and shape of every tensor after reading, by name.
        blocks: the type and size in bytes that a tensor has in its file, by name. It has only tensors whose type in the
            file is not that in `info`, such as quantised ones.
        fetched: whether the tensors can be read. False if only the headers were downloaded.
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
        """Return a copy with additional tensors.

        Tensors that are not listed in `info` can still be read by name.

        Args:
            tensors: the additional tensors by name.
            alone: list only the additional tensors in `info`.
            without: the names of tensors that are not listed in `info`.
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
        """Return the places of these tensors in their files, by name."""
        return {name: self._tensors[name] for name in names}

    def numeric(self) -> Weights:
        """Return a copy in which tensors of dtypes that gptkit cannot convert are read as bytes (U8)."""
        other_types = {
            name: stored for name, stored in self._tensors.items() if stored.dtype not in (*FLOATS, *INTEGERS, *F8)
        }
        as_bytes = {
            name: replace(stored, dtype="U8", shape=(stored.nbytes,), kind=stored.dtype)
            for name, stored in other_types.items()
        }
        return self.with_more(as_bytes)

    def place(self, name: str) -> tuple[Path, int]:
        """Return a tensor's file, and the offset of its first byte in the file.

        The path is empty if it is in no file.
        """
        tensor = self._tensors[name]
        return tensor.path or Path(), tensor.place

    def span(self, name: str) -> tuple[Path, int] | None:
        """Return the file and the offset of a tensor whose bytes in the file are those after reading.

        Such a tensor is contiguous and not quantised, so its bytes can be copied. Return None for any other tensor.
        """
        tensor = self._tensors[name]
        plain = tensor.path is not None and tensor.decode is None and tensor.pieces is None and tensor.contiguous
        return self.place(name) if plain else None

    def read(self, name: str) -> np.ndarray:
        """Return the tensor, if possible as a read-only view of its file.

        A bf16 tensor is returned as uint16, and fp8 as uint8.
        """
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
        """Yield a quantised tensor in contiguous, dequantised pieces of whole rows.

        Return None if the tensor is not quantised, or can only be dequantised at once. `read` returns such a tensor.
        """
        make = self._tensors[name].pieces
        return None if make is None else make(PIECE)

    def same(self, name: str, other: str) -> bool:
        """Return whether two tensors have the same dtype, shape and bytes. So NaN equals NaN, and -0 differs from 0."""
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
        """Release the memory of memory-mapped pages that were read, of all files or of one tensor.

        Arrays that are views of the files stay valid. They read the pages again when they are used.
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
    """A model: its tree of components, and its parameters by gptkit's names (shared names).

    The parameters are read from files (`Checkpoint`) or computed on request.
    """

    spec: ModelSpec

    def tensor(self, name: str) -> tuple[np.ndarray, str]:
        """Return a parameter: a read-only array, and its dtype. A bf16 array has the numpy dtype uint16."""
        ...

    def release(self) -> None:
        """Release the memory of memory-mapped pages that were read."""
        ...


@dataclass(kw_only=True)
class TensorFiles:
    """The tensors in the weight files of a model.

    A *leaf* is a tensor in the files, with gptkit's names (shared names) of the parameters that it stores.

    Attributes:
        reference: the text with which the user named the model.
        path: the local folder or file.
        revision: the commit, if the model came from the hub.
        format: "hf", "local" for gptkit's own, or the name of another format (`converter.formats`).
        leaves: the tensors. If the model family is unknown, the shared name of a tensor is its name in the files.
        origin: where the model comes from, with the text of its config.json.
        notes: notes for the user, such as dropped buffers, a head stored twice or unknown config fields.
        files: the paths of the weight files.
        texts: small files that are stored inside the weight file, such as a tokenizer in a GGUF, by name.
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
        """Return the folder with the tokenizer and the other files of the model."""
        return self.home or (self.path if self.path.is_dir() else self.path.parent)

    @property
    def dtypes(self) -> dict[str, str]:
        """Return the dtype of every tensor after reading, by its checkpoint name."""
        return {leaf.checkpoint: self.dtype_of(leaf) for leaf in self.leaves}

    def dtype_of(self, leaf: BoundLeaf) -> str:
        return self._weights.info[self._names[leaf.checkpoint]][0]

    @property
    def fetched(self) -> bool:
        """Return whether the weights can be read; False if only the headers were downloaded."""
        return self._weights.fetched

    def nbytes_of(self, leaf: BoundLeaf) -> int:
        """Return the size in bytes of a tensor after reading."""
        return math.prod(leaf.shape) * DTYPES[self.dtype_of(leaf)].itemsize

    def stored_of(self, leaf: BoundLeaf) -> tuple[str, int]:
        """Return the dtype and the size in bytes that a tensor has in its file.

        The dtype of a quantised tensor may be one of the file format, such as GGUF's Q8_0.
        """
        return self._weights.blocks.get(self._names[leaf.checkpoint]) or (self.dtype_of(leaf), self.nbytes_of(leaf))

    def span(self, leaf: BoundLeaf) -> tuple[Path, int] | None:
        """Return the file and the offset of a tensor if its bytes can be copied, else None (see `Weights.span`)."""
        return self._weights.span(self._names[leaf.checkpoint])

    def read(self, leaf: BoundLeaf) -> np.ndarray:
        """Return a tensor in the layout of the file, if possible as a view of the file (see `Weights.read`)."""
        return self._weights.read(self._names[leaf.checkpoint])

    def pieces(self, leaf: BoundLeaf) -> Iterator[np.ndarray] | None:
        """Yield a quantised tensor in dequantised pieces, or return None if it is not quantised (`Weights.pieces`)."""
        return self._weights.pieces(self._names[leaf.checkpoint])

    def release(self, leaf: BoundLeaf | None = None) -> None:
        """Release the memory of memory-mapped pages that were read, of all files or of one tensor."""
        self._weights.release(None if leaf is None else self._names[leaf.checkpoint])

    def tensors(self) -> Iterator[tuple[str, np.ndarray, str]]:
        """Yield every parameter in the order of the files: shared name, array and dtype.

        A bf16 array has the dtype uint16.
        """
        for leaf in self.leaves:
            dtype = self.dtype_of(leaf)
            for name, array in zip(leaf.shared, leaf.to_shared(self.read(leaf)), strict=True):
                yield name, array, dtype

    def tensor(self, name: str) -> tuple[np.ndarray, str]:
        """Return the array and the dtype of a parameter, given its shared name. A bf16 array has the dtype uint16."""
        leaf = self._holder[name]
        return leaf.to_shared(self.read(leaf))[leaf.shared.index(name)], self.dtype_of(leaf)

    @cached_property
    def _holder(self) -> dict[str, BoundLeaf]:
        """Return, for every parameter by gptkit's name (shared name), the tensor in the files that stores it."""
        return {name: leaf for leaf in self.leaves for name in leaf.shared}

    def shared_dtypes(self, asked: str | None = None) -> dict[str, str]:
        """Return the dtype of every parameter by its shared name: `asked`, or by default the stored dtype."""
        all_of_them = None if asked is None else parse_dtype(asked)
        kept = {leaf.checkpoint for leaf in getattr(self, "carried_leaves", ()) if self.dtype_of(leaf) not in FLOATS}
        return {
            name: self.dtype_of(leaf) if all_of_them is None or leaf.checkpoint in kept else all_of_them
            for leaf in self.leaves
            for name in leaf.shared
        }


@dataclass(kw_only=True)
class Checkpoint(TensorFiles, Shown):
    """An opened checkpoint, whose model gptkit knows.

    Attributes:
        spec: the model's tree of components.
        dtype: the default dtype to compute in, by its name in safetensors.
        missing: the shared names of parameters that the files lack. Only with `open_checkpoint(partial=True)`.
        extra: the tensors in `leaves` that are not part of the model. Only with `open_checkpoint(partial=True)`.
        carried: groups of tensors that gptkit copies but does not compute with. They are not in `leaves`.
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
        """The tensors of all groups in `carried`."""
        return tuple(leaf for leaves in self.carried.values() for leaf in leaves)

    @property
    def carried_notes(self) -> list[str]:
        """Return a note for the user about every group in `carried`."""
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
        """Return the model family of the checkpoint, or None if gptkit does not know it."""
        return None if self.origin.family is None else named(self.origin.family)


def identity_leaves(spec: ModelSpec) -> list[BoundLeaf]:
    """Return the leaves of gptkit's own format, in which every parameter is stored under its shared name."""
    return own_leaves((parameter.name, parameter.shape) for parameter in spec.parameters())


def own_leaves(shapes: Iterable[tuple[str, Shape]]) -> list[BoundLeaf]:
    """Return leaves for tensors that are given by name and shape. Every leaf stores one parameter of the same name."""
    return [BoundLeaf(name, shape, (name,), (shape,), IDENTITY, {}) for name, shape in shapes]
