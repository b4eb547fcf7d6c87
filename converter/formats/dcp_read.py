"""Where the tensors of a distributed checkpoint lie: in chunks that several processes saved, put together here.

torch's own folder has `.metadata`, a pickle of which chunk lies where in which .distcp file, each an archive of
torch.save; the headers of the Hugging Face writer's safetensors files say where in the whole tensor theirs belong.
Names, numbers and places alone are taken from either, pickles being read by confined processes, and every number is
held against the files before anything is allocated. Not by torch.distributed.checkpoint: its reader runs what
`.metadata` says, and torch's weights-only reader knows no pickle of its protocol (tests/converter/test_dcp.py,
test_torchs_own_reader_runs_what_metadata_says).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...errors import CheckpointError, UntrustedInput
from ..names import is_plain
from ..pickles import Unpickler
from ..safetensors import DTYPES, MAX_DIMS, parse_json_object, read_header
from ..weights import Stored, Weights

_MAX_CHUNKS = 2**14  # of one tensor
_HINT = "Do not use this checkpoint: it is damaged, or was made to look like one."
_AGAIN = "Fetch or save it again, with all its files."
_SHARDING = "DCP_SHARDING_INFO"


class _Chunk(NamedTuple):
    """A box of a tensor: where it begins, and what is stored of it; before `located`, all of its archive's bytes."""

    offsets: tuple[int, ...]
    stored: Stored


class _Chunked(NamedTuple):
    """A tensor: its dtype by safetensors' name, its shape, and boxes that fill it."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[_Chunk, ...]


def metadata(folder: Path) -> tuple[dict[str, _Chunked], list[str]]:
    """The tensors of a folder by name, their chunks still to be `located`, and the names of what is beside them."""
    path = folder / ".metadata"
    entries, others = Unpickler().ask(path, str(path), str(path.absolute()), "data")
    sizes: dict[str, int] = {}  # of the files that were looked at
    tensors: dict[str, _Chunked] = {}
    for name, dtype, shape, boxes in entries:
        chunks = [
            _Chunk(tuple(offsets), Stored(_checked(folder, file, at + nbytes, sizes), dtype, tuple(whole), at, nbytes))
            for offsets, whole, file, at, nbytes in boxes
        ]
        tensors[name] = _Chunked(dtype, tuple(shape), _filling(f"{path}: {name!r:.80}", tuple(shape), chunks, _HINT))
    return tensors, others


def _checked(folder: Path, name: str, end: int, sizes: dict[str, int]) -> Path:
    """A file of chunks, of which one ends there. Raises UntrustedInput, CheckpointError."""
    path = folder / name
    if name not in sizes:
        if not is_plain(name):
            raise UntrustedInput(f"{folder / '.metadata'} names a file outside of its folder: {name!r:.80}", _HINT)
        if not path.is_file():
            raise CheckpointError(f"{path} is missing", "Fetch or save it again, with all files of all ranks.")
        sizes[name] = path.stat().st_size
    if end > sizes[name]:
        hint = "Fetch or save it again."
        raise CheckpointError(f"{path} is truncated: {end:,} bytes expected, {sizes[name]:,} found", hint)
    return path


def _filling(where: str, shape: tuple[int, ...], chunks: Sequence[_Chunk], hint: str) -> tuple[_Chunk, ...]:
    """The chunks, but for empty ones. Raises CheckpointError unless each element is in exactly one of them."""
    full = sorted((chunk for chunk in chunks if chunk.stored.count), key=lambda chunk: chunk.offsets)
    if len(full) > _MAX_CHUNKS:
        raise CheckpointError(f"{where} lies in {len(full):,} chunks", hint)
    for offsets, stored in full:
        if len(offsets) != len(shape) or len(stored.shape) != len(shape):
            raise CheckpointError(f"{where} has a chunk of other dimensions", hint)
        if any(o + s > whole for o, s, whole in zip(offsets, stored.shape, shape, strict=True)):
            raise CheckpointError(f"{where} of shape {list(shape)} has a chunk that reaches beyond it", hint)
    count = sum(chunk.stored.count for chunk in full)
    begin = np.array([chunk.offsets for chunk in full], np.int64)
    end = begin + np.array([chunk.stored.shape for chunk in full], np.int64)
    if count != math.prod(shape) or any(
        bool(((begin[i + 1 :] < end[i]) & (end[i + 1 :] > begin[i])).all(axis=1).any()) for i in range(len(full) - 1)
    ):
        what = f"{len(full)} chunks of {count:,}: some are missing, or there twice"
        raise CheckpointError(f"{where} of {math.prod(shape):,} elements has {what}", hint)
    return tuple(full)


def located(tensors: Mapping[str, _Chunked]) -> dict[str, _Chunked]:
    """The tensors with every chunk's archive looked into. Raises CheckpointError for one that holds anything else."""
    process = Unpickler(parts=sum(len(tensor.chunks) for tensor in tensors.values()))
    return {
        name: tensor._replace(chunks=tuple(_located(name, chunk, process) for chunk in tensor.chunks))
        for name, tensor in tensors.items()
    }


def _located(name: str, chunk: _Chunk, process: Unpickler) -> _Chunk:
    stored = chunk.stored
    assert stored.path is not None
    where = f"{stored.path}: {name!r:.80}, at byte {stored.start:,},"
    inside = process.ask(stored.path, where, (str(stored.path.absolute()), stored.start, stored.nbytes), "data")
    if not isinstance(inside, Stored):
        raise CheckpointError(f"{where} holds more, or something else, than a plain tensor", _HINT)
    if (inside.dtype, inside.shape) != (stored.dtype, stored.shape):
        stated = f"the metadata says {stored.dtype} of shape {list(stored.shape)}"
        raise CheckpointError(f"{where} is {inside.dtype} of shape {list(inside.shape)}, {stated}", _HINT)
    return _Chunk(chunk.offsets, replace(inside, start=stored.start + inside.start))


def hugging_face(files: Sequence[Path]) -> dict[str, _Chunked]:
    """The tensors of sharded safetensors files. Raises CheckpointError."""
    boxes: dict[str, list[_Chunk]] = {}
    for path in files:
        header = read_header(path)
        text = header.metadata.get(_SHARDING)
        said = {} if text is None else parse_json_object(text.encode(), f"{path}: {_SHARDING}")
        for name, info in header.tensors.items():
            entry, others = said.get(name), boxes.setdefault(name, [])
            offsets: Any = entry.get("saved_offsets") if isinstance(entry, dict) else None
            if not isinstance(offsets, list):
                offsets = [0] * len(info.shape)
            if len(offsets) > MAX_DIMS or any(type(each) is not int or not 0 <= each < 2**63 for each in offsets):
                raise CheckpointError(f"{path}: {name!r:.80}: sizes that are no sizes", _HINT)
            if len(offsets) != len(info.shape) or (others and others[0].stored.dtype != info.dtype):
                what = "another dtype, or other dimensions, than in another file"
                raise CheckpointError(f"{path}: {name!r:.80}: {what}", _HINT)
            others.append(_Chunk(tuple(offsets), Stored(path, info.dtype, info.shape, info.start, info.nbytes)))
    tensors: dict[str, _Chunked] = {}
    for name, chunks in boxes.items():
        ends = [[o + s for o, s in zip(offsets, stored.shape, strict=True)] for offsets, stored in chunks]
        shape = tuple(map(max, *ends)) if len(ends) > 1 else tuple(ends[0])  # the headers know no more than that
        full = _filling(f"{files[0].parent}: {name!r:.80}", shape, chunks, _AGAIN)
        tensors[name] = _Chunked(chunks[0].stored.dtype, shape, full)
    return tensors


def chunked(tensors: Mapping[str, _Chunked]) -> Weights:
    """Tensors by name, read where they lie or put together. CheckpointError: a chunk claims more than is there."""
    parts = {name: [chunk.stored for chunk in tensor.chunks] for name, tensor in tensors.items()}
    weights = Weights({f"{i}#{name}": stored for name, chunks in parts.items() for i, stored in enumerate(chunks)})
    weights.check()

    def whole(name: str, _: np.ndarray) -> np.ndarray:
        array = np.empty(tensors[name].shape, DTYPES[tensors[name].dtype].carrier)
        for i, (offsets, stored) in enumerate(tensors[name].chunks):
            box = tuple(slice(o, o + s) for o, s in zip(offsets, stored.shape, strict=True))
            array[box] = weights.read(f"{i}#{name}")
        return array

    made = {name: Stored(None, tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    for name, chunks in parts.items():
        if len(chunks) > 1:
            made[name] = replace(chunks[0], shape=tensors[name].shape, decode=partial(whole, name))
        elif chunks:
            made[name] = chunks[0]
    return weights.with_more(made, alone=True)
