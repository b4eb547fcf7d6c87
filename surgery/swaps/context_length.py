"""The context that a tree is for: the number, and the rows of a table of positions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from msgspec.structs import replace

from ...analysis.costs import usual_context
from ...components import LearnedPositions, ModelSpec, Rotary
from ...errors import SwapRefused
from ..base import Array, Moved, Promise, Swapped
from ..layerwise import unknown
from ..options import POSITIONS, Option
from ..registry import Asked, Clears, Step, Swap


def longer_table(table: Array, length: int) -> Array:
    """A table with rows appended: the same rows backwards, then forwards again, and so on. The seam is smooth, and
    every row is one that the model knows (own; Longformer, 2004.05150, starts over from the first row).
    """
    there = np.concatenate((table, table[::-1]))
    return there[np.arange(length) % len(there)]


def _padded_table(table: Array, length: int) -> Array:
    """A table with copies of its last row appended."""
    return table[np.minimum(np.arange(length), len(table) - 1)]


def first_rows(table: Array, length: int) -> Array:
    """A table cut."""
    return table[:length]


def _behind(table: Array, move: Callable[[Array], Array], offset: int) -> Array:
    """A table whose rows behind the first `offset` are moved."""
    return np.concatenate([table[:offset], move(table[offset:])])


def _to_context(spec: ModelSpec, asked: Asked) -> Swapped:
    """Another context length; of a table of positions, other rows: exact up to the shorter of the two."""
    length = asked.number("a context length", most=10**9)
    table, now = spec.positions, spec.context_length
    if now == length and (table is None or table.length == length):
        raise SwapRefused(f"its context is {length:,} tokens already")
    new, summary = replace(spec, context_length=length), {"from": now, "to": length}
    notes: tuple[str, ...] = ()
    if table is not None and not isinstance(table, LearnedPositions):
        raise unknown("the model", table, "a table of positions")
    if table is None or table.length == length:
        rotary = any(isinstance(block.attention.position, Rotary) for block in spec.blocks)
        if rotary and now is not None and length > now:
            notes = ("nothing but the number changes: --rope-scaling makes rotary positions for a longer context",)
        return Swapped(new, "exact", {}, summary, notes)
    if length < table.length:
        move, rows = first_rows, "cut"
    elif asked.approximate:
        move, rows = _padded_table, "copies of the last"
    else:
        move, rows = longer_table, "the table backwards and forwards"
    if length > table.length:
        notes = (f"exact up to {table.length:,} tokens; the rows after them, {rows}, are to be trained",)
    beyond = partial(_behind, move=partial(move, length=length), offset=table.offset)
    moved = {"positions.weight": Moved("positions.weight", beyond if table.offset else partial(move, length=length))}
    new, promise = replace(new, positions=replace(table, length=length)), Promise(length=min(length, table.length))
    return Swapped(new, "exact", moved, {**summary, "rows": rows}, notes, promise)


def _back_to_context(before: ModelSpec, asked: Asked) -> Step | None:
    """The context as it was; rows that were cut do not come back."""
    old, table = before.context_length, before.positions
    length = asked.number("a context length", most=10**9)
    if old is None or (table is not None and (table.length != old or length < old)):
        return None
    return Step("context", str(old))


def examples(spec: ModelSpec) -> Sequence[str]:
    """Twice and half of what there is."""
    length = spec.context_length or (spec.positions.length if spec.positions is not None else None)
    return () if length is None or length > 2**20 else (str(2 * length), str(max(length // 2, 1)))


ORDER = 65
OPTIONS = (
    Option(
        "context",
        POSITIONS,
        5,
        "The length of the position table, or of the context.",
        "N",
        parts={"": ("positions", lambda spec: {usual_context(spec)})},
    ),
)
SWAPS = (
    Swap(
        option="context",
        form="N",
        takes="context",
        gives="a longer or shorter context",
        needs="nothing; with a table of positions, exact up to the shorter length",
        source="derived for gptkit, after Beltagy et al. 2004.05150",
        reshape=_to_context,
        examples=examples,
        clears=tuple(Clears(path, "context={theirs}") for path in ("context_length", "positions.length")),
        inverse=_back_to_context,
    ),
)
