"""The KV cache for decoding: keys, values and recurrent states of earlier tokens, by layer."""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..components import ModelSpec
from ..errors import UsageError
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
        return self.cached()

    def cached(self) -> Tensor:
        """Return all cached tokens (B, KV, S, head_dim), of which there must be some."""
        assert self.memory is not None
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

    def cached(self) -> tuple[Tensor, Tensor]:
        """Return the keys and values in the cache, both (B, KV, S, head_dim). There must be some."""
        return self.keys.cached(), self.values.cached()

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
        capacity: the number of tokens for which a `StaticCache` has memory; None for other caches, which grow.
    """

    capacity: int | None = None

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

    def begin(self, steps: int) -> int | Tensor:  # noqa: ARG002 - a static cache checks its room
        """Return the number of earlier tokens. The model calls this method before it reads `steps` new tokens."""
        return self.length

    def end(self, steps: int) -> None:
        """Count `steps` new tokens. The model calls this method after all layers have read them."""
        self.length += steps

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


class NotStatic(UsageError):
    """A layer's cache cannot have a fixed size, or the step that uses it depends on values on the device."""


class _Writing:
    """Where a static cache writes next. All layers share it.

    Attributes:
        past: the number of tokens in the cache, (1,), on the device.
        new: the positions of the tokens that the model reads now, (T,), on the device.
    """

    def __init__(self, past: Tensor) -> None:
        self.past = self.new = past


class StaticLayerCache:
    """The keys and values of one layer, (B, KV, capacity, head_dim), in memory that keeps its place and size.

    Tokens that are not written yet are zeros, since attention multiplies them by 0. A sliding window does not shorten
    the memory.
    """

    def __init__(self, keys: Tensor, values: Tensor, end: int, capacity: int, place: _Writing) -> None:
        """Copy the keys and values of the `end` tokens of a text, or the last of them, to memory for `capacity`."""
        self.place = place
        self.keys, self.values = (part.new_zeros(*part.shape[:2], capacity, part.shape[3]) for part in (keys, values))
        for memory, part in ((self.keys, keys), (self.values, values)):
            memory[:, :, end - part.shape[2] : end] = part

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write new keys and values at their positions. Return the whole memory."""
        self.keys.index_copy_(2, self.place.new, keys)
        self.values.index_copy_(2, self.place.new, values)
        return self.keys, self.values


class StaticCache(Cache):
    """A copy of a cache whose tensors keep their addresses and sizes while tokens are added.

    A decoding step with it runs the same operations on the same memory for every token, because the position is a
    tensor on the device. The step can therefore be recorded as a CUDA graph. Keys and values have memory for `capacity`
    tokens. Other caches, such as the state of a recurrence, have a fixed size anyway.

    Args:
        cache: a cache that has read a prompt, or a `StaticCache` that is to grow. It is not changed.
        capacity: the largest number of tokens.

    Raises:
        UsageError: the cache is empty, or has more tokens than `capacity`.
        NotStatic: the cache is on several devices; or, in the model's forward pass, a layer's cache changed its size,
            its dtype or a number on the host.
    """

    def __init__(self, cache: Cache, capacity: int) -> None:
        if not 1 <= cache.length <= capacity:
            raise UsageError(
                f"a static cache for {capacity} tokens cannot be made of a cache with {cache.length}",
                "Run the model on a prompt with a Cache first, and choose a larger capacity.",
            )
        self.length, self.capacity, self.encoded = cache.length, capacity, cache.encoded
        devices = {value.device for _, _, value in _values(cache.layers) if isinstance(value, Tensor)}
        if len(devices) > 1:
            raise NotStatic(
                "a static cache cannot be used with a model that is divided over several devices",
                "Use a Cache, or generate with cache='dynamic'.",
            )
        self.place = _Writing(torch.full((1,), cache.length, device=devices.pop()))
        self.layers = [{slot: self._copied(part) for slot, part in layer.items()} for layer in cache.layers]
        others = [part for layer in self.layers for part in layer.values() if not isinstance(part, StaticLayerCache)]
        self._fixed = list(_values(others))

    def _copied(self, part: Any) -> Any:
        """Return a copy of one layer's cache with tensors of its own."""
        assert self.capacity is not None
        if isinstance(part, LayerCache):
            return StaticLayerCache(*part.cached(), self.length, self.capacity, self.place)
        if isinstance(part, StaticLayerCache):
            keys, values = (memory[:, :, : self.length] for memory in (part.keys, part.values))
            return StaticLayerCache(keys, values, self.length, self.capacity, self.place)
        part = copy.copy(part)
        for name, value in vars(part).items():
            if isinstance(value, Tensor):
                setattr(part, name, value.clone())
            elif hasattr(value, "__dict__"):
                setattr(part, name, self._copied(value))
        return part

    def begin(self, steps: int) -> Tensor:
        """Return the number of earlier tokens as a tensor (1,) on the device.

        Raises:
            UsageError: there is no room for `steps` more tokens, or gradients are enabled.
        """
        assert self.capacity is not None
        if torch.is_grad_enabled():
            raise UsageError("a static cache gives no gradients", "Run the model in torch.inference_mode().")
        if self.length + steps > self.capacity:
            raise UsageError(
                f"{steps} more tokens do not fit into a static cache that has {self.length} of {self.capacity}",
                "Make a larger one of it: StaticCache(cache, capacity).",
            )
        past = self.place.past
        self.place.new = past if steps == 1 else past + torch.arange(steps, device=past.device)
        return past

    def end(self, steps: int) -> None:
        """Count `steps` new tokens, and move new states of recurrences to the memory of the earlier ones."""
        self.length += steps
        self.place.past += steps
        for part, name, memory in self._fixed:
            value = getattr(part, name)
            if value is memory:
                continue
            both = isinstance(value, Tensor) and isinstance(memory, Tensor)
            if not both or (value.shape, value.dtype) != (memory.shape, memory.dtype):
                raise NotStatic(
                    f"the cache of this model cannot be static: {type(part).__name__}.{name} does not keep its size",
                    "Use a Cache, or generate with cache='dynamic'.",
                )
            memory.copy_(value)
            setattr(part, name, memory)

    def restore(self, length: int) -> None:
        """Set what the host knows as it is between two steps: the number of tokens, and the memory of all states.

        A recording runs the model's code, but the device does not compute.
        """
        self.length = length
        for part, name, memory in self._fixed:
            setattr(part, name, memory)

    def reorder(self, rows: Tensor) -> None:  # noqa: ARG002 - no order is possible
        """Refuse to reorder the sequences, which would change the addresses of all tensors."""
        raise UsageError("a static cache cannot be reordered", "Use a Cache for beam search.")


def _values(parts: Any) -> Iterator[tuple[Any, str, Any]]:
    """Yield all attributes of the caches in `parts`, nested lists and dictionaries: the object, the name, the value."""
    for part in parts.values() if isinstance(parts, dict) else parts:
        if isinstance(part, dict):
            yield from _values(part)
            continue
        for name, value in vars(part).items():
            if hasattr(value, "__dict__") and not isinstance(value, Tensor):
                yield from _values([value])
            else:
                yield part, name, value
