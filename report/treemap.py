"""A treemap of a model's parameters: nested areas for components, layers and tensors.

The size of an area is its share of the parameters.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import msgspec

from ..analysis.parameters import count
from ..analysis.tensors import tensor_groups
from ..components import Block, ModelSpec
from ..components.model import walk
from ..components.ranges import layer_ranges, range_label
from .pages import COLOURS, Figure, Key, Table, figure, safe
from .quantities import abbreviated, counted, dimensions, percentage, unbroken_percentage

_SMALLEST, TOGETHER = 1 / 60, 1 / 22
"""The shares of all parameters that the name of one layer and of several layers need on a phone. Equal layers with
smaller shares have one area together.
"""
_MOST_CELLS = 2500  # if there are more areas, equal neighbouring layers share one


@dataclass(frozen=True)
class _Tensor:
    """A tensor, or the equal tensors of all experts of a layer."""

    component: str
    name: str
    shape: tuple[int, ...]
    times: int  # the number of equal tensors

    @property
    def number(self) -> int:
        return math.prod(self.shape) * self.times


_Area = tuple[str, str, str, int, str, tuple[str, ...]]
"""An area: its path, its parent's path, its label, its parameters, its component, and the lines of its hint."""
_Layers = tuple[int, int, list[_Tensor]]  # equal layers: the first, the last, and the tensors of one of them


def treemap(name: str, spec: ModelSpec) -> Figure:
    """Draw a treemap of the parameters by component, then by layer, then by tensor. A click opens an area."""
    by_component, total = count(spec).by_component, count(spec).total
    kinds = {block: _layer_tensors(block) for block in dict.fromkeys(spec.blocks)}
    first_layer = msgspec.structs.replace(spec, blocks=spec.blocks[:1])
    outside = [_Tensor(p.component, p.name, p.shape, 1) for p in first_layer.parameters() if p.layer is None]
    runs = [(index, index, kinds[block]) for index, block in enumerate(spec.blocks)]
    if sum(len(tensors) for _, _, tensors in runs) > _MOST_CELLS:  # there is no room for all of them
        runs = [(first, last, kinds[block]) for first, last, block in layer_ranges(spec.blocks)]
    cells: list[_Area] = [("/", "", name, total, "", (counted(len(spec.blocks), "layer"),))]
    cells += _cells(by_component, total, outside, runs)
    places, parents, labels, values, components, _ = map(list, zip(*cells, strict=True))
    largest = max(by_component.items(), key=lambda item: item[1])
    colour = [COLOURS.get(component) for component in components]
    hints = [
        "<br>".join(
            [f"<b>{safe(label)}</b>", f"{number:,} parameters", f"{unbroken_percentage(number, total)} of all", *lines]
        )
        for _, _, label, number, _, lines in cells
    ]
    ink = {"color": ["var(--text)" if n is None else f"var(--on-c{n})" for n in colour], "size": 13}
    paint = ["var(--raised)" if n is None else f"var(--c{n})" for n in colour]
    edges = {"line": {"color": "var(--ground)", "width": 1}, "pad": {"t": 22, "l": 3, "r": 3, "b": 3}}
    trace: dict[str, Any] = {"type": "treemap", "branchvalues": "total", "sort": False, "maxdepth": 3}
    trace |= {"ids": places, "parents": parents, "labels": list(map(safe, labels)), "values": values}
    trace |= {"text": list(map(abbreviated, values)), "textinfo": "label+text"}
    trace |= {"hovertext": hints, "hoverinfo": "text", "textfont": ink, "marker": {"colors": paint, **edges}}
    trace |= {"pathbar": {"thickness": 28, "textfont": {"size": 13}}, "tiling": {"packing": "squarify", "pad": 2}}
    most = f"most are in {largest[0]}, {unbroken_percentage(largest[1], total)}"
    summary = f"{total:,} parameters, each area as large as its share; {most}. Click an area to open it;"
    layout = {"height": 440, "margin": {"t": 30, "b": 2, "l": 2, "r": 2}}
    layout["uniformtext"] = {"minsize": 10, "mode": "hide"}
    keys = [Key(f"c{COLOURS.get(label)}", label) for label in by_component]
    table = _tensor_table(spec, total)
    return figure(f"Parameters of {name}", f"{summary} the bar above leads back.", [trace], keys, table, layout)


def _layer_tensors(block: Block) -> list[_Tensor]:
    tensors: dict[str, _Tensor] = {}
    for path, node in walk(block, ""):
        for own, shape in node.shapes().items():
            name = re.sub(r"\.experts\.\d+\.", ".experts.*.", f"{path}.{own}".removeprefix("."))
            times = tensors[name].times + 1 if name in tensors else 1
            tensors[name] = _Tensor(str(node.label), name, shape, times)
    return list(tensors.values())


def _cells(
    by_component: Mapping[str, int], total: int, outside: Sequence[_Tensor], runs: Sequence[_Layers]
) -> Iterator[_Area]:
    """Yield all areas but the outermost one. An area comes before the areas in it.

    Args:
        by_component: the numbers of parameters by component.
        total: the model's number of parameters.
        outside: the tensors outside of layers.
        runs: runs of equal consecutive layers, with the tensors of one of them.
    """
    for component, number in by_component.items():
        place = f"/{component}"
        alone = [tensor for tensor in outside if tensor.component == component]
        layers = [(first, last, [t for t in tensors if t.component == component]) for first, last, tensors in runs]
        layers = [layer for layer in layers if layer[2]]
        shape = (_shape(alone[0]),) if len(alone) == 1 and not layers else ()
        yield place, "/", component, number, component, shape
        if shape:
            continue
        yield from ((f"{place}/{t.name}", place, t.name, t.number, component, (_shape(t),)) for t in alone)
        for some in _together(layers, total):
            above = place
            if len(some) > 1:
                above, number = f"{place}/{some[0][0]}-{some[-1][1]}", sum(map(_size, some))
                yield above, place, f"layers {range_label(some[0][0], some[-1][1])}", number, component, ()
            for first, last, tensors in some:
                times, below = last - first + 1, f"{above}/{first}"
                label = f"layer{'s' if times > 1 else ''} {range_label(first, last)}"
                yield below, above, label, _size((first, last, tensors)), component, ()
                lines = (f"in {label}", *((f"{times:,} of them",) if times > 1 else ()))
                for t in tensors:
                    name = t.name if component == "norms" else t.name.partition(".")[2]
                    yield f"{below}/{t.name}", below, name, times * t.number, component, (_shape(t), *lines)


def _together(layers: Sequence[_Layers], total: int) -> Iterator[Sequence[_Layers]]:
    """Divide the layers into groups. Each group is drawn as one area, which is large enough for a name.

    The layers of a group are consecutive and equal. `total` is the model's number of parameters.
    """
    for _, group in groupby(layers, key=lambda layer: layer[2]):
        alike = list(group)
        number = len(alike)
        if _size(alike[0]) < _SMALLEST * total:
            number = min(number, max(1, int(sum(map(_size, alike)) / (TOGETHER * total))))
        ends = [round(part * len(alike) / number) for part in range(number + 1)]
        yield from (alike[first:last] for first, last in pairwise(ends))


def _size(layer: _Layers) -> int:
    first, last, tensors = layer
    return (last - first + 1) * sum(tensor.number for tensor in tensors)


def _shape(tensor: _Tensor) -> str:
    """Return the shape of a tensor as text: "4,096 × 11,008", or "8 experts of 4,096 × 11,008"."""
    shape = dimensions(tensor.shape)
    return shape if tensor.times == 1 else f"{tensor.times:,} experts of {shape}"


def _tensor_table(spec: ModelSpec, total: int) -> Table:
    rows = tuple(
        (
            group.name, dimensions(group.shape), f"{group.number:,}", f"{group.parameters:,}",
            percentage(group.parameters, total),
        )
        for group in tensor_groups(spec)
    )  # fmt: skip
    columns = (("tensor", False), ("shape", True), ("number", True), ("parameters", True), ("share", True))
    return Table(f"{counted(len(rows), 'kind')} of tensor as a table", columns, rows, folded=True)
