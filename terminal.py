"""Output of the command line, without control characters from files. rich is imported only when it is needed."""

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
    """Print a message on stderr, with GPTKIT_DEBUG=1 also the traceback, and exit."""
    if os.environ.get("GPTKIT_DEBUG") == "1":
        traceback.print_exc()
    complain(message)
    raise typer.Exit(code)


def complain(message: str) -> None:
    """Print lines on stderr. The first begins with "gptkit:", and the others are indented."""
    first, _, rest = message.partition("\n")
    lines = [f"gptkit: {printable(first)}", *(f"  {printable(line)}" for line in rest.split("\n") if line)]
    if sys.stderr.isatty():  # programs get whole lines, which they can search
        lines = [part for line in lines for part in wrapped(line, shutil.get_terminal_size().columns)]
    typer.echo("\n".join(lines), err=True)


def wrapped(line: str, width: int) -> list[str]:
    """Break a line between words into lines of at most `width` characters. Longer words, such as paths, stay whole."""
    if len(line) <= width:
        return [line]
    whole = {"break_long_words": False, "break_on_hyphens": False, "replace_whitespace": False}
    return textwrap.wrap(line, max(width, 20), subsequent_indent="    ", **whole) or [line]  # type: ignore[arg-type]


def printable(line: str) -> str:
    """Escape the control characters in a line. A name from a file may contain any, also commands for the terminal."""
    return line if line.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)


def print_json(obj: Any) -> None:
    """Print a JSON value on stdout, indented, in ASCII and never coloured."""
    sys.stdout.write(json.dumps(obj, indent=2, allow_nan=False) + "\n")


def answer(as_json: bool, data: Callable[[], Any], report: Callable[[], Any], quiet: bool = False, **how: Any) -> None:
    """Print a command's result: `data()` as JSON if `as_json`, and otherwise `report()` unless `quiet`.

    `how` are arguments of `Console.print`.
    """
    if as_json:
        print_json(data())
    elif not quiet:
        console().print(report(), **how)


def give_up_stdout() -> None:
    """Redirect stdout to /dev/null after an error, since buffered output would fail again at exit."""
    with suppress(OSError):
        sys.stdout.flush()
        return
    with suppress(OSError):  # in a notebook or a test, stdout may not be a file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def console(markup: bool = False) -> Console:
    """Return a console for standard output, which prints "?" in place of control characters in a text.

    It adds colours on a terminal, unless NO_COLOR is set. Its width is that of the terminal or COLUMNS, or 80 if stdout
    is not a terminal. Use `markup` only for text that comes from gptkit alone.
    """
    from rich.console import Console
    from rich.segment import Segment

    class StandardOutput(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # rich would exit with 1; see `commands.base`

        def render(self, *args: Any, **kwargs: Any) -> Iterable[Segment]:
            for text, style, control in super().render(*args, **kwargs):
                # A character is replaced by one character, because the widths of columns are already computed.
                yield Segment("".join(c if c.isprintable() or c == "\n" else "?" for c in text), style, control)

    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 80
    colours: Any = None if os.environ.get("NO_COLOR") else "auto"
    return StandardOutput(width=width, highlight=False, markup=markup, emoji=False, color_system=colours)


@contextmanager
def progress_bar(what: str, quiet: bool = False) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar if stderr is a terminal.

    Yield a function to call with the bytes done since its last call, and the total in bytes, or 0 if it is unknown.
    """
    if quiet or not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task(what, total=None)

    def advance(done: int, total: int) -> None:
        bar.start()  # not earlier: downloads have their own bars, and two bars would overwrite each other
        bar.update(task, advance=done, total=total or None)

    try:
        yield advance
    finally:
        bar.stop()


def say(lines: list[str], quiet: bool) -> None:
    """Print lines on standard output. They are never cut or wrapped, since they contain file names."""
    if not quiet:
        typer.echo("\n".join(map(printable, lines)))


@contextmanager
def status(what: str, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Show a status line if stderr is a terminal. Yield a function that changes its text."""
    if quiet or not sys.stderr.isatty():
        yield lambda text: None
        return
    from rich.console import Console

    live = Console(stderr=True).status(what)

    def tell(text: str) -> None:
        live.start()  # not earlier, as in `progress_bar`
        live.update(f"{what}: {text}")

    try:
        yield tell
    finally:
        live.stop()
