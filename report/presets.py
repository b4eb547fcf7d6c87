"""The list of presets, for the terminal and for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..analysis.parameters import count
from ..architectures import architecture_of
from ..architectures.presets import Preset
from .sheets import GAP, Layout

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

__all__ = ["PresetTable", "preset_json", "preset_table"]


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


def preset_table(presets: Sequence[Preset]) -> PresetTable:
    """A row a preset: its name, its parameters, and where it lies on the hub (other spellings are in the JSON)."""
    rows = []
    for preset in presets:
        told = preset_json(preset)
        rows.append((preset.name, str(told["family"]), f"{told['parameters']:,}", preset.repo or "not published"))
    return PresetTable(tuple(rows))


class PresetTable:
    """A renderable that leaves out columns where the terminal has no room for them."""

    def __init__(self, rows: tuple[tuple[str, str, str, str], ...]) -> None:
        self.rows = rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.table import Table

        layout = Layout(options.max_width, options.ascii_only)
        widths = [max(map(len, column)) for column in zip(*self.rows, strict=True)]
        gap = GAP - 1  # the longest repository just fits 80 columns

        def fits(columns: Sequence[int]) -> bool:
            return sum(widths[column] + gap for column in columns) - gap <= options.max_width

        columns = next((each for each in ((0, 1, 2, 3), (0, 2, 3), (0, 2)) if fits(each)), (0, 2))
        titles = ("preset", "family", "parameters", "repository")
        table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold")
        for column in columns:
            right = titles[column] == "parameters"
            table.add_column(
                layout.text(titles[column]), justify="right" if right else "left", no_wrap=right, overflow="fold"
            )
        for row in self.rows:
            table.add_row(*(layout.text(row[column]) for column in columns))
        yield table
