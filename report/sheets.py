"""Tables of figures for the terminal: columns that fit its width, numbers that are never wrapped or cut."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, Concatenate, ParamSpec

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from . import pages

GAP = 3  # blank characters between two columns of a table; rich draws one of them itself
_ASCII = str.maketrans({"×": "x", "–": "-", "−": "-", "·": "-", "…": ".", "²": "^2", "³": "^3"})
"""For terminals that have no other characters."""
_WIDEST_NAME = 24  # longer names, of folders most of them, are folded


def indented(text: str, indent: int = 10) -> list[str]:
    """A sentence in lines of up to 80 characters, each behind `indent` spaces."""
    return textwrap.wrap(text, 80, initial_indent=" " * indent, subsequent_indent=" " * indent)


def whole_words(line: str, width: int, first: int, rest: int) -> list[str]:
    """A line in as many as fit, broken between words alone, the first and the rest of them behind so many blanks."""
    whole = textwrap.TextWrapper(width, " " * first, " " * rest, break_long_words=False, break_on_hyphens=False)
    return whole.wrap(line)


@dataclass(frozen=True)
class SheetRow:
    """A figure of every column: `style` is rich's ("bold", "dim"); `ruled` draws a line above it."""

    label: str
    cells: tuple[str, ...]
    style: str | None = None
    ruled: bool = False


@dataclass(frozen=True)
class Sheet:
    """A table of figures below its title. `notes` are sentences below it; so many of the first columns are `words`."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[SheetRow, ...]
    notes: tuple[str, ...] = ()
    words: int = 0
    heading: str = ""

    def width(self) -> int:
        headings = [name[:_WIDEST_NAME] for name in self.columns]
        widths = [max(map(len, cells)) for cells in zip(headings, *(row.cells for row in self.rows), strict=True)]
        labels = max((min(len(row.label), _WIDEST_NAME) for row in self.rows), default=0)
        return labels + sum(widths) + GAP * len(widths)

    def parts(self, width: int) -> list[Sheet]:
        """Sheets that are no wider than that, where one column is: as few as can be, as it is or turned."""
        whole = [self] if self.words else self._cut(width)
        if len(whole) == 1 or len(self.columns) < 3:
            return whole
        rows = (SheetRow(name, tuple(row.cells[index] for row in self.rows)) for index, name in enumerate(self.columns))
        turned = Sheet(self.title, tuple(row.label for row in self.rows), tuple(rows))._cut(width)  # columns as rows
        return turned if len(turned) < len(whole) else whole

    def _cut(self, width: int) -> list[Sheet]:
        """As many columns at a time as fit, and of the rows those that have something there."""

        def only(first: int, last: int) -> Sheet:
            rows = (SheetRow(row.label, row.cells[first:last], row.style, row.ruled) for row in self.rows)
            return Sheet(self.title, self.columns[first:last], tuple(row for row in rows if any(row.cells)))

        pieces, first = [], 0
        while first < len(self.columns):
            number = 1
            while first + number < len(self.columns) and only(first, first + number + 1).width() <= width:
                number += 1
            pieces.append(only(first, first + number))
            first += number
        return pieces

    def as_table(self) -> pages.Table:
        columns = ((self.heading, False), *((name, index >= self.words) for index, name in enumerate(self.columns)))
        lit = frozenset(index for index, row in enumerate(self.rows) if row.ruled and row.style != "dim")
        return pages.Table(self.title, columns, tuple((row.label, *row.cells) for row in self.rows), lit, bold="totals")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        layout = Terminal(options.max_width, options.ascii_only)
        if self.title:
            yield Text(layout.clean(self.title), style="bold")
        for index, part in enumerate(self.parts(options.max_width) if self.rows else ()):
            if index:
                yield ""
            yield layout.table([self.heading, *part.columns[: part.words]], part.columns[part.words :], part.rows)
        yield from map(layout.note, self.notes)


@dataclass(frozen=True)
class Terminal:
    """A page of the terminal: so many columns, and perhaps no character beyond ASCII."""

    width: int
    ascii_only: bool

    def table(self, words: Sequence[str], numbers: Sequence[str], rows: Iterable[SheetRow] = ()) -> Table:
        """A table: columns of words that may wrap, then right-aligned columns that do not."""
        table = Table(
            box=box.SIMPLE_HEAD, show_edge=False, padding=(0, GAP - 1, 0, 0), pad_edge=False, header_style="bold"
        )
        for title in words:
            table.add_column(self.text(title), overflow="fold")
        for title in numbers:  # in lines where it is long
            lines = [title[first : first + _WIDEST_NAME] for first in range(0, len(title), _WIDEST_NAME)]
            heading = Text("\n").join(map(self.text, lines or [""]))
            table.add_column(heading, justify="right", no_wrap=True)
        for row in rows:
            if row.ruled:
                table.add_section()
            table.add_row(*map(self.text, [row.label, *row.cells]), style=row.style)
        return table

    def wrapped(self, words: str, indent: int, style: str = "", further: int = 2) -> Iterator[Text]:
        """Lines that fit, those after the first set in further; what is longer than a line, a name, stays whole."""
        lines = whole_words(self.clean(words), self.width, indent, indent + further)
        return (Text(line, style=style, no_wrap=True, overflow="ignore") for line in lines)

    def note(self, words: str) -> Any:
        return Text(self.clean(words), style="dim")

    def text(self, words: str) -> Any:
        return Text(self.clean(words))

    def clean(self, words: str) -> str:
        """Characters that the terminal has; a name from outside may hold control characters."""
        words = "".join(letter if letter.isprintable() else "?" for letter in words)
        # In a formula, 2d·k, the dot is a product; elsewhere it stands between words.
        words = re.sub(r"(?<=\w)·(?=\w)", "*", words) if self.ascii_only else words
        return words.translate(_ASCII).encode("ascii", "replace").decode() if self.ascii_only else words


@dataclass(frozen=True)
class Drawing:
    """What chooses its form when it learns how wide the terminal is: `draw` yields it for a page."""

    draw: Callable[[Terminal], RenderResult]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from self.draw(Terminal(options.max_width, options.ascii_only))


_Arguments = ParamSpec("_Arguments")


def drawing(function: Callable[Concatenate[Terminal, _Arguments], RenderResult]) -> Callable[_Arguments, Drawing]:
    """Make a function that draws on a page one whose result waits until the page is known."""

    @wraps(function)
    def waiting(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> Drawing:
        return Drawing(lambda page: function(page, *args, **kwargs))

    return waiting


def plain_table(*columns: tuple[str, bool], rows: Iterable[Sequence[str | Text]] = (), gap: int = GAP) -> Table:
    """A table of (heading, whether it holds figures) columns without frames; without any heading, no row of them."""
    shown = any(heading for heading, _ in columns)
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold", show_header=shown)
    for heading, figures in columns:
        table.add_column(heading, justify="right" if figures else "left", no_wrap=figures, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table
