"""What a comparison of two checkpoints comes to, in words: for the terminal and for the page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..components.ranges import number_ranges, range_label
from ..parity.changes import STATUSES, Group
from .pages import counted

if TYPE_CHECKING:
    from ..converter.checkpoint import Checkpoint
    from ..parity.changes import Diff, Status, TensorDiff

__all__ = [
    "DTYPES",
    "HEADINGS",
    "figure",
    "files_told",
    "listed",
    "most_changed",
    "readings",
    "relative",
    "remarks",
    "sides",
    "some",
    "tree_told",
    "verdict",
]

MOST_RUNS = 4
"""Runs of rows that are named; of more, how many rows there are."""
UNRELATED = 0.2
"""A cosine below it says that two models were not trained from one another."""
DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}
HEADINGS: dict[Status, str] = {"reshaped": "Of another shape", "only_a": "Only in A", "only_b": "Only in B"}
"""Of tensors that cannot be compared."""


def sides(found: Diff) -> list[str]:
    """Which two were compared."""
    a, b = found.parameters
    return [_side("A", found.a, a), _side("B", found.b, b)]


def _side(name: str, checkpoint: Checkpoint, total: int) -> str:
    dtypes = " and ".join(DTYPES.get(each, each) for each in sorted(set(checkpoint.dtypes.values())))
    kind = f"{checkpoint.origin.family or 'no family'} ({checkpoint.format})"
    return f"{name}  {checkpoint.reference}: {kind}, {total:,} parameters in {dtypes}"


def verdict(found: Diff) -> str:
    """All of it in a line."""
    number, counts = len(found.tensors), found.counts
    tensors = f"all {number:,} tensors" if number > 1 else "the one tensor"
    apart = {HEADINGS[status]: counts[status] for status in HEADINGS if counts[status]}
    if found.same and found.same_bytes:
        return f"The same: {tensors} to the last bit"
    if found.same:
        dtype = counts["dtype"]
        how = f", {dtype:,} in another dtype" if dtype else " (zeros or NaN by other bits)"
        return f"The same values: {tensors}{how}"
    rounded, changed, both = found.rounded, len(found.changed), number - sum(apart.values())
    if rounded is not None and not apart:
        one, other = ("B", "A") if rounded[1] == "b" else ("A", "B")
        return f"Rounding alone: {one} is {other}, rounded to {DTYPES[rounded[0]]}"
    if not both:
        return "Different: no tensor of one has its like in the other"
    if not changed and not apart:
        return f"Different trees of the same values: {tensors}"
    relative = found.all.relative
    size = f", relative change {figure(relative)}" if relative else ""
    of_those = f", relative change of those {figure(relative)}" if relative and changed < both else size
    if not changed:
        told = f"the {counted(both, 'tensor')} of one shape are the same"
    elif changed == both == number:
        told = f"{tensors} changed{size}"
    else:
        told = f"{changed:,} of {counted(both, 'tensor')} {'of one shape ' if apart else ''}changed{of_those}"
    return f"Different: {told}"


def readings(found: Diff) -> list[str]:
    """What the figures come to, in sentences."""
    lines = []
    if not found.same:
        lines.append(
            "; ".join(f"{number:,} {STATUSES[status]}" for status, number in found.counts.items() if number) + "."
        )
    if found.changed:
        cosine = _unrelated(found)
        if cosine is not None:
            about = round(cosine, 2) + 0.0  # not -0.00
            lines.append(f"The matrices have nothing in common (cosine {about:.2f}): neither came from the other.")
        else:
            lines += _rank_readings(found)
    lines += [f"{each.name}: {line}" for each in found.tensors for line in _row_readings(each)]
    names = [each.name for each in found.tensors if each.figures is not None and any(each.figures.not_finite)]
    if names:
        lines.append(
            f"NaN or infinite values in {some(names)}: figures are of the values that are finite on both sides."
        )
    return lines


def _unrelated(found: Diff) -> float | None:
    """The cosine of all matrices of one shape, where most changed and it is about zero."""
    both = [each for each in found.tensors if each.shape_a == each.shape_b and len(each.shape_a or ()) > 1]
    matrices = Group("matrices", None, tuple(both))
    cosine = matrices.cosine
    return cosine if cosine is not None and abs(cosine) < UNRELATED and 2 * len(matrices.changed) > len(both) else None


def _rank_readings(found: Diff) -> list[str]:
    low, lines = found.low_rank, []
    readings = [each.reading for each in found.changed if each.reading is not None]
    high, unclear = readings.count("high"), readings.count("unclear")
    if low is not None and not low.alone:
        lines.append(_by_low_ranks(found))
    elif low is not None:
        which = "the one changed matrix" if low.matrices == 1 else f"all {low.matrices:,} changed matrices"
        if low.unclear:
            which = f"{low.matrices:,} of {low.matrices + low.unclear:,} changed matrices"
        many = "rank" if low.matrices == 1 else "ranks up to"
        lines.append(f"A LoRA-sized update: {which}, in {some(low.modules)}, by {many} {low.rank}.")
    elif high:
        lines.append(f"No LoRA-sized update: {high:,} of {len(readings):,} changed matrices by a high rank.")
    quantised = sum(bool(each.quantised) for each in found.changed)
    if quantised:
        lines.append(f"{counted(quantised, 'changed tensor')} quantised: rounding to few bits is in the figures.")
    if unclear:
        lines.append(f"{counted(unclear, 'matrix', 'matrices')} changed too little beside rounding to tell the rank.")
    return lines


def _by_low_ranks(found: Diff) -> str:
    """The ranks as a plain fact, where more changed than an adapter changes."""
    low = found.low_rank
    assert low is not None
    matrices = sum(each.status == "changed" and len(each.shape_a or ()) == 2 for each in found.changed)
    which = counted(matrices, "changed matrix", "changed matrices")
    which = which if low.matrices == matrices else f"{low.matrices:,} of {which}"
    rank = f"rank {low.rank}" if low.rank == 1 or low.matrices == 1 else f"a rank of at most {low.rank}"
    return f"{which}, in {some(low.modules)}, {'each ' if low.matrices > 1 else ''}by {rank}."


def _row_readings(each: TensorDiff) -> list[str]:
    """Tensors whose rows have names: which changed, where there are few."""
    figures = each.figures
    if figures is None or any(figures.not_finite) or not each.name.startswith(("embedding.w", "positions.", "head.")):
        return []
    if each.status == "reshaped":
        assert each.shape_a is not None and each.shape_b is not None
        rows = f"{each.shape_a[0]:,} → {each.shape_b[0]:,} rows"
        if not figures.changed:
            return [f"{rows}, those in common the same"]
        return [f"{rows}, of those in common {figures.rows_changed:,} changed, relative {figure(figures.relative)}"]
    if each.status in ("only_a", "only_b"):
        one, other = ("A", "B") if each.status == "only_a" else ("B", "A")
        how = "equal to it" if not figures.changed else f"relative change {figure(figures.relative)}"
        return [f"only in {one}, whose counterpart in {other} is the embedding: {how}"]
    return [_rows(each)] if 0 < figures.rows_changed <= figures.rows_all // 2 else []


def remarks(each: TensorDiff) -> list[str]:
    """What is told of one tensor that changed."""
    figures = each.figures
    if figures is None:
        return []
    told = []
    if figures.square > 0 or not any(figures.not_finite):
        told += [f"relative {figure(figures.relative)}", f"max |Δ| {figure(figures.largest)}"]
        told += [] if figures.cosine is None else [f"cosine {figures.cosine:.5f}"]
    told += _rank_told(each)
    if figures.rounded is not None:
        told.append(f"{'B' if figures.rounded[1] == 'b' else 'A'} as {DTYPES[figures.rounded[0]]} rounds")
    if figures.scale is not None:
        told.append(f"B = {figures.scale:.6g} · A")
    if figures.order is not None:
        told.append(f"the same {figures.order} in another order")
    if 0 < figures.rows_changed < figures.rows_all and figures.order is None:
        told.append(_rows(each))
    for side, number in zip("AB", figures.not_finite, strict=True):
        if number:
            told.append(f"{number:,} of {side}'s values NaN or infinite")
    if each.quantised:
        told.append(f"quantised in {' and '.join(each.quantised).upper().replace('AND', 'and')}")
    elif each.dtype_a != each.dtype_b:
        told.append(f"{each.dtype_a} → {each.dtype_b}")
    return told


def _rank_told(each: TensorDiff) -> list[str]:
    """The rank of its change in words, where that says more than its other figures."""
    rank = None if each.figures is None else each.figures.rank
    if rank is None or each.reading is None:
        return []
    if each.reading == "unclear":
        return ["rank not told: too little beside rounding"]
    told = f"rank {rank.rank} of {rank.of:,} ({_share(rank.share)} of the change)"
    told = f"rank above {rank.limit} of {rank.of:,}" if rank.more else f"full rank ({rank.of:,})" if rank.full else told
    if rank.most is not None and each.reading == "high" and rank.most < rank.of // 4:
        return [told, f"99 % of the change in {counted(rank.most, 'direction')}"]
    return [told]


def _rows(each: TensorDiff) -> str:
    figures = each.figures
    assert figures is not None
    count = f"{figures.rows_changed:,} of {figures.rows_all:,}"
    if len(figures.rows) > MOST_RUNS:
        return f"{count} rows changed"
    runs = ", ".join(range_label(*run) for run in figures.rows)
    return f"row{'s' if figures.rows_changed > 1 else ''} {runs} changed, {count}"


def most_changed(found: Diff) -> list[TensorDiff]:
    """Tensors of other values, what cannot be told of first, then by relative change."""
    return sorted(found.changed, key=lambda each: -math.inf if (size := relative(each)) is None else -size)


def relative(each: TensorDiff) -> float | None:
    """A tensor's relative change, where there is one."""
    return None if each.figures is None else each.figures.relative


def listed(tensors: Sequence[TensorDiff]) -> list[str]:
    """Tensors that cannot be compared, those of several layers in a line."""
    folded: dict[tuple[str, str], list[int]] = {}
    for each in tensors:
        name = each.everywhere
        shapes = [" × ".join(map(str, shape)) for shape in (each.shape_a, each.shape_b) if shape is not None]
        folded.setdefault((name, " → ".join(shapes)), []).extend([] if each.layer is None else [each.layer])
    return [f"{name}  {shape}{_in_layers(layers)}" for (name, shape), layers in folded.items()]


def _in_layers(layers: Sequence[int]) -> str:
    if not layers:
        return ""
    return f"  (layer{'s' if len(layers) > 1 else ''} {number_ranges(layers)})"


def tree_told(found: Diff, everything: bool = True) -> list[str]:
    """Where the trees differ; how they round is counted alone unless all is wanted."""
    shown = [each for each in found.tree if everything or not each.rounding]
    lines = [
        f"{each.path}: {each.a} → {each.b}{'' if each.layers is None else f'  (layers {each.layers})'}"
        for each in shown
    ]
    left = len(found.tree) - len(shown)
    return [*lines, *([f"{counted(left, 'field')} of how it rounds: --all"] if left else [])]


def files_told(found: Diff, most: int | None = None) -> list[str]:
    """Small files that differ, and in what; at most so many of a file's lines."""
    lines = []
    for each in found.files:
        if each.only is not None:
            lines.append(f"{each.name}: only in {each.only.upper()}")
            continue
        told = each.told[:most]
        more = f"; {len(each.told) - len(told)} more" if len(told) < len(each.told) else ""
        lines.append(f"{each.name}: {'; '.join(told) or 'other bytes'}{more}")
    return lines


def some(names: Sequence[str], most: int = 4) -> str:
    """As in a, b and c; of many the first ones and how many more."""
    if len(names) > most:
        return f"{', '.join(names[:most])} and {len(names) - most} more"
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def figure(value: float | None) -> str:
    """Two digits: 0.012, 3.1e-05; a dash where it cannot be told."""
    return "–" if value is None else f"{value:.2g}"


def _share(share: float | None) -> str:
    if share is None:
        return "–"
    return ">99.9 %" if 0.999 < share < 1 else f"{100 * share:.1f} %"
