"""The last step of a chain of swaps: into the form of a Hugging Face family that can hold the tree.

A family holds a tree where its config.json says all of it, or all but how components round and biases of zeros, which
come and go. Where no family does, `remedies` says which swaps would clear the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np

from ..architectures import Architecture, named
from ..architectures.obstacles import Zero, first_of
from ..components import ModelSpec
from ..converter.adapt import any_family
from ..converter.dtypes import widest
from ..converter.targets import FOLDERS, Target, target
from .base import Filled, Model, Swapped, Tensor
from .remedies import in_the_way


def zero_in(model: Model) -> Zero:
    """Whether every value of a bias is zero, each looked at once and only when it is asked for."""
    return cache(lambda name: not np.any(model.wide(name)))


def leave(model: Model, origin: str | None, to: str | Target) -> tuple[Architecture, Swapped | None]:
    """The family for a tree, and the last step into its own form: biases of zeros that it has, or has not.

    `origin` is the family that the checkpoint came from; `to` is "hf:auto", "hf" (the one that it came from, which is
    the first to be tried, or any where there is none) or "hf:FAMILY". Raises CannotExpress where there is none, with
    what is in the way and what would clear it, UnknownFamily for FAMILY, and UsageError for another format.
    """
    family, zero = target(to, FOLDERS).family or origin, zero_in(model)
    tried = any_family(origin) if family in (None, "auto") else [named(str(family))]
    found, refused = first_of(tried, model.spec, zero)
    if found is None or found.found is None:
        raise in_the_way(model, tried, refused, zero)
    architecture = tried[len(refused)]
    return architecture, into(model, found.found, architecture)


def into(model: Model, spec: ModelSpec, architecture: Architecture) -> Swapped | None:
    """The step from a tree to the one that a family has for it; None where they are the same."""
    if spec == model.spec:
        return None
    old, new = ({each.name: each.shape for each in tree.parameters()} for tree in (model.spec, spec))
    gained, lost = [name for name in new if name not in old], sorted(old.keys() - new.keys())
    tensors: dict[str, Tensor] = {name: Filled(new[name], 0.0, beside(model, name)) for name in gained}
    notes = []
    if gained:
        notes.append(f"{architecture.name} has {kinds(gained)}: added as zeros")
    if lost:
        notes.append(f"{architecture.name} has no {kinds(lost)}: left out, all zeros")
    record = {"swap": "as", "as": f"hf:{architecture.name}", "guarantee": "exact"}
    return Swapped(spec, "exact", tensors, record, tuple(notes))


def beside(model: Model, name: str) -> str:
    """The tensor whose dtype a new bias gets: the weight that it is added beside, or one in the widest dtype of any."""
    dtypes = {parameter.name: model.dtype(parameter.name) for parameter in model.spec.parameters()}
    own = f"{name.removesuffix('bias')}weight"
    wide = widest(list(set(dtypes.values())))
    return own if own in dtypes else next(each for each, dtype in dtypes.items() if dtype == wide)


def kinds(names: Sequence[str]) -> str:
    """Tensors of all layers told once, and how many there are: "attention.q_proj.bias, … (15 tensors)"."""
    told = list(dict.fromkeys(name.split(".", 2)[-1] if name.startswith("blocks.") else name for name in names))
    more = ", …" if len(told) > 2 else ""
    return f"{', '.join(told[:2])}{more} ({len(names)} tensor{'s' if len(names) > 1 else ''})"
