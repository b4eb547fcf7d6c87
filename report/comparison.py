"""What `compare` prints, in the terminal, as Markdown, as CSV and as a page: a star marks rows that differ, or bold."""

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
_GAP = 2  # blank characters between two columns
_MOST_LINES = 4  # a cell that would need more lines than this makes the table a list
MOST_DRAWN = 12  # models whose layers a page draws


@dataclass(frozen=True)
class _ComparedLine:
    """A row as it is shown: its label, a cell a model, whether it is one that differs, and whether it is a cost."""

    label: str
    cells: tuple[str, ...]
    differs: bool
    cost: bool = False


def _lines(comparison: Comparison, rows: Sequence[AspectRow]) -> list[_ComparedLine]:
    return [*(_ComparedLine(row.name, row.words, row.differs) for row in rows), *_cost_lines(comparison)]


def _cost_lines(comparison: Comparison) -> list[_ComparedLine]:
    """The costs, as they are written: parameters to the last one, the rest in four digits."""
    lines = []
    for name, figures in comparison.costs().items():
        words = (
            "{:,}".format
            if name in ("parameters", "active")
            else decimal
            if name.startswith("FLOPs")
            else decimal_bytes
        )
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
    """What rich prints: a column a model where they fit, else a list of aspects with the models that have each."""
    rows = comparison.shown() if rows is None else rows
    names, shown = [model.name for model in comparison.models], _lines(comparison, rows)
    table = _side_by_side(terminal, names, shown)
    yield from [table] if table is not None else _one_below_the_other(terminal, names, shown)
    yield ""
    yield terminal.note(_conditions(comparison))
    if len(names) > 1:
        differ = any(row.differs for row in rows)
        marks = f"{_MARK} marks what differs." if differ else "The models are alike in these rows."
        left = len(comparison.rows) - len(rows)
        yield terminal.note(f"{marks} --all adds {counted(left, 'row')} in which they are alike." if left else marks)
    yield from map(terminal.note, comparison.told)


def _side_by_side(terminal: Terminal, names: Sequence[str], shown: Sequence[_ComparedLine]) -> Grid | None:
    """A column a model; None where a word would have to be broken, or a cell is more lines than can be read."""
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
    """An aspect, and below it each value with the models that have it."""
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
        for value, who in by_value.items():
            table.add_row("", terminal.text(value), terminal.text(", ".join(who)))
        yield table


def shared_out(room: int, columns: Sequence[Sequence[str]]) -> list[int] | None:
    """The widths of columns, with as many cells on one line as can be; None where words break or cells get too tall."""
    widths = [_longest_word(column) for column in columns]
    left = room - sum(widths)
    if left < 0:
        return None
    while left > 0:  # to whichever cell lacks least to stand on one line
        lacking = [
            min((len(cell) - width for cell in column if len(cell) > width), default=left + 1)
            for column, width in zip(columns, widths, strict=True)
        ]
        least = min(lacking)
        if least > left:
            break
        widths[lacking.index(least)] += least
        left -= least
    tall = any(
        len(cell) > _MOST_LINES * width for column, width in zip(columns, widths, strict=True) for cell in column
    )
    return None if tall else widths


def _longest_word(cells: Iterable[str]) -> int:
    return max(len(word) for cell in cells for word in (cell.split() or [""]))


def comparison_markdown(comparison: Comparison, rows: Sequence[AspectRow]) -> str:
    """The table in Markdown; the labels of rows that differ are bold."""
    names = [model.name for model in comparison.models]
    written = [["", *map(_cell, names)], ["---"] * (len(names) + 1)]
    for line in _lines(comparison, rows):
        label = _cell(line.label)
        written.append([f"**{label}**" if line.differs and not line.cost else label, *map(_cell, line.cells)])
    table = "\n".join(f"| {' | '.join(row)} |" for row in written)
    return f"{table}\n\n{_conditions(comparison)}\n"


def _cell(words: str) -> str:
    """Text that stays in its cell: a name out of a file is somebody else's."""
    plain = "".join(letter if letter.isprintable() else "?" for letter in words)
    return "".join(f"\\{letter}" if letter in "\\|*_`<>[]" else letter for letter in plain)


def comparison_csv(comparison: Comparison, rows: Sequence[AspectRow]) -> str:
    """The table as CSV: aspects in words, costs as integers, with a column that says whether a row differs."""
    written = io.StringIO()
    writer = csv.writer(written, lineterminator="\n")
    writer.writerow(["aspect", "differs", *(model.name for model in comparison.models)])
    for row in rows:
        writer.writerow([row.name, "yes" if row.differs else "no", *row.words])
    for name, figures in comparison.costs().items():
        exact = name  # with its unit and conditions, where they are not in the figures
        if name == "weights" or name.startswith("KV"):
            exact = f"{name.replace(',', '')}, bytes in {comparison.dtype if name == 'weights' else comparison.cached}"
        elif name.startswith("FLOPs"):
            exact = f"{name}, {comparison.context} in sight"
        differs = "yes" if len(set(figures)) > 1 else "no"
        writer.writerow([exact, differs, *("" if each is None else each for each in figures)])
    return written.getvalue()


def comparison_page(comparison: Comparison, rows: Sequence[AspectRow]) -> Page:
    """The table of aspects, the costs as bars, the cache by context, and the layers of each model."""
    models = comparison.models
    totals = [model.costs.parameters for model in models]
    size = (
        abbreviated(totals[0])
        if len(set(totals)) == 1
        else f"from {abbreviated(min(totals))} to {abbreviated(max(totals))}"
    )
    many = counted(len(models), "model")
    notes = comparison.told
    if len(models) > MOST_DRAWN:
        notes = (*notes, f"Layers are drawn of the first {MOST_DRAWN} models; gptkit show draws any.")
    # Rows that differ are lit.
    names = [model.name for model in models]
    lit = frozenset(index for index, row in enumerate(rows) if row.differs)
    words, figures = (("component", False), *((name, False) for name in names)), [(name, True) for name in names]
    cells = tuple((row.name, *row.words) for row in rows)
    aspects = Table("Components of each model", words, cells, lit, bold="the models differ in this")
    cells = tuple((line.label, *line.cells) for line in _cost_lines(comparison))
    costs = Table("Costs of each model", (("cost", False), *figures), cells)
    charts = parameter_bars([(model.name, count(model.spec).by_component) for model in models])
    # Where a table of positions is shorter than the context, there are no FLOPs.
    able = [(model.name, model.costs.flops) for model in models if model.sees]
    title = f"FLOPs of a token that sees {comparison.context:,}, by component"
    charts += [bars(able, title=title, what="FLOPs")] if able else []
    layers = [figure for model in models[:MOST_DRAWN] for figure in layer_diagrams(model.spec, model.name)]
    return Page(
        title=many if len(models) > MOST_NAMES else ", ".join(names),
        subtitle=f"{many} side by side, {size} parameters",
        sections=(
            Section("Components", (aspects,)),
            Section("Costs", (Lines((_conditions(comparison),)), costs, *charts)),
            Section("Key-value cache", (cache_chart([(each.name, each.spec) for each in models], comparison.cached),)),
            Section("Layers", tuple(layers), beside=True),
            *noted(notes),
        ),
    )
