"""Linear weights of the blocks rounded to nearest in few bits, and stored as the numbers that they then stand for.

int8: symmetric, one scale an output row, the largest weight at 127 (torchao's Int8WeightOnly). intB:G: asymmetric, a
scale and a zero point for every G inputs of a row, from their least to their largest (torchao's Int4WeightOnly). Norms,
biases, tables and the head stay. What this measures is the damage of the rounding; the files are as large as before.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...components import ModelSpec, Role
from ...errors import SwapRefused
from ..base import Computed, Swapped, Wide
from ..layerwise import chosen_layers
from ..registry import Asked, Swap
from ..stream import linears

__all__ = ["SWAPS"]


def by_row(weight: Wide, bits: int) -> Wide:
    """[out, in], each row on its own symmetric grid of 2^bits - 1 values."""
    top = 2 ** (bits - 1) - 1
    scale = np.abs(weight).max(axis=1, keepdims=True) / top
    scale = np.where(scale == 0, 1.0, scale)
    result: Wide = np.clip(np.rint(weight / scale), -top, top) * scale
    return result


def by_group(weight: Wide, bits: int, size: int) -> Wide:
    """[out, in], every `size` inputs of a row on a grid of 2^bits values from their least to their largest."""
    groups = weight.reshape(weight.shape[0], -1, size)
    low, high = groups.min(axis=2, keepdims=True), groups.max(axis=2, keepdims=True)
    scale = (high - low) / (2**bits - 1)
    scale = np.where(scale == 0, 1.0, scale)
    result: Wide = (np.rint((groups - low) / scale) * scale + low).reshape(weight.shape)
    return result


LINEAR: tuple[Role, ...] = ("reads", "inner", "writes")


def rounded_weights(spec: ModelSpec, layers: Sequence[int]) -> list[str]:
    """The weights of the linear maps in these layers; a router is none."""
    return [each.weight for layer in layers for each in linears(spec.blocks[layer], f"blocks.{layer}", *LINEAR)]


def quantise(spec: ModelSpec, asked: Asked) -> Swapped:
    """Round to nearest."""
    name, _, group = asked.value.partition(":")
    bits = Asked(name.removeprefix("int")).number("a number of bits", 2)
    if bits > 16:
        raise SwapRefused(f"{bits} bits are no fewer than the weights have", "Possible: int2 to int16.")
    size = asked.number("inputs a group") if group else None
    names = rounded_weights(spec, chosen_layers(spec, asked))
    shapes = {parameter.name: parameter.shape for parameter in spec.parameters()}
    for each in names:
        inputs = shapes[each][1]
        if size is not None and inputs % size:
            fits = [n for n in (16, 32, 64, 128, 256, inputs) if inputs % n == 0]
            raise SwapRefused(
                f"{each} has {inputs} inputs, which groups of {size} do not share out",
                f"Possible for it: {', '.join(f'int{bits}:{n}' for n in fits)}.",
            )

    def rounded(name: str) -> Computed:
        if size is None:
            return Computed(lambda model: by_row(model.wide(name), bits))
        return Computed(lambda model: by_group(model.wide(name), bits, size))

    summary = {"bits": bits, "group": size, "tensors": len(names)}
    return Swapped(spec, "approximate", {name: rounded(name) for name in names}, summary)


ORDER = 200
SWAPS: tuple[Swap, ...] = (
    Swap(
        option="quantize",
        form="intBITS:GROUP",
        takes="linear weights",
        gives="rounded to nearest, a scale and zero a group",
        guarantee="approximate",
        needs="inputs that the group size divides",
        source="torchao Int4WeightOnly",
        reshape=quantise,
        examples=lambda spec: (f"int4:{4 if spec.hidden_size % 16 else 16}",),
        by_layer=True,
    ),
    Swap(
        option="quantize",
        form="intBITS",
        takes="linear weights",
        gives="rounded to nearest, a scale a row",
        guarantee="approximate",
        needs="nothing",
        source="torchao Int8WeightOnly",
        reshape=quantise,
        examples=lambda spec: ("int8", "int4"),
        by_layer=True,
    ),
)
