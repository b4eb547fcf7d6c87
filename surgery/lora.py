"""Adapters (LoRA and its kin) merged into the weights."""

from __future__ import annotations

from .registry import Swap

__all__ = ["SWAPS"]

SWAPS: tuple[Swap, ...] = ()
