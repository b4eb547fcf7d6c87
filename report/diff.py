"""The report of `diff`: a verdict, its reasons, tables by component or layer, and the tensors that changed most."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import RenderResult
from rich.text import Text

from ..components.ranges import number_ranges, range_label, some_of
from ..converter.dtypes import HF_NAMES
from ..parity.changes import STATUSES, ChangeGroup
from ..version import __version__
from .heatmap import Cell, heatmap
from .pages import Figure, Lines, Page, Section, Table, noted
from .quantities import counted, two_digits
from .rows import By
from .sheets import Sheet, SheetRow, Terminal, drawing

if TYPE_CHECKING:
    from ..parity.changes import Diff, Status, TensorDiff

_MOST_RUNS = 4  # if a tensor has more runs of changed rows, only the number of rows is given
_UNRELATED = 0.2  # below this cosine, neither model was trained from the other
_HEADINGS: dict[Status, str] = {"reshaped": "Of another shape", "only_a": "Only in A", "only_b": "Only in B"}
"""Headings of tensors that cannot be compared."""
_APART: dict[Status, str] = {"only_a": "A", "only_b": "B", "reshaped": "≠"}
"""Texts of the heatmap's cells that have no figure."""
_COLUMNS = ("tensors", "changed", "relative", "cosine", "rank")
_SOME = 5  # the number of tensors listed without --all
_INDENT = 2


# --- in words --------------------------------------------------------------------------------------------------------


def sides(diff: Diff) -> list[str]:
    """Return two lines that describe the compared checkpoints, A and B."""
    lines = []
    for name, side, total in zip("AB", (diff.a, diff.b), diff.parameters, strict=True):
        dtypes = " and ".join(HF_NAMES.get(dtype, dtype) for dtype in sorted(set(side.dtypes.values())))
        kind = f"{side.origin.family or 'no family'} ({side.format})"
        lines.append(f"{name}  {side.reference}: {kind}, {total:,} parameters in {dtypes}")
    return lines


def verdict(diff: Diff) -> str:
    """Return the result of the comparison in one line."""
    number, counts = len(diff.tensors), diff.counts
    tensors = f"all {number:,} tensors" if number > 1 else "the one tensor"
    apart = {_HEADINGS[status]: counts[status] for status in _HEADINGS if counts[status]}
    if diff.same and diff.same_bytes:
        return f"The same: {tensors} to the last bit"
    if diff.same:
        dtype = counts["dtype"]
        how = f", {dtype:,} in another dtype" if dtype else " (zeros or NaN by other bits)"
        return f"The same values: {tensors}{how}"
    rounded, changed, both = diff.rounded, len(diff.changed), number - sum(apart.values())
    if rounded is not None and not apart:
        one, other = ("B", "A") if rounded[1] == "b" else ("A", "B")
        return f"Rounding alone: {one} is {other}, rounded to {HF_NAMES[rounded[0]]}"
    if not both:
        return "Different: the checkpoints have no tensor in common"
    if not changed and not apart:
        return f"Different architectures with the same values: {tensors}"
    if not changed:
        return f"Different: the {counted(both, 'tensor')} of equal shape have the same values"
    of_those = " of those" if changed < both else ""
    size = f", relative change{of_those} {two_digits(diff.all.relative)}" if diff.all.relative else ""
    if changed == both == number:
        return f"Different: {tensors} changed{size}"
    return f"Different: {changed:,} of {counted(both, 'tensor')} {'of equal shape ' * bool(apart)}changed{size}"


def readings(diff: Diff) -> list[str]:
    """Return sentences that interpret the comparison, such as that all changes have a low rank."""
    lines = []
    if not diff.same:
        lines.append(
            "; ".join(f"{number:,} {STATUSES[status]}" for status, number in diff.counts.items() if number) + "."
        )
    # The models are unrelated if most matrices changed, and their cosine is about zero.
    shared = [tensor for tensor in diff.tensors if tensor.shape_a == tensor.shape_b and len(tensor.shape_a or ()) > 1]
    matrices = ChangeGroup("matrices", None, tuple(shared))
    cosine = matrices.cosine if diff.changed else None
    if cosine is not None and abs(cosine) < _UNRELATED and 2 * len(matrices.changed) > len(shared):
        about = round(cosine, 2) + 0.0  # not -0.00
        words = f"The matrices have nothing in common (cosine {about:.2f})"
        lines.append(f"{words}: neither model was trained from the other.")
    elif diff.changed:
        lines += _rank_readings(diff)
    lines += [f"{tensor.name}: {line}" for tensor in diff.tensors for line in _row_readings(tensor)]
    names = [tensor.name for tensor in diff.tensors if tensor.figures is not None and any(tensor.figures.not_finite)]
    if names:
        words = "the figures are of the values that are finite on both sides"
        lines.append(f"NaN or infinite values in {some(names)}: {words}.")
    return lines


def _rank_readings(diff: Diff) -> list[str]:
    low, lines = diff.low_rank, []
    readings = [tensor.reading for tensor in diff.changed if tensor.reading is not None]
    high, unclear = readings.count("high"), readings.count("unclear")
    if low is not None and not low.alone:  # more changed than an adapter changes, so this is no verdict
        matrices = sum(tensor.status == "changed" and len(tensor.shape_a or ()) == 2 for tensor in diff.changed)
        which = counted(matrices, "changed matrix", "changed matrices")
        which = which if low.matrices == matrices else f"{low.matrices:,} of {which}"
        rank = f"rank {low.rank}" if low.rank == 1 or low.matrices == 1 else f"a rank of at most {low.rank}"
        lines.append(f"{which}, in {some(low.modules)}, {'each ' if low.matrices > 1 else ''}by {rank}.")
    elif low is not None:
        which = "the one changed matrix" if low.matrices == 1 else f"all {low.matrices:,} changed matrices"
        if low.unclear:
            which = f"{low.matrices:,} of {low.matrices + low.unclear:,} changed matrices"
        many = "rank" if low.matrices == 1 else "ranks up to"
        lines.append(f"A LoRA-sized update: {which}, in {some(low.modules)}, by {many} {low.rank}.")
    elif high:
        lines.append(f"No LoRA-sized update: {high:,} of {len(readings):,} changed matrices by a high rank.")
    quantised = sum(bool(tensor.quantised) for tensor in diff.changed)
    if quantised:
        lines.append(f"{counted(quantised, 'changed tensor')} quantised: the figures include quantisation error.")
    if unclear:
        matrices_words = counted(unclear, "matrix", "matrices")
        lines.append(f"{matrices_words} changed hardly more than rounding would, so the rank is unknown.")
    return lines


def _row_readings(tensor: TensorDiff) -> list[str]:
    """Return sentences on the changed rows of an embedding table or a head.

    There are some if at most half of the rows changed, or if the number of rows changed.
    """
    figures, tables = tensor.figures, ("embedding.w", "positions.", "head.")
    if figures is None or any(figures.not_finite) or not tensor.name.startswith(tables):
        return []
    if tensor.status == "reshaped":
        assert tensor.shape_a is not None and tensor.shape_b is not None
        rows = f"{tensor.shape_a[0]:,} → {tensor.shape_b[0]:,} rows"
        if not figures.changed:
            return [f"{rows}, common rows are the same"]
        return [f"{rows}, {figures.rows_changed:,} common rows changed, relative {two_digits(figures.relative)}"]
    if tensor.status in ("only_a", "only_b"):
        one, other = ("A", "B") if tensor.status == "only_a" else ("B", "A")
        how = "equal to it" if not figures.changed else f"relative change {two_digits(figures.relative)}"
        return [f"only in {one}, and compared with the embedding of {other}, where the head is tied: {how}"]
    return [_changed_rows(tensor)] if 0 < figures.rows_changed <= figures.rows_all // 2 else []


def _remarks(tensor: TensorDiff) -> list[str]:
    """Return the figures that describe how a tensor changed, as short phrases."""
    figures = tensor.figures
    if figures is None:
        return []
    words = []
    if figures.square > 0 or not any(figures.not_finite):
        words += [f"relative {two_digits(figures.relative)}", f"max |Δ| {two_digits(figures.largest)}"]
        words += [] if figures.cosine is None else [f"cosine {figures.cosine:.5f}"]
    words += _rank_remarks(tensor)
    if figures.rounded is not None:
        one, other = ("B", "A") if figures.rounded[1] == "b" else ("A", "B")
        words.append(f"{one} is {other} rounded to {HF_NAMES[figures.rounded[0]]}")
    words += [] if figures.scale is None else [f"B = {figures.scale:.6g} · A"]
    words += [] if figures.order is None else [f"the same {figures.order} in another order"]
    if 0 < figures.rows_changed < figures.rows_all and figures.order is None:
        words.append(_changed_rows(tensor))
    sides = zip("AB", figures.not_finite, strict=True)
    words += [f"{number:,} of {side}'s values NaN or infinite" for side, number in sides if number]
    if tensor.quantised:
        words.append(f"quantised in {' and '.join(tensor.quantised).upper().replace('AND', 'and')}")
    elif tensor.dtype_a != tensor.dtype_b:
        words.append(f"{tensor.dtype_a} → {tensor.dtype_b}")
    return words


def _rank_remarks(tensor: TensorDiff) -> list[str]:
    """Return the rank of a tensor's change as phrases, or nothing if it is not known or not of interest."""
    rank = None if tensor.figures is None else tensor.figures.rank
    if rank is None or tensor.reading is None:
        return []
    if tensor.reading == "unclear":
        return ["rank unknown: the change is hardly larger than rounding"]
    share = "–" if rank.share is None else ">99.9 %" if 0.999 < rank.share < 1 else f"{100 * rank.share:.1f} %"
    words = f"rank {rank.rank} of {rank.of:,} ({share} of the change)"
    if rank.more or rank.full:
        words = f"rank above {rank.limit} of {rank.of:,}" if rank.more else f"full rank ({rank.of:,})"
    if rank.most is not None and tensor.reading == "high" and rank.most < rank.of // 4:
        return [words, f"99 % of the change in {counted(rank.most, 'direction')}"]
    return [words]


def _changed_rows(tensor: TensorDiff) -> str:
    figures = tensor.figures
    assert figures is not None
    count = f"{figures.rows_changed:,} of {figures.rows_all:,}"
    if len(figures.rows) > _MOST_RUNS:
        return f"{count} rows changed"
    runs = ", ".join(range_label(*run) for run in figures.rows)
    return f"row{'s' if figures.rows_changed > 1 else ''} {runs} changed, {count}"


def _most_changed(diff: Diff) -> list[TensorDiff]:
    """Return the changed tensors, the most changed first.

    Tensors whose relative change is not defined, such as those that were zeros, come before all others.
    """
    return sorted(diff.changed, key=lambda tensor: -math.inf if (size := _relative(tensor)) is None else -size)


def _relative(tensor: TensorDiff) -> float | None:
    return None if tensor.figures is None else tensor.figures.relative


def _shape_lines(diff: Diff, status: Status) -> list[str]:
    """Return lines with the names and shapes of the tensors with this status. Equal tensors of layers share a line."""
    return _folded([tensor for tensor in diff.tensors if tensor.status == status])


def _folded(tensors: Sequence[TensorDiff]) -> list[str]:
    layers_by_line: dict[str, list[int]] = {}
    for tensor in tensors:
        shapes = [" × ".join(map(str, shape)) for shape in (tensor.shape_a, tensor.shape_b) if shape is not None]
        layers = layers_by_line.setdefault(f"{tensor.everywhere}  {' → '.join(shapes)}", [])
        layers += [] if tensor.layer is None else [tensor.layer]
    return [
        f"{line}  (layer{'s' if len(layers) > 1 else ''} {number_ranges(layers)})" if layers else line
        for line, layers in layers_by_line.items()
    ]


def _file_lines(diff: Diff, most: int | None = None) -> list[str]:
    """Return a line for every file without weights that differs, with up to `most` of its differences."""
    lines = []
    for file in diff.files:
        more = 0 if most is None else len(file.told) - most
        words = f"{'; '.join(file.told[:most]) or 'other bytes'}{f'; {more} more' if more > 0 else ''}"
        lines.append(f"{file.name}: {words if file.only is None else f'only in {file.only.upper()}'}")
    return lines


def some(names: Sequence[str], most: int = 4) -> str:
    """Return names as "a, b and c", or the first names and the number of the others if there are more than `most`."""
    if len(names) > most:
        return some_of(names, most)
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


# --- in the terminal -------------------------------------------------------------------------------------------------


@drawing
def diff_report(terminal: Terminal, diff: Diff, by: By = "component", everything: bool = False) -> RenderResult:
    """Yield the report of a comparison for the terminal.

    With `everything`, it lists all tensors, config fields and lines of files that differ.
    """
    for line in sides(diff):
        yield from _wrapped(terminal, line, 0, "dim")
    yield from _wrapped(terminal, verdict(diff), 0, "bold")
    for line in readings(diff):
        yield from _wrapped(terminal, line, _INDENT)
    for heading, lines in _parts(diff, by, everything or by == "tensor"):
        yield ""
        yield from _wrapped(terminal, heading, 0, "bold")
        for part in lines:
            yield from [part] if isinstance(part, Sheet) else _wrapped(terminal, part, _INDENT)
    if diff.notes:
        yield ""
    for line in diff.notes:
        yield from _wrapped(terminal, f"note: {line}", 0, "dim")


def _parts(diff: Diff, by: By, everything: bool) -> Iterator[tuple[str, Sequence[str | Sheet]]]:
    """Yield the parts of the report, as (heading, lines or tables)."""
    if diff.changed and by != "tensor":
        groups = diff.by_layer() if by == "layer" else diff.by_module()
        rows = [SheetRow(_label(group), _group_cells(group)) for group in groups if group.changed]
        lines: list[str | Sheet] = [Sheet("", _COLUMNS, tuple(rows))]
        same = [_label(group) for group in groups if group.same == len(group.tensors)]
        lines += [f"Unchanged: {some(same, 8)}"] if same else []
        layers = [group for group in diff.by_layer() if group.layer is not None and group.relative]
        if by != "layer" and len(layers) > 1:
            most = sorted(layers, key=lambda group: -(group.relative or 0.0))[:3]
            lines.append(
                f"Most in layer {', '.join(f'{group.layer} ({two_digits(group.relative)})' for group in most)}"
            )
        yield "Changed values (figures are of the tensors that changed)", lines
    shown = _most_changed(diff) if everything else _most_changed(diff)[:_SOME]
    if shown:
        part = f" ({len(shown)} of {len(diff.changed)}, most changed first; --all lists all)"
        tensors = [f"{tensor.name}\n{', '.join(_remarks(tensor))}" for tensor in shown]
        yield f"Tensors{part if len(shown) < len(diff.changed) else ''}", tensors
    for status, heading in _HEADINGS.items():
        lines = [*_shape_lines(diff, status)]
        if lines:
            yield heading, lines
    if diff.tree:  # without --all, the fields that change only rounding are counted
        fields = [field for field in diff.tree if everything or not field.rounding]
        where = ["" if field.layers is None else f"  (layers {field.layers})" for field in fields]
        lines = [f"{field.path}: {field.a} → {field.b}{at}" for field, at in zip(fields, where, strict=True)]
        rounding = len(diff.tree) - len(fields)
        lines += [f"{counted(rounding, 'rounding field')}: list with --all"] if rounding else []
        yield "The architectures differ (A → B)", lines
    if diff.files:
        yield "Files other than weights (A → B)", _file_lines(diff, None if everything else _SOME)


def _wrapped(terminal: Terminal, text: str, indent: int, style: str = "") -> Iterator[Text]:
    """Yield the text in lines that fit the terminal. All lines but the first are indented further."""
    first, *more = text.split("\n")
    yield from terminal.wrapped(first, indent, style, _INDENT if indent else 3)
    for line in more:
        yield from terminal.wrapped(line, indent + 2 * _INDENT, style, 0)


def _group_cells(group: ChangeGroup) -> tuple[str, ...]:
    changed = group.changed
    if not changed:
        return (f"{len(group.tensors):,}", "0", "–", "–", "–")
    cosine = "–" if group.cosine is None else f"{group.cosine:.5f}"
    relative = "not finite" if group.not_finite else two_digits(group.relative)
    return (f"{len(group.tensors):,}", f"{len(changed):,}", relative, cosine, _ranks(changed))


def _ranks(changed: Sequence[TensorDiff]) -> str:
    """Return the largest rank of the changes of several tensors, as text.

    It may be "full", or "> N" if a rank is above the limit N of the measurement, or "–" if no rank is known.
    """
    ranks = [(tensor.figures.rank, tensor.reading) for tensor in changed if tensor.figures and tensor.figures.rank]
    above = [rank.limit for rank, _ in ranks if rank.more]
    known = [rank for rank, reading in ranks if reading != "unclear" and rank.rank]  # 0: none above rounding
    if above or not known:
        return f"> {max(above)}" if above else "–"
    largest = f"{'≤ ' if len(known) > 1 else ''}{max(rank.rank for rank in known)}"
    return "full" if any(rank.full for rank in known) else largest


def _label(group: ChangeGroup) -> str:
    return group.name if group.layer is None else f"{group.name} {group.layer}"


# --- the page --------------------------------------------------------------------------------------------------------


def diff_page(diff: Diff) -> Page:
    """Return the HTML page of a comparison."""
    everything = diff.all
    facts = [(STATUSES[status], f"{number:,}") for status, number in diff.counts.items() if number]
    if everything.relative:
        part = "" if len(everything.changed) == len(diff.tensors) else " of the changed"
        facts.append((f"relative change{part}", two_digits(everything.relative)))
    if diff.low_rank is not None:
        facts.append(("largest rank", f"{diff.low_rank.rank:,}"))
    return Page(
        title=f"{diff.a.reference} → {diff.b.reference}",
        subtitle="two checkpoints, tensor by tensor",
        verdict=verdict(diff),
        good=True if diff.same else None,
        facts=(*facts, ("gptkit", __version__)),
        sections=tuple(_sections(diff)),
    )


def _sections(diff: Diff) -> Iterator[Section]:
    lines = [*(line.replace("  ", ": ", 1) for line in sides(diff)), *readings(diff)]
    yield Section("What differs", (Lines(tuple(lines)),))
    if any(map(_compared, diff.by_place())):
        words = Lines(("In these tables relative change, cosine and rank are of the tensors that changed.",))
        yield Section("Where", (_figure(diff.by_place()), words, _group_table("By component", diff.by_module())))
        yield Section("By layer", (_group_table("By layer, and outside of layers", diff.by_layer()),))
    changed = _most_changed(diff)
    if changed:
        rows = []
        for tensor in changed:
            dtypes = dict.fromkeys((tensor.dtype_a, tensor.dtype_b))
            stored = " → ".join(HF_NAMES.get(dtype or "", dtype or "–") for dtype in dtypes)
            rows.append((tensor.name, two_digits(_relative(tensor)), stored, ", ".join(_remarks(tensor))))
        columns = (("tensor", False), ("relative", True), ("stored as", False), ("", False))
        caption = f"{counted(len(rows), 'tensor')} with other values, most changed first"
        yield Section("Tensors", (Table(caption, columns, tuple(rows), folded=True),))
    for status, heading in _HEADINGS.items():
        if lines := _shape_lines(diff, status):
            yield Section(f"Tensors {heading[0].lower()}{heading[1:]}", (Lines(tuple(lines), listed=True),))
    if diff.tree:
        columns = (("field", False), ("layers", False), ("A", False), ("B", False))
        fields = tuple((field.path, field.layers or "", field.a, field.b) for field in diff.tree)
        yield Section("Architectures", (Table("Where the architectures differ", columns, fields),))
    if diff.files:
        yield Section("Files other than weights", (Lines(tuple(_file_lines(diff)), listed=True),))
    yield from noted(diff.notes)


def _compared(group: ChangeGroup) -> bool:
    return any(tensor.status in ("same", "dtype", "rounded", "changed") for tensor in group.tensors)


def _figure(groups: Sequence[ChangeGroup]) -> Figure:
    cells = list(map(_cell, groups))
    places = [group.name if group.layer is None else f"layer {group.layer} {group.name}" for group in groups]
    rows = tuple((place, *_group_cells(group)) for place, group in zip(places, groups, strict=True))
    changed = [index for index, group in enumerate(groups) if group.changed]
    most = max(changed, key=lambda index: _size(groups[index]), default=None)
    apart = any(cell.apart for cell in cells)
    largest = f"Nothing {'of equal shape ' * apart}changed."
    if most is not None:
        largest = f"Largest: {places[most]}, {_group_cells(groups[most])[2]}."
    columns = (("place", False), *((name, True) for name in _COLUMNS))
    marks = " A, B: only on that side; ≠: of another shape." * apart
    return heatmap(
        cells,
        title="Relative change by layer and component",
        summary=f"|B − A| / |A| (Frobenius) of what changed at each place. {largest}{marks}",
        measure="relative change",
        table=Table(f"{counted(len(rows), 'place')} as a table", columns, rows, folded=True),
    )


def _cell(group: ChangeGroup) -> Cell:
    """Return the heatmap's cell for the tensors of one component in one layer.

    A change that is only rounding does not count as a difference.
    """
    name = group.name.replace("_forward", "-forward").replace("_norm", " norm").replace(".", " ")
    changed, kinds = group.changed, {tensor.status for tensor in group.tensors}
    if not _compared(group):
        apart = _APART[kinds.pop()] if len(kinds) == 1 else "≠"
        return Cell(name, group.layer, 0.0, tuple(_folded(group.tensors)[:2]), True, apart)
    words = [f"relative change: {two_digits(group.relative) if changed else '0'}"]
    if changed:
        words += [f"{len(changed)} of {counted(len(group.tensors), 'tensor')} changed"]
        words += [f"{tensor.name.split('.')[-1]}: {', '.join(_remarks(tensor))}" for tensor in changed[:2]]
    return Cell(name, group.layer, _size(group) if changed else 0.0, tuple(words), "changed" in kinds)


def _size(group: ChangeGroup) -> float:
    """Return the relative change of a group, or infinity if it is not defined (a change to NaN, or from zeros)."""
    return float("inf") if group.relative is None or group.not_finite else group.relative


def _group_table(caption: str, groups: Sequence[ChangeGroup]) -> Table:
    rows = tuple((_label(group), *_group_cells(group)) for group in groups)
    lit = frozenset(index for index, group in enumerate(groups) if group.changed)
    lit = lit if len(lit) < len(groups) else frozenset()
    columns = (("", False), *((name, True) for name in _COLUMNS))
    return Table(caption, columns, rows, lit, bold="something changed here")
