"""A model's modules as a tree, with shapes and numbers of parameters. Equal layers and experts share one row.

Modules have the names that gptkit uses for models of all families.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.text import Text

from ..analysis.aspects import describe
from ..analysis.named import Named
from ..components import ModelSpec, Parameter, Shape
from ..components.operations import NormOperation
from ..components.ranges import range_label, some_of
from ..display import Record
from .pages import Table
from .placement import folded
from .quantities import dimensions
from .sheets import Terminal, drawing
from .structure import Kind, Node, Structure, structure

_NARROWEST = 18  # if the column of words would be narrower, the words stand below the names
_GAP = 2  # blanks between two columns
_Branch = dict[str, "_Branch | Shape"]
_GUIDES = {"│": "|", "├": "|", "└": "`", "─": "-", "×": "x", "–": "-", "·": "*", "…": "..."}


@dataclass(frozen=True)
class _TreeRow(Record):
    """A row of the tree: a module."""

    depth: int  # the number of modules that contain it
    name: str
    what: str  # its shape, or words for a module that contains others
    number: int  # the number of its parameters, with those of the modules in it
    copies: int = 1  # the number of equal modules that share this row and the rows below it
    tied: bool = False  # whether it uses the weight of another module
    layers: tuple[int, ...] = ()  # the layers that share this row
    group: bool = False  # whether it has no weights of its own

    JSON = "depth name what parameters=number copies"

    @property
    def figures(self) -> str:
        """Return the number of parameters as text: "4,096", or "8 × 4,096" for eight equal modules."""
        if self.tied and not self.number:
            return "tied"
        return f"{self.copies:,} × {self.number:,}" if self.copies > 1 else f"{self.number:,}"


def tree_rows(graph: Structure | Named) -> list[_TreeRow]:
    """Return the rows of the tree.

    The sum of the numbers of parameters in rows of depth 0, each times its copies, is the model's total.
    """
    if isinstance(graph, Named):
        return list(_branch("", _nested(graph.parameters), 0))
    ends = [[_row(node) for node in nodes if node.weights or node.tied] for nodes in (graph.before, graph.after)]
    rows, pooler = [*ends[0], *_outside(graph), *_blocks(graph), *ends[1]], graph.spec.pooler
    if pooler is not None:  # it is no operation on every token, and therefore not in the graph
        matrix, bias = pooler.shapes().values()
        rows.append(_TreeRow(0, "pooler.dense", f"[{dimensions(matrix)}] + bias", math.prod(matrix) + math.prod(bias)))
    return rows


def _outside(graph: Structure) -> Iterator[_TreeRow]:
    """Yield the rows of an encoder, and of the table of relative position biases, if the model has them."""
    if graph.encoder is not None:
        inside = tree_rows(graph.encoder)
        yield _TreeRow(0, "encoder", "reads the source", _total(inside).number, group=True)
        yield from (replace(row, depth=row.depth + 1) for row in inside)
    if (table := graph.spec.relative_bias) is not None:
        (shape,) = table.shapes().values()
        yield _TreeRow(0, "relative_bias", f"[{dimensions(shape)}]", math.prod(shape))


def _total(rows: Iterable[_TreeRow]) -> _TreeRow:
    return _TreeRow(0, "total", "", sum(row.number * row.copies for row in rows if not row.depth))


def _nested(parameters: Iterable[Parameter]) -> _Branch:
    """Return tensors as nested dictionaries, with the parts of their names as keys and their shapes as leaves.

    The last part of a tensor's name gets a dot in front, because a module may have the same name.
    """
    root: _Branch = {}
    for parameter in parameters:
        *path, last = parameter.name.split(".")
        at = root
        for part in path:
            at = at.setdefault(part, {})  # type: ignore[assignment]
        at[f".{last}"] = parameter.shape
    return root


def _branch(label: str, branch: _Branch, depth: int) -> Iterator[_TreeRow]:
    """Yield the rows of a module and of the modules in it. Equal modules that differ only in their number share a row.

    Args:
        label: the module's name.
        branch: its tensors, as `_nested` returns them.
        depth: the depth of its row.
    """
    while len(branch) == 1:
        ((part, below),) = branch.items()
        if not isinstance(below, dict) or part.isdecimal():
            break
        label, branch = f"{label}.{part}" if label else part, below
    alike: dict[str, tuple[_Branch, list[int]]] = {}
    for part, below in branch.items():
        if part.isdecimal() and isinstance(below, dict):
            alike.setdefault(repr(below), (below, []))[1].append(int(part))
    single = sum(map(len, (numbers for _, numbers in alike.values()))) == len(branch)
    if label and len(branch) > 1 and not single:
        yield _TreeRow(depth, label, "", _size(branch), group=True)
        label, depth = "", depth + 1
    prefix = f"{label}." if label else ""
    for part, below in branch.items():
        if not isinstance(below, dict):
            yield _TreeRow(depth, prefix + part[1:], f"[{dimensions(below)}]", math.prod(below))
        elif not part.isdecimal():
            yield from _branch(prefix + part, below, depth)
    for below, numbers in alike.values():
        what = f"{len(numbers):,} alike, each" if len(numbers) > 1 else ""
        yield _TreeRow(depth, f"{prefix}{_numbered(sorted(numbers))}", what, _size(below), len(numbers))
        for part, inside in below.items():
            yield from _branch("", {part: inside}, depth + 1)


def _size(branch: _Branch) -> int:
    return sum(_size(below) if isinstance(below, dict) else math.prod(below) for below in branch.values())


def _numbered(numbers: Sequence[int]) -> str:
    """Return ascending numbers in a short form: "0–35", "5" or "0, 2, 4, …"."""
    if numbers[-1] - numbers[0] + 1 == len(numbers):
        return range_label(numbers[0], numbers[-1])
    return some_of(numbers, 3, ", …")


def _row(node: Node, depth: int = 0, name: str = "") -> _TreeRow:
    weights = dict(node.weights)
    what = f"the {node.tied}'s" if node.tied else f"[{dimensions(next(iter(weights.values())))}]"
    if isinstance(node.operation, NormOperation):
        what = f"{node.operation.kind.partition(',')[0]} {what}"
    bias = " + bias" if "bias" in weights else ""
    return _TreeRow(depth, name or node.id, what + bias, node.parameters // node.copies, tied=node.tied is not None)


def _blocks(graph: Structure) -> Iterator[_TreeRow]:
    """Yield the rows of the layers.

    Kinds of layers with modules of equal shapes share rows, also if they differ in something else, such as windows.
    """
    by_shapes: dict[tuple[_TreeRow, ...], tuple[list[int], list[_TreeRow]]] = {}
    for kind in graph.kinds:
        rows = list(_modules(graph, kind))
        shapes = tuple(replace(row, what="") if row.group else row for row in rows)
        layers, first = by_shapes.get(shapes, ([], rows))
        alike_rows = [a if a == b else replace(a, what="layers differ") for a, b in zip(first, rows, strict=True)]
        by_shapes[shapes] = ([*layers, *kind.layers], alike_rows)
    for layers, rows in by_shapes.values():
        alike = "alike" if any(set(layers) == set(kind.layers) for kind in graph.kinds) else "of one shape"
        number = sum(row.number for row in rows if row.depth == 1)
        what = f"{len(layers):,} {alike}, each" if len(layers) > 1 else ""
        layers.sort()
        yield _TreeRow(0, f"blocks.{_numbered(layers)}", what, number, len(layers), layers=tuple(layers))
        yield from rows


def _modules(graph: Structure, kind: Kind) -> Iterator[_TreeRow]:
    """Yield the rows of one layer: modules with weights, below the modules that contain them, such as attention."""
    words = describe(graph.spec, (kind.block,))
    groups: set[str] = set()
    nodes = [node for node in kind.nodes if node.weights]
    # The nodes of one module need not follow each other, so they are sorted by the first appearance of the module.
    modules = list(dict.fromkeys(node.id.partition(".")[0] for node in nodes))
    for node in sorted(nodes, key=lambda node: modules.index(node.id.partition(".")[0])):
        parts = node.id.split(".")
        for depth in range(1, len(parts)):
            path = ".".join(parts[:depth])
            if path in groups:
                continue
            groups.add(path)
            inside = [other for other in kind.nodes if other.id.startswith(f"{path}.")]
            number, copies = sum(other.parameters for other in inside), max(other.copies for other in inside)
            if path.endswith("experts"):
                yield _TreeRow(depth, f"experts.{range_label(0, copies - 1)}", "each", number // copies, copies)
            else:
                yield _TreeRow(depth, path, words.get(path.replace("_", "-"), ""), number, group=True)
        yield _row(node, len(parts), parts[-1])


@drawing
def tree_drawing(terminal: Terminal, model: Structure | ModelSpec) -> Iterator[Text]:
    """Yield the lines of the tree, in the width of the terminal."""
    graph = model if isinstance(model, Structure) else structure(model)
    return tree_lines(graph, terminal.width, terminal.ascii_only)


def tree_lines(graph: Structure | Named, width: int, ascii_only: bool = False) -> Iterator[Text]:
    """Yield the lines of the tree, `width` characters wide.

    Descriptions that do not fit are broken, or printed below the names. Numbers are never broken.
    """

    def words(text: str) -> str:
        return "".join(_GUIDES.get(letter, letter) for letter in text) if ascii_only else text

    rows = tree_rows(graph)
    rows.append(_total(rows))
    leads: list[str] = []  # the lines to the left of the rows
    open_at: set[int] = set()
    for row in reversed(rows):
        open_at = {depth for depth in open_at if depth <= row.depth}
        lead = "".join("│  " if depth in open_at else "   " for depth in range(1, row.depth))
        leads.insert(0, words(lead + ("" if row.depth == 0 else "├─ " if row.depth in open_at else "└─ ")))
        open_at |= {row.depth} - {0}
    names = max(len(lead) + len(words(row.name)) for lead, row in zip(leads, rows, strict=True))
    whats = max(len(words(row.what)) for row in rows)
    figures = max(len(words(row.figures)) for row in rows)
    room = width - names - figures - 2 * _GAP
    below = room < min(whats, _NARROWEST)
    whats = 0 if below else min(whats, room)
    line_width = names + figures + (_GAP if below else 2 * _GAP + whats)
    for lead, row in zip(leads, rows, strict=True):
        style = "bold" if row.depth == 0 else ""
        parts = folded(words(row.what), max(width - len(lead) - 3, 1) if below else whats) if row.what else []
        line = Text(no_wrap=True, overflow="ignore")
        line.append(lead, "dim").append(words(row.name), style)
        first = parts[0] if parts and not below else ""
        if first:
            line.append(" " * (names + _GAP - line.cell_len)).append(first)
        figure = words(row.figures)
        if line_width <= width:
            line.append(" " * (line_width - line.cell_len - len(figure))).append(figure, style)
        yield line
        if line_width > width:
            yield Text(figure.rjust(width), style=style, no_wrap=True, overflow="ignore")
        onwards = lead.translate(str.maketrans("├└─`-", "│    "))
        for part in parts[0 if below else 1 :]:
            more = Text(no_wrap=True, overflow="ignore").append(onwards, "dim")
            yield more.append(" " * (3 if below else names + _GAP - len(onwards))).append(part, "dim" if below else "")


def tree_table(graph: Structure | Named) -> Table:
    """Return the tree as a table of an HTML page, with the modules' full names."""
    rows, above = [], [""]
    tree = tree_rows(graph)
    for row in [*tree, _total(tree)]:
        above = [*above[: row.depth], row.name]
        rows.append((".".join(above[1:]) if row.depth else row.name, row.what, row.figures))
    columns = (("module", False), ("what it is", False), ("parameters", True))
    return Table("The tree", columns, tuple(rows), lit=frozenset({len(tree)}), bold="the total")


def tree_json(graph: Structure | Named) -> list[dict[str, Any]]:
    """Return the tree as plain JSON values."""
    return [row.as_json() | ({"layers": list(row.layers)} if row.layers else {}) for row in tree_rows(graph)]
