"""Quantise to fp8 with a scale for every block of 128 x 128, the format of DeepSeek-V3 and Qwen3.

The largest value of a block becomes the largest value of fp8, 448. The bits are identical to those of transformers
(integrations/finegrained_fp8.py, Fp8Quantize). transformers does not quantise matrices with partial blocks at an edge;
gptkit does.
"""

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from ..architectures import BoundLeaf
from ..architectures.layout import parse
from ..components import ModelSpec
from .dtypes import Array, cast, to_float64
from .write import Entry

_BLOCK = 128
_MOST = np.float32(448)
_ROLES = ("reads", "writes", "inner")


def quantised_leaves(spec: ModelSpec, leaves: Iterable[BoundLeaf]) -> set[str]:
    """Return the names of the tensors that transformers quantises to fp8.

    These are the matrices of layers that are stored as [out, in], except those of routers.
    """
    parameters = {parameter.name: parameter for parameter in spec.parameters()}
    names = set()
    for leaf in leaves:
        stored_parameters = [parameters.get(name) for name in leaf.shared]
        if len(leaf.shape) != 2 or not leaf.checkpoint.endswith(".weight"):
            continue
        transposed = not leaf.layout.is_identity and parse(leaf.layout.checkpoint)[1] != parse(leaf.layout.shared)[1]
        if not transposed and all(
            parameter is not None and parameter.layer is not None and parameter.role in _ROLES
            for parameter in stored_parameters
        ):
            names.add(leaf.checkpoint)
    return names


def settings(leaves: Iterable[BoundLeaf], quantised: Collection[str], head: str) -> dict[str, Any]:
    """Return the `quantization_config` for config.json.

    It lists the matrices that stay unquantised: all that are not in `quantised`, and always the `head`.
    """
    unquantised = [leaf.checkpoint for leaf in leaves if len(leaf.shape) == 2 and leaf.checkpoint not in quantised]
    names = sorted({name.removesuffix(".weight") for name in (*unquantised, head) if name.endswith(".weight")})
    return {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "modules_to_not_convert": names,
        "quant_method": "fp8",
        "weight_block_size": [_BLOCK, _BLOCK],
    }


def stored(leaf: BoundLeaf) -> list[Entry]:
    """Return the two tensors to write for a matrix that is quantised: its fp8 values, and its scales."""
    grid = (-(-leaf.shape[0] // _BLOCK), -(-leaf.shape[1] // _BLOCK))
    scales = replace(leaf, checkpoint=f"{leaf.checkpoint}_scale_inv", shape=grid)
    return [Entry(leaf, "F8_E4M3", _bits, _numbers, _BLOCK), Entry(scales, "F32", _inverses, None, _BLOCK)]


def _scales(values: Array) -> tuple[Array, Array]:
    """Return the factor by which the values of every block are multiplied for quantising, and its inverse, the scale.

    A block of zeros has the factor 1.
    """
    down, across = (np.arange(0, side, _BLOCK) for side in values.shape)
    most = np.maximum.reduceat(np.maximum.reduceat(np.abs(values), down, 0), across, 1)
    one = np.float32(1)
    scales = np.where(most > 0, one / np.where(most > 0, most, one) * _MOST, one)  # so rounds torch's 448 / most
    return scales, one / scales


def _spread(scales: Array, shape: tuple[int, ...]) -> Array:
    return np.repeat(np.repeat(scales, _BLOCK, 0)[: shape[0]], _BLOCK, 1)[:, : shape[1]]


def _inverses(rows: Array, dtype: str) -> Array:
    with np.errstate(all="ignore"):
        return _scales(cast(rows, dtype, "F32"))[1]


def _bits(rows: Array, dtype: str) -> Array:
    values = cast(rows, dtype, "F32")
    with np.errstate(all="ignore"):
        return _rounded(np.clip(values * _spread(_scales(values)[0], values.shape), -_MOST, _MOST))


def _rounded(values: Array) -> Array:
    """Round fp32 values of at most 448 to F8_E4M3, to nearest, ties to even.

    Subnormal numbers of F8_E4M3 are multiples of 2^-9.
    """
    bits = np.ascontiguousarray(values).view(np.uint32)
    size = np.abs(values)
    normal = ((bits & np.uint32(0x7FFFFFFF)) + (0x7FFFF + ((bits >> 20) & 1)) >> 20) - np.uint32(120 << 3)
    least = size < 2.0**-6
    codes = np.where(least, np.rint(np.where(least, size, 0) * 512).astype(np.uint32), normal)
    rounded: Array = (np.where(np.isnan(values), np.uint32(0x7F), codes) | bits >> 24 & 0x80).astype(np.uint8)
    return rounded


def _numbers(bits: Array, rows: Array, dtype: str) -> Array:
    """Dequantise the fp8 values `bits` to fp32.

    The scales are computed again from `rows`, the values before quantising, whose type is `dtype`.
    """
    table = to_float64(np.arange(256, dtype=np.uint8), "F8_E4M3").astype(np.float32)
    values = table.take(bits).reshape(rows.shape)
    return values * _spread(_inverses(rows, dtype), values.shape)
