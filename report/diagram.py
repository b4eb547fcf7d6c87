"""The block diagram of an architecture as a figure: a box per node of the graph, and a line per edge."""

from collections.abc import Sequence
from typing import Any

from ..analysis.aspects import describe
from ..components import ModelSpec
from ..components.operations import Scores
from .pages import Figure, Table, figure, safe
from .placement import SHAPED, Area, Box, Metrics, Size, Wire, boxed, experts_words, folded, place
from .quantities import dimensions
from .structure import SYMBOLS, Kind, Node, Structure, layers_label, output_shape, structure

_FONT, _LINE, _PAD = 11, 14, 5  # pixels: font size, line height, and the space between words and border
_SUM = 18  # the width of the circle of a sum
_HEADS = 15  # the height of the picture of the heads in the box of the scores
PHONE = 343  # the width of a page's text on a screen of 375 pixels
ROOMS = (30, 24, 20, 18, *range(16, 8, -1))
"""Widths of a line of words in letters. The first one with which the diagram fits a phone is used."""
_TRUNK_ROOM = 40  # the width of a line on the residual stream, where boxes can be as wide as the diagram
_HEADS_MOST = 130  # the most width that the picture of the heads adds to its box
_HEADS_ROOM = 3  # the least width of a head in that picture; if not all heads fit, it shows some groups
_GROUPED_ROOM = 2  # the least width of a head if several share a key head
_STEP = 14  # pixels between the points with a hint
EDGE = 6  # the margin of the picture
_LEAST = 300  # the least width of a picture


def block_diagram(spec: ModelSpec, layer: int = 0, model: str = "") -> Figure:
    """Draw the operations from tokens to logits, with one layer out of the model's layers.

    Args:
        spec: the model's architecture.
        layer: the index of the layer.
        model: the model's name, for the title.

    Raises:
        IndexError: there is no such layer.
    """
    graph = structure(spec)
    kind = graph.kind_of(layer)
    nodes, label = graph.path(kind), layers_label(graph, kind)
    placed = place(nodes, METRICS, PHONE - 2 * EDGE, ROOMS)
    width, height = max(placed.width, _LEAST), placed.height
    top, bottom = placed.box("x").top, placed.box("block_output").bottom
    block = Area(METRICS.trunk - 4, top, width - METRICS.trunk + 4 + EDGE, bottom - top + 4)
    dotted = {"color": "var(--quiet)", "width": 1, "dash": "dot"}
    shapes = [{**_rounded(block, 8, {"width": 0}, "var(--raised)"), "layer": "below"}]
    shapes += [{**_rounded(frame, 6, dotted, "var(--rounding)"), "layer": "below"} for frame in placed.frames]
    shapes += [shape for wire in placed.wires for shape in _line(wire)]
    shapes.sort(key=lambda shape: "layer" not in shape)  # the heads of lines come after the lines
    shapes += [shape for box in placed.boxes for shape in (*_border(box), *_heads(box))]
    notes = [note for box in placed.boxes for note in _words(box)]
    notes.append(_note(width - _PAD, top + _LINE // 2 + 3, label, True, "right"))
    for frame in placed.frames:
        words = experts_words(frame.copies)
        notes.append(_note(frame.right - _PAD, frame.bottom - _LINE // 2 - 2, words, False, "right"))
    axis = {"visible": False, "showgrid": False, "zeroline": False, "constrain": "domain"}
    layout: dict[str, Any] = {"height": height + 2 * EDGE, "margin": dict.fromkeys("tbrl", 0), "hovermode": "closest"}
    layout |= {"shapes": shapes, "annotations": notes, "xaxis": {**axis, "range": [-EDGE, width + EDGE]}}
    layout["yaxis"] = {**axis, "range": [height + EDGE, -EDGE], "scaleanchor": "x", "scaleratio": 1}
    title, table = f"{f'{model}: block' if model else 'Block'} diagram, {label}", _node_table(nodes, label)
    return figure(title, _summary(graph, kind), _pointed(placed.boxes), (), table, layout, width + 2 * EDGE, _FONT)


def _summary(graph: Structure, kind: Kind) -> str:
    """Return a description of the diagram in two sentences, for people who cannot see it."""
    words = describe(graph.spec, (kind.block,))
    parts = [f"block {words['block']}", words["norm"], f"positions {words['positions']}", words["attention"]]
    parts += [f"{aspect} {words[aspect]}" for aspect in ("q/k norm", "window") if words[aspect] != "none"]
    parts += [f"feed-forward {words['feed-forward']}", f"head {words['head']}"]
    return f"From tokens to logits, {layers_label(graph, kind)}: {'; '.join(parts)}. {SYMBOLS}."


def _node_table(nodes: Sequence[Node], label: str) -> Table:
    rows = []
    for node in nodes:
        what = ", ".join(filter(None, [node.title if node.op != "linear" else "", node.detail]))
        parameters = f"{node.parameters:,}" if node.weights else "tied" if node.tied else "–"
        rows.append((node.id, what, ", ".join(node.inputs) or "–", output_shape(node), parameters, node.formula))
    columns = [("node", False), ("what it is", False), ("inputs", False), ("output", False)]
    columns += [("parameters", True), ("formula", False)]
    return Table(f"The block diagram as a table, {label}", tuple(columns), tuple(rows), folded=True)


def _lines(node: Node, trunk: bool) -> list[str]:
    if node.op in ("stream", "tokens"):
        return [f"{node.title}  {output_shape(node)}"]
    if node.op == "add":
        return [""] if trunk else ["+"]
    return [node.title, *filter(None, [node.detail]), *([output_shape(node)] if node.op in SHAPED else [])]


def _measure(node: Node, lanes: int, room: int) -> Size:
    lines = _lines(node, not lanes)
    if node.op == "add":
        return tuple(lines), _SUM, _SUM
    if node.op in ("tokens", "stream"):
        return tuple(lines), text_width(lines[0]) + 3 * _PAD, _LINE + _PAD
    lines = [part for line in lines for part in folded(line, lanes * room or _TRUNK_ROOM)]
    first = title_lines(node, lines)
    wide = max(text_width(line, bold=index < first) for index, line in enumerate(lines))
    tall = _LINE * len(lines) + 2 * _PAD
    if node.op == "scores":
        wide, tall = max(wide, min(_heads_of(node)[0] * _HEADS_ROOM, _HEADS_MOST)), tall + _HEADS
    return tuple(lines), wide + 2 * _PAD, tall


def title_lines(node: Node, lines: Sequence[str]) -> int:
    """Return how many of a box's lines belong to its title, which may be broken into several lines."""
    whole = node.title.replace(" ", "")
    return next(n for n in range(1, len(lines) + 1) if "".join(lines[:n]).replace(" ", "") == whole)


def text_width(text: str, bold: bool = False) -> int:
    """Return the width of a line in pixels in DejaVu Sans, the widest of the usual sans-serif fonts."""
    em = sum(0.32 if c in " ,.;:|'ilj()" else 0.9 if c in "mwMW×→≤" else 0.62 for c in text)
    return round(_FONT * em * (1.1 if bold else 1.0)) + 1


_FILLS = {"attention": "var(--zero)", "feed_forward": "var(--cell-0)", "norm": "var(--good-ground)"}
"""The colours of boxes with weights, by module. Boxes outside of layers are `--raised`."""


def _border(box: Box) -> list[dict[str, Any]]:
    node = box.node
    if node.op == "stream":
        path = f"M{box.port},{box.top}L{box.port},{box.bottom}"
        return [{"type": "path", "path": path, "line": _LINES["residual"]}]
    if node.op == "tokens":
        return []
    if node.op == "add":
        cx, cy, r = box.port, box.middle, _SUM // 2
        circle = {"type": "circle", "x0": cx - r, "x1": cx + r, "y0": cy - r, "y1": cy + r}
        line = {"color": "var(--mark)" if box.trunk else "var(--quiet)", "width": 2 if box.trunk else 1.5}
        plus = f"M{cx - 5},{cy}L{cx + 5},{cy}M{cx},{cy - 5}L{cx},{cy + 5}"
        return [{**circle, "line": line, "fillcolor": "var(--ground)"}, {"type": "path", "path": plus, "line": line}]
    colour, dash = "var(--quiet)" if boxed(node) else "var(--line)", "dot" if node.tied else "solid"
    fill = _FILLS.get(node.id.partition(".")[0], "var(--raised)") if boxed(node) else "var(--ground)"
    fill = _FILLS["norm"] if node.op == "norm" else fill
    return [_rounded(box, 5, {"color": colour, "width": 1, "dash": dash}, fill)]


def _rounded(area: Area, r: int, line: dict[str, Any], fill: str) -> dict[str, Any]:
    left, top, right, bottom = area.left, area.top, area.right, area.bottom
    path = (
        f"M{left + r},{top}L{right - r},{top}Q{right},{top},{right},{top + r}L{right},{bottom - r}"
        f"Q{right},{bottom},{right - r},{bottom}L{left + r},{bottom}Q{left},{bottom},{left},{bottom - r}"
        f"L{left},{top + r}Q{left},{top},{left + r},{top}Z"
    )
    return {"type": "path", "path": path, "line": line, "fillcolor": fill}


def _heads(box: Box) -> list[dict[str, Any]]:
    """Return plotly shapes that show the heads in the box of attention scores.

    Every key head is a bar, below the bars of the query heads that share it.
    """
    if box.node.op != "scores":
        return []
    heads, group = _heads_of(box.node)
    shown = _shown(box)
    width = (box.width - 2 * _PAD) / (shown if shown == heads // group else shown + 1)
    top, bars = box.bottom - _HEADS - _PAD // 2, []
    for index in range(shown):
        left, room = box.left + _PAD + index * width, width - (min(3, width / 4) if shown > 1 else 0)
        wide = room / group * (0.8 if group > 1 else 1)
        bars.append((left, top + 7, room, "var(--mark)"))
        bars += [(left + number * room / group, top, wide, "var(--quiet)") for number in range(group)]
    drawn = []
    for left, y, width, colour in bars:
        corners = {"x0": round(left, 2), "x1": round(left + width, 2), "y0": round(y, 2), "y1": round(y + 5, 2)}
        drawn.append({"type": "rect", **corners, "line": {"width": 0}, "fillcolor": colour})
    return drawn


def _heads_of(node: Node) -> tuple[int, int]:
    """Return the number of query heads, and how many of them share one key head."""
    scores = node.operation
    assert isinstance(scores, Scores)
    return scores.heads, scores.heads // scores.kv_heads


def _shown(box: Box) -> int:
    """Return the number of key heads that fit into the box."""
    heads, group = _heads_of(box.node)
    fit = max((box.width - 2 * _PAD) // (group * (_HEADS_ROOM if group == 1 else _GROUPED_ROOM)), 1)
    return heads // group if heads // group <= fit else max(fit - 1, 1)


def _words(box: Box) -> list[dict[str, Any]]:
    node = box.node
    if node.op == "add":
        return []
    if node.op in ("tokens", "stream"):
        return [_note(box.left + 2 * _PAD, box.middle, box.lines[0], False, "left")]
    notes = []
    first = title_lines(node, box.lines)
    shape = False  # whether a shape has begun, whose second line has no bracket
    for index, line in enumerate(box.lines):
        shape = shape or line.startswith("(")
        y = box.top + _PAD + _LINE * index + _LINE // 2
        notes.append(_note(box.left + box.width // 2, y, line, index < first, "center", shape))
    if node.op == "scores" and _shown(box) < _heads_of(node)[0] // _heads_of(node)[1]:
        notes.append(_note(box.right - _PAD - 4, box.bottom - _HEADS // 2 - 3, "…", False, "right"))
    return notes


def _note(x: int, y: int, text: str, bold: bool, anchor: str, quiet: bool = False) -> dict[str, Any]:
    words = f"<b>{safe(text)}</b>" if bold else safe(text)
    place = {"x": x, "y": y, "xanchor": anchor, "yanchor": "middle", "borderpad": 0}
    font = {"size": _FONT, "color": "var(--quiet)" if quiet else "var(--text)"}
    return {**place, "text": words, "showarrow": False, "font": font}


def _line(wire: Wire) -> list[dict[str, Any]]:
    stream = all(x == METRICS.stream for x, _ in wire.points)
    path = "M" + "L".join(f"{x},{y}" for x, y in wire.points)
    line = {"type": "path", "path": path, "line": _LINES["residual" if stream else wire.kind], "layer": "below"}
    if wire.kind in ("weights", "again") or stream:
        return [line]
    (x0, _), (x, y) = wire.points[-2:]
    way = 6 if x0 > x else -6
    head = f"M{x},{y}L{x - 4},{y - 6}L{x + 4},{y - 6}Z" if x0 == x else f"M{x},{y}L{x + way},{y - 4}L{x + way},{y + 4}Z"
    return [line, {"type": "path", "path": head, "line": {"width": 0}, "fillcolor": "var(--quiet)"}]


_LINES: dict[str, dict[str, Any]] = {
    "residual": {"color": "var(--mark)", "width": 3},
    "data": {"color": "var(--quiet)", "width": 1.5},
    "choice": {"color": "var(--quiet)", "width": 1.5, "dash": "dot"},
    "weights": {"color": "var(--quiet)", "width": 1, "dash": "dash"},
    "again": {"color": "var(--quiet)", "width": 1, "dash": "dash"},
}


def _pointed(boxes: Sequence[Box]) -> list[dict[str, Any]]:
    """Return plotly traces of invisible points with hover texts.

    One point per box can be reached by keyboard, and a mouse finds more points in the box.
    """
    middles, more = [], []
    for box in boxes:
        hint = _hint(box.node)
        middles.append((box.left + box.width // 2, box.middle, hint))
        across, down = max(box.width // _STEP, 1), max(box.height // _STEP, 1)
        more += [
            (box.left + round(box.width * (i + 0.5) / across), box.top + round(box.height * (j + 0.5) / down), hint)
            for i in range(across)
            for j in range(down)
        ]
    marker = {"size": _STEP, "opacity": 0, "color": "var(--mark)"}
    hidden = {"type": "scatter", "mode": "markers", "hoverinfo": "text", "marker": marker, "showlegend": False}
    traces = []
    for words, points in (("hovertext", middles), ("text", more)):
        xs, ys, hints = map(list, zip(*points, strict=True))
        traces.append({**hidden, "x": xs, "y": ys, words: hints})
    return traces


def _hint(node: Node) -> str:
    lines = [f"output {output_shape(node)}", *(f"{name} [{dimensions(shape)}]" for name, shape in node.weights)]
    lines += [f"{node.copies:,} of them"] if node.copies > 1 else []
    lines += [f"{node.parameters:,} parameters"] if node.parameters else []
    lines += ["tied: the embedding's weight, stored once"] if node.tied else []
    lines += [node.formula] if node.formula else []
    return "<br>".join([f"<b>{safe(node.id)}</b>", *map(safe, lines)])


METRICS = Metrics(
    _measure,
    lambda copies: 2 * (text_width(experts_words(copies)) + 2 * _PAD),
    stream=24,
    trunk=8,
    left=42,
    lane_gap=8,
    gap=14,
    track=16,
    around=(8, 18),
)
