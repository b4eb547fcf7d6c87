"""A drawing of a layer's operations for the terminal, with lines along which the data flow.

`placement` computes the layout in units of one character. If the drawing is wider than the terminal, a list of the
operations in the order of computation replaces it. Drawings need no colours. They use only ASCII if the terminal has
nothing else.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.text import Text

from ..components.operations import Scores
from .placement import SHAPED, Box, Metrics, Placement, Size, Wire, boxed, experts_words, folded, place
from .structure import Kind, Node, Structure, layers_label, output_shape

_STREAM, _TRUNK, _LEFT, _GAP = 2, 0, 6, 2
"""The columns of the residual stream, of boxes on it and of the lanes, and the gap between two lanes."""
ROOMS = (28, *range(24, 7, -1))  # widths of a line of words; the first one with which the drawing fits is used
_TRUNK_ROOM = 40
_BRACKET = 2  # columns of the bracket around the block, on the right
_WORDS = {"×": "x", "–": "-", "·": "*", "ᵀ": "^T", "√": "sqrt ", "−": "-", "Σ": "sum", "…": "...", "²": "^2", "⊕": "+"}
"""Replacements in ASCII, in words."""


def plain_words(text: str, ascii_only: bool) -> str:
    """Return text, with replacements for characters outside of ASCII if `ascii_only` is true."""
    if not ascii_only:
        return text
    return "".join(_WORDS.get(letter, letter) for letter in text).encode("ascii", "replace").decode()


def path_lines(graph: Structure, kind: Kind, width: int, ascii_only: bool = False) -> Iterator[Text]:
    """Yield the lines of the drawing of a kind of layer, or of a list if the drawing is wider than `width`."""
    nodes = graph.path(kind)
    label = layers_label(graph, kind)
    placed = place(nodes, metrics(ascii_only), width - _BRACKET, ROOMS)
    if placed.width + _BRACKET > width:
        yield from _listed(nodes, label, width, ascii_only)
        return
    yield from _Canvas(placed, label, ascii_only).lines()


def metrics(ascii_only: bool) -> Metrics:
    """Return the sizes of the parts of a drawing, in characters."""

    def measure(node: Node, lanes: int, room: int) -> Size:
        lines = _lines(node, lanes * room, ascii_only)
        wide = max(map(len, lines))
        if node.op == "add":
            return tuple(lines), wide, 1
        more = 1 if node.op == "scores" else 0  # a row for the line below the heads, which are drawn as letters
        return tuple(lines), wide + (4 if boxed(node) else 2), len(lines) + (2 if boxed(node) else more)

    def least(copies: int) -> int:
        return 2 * (len(experts_words(copies)) + 4)

    return Metrics(measure, least, _STREAM, _TRUNK, _LEFT, _GAP, gap=0, track=1, around=(2, 1))


def _lines(node: Node, room: int, ascii_only: bool) -> list[str]:
    """Return the lines of text of a node, the title first, broken at `room` characters.

    With `room` 0, for a node on the residual stream, they are broken at `_TRUNK_ROOM` characters.
    """
    if node.op == "add":
        return ["+" if ascii_only else "⊕"]
    if node.op in ("tokens", "stream"):
        return [f"{node.title} {output_shape(node)}"]

    first = [node.title, *filter(None, [node.detail])]
    if not boxed(node) and node.op != "scores" and len(", ".join(first)) <= room:
        first = [", ".join(first)]
    words = [*first, *([output_shape(node)] if node.op in SHAPED else [])]
    lines = [part for line in words for part in folded(plain_words(line, ascii_only), room or _TRUNK_ROOM)]
    return [*lines, *_groups(node, room, ascii_only)] if node.op == "scores" else lines


def _groups(node: Node, room: int, ascii_only: bool) -> list[str]:
    """Return two lines that show attention heads as letters: query heads, and below them the key heads they share.

    As many key heads are shown as fit into `room` characters.
    """
    scores = node.operation
    assert isinstance(scores, Scores)
    groups, group = scores.kv_heads, scores.heads // scores.kv_heads
    if group > room:
        return []
    more = plain_words("…", ascii_only)
    rest = groups > (room + 1) // (group + 1)
    shown = max((room - len(more)) // (group + 1), 1) if rest else groups
    queries, keys = ["q" * group] * shown + [more] * rest, ["k".center(group)] * shown + [" " * len(more)] * rest
    return [" ".join(queries), " ".join(keys)]


_UP, _DOWN, _LEFTWARDS, _RIGHTWARDS = range(4)

_LIGHT = {
    (1, 1, 0, 0): "│", (0, 0, 1, 1): "─", (0, 1, 0, 1): "┌", (0, 1, 1, 0): "┐", (1, 0, 0, 1): "└", (1, 0, 1, 0): "┘",
    (1, 1, 0, 1): "├", (1, 1, 1, 0): "┤", (0, 1, 1, 1): "┬", (1, 0, 1, 1): "┴", (1, 1, 1, 1): "┼",
    (1, 0, 0, 0): "│", (0, 1, 0, 0): "│", (0, 0, 1, 0): "─", (0, 0, 0, 1): "─",
}  # fmt: skip
"""The characters of lines that meet: up, down, left, right."""
_HEAVY = {"│": "┃", "├": "┠", "┤": "┨", "┼": "╂", "┬": "┰", "┴": "┸"}
"""The characters in which the vertical line is the residual stream."""


class _Canvas:
    """A drawing made of characters with styles, at columns x and rows y. Rows are counted from the top."""

    def __init__(self, placed: Placement, label: str, ascii_only: bool) -> None:
        self.width, self.height, self.ascii_only = placed.width + _BRACKET, placed.height, ascii_only
        self.letters: dict[tuple[int, int], tuple[str, str]] = {}
        self.joints: dict[tuple[int, int], list[int]] = {}
        self.heavy: set[tuple[int, int]] = set()
        for wire in placed.wires:
            self._wire(wire)
        across, along = (".", ":") if ascii_only else ("╌", "╎")
        for frame in placed.frames:  # dashed, below the lines that cross it, with its words at the lower right
            right, bottom, words = frame.right - 1, frame.bottom - 1, f" {experts_words(frame.copies)} "
            for x in range(frame.left, right + 1):
                for y in range(frame.top, bottom + 1):
                    edge = across if y in (frame.top, bottom) else along if x in (frame.left, right) else ""
                    if edge:
                        self.letters.setdefault((x, y), (edge, "dim"))
            self._write(right - len(words), bottom, words, "")
        for box in placed.boxes:
            self._box(box)
        # The bracket around the block.
        top, bottom, x = placed.box("x").top, placed.box("block_output").top, self.width - 1
        self._join(x, top, _DOWN, _LEFTWARDS)
        self._join(x, bottom, _UP, _LEFTWARDS)
        self._down(x, top + 1, bottom)
        self._join(x - 1, bottom, _RIGHTWARDS)
        self._write(x - 1 - len(label), top, f"{plain_words(label, ascii_only)} ", "bold")

    def _join(self, x: int, y: int, *ways: int) -> None:
        """Draw lines from the middle of a character's cell in the given directions (up, down, left, right)."""
        joint = self.joints.setdefault((x, y), [0, 0, 0, 0])
        for way in ways:
            joint[way] = 1

    def _down(self, x: int, top: int, bottom: int) -> None:
        """Draw a vertical line in column x, from row `top` to the row before `bottom`, over their full height."""
        for y in range(top, bottom):
            self._join(x, y, _UP, _DOWN)

    def _along(self, y: int, one: int, other: int) -> None:
        """Draw a horizontal line in row y, from the middle of one column to the middle of another."""
        low, high = min(one, other), max(one, other)
        for x in range(low, high + 1):
            self._join(x, y, *([_LEFTWARDS] if x > low else []), *([_RIGHTWARDS] if x < high else []))

    def _write(self, x: int, y: int, text: str, style: str) -> None:
        self.letters.update({(x + index, y): (letter, style) for index, letter in enumerate(text)})

    def _wire(self, wire: Wire) -> None:
        points = wire.points
        if wire.kind in ("weights", "again"):
            return
        (x, top), (_, turn) = points[:2]
        self._down(x, top, turn)
        if len(points) == 2:
            if x == _STREAM:
                self.heavy |= {(x, y) for y in range(top, turn)}
            return
        self._join(x, turn, _UP)
        end = points[2][0]
        if len(points) == 3:
            self._along(turn, x, end if end < x else end - 1)
            if wire.kind == "choice":
                self._write(end - 1, turn, ">" if self.ascii_only else "▸", "dim")
        else:
            self._along(turn, x, end)
            self._join(end, turn, _DOWN)
            self._down(end, turn + 1, points[3][1])

    def _box(self, box: Box) -> None:
        """Draw the text of an operation (a node of the graph), with a border if it has weights."""
        if box.node.op == "add":
            self._write(box.left, box.top, box.lines[0], "bold")
            return
        bordered = boxed(box.node)
        for index, line in enumerate(box.lines):
            left = box.left + (box.width - len(line)) // 2
            if not bordered:
                left = box.left + _GAP if box.trunk else box.port - len(line) // 2
            style = "bold" if index == 0 else "dim" if line.startswith("(") else ""
            self._write(left, box.top + bordered + index, line, style)
        if not bordered:
            self._down(box.port, box.top + len(box.lines), box.bottom)
            if box.trunk:
                self._join(box.port, box.top, _DOWN, *([_UP] if box.top else []))
                self.heavy.add((box.port, box.top))
            return
        right, bottom = box.right - 1, box.bottom - 1
        for y in (box.top, bottom):
            self._along(y, box.left, right)
        for x in (box.left, right):
            self._join(x, box.top, _DOWN)
            self._join(x, bottom, _UP)
            self._down(x, box.top + 1, bottom)
        self._join(box.port, box.top, _UP)
        if box.bottom < self.height:
            self._join(box.port, bottom, _DOWN)
        if box.trunk:
            self.heavy |= {(box.port, box.top), (box.port, bottom)}

    def _cell(self, x: int, y: int) -> tuple[str, str]:
        """Return the character at a place and its style. Lines are drawn over frames, and words over lines."""
        letter, style = self.letters.get((x, y), (" ", ""))
        joint = self.joints.get((x, y))
        if joint is None or letter not in " .:╌╎":
            return letter, style
        up, down, left, right = joint
        heavy, drawn = (x, y) in self.heavy, _LIGHT[up, down, left, right]
        if self.ascii_only:
            drawn = "+" if (up or down) and (left or right) else "|" if up or down else "-"
        return _HEAVY.get(drawn, drawn) if heavy else drawn, "bold" if heavy else "dim"

    def lines(self) -> Iterator[Text]:
        """Yield the lines of the drawing."""
        for y in range(self.height):
            cells = [self._cell(x, y) for x in range(self.width)]
            line = Text(no_wrap=True, overflow="ignore")
            for style, run in groupby(cells, key=lambda cell: cell[1]):
                line.append("".join(letter for letter, _ in run), style)
            line.rstrip()
            yield line


def _listed(nodes: Sequence[Node], label: str, width: int, ascii_only: bool) -> Iterator[Text]:
    """Yield the operations as a list with their inputs, for terminals that are too narrow for a drawing."""
    for node in nodes:
        name, parts = f"{label}: x", []
        if node.op != "stream":
            title = node.title if node.title != node.id.rpartition(".")[2] else ""
            sources = f"from {', '.join(node.inputs)}" if node.inputs else ""
            details = filter(None, [sources, ", ".join(filter(None, [title, node.detail]))])
            name, parts = node.id, [*((words, "") for words in details), (output_shape(node), "dim")]
        for words, style in [(name, "bold"), *parts]:
            indent = "" if style == "bold" else "  "
            for line in folded(plain_words(words, ascii_only), max(width - len(indent), 1)):
                yield Text(indent + line, style=style, no_wrap=True, overflow="ignore")
