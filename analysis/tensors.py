"""The tensors of a tree by shared name, with equal tensors of several layers grouped. This file needs no torch."""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

from ..components import Block, ModelSpec, Parameter, Shape
from ..components.ranges import number_runs, range_label

_MOST_RANGES = 4
"""The most ranges of layers in a group's name. Of more, it has the first two, an ellipsis and the last."""


@dataclass(frozen=True)
class TensorGroup:
    """The tensors that have the same place and shape in several layers and experts."""

    name: str  # with layers and experts in braces: "blocks.{0–31}.attention.q_proj.weight"
    shape: Shape  # of one tensor
    component: str
    number: int  # the number of tensors
    nbytes: int = 0  # the bytes of all tensors, or 0 if they were not counted

    @property
    def parameters(self) -> int:
        """Return the parameters of all tensors."""
        return self.number * math.prod(self.shape)


def tensor_groups(spec: ModelSpec, size: Callable[[Parameter], int] | None = None) -> list[TensorGroup]:
    """Return the tree's tensors in groups, in order. Every tensor is in one group.

    `size` returns the bytes of a tensor. Tensors of one group may differ in bytes.
    """
    nbytes: Counter[tuple[int | None, str, Shape]] = Counter()
    for tensor in spec.parameters() if size is not None else ():
        nbytes[tensor.layer, _place(tensor)[0], tensor.shape] += 0 if size is None else size(tensor)
    layers: dict[Block, list[int]] = {}
    for index, block in enumerate(spec.blocks):
        layers.setdefault(block, []).append(index)
    experts: Counter[tuple[int | None, str, Shape, str]] = Counter()  # of the first layer with each block
    for tensor in msgspec.structs.replace(spec, blocks=tuple(layers)).parameters():
        place, is_expert = _place(tensor)
        experts[tensor.layer, place, tensor.shape, tensor.component] += is_expert
    kinds = list(layers.values())
    layers_of_group: dict[tuple[str, Shape, str, int], list[int]] = {}
    for (kind, place, shape, component), number in experts.items():
        key = (place, shape, component, number)
        layers_of_group.setdefault(key, []).extend(() if kind is None else kinds[kind])
    groups = []
    for (place, shape, component, copies), indices in layers_of_group.items():
        number = max(len(indices), 1) * max(copies, 1)
        total = sum(nbytes[layer, place, shape] for layer in indices or (None,))
        groups.append(TensorGroup(_named(place, indices, copies), shape, component, number, total))
    return groups


def _place(parameter: Parameter) -> tuple[str, bool]:
    """Return a tensor's name within its layer, with a star for an expert's number, and whether it is an expert's."""
    place = parameter.name if parameter.layer is None else parameter.name.split(".", 2)[2]
    before, is_expert, after = place.partition(".experts.")
    return (f"{before}.experts.*.{after.partition('.')[2]}", True) if is_expert else (place, False)


def _named(place: str, layers: list[int], experts: int) -> str:
    if experts:
        place = place.replace(".experts.*.", f".experts.{braces(range(experts))}.", 1)
    return f"blocks.{braces(sorted(layers))}.{place}" if layers else place


def braces(indices: Iterable[int]) -> str:
    """Return sorted numbers as text for a group's name: 3, {0–31}, {0–3,8}, {0,2,…,38}."""
    listed = list(indices)
    ranges = [range_label(*run) for run in number_runs(listed)]
    if len(ranges) > _MOST_RANGES:
        ranges = [*ranges[:2], "…", ranges[-1]]
    return ranges[0] if len(listed) == 1 else f"{{{','.join(ranges)}}}"
