"""Where the tensors of a distributed checkpoint lie: in chunks that several processes saved, put together here.

Two kinds of folder are read. torch's own has `.metadata`, a pickle of which tensor's chunk lies where in which .distcp
file, each chunk an archive of torch.save (see `torch_archive`). Its Hugging Face writer makes safetensors files, whose
headers say where in the whole tensor theirs belong. Either way nothing but names, numbers and places is taken from
them: pickles are read by an interpreter in Python that knows a list of names and imports none, and every number is held
against the files before anything is allocated.

Not by torch.distributed.checkpoint: its reader runs what `.metadata` says, and torch's weights-only reader knows no
pickle of its protocol (tests/converter/test_dcp.py, test_torchs_own_reader_runs_what_metadata_says).
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from ...errors import CheckpointError, UntrustedInput
from ..index import is_plain
from ..pickle_process import ELEMENTS, KNOWN, Known, Part, RefusedError, SlowReader, Tensor, archived, load
from ..safetensors import DTYPES, parse_json_object, read_header
from ..weights import Stored, Weights

MAX_METADATA = 2**28
"""Bytes. A thousand tensors in a thousand chunks each take a third of it."""
MAX_PICKLE = 2**16
"""Bytes of what torch.save says of one tensor: two hundred, for the most part."""
MAX_DIMS = 32
MAX_CHUNKS = 2**14
"""Of one tensor."""
HINT = "Do not use this checkpoint: it is damaged, or was made to look like one."
SHARDING = "DCP_SHARDING_INFO"


class Chunk(NamedTuple):
    """A box of a tensor: where it begins in the tensor, and what is stored of it. Until it was looked into (`located`),
    an archive's bytes are said to be the box's.
    """

    offsets: tuple[int, ...]
    stored: Stored


class Chunked(NamedTuple):
    """A tensor: its dtype by safetensors' name, its shape, and boxes that fill it."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


class _Stand:
    """What stands for an object of one of torch's classes: the arguments and the state it was pickled with."""

    def __init__(self, *args: Any) -> None:
        self.args = args
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, name: str) -> Any:
        return self.state.get(name) if isinstance(self.state, dict) else None


_STANDS: tuple[type[_Stand], ...] = tuple(type("_Stand", (_Stand,), {}) for _ in range(7))
_Metadata, _Tensor, _Bytes, _Box, _Properties, _Index, _Place = _STANDS


def _size(*args: Any) -> tuple[Any, ...]:
    """torch.Size. Its arguments may stand in the pickle many times, each a copy: few are allowed."""
    sizes = args[0] if args else ()
    if not isinstance(sizes, tuple | list) or len(sizes) > MAX_DIMS:
        raise RefusedError("a torch.Size of no sizes")
    return tuple(sizes)


METADATA = "torch.distributed.checkpoint.metadata"
OLD = "torch.distributed._shard.sharded_tensor.metadata"
NAMES: dict[tuple[str, str], Any] = {
    (METADATA, "Metadata"): _Metadata,
    (METADATA, "TensorStorageMetadata"): _Tensor,
    (METADATA, "BytesStorageMetadata"): _Bytes,
    (METADATA, "ChunkStorageMetadata"): _Box,
    (METADATA, "MetadataIndex"): _Index,
    **{(module, "TensorProperties"): _Properties for module in (METADATA, OLD)},
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _Place,
    ("torch", "Size"): _size,
    ("collections", "OrderedDict"): dict,
    **{(module, name): _Stand for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")},
    **dict.fromkeys(
        [(METADATA, "StorageMeta"), (METADATA, "_MEM_FORMAT_ENCODING"), (OLD, "MEM_FORMAT_ENCODING")], _Stand
    ),
    ("torch.serialization", "_get_layout"): _Stand,
    **{("torch", name): KNOWN["torch", name] for name in ELEMENTS},
}
"""Every name that may stand in .metadata, and what stands for it here."""


class _MetadataReader(pickle._Unpickler):
    """pickle's own interpreter in Python: the one in C can be made to take any memory by one opcode."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in NAMES:
            raise RefusedError(f"it asks for {f'{module}.{name}'!r:.120}, which is no part of a checkpoint's metadata")
        return NAMES[module, name]

    def get_extension(self, code: int) -> Any:
        raise RefusedError(f"it asks for extension {code}")


def metadata(folder: Path) -> tuple[dict[str, Chunked], list[str]]:
    """The tensors of a folder by name, their chunks still to be `located`, and the names of what is there beside
    tensors. Raises CheckpointError, UntrustedInput.
    """
    path = folder / ".metadata"
    try:
        with path.open("rb") as file:
            data = file.read(MAX_METADATA + 1)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    if len(data) > MAX_METADATA:
        raise CheckpointError(f"{path} has more than {MAX_METADATA:,} bytes", HINT)
    found = _read(lambda: load(_MetadataReader(io.BytesIO(data))), str(path))
    try:
        return _tensors(folder, found)
    except RefusedError as error:
        raise CheckpointError(f"{path}: {error}", HINT) from error


def _read(read: Callable[[], Any], where: str) -> Any:
    try:
        return read()
    except RefusedError as error:
        raise CheckpointError(f"{where} cannot be read as plain data: {error}", HINT) from error
    except Exception as error:  # mutated pickles and archives raise of every kind
        raise CheckpointError(f"{where} is damaged: {type(error).__name__}: {error!s:.120}", HINT) from error


def _tensors(folder: Path, found: Any) -> tuple[dict[str, Chunked], list[str]]:
    if not isinstance(found, _Metadata):
        raise RefusedError("it holds no metadata of torch.distributed.checkpoint")
    entries, places = found.get("state_dict_metadata"), found.get("storage_data")
    if not isinstance(entries, dict) or not isinstance(places, dict):
        raise RefusedError("its tensors or their places are missing")
    at: dict[tuple[str, tuple[int, ...]], Any] = {}
    for index, place in places.items():
        if not isinstance(index, _Index) or not isinstance(place, _Place):
            raise RefusedError("the place of something is not told as torch tells it")
        name, offset = index.get("fqn"), index.get("offset")
        if isinstance(name, str) and offset is not None:
            at[name, _numbers(offset)] = place
    sizes: dict[str, int] = {}  # of the files that were looked at
    tensors: dict[str, Chunked] = {}
    others: list[str] = []
    for name, entry in entries.items():
        if not isinstance(name, str):
            raise RefusedError("a name is not text")
        if isinstance(entry, _Bytes):
            others.append(name)
            continue
        if not isinstance(entry, _Tensor):
            raise RefusedError(f"{name!r:.80} is neither a tensor nor an object")
        properties, boxes = entry.get("properties"), entry.get("chunks")
        state = properties.state if isinstance(properties, _Properties) else None
        kind = state.get("dtype") if isinstance(state, dict) else state[0] if isinstance(state, tuple) and state else 0
        if not isinstance(kind, Known) or not kind.element or not isinstance(boxes, list):
            raise RefusedError(f"{name!r:.80} has no dtype or no chunks")
        shape, chunks = _numbers(entry.get("size")), []
        for box in boxes:
            if not isinstance(box, _Box):
                raise RefusedError(f"{name!r:.80} has a chunk that is none")
            offsets, whole = _numbers(box.get("offsets")), _numbers(box.get("sizes"))
            place = at.get((name, offsets))
            if place is None:
                raise RefusedError(f"{name!r:.80}: nothing says where its chunk at {list(offsets)} lies")
            if transforms := place.get("transform_descriptors"):
                raise RefusedError(f"{name!r:.80} was written through an extension ({transforms})")
            path, start, nbytes = _placed(folder, place, sizes)
            chunks.append(Chunk(offsets, Stored(path, kind.element, whole, start, nbytes)))
        tensors[name] = Chunked(kind.element, shape, _filling(name, shape, chunks))
    return tensors, others


def _placed(folder: Path, place: Any, sizes: dict[str, int]) -> tuple[Path, int, int]:
    """File, first byte and bytes of a chunk. Raises RefusedError, UntrustedInput, CheckpointError."""
    name, start, nbytes = place.get("relative_path"), place.get("offset"), place.get("length")
    if not isinstance(name, str) or type(start) is not int or type(nbytes) is not int or min(start, nbytes) < 0:
        raise RefusedError("the place of a chunk is no place")
    path = folder / name
    if name not in sizes:
        if not is_plain(name):
            raise UntrustedInput(f"{folder / '.metadata'} names a file outside of its folder: {name!r:.80}", HINT)
        if not path.is_file():
            raise CheckpointError(f"{path} is missing", "Fetch or save it again, with all files of all ranks.")
        sizes[name] = path.stat().st_size
    if start + nbytes > sizes[name]:
        raise CheckpointError(
            f"{path} is truncated: {start + nbytes:,} bytes expected, {sizes[name]:,} found", "Fetch or save it again."
        )
    return path, start, nbytes


def _numbers(value: Any) -> tuple[int, ...]:
    plain = isinstance(value, tuple) and len(value) <= MAX_DIMS
    if not plain or any(type(number) is not int or not 0 <= number < 2**63 for number in value):
        raise RefusedError("sizes that are no sizes")
    sizes: tuple[int, ...] = value
    return sizes


def _filling(name: str, shape: tuple[int, ...], chunks: Sequence[Chunk]) -> tuple[Chunk, ...]:
    """The chunks, but for empty ones. Raises RefusedError unless each element is in exactly one of them."""
    full = sorted((chunk for chunk in chunks if chunk.stored.count), key=lambda chunk: chunk.offsets)
    if len(full) > MAX_CHUNKS:
        raise RefusedError(f"{name!r:.80} lies in {len(full):,} chunks")
    for offsets, stored in full:
        if len(offsets) != len(shape) or len(stored.shape) != len(shape):
            raise RefusedError(f"{name!r:.80} has a chunk of other dimensions")
        if any(o + s > whole for o, s, whole in zip(offsets, stored.shape, shape, strict=True)):
            raise RefusedError(f"{name!r:.80} of shape {list(shape)} has a chunk that reaches beyond it")
    held = sum(chunk.stored.count for chunk in full)
    begin = np.array([chunk.offsets for chunk in full], np.int64)
    end = begin + np.array([chunk.stored.shape for chunk in full], np.int64)
    if held != math.prod(shape) or any(
        bool(((begin[i + 1 :] < end[i]) & (end[i + 1 :] > begin[i])).all(axis=1).any()) for i in range(len(full) - 1)
    ):
        raise RefusedError(
            f"{name!r:.80} of {math.prod(shape):,} elements has {len(full)} chunks of {held:,}: "
            "some are missing, or there twice"
        )
    return tuple(full)


def located(tensors: Mapping[str, Chunked]) -> dict[str, Chunked]:
    """The tensors with every chunk's archive looked into. Raises CheckpointError for one that holds anything else."""
    opened: dict[Path, BinaryIO] = {}
    try:
        return {
            name: tensor._replace(chunks=tuple(_located(name, chunk, opened) for chunk in tensor.chunks))
            for name, tensor in tensors.items()
        }
    except OSError as error:
        raise CheckpointError(f"cannot read {error.filename}: {error.strerror}") from error
    finally:
        for file in opened.values():
            file.close()


def _located(name: str, chunk: Chunk, opened: dict[Path, BinaryIO]) -> Chunk:
    said = chunk.stored
    assert said.path is not None
    if said.path not in opened:
        opened[said.path] = said.path.open("rb")
    where = f"{said.path}: {name!r:.80}, at byte {said.start:,},"
    part = Part(opened[said.path], said.start, said.start + said.nbytes)
    found = _read(partial(archived, part, said.nbytes, SlowReader, _allow), where)
    if not isinstance(found, Tensor):
        raise CheckpointError(f"{where} holds more, or something else, than a plain tensor", HINT)
    if (found.element, tuple(found.shape)) != (said.dtype, said.shape):
        raise CheckpointError(
            f"{where} is {found.element} of shape {found.shape}, "
            f"the metadata says {said.dtype} of shape {list(said.shape)}",
            HINT,
        )
    at = (said.start + found.storage.start, found.storage.nbytes, tuple(found.strides), found.offset)
    return Chunk(chunk.offsets, Stored(said.path, said.dtype, said.shape, *at))


def _allow(nbytes: int) -> None:
    if nbytes > MAX_PICKLE:
        raise RefusedError("is not what torch.save writes for one tensor")


def hugging_face(files: Sequence[Path]) -> dict[str, Chunked]:
    """The tensors of sharded safetensors files. Raises CheckpointError."""
    boxes: dict[str, list[Chunk]] = {}
    for path in files:
        header = read_header(path)
        text = header.metadata.get(SHARDING)
        told = {} if text is None else parse_json_object(text.encode(), f"{path}: {SHARDING}")
        for name, info in header.tensors.items():
            entry, others = told.get(name), boxes.setdefault(name, [])
            offsets = entry.get("saved_offsets") if isinstance(entry, dict) else None
            try:
                offset = _numbers(tuple(offsets) if isinstance(offsets, list) else (0,) * len(info.shape))
                if len(offset) != len(info.shape) or (others and others[0].stored.dtype != info.dtype):
                    raise RefusedError("another dtype, or other dimensions, than in another file")
            except RefusedError as error:
                raise CheckpointError(f"{path}: {name!r:.80}: {error}", HINT) from error
            others.append(Chunk(offset, Stored(path, info.dtype, info.shape, info.start, info.nbytes)))
    found: dict[str, Chunked] = {}
    for name, chunks in boxes.items():
        ends = [[o + s for o, s in zip(offsets, stored.shape, strict=True)] for offsets, stored in chunks]
        shape = tuple(map(max, *ends)) if len(ends) > 1 else tuple(ends[0])  # the headers know no more than that
        try:
            found[name] = Chunked(chunks[0].stored.dtype, shape, _filling(name, shape, chunks))
        except RefusedError as error:
            hint = "Fetch or save it again, with all its files."
            raise CheckpointError(f"{files[0].parent}: {error}", hint) from error
    return found


class ChunkedWeights(Weights):
    """Tensors by name, each in one chunk, which is read where it lies, or in several, which are put together."""

    def __init__(self, tensors: Mapping[str, Chunked]) -> None:
        """Raises CheckpointError for a chunk that claims more than its file has."""
        super().__init__({f"{i}#{name}": x.stored for name, t in tensors.items() for i, x in enumerate(t.chunks)})
        self.check()
        self._chunked = tensors
        self.info = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}

    def read(self, name: str) -> np.ndarray:
        """The tensor in its carrier dtype: a read-only view of the file where it lies in one piece."""
        tensor = self._chunked.get(name)
        if tensor is None or len(tensor.chunks) == 1:
            return super().read(name if tensor is None else f"0#{name}")
        whole = np.empty(tensor.shape, DTYPES[tensor.dtype].carrier)
        for i, (offsets, stored) in enumerate(tensor.chunks):
            box = tuple(slice(o, o + s) for o, s in zip(offsets, stored.shape, strict=True))
            whole[box] = super().read(f"{i}#{name}")
        return whole

    def place(self, name: str) -> tuple[Path, int]:
        tensor = self._chunked.get(name)
        if tensor is not None and not tensor.chunks:
            return Path(), 0
        return super().place(name if tensor is None else f"0#{name}")

    def span(self, name: str) -> tuple[Path, int] | None:
        """Where the tensor begins in its file; None for one that is put together."""
        tensor = self._chunked.get(name)
        return super().span(f"0#{name}") if tensor is not None and len(tensor.chunks) == 1 else None
