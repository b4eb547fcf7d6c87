"""The key-value cache: what earlier tokens left behind, one entry a layer, cut to the layer's window."""

from __future__ import annotations

import torch
from torch import Tensor

from ..spec import ModelSpec

__all__ = ["Cache", "LayerCache"]


class LayerCache:
    """Keys and values of one layer, (B, KV, S, head_dim) each, positions already applied."""

    def __init__(self, window: int | None) -> None:
        self.window = window
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Everything the new tokens may look at: kept and new. Keeps window - 1 of them for the next call."""
        if self.keys is not None and self.values is not None:
            keys, values = torch.cat([self.keys, keys], dim=-2), torch.cat([self.values, values], dim=-2)
        else:
            # Contiguous like a concatenation, so that products sum in the same order from the first step on.
            keys, values = keys.contiguous(), values.contiguous()
        drop = 0 if self.window is None else max(keys.shape[-2] - (self.window - 1), 0)
        self.keys, self.values = keys[:, :, drop:], values[:, :, drop:]
        return keys, values


class Cache:
    """One `LayerCache` a block, and how many tokens were seen. Give the same one to every call of a decode."""

    def __init__(self, spec: ModelSpec) -> None:
        self.layers = [LayerCache(block.attention.window) for block in spec.blocks]
        self.length = 0
