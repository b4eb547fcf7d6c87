"""What `compare` prints: models side by side in the terminal, as Markdown, as CSV, and as a page.

Rows that differ are marked with a star, and bold where there are such letters.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.console import RenderResult
from rich.table import Table
from rich.text import Text

from .pages import counted
from .sheets import Drawing, Layout, decimal, nbytes

if TYPE_CHECKING:
    from ..analysis.compare import Comparison, Row

__all__ = ["comparison_csv", "comparison_markdown", "comparison_table", "conditions", "cost_lines"]

MARK = "*"
GAP = 2
"""Blank characters between two columns."""
MOST_LINES = 4
"""A cell that would need more lines than this makes the table a list."""


@dataclass(frozen=True)
class Line:
    """A row as it is shown: its label, a cell a model, whether it is one that differs, and whether it is a cost."""

    label: str
    cells: tuple[str, ...]
    differs: bool
    cost: bool = False


def comparison_table(found: Comparison, rows: Sequence[Row] | None = None) -> Drawing:
    """What rich prints: a column a model where they fit, else a list of aspects with the models that have each."""
    return Drawing(partial(_table, found, found.shown() if rows is None else rows))


def lines(found: Comparison, rows: Sequence[Row]) -> list[Line]:
    """The table's rows: aspects, then costs."""
    return [*(Line(row.name, row.words, row.differs) for row in rows), *cost_lines(found)]


def cost_lines(found: Comparison) -> list[Line]:
    """The costs, as they are written."""
    return [
        Line(name, tuple(cost_words(name, each) for each in figures), len(set(figures)) > 1, True)
        for name, figures in found.costs().items()
    ]


def cost_words(name: str, figure: int | None) -> str:
    """A cost as it is written: parameters to the last one, the rest in four digits."""
    if figure is None:
        return "–"
    if name in ("parameters", "active"):
        return f"{figure:,}"
    return flops(figure) if name.startswith("FLOPs") else nbytes(figure)


def flops(number: int) -> str:
    """Four digits with a prefix: 13.75 G."""
    return decimal(number, "").strip()


def conditions(found: Comparison) -> str:
    """Under which the costs were counted."""
    stored = f"Weights and cache in {found.dtype}"
    if found.cached != found.dtype:
        stored = f"Weights in {found.dtype}, cache in {found.cached}"
    return f"{stored}; forward FLOPs for a token that sees {found.context:,}."


def _table(found: Comparison, rows: Sequence[Row], layout: Layout) -> RenderResult:
    page = _Page(layout.width, layout.ascii_only)
    names = [model.name for model in found.models]
    shown = lines(found, rows)
    table = page.side_by_side(names, shown)
    if table is not None:
        yield table
    else:
        yield from page.one_below_the_other(names, shown)
    yield ""
    yield page.note(conditions(found))
    if len(names) > 1:
        yield page.note(_marks(found, rows))
    yield from map(page.note, found.told())


def _marks(found: Comparison, rows: Sequence[Row]) -> str:
    """What the marks mean, and how much is left out."""
    differ = any(row.differs for row in rows)
    told = f"{MARK} marks what differs." if differ else "The models are alike in these rows."
    left = len(found.rows) - len(rows)
    return f"{told} --all adds {counted(left, 'row')} in which they are alike." if left else told


@dataclass(frozen=True)
class _Page(Layout):
    """A table of words for a terminal this wide."""

    def side_by_side(self, names: Sequence[str], shown: Sequence[Line]) -> Table | None:
        """A column a model; None where a word would have to be broken, or a cell is more lines than can be read."""
        columns = list(zip(names, *(line.cells for line in shown), strict=True))
        first = max(len(line.label) for line in shown) + len(MARK) + 1
        room = self.width - first - GAP * len(names)
        widths = shared_out(room, [[*column] for column in columns])
        if widths is None:
            return None
        table = Table(box=None, show_edge=False, padding=(0, GAP, 0, 0), pad_edge=False, header_style="bold")
        table.add_column("", no_wrap=True, width=first)
        for name, width in zip(names, widths, strict=True):
            table.add_column(self.text(name), width=width, overflow="fold")
        for index, line in enumerate(shown):
            if line.cost and not shown[index - 1].cost:
                table.add_row("")
            style = "bold" if line.differs and not line.cost else None
            label = f"{MARK if line.differs and not line.cost else ' '} {line.label}"
            table.add_row(*map(self.text, [label, *line.cells]), style=style)
        return table

    def one_below_the_other(self, names: Sequence[str], shown: Sequence[Line]) -> RenderResult:
        """An aspect, and below it each value with the models that have it."""
        for index, line in enumerate(shown):
            if line.cost and not shown[index - 1].cost:
                yield ""
            if not line.differs:
                yield self.text(f"  {line.label}: {line.cells[0]}")
                continue
            yield Text(self.clean(f"{' ' if line.cost else MARK} {line.label}"), style="bold")
            by_value: dict[str, list[str]] = {}
            for name, cell in zip(names, line.cells, strict=True):
                by_value.setdefault(cell, []).append(name)
            table = Table(box=None, show_edge=False, show_header=False, padding=(0, GAP, 0, 0), pad_edge=False)
            longest = max(map(len, by_value))
            table.add_column(width=2)
            table.add_column(width=min(longest, max((self.width - 4) // 2, longest_word(by_value))), overflow="fold")
            table.add_column(overflow="fold")
            for value, who in by_value.items():
                table.add_row("", self.text(value), self.text(", ".join(who)))
            yield table


def shared_out(room: int, columns: Sequence[Sequence[str]]) -> list[int] | None:
    """The widths of columns of words: each as wide as its longest word, and then as many cells on one line as can be.

    None where that is not enough, or where a cell would take more than `MOST_LINES`.
    """
    widths = [longest_word(column) for column in columns]
    left = room - sum(widths)
    if left < 0:
        return None
    while left > 0:  # to whichever cell lacks least to stand on one line
        lacking = [
            min((len(cell) - width for cell in column if len(cell) > width), default=left + 1)
            for column, width in zip(columns, widths, strict=True)
        ]
        least = min(lacking)
        if least > left:
            break
        widths[lacking.index(least)] += least
        left -= least
    tall = any(len(cell) > MOST_LINES * width for column, width in zip(columns, widths, strict=True) for cell in column)
    return None if tall else widths


def longest_word(cells: Sequence[str] | dict[str, Any]) -> int:
    return max(len(word) for cell in cells for word in (cell.split() or [""]))


# --- for papers and for programs -------------------------------------------------------------------------------------


def comparison_markdown(found: Comparison, rows: Sequence[Row]) -> str:
    """The table in Markdown; the labels of rows that differ are bold."""
    names = [model.name for model in found.models]
    written = [["", *names], ["---"] * (len(names) + 1)]
    for line in lines(found, rows):
        lit = line.differs and not line.cost
        written.append([f"**{_cell(line.label)}**" if lit else _cell(line.label), *map(_cell, line.cells)])
    head = [["", *map(_cell, names)], *written[1:]]
    table = "\n".join(f"| {' | '.join(row)} |" for row in head)
    return f"{table}\n\n{conditions(found)}\n"


def _cell(words: str) -> str:
    """Text that stays in its cell: a name out of a file is somebody else's."""
    plain = "".join(letter if letter.isprintable() else "?" for letter in words)
    return "".join(f"\\{letter}" if letter in "\\|*_`<>[]" else letter for letter in plain)


def comparison_csv(found: Comparison, rows: Sequence[Row]) -> str:
    """The table as CSV: aspects in words, costs as integers, with a column that says whether a row differs."""
    written = io.StringIO()
    writer = csv.writer(written, lineterminator="\n")
    writer.writerow(["aspect", "differs", *(model.name for model in found.models)])
    for row in rows:
        writer.writerow([row.name, "yes" if row.differs else "no", *row.words])
    for name, figures in found.costs().items():
        differs = "yes" if len(set(figures)) > 1 else "no"
        writer.writerow([_exact(name, found), differs, *("" if each is None else each for each in figures)])
    return written.getvalue()


def _exact(name: str, found: Comparison) -> str:
    """A cost's name with its unit and conditions, where they are not in the figures."""
    if name == "weights" or name.startswith("KV"):
        return f"{name.replace(',', '')}, bytes in {found.dtype if name == 'weights' else found.cached}"
    return f"{name}, {found.context} in sight" if name.startswith("FLOPs") else name
