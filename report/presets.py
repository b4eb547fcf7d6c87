"""The list of presets, for the terminal and for programs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from rich.console import RenderResult
from rich.table import Table

from ..analysis.parameters import count
from ..architectures import architecture_of
from ..architectures.presets import Preset
from .sheets import GAP, Drawing, Layout

__all__ = ["preset_json", "preset_table"]


def preset_json(preset: Preset) -> dict[str, Any]:
    """Plain JSON values; the parameters are an integer."""
    architecture = architecture_of(preset.config)
    return {
        "name": preset.name,
        "aliases": list(preset.aliases),
        "family": architecture.name,
        "parameters": count(architecture.spec(preset.config)).total,
        "repo": preset.repo,
        "source": preset.source,
    }


def preset_table(presets: Sequence[Preset]) -> Drawing:
    """A row a preset: its name, its parameters, and where it lies on the hub (other spellings are in the JSON).

    Columns are left out where the terminal has no room for them.
    """
    told = ((preset, preset_json(preset)) for preset in presets)
    rows = [
        (preset.name, str(each["family"]), f"{each['parameters']:,}", preset.repo or "not published")
        for preset, each in told
    ]
    return Drawing(partial(_table, rows))


def _table(rows: Sequence[tuple[str, str, str, str]], layout: Layout) -> RenderResult:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    gap = GAP - 1  # the longest repository just fits 80 columns

    def fits(columns: Sequence[int]) -> bool:
        return sum(widths[column] + gap for column in columns) - gap <= layout.width

    columns = next((each for each in ((0, 1, 2, 3), (0, 2, 3), (0, 2)) if fits(each)), (0, 2))
    titles = ("preset", "family", "parameters", "repository")
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold")
    for column in columns:
        right = titles[column] == "parameters"
        table.add_column(
            layout.text(titles[column]), justify="right" if right else "left", no_wrap=right, overflow="fold"
        )
    for row in rows:
        table.add_row(*(layout.text(row[column]) for column in columns))
    yield table
