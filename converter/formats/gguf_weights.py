"""The tensors of a GGUF file: plain floats as they lie, quantised ones dequantised to fp32, part by part."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path

import numpy as np

from ...architectures.ggml import TYPES, Quant
from ..weights import Stored, Weights
from .gguf_header import GgufTensor

READABLE = frozenset(each.name for each in TYPES.values() if each.block > 1) - {"Q8_1", "Q8_K"}
"""What the gguf package dequantises, by ggml's names."""

PART = 2**22
"""Elements that are dequantised at a time: its numpy takes several times their memory."""


def gguf_weights(path: Path, tensors: Iterable[GgufTensor]) -> Weights:
    """These tensors of a file, by their names in it."""
    found = {}
    for tensor in tensors:
        kind, nbytes = tensor.type, tensor.end - tensor.start
        decode = partial(dequantised, kind=kind) if kind.block > 1 else None
        dtype, label = (kind.name, "") if decode is None else ("F32", kind.name)
        found[tensor.name] = Stored(path, dtype, tensor.shape, tensor.start, nbytes, decode=decode, kind=label)
    return Weights(found)


def dequantised(data: np.ndarray, kind: Quant) -> np.ndarray:
    """The values that blocks of a type stand for, in fp32."""
    from gguf import GGMLQuantizationType, quants

    blocks = data.reshape(-1, kind.nbytes)
    values = np.empty((len(blocks), kind.block), np.float32)
    step = max(1, PART // kind.block)
    for at in range(0, len(blocks), step):
        # As one row: the package takes rows by the dozen, in a loop.
        part = blocks[at : at + step].reshape(1, -1)
        values[at : at + step] = quants.dequantize(part, GGMLQuantizationType[kind.name]).reshape(-1, kind.block)
    return values
