"""Leaving again: the Hugging Face architecture that can hold a tree, or what is in the way and what would clear it.

A family holds a tree where its config.json says all of it (`Architecture.config_for`), or nearly: how components round
is no obstacle, and biases of zeros come and go. Where no family holds the tree, the ones that come nearest are listed
with the components in their way. Some of these another swap would clear: `clearing` tries the registered ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from ..architectures import ARCHITECTURES, Architecture, named
from ..architectures.base import short
from ..converter.adapt import nearest_tree, obstacles, without_biases
from ..errors import CannotExpress, SwapRefused, UsageError
from ..spec import ModelSpec
from .base import Exactly, Filled, Model, Swapped, SwappedModel, Tensor
from .measure import measure
from .registry import Step, apply

__all__ = ["Clearing", "clearing", "fitting", "leave", "nearest_families"]

REMEDIES = (
    Step("drop", "head.bias"),
    Step("drop", "norm.bias"),
    Step("drop", "key.bias"),
    Step("drop", "biases"),
    Step("fold", "value-bias"),
    Step("fold", "scale:head"),
    Step("fold", "norm"),
    Step("untie", ""),
    Step("position", "rope:neutral"),
    Step("rope_pairs", "halves"),
    Step("mlp", "gated"),
    Step("mlp", "plain"),
    Step("mlp", "dense"),
    Step("norm", "rmsnorm"),
    Step("attention", "mha"),
)
"""Swaps that may bring a tree into a family, those that cost nothing or little."""
TRIED = 2
"""Swaps that are tried together."""
SMALL = 50_000_000
"""Parameters of a model whose damage is measured only to tell of it."""
SHOWN = 3
"""Families, and obstacles of each, in a message."""


def families(origin: str | None) -> Iterator[Architecture]:
    """All families, the one that the checkpoint came from first."""
    first = None if origin is None else named(origin)
    if first is not None:
        yield first
    yield from (each for each in ARCHITECTURES.values() if each is not first)


def zero_biases(model: Model) -> set[str]:
    """The names of the biases whose every value is zero."""
    names = [parameter.name for parameter in model.spec.parameters() if parameter.name.endswith("bias")]
    return {name for name in names if not np.any(model.wide(name))}


def fitting(architecture: Architecture, spec: ModelSpec, zero: set[str]) -> ModelSpec | None:
    """The tree that a family has for this one's function, None where it has none. `zero` are biases that are zero."""
    try:
        architecture.config_for(spec)
    except CannotExpress:
        found = nearest_tree(architecture, spec, without_biases(spec, zero))
    else:
        found = spec
    if found is None:
        return None
    try:
        architecture.bind(found)  # a config may say what its checkpoints have no names for
    except CannotExpress:
        return None
    return found


def leave(model: Model, origin: str | None, to: str) -> tuple[Architecture, Swapped | None]:
    """The family for a tree, and the last step into its own form: biases of zeros that it has, or has not.

    Args:
        model: the tree.
        origin: the family that the checkpoint came from, the first to be tried.
        to: "auto", "hf" (the one that it came from) or "hf:FAMILY".

    Raises:
        CannotExpress: there is none; what is in the way is listed, and what would clear it.

    """
    family = to.partition(":")[2] or (origin if to == "hf" else None)
    tried = [named(family)] if family else list(families(origin))
    zero = zero_biases(model)
    for architecture in tried:
        found = fitting(architecture, model.spec, zero)
        if found is not None:
            return architecture, into(model, found, architecture)
    raise in_the_way(model, tried)


def into(model: Model, spec: ModelSpec, architecture: Architecture) -> Swapped | None:
    """The step from a tree to the one that a family has for it; None where they are the same."""
    if spec == model.spec:
        return None
    old = {parameter.name for parameter in model.spec.parameters()}
    weights = [name for name in old if not name.endswith("bias")]
    like = max(weights, key=lambda name: (np.prod(model.raw(name)[0].shape), name)) if weights else ""
    gained = [parameter for parameter in spec.parameters() if parameter.name not in old]
    tensors: dict[str, Tensor] = {each.name: Filled(each.shape, 0.0, like) for each in gained}
    lost = sorted(old - {parameter.name for parameter in spec.parameters()})
    notes = []
    if gained:
        notes.append(f"{architecture.name} has biases that this model has not ({len(gained)}): they are zeros")
    if lost:
        notes.append(f"{architecture.name} has no {lost[0]} and {len(lost) - 1} others like it, all zeros: left out")
    record = {"swap": "as", "as": f"hf:{architecture.name}", "guarantee": "exact"}
    return Swapped(spec, "exact", tensors, record, tuple(notes))


# --- what is in the way, and what would clear it ----------------------------------------------------------------------


@dataclass(frozen=True)
class Clearing:
    """Swaps after which a family holds a tree, the tree after them, and whether they are all exact."""

    family: str
    steps: tuple[Step, ...]
    model: Model
    exact: bool

    def __str__(self) -> str:
        return " ".join(str(step) for step in self.steps)


def nearest_families(
    model: Model, tried: Sequence[Architecture]
) -> list[tuple[Architecture, list[tuple[str, Any, Any]]]]:
    """Families that have a config for something like the tree, the one with the fewest differences first."""
    found = []
    for architecture in tried:
        between = obstacles(architecture, model.spec)
        if between is not None:
            found.append((architecture, between))
    return sorted(found, key=lambda pair: len(pair[1]))


def clearing(model: Model, tried: Sequence[Architecture]) -> Clearing | None:
    """The fewest registered swaps after which one of the families holds the tree; exact ones before others."""
    for count in range(1, TRIED + 1):
        approximate: Clearing | None = None
        for steps in combinations(REMEDIES, count):
            after, exact = _after(model, steps)
            if after is None:
                continue
            zero = zero_biases(after)
            for architecture in tried:
                if fitting(architecture, after.spec, zero) is not None:
                    found = Clearing(architecture.name, steps, after, exact)
                    if exact:
                        return found
                    approximate = approximate or found
        if approximate is not None:
            return approximate
    return None


def _after(model: Model, steps: Sequence[Step]) -> tuple[Model | None, bool]:
    """(the tree after steps, whether all of them are exact); None where one of them is not possible or not needed."""
    exact = True
    for step in steps:
        try:
            swapped = apply(model, step)
        except (SwapRefused, UsageError):
            return None, False
        if swapped.spec == model.spec or swapped.guarantee == "retrained":
            return None, False
        exact = exact and swapped.guarantee == "exact"
        model = SwappedModel(model, swapped)
    return model, exact


def in_the_way(model: Model, tried: Sequence[Architecture]) -> CannotExpress:
    """What stands between a tree and the families that come nearest to it."""
    lines = []
    near = nearest_families(model, tried)
    for architecture, between in near[:SHOWN]:
        told = [f"{path} is {short(a)}, there {short(b)}" for path, a, b in between[:SHOWN]]
        told += [f"and {len(between) - SHOWN} more"] if len(between) > SHOWN else []
        told = told or ["its checkpoints have no names for some tensors"]
        lines += [f"  {architecture.name}: {told[0]}", *(f"    {each}" for each in told[1:])]
    if not near:
        lines = [f"  {architecture.name}: {refusal(architecture, model.spec)}" for architecture in tried[:SHOWN]]
    which = "no transformers architecture" if len(tried) > 1 else tried[0].name
    message = f"{which} {'can' if len(tried) > 1 else 'cannot'} hold this tree. In the way:\n" + "\n".join(lines)
    way = clearing(model, tried)
    if way is None:
        return CannotExpress(message, "gptkit's own format holds any tree: --as local")
    kept = "changes nothing" if way.exact else cost(model, way)
    return CannotExpress(message, f"It falls short of {way.family} by what {way} would clear, which {kept}.")


def refusal(architecture: Architecture, spec: ModelSpec) -> str:
    """Why a family has no config at all for anything like a tree."""
    try:
        architecture.config_for(spec)
        architecture.bind(spec)
    except CannotExpress as error:
        return error.message.partition(": ")[2] or error.message
    return "its own form of this tree computes something else"


def cost(model: Model, way: Clearing) -> str:
    """What clearing the way costs, measured on models that are quickly run."""
    if sum(parameter.count for parameter in model.spec.parameters()) > SMALL:
        return "costs something: swap it and see"
    kl = measure(Exactly(model), Exactly(way.model), dtypes=("float32",)).kl
    return f"costs KL {kl:.2g} on the probe"
