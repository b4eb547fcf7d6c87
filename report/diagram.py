"""The block diagram of an architecture, drawn from its tree: a figure with a box a node, and a line an edge."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from typing import Any

import msgspec

from ..analysis.parameters import describe
from ..components import ModelSpec
from ..components.operations import Scores
from .graph import SYMBOLS, Kind, Node, Structure, layers_label, shape_words, sizes
from .pages import Figure, Table, plain
from .placement import Box, Frame, Metrics, Placement, Wire, boxed, experts_words, folded, place
from .structure import structure

__all__ = ["block_diagram"]

FONT, LINE, PAD = 11, 14, 5
"""Pixels: of a letter, from one line to the next, between words and a box's border."""
SUM = 18
"""The width of a sum's circle."""
HEADS = 15
"""The height of the heads' picture in the scores' box."""
PHONE = 343
"""The width of a page's text on a screen of 375 pixels."""
ROOMS = (30, 24, 20, 18, *range(16, 8, -1))
"""Letters that a line of words may have; the first with which the diagram fits a phone is taken."""
TRUNK_ROOM = 40
"""The same of boxes on the stream, which have all of the width."""
HEADS_MOST = 130
"""How wide that picture makes the box at most."""
HEADS_ROOM = 3
"""The least width of a head in that picture; what has more heads than fit shows some of its groups."""
GROUPED_ROOM = 2
"""The same where several share a key head."""
STEP = 14
"""Pixels between the points that can be pointed at."""
EDGE = 6
"""Blank around the picture."""
LEAST = 300
"""The least width of a picture."""


def block_diagram(spec: ModelSpec, layer: int = 0, model: str = "") -> Figure:
    """The path from tokens to logits through one layer, as a figure.

    Args:
        spec: the tree.
        layer: whose kind of layer it is.
        model: its name, where several are drawn.

    Raises:
        IndexError: there is no such layer.

    """
    import plotly.graph_objects as go

    graph = structure(spec)
    kind = graph.kind_of(layer)
    nodes = graph.path(kind)
    placed = place(nodes, METRICS, PHONE - 2 * EDGE, ROOMS)
    width = max(placed.width, LEAST)
    shapes = [_block_frame(placed, width), *map(_experts_frame, placed.frames), *map(_line, placed.wires)]
    shapes += [each for wire in placed.wires for each in _arrow(wire)]
    shapes += [each for box in placed.boxes for each in (*_border(box), *_heads(box))]
    notes = [each for box in placed.boxes for each in _words(box)]
    notes += [_block_words(placed, graph, kind, width), *map(_experts_words, placed.frames)]
    figure = go.Figure(_pointed(placed.boxes), _layout(width, placed.height, shapes, notes))
    return Figure(
        title=f"{f'{model}: block' if model else 'Block'} diagram, {layers_label(graph, kind)}",
        summary=summary(graph, kind),
        spec=json.loads(figure.to_json()),
        height=placed.height + 2 * EDGE,
        width=width + 2 * EDGE,
        keys=(),
        table=node_table(nodes, f"The block diagram as a table, {layers_label(graph, kind)}"),
    )


# --- in words --------------------------------------------------------------------------------------------------------


def summary(graph: Structure, kind: Kind) -> str:
    """What a diagram shows, in a sentence or two."""
    words = describe(msgspec.structs.replace(graph.spec, blocks=(kind.block,)))
    told = [f"block {words['block']}", words["norm"], f"positions {words['positions']}", words["attention"]]
    if words["q/k norm"] != "none":
        told.append(f"q/k norm {words['q/k norm']}")
    if words["window"] != "none":
        told.append(f"window {words['window']}")
    told += [f"feed-forward {words['feed-forward']}", f"head {words['head']}"]
    return f"From tokens to logits, {layers_label(graph, kind)}: {'; '.join(told)}. {SYMBOLS}."


def node_table(nodes: Sequence[Node], caption: str) -> Table:
    """The nodes of a path in the order of computation, for those who cannot see it drawn."""
    rows = []
    for node in nodes:
        what = ", ".join(filter(None, [node.title if node.op != "linear" else "", node.detail]))
        parameters = f"{node.parameters:,}" if node.weights else "tied" if node.tied else "–"
        rows.append((node.id, what, ", ".join(node.inputs) or "–", shape_words(node), parameters, node.formula))
    columns = (("node", False), ("what it is", False), ("of", False), ("gives", False))
    return Table(caption, (*columns, ("parameters", True), ("formula", False)), tuple(rows), folded=True)


# --- boxes -----------------------------------------------------------------------------------------------------------


def _lines(node: Node, trunk: bool) -> list[str]:
    """What stands in a box, the title first."""
    if node.op == "stream":
        return [f"x  {shape_words(node)}"]
    if node.op == "tokens":
        return [f"{node.title}  {shape_words(node)}"]
    if node.op == "add":
        return [""] if trunk else ["+"]
    shaped = node.op in ("linear", "embed", "positions", "scores", "concat", "mix")
    return [node.title, *filter(None, [node.detail]), *([shape_words(node)] if shaped else [])]


def _measure(node: Node, lanes: int, room: int) -> tuple[tuple[str, ...], int, int]:
    lines = _lines(node, not lanes)
    if node.op == "add":
        return tuple(lines), SUM, SUM
    if node.op in ("tokens", "stream"):
        return tuple(lines), text_width(lines[0]) + 3 * PAD, LINE + PAD
    lines = [part for line in lines for part in folded(line, lanes * room or TRUNK_ROOM)]
    first = title_lines(node, lines)
    wide = max(text_width(line, bold=index < first) for index, line in enumerate(lines))
    tall = LINE * len(lines) + 2 * PAD
    if node.op == "scores":
        wide, tall = max(wide, min(_heads_of(node)[0] * HEADS_ROOM, HEADS_MOST)), tall + HEADS
    return tuple(lines), wide + 2 * PAD, tall


def title_lines(node: Node, lines: Sequence[str]) -> int:
    """How many of a box's lines are its title, which may be folded."""
    whole = node.title.replace(" ", "")
    return next(n for n in range(1, len(lines) + 1) if "".join(lines[:n]).replace(" ", "") == whole)


def text_width(text: str, bold: bool = False) -> int:
    """Pixels that a line takes at most, in the usual sans-serif fonts (those of DejaVu Sans, the widest)."""
    em = sum(0.32 if c in " ,.;:|'ilj()" else 0.9 if c in "mwMW×→≤" else 0.62 for c in text)
    return round(FONT * em * (1.1 if bold else 1.0)) + 1


FILLS = {"attention": "var(--zero)", "feed_forward": "var(--cell-0)", "norm": "var(--good-ground)"}
"""What boxes with weights are painted in, by the module; the ends are `--raised`."""


def _fill(node: Node) -> str:
    if node.op == "norm":
        return FILLS["norm"]
    if not boxed(node):
        return "var(--ground)"
    return FILLS.get(node.id.partition(".")[0], "var(--raised)")


def _border(box: Box) -> list[dict[str, Any]]:
    node = box.node
    if node.op == "stream":
        path = f"M{box.port},{box.top}L{box.port},{box.bottom}"
        return [{"type": "path", "path": path, "line": LINES["residual"]}]
    if node.op == "tokens":
        return []
    if node.op == "add":
        cx, cy, r = box.port, box.middle, SUM // 2
        circle = {"type": "circle", "x0": cx - r, "x1": cx + r, "y0": cy - r, "y1": cy + r}
        line = {"color": "var(--mark)" if box.trunk else "var(--quiet)", "width": 2 if box.trunk else 1.5}
        plus = f"M{cx - 5},{cy}L{cx + 5},{cy}M{cx},{cy - 5}L{cx},{cy + 5}"
        return [{**circle, "line": line, "fillcolor": "var(--ground)"}, {"type": "path", "path": plus, "line": line}]
    path = rounded(box.left, box.top, box.width, box.height, 5)
    colour, dash = "var(--quiet)" if boxed(node) else "var(--line)", "dot" if node.tied else "solid"
    line = {"color": colour, "width": 1, "dash": dash}
    return [{"type": "path", "path": path, "line": line, "fillcolor": _fill(node)}]


def rounded(left: int, top: int, width: int, height: int, r: int) -> str:
    """The path of a rectangle with round corners."""
    right, bottom = left + width, top + height
    return (
        f"M{left + r},{top}L{right - r},{top}Q{right},{top},{right},{top + r}L{right},{bottom - r}"
        f"Q{right},{bottom},{right - r},{bottom}L{left + r},{bottom}Q{left},{bottom},{left},{bottom - r}"
        f"L{left},{top + r}Q{left},{top},{left + r},{top}Z"
    )


def _heads(box: Box) -> list[dict[str, Any]]:
    """In the scores' box: the key heads, each below the query heads that share it."""
    if box.node.op != "scores":
        return []
    heads, group = _heads_of(box.node)
    inside = box.width - 2 * PAD
    shown = _shown(box)
    each = inside / (shown if shown == heads // group else shown + 1)
    top = box.bottom - HEADS - PAD // 2
    found = []
    for index in range(shown):
        left, room = box.left + PAD + index * each, each - (min(3, each / 4) if shown > 1 else 0)
        found.append(_bar(left, top + 7, room, 5, "var(--mark)"))
        for head in range(group):
            found.append(
                _bar(left + head * room / group, top, room / group * (0.8 if group > 1 else 1), 5, "var(--quiet)")
            )
    return found


def _heads_of(node: Node) -> tuple[int, int]:
    """Query heads, and how many of them share a key head."""
    scores = node.operation
    assert isinstance(scores, Scores)
    return scores.heads, scores.heads // scores.kv_heads


def _shown(box: Box) -> int:
    """How many groups of heads are drawn."""
    heads, group = _heads_of(box.node)
    fit = max((box.width - 2 * PAD) // (group * (HEADS_ROOM if group == 1 else GROUPED_ROOM)), 1)
    return heads // group if heads // group <= fit else max(fit - 1, 1)


def _bar(left: float, top: float, width: float, height: float, colour: str) -> dict[str, Any]:
    place = {"x0": round(left, 2), "x1": round(left + width, 2), "y0": round(top, 2), "y1": round(top + height, 2)}
    return {"type": "rect", **place, "line": {"width": 0}, "fillcolor": colour}


def _words(box: Box) -> list[dict[str, Any]]:
    """A box's lines, each in its place."""
    node = box.node
    if node.op == "add":
        return []
    beside = node.op in ("tokens", "stream")
    found = []
    first = 0 if beside else title_lines(node, box.lines)
    shape = False  # whose second line has no bracket of its own
    for index, line in enumerate(box.lines):
        shape = shape or line.startswith("(")
        y = box.middle if beside else box.top + PAD + LINE * index + LINE // 2
        bold = index < first
        x = box.left + 2 * PAD if beside else box.left + box.width // 2
        found.append(
            _note(x, y, line, bold, "left" if beside else "center", "var(--quiet)" if shape else "var(--text)")
        )
    if node.op == "scores" and _shown(box) < _heads_of(node)[0] // _heads_of(node)[1]:
        found.append(_note(box.right - PAD - 4, box.bottom - HEADS // 2 - 3, "…", False, "right", "var(--text)"))
    return found


def _note(x: int, y: int, text: str, bold: bool, anchor: str, colour: str) -> dict[str, Any]:
    safe = html.escape(plain(text), quote=False)
    return {
        "x": x,
        "y": y,
        "text": f"<b>{safe}</b>" if bold else safe,
        "showarrow": False,
        "xanchor": anchor,
        "yanchor": "middle",
        "borderpad": 0,
        "font": {"size": FONT, "color": colour},
    }


# --- lines and frames ------------------------------------------------------------------------------------------------


def _line(wire: Wire) -> dict[str, Any]:
    path = "M" + "L".join(f"{x},{y}" for x, y in wire.points)
    return {
        "type": "path",
        "path": path,
        "line": LINES["residual" if _on_stream(wire) else wire.kind],
        "layer": "below",
    }


LINES: dict[str, dict[str, Any]] = {
    "residual": {"color": "var(--mark)", "width": 3},
    "data": {"color": "var(--quiet)", "width": 1.5},
    "choice": {"color": "var(--quiet)", "width": 1.5, "dash": "dot"},
    "weights": {"color": "var(--quiet)", "width": 1, "dash": "dash"},
}


def _on_stream(wire: Wire) -> bool:
    return all(x == METRICS.stream for x, _ in wire.points)


def _arrow(wire: Wire) -> list[dict[str, Any]]:
    """The head of a line, where it ends."""
    if wire.kind == "weights" or _on_stream(wire):
        return []
    (x0, _), (x, y) = wire.points[-2:]
    if x0 == x:
        path = f"M{x},{y}L{x - 4},{y - 6}L{x + 4},{y - 6}Z"
    else:
        way = 6 if x0 > x else -6
        path = f"M{x},{y}L{x + way},{y - 4}L{x + way},{y + 4}Z"
    return [{"type": "path", "path": path, "line": {"width": 0}, "fillcolor": "var(--quiet)"}]


def _experts_frame(frame: Frame) -> dict[str, Any]:
    path = rounded(frame.left, frame.top, frame.width, frame.height, 6)
    line = {"color": "var(--quiet)", "width": 1, "dash": "dot"}
    return {"type": "path", "path": path, "line": line, "fillcolor": "var(--rounding)", "layer": "below"}


def _experts_words(frame: Frame) -> dict[str, Any]:
    where = frame.left + frame.width - PAD, frame.top + frame.height - LINE // 2 - 2
    return _note(*where, experts_words(frame.copies), False, "right", "var(--text)")


def _block_ends(placed: Placement) -> tuple[int, int]:
    """Where the block begins and ends, from above to below."""
    return placed.box("x").top, placed.box("block_output").bottom


def _block_frame(placed: Placement, width: int) -> dict[str, Any]:
    top, bottom = _block_ends(placed)
    path = rounded(METRICS.trunk - 4, top, width - METRICS.trunk + 4 + EDGE, bottom - top + 4, 8)
    return {"type": "path", "path": path, "line": {"width": 0}, "fillcolor": "var(--raised)", "layer": "below"}


def _block_words(placed: Placement, graph: Structure, kind: Kind, width: int) -> dict[str, Any]:
    top, _ = _block_ends(placed)
    return _note(width - PAD, top + LINE // 2 + 3, layers_label(graph, kind), True, "right", "var(--text)")


def _pointed(boxes: Sequence[Box]) -> list[dict[str, Any]]:
    """What whoever points at a box is told: points that cannot be seen. One a box, which a keyboard reaches (it goes
    by `hovertext`), and more for the mouse, close enough to one another to fill the box.
    """
    middles: list[tuple[int, int, str]] = []
    more: list[tuple[int, int, str]] = []
    for box in boxes:
        told = _told(box.node)
        middles.append((box.left + box.width // 2, box.middle, told))
        across, down = max(box.width // STEP, 1), max(box.height // STEP, 1)
        more += [
            (box.left + round(box.width * (i + 0.5) / across), box.top + round(box.height * (j + 0.5) / down), told)
            for i in range(across)
            for j in range(down)
        ]
    return [_points(middles, "hovertext"), _points(more, "text")]


def _points(points: Sequence[tuple[int, int, str]], words: str) -> dict[str, Any]:
    xs, ys, told = (list(each) for each in zip(*points, strict=True))
    marker = {"size": STEP, "opacity": 0, "color": "var(--mark)"}
    shown = {"type": "scatter", "mode": "markers", "hoverinfo": "text", "marker": marker, "showlegend": False}
    return {**shown, "x": xs, "y": ys, words: told}


def _told(node: Node) -> str:
    lines = [f"gives {shape_words(node)}"]
    lines += [f"{name} [{sizes(shape)}]" for name, shape in node.weights]
    if node.copies > 1:
        lines.append(f"{node.copies:,} of them")
    if node.parameters:
        lines.append(f"{node.parameters:,} parameters")
    if node.tied:
        lines.append("tied: the embedding's weight, stored once")
    lines += [line for line in (node.formula,) if line]
    safe = [html.escape(plain(line), quote=False) for line in lines]
    return "<br>".join([f"<b>{html.escape(node.id, quote=False)}</b>", *safe])


def _layout(width: int, height: int, shapes: list[dict[str, Any]], notes: list[dict[str, Any]]) -> dict[str, Any]:
    axis = {"visible": False, "showgrid": False, "zeroline": False, "constrain": "domain"}
    return {
        "template": "none",
        "height": height + 2 * EDGE,
        "margin": {"t": 0, "b": 0, "r": 0, "l": 0},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"color": "var(--text)", "size": FONT, "family": "system-ui, sans-serif"},
        "hoverlabel": {
            "bgcolor": "var(--raised)",
            "bordercolor": "var(--line)",
            "font": {"color": "var(--text)", "size": 13},
            "align": "left",
        },
        "hovermode": "closest",
        "xaxis": {**axis, "range": [-EDGE, width + EDGE]},
        "yaxis": {**axis, "range": [height + EDGE, -EDGE], "scaleanchor": "x", "scaleratio": 1},
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": "var(--quiet)", "activecolor": "var(--text)"},
        "shapes": shapes,
        "annotations": notes,
    }


def _least(copies: int) -> int:
    """A frame's width: its words stand right of a line through its middle."""
    return 2 * (text_width(experts_words(copies)) + 2 * PAD)


METRICS = Metrics(_measure, _least, stream=24, trunk=8, left=42, beside=8, gap=14, track=16, around=(8, 18))
