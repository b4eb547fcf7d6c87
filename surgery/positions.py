"""What tells positions apart: rotary, ALiBi, learned, none."""

from __future__ import annotations

from .registry import Swap

__all__ = ["SWAPS"]

SWAPS: tuple[Swap, ...] = ()
