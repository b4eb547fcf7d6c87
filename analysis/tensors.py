"""Every tensor of a tree by its shared name, and the same list with what is alike folded together. No torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from ..components import ModelSpec, Parameter, Shape
from ..components.ranges import number_runs, range_label

MOST_RANGES = 4
"""Ranges of layers that a folded name lists; more of them are told by the first, the last and how many there are."""


NO_LAYER: tuple[int | None, ...] = (None,)
"""Where tensors are that are in no layer."""


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
    def each(self) -> int:
        """Parameters of one of them."""
        return math.prod(self.shape)

    @property
    def parameters(self) -> int:
        return self.number * self.each


def tensor_groups(spec: ModelSpec, size: Callable[[Parameter], int] | None = None) -> list[TensorGroup]:
    """The tree's tensors, each once, in order: alike ones folded. Their parameters sum to the tree's. `size` gives a
    tensor's bytes, which those that are folded may differ in.
    """
    nbytes: Counter[tuple[int | None, str, Shape]] = Counter()
    for each in spec.parameters() if size is not None else ():
        nbytes[each.layer, _place(each)[0], each.shape] += 0 if size is None else size(each)
    kinds = {block: kind for kind, block in enumerate(dict.fromkeys(spec.blocks))}
    layers: dict[int, list[int]] = {}
    for index, block in enumerate(spec.blocks):
        layers.setdefault(kinds[block], []).append(index)
    found: dict[tuple[str, Shape, str, int], list[int]] = {}
    for key, kind in _places(msgspec.structs.replace(spec, blocks=tuple(kinds)).parameters()):
        found.setdefault(key, []).extend(layers[kind] if kind is not None else ())
    return [
        TensorGroup(
            _named(place, there, experts),
            shape,
            component,
            max(len(there), 1) * max(experts, 1),
            _sum(nbytes, there or NO_LAYER, place, shape),
        )
        for (place, shape, component, experts), there in found.items()
    ]


def _places(parameters: Iterable[Parameter]) -> Iterator[tuple[tuple[str, Shape, str, int], int | None]]:
    """((name within its layer, shape, component, experts), layer), the experts of a layer folded into the first."""
    experts: dict[tuple[int | None, str, Shape, str], int] = {}
    for each in parameters:
        place, is_expert = _place(each)
        key = (each.layer, place, each.shape, each.component)
        experts[key] = experts.get(key, 0) + (1 if is_expert else 0)
    for (layer, place, shape, component), number in experts.items():
        yield (place, shape, component, number), layer


def _sum(
    nbytes: Mapping[tuple[int | None, str, Shape], int], layers: Sequence[int | None], place: str, shape: Shape
) -> int:
    return sum(nbytes[layer, place, shape] for layer in layers)


def _place(parameter: Parameter) -> tuple[str, bool]:
    """A tensor's name within its layer, an expert's with a star for its number; and whether it is an expert's."""
    place = parameter.name if parameter.layer is None else parameter.name.split(".", 2)[2]
    before, is_expert, after = place.partition(".experts.")
    return (f"{before}.experts.*.{after.partition('.')[2]}", True) if is_expert else (place, False)


def _named(place: str, layers: list[int], experts: int) -> str:
    if experts:
        place = place.replace(".experts.*.", f".experts.{_braces(range(experts))}.", 1)
    return f"blocks.{_braces(sorted(layers))}.{place}" if layers else place


def _braces(indices: Iterable[int]) -> str:
    """Indices in order: 3, {0–31}, {0–3,8}, {0,2,…,38}."""
    listed = list(indices)
    ranges = [range_label(*run) for run in number_runs(listed)]
    if len(ranges) > MOST_RANGES:
        ranges = [*ranges[:2], "…", ranges[-1]]
    return ranges[0] if len(listed) == 1 else f"{{{','.join(ranges)}}}"
