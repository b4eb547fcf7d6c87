"""Leaving again: the Hugging Face architecture that can hold a tree, and the last step into its own form.

A family holds a tree where its config.json says all of it (`Architecture.config_for`), or nearly: how components round
is no obstacle, and biases of zeros come and go. Where no family holds the tree, `clearing` says what is in the way, and
what would clear it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from ..architectures import Architecture, named
from ..components import ModelSpec
from ..converter.adapt import any_family
from ..converter.dtypes import widest
from ..converter.targets import FOLDERS, Target, target
from .base import Filled, Model, Swapped, Tensor
from .clearing import in_the_way
from .fitting import biases, fitting, zero_biases

__all__ = ["asked_families", "into", "leave"]


def asked_families(origin: str | None, to: str | Target) -> list[Architecture]:
    """The families that may hold the result, in the order in which they are tried.

    Args:
        origin: the family that the checkpoint came from, the first to be tried.
        to: "hf:auto", "hf" (the one that it came from, or any where there is none) or "hf:FAMILY".

    Raises:
        UnknownFamily: there is no FAMILY.
        UsageError: another format.

    """
    family = target(to, FOLDERS).family or origin
    return any_family(origin) if family is None or family == "auto" else [named(family)]


def leave(model: Model, origin: str | None, to: str | Target) -> tuple[Architecture, Swapped | None]:
    """The family for a tree, and the last step into its own form: biases of zeros that it has, or has not.

    Weights are read only where it is for their values to decide.

    Args:
        model: the tree.
        origin: the family that the checkpoint came from.
        to: see `asked_families`.

    Raises:
        CannotExpress: there is none; what is in the way is listed, and what would clear it.

    """
    tried = asked_families(origin, to)
    zero = cache(lambda: zero_biases(model))
    for architecture in tried:
        found = fitting(architecture, model.spec, biases(model.spec))  # as if all were zero
        if found is not None and found != model.spec:
            found = fitting(architecture, model.spec, zero())
        if found is not None:
            return architecture, into(model, found, architecture)
    raise in_the_way(model, tried)


def into(model: Model, spec: ModelSpec, architecture: Architecture) -> Swapped | None:
    """The step from a tree to the one that a family has for it; None where they are the same."""
    if spec == model.spec:
        return None
    old = {parameter.name for parameter in model.spec.parameters()}
    gained = [parameter for parameter in spec.parameters() if parameter.name not in old]
    lost = sorted(old - {parameter.name for parameter in spec.parameters()})
    tensors: dict[str, Tensor] = {each.name: Filled(each.shape, 0.0, beside(model, each.name)) for each in gained}
    notes = []
    if gained:
        notes.append(f"{architecture.name} has {kinds([each.name for each in gained])}: added as zeros")
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
