"""The command demo, a tour on the samples."""

from pathlib import Path

import typer

from ..terminal import console
from .base import QUIET, command, option


@command("gptkit demo --keep tour")
def demo(
    keep: Path | None = option(
        "",
        "Write the checkpoints of the tour to this folder, such as tour, and keep them. By default, gptkit "
        "deletes them at the end.",
    ),
    quiet: bool = QUIET,
) -> None:
    """Take a tour of one minute on the sample models: count, convert, verify, swap, generate."""
    from ..report.demo import tour

    shown = console(markup=True)
    shown.quiet = quiet
    if not tour(shown, keep):
        raise typer.Exit(3)
