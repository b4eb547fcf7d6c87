"""What may be asked of a tree: how many tokens and sequences, in which dtype. No torch, no numpy."""

from ..components import ModelSpec
from ..errors import UsageError

DTYPES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1}
"""Bytes a number by torch's names, which config.json uses."""

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
"""Other names of the same, those of safetensors among them, in lower case."""

MOST = 2**31 - 1  # tokens, sequences: as many as a tree's own sizes may be


def full_dtype(dtype: str) -> str:
    """A dtype's name as torch spells it, in whatever way it was given (bf16, BF16, torch.bfloat16).

    Raises:
        UsageError: it is none of `DTYPES`.
    """
    name = dtype.lower().removeprefix("torch.")
    name = _SHORT.get(name, name)
    if name not in DTYPES:
        raise UsageError(f"unknown dtype {dtype!r:.40}", f"Choose one of {', '.join(DTYPES)}.")
    return name


def itemsize(dtype: str) -> int:
    """Bytes a number of a dtype; raises as `full_dtype`."""
    return DTYPES[full_dtype(dtype)]


def check_number(what: str, number: int) -> None:
    """Refuse a number of tokens or sequences that nobody has.

    Raises:
        UsageError: below 1, or absurdly large.
    """
    if not 1 <= number <= MOST:
        raise UsageError(f"the number of {what} must be from 1 to {MOST:,}, not {number}")


def check_sizes(spec: ModelSpec, tokens: int, batch: int) -> None:
    """Refuse what no forward pass could be run on.

    Raises:
        UsageError: fewer than one token or sequence, absurdly many, or more tokens than the table of positions has.
    """
    check_number("tokens", tokens)
    check_number("sequences", batch)
    if spec.positions is not None and tokens > spec.positions.length:
        raise UsageError(
            f"{tokens:,} tokens do not fit the model's table of {spec.positions.length:,} positions",
            f"Choose a context of at most {spec.positions.length:,} tokens.",
        )
