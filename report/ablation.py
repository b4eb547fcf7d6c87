"""ablate, for the terminal and as a page: the table of variants, their curves, and what each gives and takes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from rich.console import RenderResult
from rich.text import Text

from ..training.ablate import Ablation, Difference, Result
from ..training.ablate import Row as Variant
from ..version import __version__
from .charts import DASHES
from .pages import PALETTE, Figure, Key, Lines, Page, Section, Table, figure, safe
from .quantities import counted, decimal, whole_bytes
from .sheets import Layout, Row, Sheet, drawing

_HEADINGS = ("loss", "±", "less base", "95 of 100", "KL", "parameters", "FLOPs", "cache a token", "tokens/s")


def run_line(name: str, tokens: int, result: Result) -> str:
    """A run that has ended."""
    kl = "" if result.kl is None else f", KL {result.kl:.4f}"
    found = f"held-out loss {result.loss:.4f}{kl}, {result.pace:,.0f} tokens/s"
    return f"{name}, {tokens:,} tokens, seed {result.seed}: {found}"


def _signed(value: float) -> str:
    return f"{value:+.4f}".replace("-", "−")


def _interval(found: Difference | None) -> str:
    if found is None or found.low is None or found.high is None:
        return "–"
    return f"{_signed(found.low)} to {_signed(found.high)}"


def _cells(row: Variant) -> tuple[str, ...]:
    """A variant's figures, below `_HEADINGS`."""
    kl = [each.kl for each in row.runs if each.kl is not None]
    return (
        "–" if row.loss is None else f"{row.loss:.4f}",
        "–" if row.spread is None else f"{row.spread:.4f}",
        "" if row.difference is None else _signed(row.difference.mean),
        "" if row.difference is None else _interval(row.difference),
        f"{statistics.mean(kl):.4f}" if kl else "",
        f"{row.costs.parameters:,}",
        decimal(row.flops, ""),
        whole_bytes(row.costs.cache_bytes()),
        "–" if row.pace is None else f"{row.pace:,.0f}",
    )


def _names(rows: Sequence[Variant]) -> list[str]:
    """What rows are called: with their tokens, where a variant has several budgets."""
    several = len({row.name for row in rows}) < len(rows)
    return [f"{row.name}, {row.tokens:,} tokens" if several else row.name for row in rows]


def sheet(table: Ablation) -> Sheet:
    """The table; a column in which there is nothing is left out."""
    found = [_cells(row) for row in table.rows]
    kept = [n for n in range(len(_HEADINGS)) if any(row[n] for row in found)]
    rows = (
        Row(name, tuple(row[n] for n in kept), "bold" if each.difference and each.difference.tells else None)
        for name, each, row in zip(_names(table.rows), table.rows, found, strict=True)
    )
    return Sheet("", tuple(_HEADINGS[n] for n in kept), tuple(rows))


def told(table: Ablation) -> list[str]:
    """What the figures are, in sentences."""
    budgets = sorted({row.tokens for row in table.rows})
    tokens = f"{budgets[0]:,}" if len(budgets) == 1 else f"{budgets[0]:,} to {budgets[-1]:,}"
    how = "trained from random weights"
    if table.how == "heal":
        how = "healed on the base's predictions, to which KL is measured; the base was trained further on the text"
    lines = [
        f"Each {how}: {tokens} tokens, {table.context:,} a window; {counted(table.seeds, 'seed')}.",
        "Loss is on held-out text, in nats per token; ± is the largest minus the smallest over seeds. Differences from"
        " the base compare runs of the same seed: the same windows in the same order, and the same initial values of"
        " parameters that both have. Intervals are Student's, without a correction for several variants.",
    ]
    return lines + ([f"Not ended: {counted(table.left, 'run')}."] if table.left else [])


@drawing
def ablation_report(page: Layout, table: Ablation) -> RenderResult:
    """What rich prints."""
    yield Text(page.clean(table.name), style="bold")
    yield from page.wrapped(" ".join(table.description.split()), 0, further=0)
    yield ""
    yield sheet(table)
    yield ""
    for line in told(table):
        yield from page.wrapped(line, 0, "dim", further=0)


def ablation_page(table: Ablation) -> Page:
    """The page of an ablation."""
    plain = sheet(table).as_table()
    lit = frozenset(n for n, row in enumerate(table.rows) if row.difference is not None and row.difference.tells)
    shown = Table("Variants", plain.columns, plain.rows, lit, bold="those whose interval is on one side of 0")
    comments = tuple(f"{row.name}: {row.comment}" for row in table.rows if row.comment)
    more = (Lines(comments, listed=True),) if comments else ()
    blocks = (Lines(tuple(told(table))), shown, *more)
    drawn = [_curves(table), *([_differences(table)] if any(row.difference for row in table.rows) else [])]
    return Page(
        title=table.name,
        subtitle=" ".join(table.description.split()),
        facts=(("seeds", f"{table.seeds}"), ("context", f"{table.context:,}"), ("gptkit", __version__)),
        sections=(Section("What each gives and takes", blocks), Section("On the way", tuple(drawn))),
    )


def _curves(table: Ablation) -> Figure:
    """What was evaluated on the way against tokens: a line a variant, the mean of its seeds, with their spread."""
    what = "KL from the base" if table.how == "heal" else "held-out loss"
    traces, keys, cells_ = list[dict[str, Any]](), list[Key](), list[tuple[str, ...]]()
    for number, (name, row) in enumerate(zip(_names(table.rows), table.rows, strict=True)):
        if table.how == "heal" and row.name == "base":
            continue
        colour, dash = f"c{number % PALETTE}", DASHES[number // PALETTE % len(DASHES)]
        paint, at = f"var(--{colour})", dict[int, list[float]]()
        for run in row.runs:
            for each in run.curve:
                at.setdefault(each["tokens"], []).append(each["held_out"])
        means = {tokens: statistics.mean(found) for tokens, found in at.items()}
        errors = {
            "type": "data", "symmetric": False, "color": paint, "thickness": 1,
            "array": [max(at[tokens]) - mean for tokens, mean in means.items()],
            "arrayminus": [mean - min(at[tokens]) for tokens, mean in means.items()],
        }  # fmt: skip
        hints = [f"<b>{safe(name)}</b><br>{tokens:,} tokens<br>{mean:.4f}" for tokens, mean in means.items()]
        points: dict[str, Any] = {"x": list(means), "y": list(means.values()), "error_y": errors}
        points |= {"line": {"color": paint, "dash": dash}, "marker": {"color": paint, "size": 5}}
        traces.append(
            {"type": "scatter", "mode": "lines+markers", "name": safe(name), **points, "hovertext": hints,
             "hoverinfo": "text"}
        )  # fmt: skip
        keys.append(Key(f"line {colour} {dash}", name))
        cells_ += [(name, f"{tokens:,}", f"{mean:.4f}", str(len(at[tokens]))) for tokens, mean in means.items()]
    layout = _layout("tokens", f"{what}, nats per token", 420)
    columns = (("variant", False), ("tokens", True), (what, True), ("seeds", True))
    shown = Table("The curves as a table", columns, tuple(cells_), folded=True)
    summary = f"{what.capitalize()} by tokens trained on: the mean of seeds, and bars from the least to the largest."
    return figure(what.capitalize(), summary, traces, keys, shown, layout)


def _differences(table: Ablation) -> Figure:
    """Each variant's loss less the base's, with its interval."""
    found = [(name, row.difference) for name, row in zip(_names(table.rows), table.rows, strict=True) if row.difference]
    errors = {
        "type": "data", "symmetric": False, "color": "var(--c1)", "thickness": 2,
        "array": [0.0 if each.high is None else each.high - each.mean for _, each in found],
        "arrayminus": [0.0 if each.low is None else each.mean - each.low for _, each in found],
    }  # fmt: skip
    hints = [f"<b>{safe(name)}</b><br>{_signed(each.mean)}<br>{_interval(each)}" for name, each in found]
    marks = {"marker": {"color": "var(--c1)", "size": 9}, "error_x": errors, "hovertext": hints, "hoverinfo": "text"}
    rows = list(range(len(found)))
    trace = {"type": "scatter", "mode": "markers", "x": [each.mean for _, each in found], "y": rows, **marks}
    layout = _layout("loss less the base's, nats per token", "", 60 + 34 * len(found))
    layout["yaxis"] |= {"tickvals": rows, "ticktext": [safe(name) for name, _ in found], "autorange": "reversed"}
    layout["shapes"] = [
        {"type": "line", "x0": 0, "x1": 0, "yref": "paper", "y0": 0, "y1": 1, "line": {"color": "var(--quiet)"}}
    ]
    columns = (("variant", False), ("less base", True), ("95 of 100", True))
    cells_ = tuple((name, _signed(each.mean), _interval(each)) for name, each in found)
    shown = Table("The differences as a table", columns, cells_, folded=True)
    summary = (
        "Each variant's held-out loss minus the base's with the same seed; a bar is the 95 % interval of the mean."
    )
    return figure("Difference from the base", summary, [trace], [Key("c1", "less is better")], shown, layout)


def _layout(across: str, up: str, height: int) -> dict[str, Any]:
    axis: dict[str, Any] = {"gridcolor": "var(--line)", "zeroline": False, "ticks": "", "automargin": True}
    margin = {"t": 8, "b": 48, "l": 8, "r": 16}
    return {
        "height": height, "showlegend": False, "margin": margin,
        "xaxis": {**axis, "title": {"text": across, "standoff": 4}}, "yaxis": {**axis, "title": {"text": up}},
    }  # fmt: skip
