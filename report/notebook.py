"""The display of gptkit's results in a notebook, as the tables that commands print, and a progress line."""

import importlib
import io
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, Group, RenderableType

from ..analysis.params import ModelCount
from ..terminal import printable, status
from .quantities import decimal_bytes

_WIDTH = 100  # characters in a line
_OFTEN = 0.1  # the least seconds between two changes of a line of progress
_BLOCK = '<pre style="white-space: pre; overflow-x: auto; line-height: 1.3; font-family: monospace">{code}</pre>'
"""The part of rich's HTML that is used. Its colours are those of the notebook."""


def html(value: Any) -> str:
    """Return a result, an instance of a subclass of `display.Shown`, as HTML with all text escaped."""
    console = Console(file=io.StringIO(), record=True, width=_WIDTH, highlight=False, markup=False, emoji=False)
    kind = next(kind.__name__ for kind in type(value).__mro__ if kind.__name__ in DRAWN)
    console.print(Group(*DRAWN[kind](value)), crop=False)
    return console.export_html(code_format=_BLOCK, inline_styles=True)


def _counts(counts: list[ModelCount]) -> Iterator[RenderableType]:
    from .costs import cost_sheets
    from .counts import parameter_table

    yield parameter_table(counts)
    asked = next((model.figures.asked for model in counts if model.figures is not None), None)
    for sheet in cost_sheets(counts, asked) if asked else ():
        yield from ("", sheet)


def _by(module: str, function: str) -> Callable[[Any], Iterable[RenderableType]]:
    """Return a function that draws a value with `function` of `report.module`, which is imported at the first call."""

    def drawn(value: Any) -> Iterable[RenderableType]:
        result = getattr(importlib.import_module(f".{module}", __package__), function)(value)
        return map(printable, result) if isinstance(result, list) else [result]

    return drawn


DRAWN: dict[str, Callable[[Any], Iterable[RenderableType]]] = {
    "ModelSpec": _by("tree", "tree_drawing"),
    "ModelCount": lambda count: _counts([count]),
    "Counts": _counts,
    "ParameterCount": _by("counts", "count_sheet"),
    "Comparison": _by("comparison", "comparison_table"),
    "Recommendation": _by("recommendation", "recommendation_table"),
    "Diff": _by("diff", "diff_report"),
    "Audit": _by("audit", "audit_report"),
    "Verification": _by("verification", "verification_report"),
    "Checkpoint": _by("checkpoints", "load_summary"),
    "Conversion": _by("checkpoints", "conversion_lines"),
    "Ablation": _by("ablation", "ablation_report"),
    "Scaling": _by("scaling", "scaling_report"),
    "Evaluation": _by("evaluation", "evaluation_report"),
    "Healed": _by("healing", "healing_report"),
    "SwapResult": _by("surgery", "swap_lines"),
}
"""The functions that draw values, by the name of the value's class. Names avoid importing all of these classes."""


@contextmanager
def progress(what: str = "working") -> Iterator[Callable[..., None]]:
    """Show a line of progress, and yield a function for the argument `progress` of gptkit's functions.

    In a notebook the line is below the cell, and in a terminal on stderr. Elsewhere no line is shown. gptkit's
    functions report words, or the number of bytes since their last report, with or without the total.

        with gptkit.progress("converting") as progress:
            gptkit.convert("sample:falcon", "falcon-local", progress=progress)

    Args:
        what: the first words of the line.
    """
    with _line(what) as show:
        done, last = 0, 0.0

        def tell(now: int | str, total: int = 0) -> None:
            nonlocal done, last
            if isinstance(now, int):
                done += now
            if time.monotonic() - last < _OFTEN:
                return
            last = time.monotonic()
            words = (
                now
                if isinstance(now, str)
                else f"{decimal_bytes(done)}{f' of {decimal_bytes(total)}' if total else ''}"
            )
            show(printable(words))

        yield tell
        show(f"done, {decimal_bytes(done)}" if done else "done")


@contextmanager
def _line(what: str) -> Iterator[Callable[[str], None]]:
    """Show a line that begins with `what`, and yield a function that replaces the rest of the line."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if not hasattr(shell, "kernel"):
        with status(what, quiet=False) as tell:
            yield tell
        return
    shown = importlib.import_module("IPython.display")
    handle = shown.display({"text/plain": what}, raw=True, display_id=True)
    yield lambda words: handle.update({"text/plain": f"{what}: {words}"}, raw=True)
