"""The exchange of one component after which a transformers family has a design, for `recommend`. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..architectures import expressed
from ..components import ModelSpec
from .design import Design, Shape, build

EXCHANGES: tuple[Mapping[str, Any], ...] = (
    {"feed_forward": "geglu"},  # llama's class with hidden_act "gelu"
    {"feed_forward": "swiglu"},
    {"positions": "rope"},
    {"attention": "gqa"},
    {"norm": "rmsnorm"},
    {"block": "serial"},
    {"bias": False},
    {"window": None},
)
"""In the order in which they are tried: what changes least of how the model computes comes first."""


@dataclass(frozen=True)
class Step:
    """The design with another component of a kind, its tree in the arithmetic of the family that has it, and that."""

    kind: str
    design: Design
    spec: ModelSpec
    family: str


def step(design: Design, shape: Shape, vocab: int, context: int) -> Step | None:
    """The first of some exchanges after which a family has the design, at the same shape; None where none is enough."""
    for changes in EXCHANGES:
        other = replace(design, **changes)
        if other == design:
            continue
        family, spec = expressed(build(other, shape, vocab, context))
        if family is not None:
            return Step(next(iter(changes)), other, spec, family)
    return None
