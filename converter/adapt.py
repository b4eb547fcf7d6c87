"""A checkpoint as a tree of another family, where that family can hold the same function exactly.

What may differ is what changes no function: how a component rounds, and biases. A bias that the family has and the tree
has not is added as zeros; one that the tree has and the family has not is left out where every value of it is zero,
which is looked up in the weights. Everything else that differs stands in the way.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np

from ..architectures import ARCHITECTURES, Architecture, BoundLeaf, named
from ..architectures.layout import IDENTITY
from ..architectures.obstacles import OWN_FORMAT, first_of, never
from ..components import ModelSpec, differences, without_rounding
from .dtypes import to_float64, widest
from .targets import Target
from .tensors import Checkpoint
from .weights import Stored


def adapted(source: Checkpoint, to: Target) -> tuple[Checkpoint, Target]:
    """The nearest tree of the family it is to be written as ("auto": the first that has one), and which that is; else
    CannotExpress.
    """
    if to.family is None:
        return source, to
    families = families_of(to.family, source.origin.family)

    def zero(name: str) -> bool:
        return not np.any(to_float64(*source.tensor(name)))

    found, refused = first_of(families, source.spec, cache(zero) if source.fetched else never)
    if found is None or found.found is None:
        nearest = min(refused, key=lambda each: each.weight)
        unread = len(refused) == 1 and not source.fetched and any(each.is_bias for each in nearest.standing)
        raise nearest.refusal(
            "Biases that are zero are no obstacle, but no weight was fetched to tell." if unread else OWN_FORMAT
        )
    family = families[len(refused)]
    return _as_tree(source, found.found, family), Target("hf", family.name)


def families_of(family: str | None, origin: str | None) -> list[Architecture]:
    """The family of that name; for none, and for "auto", all of them, the one that a checkpoint came from first."""
    if family not in (None, "auto"):
        return [named(str(family))]
    first = [] if origin is None else [named(origin)]
    return first + [each for each in ARCHITECTURES.values() if each.name != origin]


def _as_tree(source: Checkpoint, spec: ModelSpec, architecture: Architecture) -> Checkpoint:
    """The checkpoint under another tree: the tensors that it gains are zero, those that it loses are left."""
    if spec == source.spec:
        return source
    names, kept = ({parameter.name for parameter in each.parameters()} for each in (source.spec, spec))
    gained = [parameter for parameter in spec.parameters() if parameter.name not in names]
    lost = sorted(names - kept)
    dtype = widest([source.dtype_of(leaf) for leaf in source.leaves])
    zeros = {parameter.name: (dtype, parameter.shape) for parameter in gained}
    leaves = [BoundLeaf(name, shape, (name,), (shape,), IDENTITY, {}) for name, (_, shape) in zeros.items()]
    notes = list(source.notes)
    if gained:
        notes.append(
            f"{architecture.name} has {_kinds([p.name for p in gained])}: added as zeros, which change nothing"
        )
    if lost:
        notes.append(f"{architecture.name} has no {_kinds(lost)}: left out, every value of them is zero")
    rounding = differences(spec, without_rounding(spec)) != differences(source.spec, without_rounding(source.spec))
    if rounding:
        notes.append(f"the same function, rounded as {architecture.name} rounds: the last bits of logits may differ")
    return replace(
        source,
        spec=spec,
        leaves=[*source.leaves, *leaves],
        notes=notes,
        _weights=source._weights.with_more({name: Stored(None, *about) for name, about in zeros.items()}),
        _found={**source._found, **{name: name for name in zeros}},
    )


def _kinds(names: list[str]) -> str:
    """Tensors of all layers told once: attention.q_proj.bias, …"""
    kinds = dict.fromkeys(name.split(".", 2)[-1] if name.startswith("blocks.") else name for name in names)
    return ", ".join(kinds)
