"""The tensors of a model in groups: equal tensors of several layers or experts are one group. No torch.

A tensor has its *shared name*, the name that gptkit gives it in models of all families.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

from ..components import Block, ModelSpec, Parameter, Shape
from ..components.ranges import number_runs, range_label

_MOST_RANGES = 4
"""The largest number of ranges in the name of a group. If there are more, the name has the first two, an ellipsis and
the last."""


@dataclass(frozen=True)
class TensorGroup:
    """The tensors that have the same name and shape in several layers and experts."""

    name: str  # the name with the numbers of layers and experts in braces: "blocks.{0–31}.attention.q_proj.weight"
    shape: Shape  # of one tensor
    component: str
    number: int  # the number of tensors
    nbytes: int = 0  # the bytes of all tensors, or 0 if they were not counted

    @property
    def parameters(self) -> int:
        """Return the number of parameters of all tensors together."""
        return self.number * math.prod(self.shape)


def tensor_groups(spec: ModelSpec, size: Callable[[Parameter], int] | None = None) -> list[TensorGroup]:
    """Return a model's tensors in groups, in the order of the model. Every tensor is in one group.

    `size` returns the size of a tensor in bytes, which may differ within a group.
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
    """Return a tensor's name within its layer, and whether it belongs to an expert.

    The number of the expert is replaced by a star in the name.
    """
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
