"""The report of `eval`: the perplexity of a model on a text, compared with another model, and its loss by position."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import RenderResult
from rich.text import Text

from ..version import __version__
from .charts import BOTH, DASHES, axis, plot_layout, points, powers, vertical_line
from .pages import PALETTE, Figure, Key, Lines, Page, Section, Table, figure, noted, safe
from .quantities import counted, perplexity_words
from .sheets import Sheet, SheetRow, Terminal, drawing, plain_table

if TYPE_CHECKING:
    from ..training.evaluate import Curve, Estimate, Evaluation, Score

_MARKS, _ASCII_MARKS = "●○◆◇◉", "ox*+@"
"""The marks of up to four curves, and last the mark for a place where several curves meet."""
_CHART_COLUMNS, _LEAST_CHART_COLUMNS = 44, 8
"""The largest number of columns of the chart in the terminal, and the number below which there is no chart."""
_BEYOND = "past context"


def _with_error(value: float, error: float | None, digits: int = 3) -> str:
    return f"{value:.{digits}f}" if error is None else f"{value:.{digits}f} ± {error:.{digits}f}"


def _estimate(estimate: Estimate, digits: int = 3) -> str:
    return _with_error(estimate.value, estimate.error, digits)


def _perplexity(score: Score) -> str:
    """Return the perplexity with its standard error, as text.

    The error is the perplexity times the standard error of the loss in nats.
    """
    if not math.isfinite(score.perplexity):
        return "infinite"
    error = score.nats.error
    around = "" if error is None else f" ± {score.perplexity * error:#.2g}".rstrip(".")
    return f"{perplexity_words(score.perplexity)}{around}"


def _accuracy(share: Estimate) -> str:
    return f"{_with_error(100 * share.value, None if share.error is None else 100 * share.error, 1)} %"


_FIGURES: tuple[tuple[str, Callable[[Score], str]], ...] = (
    ("perplexity", _perplexity),
    ("nats per token", lambda score: _estimate(score.nats)),
    ("bits per byte", lambda score: _estimate(score.bits_per_byte)),
)


def _score_sheet(evaluation: Evaluation) -> Sheet:
    scores = [score for score in (evaluation.score, evaluation.against) if score is not None]
    rows = [SheetRow(name, tuple(map(words, scores))) for name, words in _FIGURES]
    for k in evaluation.score.top_k:
        rows.append(SheetRow(f"top-{k} accuracy", tuple(_accuracy(score.top_k[k]) for score in scores)))
    if len({score.tokens for score in scores}) > 1:
        rows.append(SheetRow("tokens", tuple(f"{score.tokens:,}" for score in scores)))
    return Sheet("", tuple(score.reference for score in scores), tuple(rows))


def _difference(evaluation: Evaluation) -> list[str]:
    """Return a sentence on the difference from the other model, or an empty list if there is no other model."""
    paired, against = evaluation.paired, evaluation.against
    if paired is None or against is None:
        return []
    value, error, windows = paired.difference.value, paired.difference.error, counted(paired.windows, "window")
    if value == 0 and not error:
        return [f"minus {against.reference}: the same in each of {windows}"]
    unit = paired.unit.replace(" a ", " per ")  # the JSON output has "nats a token" and "bits a byte"
    words = f"{'−' if value < 0 else '+'}{_with_error(abs(value), error)} {unit}"
    shares = f"better in {paired.better:.1%} of {windows}, worse in {paired.worse:.1%}"
    return [f"minus {against.reference}: {words}; {shares}"]


def _data_words(evaluation: Evaluation) -> str:
    """Return a line on the size of the text, and on the windows into which it was divided."""
    score, stride = evaluation.score, evaluation.stride
    starts = "" if stride == evaluation.context else f", one starting every {stride:,} tokens"
    return (
        f"{counted(evaluation.documents, 'document')}, {score.tokens:,} tokens of {score.bytes:,} bytes,"
        f" {counted(score.windows, 'window')} of {evaluation.context:,}{starts}"
    )


def _curves(evaluation: Evaluation) -> tuple[Curve, ...]:
    """Return the curves of loss by position that the report shows.

    If positions beyond the context were measured, these are the curves over all positions, within and beyond it.
    """
    scores = (score.curve for score in (evaluation.score, evaluation.against) if score is not None)
    return evaluation.extrapolation or tuple(scores)


def _positions(first: int, last: int) -> str:
    return f"{first:,}" if first == last else f"{first:,}–{last:,}"


@drawing
def evaluation_report(terminal: Terminal, evaluation: Evaluation) -> RenderResult:
    """Yield the report on the evaluation for the terminal."""
    yield terminal.text(f"{evaluation.score.reference} on {', '.join(evaluation.data)}")
    yield terminal.note(_data_words(evaluation))
    yield ""
    yield _score_sheet(evaluation)
    for line in _difference(evaluation):
        yield ""
        yield terminal.text(line)
    yield ""
    yield Text("Nats per token, by the position from which a token is predicted", style="bold")
    yield from _curve_chart(terminal, _curves(evaluation), evaluation.context)
    yield from map(terminal.note, evaluation.notes)


def _curve_chart(terminal: Terminal, curves: Sequence[Curve], context: int) -> RenderResult:
    """Yield a legend and a chart of the loss, drawn with characters.

    The chart has one line of text per range of positions. A mark further right means a higher loss in nats.
    """
    *marks, several = list(_ASCII_MARKS if terminal.ascii_only else _MARKS)
    for mark, curve in zip(marks, curves, strict=False):
        made_for = "" if curve.context is None else f"  made for {curve.context:,} tokens"
        yield terminal.text(f"{mark} ").append(terminal.text(curve.name)).append(terminal.clean(made_for), style="dim")
    places = list(dict.fromkeys((span.first, span.last) for curve in curves for span in curve.bins))
    by_place = [{(span.first, span.last): span.nats for span in curve.bins} for curve in curves]
    names = [_positions(first, last) for first, last in places]
    beyond = [_BEYOND] if any(first == context for first, _ in places) else []
    room = terminal.width - max(map(len, ["position", *names, *beyond])) - 2

    def figures(words: Callable[[Estimate], str]) -> tuple[list[list[str]], int]:
        """Return the figures by range of positions as text, and the width in characters that is left for the chart."""
        cells = [[words(nats[place]) if place in nats else "" for nats in by_place] for place in places]
        return cells, room - sum(max(len(row[n]) for row in cells) + 2 for n in range(len(curves)))

    cells, remaining = figures(lambda nats: _estimate(nats, 2))
    if remaining < 0:
        cells, remaining = figures(lambda nats: f"{nats.value:.2f}")
    width = min(_CHART_COLUMNS, remaining - 1)
    values = [nats.value for of_curve in by_place for nats in of_curve.values() if math.isfinite(nats.value)]
    low, high = min(values, default=0.0), max(values, default=0.0)
    table = plain_table(("position", False), *((mark, True) for mark, _ in zip(marks, curves, strict=False)), gap=2)
    with_chart = width >= _LEAST_CHART_COLUMNS
    if with_chart:
        blank = " " * (width - len(f"{low:.2f}{high:.2f}"))
        table.add_column(terminal.text(f"{low:.2f}{blank}{high:.2f}"), no_wrap=True)
    for place, name, row in zip(places, names, cells, strict=True):
        if place[0] == context:
            table.add_row(terminal.text(_BEYOND), style="dim")
        line = [" "] * max(width, 1)
        for mark, nats in zip(marks, by_place, strict=False):
            if place in nats and math.isfinite(nats[place].value):
                column = round((nats[place].value - low) / ((high - low) or 1) * (len(line) - 1))
                line[column] = mark if line[column] == " " else several
        table.add_row(*map(terminal.text, [name, *row]), *([Text("".join(line))] if with_chart else []))
    yield table


def evaluation_page(evaluation: Evaluation) -> Page:
    """Return the HTML page of an evaluation."""
    score = evaluation.score
    lines = [
        f"{_data_words(evaluation)}. Standard errors are over windows, because neighbouring tokens are not independent."
    ]
    lines += [f"{line[0].upper()}{line[1:]}." for line in _difference(evaluation)]
    return Page(
        title=score.reference,
        subtitle=f"measured on {', '.join(evaluation.data)}",
        verdict=f"Perplexity {_perplexity(score)}",
        facts=(("context", f"{evaluation.context:,}"), ("tokens", f"{score.tokens:,}"), ("gptkit", __version__)),
        sections=(
            Section("On the text", (Lines(tuple(lines)), _score_sheet(evaluation).as_table())),
            Section("By position", (_curve_figure(_curves(evaluation), evaluation.context),)),
            *noted(evaluation.notes),
        ),
    )


def _curve_figure(curves: Sequence[Curve], context: int) -> Figure:
    """Draw nats per token by position with standard errors. A dashed line marks the end of the context."""
    traces, keys, rows = list[dict[str, Any]](), list[Key](), list[tuple[str, ...]]()
    for index, curve in enumerate(curves):
        colour, dash = f"c{index % PALETTE}", DASHES[index % len(DASHES)]
        bins = [span for span in curve.bins if math.isfinite(span.nats.value)]
        hints = [
            f"<b>{safe(curve.name)}</b><br>position {_positions(span.first, span.last)}, {span.tokens:,} tokens"
            f"<br>{_estimate(span.nats)} nats per token"
            for span in bins
        ]
        paint = f"var(--{colour})"
        errors = {"type": "data", "array": [span.nats.error or 0 for span in bins], "color": paint, "thickness": 1}
        style: dict[str, Any] = {
            "error_y": errors,
            "line": {"color": paint, "dash": dash},
            "marker": {"color": paint, "size": 6},
        }
        middles = [math.sqrt((span.first + 1) * (span.last + 1)) for span in bins]
        traces.append(points(curve.name, middles, [span.nats.value for span in bins], hints, BOTH, **style))
        keys.append(Key(f"line {colour} {dash}", curve.name))
        for span in curve.bins:
            rows.append((curve.name, _positions(span.first, span.last), f"{span.tokens:,}", _estimate(span.nats)))
    width = max(curve.width for curve in curves)
    x = powers(1, width) | {"title": {"text": "position, in tokens"}}
    layout = plot_layout(360, x, axis("nats per token"))
    ends = [f"{_estimate(curve.bins[-1].nats, 2)} at the last positions ({curve.name})" for curve in curves]
    summary = f"Nats per token by the position from which a token is predicted: {'; '.join(ends)}."
    if width > context:
        layout["shapes"] = [vertical_line(context, dash="dash", width=1)]
        summary += f" The dashed line is the end of the context of {context:,} tokens."
    columns = (("model", False), ("position", False), ("tokens", True), ("nats per token", True))
    table = Table("By position, as a table", columns, tuple(rows), folded=True)
    return figure("Nats per token by position", summary, traces, keys, table, layout)
