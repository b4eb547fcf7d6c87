"""The report of `fit-scaling`: the fitted scaling law, the intervals of its constants, and the best run per budget."""

from __future__ import annotations

from typing import Any

from rich.console import RenderResult

from ..training.scaling import FARTHEST, NAMES, Optimum, Scaling
from ..version import __version__
from .charts import axis, line_style, plot_layout, points
from .pages import Figure, Key, Lines, Page, Section, Table, figure
from .quantities import abbreviated, counted
from .sheets import Sheet, SheetRow, Terminal, drawing

_SIGNS = {"alpha": "α", "beta": "β"}
_LINE_POINTS = 40
_NEGLIGIBLE = 1e-6
"""Smaller parameters of the law are shown as 0. E is fitted by its logarithm, so it is never exactly 0."""


def _number(value: float) -> str:
    """Return a number in four digits, or from 10,000 on in three digits with a letter, such as 12.3M."""
    if abs(value) < _NEGLIGIBLE:
        return "0"
    return abbreviated(round(value)) if abs(value) >= 10_000 else f"{value:.4g}"


def _law_sheet(scaling: Scaling) -> Sheet:
    rows = []
    for name in NAMES:
        ends = [_number(end) for end in scaling.intervals[name]] if name in scaling.intervals else ["–", "–"]
        rows.append(SheetRow(_SIGNS.get(name, name), (_number(getattr(scaling.law, name)), *ends)))
    return Sheet("L(N, D) = E + A / N^α + B / D^β", ("fitted", "from", "to"), tuple(rows))


def _optima_sheet(scaling: Scaling) -> Sheet | None:
    """Return a table of the best run for every budget, or None if the user gave no budget."""
    names = ("parameters", "tokens", "loss")

    def interval(best: Optimum, name: str) -> str:
        return " to ".join(map(_number, best.intervals[name])) if name in best.intervals else "–"

    rows = [
        SheetRow(
            f"{best.flops:.3g} FLOPs",
            tuple(cell for name in names for cell in (_number(getattr(best, name)), interval(best, name))),
        )
        for best in scaling.optima
    ]
    columns = tuple(column for name in names for column in (name, "95 % interval"))
    return Sheet("The best run for each budget", columns, tuple(rows)) if rows else None


def _explanation(scaling: Scaling) -> list[str]:
    """Return the sentences that explain the figures."""
    (fewest, most), (least, longest) = scaling.parameters, scaling.tokens
    drawn = f" Each interval contains 95 % of {counted(scaling.drawn, 'fit')} to bootstrap samples of the runs."
    return [
        f"Fitted to {counted(len(scaling.points), 'run')} of {fewest:,} to {most:,} parameters on {least:,} to"
        f" {longest:,} tokens. Predictions go up to {FARTHEST} times beyond these ranges. The median error is"
        f" {100 * scaling.error:.2g} %.",
        "N is the number of all parameters and D the number of tokens. A budget is 6·N·D FLOPs."
        + (drawn if scaling.drawn else " Without bootstrap samples there are no intervals."),
    ]


@drawing
def scaling_report(terminal: Terminal, scaling: Scaling) -> RenderResult:
    """Yield the report on a scaling law for the terminal."""
    yield _law_sheet(scaling)
    if (optima := _optima_sheet(scaling)) is not None:
        yield ""
        yield optima
    yield ""
    for line in _explanation(scaling):
        yield from terminal.wrapped(line, 0, "dim", further=0)


def scaling_page(scaling: Scaling) -> Page:
    """Return the HTML page of a scaling law."""
    tables = [sheet.as_table() for sheet in (_law_sheet(scaling), _optima_sheet(scaling)) if sheet is not None]
    return Page(
        title="A scaling law",
        subtitle="L(N, D) = E + A / N^α + B / D^β, after Hoffmann et al. 2203.15556",
        facts=(("runs", f"{len(scaling.points)}"), ("gptkit", __version__)),
        sections=(
            Section("The law", (Lines(tuple(_explanation(scaling))), *tables)),
            Section("Runs and law", (_loss_figure(scaling),)),
        ),
    )


def _loss_figure(scaling: Scaling) -> Figure:
    """Draw the loss by training tokens on logarithmic axes, for every model size.

    Measured runs are marks, and the law's predictions are lines.
    """
    traces, keys, rows = list[dict[str, Any]](), list[Key](), list[tuple[str, ...]]()
    least, most = scaling.tokens
    tokens = [least * (most / least) ** (step / (_LINE_POINTS - 1)) for step in range(_LINE_POINTS)]
    for index, size in enumerate(sorted({run.parameters for run in scaling.points})):
        colour, dash = line_style(index)
        name, paint = f"{abbreviated(size)} parameters", f"var(--{colour})"
        losses = [scaling.law.loss(size, x) for x in tokens]
        traces.append(points(name, tokens, losses, mode="lines", line={"color": paint, "dash": dash}))
        runs = [run for run in scaling.points if run.parameters == size]
        hints = [f"<b>{name}</b><br>{run.tokens:,} tokens<br>{run.loss:.4f} nats per token" for run in runs]
        measured, marker = [run.loss for run in runs], {"color": paint, "size": 7}
        traces.append(points(name, [run.tokens for run in runs], measured, hints, marker=marker))
        keys.append(Key(f"line {colour} {dash}", name))
        for run in runs:
            rows.append((name, f"{run.tokens:,}", f"{run.loss:.4f}", f"{scaling.law.loss(size, run.tokens):.4f}"))
    x, y = axis("tokens", type="log"), axis("loss, nats per token", type="log")
    columns = (("size", False), ("tokens", True), ("loss", True), ("predicted by the law", True))
    table = Table("Runs and law as a table", columns, tuple(rows), folded=True)
    summary = "The loss of each run by the number of tokens. Each model size has a colour, and the lines are the law."
    return figure("Loss by tokens and size", summary, traces, keys, table, plot_layout(420, x, y))
