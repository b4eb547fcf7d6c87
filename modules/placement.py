"""Divide the layers of a model over several devices.

Every device gets a contiguous range of layers, so that the largest number of bytes on one device is as small as
possible. The part before the layers is on the first device, and the part after them on the last one. If the head is
tied to the embedding, the part after the layers is on the first device too, because both use the same matrix. In a
forward pass, the hidden states move to the device of the next layer. Token ids go in, and logits come out, on the first
device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..components import ModelSpec
from ..errors import UsageError

_M = TypeVar("_M", bound=nn.Module)
_BACK = ("joined", "final_norm", "head", "pooler")
"""The submodules of a model that run after its layers."""


@dataclass(frozen=True)
class DevicePlacement:
    """The device of every part of a model."""

    front: torch.device  # of everything before the layers, such as the embedding
    blocks: tuple[torch.device, ...]  # of every layer
    back: torch.device  # of everything after the layers, such as the head
    nbytes: tuple[int, ...]  # the bytes of the weights on each of the given devices, in their order

    def of(self, part: str) -> torch.device:
        """Return the device of a submodule or parameter by its name in the model, such as "blocks.3"."""
        owner, _, rest = part.partition(".")
        if owner == "blocks":
            return self.blocks[int(rest.partition(".")[0])]
        return self.back if owner in _BACK else self.front


def placement(spec: ModelSpec, itemsize: int, devices: Sequence[torch.device]) -> DevicePlacement:
    """Divide a model over devices. `itemsize` is the size of a weight in bytes.

    Raises:
        UsageError: the model has fewer layers than there are devices, or layers that use the weights of other layers,
            or an encoder.
    """
    layers = len(spec.blocks)
    if len(devices) == 1:
        total = sum(parameter.count for parameter in spec.parameters()) * itemsize
        return DevicePlacement(devices[0], (devices[0],) * layers, devices[0], (total,))
    one = "Name one device."
    if spec.encoder is not None:
        raise UsageError("a model with an encoder and a decoder cannot be divided over several devices", one)
    if spec.has_shared_blocks:
        raise UsageError("some layers of this model share their weights, so it cannot be divided over devices", one)
    if layers < len(devices):
        raise UsageError(f"{layers} layers cannot be divided over {len(devices)} devices", "Name fewer devices.")
    sizes = [0] * layers
    ends = [0, 0]
    for parameter in spec.parameters():
        nbytes = parameter.count * itemsize
        if parameter.layer is not None:
            sizes[parameter.layer] += nbytes
        else:
            ends[parameter.name.partition(".")[0] in _BACK and not spec.tied] += nbytes
    counts = _ranges(sizes, (ends[0], ends[1]), len(devices))
    blocks = tuple(device for device, count in zip(devices, counts, strict=True) for _ in range(count))
    starts = [sum(counts[:number]) for number in range(len(devices) + 1)]
    loads = [sum(sizes[first:last]) for first, last in pairwise(starts)]
    loads[0] += ends[0]
    loads[-1] += ends[1]
    return DevicePlacement(devices[0], blocks, devices[0] if spec.tied else devices[-1], tuple(loads))


def _ranges(sizes: Sequence[int], ends: tuple[int, int], parts: int) -> list[int]:
    """Divide a list into contiguous ranges with at least one item each, and return the number of items of each range.

    The largest sum of a range is as small as possible. `ends` is added to the sums of the first and the last range.
    """
    low, high = 0, sum(sizes) + sum(ends)
    best = _filled(sizes, ends, parts, high)
    while low < high:
        middle = (low + high) // 2
        counts = _filled(sizes, ends, parts, middle)
        if counts is None:
            low = middle + 1
        else:
            best, high = counts, middle
    assert best is not None
    return best


def _filled(sizes: Sequence[int], ends: tuple[int, int], parts: int, most: int) -> list[int] | None:
    """Return the numbers of items of ranges whose sums are at most `most`, or None if there are no such ranges.

    Every range but the last takes items while there is room, and leaves at least one item for each later range.
    """
    counts, at = list[int](), 0
    for part in range(parts - 1):
        total, first = ends[0] if part == 0 else 0, at
        while at < len(sizes) - (parts - 1 - part) and (at == first or total + sizes[at] <= most):
            total += sizes[at]
            at += 1
        if total > most:
            return None
        counts.append(at - first)
    return [*counts, len(sizes) - at] if sum(sizes[at:]) + ends[1] <= most else None


def with_memory(module: _M, device: torch.device | str) -> _M:
    """Give every parameter of a module memory on a device, and return the module. The values are not initialised."""
    # Not `to_empty`: it imports torch's compiler, which takes half a second in every command that loads a model.
    allocated: _M = module._apply(  # type: ignore[no-untyped-call]
        lambda parameter: torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device=device)
    )
    return allocated


def allocate(model: nn.Module, places: DevicePlacement) -> None:
    """Give every parameter of a model memory on its device. The values are not initialised."""
    for name, child in model.named_children():
        if name == "blocks":
            for number, block in child.named_children():
                with_memory(block, places.of(f"blocks.{number}"))
        else:
            with_memory(child, places.of(name))


def connect(model: Any, places: DevicePlacement) -> None:
    """Make the forward pass of a model that is divided over devices move its tensors from device to device."""

    def arrive(_: nn.Module, inputs: Any, named: Any) -> Any:
        return _moved(inputs, places.front), {name: _moved(value, places.front) for name, value in named.items()}

    def enter(layer: int) -> Any:
        def move(_: nn.Module, inputs: Any) -> Any:
            x, context, *rest = inputs
            return (x.to(places.blocks[layer]), context.on(places.blocks[layer]), *rest)

        return move

    model.placement = places
    model.register_forward_pre_hook(arrive, with_kwargs=True)
    for layer, block in enumerate(model.blocks):
        block.register_forward_pre_hook(enter(layer))
    model.blocks[-1].register_forward_hook(lambda _, __, x: x.to(places.back))
    model.register_forward_hook(lambda _, __, logits: logits.to(places.front))


def _moved(value: Any, device: torch.device) -> Any:
    """Return a value on a device, or a tuple of values with each of them there. Only tensors move."""
    if isinstance(value, tuple):
        return tuple(_moved(item, device) for item in value)
    return value.to(device) if isinstance(value, Tensor) else value
