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

from ...components import ModelSpec
from ...errors import SwapRefused
from ..base import Computed, Model, Moved, Swapped, Tensor, comparable, in_pieces
from ..registry import Asked, Clears, Step, Swap

__all__ = ["SWAPS"]

replace = msgspec.structs.replace

BOTH = ("embedding.weight", "head.weight")


def with_head(spec: ModelSpec, *, tied: bool) -> ModelSpec:
    """The tree with its head tied to the embedding, or not."""
    return replace(spec, head=replace(spec.head, tied=tied))


def untie(spec: ModelSpec, asked: Asked) -> Swapped:  # noqa: ARG001
    """The head with a copy of the table."""
    if not spec.head.tied:
        raise SwapRefused("the head has a matrix of its own already", "--tie makes it one with the embedding's.")
    made: Mapping[str, Tensor] = {"head.weight": Moved("embedding.weight")}
    return Swapped(with_head(spec, tied=False), "exact", made, summary(spec))


def tie(spec: ModelSpec, asked: Asked) -> Swapped:
    """One matrix for both: the one that both are, or the mean; with `approximate`, the embedding's for both."""
    if spec.head.tied:
        raise SwapRefused("the head is tied to the embedding already", "--untie gives it a matrix of its own.")
    shapes = {parameter.name: parameter.shape for parameter in spec.parameters()}
    table, head = shapes["embedding.weight"], shapes["head.weight"]
    if table != head:
        raise SwapRefused(f"the head is {head[0]} x {head[1]}, the embedding {table[0]} x {table[1]}: no one matrix")
    new = with_head(spec, tied=True)
    if asked.weights.same(*BOTH):
        # In the wider dtype of both, whose values are the same.
        return Swapped(new, "exact", {BOTH[0]: Moved(BOTH, lambda table, head: table)}, summary(spec))
    differing = asked.weights.ask(count_different, table[0], 0)
    note = f"the head and the embedding differ in {differing:,} of {table[0]:,} rows, so no tying is exact"
    if asked.approximate:
        how = "embedding"
        return Swapped(new, "approximate", {}, {**summary(spec), "matrix": how}, (f"{note}: the embedding's is kept",))
    made = {BOTH[0]: Computed(lambda model: (model.wide(BOTH[0]) + model.wide(BOTH[1])) / 2)}
    note += ": their mean stands for both"
    return Swapped(new, "approximate", made, {**summary(spec), "matrix": "mean"}, (note,))


def count_different(model: Model) -> int:
    """Rows in which head and embedding differ."""
    pieces = zip(*map(in_pieces, comparable(model, *BOTH)), strict=True)
    return sum(int((a != b).any(axis=1).sum()) for a, b in pieces)


def summary(spec: ModelSpec) -> dict[str, Any]:
    """What the output's record says of it."""
    return {"from": "tied" if spec.head.tied else "untied", "to": "untied" if spec.head.tied else "tied"}


ORDER = 20
SWAPS = (
    Swap(
        option="tie",
        form="",
        takes="untied head",
        gives="tied head",
        guarantee="exact",
        needs="the head's matrix equal to the embedding's; else their mean, approximate",
        source="Press and Wolf 1608.05859",
        reshape=tie,
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
        reshape=untie,
        examples=lambda spec: ("",) if spec.head.tied else (),
        inverse=lambda before, asked: Step("tie", ""),
        clears=(Clears("head.tied", theirs=False),),
    ),
)
