"""Linear weights of the blocks rounded to nearest in few bits, and stored as the numbers that they then stand for.

int8: symmetric, one scale an output row, the largest weight at 127 (torchao's Int8WeightOnly). intB:G: asymmetric, a
scale and a zero point for every G inputs of a row, from their least to their largest (torchao's Int4WeightOnly). Norms,
biases, tables and the head stay. What this measures is the damage of the rounding; the files are as large as before.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..components import ModelSpec
from ..errors import SwapRefused
from .base import Computed, Model, Swapped, Wide
from .registry import Asked, Swap

__all__ = ["SWAPS", "by_group", "by_row", "linears"]


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


def linears(spec: ModelSpec, layers: tuple[int, ...]) -> list[str]:
    """The weights of the linear maps in these layers."""
    return [p.name for p in spec.parameters() if p.layer in layers and p.name.endswith("_proj.weight")]


def quantise(model: Model, asked: Asked) -> Swapped:
    """Round to nearest."""
    name, _, group = asked.value.partition(":")
    bits = Asked(name.removeprefix("int")).number("a number of bits", 2)
    if bits > 16:
        raise SwapRefused(f"{bits} bits are no fewer than the weights have", "Possible: int2 to int16.")
    size = asked.number("inputs a group") if group else None
    names = linears(model.spec, asked.chosen(model.spec))
    shapes = {parameter.name: parameter.shape for parameter in model.spec.parameters()}
    for each in names:
        inputs = shapes[each][1]
        if size is not None and inputs % size:
            fits = [n for n in (16, 32, 64, 128, 256, inputs) if inputs % n == 0]
            raise SwapRefused(
                f"{each} has {inputs} inputs, which groups of {size} do not share out",
                f"Possible for it: {', '.join(f'int{bits}:{n}' for n in fits)}.",
            )

    def rounded(weight: str) -> Callable[[Model], Wide]:
        def make(model: Model) -> Wide:
            values = model.wide(weight)
            return by_row(values, bits) if size is None else by_group(values, bits, size)

        return make

    summary = {"bits": bits, "group": size, "tensors": len(names)}
    return Swapped(model.spec, "approximate", {each: Computed(rounded(each)) for each in names}, summary)


SWAPS: tuple[Swap, ...] = (
    Swap(
        option="quantize",
        form="intBITS:GROUP",
        takes="linear weights",
        gives="rounded to nearest, a scale and zero a group",
        guarantee="approximate",
        needs="inputs that the group size divides",
        source="torchao Int4WeightOnly",
        apply=quantise,
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
        apply=quantise,
        examples=lambda spec: ("int8", "int4"),
        by_layer=True,
    ),
)
