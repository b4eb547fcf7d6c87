"""What `eval` prints: a model on a text, beside another, by position; in lines, as a page with the curve."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import RenderResult
from rich.text import Text

from ..version import __version__
from .charts import DASHES, powers
from .pages import PALETTE, Figure, Key, Lines, Page, Section, Table, figure, noted, safe
from .quantities import counted, perplexity_words
from .sheets import Layout, Row, Sheet, drawing, plain_table

if TYPE_CHECKING:
    from ..training.evaluate import Curve, Estimate, Evaluation, Paired, Score

_MARKS, _ASCII_MARKS = "●○◆◇◉", "ox*+@"
"""A curve's mark each, and that of several in one place."""
_PICTURE = 44
"""Columns that a curve in the terminal takes at most."""


def _between(value: float, error: float | None, digits: int = 3) -> str:
    """A figure and its standard error, where there is one."""
    return f"{value:.{digits}f}" if error is None else f"{value:.{digits}f} ± {error:.{digits}f}"


def _estimate(found: Estimate, digits: int = 3) -> str:
    return _between(found.value, found.error, digits)


def _perplexity(score: Score) -> str:
    """By what an error in nats makes of it."""
    error = score.nats.error
    if not math.isfinite(score.perplexity):
        return "infinite"
    around = "" if error is None else f" ± {score.perplexity * error:#.2g}".rstrip(".")
    return f"{perplexity_words(score.perplexity)}{around}"


def _share(found: Estimate) -> str:
    return f"{_between(100 * found.value, None if found.error is None else 100 * found.error, 1)} %"


_FIGURES: tuple[tuple[str, Callable[[Score], str]], ...] = (
    ("perplexity", _perplexity),
    ("nats per token", lambda score: _estimate(score.nats)),
    ("bits per byte", lambda score: _estimate(score.bits_per_byte)),
)


def _sheet(evaluation: Evaluation) -> Sheet:
    """The figures of each model."""
    scores = [each for each in (evaluation.score, evaluation.against) if each is not None]
    rows = [Row(name, tuple(tell(score) for score in scores)) for name, tell in _FIGURES]
    for k in evaluation.score.top_k:
        rows.append(Row(f"top-{k} accuracy", tuple(_share(score.top_k[k]) for score in scores)))
    if len({score.tokens for score in scores}) > 1:
        rows.append(Row("tokens", tuple(f"{score.tokens:,}" for score in scores)))
    return Sheet("", tuple(score.reference for score in scores), tuple(rows))


def _difference(paired: Paired) -> str:
    """A model less the other, in a sentence."""
    value, error = paired.difference.value, paired.difference.error
    if value == 0 and not error:
        return f"the same in each of {counted(paired.windows, 'window')}"
    unit = paired.unit.replace(" a ", " per ")  # the JSON output has "nats a token" and "bits a byte"
    sign = "−" if value < 0 else "+"
    return (
        f"{sign}{_between(abs(value), error)} {unit}; better in {paired.better:.1%} of"
        f" {counted(paired.windows, 'window')}, worse in {paired.worse:.1%}"
    )


def _given(evaluation: Evaluation) -> str:
    score = evaluation.score
    behind = "" if evaluation.stride == evaluation.context else f", each {evaluation.stride:,} tokens after the last"
    return (
        f"{counted(evaluation.documents, 'document')}, {score.tokens:,} tokens of {score.bytes:,} bytes,"
        f" {counted(score.windows, 'window')} of {evaluation.context:,}{behind}"
    )


def _curves(evaluation: Evaluation) -> tuple[Curve, ...]:
    """Past the context where somebody looked there, which has what is within it too."""
    scores = (each.curve for each in (evaluation.score, evaluation.against) if each is not None)
    return evaluation.extrapolation or tuple(scores)


def _place(first: int, last: int) -> str:
    return f"{first:,}" if first == last else f"{first:,}–{last:,}"


@drawing
def evaluation_report(page: Layout, evaluation: Evaluation) -> RenderResult:
    """What rich prints."""
    yield page.text(f"{evaluation.score.reference} on {', '.join(evaluation.data)}")
    yield page.note(_given(evaluation))
    yield ""
    yield _sheet(evaluation)
    if evaluation.paired is not None and evaluation.against is not None:
        yield ""
        yield page.text(f"less {evaluation.against.reference}: {_difference(evaluation.paired)}")
    yield ""
    yield Text("Nats per token, by the position that it is predicted from", style="bold")
    yield from _drawn(page, _curves(evaluation), evaluation.context)
    yield from map(page.note, evaluation.notes)


def _drawn(page: Layout, curves: Sequence[Curve], context: int) -> RenderResult:
    """The curves turned by a quarter: a line a bin, in which each model's mark stands further right for more nats."""
    *marks, several = list(_ASCII_MARKS if page.ascii_only else _MARKS)
    for mark, curve in zip(marks, curves, strict=False):
        made_for = "" if curve.context is None else f"  made for {curve.context:,} tokens"
        yield page.text(f"{mark} ").append(page.text(curve.name)).append(page.clean(made_for), style="dim")
    bins = list(dict.fromkeys((each.first, each.last) for curve in curves for each in curve.bins))
    found = [{(each.first, each.last): each for each in curve.bins} for curve in curves]
    values = [each.nats.value for curve in curves for each in curve.bins if math.isfinite(each.nats.value)]
    low, high = min(values, default=0.0), max(values, default=0.0)
    names = [_place(first, last) for first, last in bins]

    def told(tell: Callable[[Estimate], str]) -> tuple[list[list[str]], int]:
        """The figures of every bin, and the columns that they leave."""
        figures = [[tell(each[place].nats) if place in each else "" for each in found] for place in bins]
        widest = (max(len(row[n]) for row in figures) + 2 for n in range(len(curves)))
        return figures, page.width - max(map(len, ["position", *names])) - 2 - sum(widest)

    figures, left = told(lambda nats: _estimate(nats, 2))
    if left < 0:
        figures, left = told(lambda nats: _between(nats.value, None, 2))
    width = min(_PICTURE, left - 1)
    shown = plain_table(("position", False), *((mark, True) for mark, _ in zip(marks, curves, strict=False)), gap=2)
    if width >= 8:
        shown.add_column(page.text(f"{low:.2f}{' ' * (width - len(f'{low:.2f}{high:.2f}'))}{high:.2f}"), no_wrap=True)
    for place, name, row in zip(bins, names, figures, strict=True):
        if place[0] == context:
            shown.add_row(page.text("past it"), style="dim")
        line = [" "] * max(width, 0)
        for mark, each in zip(marks, found, strict=False):
            if place in each and line and math.isfinite(each[place].nats.value):
                at = round((each[place].nats.value - low) / ((high - low) or 1) * (width - 1))
                line[at] = mark if line[at] == " " else several
        shown.add_row(*map(page.text, [name, *row]), *([Text("".join(line))] if width >= 8 else []))
    yield shown


def evaluation_page(evaluation: Evaluation) -> Page:
    """The page of an evaluation."""
    sheet, score, curves = _sheet(evaluation), evaluation.score, _curves(evaluation)
    facts = [("context", f"{evaluation.context:,}"), ("tokens", f"{score.tokens:,}"), ("gptkit", __version__)]
    beside = ""
    if evaluation.paired is not None and evaluation.against is not None:
        beside = f"Less {evaluation.against.reference}: {_difference(evaluation.paired)}."
    words = (
        f"{_given(evaluation)}. Standard errors are over windows: tokens that follow one another are not independent."
    )
    lines = (words, beside) if beside else (words,)
    first = Section("On the text", (Lines(lines), sheet.as_table()))
    return Page(
        title=score.reference,
        subtitle=f"measured on {', '.join(evaluation.data)}",
        verdict=f"Perplexity {_perplexity(score)}",
        facts=tuple(facts),
        sections=(
            first,
            Section("By position", (_curve_figure(curves, evaluation.context),)),
            *noted(evaluation.notes),
        ),
    )


def _curve_figure(curves: Sequence[Curve], context: int) -> Figure:
    """Nats per token against the position, a line a curve, with standard errors; the end of the context is marked."""
    traces, keys, rows = list[dict[str, Any]](), list[Key](), list[tuple[str, ...]]()
    for number, curve in enumerate(curves):
        colour, dash = f"c{number % PALETTE}", DASHES[number % len(DASHES)]
        bins = [each for each in curve.bins if math.isfinite(each.nats.value)]
        hints = [
            f"<b>{safe(curve.name)}</b><br>position {_place(each.first, each.last)}, {each.tokens:,} tokens"
            f"<br>{_estimate(each.nats)} nats per token"
            for each in bins
        ]
        paint = f"var(--{colour})"
        errors = {"type": "data", "array": [each.nats.error or 0 for each in bins], "color": paint, "thickness": 1}
        points: dict[str, Any] = {"x": [math.sqrt((each.first + 1) * (each.last + 1)) for each in bins]}
        points |= {"y": [each.nats.value for each in bins], "error_y": errors, "hovertext": hints, "hoverinfo": "text"}
        drawn = {"line": {"color": paint, "dash": dash}, "marker": {"color": paint, "size": 6}}
        traces.append({"type": "scatter", "mode": "lines+markers", "name": safe(curve.name), **points, **drawn})
        keys.append(Key(f"line {colour} {dash}", curve.name))
        places = ((_place(each.first, each.last), f"{each.tokens:,}", _estimate(each.nats)) for each in curve.bins)
        rows += [(curve.name, *place) for place in places]
    width = max(curve.width for curve in curves)
    across = powers(1, width) | {"title": {"text": "position, in tokens"}}
    up = {
        "title": {"text": "nats per token", "standoff": 4},
        "gridcolor": "var(--line)",
        "zeroline": False,
        "ticks": "",
    }
    layout: dict[str, Any] = {"height": 360, "showlegend": False, "margin": {"t": 8, "b": 48, "l": 8, "r": 16}}
    layout |= {"xaxis": across, "yaxis": {**up, "automargin": True}}
    if width > context:
        line = {"color": "var(--quiet)", "dash": "dash", "width": 1}
        layout["shapes"] = [
            {"type": "line", "x0": context, "x1": context, "yref": "paper", "y0": 0, "y1": 1, "line": line}
        ]
    ends = [f"{_estimate(curve.bins[-1].nats, 2)} at the last positions ({curve.name})" for curve in curves]
    summary = f"Nats per token by the position that a token is predicted from: {'; '.join(ends)}."
    summary += f" The dashed line is where the context of {context:,} tokens ends." if width > context else ""
    columns = (("model", False), ("position", False), ("tokens", True), ("nats per token", True))
    table = Table("By position, as a table", columns, tuple(rows), folded=True)
    return figure("Nats per token by position", summary, traces, keys, table, layout)
