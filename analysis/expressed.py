"""Which family can hold a tree, from its shapes alone. No weights, no numpy."""

from __future__ import annotations

from ..architectures import ARCHITECTURES
from ..components import ModelSpec, differences, without_rounding
from ..errors import GptkitError

__all__ = ["expressed"]


def expressed(spec: ModelSpec) -> tuple[str | None, ModelSpec]:
    """The first family that has this tree, and the tree in its arithmetic; None and the tree itself where none has."""
    for architecture in ARCHITECTURES.values():
        try:
            found = architecture.spec({"model_type": architecture.name, **architecture.write(spec)})
            architecture.config_for(found)
        except (KeyError, AttributeError, TypeError, ValueError, GptkitError):  # it lacks a component of the tree
            continue
        if not differences(without_rounding(found), without_rounding(spec)):
            return architecture.name, found
    return None, spec
