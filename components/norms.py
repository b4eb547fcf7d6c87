"""Norms. No torch."""

from __future__ import annotations

from typing import Literal

from .base import Component, Positive, Shape, Size

__all__ = ["LayerNorm", "Norm", "RMSNorm"]


class LayerNorm(Component, frozen=True):
    """(x - mean) / sqrt(var + eps) · weight + bias (Ba et al. 2016)."""

    size: Size
    eps: Positive
    bias: bool = True

    def shapes(self) -> dict[str, Shape]:
        return {"weight": (self.size,), **({"bias": (self.size,)} if self.bias else {})}


class RMSNorm(Component, frozen=True):
    """x / sqrt(mean(x²) + eps) · weight (Zhang & Sennrich 2019), computed in fp32 at least.

    `cast` says where the result returns to the model's dtype: llama multiplies by the weight after it.
    """

    size: Size
    eps: Positive
    cast: Literal["before_weight", "after_weight"] = "before_weight"

    def shapes(self) -> dict[str, Shape]:
        return {"weight": (self.size,)}


Norm = LayerNorm | RMSNorm
