"""Every tensor of a tree by its shared name, and the same list with what is alike folded together. No torch."""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

from ..components import Block, ModelSpec, Parameter, Shape
from ..components.ranges import number_runs, range_label

_MOST_RANGES = 4
"""Ranges of layers that a folded name lists; more of them are told by the first, the last and how many there are."""


@dataclass(frozen=True)
class TensorGroup:
    """Tensors of one place and shape in several layers (and experts), as one.

    name: with the layers and experts in braces, "blocks.{0–31}.attention.q_proj.weight". shape: of each.
    number: how many there are. parameters: of all of them together. nbytes: likewise, 0 where nobody asked.
    """

    name: str
    shape: Shape
    component: str
    number: int
    nbytes: int = 0

    @property
    def parameters(self) -> int:
        return self.number * math.prod(self.shape)


def tensor_groups(spec: ModelSpec, size: Callable[[Parameter], int] | None = None) -> list[TensorGroup]:
    """The tree's tensors, each once, in order: alike ones folded. Their parameters sum to the tree's. `size` gives a
    tensor's bytes, which those that are folded may differ in.
    """
    nbytes: Counter[tuple[int | None, str, Shape]] = Counter()
    for each in spec.parameters() if size is not None else ():
        nbytes[each.layer, _place(each)[0], each.shape] += 0 if size is None else size(each)
    layers: dict[Block, list[int]] = {}
    for index, block in enumerate(spec.blocks):
        layers.setdefault(block, []).append(index)
    experts: Counter[tuple[int | None, str, Shape, str]] = Counter()  # of a kind of layer, folded into the first
    for each in msgspec.structs.replace(spec, blocks=tuple(layers)).parameters():
        place, is_expert = _place(each)
        experts[each.layer, place, each.shape, each.component] += is_expert
    kinds = list(layers.values())
    found: dict[tuple[str, Shape, str, int], list[int]] = {}
    for (kind, place, shape, component), number in experts.items():
        found.setdefault((place, shape, component, number), []).extend(() if kind is None else kinds[kind])
    groups = []
    for (place, shape, component, copies), there in found.items():
        number, held = max(len(there), 1) * max(copies, 1), sum(nbytes[each, place, shape] for each in there or (None,))
        groups.append(TensorGroup(_named(place, there, copies), shape, component, number, held))
    return groups


def _place(parameter: Parameter) -> tuple[str, bool]:
    """A tensor's name within its layer, an expert's with a star for its number; and whether it is an expert's."""
    place = parameter.name if parameter.layer is None else parameter.name.split(".", 2)[2]
    before, is_expert, after = place.partition(".experts.")
    return (f"{before}.experts.*.{after.partition('.')[2]}", True) if is_expert else (place, False)


def _named(place: str, layers: list[int], experts: int) -> str:
    if experts:
        place = place.replace(".experts.*.", f".experts.{braces(range(experts))}.", 1)
    return f"blocks.{braces(sorted(layers))}.{place}" if layers else place


def braces(indices: Iterable[int]) -> str:
    """Numbers in order, as a folded name has them: 3, {0–31}, {0–3,8}, {0,2,…,38}."""
    listed = list(indices)
    ranges = [range_label(*run) for run in number_runs(listed)]
    if len(ranges) > _MOST_RANGES:
        ranges = [*ranges[:2], "…", ranges[-1]]
    return ranges[0] if len(listed) == 1 else f"{{{','.join(ranges)}}}"
