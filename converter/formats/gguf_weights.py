"""The tensors of a GGUF file as arrays: plain floats as they lie, quantised ones dequantised to fp32, part by part."""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ...architectures.ggml import TYPES
from ..safetensors import DTYPES
from .gguf_header import GgufTensor, Header

__all__ = ["READABLE", "GgufWeights"]

READABLE = frozenset(each.name for each in TYPES.values() if each.block > 1) - {"Q8_1", "Q8_K"}
"""What the gguf package dequantises, by ggml's names."""

PART = 2**22
"""Elements that are dequantised at a time: its numpy takes several times their memory."""


class GgufWeights:
    """The tensors of a file, by their names in it.

    `info` says what they are once read: quantised ones are fp32. `blocks` says what those are in the file, and their
    bytes there.
    """

    def __init__(self, path: Path, header: Header, tensors: Mapping[str, GgufTensor]) -> None:
        self._path, self._buffer, self._tensors = path, header.buffer, tensors
        self.info = {
            name: (tensor.type.name if tensor.type.block == 1 else "F32", tensor.shape)
            for name, tensor in tensors.items()
        }
        self.blocks = {
            name: (tensor.type.name, tensor.end - tensor.start)
            for name, tensor in tensors.items()
            if tensor.type.block > 1
        }

    def read(self, name: str) -> np.ndarray:
        """The tensor in its carrier dtype: a read-only view of the file where it holds plain values."""
        tensor = self._tensors[name]
        if tensor.type.block > 1:
            return self._dequantised(tensor)
        flat = np.frombuffer(self._buffer, DTYPES[tensor.type.name].carrier, math.prod(tensor.shape), tensor.start)
        flat.flags.writeable = False
        return flat.reshape(tensor.shape)

    def span(self, name: str) -> tuple[Path, int] | None:
        """Where a plain tensor's bytes begin in the file; None for a quantised one."""
        tensor = self._tensors[name]
        return (self._path, tensor.start) if tensor.type.block == 1 else None

    def release(self) -> None:
        """Give the pages that were read back to the system; views stay valid and read them again."""
        if isinstance(self._buffer, mmap.mmap) and hasattr(self._buffer, "madvise"):
            self._buffer.madvise(mmap.MADV_DONTNEED)

    def _dequantised(self, tensor: GgufTensor) -> np.ndarray:
        from gguf import GGMLQuantizationType, quants

        kind = GGMLQuantizationType[tensor.type.name]
        blocks = np.frombuffer(self._buffer, np.uint8, tensor.end - tensor.start, tensor.start)
        blocks = blocks.reshape(-1, tensor.type.nbytes)
        values = np.empty((len(blocks), tensor.type.block), np.float32)
        step = max(1, PART // tensor.type.block)
        # Scales that are infinite or not numbers give values of that kind, which are reported where they matter.
        with np.errstate(all="ignore"):
            for at in range(0, len(blocks), step):
                # As one row: the package takes rows by the dozen, in a loop.
                part = blocks[at : at + step].reshape(1, -1)
                values[at : at + step] = quants.dequantize(part, kind).reshape(-1, tensor.type.block)
        return values.reshape(tensor.shape)
