"""Weights of few bits with their scales beside them, as the numbers that they stand for.

A scheme says which tensors belong together, by the ends of their names, which shapes and types fit, and what makes
numbers of them. They are made when a tensor is read, so that whatever reads tensors reads these.

A block of values has one scale and few different bytes: their products are computed once for the block, in fp32 as
transformers does (integrations/finegrained_fp8.py and mxfp4.py there), rounded once, and looked up.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ..architectures.config import quantisation
from ..components import Shape
from ..components.ranges import some_of
from .dtypes import F8, Array, cast, to_float64
from .index import Stored
from .safetensors import DTYPES
from .tree import Quantised
from .weights import Weights

_STEP = 2**16  # elements that are looked up at a time, so that their indices stay in a core's cache
_EXPONENTS = ("F8_E8M0", "U8")  # of two
_BESIDE = ("input_scale", "activation_scale")
"""What scales a layer's input where it is computed in few bits too, which nothing here does."""


@dataclass(frozen=True)
class _Numbers:
    """What bits and scales stand for: a dtype, a shape, and what makes them of both arrays."""

    dtype: str
    shape: Shape
    decode: Callable[[Array, Array], Array]


@dataclass(frozen=True)
class _Scheme:
    """bits, scales: what stands behind a tensor's name in the names of its bits and its scales.
    fit: config.json's settings, (dtype, shape) of bits and of scales, and the dtype that is asked for -> the numbers;
    a sentence where they do not fit.
    """

    bits: str
    scales: str
    fit: Callable[[Mapping[str, Any], tuple[str, Shape], tuple[str, Shape], str], _Numbers | str]


def dequantised(weights: Weights, config: Mapping[str, Any], dtype: str, where: Path) -> tuple[Weights, str]:
    """The tensors of a checkpoint as numbers, by what its config.json says of their method (one of `METHODS`), and a
    note that tells it. `dtype` is what they are to be: "F32", or "BF16", to which they are rounded once.

    Raises:
        Quantised: bits without scales, scales without bits, shapes or types that do not fit; all of them.
    """
    settings, told = config["quantization_config"], quantisation(config)
    assert told is not None
    scheme, info = METHODS[settings["quant_method"]], weights.info
    made: dict[str, Stored] = {}
    used: set[str] = set()
    lacking, alone, misfits = list[str](), list[str](), list[str]()
    for name, (kind, _) in info.items():
        if name.endswith(scheme.scales) and not _is_quantised(name.removesuffix(scheme.scales), scheme, info):
            alone.append(name)
        base = name.removesuffix(scheme.bits)
        if not (name.endswith(scheme.bits) and _is_quantised(base, scheme, info)):
            continue
        scales = base + scheme.scales
        if scales not in info:
            lacking.append(f"{name} ({scales} is expected)")
            continue
        if base in info and base != name:
            misfits.append(f"{base} is there beside {name}")
            continue
        numbers = scheme.fit(settings, info[name], info[scales], dtype)
        if isinstance(numbers, str):
            misfits.append(f"{name} is {_in_words(info[name])}, {scales} {_in_words(info[scales])}: {numbers}")
            continue
        path, start = weights.place(name)
        nbytes = prod(info[name][1]) * DTYPES[kind].itemsize
        decode = partial(_decoded, weights, name, scales, numbers.decode)
        made[base] = Stored(path, numbers.dtype, numbers.shape, start, nbytes, decode=decode, kind=kind)
        used |= {name, scales, *(base.removesuffix("weight") + each for each in _BESIDE)}
    found = [
        f"{len(names)} {what}: {some_of(names, 4, ', … ({} more)')}"
        for what, names in (
            ("quantised weights have no scales", lacking),
            ("scales belong to no quantised weight", alone),
            ("quantised weights do not fit their scales", misfits),
        )
        if names
    ]
    if not made and not found:
        found = [f"config.json says that they are quantised ({told[0]}), and none is"]
    if found:
        hint = "Check that config.json belongs to these weights, and that all of their files are there."
        raise Quantised(f"{where}: {'; '.join(found)}", hint)
    read = weights.with_more(made, without=used - made.keys())
    return read, f"{len(made)} of {len(read.info)} tensors are quantised ({told[0]}): dequantised"


def _is_quantised(base: str, scheme: _Scheme, info: Mapping[str, tuple[str, Shape]]) -> bool:
    """Whether a name has bits: by their own name, or by their type."""
    bits = base + scheme.bits
    return bits in info and (bool(scheme.bits) or info[bits][0] in F8)


def _in_words(info: tuple[str, Shape]) -> str:
    return f"{info[0]} {list(info[1])}"


def _decoded(weights: Weights, bits: str, scales: str, decode: Callable[[Array, Array], Array], _: Array) -> Array:
    with np.errstate(all="ignore"):  # products that are infinite or no numbers are told where they matter
        return decode(weights.read(bits), weights.read(scales))


# --- fp8: a scale a block of a matrix, which is all of it where config.json names no size ---


def _fp8(settings: Mapping[str, Any], bits: tuple[str, Shape], scales: tuple[str, Shape], dtype: str) -> _Numbers | str:
    (kind, shape), (scale_kind, grid) = bits, scales
    block = settings.get("weight_block_size")
    if scale_kind not in ("F32", "BF16", "F16", *_EXPONENTS):
        return "scales are floating-point numbers, or exponents of two"
    if len(shape) < 2:
        return "a matrix is expected"
    if block is None:
        wanted, block = grid if prod(grid) == 1 else (1,), shape[-2:]
    elif not (isinstance(block, list) and len(block) == 2 and all(type(side) is int and side > 0 for side in block)):
        return f"weight_block_size is {block!r:.40}, not two sizes"
    else:
        wanted = (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))
    if grid != wanted:
        return f"scales of {list(wanted)} are expected"
    high, wide = (min(side, max(whole, 1)) for side, whole in zip(block, shape[-2:], strict=True))
    return _Numbers(dtype, shape, partial(_of_fp8, kind, scale_kind, (high, wide), dtype))


def _of_fp8(kind: str, scale_kind: str, block: tuple[int, int], dtype: str, bits: Array, scales: Array) -> Array:
    """Bytes [..., rows, columns] and scales [..., blocks down, blocks across] -> numbers [..., rows, columns]."""
    values = to_float64(np.arange(256, dtype=np.uint8), kind).astype(np.float32)
    out = np.empty(bits.shape, DTYPES[dtype].carrier)
    rows, columns = bits.shape[-2:]
    matrices, numbers = bits.reshape(-1, rows, columns), out.reshape(-1, rows, columns)
    grids = _scales(scales, scale_kind).reshape(len(matrices), -(-rows // block[0]), -(-columns // block[1]))
    wide = 256 * block[1]  # columns whose block and byte 16 bits can tell
    starts = np.repeat(np.arange(0, 256 * min(grids.shape[-1], 256), 256, dtype=np.uint16), block[1])
    for which, row, column in product(range(len(grids)), range(grids.shape[1]), range(0, columns, wide)):
        some = grids[which, row, column // block[1] :][:256]
        products = cast(np.multiply.outer(some, values), "F32", dtype).reshape(-1)
        across, end = slice(column, column + wide), min(rows, (row + 1) * block[0])
        step = max(1, _STEP // min(columns, wide))
        for start in range(row * block[0], end, step):
            down = slice(start, min(end, start + step))
            here = matrices[which, down, across]
            numbers[which, down, across] = products.take(starts[: here.shape[1]] + here)
    return out


def _scales(scales: Array, kind: str) -> Array:
    """Scales as fp32; a byte is an exponent of two, 127 more than it."""
    if kind not in _EXPONENTS:
        return cast(scales, kind, "F32")
    powers = np.exp2(scales.astype(np.float32) - 127)
    return np.where(scales == 255, np.float32(np.nan), powers) if kind == "F8_E8M0" else powers


# --- mxfp4: two values of 4 bits in a byte, and an exponent of two for 32 values ---

_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def _mxfp4(_: Mapping[str, Any], bits: tuple[str, Shape], scales: tuple[str, Shape], __: str) -> _Numbers | str:
    kind, shape = bits
    if kind != "U8" or len(shape) != 4 or shape[-1] != 16:
        return "U8 [experts, out, groups, 16] is expected"
    if scales != ("U8", shape[:-1]):
        return f"scales of {_in_words(('U8', shape[:-1]))} are expected"
    experts, out, groups = shape[:-1]
    return _Numbers("BF16", (experts, groups * 32, out), _of_mxfp4)  # a type that holds each of them exactly


def _of_mxfp4(bits: Array, scales: Array) -> Array:
    """Bytes [experts, out, groups, 16] and scales [experts, out, groups] -> bf16 [experts, in, out], a view."""
    pairs, packed, exponents = _pairs(), bits.reshape(-1, 16), scales.reshape(-1, 1)
    out = np.empty(packed.shape, np.uint32)
    step = _STEP // 16
    for start in range(0, len(packed), step):
        rows = slice(start, start + step)
        out[rows] = pairs.take((exponents[rows].astype(np.uint16) << 8) | packed[rows])
    experts, rows, groups, _ = bits.shape
    return out.view(np.uint16).reshape(experts, rows, groups * 32).swapaxes(1, 2)


@cache
def _pairs() -> Array:
    """What scale (the high byte) and byte stand for, in bf16: the number in the low four bits, then in the high."""
    byte = np.arange(256)
    scaled = np.ldexp(np.concatenate([_FP4, -_FP4]), byte[:, None] - 127)
    numbers = cast(scaled, "F32", "BF16").astype("<u4")
    pairs: Array = numbers[:, byte & 15] | numbers[:, byte >> 4] << 16
    return pairs.reshape(-1)


METHODS = {"fp8": _Scheme("", "_scale_inv", _fp8), "mxfp4": _Scheme("_blocks", "_scales", _mxfp4)}
"""What config.json calls them (quant_method)."""
