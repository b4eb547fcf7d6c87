"""Tables of numbers that fit the width of the terminal (`Sheet`). Numbers are never wrapped or cut."""

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

GAP = 3  # blanks between two columns of a table, of which rich draws one itself
_ASCII = str.maketrans({"×": "x", "–": "-", "−": "-", "·": "-", "…": ".", "²": "^2", "³": "^3"})
"""Replacements for terminals that have only ASCII."""
_WIDEST_NAME = 24  # longer names are folded; most of these are folders


def indented(text: str, indent: int = 10) -> list[str]:
    """Break a sentence into lines of up to 80 characters, all indented by `indent` spaces."""
    return textwrap.wrap(text, 80, initial_indent=" " * indent, subsequent_indent=" " * indent)


def whole_words(line: str, width: int, first: int, rest: int) -> list[str]:
    """Break a line of text between words into lines of up to `width` characters.

    `first` is the indent of the first line, and `rest` that of the others.
    """
    return textwrap.TextWrapper(width, " " * first, " " * rest, break_long_words=False, break_on_hyphens=False).wrap(
        line
    )


@dataclass(frozen=True)
class SheetRow:
    """A row of a `Sheet`."""

    label: str
    cells: tuple[str, ...]  # one per column
    style: str | None = None  # one of rich's: "bold", "dim"
    ruled: bool = False  # whether there is a line above the row


@dataclass(frozen=True)
class Sheet:
    """A table of numbers. Its first column has the labels of the rows."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[SheetRow, ...]
    notes: tuple[str, ...] = ()  # sentences below the table
    words: int = 0  # the number of columns at the start that contain words; the others contain figures
    heading: str = ""  # the title of the column of labels

    def width(self) -> int:
        """Return the width of the table in characters."""
        headings = [name[:_WIDEST_NAME] for name in self.columns]
        widths = [max(map(len, cells)) for cells in zip(headings, *(row.cells for row in self.rows), strict=True)]
        labels = max((min(len(row.label), _WIDEST_NAME) for row in self.rows), default=0)
        return labels + sum(widths) + GAP * len(widths)

    def parts(self, width: int) -> list[Sheet]:
        """Return the table as one or several tables of up to `width` characters.

        Rows and columns are exchanged if that gives fewer tables.
        """
        whole = [self] if self.words else self._cut(width)
        if len(whole) == 1 or len(self.columns) < 3:
            return whole
        rows = (SheetRow(name, tuple(row.cells[index] for row in self.rows)) for index, name in enumerate(self.columns))
        turned = Sheet(self.title, tuple(row.label for row in self.rows), tuple(rows))._cut(width)
        return turned if len(turned) < len(whole) else whole

    def _cut(self, width: int) -> list[Sheet]:
        """Divide the columns over several tables of up to `width` characters.

        A table omits rows that have no text in its columns.
        """

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
        """Return this table for an HTML page, with totals in bold."""
        columns = ((self.heading, False), *((name, index >= self.words) for index, name in enumerate(self.columns)))
        lit = frozenset(index for index, row in enumerate(self.rows) if row.ruled and row.style != "dim")
        return pages.Table(self.title, columns, tuple((row.label, *row.cells) for row in self.rows), lit, bold="totals")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        terminal = Terminal(options.max_width, options.ascii_only)
        if self.title:
            yield Text(terminal.clean(self.title), style="bold")
        for index, part in enumerate(self.parts(options.max_width) if self.rows else ()):
            if index:
                yield ""
            yield terminal.table([self.heading, *part.columns[: part.words]], part.columns[part.words :], part.rows)
        yield from map(terminal.note, self.notes)


@dataclass(frozen=True)
class Terminal:
    """The width of the terminal that a report is drawn for, and whether it has only ASCII characters."""

    width: int  # in characters
    ascii_only: bool

    def table(self, words: Sequence[str], numbers: Sequence[str], rows: Iterable[SheetRow] = ()) -> Table:
        """Return a table of the library rich.

        It has the columns `words`, which may wrap, and then the right-aligned columns `numbers`. The first cell of a
        row is its label.
        """
        table = Table(
            box=box.SIMPLE_HEAD, show_edge=False, padding=(0, GAP - 1, 0, 0), pad_edge=False, header_style="bold"
        )
        for title in words:
            table.add_column(self.text(title), overflow="fold")
        for title in numbers:  # a long title is broken into lines
            lines = [title[first : first + _WIDEST_NAME] for first in range(0, len(title), _WIDEST_NAME)]
            heading = Text("\n").join(map(self.text, lines or [""]))
            table.add_column(heading, justify="right", no_wrap=True)
        for row in rows:
            if row.ruled:
                table.add_section()
            table.add_row(*map(self.text, [row.label, *row.cells]), style=row.style)
        return table

    def wrapped(self, words: str, indent: int, style: str = "", further: int = 2) -> Iterator[Text]:
        """Yield the text in lines that fit the terminal. All lines but the first are indented by `further` more.

        A word that is longer than a line is not broken.
        """
        lines = whole_words(self.clean(words), self.width, indent, indent + further)
        return (Text(line, style=style, no_wrap=True, overflow="ignore") for line in lines)

    def note(self, words: str) -> Any:
        """Return a note in a dim style."""
        return Text(self.clean(words), style="dim")

    def text(self, words: str) -> Any:
        return Text(self.clean(words))

    def clean(self, words: str) -> str:
        """Return text without control characters, which names from files can contain.

        If the terminal supports only ASCII, other characters are replaced.
        """
        words = "".join(letter if letter.isprintable() else "?" for letter in words)
        # In a formula, 2d·k, the dot is a product; elsewhere it stands between words.
        words = re.sub(r"(?<=\w)·(?=\w)", "*", words) if self.ascii_only else words
        return words.translate(_ASCII).encode("ascii", "replace").decode() if self.ascii_only else words


@dataclass(frozen=True)
class Drawing:
    """A report that is drawn when rich prints it, because only then the width of the terminal is known."""

    draw: Callable[[Terminal], RenderResult]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from self.draw(Terminal(options.max_width, options.ascii_only))


_Arguments = ParamSpec("_Arguments")


def drawing(function: Callable[Concatenate[Terminal, _Arguments], RenderResult]) -> Callable[_Arguments, Drawing]:
    """Decorate a function that draws a report on a `Terminal`, its first argument.

    The decorated function does not take a terminal. It returns a `Drawing`, which rich can print on any terminal.
    """

    @wraps(function)
    def waiting(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> Drawing:
        return Drawing(lambda terminal: function(terminal, *args, **kwargs))

    return waiting


def plain_table(*columns: tuple[str, bool], rows: Iterable[Sequence[str | Text]] = (), gap: int = GAP) -> Table:
    """Return a table for rich without lines. A column is (heading, whether it contains numbers)."""
    shown = any(heading for heading, _ in columns)
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold", show_header=shown)
    for heading, figures in columns:
        table.add_column(heading, justify="right" if figures else "left", no_wrap=figures, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table
