"""Rotary positions: scaling, part of the head, how pairs lie."""

from __future__ import annotations

from .registry import Swap

__all__ = ["SWAPS"]

SWAPS: tuple[Swap, ...] = ()
