"""Element types as numbers: bf16 to and from numpy, which has no such type, and the way to fp64 and back."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import CheckpointError, UsageError

__all__ = ["FLOATS", "HF_NAMES", "from_float64", "parse_dtype", "to_float64", "widest"]

FLOATS = ("BF16", "F16", "F32", "F64")
"""The types a weight may have, from narrow to wide (bf16 has fp32's range, fp16 has more bits)."""

HF_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}
"""safetensors' names -> torch's, which config.json uses."""

Array = NDArray[Any]


def parse_dtype(name: str) -> str:
    """The name in safetensors of a dtype given as torch's or its short form (bf16, float32, fp16, …).

    Raises:
        UsageError: it is none of the four.

    """
    short = {"bf16": "BF16", "f16": "F16", "fp16": "F16", "f32": "F32", "fp32": "F32", "f64": "F64", "fp64": "F64"}
    known = {**short, **{torch_name: ours for ours, torch_name in HF_NAMES.items()}}
    key = name.lower().removeprefix("torch.")
    if key not in known:
        raise UsageError(f"unknown dtype {name!r}", f"known: {', '.join(HF_NAMES.values())}")
    return known[key]


def widest(dtypes: list[str]) -> str:
    """The narrowest type that holds every value of all of them."""
    found = set(dtypes)
    if found == {"BF16", "F16"}:
        return "F32"
    return max(found, key=FLOATS.index)


def to_float64(array: Array, dtype: str) -> NDArray[np.float64]:
    """The values of an array in its carrier dtype, exactly."""
    if dtype == "BF16":
        array = (array.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(invalid="ignore"):  # what a signalling NaN makes the processor say
        return array.astype(np.float64)


def from_float64(values: NDArray[np.float64], dtype: str) -> Array:
    """Values rounded to nearest even in `dtype`, in its carrier dtype.

    Raises:
        CheckpointError: a finite value is beyond the dtype's range.

    """
    if dtype == "F64":
        return np.asarray(values, order="C")
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = values.astype(np.float16 if dtype == "F16" else np.float32)
    rounded: Array
    if dtype == "BF16":
        # fp64 -> fp32 -> bf16 would round twice: make the fp32 step round to odd, so that the second one decides.
        bits = narrow.view(np.uint32)
        back = narrow.astype(np.float64)
        inexact = (back != values) & np.isfinite(back)
        away = inexact & (np.abs(back) > np.abs(values))
        bits = np.where(away, bits - 1, bits)
        bits = np.where(inexact, bits | 1, bits).astype(np.uint32)
        finite = np.isfinite(values)
        rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        rounded = np.where(finite, rounded, np.where(np.isnan(values), 0x7FC0, bits >> 16)).astype(np.uint16)
        overflow = finite & ((rounded & 0x7F80) == 0x7F80)
    else:
        rounded, overflow = narrow, np.isfinite(values) & ~np.isfinite(narrow)
    if overflow.any():
        raise CheckpointError(f"{int(overflow.sum())} values do not fit {HF_NAMES[dtype]}")
    return np.asarray(rounded, order="C")
