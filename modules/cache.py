"""The KV cache for decoding: keys, values and recurrent states of earlier tokens, by layer."""

from typing import Any

import torch
from torch import Tensor

from ..components import ModelSpec
from .context import Encoded
from .registry import module_of

ROOM = 8
"""The number of tokens for which memory is allocated ahead, so that earlier tokens are copied every 8 steps only."""

CACHE_LINE = 64
"""The size of a processor's cache line in bytes. If the size of a token's key is not a multiple of it, memory that is
allocated ahead changes at which place of a cache line a head starts. Matrix products would then sum in another order
than with transformers' concatenated tensors.
"""


class _Tokens:
    """The keys or the values of one layer, (B, KV, S, head_dim), to which tokens are appended along S.

    New tokens are written into memory that is already allocated, while there is room. All tokens are copied into new
    memory if gradients are enabled, if a head's size is not a multiple of `CACHE_LINE`, or if inference mode was
    switched on or off. torch forbids writing to inference tensors outside of that mode.
    """

    def __init__(self) -> None:
        self.memory: Tensor | None = None
        self.first = self.end = 0  # the cached tokens are memory[:, :, first:end]

    def append(self, new: Tensor) -> Tensor:
        """Append the new tokens, and return all cached tokens (B, KV, S, head_dim)."""
        count = new.shape[-2]
        in_place = not torch.is_grad_enabled() and new.shape[-1] * new.element_size() % CACHE_LINE == 0
        if self.memory is not None and in_place and self._has_room(self.memory, count):
            self.memory.narrow(-2, self.end, count).copy_(new)
        else:
            earlier = [] if self.memory is None else [self.memory.narrow(-2, self.first, self.end - self.first)]
            room = [new.new_empty(*new.shape[:-2], ROOM, new.shape[-1])] if in_place else []
            self.memory = torch.cat([*earlier, new, *room], dim=-2)
            self.first, self.end = 0, self.end - self.first
        self.end += count
        return self.memory.narrow(-2, self.first, self.end - self.first)

    def _has_room(self, memory: Tensor, count: int) -> bool:
        return self.end + count <= memory.shape[-2] and memory.is_inference() == torch.is_inference_mode_enabled()

    def keep(self, count: int) -> None:
        """Remove all but the last `count` tokens."""
        self.first = max(self.first, self.end - count)


class LayerCache:
    """The keys and values of one layer, after their positions are applied."""

    def __init__(self, window: int | None) -> None:
        self.window = window
        self.keys, self.values = _Tokens(), _Tokens()

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values. Return those of all cached tokens and of the new ones.

        With a sliding window, only the last window - 1 tokens then stay in the cache.
        """
        both = self.keys.append(keys), self.values.append(values)
        if self.window is not None:
            self.keys.keep(self.window - 1)
            self.values.keep(self.window - 1)
        return both


class Cache:
    """The cache for generating one continuation of every prompt in a batch. Pass it to every call of the model.

    Attributes:
        layers: for every layer, a dictionary from a module's name, such as "attention", to its cache: a `LayerCache`
            for attention, a `State` for a recurrence.
        length: the number of tokens seen so far.
        encoded: the encoder's output, if the model has an encoder.
    """

    def __init__(self, spec: ModelSpec) -> None:
        spec.predicts("a cache of keys and values")
        mixers = [[sublayer.mixer for sublayer in block.sublayers] for block in spec.blocks]
        caches = [
            {mixer.slot: module_of(mixer).cache(mixer) for mixer in block if hasattr(module_of(mixer), "cache")}
            for block in mixers
        ]
        self.layers: list[dict[str, Any]] = [
            {slot: cache for slot, cache in layer.items() if cache is not None} for layer in caches
        ]
        self.length = 0
        self.encoded: Encoded | None = None

    def reorder(self, rows: Tensor) -> None:
        """Reorder the sequences for beam search: the new sequence i gets the cache of the old sequence rows[i].

        `rows` has one index per new sequence.
        """
        if self.encoded is not None:
            self.encoded = self.encoded.chosen(rows)
        for layer in self.layers:
            for cache in layer.values():
                _reorder(cache, rows)


def _reorder(cache: Any, rows: Tensor) -> None:
    """Replace all tensors of one module's cache by their rows with the indices `rows`. A row is a sequence."""
    for name, value in vars(cache).items():
        if isinstance(value, Tensor):
            setattr(cache, name, value.index_select(0, rows.to(value.device)))
        elif hasattr(value, "__dict__"):
            _reorder(value, rows)
