"""The report of `compare`, for the terminal, as Markdown, CSV or a page. It marks rows in which models differ."""

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import RenderResult
from rich.table import Table as Grid
from rich.text import Text

from ..analysis.compare import AspectRow, Comparison
from ..analysis.parameters import count
from .charts import bars, cache_chart, parameter_bars
from .counts_page import MOST_NAMES, layer_diagrams
from .pages import Lines, Page, Section, Table, noted
from .quantities import abbreviated, counted, decimal, decimal_bytes
from .sheets import Terminal, drawing, plain_table

_MARK = "*"
_GAP = 2  # blanks between two columns
_MOST_LINES = 4  # if a cell needs more lines, the table becomes a list
MOST_DRAWN = 12  # the most models whose layers a page draws


@dataclass(frozen=True)
class _ComparedLine:
    """A row of the table of compared models."""

    label: str
    cells: tuple[str, ...]  # one per model
    differs: bool  # whether the models differ in it
    cost: bool = False  # whether it is a cost, and not an aspect of the architecture


def _lines(comparison: Comparison, rows: Sequence[AspectRow]) -> list[_ComparedLine]:
    return [*(_ComparedLine(row.name, row.words, row.differs) for row in rows), *_cost_lines(comparison)]


def _cost_lines(comparison: Comparison) -> list[_ComparedLine]:
    """Return the rows of costs. Numbers of parameters are exact, and all other figures have four digits."""
    lines = []
    for name, figures in comparison.costs().items():
        whole = "{:,}".format if name in ("parameters", "active") else None
        words = whole or (decimal if name.startswith("FLOPs") else decimal_bytes)
        cells = tuple("–" if figure is None else words(figure) for figure in figures)
        lines.append(_ComparedLine(name, cells, len(set(figures)) > 1, True))
    return lines


def _conditions(comparison: Comparison) -> str:
    stored = f"Weights and cache in {comparison.dtype}"
    if comparison.cached != comparison.dtype:
        stored = f"Weights in {comparison.dtype}, cache in {comparison.cached}"
    return f"{stored}; forward FLOPs for a token that sees {comparison.context:,}."


@drawing
def comparison_table(
    terminal: Terminal, comparison: Comparison, rows: Sequence[AspectRow] | None = None
) -> RenderResult:
    """Yield a table with a column per model if the columns fit, or else a list.

    It has the given rows of components (by default those of `Comparison.shown`), and then rows of costs.
    """
    rows = comparison.shown() if rows is None else rows
    names, shown = [model.name for model in comparison.models], _lines(comparison, rows)
    table = _side_by_side(terminal, names, shown)
    yield from [table] if table is not None else _one_below_the_other(terminal, names, shown)
    yield ""
    yield terminal.note(_conditions(comparison))
    if len(names) > 1:
        differ = any(row.differs for row in rows)
        marks = f"{_MARK} marks what differs." if differ else "The models are alike in these rows."
        alike = len(comparison.rows) - len(rows)
        yield terminal.note(f"{marks} --all adds {counted(alike, 'row')} in which they are alike." if alike else marks)
    yield from map(terminal.note, comparison.all_notes)


def _side_by_side(terminal: Terminal, names: Sequence[str], shown: Sequence[_ComparedLine]) -> Grid | None:
    """Return a table with one column per model.

    Return None if the terminal is too narrow for it: a word would be broken, or a cell would have too many lines.
    """
    columns = list(zip(names, *(line.cells for line in shown), strict=True))
    first = max(len(line.label) for line in shown) + len(_MARK) + 1
    widths = shared_out(terminal.width - first - _GAP * len(names), [[*column] for column in columns])
    if widths is None:
        return None
    table = plain_table(gap=_GAP)
    table.show_header = True
    table.add_column("", no_wrap=True, width=first)
    for name, width in zip(names, widths, strict=True):
        table.add_column(terminal.text(name), width=width, overflow="fold")
    for index, line in enumerate(shown):
        if line.cost and not shown[index - 1].cost:
            table.add_row("")
        lit = line.differs and not line.cost
        cells = [f"{_MARK if lit else ' '} {line.label}", *line.cells]
        table.add_row(*map(terminal.text, cells), style="bold" if lit else None)
    return table


def _one_below_the_other(terminal: Terminal, names: Sequence[str], shown: Sequence[_ComparedLine]) -> RenderResult:
    """Yield the comparison as a list, for a narrow terminal.

    Every row of the table becomes a heading. Below it are its different values, each with the models that have it.
    """
    for index, line in enumerate(shown):
        if line.cost and not shown[index - 1].cost:
            yield ""
        if not line.differs:
            yield terminal.text(f"  {line.label}: {line.cells[0]}")
            continue
        yield Text(terminal.clean(f"{' ' if line.cost else _MARK} {line.label}"), style="bold")
        by_value: dict[str, list[str]] = {}
        for name, cell in zip(names, line.cells, strict=True):
            by_value.setdefault(cell, []).append(name)
        table = plain_table(gap=_GAP)
        room = max((terminal.width - 4) // 2, _longest_word(by_value))
        table.add_column(width=2)
        table.add_column(width=min(max(map(len, by_value)), room), overflow="fold")
        table.add_column(overflow="fold")
        for value, having in by_value.items():
            table.add_row("", terminal.text(value), terminal.text(", ".join(having)))
        yield table


def shared_out(room: int, columns: Sequence[Sequence[str]]) -> list[int] | None:
    """Distribute `room` characters over columns of cells, so that most cells fit on one line. Return the widths.

    Return None if a word would be broken, or if a cell would have too many lines.
    """
    widths = [_longest_word(column) for column in columns]
    free = room - sum(widths)
    if free < 0:
        return None
    while free > 0:  # to the cell that needs the least more to stand on one line
        missing = [
            min((len(cell) - width for cell in column if len(cell) > width), default=free + 1)
            for column, width in zip(columns, widths, strict=True)
        ]
        least = min(missing)
        if least > free:
            break
        widths[missing.index(least)] += least
        free -= least
    tall = any(
        len(cell) > _MOST_LINES * width for column, width in zip(columns, widths, strict=True) for cell in column
    )
    return None if tall else widths


def _longest_word(cells: Iterable[str]) -> int:
    return max(len(word) for cell in cells for word in (cell.split() or [""]))


def comparison_markdown(comparison: Comparison, rows: Sequence[AspectRow]) -> str:
    """Return a table in Markdown: the given rows of components, and then costs.

    The label of a component's row is bold if the models differ in it.
    """
    names = [model.name for model in comparison.models]
    written = [["", *map(_cell, names)], ["---"] * (len(names) + 1)]
    for line in _lines(comparison, rows):
        label = _cell(line.label)
        written.append([f"**{label}**" if line.differs and not line.cost else label, *map(_cell, line.cells)])
    table = "\n".join(f"| {' | '.join(row)} |" for row in written)
    return f"{table}\n\n{_conditions(comparison)}\n"


def _cell(words: str) -> str:
    """Escape text for a cell in Markdown. It may be a name from a file, which can contain any character."""
    plain = "".join(letter if letter.isprintable() else "?" for letter in words)
    return "".join(f"\\{letter}" if letter in "\\|*_`<>[]" else letter for letter in plain)


def comparison_csv(comparison: Comparison, rows: Sequence[AspectRow]) -> str:
    """Return a table as CSV: the given rows of components in words, and then costs as integers.

    A column says whether the models differ in a row.
    """
    written = io.StringIO()
    writer = csv.writer(written, lineterminator="\n")
    writer.writerow(["aspect", "differs", *(model.name for model in comparison.models)])
    for row in rows:
        writer.writerow([row.name, "yes" if row.differs else "no", *row.words])
    for name, figures in comparison.costs().items():
        label = name  # with the unit and the conditions, which the figures do not contain
        if name == "weights" or name.startswith("KV"):
            label = f"{name.replace(',', '')}, bytes in {comparison.dtype if name == 'weights' else comparison.cached}"
        elif name.startswith("FLOPs"):
            label = f"{name}, {comparison.context} in sight"
        differs = "yes" if len(set(figures)) > 1 else "no"
        writer.writerow([label, differs, *("" if figure is None else figure for figure in figures)])
    return written.getvalue()


def comparison_page(comparison: Comparison, rows: Sequence[AspectRow]) -> Page:
    """Return the HTML page of a comparison.

    It has a table with the given rows of components, bars of costs, a chart of the cache, and diagrams of layers.
    """
    models = comparison.models
    totals = [model.costs.parameters for model in models]
    size = (
        abbreviated(totals[0])
        if len(set(totals)) == 1
        else f"from {abbreviated(min(totals))} to {abbreviated(max(totals))}"
    )
    many = counted(len(models), "model")
    notes = comparison.all_notes
    if len(models) > MOST_DRAWN:
        notes = (*notes, f"Layers are drawn of the first {MOST_DRAWN} models; gptkit show draws any.")
    names = [model.name for model in models]
    lit = frozenset(index for index, row in enumerate(rows) if row.differs)
    words, figures = (("component", False), *((name, False) for name in names)), [(name, True) for name in names]
    cells = tuple((row.name, *row.words) for row in rows)
    aspects = Table("Components of each model", words, cells, lit, bold="the models differ in this")
    cells = tuple((line.label, *line.cells) for line in _cost_lines(comparison))
    costs = Table("Costs of each model", (("cost", False), *figures), cells)
    charts = parameter_bars([(model.name, count(model.spec).by_component) for model in models])
    # A model whose table of positions is shorter than the context has no FLOPs.
    able = [(model.name, model.costs.flops) for model in models if model.sees]
    title = f"FLOPs of a token that sees {comparison.context:,}, by component"
    charts += [bars(able, title=title, what="FLOPs")] if able else []
    cache = cache_chart([(model.name, model.spec) for model in models], comparison.cached)
    layers = [figure for model in models[:MOST_DRAWN] for figure in layer_diagrams(model.spec, model.name)]
    return Page(
        title=many if len(models) > MOST_NAMES else ", ".join(names),
        subtitle=f"{many} side by side, {size} parameters",
        sections=(
            Section("Components", (aspects,)),
            Section("Costs", (Lines((_conditions(comparison),)), costs, *charts)),
            Section("Key-value cache", (cache,)),
            Section("Layers", tuple(layers), side_by_side=True),
            *noted(notes),
        ),
    )
