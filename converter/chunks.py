"""Read tensors that are stored in chunks.

A chunk is a rectangular part of a tensor, which one process of a distributed run has saved. The chunks of a tensor are
joined when the tensor is read.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from ..errors import CheckpointError
from .safetensors import DTYPES
from .weights import Stored, Weights

_MAX_CHUNKS = 2**14  # of one tensor


class Chunk(NamedTuple):
    """A rectangular part of a tensor."""

    offsets: tuple[int, ...]  # the index of the chunk's first element in every dimension of the tensor
    stored: Stored  # the chunk's place in a file; at first a whole archive of torch.save, if it is in a .distcp file


class Chunked(NamedTuple):
    """A tensor that is stored in chunks."""

    dtype: str  # the name in safetensors
    shape: tuple[int, ...]  # the shape of all chunks together
    chunks: tuple[Chunk, ...]
    view: tuple[int, ...] | None = None  # the tensor's shape, if `shape` is that of the flattened tensor


def filling(where: str, shape: tuple[int, ...], chunks: Sequence[Chunk], hint: str) -> tuple[Chunk, ...]:
    """Check that the chunks fill a tensor of this shape. Return them in the order of their offsets, without empty ones.

    Raises CheckpointError unless every element is in exactly one chunk. Its message begins with `where`, the
    name of the tensor, and its `hint` says what the user can do.
    """
    full = sorted((chunk for chunk in chunks if chunk.stored.count), key=lambda chunk: chunk.offsets)
    if len(full) > _MAX_CHUNKS:
        raise CheckpointError(
            f"{where} is stored in {len(full):,} chunks, but gptkit reads at most {_MAX_CHUNKS:,} per tensor", hint
        )
    for offsets, stored in full:
        if len(offsets) != len(shape) or len(stored.shape) != len(shape):
            raise CheckpointError(f"{where} has chunks with a different number of dimensions than the tensor", hint)
        if any(o + s > whole for o, s, whole in zip(offsets, stored.shape, shape, strict=True)):
            raise CheckpointError(f"{where} has a chunk that reaches beyond the tensor's shape {list(shape)}", hint)
    count = sum(chunk.stored.count for chunk in full)
    begin = np.array([chunk.offsets for chunk in full], np.int64)
    end = begin + np.array([chunk.stored.shape for chunk in full], np.int64)
    if count != math.prod(shape) or any(
        bool(((begin[i + 1 :] < end[i]) & (end[i + 1 :] > begin[i])).all(axis=1).any()) for i in range(len(full) - 1)
    ):
        problem = f"{len(full)} chunks with {count:,} elements together: some chunks are missing or occur twice"
        raise CheckpointError(f"{where} should have {math.prod(shape):,} elements, but has {problem}", hint)
    return tuple(full)


def chunked(tensors: Mapping[str, Chunked]) -> Weights:
    """Return the tensors in a form in which reading a tensor joins its chunks.

    Raises CheckpointError if a chunk is larger than its file.
    """
    parts = {name: [chunk.stored for chunk in tensor.chunks] for name, tensor in tensors.items()}
    weights = Weights({f"{i}#{name}": stored for name, chunks in parts.items() for i, stored in enumerate(chunks)})
    weights.check()

    def whole(name: str, _: np.ndarray) -> np.ndarray:
        array = np.empty(tensors[name].shape, DTYPES[tensors[name].dtype].carrier)
        for i, (offsets, stored) in enumerate(tensors[name].chunks):
            box = tuple(slice(o, o + s) for o, s in zip(offsets, stored.shape, strict=True))
            array[box] = weights.read(f"{i}#{name}")
        return array

    shapes = {name: tensor.shape if tensor.view is None else tensor.view for name, tensor in tensors.items()}
    combined = {name: Stored(None, tensor.dtype, shapes[name]) for name, tensor in tensors.items()}
    for name, chunks in parts.items():
        if len(chunks) > 1:
            combined[name] = replace(chunks[0], shape=shapes[name], decode=partial(whole, name))
        elif chunks and tensors[name].view is not None:
            combined[name] = replace(chunks[0], shape=shapes[name], strides=None)
        elif chunks:
            combined[name] = chunks[0]
    return weights.with_more(combined, alone=True)
