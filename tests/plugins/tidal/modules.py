"""What computes the components, in torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gptkit.modules.registry import computes

from .components import GatedRecurrence, OneSlope, ScaleNorm

__all__ = ["GatedRecurrenceModule", "OneSlopeBias", "ScaleNormModule", "State"]


@computes(ScaleNorm)
class ScaleNormModule(nn.Module):
    """Over the last dimension."""

    def __init__(self, spec: ScaleNorm) -> None:
        super().__init__()
        self.spec = spec
        self.weight = nn.Parameter(torch.empty(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x / x.norm(dim=-1, keepdim=True).clamp(min=self.spec.eps))


class State:
    """What a recurrence carries from token to token: h (B, width), None before the first."""

    def __init__(self) -> None:
        self.h: Tensor | None = None


@computes(GatedRecurrence)
class GatedRecurrenceModule(nn.Module):
    """Token by token, as the reference."""

    def __init__(self, spec: GatedRecurrence, kernel: str = "sdpa") -> None:
        super().__init__()
        self.gate_proj = nn.Linear(spec.hidden_size, spec.width, bias=False)
        self.in_proj = nn.Linear(spec.hidden_size, spec.width, bias=False)
        self.out_proj = nn.Linear(spec.width, spec.hidden_size, bias=False)

    @staticmethod
    def cache(spec: GatedRecurrence) -> State:
        return State()

    def forward(self, x: Tensor, context: Any, cache: State | None = None) -> Tensor:  # (B, T, hidden)
        a, u = self.gate_proj(x).sigmoid(), self.in_proj(x)
        if context.padded:  # a token that is not there leaves the state as it is
            real = context.attention_mask[:, -x.shape[1] :, None].bool()
            a = a.masked_fill(~real, 1.0)
        new = (1 - a) * u
        h = torch.zeros_like(u[:, 0]) if cache is None or cache.h is None else cache.h
        states = []
        for t in range(x.shape[1]):
            h = a[:, t] * h + new[:, t]
            states.append(h)
        if cache is not None:
            cache.h = h
        out: Tensor = self.out_proj(torch.stack(states, dim=1))
        return out


@computes(OneSlope)
class OneSlopeBias:
    """The bias of scores."""

    @staticmethod
    def bias(spec: OneSlope, heads: int, key_mask: Tensor, dtype: torch.dtype) -> Tensor:
        """(B, heads, 1, S); the position counts real tokens."""
        positions = (key_mask.cumsum(dim=-1) - 1) * key_mask  # (B, S)
        return (spec.slope * positions)[:, None, None, :].expand(-1, heads, -1, -1).to(dtype)
