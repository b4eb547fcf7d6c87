"""Convert arrays between dtypes.

numpy has no bf16 and fp8. Such an array has an integer dtype of the same width, its *carrier*: uint16 for bf16, uint8
for fp8. For other dtypes the carrier is numpy's own dtype.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import CheckpointError, UsageError

FLOATS = ("BF16", "F16", "F32", "F64")
"""The dtypes of unquantised weights, from narrow to wide.

Of BF16 and F16, neither is wider: BF16 has the larger range, F16 the higher precision.
"""

HF_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}
"""The dtype names of safetensors -> those of torch, which config.json uses."""

INTEGERS = ("I8", "U8", "I16", "U16", "I32", "U32")
"""Integer dtypes that can be cast to a float dtype if the user asks for it, because fp64 has all their values."""

F8 = ("F8_E4M3", "F8_E5M2")
"""The fp8 dtypes of quantised weights, which are stored with scales."""

Array = NDArray[Any]


def parse_dtype(name: str) -> str:
    """Return safetensors' name of a dtype, given torch's name or a short form (bf16, fp16, …). Raises UsageError."""
    short = {"bf16": "BF16", "f16": "F16", "fp16": "F16", "f32": "F32", "fp32": "F32", "f64": "F64", "fp64": "F64"}
    known = {**short, **{torch_name: ours for ours, torch_name in HF_NAMES.items()}}
    key = name.lower().removeprefix("torch.")
    if key not in known:
        raise UsageError(f"unknown dtype {name!r}", f"Choose one of {', '.join(HF_NAMES.values())}.")
    return known[key]


def widest(dtypes: list[str]) -> str:
    """Return the narrowest type that can represent all values of these types."""
    if len(set(dtypes)) == 1:
        return dtypes[0]
    return "F32" if set(dtypes) == {"BF16", "F16"} else max(dtypes, key=FLOATS.index)


def to_float64(array: Array, dtype: str) -> NDArray[np.float64]:
    """Return the exact values of an array of this dtype. bf16 arrays are given as uint16, fp8 arrays as uint8."""
    if dtype == "BF16":
        array = (array.astype(np.uint32) << 16).view(np.float32)
    elif dtype == "F8_E5M2":  # the upper half of fp16
        array = (array.astype(np.uint16) << 8).view(np.float16)
    elif dtype == "F8_E4M3":
        array = _E4M3[array]
    with np.errstate(invalid="ignore"):  # signalling NaNs set this flag
        return array.astype(np.float64)


def _e4m3() -> NDArray[np.float64]:
    """Return the values of all F8_E4M3 bytes: 4 exponent, 3 mantissa bits, no infinity (arXiv 2209.05433, table 1)."""
    exponent, mantissa = np.divmod(np.arange(128), 8)
    values = np.where(exponent, (1 + mantissa / 8) * 2.0 ** (exponent - 7), mantissa / 8 * 2.0**-6)
    values[-1] = np.nan
    return np.concatenate([values, -values])


_E4M3 = _e4m3()


def from_float64(values: NDArray[np.float64], dtype: str) -> Array:
    """Round values to the nearest ones of a float dtype, ties to even. bf16 is returned as uint16.

    Raises CheckpointError if a finite value is out of the dtype's range.
    """
    if dtype == "F64":
        return np.asarray(values, order="C")
    odd = not_finite(values, "F64")
    with np.errstate(over="ignore", invalid="ignore"):
        narrow: Array = values.astype(np.float16 if dtype == "F16" else np.float32)
    if dtype == "BF16":
        # fp64 -> fp32 -> bf16 would round twice. So round to odd in the fp32 step, and the second step is right.
        bits = narrow.view(np.uint32)
        back = narrow.astype(np.float64)
        inexact = (back != values) & np.isfinite(back)
        bits = np.where(inexact & (np.abs(back) > np.abs(values)), bits - 1, bits)
        narrow = _to_bf16(np.where(inexact, bits | 1, bits).astype(np.uint32).view(np.float32), odd)
    return _in_range(np.asarray(narrow, order="C"), dtype, odd)


def cast(array: Array, dtype: str, target: str) -> Array:
    """Cast an array from `dtype` to the float dtype `target`, rounding to nearest, ties to even.

    bf16 arrays are given and returned as uint16. Raises CheckpointError if a finite value is out of the target's range.
    """
    if dtype == target:
        return array
    if dtype in ("F64", "I32", "U32"):
        return from_float64(to_float64(array, dtype), target)
    if dtype == "BF16":
        single = (array.astype(np.uint32) << 16).view(np.float32)
    else:
        with np.errstate(invalid="ignore"):
            single = array.astype(np.float32, copy=False)
    if target == "F32":
        return single
    if target == "F64":
        with np.errstate(invalid="ignore"):
            return single.astype(np.float64)
    odd = not_finite(single, "F32")
    return _in_range(cast_freely(single, target, odd), target, odd)


def cast_freely(single: Array, target: str, odd: int | None = None) -> Array:
    """Cast fp32 to fp32, fp16 or bf16, rounding to nearest, ties to even. Values out of range become infinite.

    `odd` is the number of NaN and infinite values, if the caller knows it.
    """
    if target == "F32":
        return single
    with np.errstate(over="ignore", invalid="ignore"):
        if target == "F16":
            return single.astype(np.float16)
        return _to_bf16(single, not_finite(single, "F32") if odd is None else odd)


def _to_bf16(single: Array, odd: int) -> Array:
    """Round fp32 to bf16, to nearest, ties to even. `odd` is the number of NaN and infinite values."""
    bits = np.asarray(single, order="C").view(np.uint32)
    narrow = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    if odd:  # the sum may turn a NaN into a number
        narrow = np.where(np.isnan(single), np.uint16(0x7FC0), narrow)
        narrow = np.where(np.isinf(single), (bits >> 16).astype(np.uint16), narrow)
    return narrow


def _in_range(narrow: Array, dtype: str, odd: int) -> Array:
    """Return an array that was cast to a narrower dtype, if no value became infinite. Raises CheckpointError otherwise.

    `odd` is the number of values that were NaN or infinite before the cast.
    """
    if lost := not_finite(narrow, dtype) - odd:
        raise CheckpointError(f"{lost} values are too large for {HF_NAMES[dtype]}")
    return narrow


_EXPONENTS = {"BF16": ("<u2", 0x7F80), "F16": ("<u2", 0x7C00), "F32": ("<u4", 0x7F800000), "F64": ("<u8", 0x7FF << 52)}


def not_finite(array: Array, dtype: str) -> int:
    """Return the number of NaN and infinite values in the bytes of a contiguous array.

    `dtype` says how to interpret the bytes. The array itself may have any numpy dtype, such as uint8.
    """
    if dtype not in _EXPONENTS or not array.size:
        return 0
    carrier, mask = _EXPONENTS[dtype]
    exponents = array.reshape(-1).view(carrier) & np.dtype(carrier).type(mask)
    # First only the maximum: it suffices for tensors without such values, and is much cheaper than counting.
    return int(np.count_nonzero(exponents == mask)) if exponents.max() == mask else 0


@dataclass(frozen=True)
class Rounding:
    """The effect of casting one or several tensors to a narrower dtype.

    Adding two objects gives the effect for all of their tensors.
    """

    changed: int = 0
    """The number of values that changed."""
    zeroed: int = 0
    """The number of values that were not zero and became zero."""
    relative: float = 0.0
    """The largest change of a value, divided by the value."""

    def __add__(self, other: Rounding) -> Rounding:
        return Rounding(self.changed + other.changed, self.zeroed + other.zeroed, max(self.relative, other.relative))


def rounding(before: Array, dtype: str, after: Array, target: str) -> Rounding:
    """Return the effect of casting `before`, of type `dtype`, to `after`, of type `target`.

    bf16 arrays are given as uint16. NaN and infinite values are left out.
    """
    if dtype in FLOATS and widest([dtype, target]) == target:
        return Rounding()
    exact, rounded = to_float64(before, dtype), to_float64(after, target)
    with np.errstate(invalid="ignore", divide="ignore"):
        change = np.abs(rounded - exact)
        changed = change > 0
        if not changed.any():
            return Rounding()
        relative = float((change[changed] / np.abs(exact[changed])).max())
    return Rounding(int(changed.sum()), int((changed & (rounded == 0)).sum()), relative)


@dataclass(frozen=True)
class Quantisation:
    """The error of quantising one or several tensors. Adding two objects gives the error for all of their tensors."""

    largest: float = 0.0
    """The largest absolute error of a value."""
    errors: float = 0.0
    """The sum of the squared errors."""
    values: float = 0.0
    """The sum of the squared values."""

    @property
    def relative(self) -> float:
        """The root mean square of the errors, divided by the root mean square of the values."""
        return math.sqrt(self.errors / self.values) if self.values else 0.0

    def __add__(self, other: Quantisation) -> Quantisation:
        largest = max(self.largest, other.largest)
        return Quantisation(largest, self.errors + other.errors, self.values + other.values)


def quantisation(before: Array, dtype: str, after: Array) -> Quantisation:
    """Return the error of quantising `before`, which has the type `dtype`; a bf16 array is given as uint16.

    `after` has the dequantised values (fp32).
    """
    exact = to_float64(before, dtype).reshape(-1)
    error = after.reshape(-1) - exact
    return Quantisation(float(np.abs(error).max(initial=0.0)), float(error @ error), float(exact @ exact))
