"""Charts of parameters by model and of the KV cache by context, and the functions that all charts share."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..analysis.costs import CONTEXT, cache_bytes, stated_context, usual_context, windows
from ..components import ModelSpec
from .pages import COLOURS, PALETTE, Figure, Key, Table, figure, plain, safe
from .quantities import abbreviated, abbreviated_bytes, unbroken_percentage

DASHES = ("solid", "dash", "dot")  # lines differ by more than their colour
BOTH = "lines+markers"
_APART = 3  # if models differ in size by more than this factor, their shares are drawn too
_NAME = 22  # the most characters of a model's name on a line next to its bar
_FROM = 128  # tokens at which the lines of the cache begin
_UNITS = {"parameters": "KMBT"}  # a billion parameters is written B, and a billion of anything else G
_Named = Sequence[tuple[str, Mapping[str, int]]]  # models by name, with a number per part
_Points = Sequence[tuple[int, int]]  # lengths in tokens, and the bytes of the cache


def bars(models: _Named, *, title: str, what: str, summary: str = "", shares: bool = False) -> Figure:
    """Draw a horizontal bar per model, stacked from its parts, such as components.

    Args:
        models: (name of the model, number by name of the part) pairs.
        title: the title of the chart.
        what: the unit of the numbers, such as "parameters".
        summary: a sentence about the chart; by default one about the totals.
        shares: draw a part as its share of the model's total, so that all bars have the same length.
    """
    parts = list(dict.fromkeys(part for _, numbers in models for part in numbers))
    totals = [sum(numbers.values()) for _, numbers in models]
    free = iter([n for n in range(PALETTE) if n not in {COLOURS.get(part) for part in parts}])
    colours = {part: COLOURS[part] if part in COLOURS else next(free, 7) for part in parts}
    units, rows = _UNITS.get(what, "kMGT"), list(range(len(models)))
    traces: list[dict[str, Any]] = []
    for part in parts:
        bar = {"color": f"var(--c{colours[part]})", "line": {"color": "var(--ground)", "width": 1}}
        lengths, hints = [], []
        for (name, numbers), total in zip(models, totals, strict=True):
            number, whole = numbers.get(part, 0), max(total, 1)
            lengths.append(number / (whole if shares else 1))
            of_all = f"{number:,} {what}<br>{unbroken_percentage(number, whole)} of {total:,}"
            hints.append(f"<b>{safe(name)}: {safe(part)}</b><br>{of_all}")
        values = {"name": part, "y": rows, "x": lengths, "marker": bar, "hovertext": hints, "hoverinfo": "text"}
        traces.append({"type": "bar", "orientation": "h", **values})
    if len(models) > 1 and not shares:  # the total at the end of its bar, since a bar may be too short to be seen
        words = [f" {abbreviated(total, units)}" for total in totals]
        right: dict[str, Any] = {"text": words, "textposition": "middle right", "textfont": {"color": "var(--text)"}}
        traces.append(points("", totals, rows, mode="text", cliponaxis=False, showlegend=False, **right))
    scale: dict[str, Any] = {"tickformat": ".0%", "dtick": 0.25, "range": [0, 1.02]}
    if not shares:
        scale = _round_ticks(max(totals), units, 1.02 if len(models) == 1 else 1.2)  # with room for the longest total
    plain_axis = {"zeroline": False, "ticks": "", "tickangle": 0}
    below = {"text": f"share of {what}" if shares else what, "standoff": 4}
    by_name = {"tickvals": rows, "ticktext": [_short_name(name) for name, _ in models], "automargin": True}
    x = {**plain_axis, "gridcolor": "var(--line)", "title": below, **scale}
    y = {**plain_axis, "showgrid": False, "autorange": "reversed", **by_name}
    margin = {"t": 8, "b": 60, "l": 8, "r": 12}
    layout = plot_layout(34 * len(models) + 84, x, y, barmode="stack", bargap=0.3, margin=margin)
    columns = (("model", False), *((part, True) for part in parts), ("total", True))
    cells = tuple(
        (name, *(f"{numbers[part]:,}" if part in numbers else "–" for part in parts), f"{total:,}")
        for (name, numbers), total in zip(models, totals, strict=True)
    )
    keys = [Key(f"c{colours[part]}", part) for part in parts]
    table = Table(f"{title} as a table", columns, cells, folded=True)
    return figure(title, summary or _bars_summary(models, totals, what), traces, keys, table, layout)


def _round_ticks(most: int, units: str, room: float) -> dict[str, Any]:
    """Return the range and the ticks of a plotly axis: about four round numbers from 0 to `most`.

    The axis ends at `room` times `most`. `units` are the letters for thousands, millions and so on.
    """
    step = next(n * 10**p for p in range(20) for n in (1, 2, 5) if n * 10**p * 4 >= most)
    values = list(range(0, most + 1, step))
    return {
        "tickvals": values, "ticktext": [abbreviated(value, units) for value in values], "range": [0, most * room]
    }  # fmt: skip


def _bars_summary(models: _Named, totals: Sequence[int], what: str) -> str:
    if len(models) > 1:
        (least, small), (most, large) = (
            pick(zip(totals, models, strict=True), key=lambda pair: pair[0]) for pick in (min, max)
        )
        return f"From {least:,} {what} ({small[0]}) to {most:,} ({large[0]})."
    part, number = max(models[0][1].items(), key=lambda item: item[1])
    return f"{totals[0]:,} {what}; most are in {part}, {unbroken_percentage(number, totals[0])}."


def line_style(index: int) -> tuple[str, str]:
    """Return the colour and the dash style of the line with this index.

    When all colours of the palette are used, they repeat with the next dash style.
    """
    return f"c{index % PALETTE}", DASHES[index // PALETTE % len(DASHES)]


def points(
    name: str, x: Sequence[float], y: Sequence[float], hints: Sequence[str] = (), mode: str = "markers", **more: Any
) -> dict[str, Any]:
    """Return a plotly trace of points with hover texts (`hints`).

    `mode` is plotly's, such as "lines". `more` are other fields of the trace, such as line and marker.
    """
    hover = {"hovertext": hints, "hoverinfo": "text"} if hints else {"hoverinfo": "skip"}
    return {"type": "scatter", "mode": mode, "name": safe(name), "x": x, "y": y, **hover, **more}


def axis(title: str, **more: Any) -> dict[str, Any]:
    """Return a plotly axis with grid lines and a title. `more` are other fields of plotly's axis."""
    plain = {"gridcolor": "var(--line)", "zeroline": False, "ticks": "", "automargin": True}
    return {**plain, "title": {"text": title, "standoff": 4}, **more}


def plot_layout(height: int, x: Mapping[str, Any], y: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """Return plotly's layout of a chart with these axes, `height` pixels high, without a legend."""
    margin = {"t": 8, "b": 48, "l": 8, "r": 16}
    return {"height": height, "showlegend": False, "margin": margin, "xaxis": x, "yaxis": y, **more}


def vertical_line(x: float, **style: Any) -> dict[str, Any]:
    """Return a plotly shape: a line over the whole height of a chart."""
    line = {"color": "var(--quiet)", **style}
    return {"type": "line", "x0": x, "x1": x, "yref": "paper", "y0": 0, "y1": 1, "line": line}


def parameter_bars(models: _Named) -> list[Figure]:
    """Draw the parameters of models by component.

    If the models differ much in size, draw a second chart of shares, because bars of small models would be too short.
    """
    totals = [sum(numbers.values()) for _, numbers in models]
    figures = [bars(models, title="Parameters by component", what="parameters")]
    if max(totals) > _APART * min(totals):
        words = "The same, each bar as long as the others: shares of each model's own parameters."
        figures.append(bars(models, title="Shares by component", what="parameters", summary=words, shares=True))
    return figures


def _short_name(name: str) -> str:
    """Return a model's name in a form that fits next to its bar, as HTML.

    A path is reduced to its last part. A long name is put on two lines if it has a space, and a line that is still too
    long loses its middle.
    """
    last = plain(name).rstrip("/").rpartition("/")[2] or plain(name)
    first, _, rest = last.partition(" ")
    lines = [last] if len(last) <= _NAME or not rest else [first, rest]
    half = _NAME // 2
    return "<br>".join(safe(line if len(line) <= _NAME else f"{line[:half]}…{line[1 - half :]}") for line in lines)


def cache_chart(
    models: Sequence[tuple[str, ModelSpec]], dtype: str = "bfloat16", *, batch: int = 1, at: Sequence[int] = ()
) -> Figure:
    """Draw the size of the KV cache by the number of tokens, on logarithmic axes, with one line per model.

    A line bends where a sliding window is full. It ends at the context of its model, or at the largest number in `at`,
    but never beyond the position table.

    Args:
        models: the names and architectures of the models.
        dtype: the dtype of the cache.
        batch: the number of sequences.
        at: numbers of tokens that are marked on the lines, and are the columns of the table below the chart.

    Raises:
        UsageError: the dtype is unknown.
    """
    names = [name for name, _ in models]
    ends, lines = [], []
    for _, spec in models:
        end = max([usual_context(spec), *at])
        end = end if spec.positions is None else min(end, spec.positions.length)
        # Powers of two up to the end, where the line bends, and what was asked for.
        lengths = [*(1 << power for power in range(end.bit_length())), *windows(spec), *at]
        first = min(_FROM, end, *at)
        lengths = sorted({first, end, *(length for length in lengths if first <= length <= end)})
        ends.append(end)
        lines.append([(length, cache_bytes(spec, length, dtype, batch).nbytes) for length in lengths])
    traces, keys = [], []
    for index, (name, line) in enumerate(zip(names, lines, strict=True)):
        colour, dash = f"c{index % PALETTE}", DASHES[index % len(DASHES)]
        # A line is wider if others lie on it, so that it remains visible.
        covered = min(sum(_one_line(line, other) for other in lines[index + 1 :]), 2)
        lengths, paint = [length for length, _ in line], f"var(--{colour})"
        marks: dict[str, Any] = {"size": [(13 if length in at else 5) + 3 * covered for length in lengths]}
        marks |= {"symbol": ["diamond" if length in at else "circle" for length in lengths], "color": paint}
        hints = [
            f"<b>{safe(name)}</b><br>{tokens:,} tokens<br>{abbreviated_bytes(nbytes)} ({nbytes:,} bytes)"
            for tokens, nbytes in line
        ]
        style = {"color": paint, "dash": dash, "width": 2 + 3 * covered}
        traces.append(points(name, lengths, [nbytes for _, nbytes in line], hints, BOTH, line=style, marker=marks))
        keys.append(Key(f"line {colour} {dash}", name))
    x = powers(min(line[0][0] for line in lines), max(ends)) | {"title": {"text": "tokens"}}
    y = _decades(min(line[0][1] for line in lines), max(line[-1][1] for line in lines))
    y |= {"automargin": True, "title": {"text": "KV cache", "standoff": 4}}
    lengths = sorted(set(at)) or [length for length in (2048, 8192, 32768, 131072) if length <= max(ends)]
    rows = []
    for (name, spec), end in zip(models, ends, strict=True):
        sizes = [abbreviated_bytes(cache_bytes(spec, n, dtype, batch).nbytes) if n <= end else "–" for n in lengths]
        last = cache_bytes(spec, end, dtype, batch)
        rows.append((name, f"{last.bytes_per_token:,} B", *sizes, f"{end:,}", abbreviated_bytes(last.nbytes)))
    headings = ("per token", *(f"at {n:,}" for n in lengths), "longest context", "there")
    columns = (("model", False), *((heading, True) for heading in headings))
    table = Table("Key-value cache as a table", columns, tuple(rows), folded=True)
    summary = _cache_summary(models, lines, dtype, batch, at)
    return figure("Key-value cache by context", summary, traces, keys, table, plot_layout(360, x, y))


def _cache_summary(
    models: Sequence[tuple[str, ModelSpec]], lines: Sequence[_Points], dtype: str, batch: int, at: Sequence[int]
) -> str:
    names = [name for name, _ in models]
    largest = max(range(len(models)), key=lambda index: lines[index][-1][1])
    end, most = lines[largest][-1][0], abbreviated_bytes(lines[largest][-1][1]).replace(" ", "\u00a0")
    whose = "One sequence's cache" if batch == 1 else f"The cache of {batch:,} sequences"
    summary = f"{whose} in {dtype}, up to {most} at {end:,} tokens"
    summary += f" ({names[largest]})." if len(models) > 1 else "."
    bent = [name for name, spec in models if windows(spec)]
    summary += f" A line bends where a window is full: {', '.join(bent)}." if bent else ""
    groups: list[list[int]] = []
    for index, line in enumerate(lines):
        group = next((group for group in groups if _one_line(lines[group[0]], line)), None)
        groups.append([index]) if group is None else group.append(index)
    for group in groups:
        if len(group) > 1:
            summary += f" On one line as far as each goes: {', '.join(names[index] for index in group)}."
    unsaid = [name for name, spec in models if stated_context(spec) is None]
    summary += f" Context not stated, drawn up to {CONTEXT:,} tokens: {', '.join(unsaid)}." if unsaid else ""
    return summary + (f" Diamonds: {' and '.join(f'{length:,}' for length in at)} tokens." if at else "")


def _one_line(one: _Points, other: _Points) -> bool:
    """Return whether two lines of a chart coincide up to the end of the shorter one."""
    first, second = dict(one), dict(other)
    shared = first.keys() & second.keys()
    return len(shared) > 1 and all(first[length] == second[length] for length in shared)


def powers(least: int, most: int) -> dict[str, Any]:
    """Return a logarithmic plotly axis from `least` to `most`, with up to seven powers of two as ticks: 512, 8k."""
    low, high = math.floor(math.log2(max(least, 1))), math.ceil(math.log2(max(most, 2)))
    values = [2**power for power in range(low, high + 1, max(1, math.ceil((high - low) / 6)))]
    words = (f"{number // 1024:,}k" if number >= 1024 else str(number) for number in values)
    return _logarithmic(values, words, math.log10(2) * (low - 0.15), math.log10(2) * (high + 0.15))


def _decades(least: int, most: int) -> dict[str, Any]:
    """Return a logarithmic plotly axis of bytes from `least` to `most`.

    Its ticks are 1, 2 and 5 times powers of ten, or only powers of ten if the axis is long.
    """
    low, high = math.log10(max(least, 1)), math.log10(max(most, 2))
    powers = range(math.floor(low), math.ceil(high) + 1, max(1, math.ceil((high - low) / 6)))
    values = [digit * 10**power for power in powers for digit in ((1, 2, 5) if high - low < 2 else (1,))]
    inside = [value for value in values if low - 0.05 <= math.log10(value) <= high + 0.05]
    inside = inside if len(inside) > 1 else [least, most]
    return _logarithmic(inside, map(abbreviated_bytes, inside), low - 0.05, high + 0.05)


def _logarithmic(values: Sequence[int], words: Iterable[str], low: float, high: float) -> dict[str, Any]:
    named = {"tickvals": list(values), "ticktext": list(words), "tickangle": 0}
    return {"type": "log", "range": [low, high], **named, "gridcolor": "var(--line)", "zeroline": False, "ticks": ""}
