"""The page of `diff`: a heatmap of the relative change by layer and component, and tables of all that differs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..parity.changes import STATUSES
from ..version import __version__
from .diff import COLUMNS, group_cells, label
from .diff_words import (
    DTYPES,
    HEADINGS,
    figure,
    files_told,
    listed,
    most_changed,
    readings,
    relative,
    remarks,
    sides,
    verdict,
)
from .heatmap import Cell, heatmap
from .pages import Figure, Lines, Page, Section, Table, counted, noted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..parity.changes import Diff, Group, Status, TensorDiff

__all__ = ["diff_page"]


APART: dict[Status, str] = {"only_a": "A", "only_b": "B", "reshaped": "≠"}
"""What stands in a cell of the heatmap that has no figure."""


def diff_page(found: Diff) -> Page:
    """The page of a comparison."""
    everything = found.all
    facts = [(STATUSES[status], f"{number:,}") for status, number in found.counts.items() if number]
    if everything.relative:
        part = "" if len(everything.changed) == len(found.tensors) else " of the changed"
        facts.append((f"relative change{part}", figure(everything.relative)))
    if found.low_rank is not None:
        facts.append(("largest rank", f"{found.low_rank.rank:,}"))
    return Page(
        title=f"{found.a.reference} → {found.b.reference}",
        subtitle="two checkpoints, tensor by tensor",
        verdict=verdict(found),
        good=True if found.same else None,
        facts=(*facts, ("gptkit", __version__)),
        sections=tuple(_sections(found)),
    )


def _sections(found: Diff) -> Iterator[Section]:
    words = (*(line.replace("  ", ": ", 1) for line in sides(found)), *readings(found))
    yield Section("What differs", (Lines(words),))
    compared = [group for group in found.by_place() if _compared(group)]
    if compared:
        told = Lines(("In these tables relative change, cosine and rank are of the tensors that changed.",))
        yield Section("Where", (_figure(found.by_place()), told, _groups("By component", found.by_module())))
        yield Section("By layer", (_groups("By layer, and what stands outside of layers", found.by_layer()),))
    changed = most_changed(found)
    if changed:
        yield Section("Tensors", (_tensors(changed),))
    for status, heading in HEADINGS.items():
        lines = listed([each for each in found.tensors if each.status == status])
        if lines:
            yield Section(f"Tensors {heading[0].lower()}{heading[1:]}", (Lines(tuple(lines), listed=True),))
    if found.tree:
        yield Section("Trees", (_tree(found),))
    if found.files:
        yield Section("Files beside the weights", (Lines(tuple(files_told(found)), listed=True),))
    yield from noted(found.notes)


def _compared(group: Group) -> bool:
    return any(each.status in ("same", "dtype", "rounded", "changed") for each in group.tensors)


def _figure(groups: Sequence[Group]) -> Figure:
    cells = [_cell(group) for group in groups]
    rows = tuple((_place(group), *group_cells(group)) for group in groups)
    changed = [group for group in groups if group.changed]
    most = max(changed, key=_size, default=None)
    nothing = f"Nothing {'of one shape ' if any(cell.apart for cell in cells) else ''}changed."
    largest = nothing if most is None else f"Largest: {_place(most)}, {group_cells(most)[2]}."
    told = "A, B: on that side alone; ≠: of another shape."
    apart = f" {told}" if any(cell.apart for cell in cells) else ""
    return heatmap(
        cells,
        title="Relative change by layer and component",
        summary=f"|B − A| / |A| (Frobenius) of what changed at each place. {largest}{apart}",
        measure="relative change",
        table=Table(
            f"{counted(len(rows), 'place')} as a table",
            (("place", False), *((name, True) for name in COLUMNS)),
            rows,
            folded=True,
        ),
    )


def _cell(group: Group) -> Cell:
    """Rounding to a narrower dtype has a colour of its own; a change from zero is beyond all figures."""
    changed = group.changed
    counts = any(each.status == "changed" for each in changed)
    told = [f"relative change: {figure(group.relative) if changed else '0'}"]
    if changed:
        told += [f"{len(changed)} of {counted(len(group.tensors), 'tensor')} changed"]
        told += [f"{each.name.split('.')[-1]}: {', '.join(remarks(each))}" for each in changed[:2]]
    value = _size(group) if changed else 0.0
    name = group.name.replace("_forward", "-forward").replace("_norm", " norm").replace(".", " ")
    if _compared(group):
        return Cell(name, group.layer, value, tuple(told), counts)
    kinds = {each.status for each in group.tensors}
    apart = APART[kinds.pop()] if len(kinds) == 1 else "≠"
    return Cell(name, group.layer, 0.0, tuple(listed(group.tensors)[:2]), True, apart)


def _size(group: Group) -> float:
    """The relative change; what is in no figure (a change to NaN, or from zeros) is beyond all of them."""
    return float("inf") if group.relative is None or group.not_finite else group.relative


def _place(group: Group) -> str:
    return group.name if group.layer is None else f"layer {group.layer} {group.name}"


def _groups(caption: str, groups: Sequence[Group]) -> Table:
    rows = tuple((label(group), *group_cells(group)) for group in groups)
    lit = frozenset(index for index, group in enumerate(groups) if group.changed)
    some = lit if len(lit) < len(groups) else frozenset()
    return Table(caption, (("", False), *((name, True) for name in COLUMNS)), rows, some, bold="something changed here")


def _tensors(changed: Sequence[TensorDiff]) -> Table:
    rows = tuple((each.name, figure(relative(each)), _dtypes(each), ", ".join(remarks(each))) for each in changed)
    columns = (("tensor", False), ("relative", True), ("stored as", False), ("", False))
    return Table(f"{counted(len(rows), 'tensor')} of other values, most changed first", columns, rows, folded=True)


def _dtypes(each: TensorDiff) -> str:
    names = [DTYPES.get(dtype or "", dtype or "–") for dtype in dict.fromkeys((each.dtype_a, each.dtype_b))]
    return " → ".join(names)


def _tree(found: Diff) -> Table:
    rows = tuple((each.path, each.layers or "", each.a, each.b) for each in found.tree)
    columns = (("field", False), ("layers", False), ("A", False), ("B", False))
    return Table("Where the trees differ", columns, rows)
