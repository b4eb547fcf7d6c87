"""The key-value cache: what earlier tokens left behind, one entry a layer, cut to the layer's window."""

from typing import Any

import torch
from torch import Tensor

from ..components import ModelSpec
from .context import Encoded
from .registry import module_of

ROOM = 8  # tokens to make memory for ahead of time: earlier ones are copied once in so many steps, not in each

CACHE_LINE = 64
"""Bytes. A head whose rows are no whole lines begins elsewhere in one when room lies between heads, and matrix
products then sum in another order than over transformers' concatenation."""


class _Tokens:
    """A tensor (B, KV, S, head_dim) that grows at S: new tokens are written behind the others while there is room.

    It is made anew instead where gradients are wanted, in another mode than it was made in (inference tensors are not
    to be written to outside it), and where rows are no whole cache lines.
    """

    def __init__(self) -> None:
        self.memory: Tensor | None = None
        self.first = self.end = 0  # what is kept is memory[:, :, first:end]

    def append(self, new: Tensor) -> Tensor:
        """What is kept with what is new behind it."""
        count = new.shape[-2]
        in_place = not torch.is_grad_enabled() and new.shape[-1] * new.element_size() % CACHE_LINE == 0
        if self.memory is not None and in_place and self._has_room(self.memory, count):
            self.memory.narrow(-2, self.end, count).copy_(new)
        else:
            kept = [] if self.memory is None else [self.memory.narrow(-2, self.first, self.end - self.first)]
            room = [new.new_empty(*new.shape[:-2], ROOM, new.shape[-1])] if in_place else []
            self.memory = torch.cat([*kept, new, *room], dim=-2)
            self.first, self.end = 0, self.end - self.first
        self.end += count
        return self.memory.narrow(-2, self.first, self.end - self.first)

    def _has_room(self, memory: Tensor, count: int) -> bool:
        return self.end + count <= memory.shape[-2] and memory.is_inference() == torch.is_inference_mode_enabled()

    def keep(self, count: int) -> None:
        """Forget all but the last `count` tokens, if there are more."""
        self.first = max(self.first, self.end - count)


class LayerCache:
    """Keys and values of one layer, positions already applied."""

    def __init__(self, window: int | None) -> None:
        self.window = window
        self.keys, self.values = _Tokens(), _Tokens()

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Everything the new tokens may look at: kept and new. Keeps window - 1 of them for the next call."""
        both = self.keys.append(keys), self.values.append(values)
        if self.window is not None:
            self.keys.keep(self.window - 1)
            self.values.keep(self.window - 1)
        return both


class Cache:
    """What earlier tokens left in each block, and how many were seen. Give the same one to every call of a decode.

    layers: for each block what its mixers keep, by slot: a `LayerCache` of attention, a state of a recurrence. encoded:
    the source of a model with an encoder.
    """

    def __init__(self, spec: ModelSpec) -> None:
        spec.predicts("a cache of keys and values")
        mixers = [[sublayer.mixer for sublayer in block.sublayers] for block in spec.blocks]
        made = [
            {each.slot: module_of(each).cache(each) for each in block if hasattr(module_of(each), "cache")}
            for block in mixers
        ]
        self.layers: list[dict[str, Any]] = [
            {slot: each for slot, each in layer.items() if each is not None} for layer in made
        ]
        self.length = 0
        self.encoded: Encoded | None = None

    def reorder(self, rows: Tensor) -> None:
        """Let each sequence go on from what the one of that number has left: (new sequences,)."""
        if self.encoded is not None:
            self.encoded = self.encoded.chosen(rows)
        for layer in self.layers:
            for kept in layer.values():
                _reorder(kept, rows)


def _reorder(kept: Any, rows: Tensor) -> None:
    """All tensors of what a mixer keeps have a sequence a row."""
    for name, value in vars(kept).items():
        if isinstance(value, Tensor):
            setattr(kept, name, value.index_select(0, rows))
        elif hasattr(value, "__dict__"):
            _reorder(value, rows)
