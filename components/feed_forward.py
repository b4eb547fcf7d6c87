"""Feed-forwards, plain and gated. No torch."""

from __future__ import annotations

from .activations import Activation
from .base import Arithmetic, Component, Shape, Size

__all__ = ["FeedForward", "GatedFeedForward"]


class FeedForward(Component, frozen=True):
    """down(activation(up(x)))."""

    hidden_size: Size
    intermediate_size: Size
    activation: Activation
    up_bias: bool = False
    down_bias: bool = False
    arithmetic: Arithmetic = "linear"

    def shapes(self) -> dict[str, Shape]:
        shapes: dict[str, Shape] = {
            "up_proj.weight": (self.intermediate_size, self.hidden_size),
            "down_proj.weight": (self.hidden_size, self.intermediate_size),
        }
        if self.up_bias:
            shapes["up_proj.bias"] = (self.intermediate_size,)
        if self.down_bias:
            shapes["down_proj.bias"] = (self.hidden_size,)
        return shapes


class GatedFeedForward(Component, frozen=True):
    """down(activation(gate(x)) · up(x)) (Shazeer 2002.05202); SwiGLU where the activation is silu.

    `fused` computes gate and up in one matrix product.
    """

    hidden_size: Size
    intermediate_size: Size
    activation: Activation
    up_bias: bool = False
    down_bias: bool = False
    arithmetic: Arithmetic = "linear"
    fused: bool = False

    def shapes(self) -> dict[str, Shape]:
        inner = (self.intermediate_size, self.hidden_size)
        shapes: dict[str, Shape] = {
            "gate_proj.weight": inner,
            "up_proj.weight": inner,
            "down_proj.weight": (self.hidden_size, self.intermediate_size),
        }
        if self.up_bias:
            shapes |= {"gate_proj.bias": (self.intermediate_size,), "up_proj.bias": (self.intermediate_size,)}
        if self.down_bias:
            shapes["down_proj.bias"] = (self.hidden_size,)
        return shapes
