"""The report of `ablate`: a table of a model's variants, their losses, and how they differ from the base model."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from rich.console import RenderResult
from rich.text import Text

from ..training.ablate import Ablation, Difference, RunResult, VariantResult
from ..version import __version__
from .charts import BOTH, axis, line_style, plot_layout, points, vertical_line
from .pages import Figure, Key, Lines, Page, Section, Table, figure, safe
from .quantities import counted, decimal, whole_bytes
from .sheets import Sheet, SheetRow, Terminal, drawing

_INTERVAL = "95 % interval"
_HEADINGS = ("loss", "±", "minus base", _INTERVAL, "KL", "parameters", "FLOPs", "cache per token", "tokens/s")


def run_line(name: str, tokens: int, result: RunResult) -> str:
    """Return the line that is printed when a run has ended.

    `name` is the variant's name, and `tokens` the number of training tokens of the run.
    """
    kl = "" if result.kl is None else f", KL {result.kl:.4f}"
    loss = f"held-out loss {result.loss:.4f}{kl}, {result.pace:,.0f} tokens/s"
    return f"{name}, {tokens:,} tokens, seed {result.seed}: {loss}"


def _signed(value: float) -> str:
    return f"{value:+.4f}".replace("-", "−")


def _interval(difference: Difference) -> str:
    if difference.low is None or difference.high is None:
        return "–"
    return f"{_signed(difference.low)} to {_signed(difference.high)}"


def _cells(variant: VariantResult) -> tuple[str, ...]:
    """Return a variant's figures in the order of `_HEADINGS`."""
    kl = [run.kl for run in variant.runs if run.kl is not None]
    return (
        "–" if variant.loss is None else f"{variant.loss:.4f}",
        "–" if variant.spread is None else f"{variant.spread:.4f}",
        "" if variant.difference is None else _signed(variant.difference.mean),
        "" if variant.difference is None else _interval(variant.difference),
        f"{statistics.mean(kl):.4f}" if kl else "",
        f"{variant.costs.parameters:,}",
        decimal(variant.flops),
        whole_bytes(variant.costs.cache_bytes()),
        "–" if variant.pace is None else f"{variant.pace:,.0f}",
    )


def _named(variants: Sequence[VariantResult]) -> list[tuple[str, VariantResult]]:
    """Return (label, variant) pairs. If the variants have several budgets, a label includes the number of tokens."""
    several = len({variant.name for variant in variants}) < len(variants)
    return [
        (f"{variant.name}, {variant.tokens:,} tokens" if several else variant.name, variant) for variant in variants
    ]


def ablation_sheet(ablation: Ablation) -> Sheet:
    """Return the table of an ablation: one row per variant, without columns that are empty in all rows."""
    cells = [_cells(variant) for variant in ablation.rows]
    filled = [column for column in range(len(_HEADINGS)) if any(row[column] for row in cells)]
    rows = [
        SheetRow(
            name,
            tuple(row[n] for n in filled),
            "bold" if variant.difference and variant.difference.significant else None,
        )
        for (name, variant), row in zip(_named(ablation.rows), cells, strict=True)
    ]
    return Sheet("", tuple(_HEADINGS[column] for column in filled), tuple(rows))


def explanation(ablation: Ablation) -> list[str]:
    """Return the sentences that explain the table's figures."""
    budgets = sorted({variant.tokens for variant in ablation.rows})
    tokens = f"{budgets[0]:,}" if len(budgets) == 1 else f"{budgets[0]:,} to {budgets[-1]:,}"
    how = "Each variant was trained from random weights"
    if ablation.how == "heal":
        how = "Each variant was healed on the predictions of the base, from which KL is measured, and the base was"
        how += " trained further on the text"
    lines = [
        f"{how}: {tokens} tokens, {ablation.context:,} per window, {counted(ablation.seeds, 'seed')}.",
        "Loss is on held-out text, in nats per token; ± is the largest minus the smallest over seeds. Differences from"
        " the base compare runs of the same seed: the same windows in the same order, and the same initial values of"
        " parameters that both have. Intervals are Student's, without a correction for several variants.",
    ]
    return lines + ([f"{counted(ablation.left, 'run')} not finished."] if ablation.left else [])


@drawing
def ablation_report(terminal: Terminal, ablation: Ablation) -> RenderResult:
    """Yield the report on the ablation for the terminal."""
    yield Text(terminal.clean(ablation.name), style="bold")
    yield from terminal.wrapped(" ".join(ablation.description.split()), 0, further=0)
    yield ""
    yield ablation_sheet(ablation)
    yield ""
    for line in explanation(ablation):
        yield from terminal.wrapped(line, 0, "dim", further=0)


def ablation_page(ablation: Ablation) -> Page:
    """Return the HTML page of an ablation."""
    sheet = ablation_sheet(ablation).as_table()
    lit = frozenset(
        n for n, row in enumerate(ablation.rows) if row.difference is not None and row.difference.significant
    )
    table = Table("Variants", sheet.columns, sheet.rows, lit, bold="the interval does not contain 0")
    comments = tuple(f"{variant.name}: {variant.comment}" for variant in ablation.rows if variant.comment)
    more = (Lines(comments, listed=True),) if comments else ()
    blocks = (Lines(tuple(explanation(ablation))), table, *more)
    figures = [_curves_figure(ablation)]
    figures += [_differences_figure(ablation)] if any(variant.difference for variant in ablation.rows) else []
    return Page(
        title=ablation.name,
        subtitle=" ".join(ablation.description.split()),
        facts=(("seeds", f"{ablation.seeds}"), ("context", f"{ablation.context:,}"), ("gptkit", __version__)),
        sections=(Section("Variants compared with the base", blocks), Section("During training", tuple(figures))),
    )


def _curves_figure(ablation: Ablation) -> Figure:
    """Draw the held-out loss of every variant by training tokens.

    A line is the mean over seeds, and error bars are the range over seeds.
    """
    measure = "KL from the base" if ablation.how == "heal" else "held-out loss"
    traces, keys, rows = list[dict[str, Any]](), list[Key](), list[tuple[str, ...]]()
    for index, (name, variant) in enumerate(_named(ablation.rows)):
        if ablation.how == "heal" and variant.name == "base":
            continue
        colour, dash = line_style(index)
        paint, values_at = f"var(--{colour})", dict[int, list[float]]()
        for run in variant.runs:
            for point in run.curve:
                values_at.setdefault(point["tokens"], []).append(point["held_out"])
        means = {tokens: statistics.mean(values) for tokens, values in values_at.items()}
        errors = {
            "type": "data", "symmetric": False, "color": paint, "thickness": 1,
            "array": [max(values_at[tokens]) - mean for tokens, mean in means.items()],
            "arrayminus": [mean - min(values_at[tokens]) for tokens, mean in means.items()],
        }  # fmt: skip
        hints = [f"<b>{safe(name)}</b><br>{tokens:,} tokens<br>{mean:.4f}" for tokens, mean in means.items()]
        style: dict[str, Any] = {
            "error_y": errors,
            "line": {"color": paint, "dash": dash},
            "marker": {"color": paint, "size": 5},
        }
        traces.append(points(name, list(means), list(means.values()), hints, BOTH, **style))
        keys.append(Key(f"line {colour} {dash}", name))
        rows += [(name, f"{tokens:,}", f"{mean:.4f}", str(len(values_at[tokens]))) for tokens, mean in means.items()]
    layout = plot_layout(420, axis("tokens"), axis(f"{measure}, nats per token"))
    columns = (("variant", False), ("tokens", True), (measure, True), ("seeds", True))
    table = Table("The curves as a table", columns, tuple(rows), folded=True)
    title = f"{measure[0].upper()}{measure[1:]}"
    summary = (
        f"{title} by the number of tokens trained on: the mean over seeds, with bars from the least to the largest."
    )
    return figure(title, summary, traces, keys, table, layout)


def _differences_figure(ablation: Ablation) -> Figure:
    differences = [(name, variant.difference) for name, variant in _named(ablation.rows) if variant.difference]
    errors = {
        "type": "data", "symmetric": False, "color": "var(--c1)", "thickness": 2,
        "array": [0.0 if gap.high is None else gap.high - gap.mean for _, gap in differences],
        "arrayminus": [0.0 if gap.low is None else gap.mean - gap.low for _, gap in differences],
    }  # fmt: skip
    hints = [f"<b>{safe(name)}</b><br>{_signed(gap.mean)}<br>{_interval(gap)}" for name, gap in differences]
    rows, means = list(range(len(differences))), [gap.mean for _, gap in differences]
    trace = points("", means, rows, hints, marker={"color": "var(--c1)", "size": 9}, error_x=errors)
    by_name = {"tickvals": rows, "ticktext": [safe(name) for name, _ in differences], "autorange": "reversed"}
    x, y = axis("loss minus the base's, nats per token"), axis("", **by_name)
    layout = plot_layout(60 + 34 * len(differences), x, y, shapes=[vertical_line(0)])
    columns = (("variant", False), ("minus base", True), (_INTERVAL, True))
    cells = tuple((name, _signed(gap.mean), _interval(gap)) for name, gap in differences)
    table = Table("The differences as a table", columns, cells, folded=True)
    summary = "The held-out loss of each variant minus that of the base with the same seed. Bars are 95 % intervals."
    return figure("Difference from the base", summary, [trace], [Key("c1", "less is better")], table, layout)
