"""The list of presets, for the terminal and for programs."""

from collections.abc import Sequence
from typing import Any

from rich.console import RenderResult

from ..analysis.parameters import count
from ..architectures import architecture_of
from ..architectures.presets import Preset
from .sheets import GAP, Layout, drawing, plain_table


def preset_json(preset: Preset) -> dict[str, Any]:
    """Plain JSON values; the parameters are an integer."""
    architecture = architecture_of(preset.config)
    told: dict[str, Any] = {"name": preset.name, "aliases": list(preset.aliases), "family": architecture.name}
    told["parameters"] = count(architecture.spec(preset.config)).total
    return {**told, "repo": preset.repo, "source": preset.source}


@drawing
def preset_table(page: Layout, presets: Sequence[Preset]) -> RenderResult:
    """A row a preset: its name, its parameters, and where it lies on the hub; as many columns as there is room for."""
    rows = []
    for preset in presets:
        data = preset_json(preset)
        rows.append((preset.name, data["family"], f"{data['parameters']:,}", preset.repo or "not published"))
    gap = GAP - 1  # the longest repository just fits 80 columns
    widths = [max(map(len, column)) + gap for column in zip(*rows, strict=True)]
    some = ((0, 1, 2, 3), (0, 2, 3), (0, 2))
    columns = next((each for each in some if sum(widths[column] for column in each) - gap <= page.width), some[-1])
    titles = [("preset", False), ("family", False), ("parameters", True), ("repository", False)]
    cells = [[page.text(row[column]) for column in columns] for row in rows]
    yield plain_table(*(titles[column] for column in columns), rows=cells, gap=gap)
