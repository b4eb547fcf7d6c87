"""A heatmap of the differences between two models, with a row per component and a column per layer.

Components outside of layers have columns before and after the layers. A difference of exactly 0 has its own colour,
because 0 has no logarithm. Differences within rounding have a colour of their own, too. All others are coloured on a
logarithmic scale from the smallest to the largest in the heatmap, so that the largest always stands out.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .pages import Figure, Key, Table, figure, safe
from .quantities import compact

_NARROWEST = 0.5  # powers of ten that the colours span at least, so that similar values look similar
_TICKS = 6  # the most values named on the scale
_ROW, _MARGIN, _SCALE = 32, 50, 70  # pixels: of a row, of the axis above, of the colour scale below
_LABELS, _COLUMN, _NARROW = 160, 34, 18
"""The least pixels of the components' names with their title, of a column with figures in it, and of one without."""
_MOST_FIGURES = 16  # with more columns, the cells have no figures in them
_LONGEST = 17  # the most characters of a component's name on one line
_SOME = 5  # if columns are narrow, every fifth layer is named above them
_BEFORE, _AFTER = "in", "out"
_KINDS = {
    "zero": "exactly 0",
    "rounding": "within rounding",
    "counts": "more than rounding explains",
    "apart": "only on one side, or of another shape",
}


@dataclass(frozen=True)
class Cell:
    """The difference between two models in one component of one layer."""

    component: str  # its name in words
    layer: int | None  # None outside of layers
    value: float  # the difference, 0 or more; infinite if one of the models has NaN or infinite values
    lines: tuple[str, ...]  # the lines of the hover text
    counts: bool  # whether the difference is larger than rounding explains
    apart: str = ""  # the cell's text if there is no difference to show, because only one model has the component

    @property
    def kind(self) -> Literal["zero", "rounding", "counts", "apart"]:
        if self.apart:
            return "apart"
        return "zero" if self.value == 0 else "counts" if self.counts else "rounding"


def heatmap(
    cells: Sequence[Cell],
    *,
    title: str,
    summary: str,
    measure: str,
    table: Table,
    marked: Cell | None = None,
    down: str = "component",
) -> Figure:
    """Draw a heatmap.

    Args:
        cells: the cells, in the order of computation.
        title: its title.
        summary: a description for people who cannot see it.
        measure: the title of the colour scale.
        table: the figures as a table.
        marked: the cell that gets a frame.
        down: the title of the rows.
    """
    rows, placed = _arranged(cells)
    layers = sorted({cell.layer for cell in cells if cell.layer is not None})
    used = {column for _, column in placed}
    columns = [name for name in (_BEFORE, *map(str, layers), _AFTER) if name in used]
    at = {(cell.component, column): cell for cell, column in placed}
    grid = [[at.get((row, column)) for column in columns] for row in rows]
    kinds = [kind for kind in _KINDS if any(cell.kind == kind for cell in cells)]
    keys, frames = [Key(kind, _KINDS[kind]) for kind in kinds], []
    if marked is not None:
        x, y = columns.index(next(column for cell, column in placed if cell is marked)), rows.index(marked.component)
        corners = {"x0": x - 0.5, "x1": x + 0.5, "y0": y - 0.5, "y1": y + 0.5}
        frames.append({"type": "rect", **corners, "line": {"color": "var(--mark)", "width": 3}})
        keys.append(Key("mark", "the first place that differs"))
    written = len(columns) <= _MOST_FIGURES
    named = columns
    if not written:  # narrow columns do not all have their name above, so that names do not touch
        some = {str(layer) for layer in layers if layer % _SOME == 0}
        some -= {*([columns[-2]] if columns[-1] == _AFTER else []), *(["0"] if columns[0] == _BEFORE else [])}
        named = [name for name in columns if name in some or name in (_BEFORE, _AFTER)]
    axis = {"showgrid": False, "zeroline": False, "showline": False, "ticks": "", "tickangle": 0}
    # Ticks are names: plotly would take a number for the index of a column.
    ordered = {"type": "category", "categoryorder": "array", "categoryarray": columns}
    across = {"side": "top", "title": {"text": "layer", "standoff": 4}, "range": [-0.5, len(columns) - 0.5]}
    downwards = {"title": {"text": down, "standoff": 14}, "automargin": True, "range": [len(rows) - 0.5, -0.5]}
    by_row = {"tickvals": list(range(len(rows))), "ticktext": [_folded(row) for row in rows]}
    below = _SCALE if "counts" in kinds else _SCALE // 5
    layout: dict[str, Any] = {"height": _ROW * len(rows) + _MARGIN + below, "shapes": frames}
    layout |= {"margin": {"t": _MARGIN, "b": below, "r": 4, "l": 8}}
    layout |= {"xaxis": {**axis, **ordered, **across, "tickvals": named, "ticktext": named}}
    layout |= {"yaxis": {**axis, **downwards, **by_row}}
    traces = [_trace(kind, columns, grid, measure, written) for kind in kinds]
    width = _LABELS + (_COLUMN if written else _NARROW) * len(columns)
    return figure(title, summary, traces, keys, table, layout, width)


def _arranged(cells: Sequence[Cell]) -> tuple[list[str], list[tuple[Cell, str]]]:
    """Return the components in the order of the rows, and (cell, name of its column) pairs."""
    rows: list[str] = []
    placed: list[tuple[Cell, str]] = []
    outside, before = _BEFORE, None
    for cell in cells:
        if cell.component not in rows:  # a component that only one layer has follows the component before it there
            follows = before is not None and before.layer == cell.layer
            rows.insert(rows.index(before.component) + 1 if before and follows else len(rows), cell.component)
        outside, before = outside if cell.layer is None else _AFTER, cell
        placed.append((cell, outside if cell.layer is None else str(cell.layer)))
    return rows, placed


def _trace(
    kind: str, columns: Sequence[str], grid: Sequence[Sequence[Cell | None]], measure: str, written: bool
) -> dict[str, Any]:
    """Return a plotly trace of the cells of one kind (see `Cell.kind`).

    Args:
        kind: the kind. Only cells of the kind "counts" are coloured by their values.
        columns: the names of the columns.
        grid: all cells by row and column, None at empty places.
        measure: the title of the colour scale.
        written: whether cells show their values as text.
    """
    # Infinite values have the colour of the largest finite value.
    values = [cell.value for line in grid for cell in line if cell is not None and cell.kind == "counts"]
    logs = [math.log10(value) for value in values if 0 < value < math.inf]
    low, high = min(logs, default=0.0), max(logs, default=0.0)
    middle, half = (low + high) / 2, max(high - low, _NARROWEST) / 2
    scaled = kind == "counts"
    own = [[cell if cell is not None and cell.kind == kind else None for cell in line] for line in grid]
    z = [
        [None if cell is None else min(math.log10(cell.value), middle + half) if scaled else 0 for cell in line]
        for line in own
    ]
    trace: dict[str, Any] = {"type": "heatmap", "x": columns, "z": z}
    trace["texttemplate"] = "%{text}" if written else None
    trace["hovertext"] = [["" if cell is None else _hover(cell) for cell in line] for line in own]
    trace["text"] = [["" if cell is None else cell.apart or compact(cell.value) for cell in line] for line in own]
    trace |= {"hoverinfo": "text", "hoverongaps": False, "xgap": 2, "ygap": 2}
    if scaled:
        return trace | _scale(measure, middle - half, middle + half)
    return trace | {"colorscale": [[end, f"var(--{kind})"] for end in (0, 1)], "showscale": False}


def _scale(measure: str, low: float, high: float) -> dict[str, Any]:
    """Return the plotly fields of the colour scale, for logarithms from `low` to `high`.

    Its ticks are powers of ten. If there are few powers, it also has ticks at multiples such as 2 and 5.
    """
    powers = range(math.floor(low), math.ceil(high) + 1)
    step = max(1, math.ceil((high - low) / _TICKS))
    digits = (1, 2, 3, 5) if high - low < 1 else (1, 2, 5) if high - low < 2 else (1,)
    logs = [math.log10(digit) + power for power in powers[::step] for digit in digits]
    inside = [value for value in logs if low - 1e-9 <= value <= high + 1e-9]
    ticks = inside if len(inside) > 1 else [low, high]
    named = {"tickvals": ticks, "ticktext": [compact(10**tick) for tick in ticks]}
    title = {"text": measure, "side": "top", "font": {"size": 12}}
    bar = {"orientation": "h", "y": 0, "yanchor": "top", "thickness": 12, "outlinewidth": 0, "title": title, **named}
    colours = [[step / 4, f"var(--cell-{step})"] for step in range(5)]
    return {"zmin": low, "zmax": high, "colorscale": colours, "textfont": {"weight": "bold"}, "colorbar": bar}


def _folded(component: str) -> str:
    """Return a component's name as HTML for a narrow screen.

    A part in brackets is left out, and a long name is put on two lines.
    """
    name = component.split(" (")[0]
    first, _, rest = name.partition(" ")
    return f"{safe(first)}<br>{safe(rest)}" if len(name) > _LONGEST and rest else safe(name)


def _hover(cell: Cell) -> str:
    name, bracket, more = cell.component.partition(" (")
    where = name if cell.layer is None else f"layer {cell.layer} {name}"
    return "<br>".join([f"<b>{safe(where)}</b>", *([safe(f"({more}")] if bracket else []), *map(safe, cell.lines)])
