"""Feed-forwards, plain and gated. No torch."""

from __future__ import annotations

from typing import Self

import msgspec

from .activations import Activation, function_of
from .base import Arithmetic, Component, Mixer, Size, Weight, bias

__all__ = ["FeedForward", "GatedFeedForward"]


class FeedForward(Mixer, Component, frozen=True):
    """down(activation(up(x)))."""

    label = "feed-forward"
    slot = "feed_forward"
    rounds = ("arithmetic",)

    hidden_size: Size
    intermediate_size: Size
    activation: Activation
    up_bias: bool = False
    down_bias: bool = False
    arithmetic: Arithmetic = "linear"

    def weights(self) -> dict[str, Weight]:
        found = {
            "up_proj.weight": Weight((self.intermediate_size, self.hidden_size), "reads"),
            "down_proj.weight": Weight((self.hidden_size, self.intermediate_size), "writes"),
        }
        if self.up_bias:
            found["up_proj.bias"] = bias(self.intermediate_size)
        if self.down_bias:
            found["down_proj.bias"] = bias(self.hidden_size)
        return found

    def alike(self) -> Self:
        return msgspec.structs.replace(super().alike(), activation=function_of(self.activation))


class GatedFeedForward(Mixer, Component, frozen=True):
    """down(activation(gate(x)) · up(x)) (Shazeer 2002.05202); SwiGLU where the activation is silu.

    `fused` computes gate and up in one matrix product.
    """

    label = "feed-forward"
    slot = "feed_forward"
    rounds = ("arithmetic", "fused")

    hidden_size: Size
    intermediate_size: Size
    activation: Activation
    up_bias: bool = False
    down_bias: bool = False
    arithmetic: Arithmetic = "linear"
    fused: bool = False

    def weights(self) -> dict[str, Weight]:
        inner = Weight((self.intermediate_size, self.hidden_size), "reads")
        found = {
            "gate_proj.weight": inner,
            "up_proj.weight": inner,
            "down_proj.weight": Weight((self.hidden_size, self.intermediate_size), "writes"),
        }
        if self.up_bias:
            found |= {"gate_proj.bias": bias(self.intermediate_size), "up_proj.bias": bias(self.intermediate_size)}
        if self.down_bias:
            found["down_proj.bias"] = bias(self.hidden_size)
        return found

    def alike(self) -> Self:
        return msgspec.structs.replace(super().alike(), activation=function_of(self.activation))
