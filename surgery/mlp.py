"""Plain and gated feed-forwards."""

from __future__ import annotations

from .registry import Swap

__all__ = ["SWAPS"]

SWAPS: tuple[Swap, ...] = ()
