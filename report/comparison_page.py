"""The page of `compare`: the table, the costs as bars, the cache by context, and each model's block."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from .. import __version__
from ..analysis.sizes import DTYPES
from .charts import bars, cache_chart, short
from .comparison import conditions, cost_lines
from .pages import Figure, Lines, Page, Section, Table, counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..analysis.compare import Comparison, Row

__all__ = ["comparison_page"]


def comparison_page(found: Comparison, rows: Sequence[Row]) -> Page:
    """The page of a comparison. `rows` are the aspects that are shown."""
    models = [(model.name, model.spec) for model in found.models]
    by_context = cache_chart(models, found.cached if found.cached in DTYPES else "bfloat16")
    notes = found.told()
    totals = [model.costs.parameters for model in found.models]
    size = short(totals[0]) if len(set(totals)) == 1 else f"from {short(min(totals))} to {short(max(totals))}"
    return Page(
        title=", ".join(model.name for model in found.models),
        subtitle=f"{counted(len(models), 'model')} side by side, {size} parameters",
        verdict="",
        good=None,
        facts=(),
        sections=(
            Section("Components", (_aspects(found, rows),)),
            Section("Costs", (Lines((conditions(found),)), _costs(found), *_bars(found))),
            Section("Key-value cache", (by_context,)),
            *(Section(f"A block of {name}", (figure,)) for name, figure in _blocks(found)),
            *((Section("Notes", (Lines(notes, listed=True),)),) if notes else ()),
        ),
        footer=f"Made by gptkit {__version__}. This page asks no server for anything.",
    )


def _aspects(found: Comparison, rows: Sequence[Row]) -> Table:
    """Rows that differ are lit."""
    columns = (("", False), *((model.name, False) for model in found.models))
    lit = frozenset(index for index, row in enumerate(rows) if row.differs)
    return Table("Components of each model", columns, tuple((row.name, *row.words) for row in rows), lit)


def _costs(found: Comparison) -> Table:
    columns = (("", False), *((model.name, True) for model in found.models))
    return Table("Costs of each model", columns, tuple((line.label, *line.cells) for line in cost_lines(found)))


def _bars(found: Comparison) -> Iterator[Figure]:
    """Parameters and FLOPs by component; those without a figure at this context are left out."""
    from ..analysis.parameters import count

    yield bars(
        [(model.name, count(model.spec).by_component) for model in found.models],
        title="Parameters by component",
        what="parameters",
    )
    able = [(model.name, model.costs.flops) for model in found.models if model.sees]
    if able:
        yield bars(able, title=f"FLOPs of a token that sees {found.context:,}, by component", what="FLOPs")


def _blocks(found: Comparison) -> Iterator[tuple[str, Figure]]:
    """The first layer of each model."""
    from .diagram import block_diagram

    for model in found.models:
        yield model.name, block_diagram(model.spec)
