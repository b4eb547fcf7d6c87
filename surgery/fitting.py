"""Whether a family of checkpoints holds a tree: its config.json says all of it, or all but rounding and zero biases."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np

from ..architectures import Architecture
from ..components import ModelSpec
from ..converter.adapt import nearest_tree, without_biases
from ..errors import CannotExpress
from .base import Model

__all__ = ["biases", "fitting", "zero_biases"]


def biases(spec: ModelSpec) -> list[str]:
    """The names of all biases."""
    return [parameter.name for parameter in spec.parameters() if parameter.name.endswith(".bias")]


def zero_biases(model: Model, among: Iterable[str] | None = None) -> set[str]:
    """The names of the biases, all or those `among`, whose every value is zero."""
    names = biases(model.spec) if among is None else among
    return {name for name in names if not np.any(model.wide(name))}


def fitting(architecture: Architecture, spec: ModelSpec, zero: Collection[str]) -> ModelSpec | None:
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
