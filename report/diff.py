"""What `diff` prints: a verdict, what it rests on, a table by component or layer, and the tensors that changed most."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.console import RenderResult
from rich.text import Text

from .diff_words import (
    HEADINGS,
    figure,
    files_told,
    listed,
    most_changed,
    readings,
    remarks,
    sides,
    some,
    tree_told,
    verdict,
)
from .rows import By
from .sheets import Drawing, Layout, Row, Sheet

if TYPE_CHECKING:
    from ..parity.changes import Diff, Group, TensorDiff

__all__ = ["COLUMNS", "diff_report", "group_cells", "label"]

COLUMNS = ("tensors", "changed", "relative", "cosine", "rank")
FIGURES = " (figures are of the tensors that changed)"
SOME = 5
"""Tensors that are listed unless all are asked for."""
INDENT = 2


def diff_report(found: Diff, by: By = "component", everything: bool = False) -> Drawing:
    """What rich prints. `everything` lists all tensors that differ, and all that is told of trees and files."""
    return Drawing(partial(_report, found, by, everything or by == "tensor"))


def _report(found: Diff, by: By, everything: bool, layout: Layout) -> RenderResult:
    for line in sides(found):
        yield from _wrapped(layout, line, 0, "dim")
    yield from _wrapped(layout, verdict(found), 0, "bold")
    for line in readings(found):
        yield from _wrapped(layout, line, INDENT)
    for heading, lines in _sections(found, by, everything):
        yield ""
        yield from _wrapped(layout, heading, 0, "bold")
        for each in lines:
            if isinstance(each, Sheet):
                yield each
            else:
                yield from _wrapped(layout, each, INDENT)
    if found.notes:
        yield ""
    for line in found.notes:
        yield from _wrapped(layout, f"note: {line}", 0, "dim")


def _sections(found: Diff, by: By, everything: bool) -> Iterator[tuple[str, Sequence[str | Sheet]]]:
    """What stands under which heading."""
    if found.changed and by != "tensor":
        groups = found.by_layer() if by == "layer" else found.by_module()
        yield f"Changed values{FIGURES}", (_sheet(groups), *_unchanged(groups), *_layers(found, by))
    shown = most_changed(found) if everything else most_changed(found)[:SOME]
    if shown:
        part = f" ({len(shown)} of {len(found.changed)}, most changed first; --all lists all)"
        yield f"Tensors{part if len(shown) < len(found.changed) else ''}", [*_tensors(shown)]
    for status, heading in HEADINGS.items():
        lines = listed([each for each in found.tensors if each.status == status])
        if lines:
            yield heading, lines
    if found.tree:
        yield "The trees differ (A → B)", tree_told(found, everything)
    if found.files:
        yield "Files beside the weights (A → B)", files_told(found, None if everything else SOME)


def _wrapped(layout: Layout, text: str, indent: int, style: str = "") -> Iterator[Any]:
    """Lines that fit, broken between words alone; a second line of the text and what is broken off stand further in."""
    for number, line in enumerate(text.split("\n")):
        first = indent + 2 * INDENT * (number > 0)
        rest = " " * (first + (INDENT if indent else 3))
        for part in textwrap.wrap(
            layout.clean(line),
            layout.width,
            initial_indent=" " * first,
            subsequent_indent=rest if number == 0 else " " * first,
            break_long_words=False,
            break_on_hyphens=False,
        ):
            yield Text(part, style=style, no_wrap=True, overflow="ignore")  # a name beyond the width stays whole


# --- tables -------------------------------------------------------------------------------------------------


def group_cells(group: Group) -> tuple[str, ...]:
    """The cells below COLUMNS."""
    changed = group.changed
    if not changed:
        return (f"{len(group.tensors):,}", "0", "–", "–", "–")
    cosine = "–" if group.cosine is None else f"{group.cosine:.5f}"
    relative = "not finite" if group.not_finite else figure(group.relative)
    return (f"{len(group.tensors):,}", f"{len(changed):,}", relative, cosine, _ranks(changed))


def _ranks(changed: Sequence[TensorDiff]) -> str:
    """The largest rank of several, and that it is full or not known."""
    ranks = [(each.figures.rank, each.reading) for each in changed if each.figures and each.figures.rank]
    above = [rank.limit for rank, _ in ranks if rank.more]
    if above:
        return f"> {max(above)}"
    known = [rank for rank, reading in ranks if reading != "unclear" and rank.rank]  # 0: none above rounding
    if not known:
        return "–"
    largest = max(rank.rank for rank in known)
    return "full" if any(rank.full for rank in known) else f"{'≤ ' if len(known) > 1 else ''}{largest}"


def _sheet(groups: Sequence[Group]) -> Sheet:
    rows = [Row(label(group), group_cells(group)) for group in groups if group.changed]
    return Sheet("", COLUMNS, tuple(rows))


def label(group: Group) -> str:
    """What its row is called."""
    return group.name if group.layer is None else f"{group.name} {group.layer}"


def _unchanged(groups: Sequence[Group]) -> list[str]:
    same = [label(group) for group in groups if group.same == len(group.tensors)]
    return [f"Unchanged: {some(same, 8)}"] if same else []


def _layers(found: Diff, by: By) -> list[str]:
    """The layers that changed most, in a line."""
    groups = [group for group in found.by_layer() if group.layer is not None and group.relative]
    if by == "layer" or len(groups) < 2:
        return []
    most = sorted(groups, key=lambda group: -(group.relative or 0.0))[:3]
    return [f"Most in layer {', '.join(f'{group.layer} ({figure(group.relative)})' for group in most)}"]


def _tensors(shown: Sequence[TensorDiff]) -> Iterator[str]:
    for each in shown:
        yield f"{each.name}\n{', '.join(remarks(each))}"
