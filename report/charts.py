"""Charts of what trees hold and cost: parameters of models side by side, and the key-value cache by context.

Every figure comes from the trees' shapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..analysis.costs import CONTEXT, cache_bytes, stated_context, usual_context, windows
from ..components import ModelSpec
from .pages import Figure, Key, Table, plain
from .plots import COLOURS, PALETTE, drawn, held, safe, share, short

__all__ = ["bars", "cache_chart", "parameter_bars"]

DASHES = ("solid", "dash", "dot")
"""Lines differ in more than colour."""
APART = 3
"""Models that differ in size by more than this are drawn by their shares too."""
NAME = 22
"""Characters of a model's name on a line beside its bar."""
FROM = 128
"""Tokens at which the cache's lines begin."""

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
    if len(models) > 1 and not shares:
        traces.append(_totals(totals, what))
    height = 34 * len(models) + 84
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
            margin={"t": 8, "b": 60, "l": 8, "r": 12},
            xaxis={
                "gridcolor": "var(--line)",
                "zeroline": False,
                "ticks": "",
                "tickangle": 0,
                "title": {"text": f"share of {what}" if shares else what, "standoff": 4},
                **_scale(max(totals), what, shares, len(models) == 1),
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


def parameter_bars(models: Sequence[tuple[str, Mapping[str, int]]]) -> list[Figure]:
    """Parameters by component, and where small models would be lost beside large ones, their shares too."""
    totals = [sum(numbers.values()) for _, numbers in models]
    figures = [bars(models, title="Parameters by component", what="parameters")]
    if max(totals) > APART * min(totals):
        words = "The same, each bar as long as the others: shares of each model's own parameters."
        figures.append(bars(models, title="Shares by component", what="parameters", summary=words, shares=True))
    return figures


UNITS = {"parameters": "KMBT"}
"""A billion parameters is a B, of all else it is a G."""


def _totals(totals: Sequence[int], what: str) -> dict[str, Any]:
    """Each bar's figure beside its end: one may be too short to be seen beside another."""
    return {
        "type": "scatter",
        "mode": "text",
        "x": list(totals),
        "y": list(range(len(totals))),
        "text": [f" {short(total, UNITS.get(what, 'kMGT'))}" for total in totals],
        "textposition": "middle right",
        "textfont": {"color": "var(--text)"},
        "cliponaxis": False,
        "hoverinfo": "skip",
        "showlegend": False,
    }


def _bars_summary(models: Sequence[tuple[str, Mapping[str, int]]], what: str) -> str:
    totals = {name: sum(numbers.values()) for name, numbers in models}
    most, least = (pick(totals.items(), key=lambda item: item[1]) for pick in (max, min))
    if len(models) > 1:
        return f"From {least[1]:,} {what} ({least[0]}) to {most[1]:,} ({most[0]})."
    part, number = max(models[0][1].items(), key=lambda item: item[1])
    return f"{most[1]:,} {what}; most are in {part}, {share(number, most[1])}."


def _scale(most: int, what: str, shares: bool, alone: bool) -> dict[str, Any]:
    """Round numbers on an axis from 0, about four, or per cent."""
    if shares:
        return {"tickformat": ".0%", "dtick": 0.25, "range": [0, 1.02]}
    step = next(n * 10**p for p in range(20) for n in (1, 2, 5) if n * 10**p * 4 >= most)
    values = list(range(0, most + 1, step))
    units = UNITS.get(what, "kMGT")
    room = 1.02 if alone else 1.2  # for the figure beside the longest
    return {"tickvals": values, "ticktext": [short(value, units) for value in values], "range": [0, most * room]}


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


def cache_chart(
    models: Sequence[tuple[str, ModelSpec]],
    dtype: str = "bfloat16",
    up_to: int | None = None,
    *,
    batch: int = 1,
    at: Sequence[int] = (),
) -> Figure:
    """Bytes of the key-value cache of `batch` sequences against their length, a line a model, both axes logarithmic.

    A line ends where the context does that its model is for, or at `up_to` tokens, or at the longest of `at`, a table
    of positions permitting. Where a window is full, the line bends.

    Args:
        models: (name, tree), at least one.
        dtype: what keys and values are stored in.
        up_to: tokens.
        batch: sequences.
        at: contexts that somebody asked for: each is marked, and has a column in the table.

    Raises:
        UsageError: an unknown dtype, or no tokens.

    """
    ends = [_end(spec, up_to, at) for _, spec in models]
    lines = [
        [(length, cache_bytes(spec, length, dtype, batch).held) for length in _lengths(spec, end, at)]
        for (_, spec), end in zip(models, ends, strict=True)
    ]
    under = [min(sum(_one_line(line, other) for other in lines[index + 1 :]), 2) for index, line in enumerate(lines)]
    traces = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": safe(name),
            "x": [length for length, _ in line],
            "y": [nbytes for _, nbytes in line],
            "line": {"color": f"var(--c{index % PALETTE})", "dash": DASHES[index % len(DASHES)]}
            | {"width": 2 + 3 * under[index]},  # to be seen below those that lie on it
            "marker": {
                "size": [(13 if length in at else 5) + 3 * under[index] for length, _ in line],
                "symbol": ["diamond" if length in at else "circle" for length, _ in line],
                "color": f"var(--c{index % PALETTE})",
            },
            "hovertext": [
                f"<b>{safe(name)}</b><br>{length:,} tokens<br>{held(nbytes)} ({nbytes:,} bytes)"
                for length, nbytes in line
            ],
            "hoverinfo": "text",
        }
        for index, ((name, _), line) in enumerate(zip(models, lines, strict=True))
    ]
    largest = max(range(len(models)), key=lambda index: lines[index][-1][1])
    bent = [name for name, spec in models if windows(spec)]
    most = held(lines[largest][-1][1]).replace(" ", "\u00a0")
    whose = "One sequence's cache" if batch == 1 else f"The cache of {batch:,} sequences"
    summary = f"{whose} in {dtype}, up to {most} at {ends[largest]:,} tokens"
    summary += f" ({models[largest][0]})." if len(models) > 1 else "."
    summary += f" A line bends where a window is full: {', '.join(bent)}." if bent else ""
    summary += "".join(f" {told}" for told in _alike([name for name, _ in models], lines))
    unsaid = [name for name, spec in models if up_to is None and stated_context(spec) is None]
    summary += f" Context not stated, drawn up to {CONTEXT:,} tokens: {', '.join(unsaid)}." if unsaid else ""
    summary += f" Diamonds: {' and '.join(f'{each:,}' for each in at)} tokens." if at else ""
    height = 360
    return Figure(
        title="Key-value cache by context",
        summary=summary,
        spec=drawn(
            traces,
            height,
            showlegend=False,
            margin={"t": 8, "b": 48, "l": 8, "r": 16},
            xaxis=_powers(min(line[0][0] for line in lines), max(ends), _tokens, 6) | {"title": {"text": "tokens"}},
            yaxis=_decades(min(line[0][1] for line in lines), max(line[-1][1] for line in lines), held)
            | {"automargin": True, "title": {"text": "KV cache", "standoff": 4}},
        ),
        height=height,
        width=280,
        keys=tuple(
            Key(f"line c{index % PALETTE} {DASHES[index % len(DASHES)]}", name)
            for index, (name, _) in enumerate(models)
        ),
        table=_cache_table(models, ends, dtype, batch, at),
    )


Points = Sequence[tuple[int, int]]
"""Tokens and bytes there."""


def _one_line(one: Points, other: Points) -> bool:
    """Whether two lines lie on one another as far as the shorter goes."""
    first, second = dict(one), dict(other)
    shared = first.keys() & second.keys()
    return len(shared) > 1 and all(first[length] == second[length] for length in shared)


def _alike(names: Sequence[str], lines: Sequence[Points]) -> list[str]:
    """Which lines lie on one another, a sentence for each place where some do."""
    groups: list[list[int]] = []
    for index, line in enumerate(lines):
        group = next((each for each in groups if _one_line(lines[each[0]], line)), None)
        groups.append([index]) if group is None else group.append(index)
    several = [[names[index] for index in group] for group in groups if len(group) > 1]
    return [f"On one line as far as each goes: {', '.join(group)}." for group in several]


def _end(spec: ModelSpec, up_to: int | None, at: Sequence[int]) -> int:
    end = max([usual_context(spec), *at]) if up_to is None else up_to
    return end if spec.positions is None else min(end, spec.positions.length)


def _lengths(spec: ModelSpec, end: int, at: Sequence[int]) -> list[int]:
    """Powers of two up to the end, where the line bends, and what was asked for."""
    powers = [1 << power for power in range(end.bit_length())]
    first = min(FROM, end, *at)
    return sorted({first, end, *(n for n in (*powers, *windows(spec), *at) if first <= n <= end)})


def _powers(least: int, most: int, words: Callable[[int], str], ticks: int) -> dict[str, Any]:
    """A logarithmic axis with powers of two on it, as many as are legible."""
    low, high = math.floor(math.log2(max(least, 1))), math.ceil(math.log2(max(most, 2)))
    step = max(1, math.ceil((high - low) / ticks))
    values = [2**power for power in range(low, high + 1, step)]
    return _logarithmic(values, words, math.log10(2) * (low - 0.15), math.log10(2) * (high + 0.15))


def _decades(least: int, most: int, words: Callable[[int], str]) -> dict[str, Any]:
    """A logarithmic axis with 1, 2 and 5 of each power of ten on it, or where it spans many with 1 alone."""
    low, high = math.log10(max(least, 1)), math.log10(max(most, 2))
    powers = range(math.floor(low), math.ceil(high) + 1, max(1, math.ceil((high - low) / 6)))
    values = [digit * 10**power for power in powers for digit in ((1, 2, 5) if high - low < 2 else (1,))]
    inside = [value for value in values if low - 0.05 <= math.log10(value) <= high + 0.05]
    return _logarithmic(inside if len(inside) > 1 else [least, most], words, low - 0.05, high + 0.05)


def _logarithmic(values: Sequence[int], words: Callable[[int], str], low: float, high: float) -> dict[str, Any]:
    """An axis from one power of ten to another, with words at some values."""
    return {
        "type": "log",
        "range": [low, high],
        "tickvals": list(values),
        "ticktext": [words(value) for value in values],
        "tickangle": 0,
        "gridcolor": "var(--line)",
        "zeroline": False,
        "ticks": "",
    }


def _tokens(number: int) -> str:
    """As contexts are called: 512, 8k, 128k."""
    return f"{number // 1024:,}k" if number >= 1024 else str(number)


def _cache_table(
    models: Sequence[tuple[str, ModelSpec]], ends: Sequence[int], dtype: str, batch: int, asked: Sequence[int]
) -> Table:
    at = sorted(set(asked)) or [length for length in (2048, 8192, 32768, 131072) if length <= max(ends)]
    rows = []
    for (name, spec), end in zip(models, ends, strict=True):
        cells = [held(cache_bytes(spec, n, dtype, batch).held) if n <= end else "–" for n in at]
        last = cache_bytes(spec, end, dtype, batch)
        rows.append((name, f"{last.a_token:,} B", *cells, f"{end:,}", held(last.held)))
    columns = (("model", False), ("per token", True), *((f"at {n:,}", True) for n in at))
    ending = (("longest context", True), ("there", True))
    return Table("Key-value cache as a table", (*columns, *ending), tuple(rows), folded=True)
