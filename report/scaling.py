"""fit-scaling, for the terminal and as a page: the law, where its numbers lie, and the best run of a budget."""

from __future__ import annotations

from typing import Any

from rich.console import RenderResult

from ..training.scaling import FARTHEST, NAMES, Optimum, Scaling
from ..version import __version__
from .charts import DASHES
from .pages import PALETTE, Figure, Key, Lines, Page, Section, Table, figure
from .quantities import abbreviated, counted
from .sheets import Layout, Row, Sheet, drawing

_SIGNS = {"alpha": "α", "beta": "β"}
_POINTS = 40  # of a line
_NOTHING = 1e-6
"""Below this a number of the law adds nothing: E, fitted by its logarithm, is never 0 itself."""


def _number(value: float) -> str:
    if abs(value) < _NOTHING:
        return "0"
    return abbreviated(round(value)) if abs(value) >= 10_000 else f"{value:.4g}"


def _law(found: Scaling) -> Sheet:
    rows = []
    for name in NAMES:
        span = [_number(each) for each in found.intervals[name]] if name in found.intervals else ["–", "–"]
        rows.append(Row(_SIGNS.get(name, name), (_number(getattr(found.law, name)), *span)))
    return Sheet("L(N, D) = E + A / N^α + B / D^β", ("fitted", "from", "to"), tuple(rows))


def _between(best: Optimum, name: str) -> str:
    if name not in best.intervals:
        return "–"
    return " to ".join(_number(each) for each in best.intervals[name])


def _optima(found: Scaling) -> Sheet | None:
    names = ("parameters", "tokens", "loss")

    def cells(best: Optimum) -> tuple[str, ...]:
        return tuple(part for name in names for part in (_number(getattr(best, name)), _between(best, name)))

    rows = [Row(f"{each.flops:.3g} FLOPs", cells(each)) for each in found.optima]
    columns = tuple(part for name in names for part in (name, "95 of 100"))
    return Sheet("The best run of a budget", columns, tuple(rows)) if rows else None


def _told(found: Scaling) -> list[str]:
    """What the figures are, in sentences."""
    (fewest, most), (least, longest) = found.parameters, found.tokens
    drawn = f" Intervals contain 95 of 100 of {counted(found.drawn, 'fit')} to bootstrap samples."
    return [
        f"Fitted to {counted(len(found.points), 'run')} of {fewest:,} to {most:,} parameters on {least:,} to"
        f" {longest:,} tokens; it predicts up to {FARTHEST} times beyond. The median error is"
        f" {100 * found.error:.2g} %.",
        "N are all parameters, D the tokens; a budget is 6·N·D FLOPs."
        + (drawn if found.drawn else " Without bootstrap samples there are no intervals."),
    ]


@drawing
def scaling_report(page: Layout, found: Scaling) -> RenderResult:
    """What rich prints."""
    yield _law(found)
    if (optima := _optima(found)) is not None:
        yield ""
        yield optima
    yield ""
    for line in _told(found):
        yield from page.wrapped(line, 0, "dim", further=0)


def scaling_page(found: Scaling) -> Page:
    """The page of a fit."""
    tables = [each.as_table() for each in (_law(found), _optima(found)) if each is not None]
    return Page(
        title="A scaling law",
        subtitle="L(N, D) = E + A / N^α + B / D^β, after Hoffmann et al. 2203.15556",
        facts=(("runs", f"{len(found.points)}"), ("gptkit", __version__)),
        sections=(
            Section("The law", (Lines(tuple(_told(found))), *tables)),
            Section("Runs and law", (_picture(found),)),
        ),
    )


def _picture(found: Scaling) -> Figure:
    """Loss against tokens, both axes logarithmic: a line a size by the law, and its runs as marks."""
    traces, keys, rows = list[dict[str, Any]](), list[Key](), list[tuple[str, ...]]()
    least, most = found.tokens
    across = [least * (most / least) ** (step / (_POINTS - 1)) for step in range(_POINTS)]
    for number, size in enumerate(sorted({each.parameters for each in found.points})):
        colour, dash = f"c{number % PALETTE}", DASHES[number // PALETTE % len(DASHES)]
        name, paint = f"{abbreviated(size)} parameters", f"var(--{colour})"
        line: dict[str, Any] = {"x": across, "y": [found.law.loss(size, each) for each in across]}
        line |= {"line": {"color": paint, "dash": dash}, "hoverinfo": "skip"}
        traces.append({"type": "scatter", "mode": "lines", "name": name, **line})
        own = [each for each in found.points if each.parameters == size]
        hints = [f"<b>{name}</b><br>{each.tokens:,} tokens<br>{each.loss:.4f} nats per token" for each in own]
        marks: dict[str, Any] = {"x": [each.tokens for each in own], "y": [each.loss for each in own]}
        marks |= {"marker": {"color": paint, "size": 7}, "hovertext": hints, "hoverinfo": "text"}
        traces.append({"type": "scatter", "mode": "markers", "name": name, **marks})
        keys.append(Key(f"line {colour} {dash}", name))
        rows += [
            (name, f"{each.tokens:,}", f"{each.loss:.4f}", f"{found.law.loss(size, each.tokens):.4f}") for each in own
        ]
    axis: dict[str, Any] = {"type": "log", "gridcolor": "var(--line)", "zeroline": False, "ticks": ""}
    axis["automargin"] = True
    layout: dict[str, Any] = {"height": 420, "showlegend": False, "margin": {"t": 8, "b": 48, "l": 8, "r": 16}}
    layout |= {"xaxis": {**axis, "title": {"text": "tokens", "standoff": 4}}}
    layout |= {"yaxis": {**axis, "title": {"text": "loss, nats per token"}}}
    columns = (("size", False), ("tokens", True), ("loss", True), ("by the law", True))
    shown = Table("Runs and law as a table", columns, tuple(rows), folded=True)
    summary = "Each run's loss by the tokens that it was trained on, a colour a size; lines are the law."
    return figure("Loss by tokens and size", summary, traces, keys, shown, layout)
