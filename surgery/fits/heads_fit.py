"""Fewer query heads by a text: those go that the others can best make up for, o_proj being fitted again; a head at a
time (Optimal Brain Surgeon, Hassibi & Stork 1993, on the second moments of what o_proj reads).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..base import Model, Wide
from ..gather import Index, by_head, gather
from ..heads import Grouped, kept, parts, remaining
from .units import refit, with_ridge

if TYPE_CHECKING:
    from .calibration import Calibration

__all__ = ["fit"]


def by_need(old: Wide, moments: Wide, size: int) -> Callable[[list[int]], Callable[[Index], float]]:
    """By how much o_proj's output [hidden] is off, on average, without a unit, the rest fitted again.

    old [hidden, heads · size (and 1 for a bias)]; moments are the second moments of what it is multiplied with.
    """

    def costs(left: list[int]) -> Callable[[Index], float]:
        index = with_bias(np.array(left), size, old.shape[1])
        weight = refit(old, moments, index)
        inverse = np.linalg.inv(with_ridge(moments, index))

        def cost(unit: Index) -> float:
            at = np.concatenate([np.arange(size) + left.index(head) * size for head in unit.tolist()])
            part = weight[:, at]
            return float((part * np.linalg.solve(inverse[np.ix_(at, at)], part.T).T).sum())

        return cost

    return costs


def with_bias(heads: Index, size: int, columns: int) -> Index:
    """The columns of some heads, and those after the last head's."""
    whole = columns // size * size
    return np.append(by_head(heads, np.arange(size), size), np.arange(whole, columns)).astype(np.int64)


def fit(
    model: Model, fitting: Mapping[int, tuple[int, Sequence[Index]]], new: int, calibration: Calibration
) -> Iterator[dict[str, Wide]]:
    """The tensors of one layer's attention after the other."""
    for layer in calibration.walk(model):
        if layer.index in fitting:
            _, seen = layer.run(["attention.o_proj"])
            rows = seen["attention.o_proj"][0]
            activations = rows.reshape(-1, rows.shape[-1]).double().numpy()
            attention = model.spec.blocks[layer.index].attention
            yield fit_one(model, f"blocks.{layer.index}.attention", attention, fitting[layer.index], new, activations)


def fit_one(
    model: Model,
    path: str,
    attention: Grouped,
    how: tuple[int, Sequence[Index]],
    new: int,
    activations: Wide,
) -> dict[str, Wide]:
    """The tensors of the heads that are needed most, and o_proj fitted to them.

    A bias is the weight of an input that is always 1, and always stays.
    """
    (keys, units), (*before, output) = how, parts(path, attention)
    old, bias = model.wide(output.name), f"{path}.o_proj.bias"
    if attention.output_bias:
        old = np.concatenate([old, model.wide(bias)[:, None]], axis=1)
        activations = np.concatenate([activations, np.ones((len(activations), 1))], axis=1)
    moments = activations.T @ activations / len(activations)
    choice = kept(attention, remaining(attention, units, new, keys, by_need(old, moments, output.size)))
    arrays = {}
    for part in before:
        heads = choice.keys if part.keys else choice.heads
        arrays[part.name] = gather(model.wide(part.name), by_head(heads, np.arange(part.size), part.size), part.axis)
    fresh = refit(old, moments, with_bias(choice.heads, output.size, old.shape[1]))
    arrays[output.name] = fresh[:, : new * output.size]
    return arrays | ({bias: fresh[:, -1]} if attention.output_bias else {})
