"""What the command line writes, nothing in it that a terminal would obey. rich waits until it is needed."""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NoReturn

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.segment import Segment


def fail(message: str, code: int) -> NoReturn:
    """Say why on stderr and exit. The traceback only with GPTKIT_DEBUG=1."""
    if os.environ.get("GPTKIT_DEBUG") == "1":
        traceback.print_exc()
    complain(message)
    raise typer.Exit(code)


def complain(message: str) -> None:
    """Lines on stderr: the first behind our name, what is below it set in."""
    first, _, rest = message.partition("\n")
    lines = [f"gptkit: {printable(first)}", *(f"  {printable(line)}" for line in rest.split("\n") if line)]
    if sys.stderr.isatty():  # not for a program, which looks for a line
        lines = [part for line in lines for part in wrapped(line, shutil.get_terminal_size().columns)]
    typer.echo("\n".join(lines), err=True)


def wrapped(line: str, width: int) -> list[str]:
    """A line in as many as fit the width, between words; a word that is wider, a path, stays whole."""
    if len(line) <= width:
        return [line]
    whole = {"break_long_words": False, "break_on_hyphens": False, "replace_whitespace": False}
    return textwrap.wrap(line, max(width, 20), subsequent_indent="    ", **whole) or [line]  # type: ignore[arg-type]


def printable(line: str) -> str:
    """A line without control characters: a name out of a file may hold anything, terminal commands included."""
    return line if line.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)


def print_json(obj: Any) -> None:
    """One JSON value on stdout, indented and in plain ASCII, for programs rather than people: never coloured."""
    sys.stdout.write(json.dumps(obj, indent=2, allow_nan=False) + "\n")


def answer(as_json: bool, data: Callable[[], Any], report: Callable[[], Any], quiet: bool = False, **how: Any) -> None:
    """Print a command's result: its JSON values, or else what a person reads, who did not ask for quiet."""
    if as_json:
        print_json(data())
    elif not quiet:
        console().print(report(), **how)


def give_up_stdout() -> None:
    """Nothing more can be written there; what is still buffered would fail again at exit."""
    with suppress(OSError):
        sys.stdout.flush()
        return
    with suppress(OSError):  # no file at all, in a notebook or a test
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def console(markup: bool = False) -> Console:
    """Standard output, as wide as the terminal or COLUMNS says, 80 where it is no terminal; without control characters
    but its own, and with NO_COLOR without those. `markup` only for words that are all gptkit's.
    """
    from rich.console import Console
    from rich.segment import Segment

    class StandardOutput(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # rich would exit with 1; see `commands.base`

        def render(self, *args: Any, **kwargs: Any) -> Iterable[Segment]:
            for text, style, control in super().render(*args, **kwargs):
                # One for one, for the widths are settled.
                yield Segment("".join(c if c.isprintable() or c == "\n" else "?" for c in text), style, control)

    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 80
    colours: Any = None if os.environ.get("NO_COLOR") else "auto"
    return StandardOutput(width=width, highlight=False, markup=markup, emoji=False, color_system=colours)


@contextmanager
def progress_bar(what: str, quiet: bool = False) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr where a person is looking; takes (bytes done now, bytes in all, 0 where nobody knows)."""
    if quiet or not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task(what, total=None)

    def advance(done: int, total: int) -> None:
        bar.start()  # not before: downloads have bars of their own, and two at a time overwrite each other
        bar.update(task, advance=done, total=total or None)

    try:
        yield advance
    finally:
        bar.stop()


def say(lines: list[str], quiet: bool) -> None:
    """Lines on standard output, never cut or wrapped: they name files."""
    if not quiet:
        typer.echo("\n".join(map(printable, lines)))


@contextmanager
def status(what: str, quiet: bool) -> Iterator[Callable[[str], None]]:
    """A line on stderr that says what is going on, where a person is looking."""
    if quiet or not sys.stderr.isatty():
        yield lambda text: None
        return
    from rich.console import Console

    live = Console(stderr=True).status(what)

    def tell(text: str) -> None:
        live.start()  # not before, as for the bar
        live.update(f"{what}: {text}")

    try:
        yield tell
    finally:
        live.stop()
