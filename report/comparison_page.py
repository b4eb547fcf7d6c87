"""The page of `compare`: the table, the costs as bars, the cache by context, and the layers of each model."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING

from .charts import bars, cache_chart, parameter_bars
from .comparison import conditions, cost_lines
from .counts_page import MOST_DIAGRAMS
from .diagram import block_diagram
from .pages import Figure, Lines, Page, Section, Table, counted, noted
from .plots import short

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..analysis.compare import Compared, Comparison, Row

__all__ = ["comparison_page"]

DIFFER = "the models differ in this"
MOST_NAMES = 6
"""Models that a page's title names."""
MOST_DRAWN = 12
"""Models whose layers are drawn."""


def comparison_page(found: Comparison, rows: Sequence[Row]) -> Page:
    """The page of a comparison. `rows` are the aspects that are shown."""
    models = [(model.name, model.spec) for model in found.models]
    totals = [model.costs.parameters for model in found.models]
    size = short(totals[0]) if len(set(totals)) == 1 else f"from {short(min(totals))} to {short(max(totals))}"
    many = counted(len(models), "model")
    notes = found.told()
    if len(models) > MOST_DRAWN:
        notes = (*notes, f"Layers are drawn of the first {MOST_DRAWN} models; gptkit show draws any.")
    return Page(
        title=many if len(models) > MOST_NAMES else ", ".join(model.name for model in found.models),
        subtitle=f"{many} side by side, {size} parameters",
        sections=(
            Section("Components", (_aspects(found, rows),)),
            Section("Costs", (Lines((conditions(found),)), _costs(found), *_bars(found))),
            Section("Key-value cache", (cache_chart(models, found.cached),)),
            Section("Layers", tuple(chain(*map(_layers, found.models[:MOST_DRAWN]))), beside=True),
            *noted(notes),
        ),
    )


def _aspects(found: Comparison, rows: Sequence[Row]) -> Table:
    """Rows that differ are lit."""
    columns = (("component", False), *((model.name, False) for model in found.models))
    lit = frozenset(index for index, row in enumerate(rows) if row.differs)
    return Table("Components of each model", columns, tuple((row.name, *row.words) for row in rows), lit, bold=DIFFER)


def _costs(found: Comparison) -> Table:
    columns = (("cost", False), *((model.name, True) for model in found.models))
    return Table("Costs of each model", columns, tuple((line.label, *line.cells) for line in cost_lines(found)))


def _bars(found: Comparison) -> Iterator[Figure]:
    """Parameters and FLOPs by component; where a table of positions is shorter than the context, there are none."""
    from ..analysis.parameters import count

    yield from parameter_bars([(model.name, count(model.spec).by_component) for model in found.models])
    able = [(model.name, model.costs.flops) for model in found.models if model.sees]
    if able:
        yield bars(able, title=f"FLOPs of a token that sees {found.context:,}, by component", what="FLOPs")


def _layers(model: Compared) -> tuple[Figure, ...]:
    """One for each kind of layer, of the first that is of it."""
    blocks = model.spec.blocks
    kinds = [blocks.index(block) for block in dict.fromkeys(blocks)]
    return tuple(block_diagram(model.spec, layer, model.name) for layer in kinds[:MOST_DIAGRAMS])
