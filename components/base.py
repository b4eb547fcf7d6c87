"""What every component has: fields that are checked, parameters by name and shape. No torch."""

from __future__ import annotations

import math
import sys
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

__all__ = ["Arithmetic", "Component", "Parameter", "Positive", "Scale", "Shape", "Size", "Turns"]

Size = Annotated[int, Meta(ge=1, le=2**31 - 1)]


Positive = Annotated[float, Meta(gt=0, le=sys.float_info.max)]


Turns = Annotated[float, Meta(ge=1e-30, le=1e30)]


Scale = Annotated[float, Meta(gt=0, le=3.4028234663852886e38)]
"""A factor of scores, which are multiplied in fp32: no larger than fp32 holds."""


Shape = tuple[int, ...]


Arithmetic = Literal["linear", "conv1d", "matmul_add"]
"""How x·Wᵀ + b is computed: one fused linear; GPT-2's addmm on a weight that lies [in, out] in memory; Falcon's
matmul and then, rounded once more, the bias."""


class Component(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """A node of the tree."""

    def shapes(self) -> dict[str, Shape]:
        """This node's own parameters (not its children's): name within the node -> shape."""
        return {}


class Parameter(msgspec.Struct, frozen=True):
    """One stored tensor: its shared name, shape, the component it is counted under, and its layer if in a block."""

    name: str
    shape: Shape
    component: str
    layer: int | None

    @property
    def count(self) -> int:
        return math.prod(self.shape)
