"""demo: a tour on the samples."""

from pathlib import Path

import typer

from ..terminal import console
from .base import command, option


@command("gptkit demo --keep tour")
def demo(keep: Path | None = option("", "Keep the converted checkpoints in this folder.")) -> None:
    """Take a tour on the trained samples: count, convert, verify, swap, verify again, generate."""
    from ..report.demo import tour

    if not tour(console(markup=True), keep):
        raise typer.Exit(3)
