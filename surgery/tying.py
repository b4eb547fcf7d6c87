"""The head's matrix and the embedding's: tied and untied.

Untying copies the table to the head. Tying is exact where both hold the same values already. Where they do not, one
matrix T has to stand for an embedding E and a head H: T = (E + H) / 2 minimises |T - E|² + |T - H|². On a trained model
with matrices of its own (sample:llama) that costs a KL of 1.8 nats per token, where H for both costs 5.3 and E for both
7.3: a sum of matrices that have little in common still holds either.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from ..components import ModelSpec
from ..errors import SwapRefused
from .base import Computed, Model, Moved, Swapped, SwappedModel, Tensor, Wide
from .registry import Asked, Clears, Step, Swap

__all__ = ["SWAPS", "tie", "untie"]

replace = msgspec.structs.replace

ROWS = 4096
"""Rows of both matrices that are compared at once."""


def with_head(spec: ModelSpec, *, tied: bool) -> ModelSpec:
    """The tree with its head tied to the embedding, or not."""
    return replace(spec, head=replace(spec.head, tied=tied))


def untie(model: Model, asked: Asked) -> Swapped:  # noqa: ARG001
    """The head with a copy of the table.

    Raises:
        SwapRefused: it has a matrix of its own already.

    """
    if not model.spec.head.tied:
        raise SwapRefused("the head has a matrix of its own already", "--tie makes it one with the embedding's.")
    made: Mapping[str, Tensor] = {"head.weight": Moved("embedding.weight")}
    return Swapped(with_head(model.spec, tied=False), "exact", made, summary(model.spec))


def tie(model: Model, asked: Asked) -> Swapped:
    """One matrix for both: the one that both are, or the mean; with `approximate`, the embedding's for both.

    Raises:
        SwapRefused: they are tied, or of different shapes.

    """
    spec = model.spec
    if spec.head.tied:
        raise SwapRefused("the head is tied to the embedding already", "--untie gives it a matrix of its own.")
    shapes = {parameter.name: parameter.shape for parameter in spec.parameters()}
    table, head = shapes["embedding.weight"], shapes["head.weight"]
    if table != head:
        raise SwapRefused(f"the head is {head[0]} x {head[1]}, the embedding {table[0]} x {table[1]}: no one matrix")
    new = with_head(spec, tied=True)
    if same_values(model, "embedding.weight", "head.weight"):
        alike = model.dtype("embedding.weight") == model.dtype("head.weight")
        made: dict[str, Tensor] = {} if alike else {"embedding.weight": either()}
        return Swapped(new, "exact", made, summary(spec))
    note = f"the head and the embedding differ in {count_different(model):,} of {table[0]:,} rows, so no tying is exact"
    if asked.approximate:
        how = "embedding"
        return Swapped(new, "approximate", {}, {**summary(spec), "matrix": how}, (f"{note}: the embedding's is kept",))
    made = {"embedding.weight": Computed(mean_of_both)}
    note += ": their mean stands for both"
    return Swapped(new, "approximate", made, {**summary(spec), "matrix": "mean"}, (note,))


def either() -> Moved:
    """The table in the wider dtype of both, whose values are the same."""
    return Moved(("embedding.weight", "head.weight"), lambda table, head: table)


def mean_of_both(model: Model) -> Wide:
    """The one matrix that is nearest to both."""
    result: Wide = (model.wide("embedding.weight") + model.wide("head.weight")) / 2
    return result


def same_values(model: Model, one: str, other: str) -> bool:
    """Whether two tensors are equal in value: by their stored bits where both are stored alike."""
    a, b = _arrays(model, one, other)
    return all(np.array_equal(a[i : i + ROWS], b[i : i + ROWS]) for i in range(0, len(a), ROWS))


def count_different(model: Model) -> int:
    """Rows in which head and embedding differ."""
    a, b = _arrays(model, "embedding.weight", "head.weight")
    return sum(int((a[i : i + ROWS] != b[i : i + ROWS]).any(axis=1).sum()) for i in range(0, len(a), ROWS))


def _arrays(model: Model, one: str, other: str) -> tuple[np.ndarray, np.ndarray]:
    # What an earlier step computes is compared before it is rounded for storage.
    computed = isinstance(model, SwappedModel) and (model.computed(one) or model.computed(other))
    if model.dtype(one) == model.dtype(other) and not computed:
        return model.raw(one)[0], model.raw(other)[0]
    return model.wide(one), model.wide(other)


def summary(spec: ModelSpec) -> dict[str, Any]:
    """What the output's record says of it."""
    return {"from": "tied" if spec.head.tied else "untied", "to": "untied" if spec.head.tied else "tied"}


SWAPS = (
    Swap(
        option="tie",
        form="",
        takes="untied head",
        gives="tied head",
        guarantee="exact",
        needs="the head's matrix equal to the embedding's; else their mean, approximate",
        source="Press and Wolf 1608.05859",
        apply=tie,
        examples=lambda spec: () if spec.head.tied else ("",),
        inverse=lambda before, asked: Step("untie", ""),
        clears=(Clears("head.tied", theirs=True),),
    ),
    Swap(
        option="untie",
        form="",
        takes="tied head",
        gives="untied head",
        guarantee="exact",
        needs="a tied head",
        source="Press and Wolf 1608.05859",
        apply=untie,
        examples=lambda spec: ("",) if spec.head.tied else (),
        inverse=lambda before, asked: Step("tie", ""),
        clears=(Clears("head.tied", theirs=False),),
    ),
)
