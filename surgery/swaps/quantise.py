"""Linear weights of the blocks rounded to nearest in few bits, and stored as the numbers that they then stand for.

int8: symmetric, one scale an output row, the largest weight at 127 (torchao's Int8WeightOnly). intB:G: asymmetric, a
scale and a zero point for every G inputs of a row, from their least to their largest (torchao's Int4WeightOnly). Norms,
biases, tables and the head stay. What this measures is the damage of the rounding; the files are as large as before.
"""

import math
from collections.abc import Mapping
from functools import partial

import numpy as np

from ...components import ModelSpec
from ...errors import SwapRefused
from ..base import Computed, Swapped, Wide
from ..layerwise import linears
from ..options import WEIGHTS, Option
from ..registry import Asked, Swap


def by_row(weight: Wide, bits: int) -> Wide:
    """[out, in], each row on its own symmetric grid of 2^bits - 1 values."""
    top = 2 ** (bits - 1) - 1
    scale = np.abs(weight).max(axis=1, keepdims=True) / top
    scale[scale == 0] = 1.0
    return np.asarray(np.clip(np.rint(weight / scale), -top, top) * scale)


def by_group(weight: Wide, bits: int, size: int) -> Wide:
    """[out, in], every `size` inputs of a row on a grid of 2^bits values from their least to their largest."""
    groups = weight.reshape(weight.shape[0], -1, size)
    low, high = groups.min(axis=2, keepdims=True), groups.max(axis=2, keepdims=True)
    scale = (high - low) / (2**bits - 1)
    scale[scale == 0] = 1.0
    return np.asarray((np.rint((groups - low) / scale) * scale + low).reshape(weight.shape))


def _quantise(spec: ModelSpec, asked: Asked) -> Swapped:
    """The weights of the linear maps in these layers, rounded to nearest; a router is none, nor a kernel."""
    name, _, group = asked.value.partition(":")
    bits = Asked(name.removeprefix("int")).number("a number of bits", 2)
    if bits > 16:
        raise SwapRefused(f"{bits} bits are no fewer than the weights have", "Possible: int2 to int16.")
    size = asked.number("inputs a group") if group else None
    shapes = {parameter.name: parameter.shape for parameter in spec.parameters()}
    layers = asked.those(spec, lambda _: True)
    found = [linears(spec.blocks[layer], f"blocks.{layer}", "reads", "inner", "writes") for layer in layers]
    names = [linear.weight for each in found for linear in each]
    if size is not None:
        _require_whole_groups(bits, size, {name: shapes[name][1] for name in names})
    rounded = partial(by_row, bits=bits) if size is None else partial(by_group, bits=bits, size=size)
    tensors = {name: Computed(lambda model, name=name: rounded(model.wide(name))) for name in names}  # type: ignore[misc]
    return Swapped(spec, "approximate", tensors, {"bits": bits, "group": size, "tensors": len(tensors)})


def _require_whole_groups(bits: int, size: int, widths: Mapping[str, int]) -> None:
    """Raise SwapRefused where a weight's inputs cannot be divided into groups of `size`, and name sizes that divide
    the inputs of every weight that is asked for.
    """
    refused = next((name for name, inputs in widths.items() if inputs % size), None)
    if refused is None:
        return
    common = math.gcd(*widths.values())
    accepted = [n for n in (16, 32, 64, 128, 256) if common % n == 0] or [common]
    forms = [f"int{bits}:{n}" for n in accepted if n > 1] or [f"int{bits}, one group a row"]
    reason = f"{refused} has {widths[refused]} inputs, which cannot be divided into groups of {size}"
    raise SwapRefused(reason, f"Possible here: {', '.join(forms)}.")


_entry = partial(
    Swap,
    option="quantize",
    takes="linear weights",
    guarantee="approximate",
    reshape=_quantise,
    by_layer=True,
    apart=True,
    each_stack=True,
)

ORDER = 200
OPTIONS = (
    Option(
        "quantize",
        WEIGHTS,
        4,
        "Round weights to so few bits; they are stored as before.",
        "int8 | int4:64",
        words="int8 = 8 bit, i8; int4 = 4 bit, i4; int2; int3; int5; int6; int7",
    ),
)
SWAPS = (
    _entry(
        form="intBITS:GROUP",
        gives="rounded to nearest, a scale and zero a group",
        needs="inputs that the group size divides",
        source="torchao Int4WeightOnly",
        examples=lambda spec: (f"int4:{4 if spec.hidden_size % 16 else 16}",),
    ),
    _entry(
        form="intBITS",
        gives="rounded to nearest, a scale a row",
        needs="nothing",
        source="torchao Int8WeightOnly",
        examples=lambda spec: ("int8", "int4"),
    ),
)
