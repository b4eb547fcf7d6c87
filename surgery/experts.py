"""Dense feed-forwards and mixtures of experts."""

from __future__ import annotations

from .registry import Swap

__all__ = ["SWAPS"]

SWAPS: tuple[Swap, ...] = ()
