"""Charts of what trees hold and cost: parameters as nested areas, parameters of models side by side, cache by context.

Every figure comes from the trees' shapes. A chart is a `pages.Figure`: plotly's figure, a sentence, and a table.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..analysis.costs import cache_bytes, cache_curve, usual_context
from ..analysis.parameters import ParameterCount, count, layer_ranges, range_label
from ..spec import ModelSpec
from .pages import Figure, Key, Table, counted, plain

__all__ = ["PALETTE", "bars", "binary", "cache_chart", "drawn", "safe", "short", "treemap"]

PALETTE = 8
"""page.css's colours for kinds of things, c0 to c7, with on-c0 to on-c7 for text on them."""
COLOURS = {"attention": 0, "feed-forward": 1, "embedding": 2, "head": 3, "positions": 4, "router": 5, "norms": 6}
"""A component has one colour wherever it is drawn."""
DASHES = ("solid", "dash", "dot")
"""Lines differ in more than colour."""
MOST_CELLS = 2500
"""Cells of a treemap up to which each layer has its own; beyond, neighbours alike are one."""
NAME = 22
"""Characters of a model's name on a line beside its bar."""
FROM = 128
"""Tokens at which the cache's lines begin."""


def drawn(data: Sequence[Any], height: int, **layout: Any) -> dict[str, Any]:
    """plotly's figure as JSON values, in the page's font and colours; `layout` is what is special about it."""
    import plotly.graph_objects as go

    common = {
        "template": "none",
        "height": height,
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"color": "var(--text)", "size": 12, "family": "system-ui, sans-serif"},
        "hoverlabel": {
            "bgcolor": "var(--raised)",
            "bordercolor": "var(--line)",
            "font": {"color": "var(--text)", "size": 13},
            "align": "left",
        },
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": "var(--quiet)", "activecolor": "var(--text)"},
    }
    spec: dict[str, Any] = json.loads(go.Figure(list(data), {**common, **layout}).to_json())
    return spec


def safe(text: str) -> str:
    """For plotly, which takes some HTML in texts, never in attributes, and knows no escaped quotes in all of them."""
    return html.escape(plain(text), quote=False)


def short(number: int, units: str = "KMBT") -> str:
    """Three digits of a number of parameters: 982, 12.3M, 1.24B, 405B; of anything else with units "kMGT"."""
    for power, unit in zip((12, 9, 6, 3), reversed(units), strict=True):
        if number >= 10**power:
            return f"{_three(number / 10**power)}{unit}"
    return f"{number:,}"


def binary(nbytes: int) -> str:
    """Bytes in units of 1,024, three digits: 36 MiB, 1.5 GiB."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if nbytes >= 1024**power:
            return f"{_three(nbytes / 1024**power)} {unit}"
    return f"{nbytes:,} B"


def _three(value: float) -> str:
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}"


def share(number: int, total: int) -> str:
    """Per cent, as the terminal's tables have it."""
    part = 100 * number / total
    return "<0.1 %" if 0 < part < 0.05 else f"{part:.1f} %"


# --- parameters as nested areas ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Cell:
    """An area: its place below its parent, what it is called, its parameters, and lines for whoever points at it."""

    place: str
    parent: str
    label: str
    number: int
    component: str
    told: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Tensor:
    """A tensor, or as many alike as a layer's experts have."""

    component: str
    name: str
    shape: tuple[int, ...]
    times: int

    @property
    def number(self) -> int:
        return math.prod(self.shape) * self.times


_Run = tuple[int, int, list[_Tensor]]
"""Layers alike: the first, the last, and what is in one of them."""


def treemap(name: str, spec: ModelSpec) -> Figure:
    """Parameters by component, then layer, then tensor: areas that open when they are chosen.

    A mixture's experts are one area a tensor, and in a model of very many layers so are neighbours that are alike.
    """
    counted_ = count(spec)
    total = counted_.total
    runs = _runs(spec)
    cells = [_Cell("/", "", name, total, "", (counted(len(spec.blocks), "layer"),)), *_cells(spec, counted_, runs)]
    largest = max(counted_.by_component.items(), key=lambda item: item[1])
    colour = [_colour(cell.component) for cell in cells]
    trace = {
        "type": "treemap",
        "ids": [cell.place for cell in cells],
        "parents": [cell.parent for cell in cells],
        "labels": [safe(cell.label) for cell in cells],
        "values": [cell.number for cell in cells],
        "branchvalues": "total",
        "sort": False,
        "text": [_inside(cell, total) for cell in cells],
        "textinfo": "label+text",
        "hovertext": [_told(cell, total) for cell in cells],
        "hoverinfo": "text",
        "marker": {
            "colors": ["var(--raised)" if n is None else f"var(--c{n})" for n in colour],
            "line": {"color": "var(--ground)", "width": 1},
            "pad": {"t": 22, "l": 3, "r": 3, "b": 3},
        },
        "textfont": {"color": ["var(--text)" if n is None else f"var(--on-c{n})" for n in colour], "size": 13},
        "pathbar": {"thickness": 28, "textfont": {"size": 13}},
        "tiling": {"packing": "squarify", "pad": 2},
        "maxdepth": 3,
    }
    height = 440
    return Figure(
        title=f"Parameters of {name}",
        summary=f"{total:,} parameters, each area as large as its share; most are in {largest[0]}, "
        f"{share(largest[1], total)}. An area opens when it is chosen; the bar above leads back.",
        spec=drawn(
            [trace], height, margin={"t": 30, "b": 2, "l": 2, "r": 2}, uniformtext={"minsize": 10, "mode": "hide"}
        ),
        height=height,
        width=280,
        keys=tuple(Key(f"c{_colour(label)}", label) for label in counted_.by_component),
        table=_tensor_table(spec, total),
    )


def _colour(component: str) -> int | None:
    return COLOURS.get(component)


def _told(cell: _Cell, total: int) -> str:
    name = f"<b>{safe(cell.label)}</b>"
    return "<br>".join([name, f"{cell.number:,} parameters", f"{share(cell.number, total)} of all", *cell.told])


def _inside(cell: _Cell, total: int) -> str:
    """What a component's area says below its name; a layer's has less room."""
    number = short(cell.number)
    return f"{number} · {share(cell.number, total)}" if cell.place.count("/") == 1 else number


def _runs(spec: ModelSpec) -> list[_Run]:
    """The layers: each its own run where there is room for all of them."""
    kinds = {block: _layer_tensors(spec, block) for block in dict.fromkeys(spec.blocks)}
    alone = [(index, index, kinds[block]) for index, block in enumerate(spec.blocks)]
    if sum(len(tensors) for _, _, tensors in alone) <= MOST_CELLS:
        return alone
    return [(first, last, kinds[block]) for first, last, block in layer_ranges(spec.blocks)]


def _layer_tensors(spec: ModelSpec, block: Any) -> list[_Tensor]:
    """What is in a layer, experts folded into one."""
    import msgspec

    found: dict[str, _Tensor] = {}
    for each in msgspec.structs.replace(spec, blocks=(block,)).parameters():
        if each.layer is None:
            continue
        name = each.name.removeprefix("blocks.0.")
        before, expert, rest = name.partition(".experts.")
        if expert:
            name = f"{before}.experts.*.{rest.partition('.')[2]}"
        times = found[name].times + 1 if name in found else 1
        found[name] = _Tensor(each.component, name, each.shape, times)
    return list(found.values())


def _outside(spec: ModelSpec) -> list[_Tensor]:
    import msgspec

    tree = msgspec.structs.replace(spec, blocks=spec.blocks[:1])
    return [_Tensor(p.component, p.name, p.shape, 1) for p in tree.parameters() if p.layer is None]


def _cells(
    spec: ModelSpec, counted_: ParameterCount, runs: Sequence[tuple[int, int, list[_Tensor]]]
) -> Iterator[_Cell]:
    """Every area but the whole, parents first."""
    outside = _outside(spec)
    for component, number in counted_.by_component.items():
        place = f"/{component}"
        alone = [each for each in outside if each.component == component]
        layers = [(first, last, [t for t in tensors if t.component == component]) for first, last, tensors in runs]
        layers = [layer for layer in layers if layer[2]]
        told = (_shape(alone[0]),) if len(alone) == 1 and not layers else ()
        yield _Cell(place, "/", component, number, component, told)
        if told:
            continue
        yield from (_Cell(f"{place}/{t.name}", place, t.name, t.number, component, (_shape(t),)) for t in alone)
        for first, last, tensors in layers:
            yield from _layer_cells(component, place, first, last, tensors)


def _layer_cells(component: str, above: str, first: int, last: int, tensors: Sequence[_Tensor]) -> Iterator[_Cell]:
    layers = last - first + 1
    label = f"layer{'s' if layers > 1 else ''} {range_label(first, last)}"
    place = f"{above}/{first}"
    yield _Cell(place, above, label, layers * sum(each.number for each in tensors), component)
    for each in tensors:
        name = each.name if component == "norms" else each.name.partition(".")[2]
        more = (f"in {label}", *((f"{layers:,} of them",) if layers > 1 else ()))
        yield _Cell(f"{place}/{each.name}", place, name, layers * each.number, component, (_shape(each), *more))


def _shape(tensor: _Tensor) -> str:
    """4,096 × 11,008; with how many experts have one."""
    shape = " × ".join(f"{size:,}" for size in tensor.shape)
    return shape if tensor.times == 1 else f"{tensor.times:,} experts of {shape}"


def _tensor_table(spec: ModelSpec, total: int) -> Table:
    """Every tensor, those alike in one row."""
    rows: list[tuple[str, ...]] = []
    outside = _outside(spec)
    before = [each for each in outside if each.component in ("embedding", "positions") or "embedding" in each.name]

    def row(name: str, tensor: _Tensor, layers: int) -> None:
        number = layers * tensor.number
        rows.append((name, _shape(tensor), f"{layers:,}", f"{number:,}", share(number, total)))

    for each in before:
        row(each.name, each, 1)
    kinds = {block: _layer_tensors(spec, block) for block in dict.fromkeys(spec.blocks)}
    for first, last, block in layer_ranges(spec.blocks):
        for each in kinds[block]:
            row(f"blocks.{range_label(first, last)}.{each.name}", each, last - first + 1)
    for each in outside:
        if each not in before:
            row(each.name, each, 1)
    columns = (("tensor", False), ("shape", True), ("layers", True), ("parameters", True), ("share", True))
    return Table(f"{counted(len(rows), 'kind')} of tensor as a table", columns, tuple(rows), folded=True)


# --- models side by side ----------------------------------------------------------------------------------------------


def bars(
    models: Sequence[tuple[str, Mapping[str, int]]], *, title: str, what: str, summary: str = "", shares: bool = False
) -> Figure:
    """A bar a model, of parts: parameters by component, FLOPs by component.

    Args:
        models: (name, number by part), at least one.
        title: the figure's name.
        what: the numbers' unit in words, many of them.
        summary: what it shows, in a sentence; by default the smallest and the largest total.
        shares: draw all bars as long as one another, for models of very different sizes.

    """
    parts = list(dict.fromkeys(part for _, numbers in models for part in numbers))
    names = [name for name, _ in models]
    totals = [sum(numbers.values()) for _, numbers in models]
    colours = _part_colours(parts)
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": part,
            "y": list(range(len(names))),
            "x": [
                numbers.get(part, 0) / (max(total, 1) if shares else 1)
                for (_, numbers), total in zip(models, totals, strict=True)
            ],
            "marker": {"color": f"var(--c{colours[part]})", "line": {"color": "var(--ground)", "width": 1}},
            "hovertext": [
                f"<b>{safe(name)}: {safe(part)}</b><br>{numbers.get(part, 0):,} {what}<br>"
                f"{share(numbers.get(part, 0), max(total, 1))} of {total:,}"
                for (name, numbers), total in zip(models, totals, strict=True)
            ],
            "hoverinfo": "text",
        }
        for part in parts
    ]
    height = 34 * len(models) + 64
    axis = {"showgrid": False, "zeroline": False, "ticks": "", "tickangle": 0}
    return Figure(
        title=title,
        summary=summary or _bars_summary(models, what),
        spec=drawn(
            traces,
            height,
            barmode="stack",
            bargap=0.3,
            showlegend=False,
            margin={"t": 8, "b": 40, "l": 8, "r": 12},
            xaxis={
                "gridcolor": "var(--line)",
                "zeroline": False,
                "ticks": "",
                "tickangle": 0,
                **_scale(max(totals), what, shares),
            },
            yaxis={
                **axis,
                "autorange": "reversed",
                "automargin": True,
                "tickvals": list(range(len(names))),
                "ticktext": [_short_name(name) for name in names],
            },
        ),
        height=height,
        width=280,
        keys=tuple(Key(f"c{colours[part]}", part) for part in parts),
        table=Table(
            f"{title} as a table",
            (("model", False), *((part, True) for part in parts), ("total", True)),
            tuple(
                (name, *(f"{numbers[part]:,}" if part in numbers else "–" for part in parts), f"{total:,}")
                for (name, numbers), total in zip(models, totals, strict=True)
            ),
            folded=True,
        ),
    )


def _bars_summary(models: Sequence[tuple[str, Mapping[str, int]]], what: str) -> str:
    totals = {name: sum(numbers.values()) for name, numbers in models}
    most, least = (pick(totals.items(), key=lambda item: item[1]) for pick in (max, min))
    if len(models) > 1:
        return f"From {least[1]:,} {what} ({least[0]}) to {most[1]:,} ({most[0]})."
    part, number = max(models[0][1].items(), key=lambda item: item[1])
    return f"{most[1]:,} {what}; most are in {part}, {share(number, most[1])}."


def _scale(most: int, what: str, shares: bool) -> dict[str, Any]:
    """Round numbers on an axis from 0, about four, or per cent."""
    if shares:
        return {"tickformat": ".0%", "dtick": 0.25, "range": [0, 1.02]}
    step = next(n * 10**p for p in range(20) for n in (1, 2, 5) if n * 10**p * 4 >= most)
    values = list(range(0, most + 1, step))
    units = "KMBT" if what == "parameters" else "kMGT"  # a billion parameters is a B, of all else it is a G
    return {"tickvals": values, "ticktext": [short(value, units) for value in values], "range": [0, most * 1.02]}


def _part_colours(parts: Sequence[str]) -> dict[str, int]:
    """A colour a part: components have their own, others what is left."""
    left = iter([n for n in range(PALETTE) if n not in {COLOURS.get(part) for part in parts}])
    return {part: COLOURS[part] if part in COLOURS else next(left, 7) for part in parts}


def _short_name(name: str) -> str:
    """A name beside its bar: the end of a path, its words on two lines, the middle left out of what is longer."""
    last = plain(name).rstrip("/").rpartition("/")[2] or plain(name)
    first, _, rest = last.partition(" ")
    lines = [last] if len(last) <= NAME or not rest else [first, rest]
    half = NAME // 2
    return "<br>".join(safe(line if len(line) <= NAME else f"{line[:half]}…{line[1 - half :]}") for line in lines)


# --- the cache by context ---------------------------------------------------------------------------------------------


def cache_chart(models: Sequence[tuple[str, ModelSpec]], dtype: str = "bfloat16", up_to: int | None = None) -> Figure:
    """Bytes of the key-value cache of one sequence against its length, a line a model, both axes logarithmic.

    A line ends where the context does that its model is for, or at `up_to` tokens, a table of positions permitting.
    Where a window is full, the line bends.

    Args:
        models: (name, tree), at least one.
        dtype: what keys and values are stored in.
        up_to: tokens.

    Raises:
        UsageError: an unknown dtype, or no tokens.

    """
    ends = [_end(spec, up_to) for _, spec in models]
    lines = [
        [(each.context, each.held) for each in cache_curve(spec, _lengths(spec, end), dtype)]
        for (_, spec), end in zip(models, ends, strict=True)
    ]
    traces = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": safe(name),
            "x": [length for length, _ in line],
            "y": [nbytes for _, nbytes in line],
            "line": {"color": f"var(--c{index % PALETTE})", "dash": DASHES[index % len(DASHES)], "width": 2},
            "marker": {"size": 5, "color": f"var(--c{index % PALETTE})"},
            "hovertext": [
                f"<b>{safe(name)}</b><br>{length:,} tokens<br>{binary(nbytes)} ({nbytes:,} bytes)"
                for length, nbytes in line
            ],
            "hoverinfo": "text",
        }
        for index, ((name, _), line) in enumerate(zip(models, lines, strict=True))
    ]
    largest = max(range(len(models)), key=lambda index: lines[index][-1][1])
    windows = [name for name, spec in models if any(block.attention.window for block in spec.blocks)]
    summary = f"One sequence's cache in {dtype}, up to {binary(lines[largest][-1][1])} at {ends[largest]:,} tokens"
    summary += f" ({models[largest][0]})." if len(models) > 1 else "."
    summary += f" A line bends where a window is full: {', '.join(windows)}." if windows else ""
    height = 360
    return Figure(
        title="Key-value cache by context",
        summary=summary,
        spec=drawn(
            traces,
            height,
            showlegend=False,
            margin={"t": 8, "b": 48, "l": 8, "r": 16},
            xaxis=_axis(min(line[0][0] for line in lines), max(ends), _tokens, 6) | {"title": {"text": "tokens"}},
            yaxis=_axis(min(line[0][1] for line in lines), max(line[-1][1] for line in lines), binary, 6)
            | {"automargin": True},
        ),
        height=height,
        width=280,
        keys=tuple(
            Key(f"line c{index % PALETTE} {DASHES[index % len(DASHES)]}", name)
            for index, (name, _) in enumerate(models)
        ),
        table=_cache_table(models, ends, dtype),
    )


def _end(spec: ModelSpec, up_to: int | None) -> int:
    if up_to is None:
        return usual_context(spec)
    return up_to if spec.positions is None else min(up_to, spec.positions.length)


def _lengths(spec: ModelSpec, end: int) -> list[int]:
    """Powers of two up to the end, and where the line bends."""
    powers = [1 << power for power in range(end.bit_length())]
    windows = {block.attention.window for block in spec.blocks if block.attention.window is not None}
    first = min(FROM, end)
    return sorted({first, end, *(n for n in (*powers, *windows) if first <= n <= end)})


def _axis(least: int, most: int, words: Any, ticks: int) -> dict[str, Any]:
    """A logarithmic axis with powers of two on it, as many as are legible."""
    low, high = math.floor(math.log2(max(least, 1))), math.ceil(math.log2(max(most, 2)))
    step = max(1, math.ceil((high - low) / ticks))
    values = [2**power for power in range(low, high + 1, step)]
    return {
        "type": "log",
        "range": [math.log10(2) * (low - 0.15), math.log10(2) * (high + 0.15)],
        "tickvals": values,
        "ticktext": [words(value) for value in values],
        "tickangle": 0,
        "gridcolor": "var(--line)",
        "zeroline": False,
        "ticks": "",
    }


def _tokens(number: int) -> str:
    """As contexts are called: 512, 8k, 128k."""
    return f"{number // 1024:,}k" if number >= 1024 else str(number)


def _cache_table(models: Sequence[tuple[str, ModelSpec]], ends: Sequence[int], dtype: str) -> Table:
    at = [length for length in (2048, 8192, 32768, 131072) if length <= max(ends)]
    rows = []
    for (name, spec), end in zip(models, ends, strict=True):
        cells = [binary(cache_bytes(spec, n, dtype).held) if n <= end else "–" for n in at]
        last = cache_bytes(spec, end, dtype)
        rows.append((name, f"{last.a_token:,} B", *cells, f"{end:,}", binary(last.held)))
    columns = (("model", False), ("a token", True), *((f"at {n:,}", True) for n in at))
    ending = (("longest context", True), ("there", True))
    return Table("Key-value cache as a table", (*columns, *ending), tuple(rows), folded=True)
