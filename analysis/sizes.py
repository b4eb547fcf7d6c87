"""Checks of dtypes and of numbers of tokens and sequences. No torch, no numpy."""

from ..components import ModelSpec
from ..errors import UsageError

DTYPES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1}
"""torch's names of dtypes, which config.json uses -> the size of one number in bytes."""

_SHORT = {
    "f64": "float64",
    "fp64": "float64",
    "f32": "float32",
    "fp32": "float32",
    "bf16": "bfloat16",
    "f16": "float16",
    "fp16": "float16",
    "fp8": "float8_e4m3fn",
    "f8_e4m3": "float8_e4m3fn",
    "f8_e5m2": "float8_e5m2",
    "i8": "int8",
}
"""Other names of dtypes in lower case, including those of safetensors."""

MOST = 2**31 - 1  # the largest number of tokens or sequences, and the largest size in a model


def full_dtype(dtype: str) -> str:
    """Return torch's name of a dtype, from any usual spelling (bf16, BF16, torch.bfloat16).

    Raises:
        UsageError: the dtype is not in `DTYPES`.
    """
    name = dtype.lower().removeprefix("torch.")
    name = _SHORT.get(name, name)
    if name not in DTYPES:
        raise UsageError(f"unknown dtype {dtype!r:.40}", f"Choose one of {', '.join(DTYPES)}.")
    return name


def itemsize(dtype: str) -> int:
    """Return the size in bytes of one number in this dtype. Raises the same errors as `full_dtype`."""
    return DTYPES[full_dtype(dtype)]


def check_number(what: str, number: int) -> None:
    """Raise UsageError if a number of tokens or sequences (`what`) is below 1 or above `MOST`."""
    if not 1 <= number <= MOST:
        raise UsageError(f"the number of {what} must be from 1 to {MOST:,}, not {number}")


def check_sizes(spec: ModelSpec, tokens: int, batch: int) -> None:
    """Check that a model can read a batch of `batch` sequences of `tokens` tokens.

    Raises:
        UsageError: `tokens` or `batch` is below 1 or above `MOST`, or there are more tokens than positions in the
            model's position table.
    """
    check_number("tokens", tokens)
    check_number("sequences", batch)
    if spec.positions is not None and tokens > spec.positions.length:
        raise UsageError(
            f"{tokens:,} tokens do not fit the model's table of {spec.positions.length:,} positions",
            f"Choose a context of at most {spec.positions.length:,} tokens.",
        )
