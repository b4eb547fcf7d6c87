"""The head's matrix and the embedding's: tied and untied.

Untying copies the table to the head. Tying is exact where both hold the same values already. Where they do not, one
matrix T has to stand for an embedding E and a head H: T = (E + H) / 2 minimises |T - E|² + |T - H|². On a trained model
with matrices of its own (sample:llama) that costs a KL of 1.8 nats per token, where H for both costs 5.3 and E for both
7.3: a sum of matrices that have little in common still holds either.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from msgspec.structs import replace

from ...components import ModelSpec
from ...errors import SwapRefused
from ..base import Computed, Guarantee, Moved, Swapped, Tensor, differing
from ..options import VOCABULARY, Option
from ..registry import Asked, Clears, Step, Swap

BOTH = ("embedding.weight", "head.weight")


def other(spec: ModelSpec, guarantee: Guarantee, made: Mapping[str, Tensor], *notes: str, **more: Any) -> Swapped:
    """The tree with its head tied to the embedding where it was not, or untied."""
    tied, words = spec.head.tied, {True: "tied", False: "untied"}
    new = replace(spec, head=replace(spec.head, tied=not tied))
    return Swapped(new, guarantee, made, {"from": words[tied], "to": words[not tied], **more}, notes)


def untie(spec: ModelSpec, asked: Asked) -> Swapped:  # noqa: ARG001
    """The head with a copy of the table."""
    if not spec.head.tied:
        raise SwapRefused("the head has a matrix of its own already", "--tie makes it one with the embedding's.")
    return other(spec, "exact", {"head.weight": Moved("embedding.weight")})


def tie(spec: ModelSpec, asked: Asked) -> Swapped:
    """One matrix for both: the one that both are, or the mean; with `approximate`, the embedding's for both."""
    if spec.head.tied:
        raise SwapRefused("the head is tied to the embedding already", "--untie gives it a matrix of its own.")
    shapes = {parameter.name: parameter.shape for parameter in spec.parameters()}
    table, head = (shapes[name] for name in BOTH)
    if table != head:
        raise SwapRefused(f"the head is {head[0]} x {head[1]}, the embedding {table[0]} x {table[1]}: no one matrix")
    if asked.weights.same(*BOTH):
        # In the wider dtype of both, whose values are the same.
        return other(spec, "exact", {BOTH[0]: Moved(BOTH, lambda table, head: table)})
    differ = asked.weights.ask(lambda model: sum(differing(model, *BOTH)), table[0], 0)
    note = f"the head and the embedding differ in {differ:,} of {table[0]:,} rows, so no tying is exact: "
    if asked.approximate:
        return other(spec, "approximate", {}, f"{note}the embedding's is kept", matrix="embedding")
    mean = Computed(lambda model: (model.wide(BOTH[0]) + model.wide(BOTH[1])) / 2)
    return other(spec, "approximate", {BOTH[0]: mean}, f"{note}their mean stands for both", matrix="mean")


entry = partial(Swap, form="", source="Press and Wolf 1608.05859")

ORDER = 20
OPTIONS = (
    Option("tie", VOCABULARY, 2, "Share one table between embedding and head."),
    Option("untie", VOCABULARY, 3, "Give the head a table of its own."),
)
SWAPS = (
    entry(
        option="tie",
        takes="untied head",
        gives="tied head",
        needs="the head's matrix equal to the embedding's; else their mean, approximate",
        reshape=tie,
        inverse=lambda before, asked: Step("untie", ""),
        clears=(Clears("head.tied", theirs=True),),
    ),
    entry(
        option="untie",
        takes="tied head",
        gives="untied head",
        needs="a tied head",
        reshape=untie,
        inverse=lambda before, asked: Step("tie", ""),
        clears=(Clears("head.tied", theirs=False),),
    ),
)
