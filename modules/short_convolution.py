"""Gated short convolutions."""

from typing import Any

import torch
from torch import Tensor, nn

from ..components import ShortConvolution
from .context import Context
from .layers import FusedLinears, LinearModule
from .registry import computes
from .scan import State, convolved, real


class Kernels(nn.Module):
    """The parameters of a causal depthwise convolution."""

    def __init__(self, channels: int, kernel: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, kernel))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None


@computes(ShortConvolution)
class _ShortConvolutionModule(nn.Module):
    """The torch module of `components.ShortConvolution`, as in transformers' Lfm2ShortConv."""

    def __init__(self, spec: ShortConvolution, kernel: Any = "sdpa") -> None:  # noqa: ARG002 - there is one
        super().__init__()
        hidden, channels = spec.hidden_size, spec.channels
        self.before_proj, self.behind_proj, self.in_proj = (LinearModule(hidden, channels, spec.bias) for _ in range(3))
        self.fused = FusedLinears()
        self.convolved = Kernels(channels, spec.kernel, spec.bias)
        self.o_proj = LinearModule(channels, hidden, spec.bias)

    @staticmethod
    def cache(spec: ShortConvolution) -> State:  # noqa: ARG004
        """Return an empty cache for one layer."""
        return State()

    def forward(self, x: Tensor, context: Context, cache: State | None = None) -> Tensor:  # (B, T, hidden)
        gate_before, gate_after, x = self.fused((self.before_proj, self.behind_proj, self.in_proj), real(x, context))
        gated = (gate_before * x).transpose(1, 2)  # (B, channels, T)
        mixed = convolved(gated, self.convolved.weight, self.convolved.bias, cache)
        out: Tensor = self.o_proj(gate_after * mixed.transpose(1, 2))
        return out
