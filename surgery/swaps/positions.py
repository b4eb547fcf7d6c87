"""Change the position encoding (rotary, ALiBi, a learned table or none), or the context length of a model.

After a change of the position encoding, the model has to be trained, unless there is no position information before or
after it. gptkit sets the weights so that training has a good start:

- If a position table is removed, its mean row is added to the token embeddings, so that the residual stream keeps its
  mean. (A tied head is untied, and keeps the old token embeddings.)
- If rotary positions are removed, each rotary pair of the queries is rotated by the mean rotation instead, which is
  folded into the weights of q (`rotation.mean_rotation`).
- A new table is zero. Neutral rotary positions ("rope:neutral") rotate nothing. In this form, families like llama can
  express a model without positions.

With a text, the projections after attention are also fitted on it. `--approximate` leaves out that fit and the means.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Literal

import numpy as np
from msgspec.structs import replace

from ...analysis.costs import usual_context
from ...components import ALiBi, LatentAttention, LayerNorm, LearnedPositions, ModelSpec, Position, Rotary
from ...converter.dtypes import Array
from ...errors import SwapRefused, UsageError
from ..base import Computed, Filled, Moved, Promise, Swapped, Tensor, Wide
from ..layerwise import tables, unknown, with_mixers
from ..options import POSITIONS, Option, Parts
from ..refits import with_refits
from ..registry import Asked, Clears, Swap
from .rotation import NEUTRAL, is_neutral, mean_rotation, turned_queries

_BASE = 10_000.0  # RoPE's base (2104.09864)
_TABLE = "positions.weight"


def kind(spec: ModelSpec) -> str:
    """Return the kind of a model's position encoding: "learned", "rope", "alibi", "none", or "mixed" if layers differ.

    RoPE that rotates nothing ("rope:neutral") counts as "none".
    """
    kinds = {_kind_of(block.attention.position) for block in spec.blocks}
    if spec.positions is not None:
        if not isinstance(spec.positions, LearnedPositions):
            raise unknown("the model's position encoding", spec.positions, "a position embedding")
        return "learned" if kinds == {"none"} else "mixed"
    return kinds.pop() if len(kinds) == 1 else "mixed"


def _kind_of(position: Position | None) -> Literal["rope", "alibi", "none"]:
    """Return the kind of a layer's position encoding. RoPE that rotates nothing counts as "none"."""
    match position:
        case None:
            return "none"
        case ALiBi():
            return "alibi"
        case Rotary():
            return "none" if is_neutral(position) else "rope"
        case _:
            raise unknown("a layer's position encoding", position, "RoPE, ALiBi or none")


# --- the position encoding --------------------------------------------------------------------------------------------


def _to_rope(spec: ModelSpec, asked: Asked) -> Swapped:
    """Give the chosen layers RoPE, with the base 10,000 or another base, or "rope:neutral", which rotates nothing.

    If a layer has RoPE already, other settings of its RoPE stay.
    """
    neutral, base = asked.argument == "neutral", None
    if asked.argument is not None and not neutral:
        with suppress(ValueError):
            base = float(asked.argument)
        if base is None or not 1 < base < math.inf:
            text = f"--position rope:{asked.argument}"
            raise UsageError(f"{text}: expected a base above 1, as in rope:500000, or rope:neutral")

    def position(layer: int) -> Position:
        attention = spec.blocks[layer].attention
        now = attention.position
        if isinstance(now, Rotary):
            turning = replace(now, base=base or now.base, scaling=None if is_neutral(now) else now.scaling)
            return replace(now, scaling=NEUTRAL) if neutral else turning
        if isinstance(attention, LatentAttention):
            reason = f"the keys of layer {layer} come from a latent, so they cannot take RoPE"
            hint = "Swap to RoPE first, while the keys are still matrices: put --position rope before --attention mla."
            raise SwapRefused(reason, hint)
        if attention.head_dim % 2:
            raise SwapRefused(
                f"RoPE rotates pairs of dimensions, but the head dimension of layer {layer} is "
                f"{attention.head_dim}, an odd number",
                f"First use --head-dim {attention.head_dim + 1}.",
            )
        return Rotary(dim=attention.head_dim, base=base or _BASE, scaling=NEUTRAL if neutral else None)

    chosen = {layer: position(layer) for layer in asked.chosen(spec)}
    hint = "For another base, use --position rope:BASE; for a longer context, --rope-scaling."
    return _repositioned(spec, asked, chosen, "rope:neutral" if neutral else "rope", hint)


def _to_alibi(spec: ModelSpec, asked: Asked) -> Swapped:
    """Give the chosen layers ALiBi.

    If other layers have ALiBi, the new one has the same settings. Otherwise its bias is not multiplied by the scale of
    the scores, as in the paper.
    """
    present = (block.attention.position for block in spec.blocks)
    alibi = next((position for position in present if isinstance(position, ALiBi)), ALiBi())
    return _repositioned(spec, asked, dict.fromkeys(asked.chosen(spec), alibi), "alibi")


def _to_learned(spec: ModelSpec, asked: Asked) -> Swapped:
    """Give the model a position table of zeros, and remove other position encodings."""
    if asked.layers is not None:
        hint = "Leave --blocks out."
        raise SwapRefused("a position table is added to the token embeddings, so it affects every layer", hint)
    if spec.positions is not None:
        hint = "For a longer table, use --context N."
        raise SwapRefused(f"this model already has a table of {spec.positions.length:,} positions", hint)
    length = spec.context_length if asked.argument is None else asked.number("the table's length", most=10**9)
    if length is None:
        raise SwapRefused(
            "the model states no context length for the position table", "Give one: --position learned:LENGTH."
        )
    table = LearnedPositions(length=length, size=spec.hidden_size)
    return _repositioned(spec, asked, dict.fromkeys(range(len(spec.blocks))), "learned", table=table)


def _repositioned(
    spec: ModelSpec,
    asked: Asked,
    positions: Mapping[int, Position | None],
    to: str,
    hint: str | None = None,
    table: LearnedPositions | None = None,
) -> Swapped:
    """Return the result of a swap that changes the position encoding.

    Args:
        spec: The old model.
        asked: The request.
        positions: The new position encoding of each layer to change.
        to: The name of the new encoding, for messages and the record.
        hint: The hint for the error that nothing would change.
        table: The new position table that is added to the embeddings, or None.
    """
    changed = {layer: new for layer, new in positions.items() if spec.blocks[layer].attention.position != new}
    if not changed and table is None and spec.positions is None:
        where = "these layers" if asked.layers is not None else "all layers"
        raise SwapRefused(f"{where} already have this position encoding: {to}", hint)
    if spec.positions is not None and asked.layers is not None:
        raise SwapRefused(
            "the position table is added to the token embeddings, so it affects every layer",
            f"Leave --blocks out. Or use --position none first, and then --position {to} with --blocks.",
        )
    attention, tensors = dict[int, Any](), dict[str, Tensor]()
    for layer, position in changed.items():
        attention[layer], turned = _with_position(spec, layer, position)
        tensors |= {} if asked.approximate else turned
    after, notes = with_mixers(spec, attention), list[str]()
    if spec.positions is not None:
        tables(spec)  # raises SwapRefused if the table cannot join the embedding
        after = _without_table(after, asked, tensors, notes)
    if table is not None:
        after = replace(after, positions=table, context_length=table.length)
        tensors["positions.weight"] = Filled((table.length, table.size), 0.0, "embedding.weight")
    # The change is exact if there is no position information before and after it.
    kinds = {_kind_of(p) for layer, new in changed.items() for p in (spec.blocks[layer].attention.position, new)}
    exact = kinds <= {"none"} and (
        spec.positions is None
        or asked.weights.zero(_TABLE)
        or (not asked.approximate and asked.weights.ask(lambda model: _alike(model.wide(_TABLE)), False, True))
    )
    another_base = spec.positions is None and kinds == {"rope"}
    guarantee: Any = "exact" if exact else "approximate" if another_base else "retrained"
    summary = {"from": kind(spec), "to": to, "layers": sorted(changed)}
    promise = Promise(length=table.length if table else None)
    return with_refits(Swapped(after, guarantee, tensors, summary, tuple(notes), promise), asked, sorted(positions))


def _with_position(spec: ModelSpec, layer: int, position: Position | None) -> tuple[Any, dict[str, Tensor]]:
    """Return a layer's attention with another position encoding, and the tensors that change.

    ALiBi does not support all settings for how scores are computed and key-value heads are expanded, so it changes
    these settings too. If RoPE is removed, the mean rotation is folded into the queries. If ALiBi replaces RoPE, short
    distances count more in this mean.
    """
    attention, is_alibi = spec.blocks[layer].attention, isinstance(position, ALiBi)
    before, rounding = attention.position, dict[str, Any]()
    if isinstance(attention, LatentAttention):
        if isinstance(before, Rotary) != isinstance(position, Rotary):
            hint = "--position rope:neutral turns the rotation off and keeps these keys."
            raise SwapRefused(
                f"layer {layer} has separate keys for RoPE in addition to its latent, which this swap does not support",
                hint,
            )
        return replace(attention, position=position), {}
    if is_alibi:
        several = attention.kv_expansion == "broadcast"
        rounding = {"scores": "input", "kv_expansion": "repeat" if several else attention.kv_expansion}
    turned: dict[str, Tensor] = {}
    if isinstance(before, Rotary) and not is_neutral(before) and _kind_of(position) != "rope":
        factors = mean_rotation(before, spec.context_length, attention.window, 1.0 if is_alibi else 0.5)
        functions = turned_queries(f"blocks.{layer}.attention", attention, before, factors)
        turned = {name: Computed(make) for name, make in functions.items()}
    return replace(attention, position=position, **rounding), turned


def _alike(rows: Wide) -> bool:
    """Return whether all rows of a table are equal."""
    return bool((rows == rows[0]).all())


def _mean_row(rows: Wide) -> Wide:
    """Return the mean of a table's rows. Equal rows are not summed, since a sum may round."""
    return np.asarray(rows[0] if _alike(rows) else rows.mean(axis=0))


def _without_table(spec: ModelSpec, asked: Asked, tensors: dict[str, Tensor], notes: list[str]) -> ModelSpec:
    """Return the model without its position table. The mean of the table's rows is added to the token embeddings.

    If a norm follows the embedding, the mean is added to the norm's bias instead. New tensors are added to `tensors`,
    and messages for the user to `notes`.
    """
    after = replace(spec, positions=None)

    def joining(name: str, present: bool = True) -> Computed:
        # Positions are added after the embedding's multiplier, which does not apply to a norm's bias.
        factor = spec.embedding.multiplier if spec.embedding.norm is None else 1.0
        return Computed(lambda model: _mean_row(model.wide(_TABLE)) / factor + (model.wide(name) if present else 0))

    if asked.approximate or asked.weights.zero(_TABLE):
        return after
    if asked.weights.ask(lambda model: not _mean_row(model.wide(_TABLE)).any(), False, True):
        return after
    norm = spec.embedding.norm
    if norm is None:
        tensors["embedding.weight"] = joining("embedding.weight")
        if spec.tied:
            tensors["head.weight"] = Moved("embedding.weight")
            after = replace(after, head=replace(spec.has_head(), tied=False))
            notes.append(
                "the head was untied from the embedding, because only the embedding includes the mean position"
            )
        return after
    if not isinstance(norm, LayerNorm):
        reason = (
            "the mean of the position table would have to be added by the RMSNorm after the embedding, which "
            "has no bias"
        )
        raise SwapRefused(reason, "Use --approximate to leave out the mean.")
    tensors["embedding.norm.bias"] = joining("embedding.norm.bias", norm.bias)
    return replace(after, embedding=replace(spec.embedding, norm=replace(norm, bias=True)))


def _examples(spec: ModelSpec, form: str) -> tuple[str, ...]:
    """Return the values that `gptkit swaps` tries on a model, for the swap with the value `form`.

    These are neutral RoPE for a model without positions, and a table for a model without a context length.
    """
    if form == "rope:neutral":
        bare = all(block.attention.position is None for block in spec.blocks)
        return (form,) if bare and spec.positions is None else ()
    return ("learned:64",) if spec.positions is None and spec.context_length is None else ()


_entry = partial(Swap, "position", takes="any position encoding", calibrated=True)
_TRAINED = "Exact only if the model had no position information before; otherwise it needs training"
_TEXT = ". A calibration text gives training a better start"
_DROPE = "DroPE 2512.12167; replacing RoPE by its mean rotation is derived for gptkit"
_ROPE: dict[str, Any] = {
    "gives": "RoPE",
    "guarantee": "retrained",
    "needs": f"Needs an even head dimension{_TEXT}",
    "source": "Su et al. 2104.09864",
    "reshape": _to_rope,
    "by_layer": True,
}
_LEARNED: dict[str, Any] = {
    "gives": "a position table of zeros",
    "needs": _TRAINED + _TEXT,
    "source": "derived for gptkit",
    "reshape": _to_learned,
}
_TO_ROPE = tuple(
    clears
    for step in ("position=rope", "position=rope:neutral")
    for clears in (Clears("*.position", step, theirs=Rotary), Clears("positions", step))
)
"""If RoPE and neutral RoPE cost the same, RoPE comes first, because it is first in this list."""
_TO_LEARNED = (
    *(Clears("*.position", ours=turned, theirs=None) for turned in (Rotary, ALiBi)),
    Clears("positions", theirs=LearnedPositions),
)


# --- the context length -----------------------------------------------------------------------------------------------


def _longer_table(table: Array, length: int) -> Array:
    """Extend a position table to `length` rows: after its rows come the same rows backwards, then forwards, and so on.

    So neighbouring rows stay similar, and the model knows every row. (This is derived for gptkit. Longformer,
    2004.05150, starts again with the first row.)
    """
    period = np.concatenate((table, table[::-1]))
    return period[np.arange(length) % len(period)]


def _first_rows(table: Array, length: int) -> Array:
    """Return the first `length` rows of a position table."""
    return table[:length]


def _after_offset(table: Array, move: Callable[[Array], Array], offset: int) -> Array:
    """Apply `move` to a position table without its first `offset` rows, which are not positions and stay unchanged."""
    return np.concatenate([table[:offset], move(table[offset:])])


def _to_context(spec: ModelSpec, asked: Asked) -> Swapped:
    """Change the context length, and the number of rows of a position table.

    The result is exact up to the shorter of the old and the new length.
    """
    length = asked.number("a context length", most=10**9)
    table, now = spec.positions, spec.context_length
    if now == length and (table is None or table.length == length):
        raise SwapRefused(f"the model's context is already {length:,} tokens")
    new, summary = replace(spec, context_length=length), {"from": now, "to": length}
    notes: tuple[str, ...] = ()
    if table is not None and not isinstance(table, LearnedPositions):
        raise unknown("the model's position encoding", table, "a position embedding")
    if table is None or table.length == length:
        rotary = any(isinstance(block.attention.position, Rotary) for block in spec.blocks)
        if rotary and now is not None and length > now:
            notes = ("only the stated context length changes; to scale RoPE for a longer context, use --rope-scaling",)
        return Swapped(new, "exact", {}, summary, notes)
    move: Callable[..., Array]
    if length < table.length:
        move, rows = _first_rows, "cut"
    elif asked.approximate:
        move, rows = lambda table, length: table[np.minimum(np.arange(length), len(table) - 1)], "copies of the last"
    else:
        move, rows = _longer_table, "the table backwards and forwards"
    if length > table.length:
        notes = (f"exact up to {table.length:,} tokens; the rows after that ({rows}) need training",)
    beyond = partial(_after_offset, move=partial(move, length=length), offset=table.offset)
    moved = {"positions.weight": Moved("positions.weight", beyond if table.offset else partial(move, length=length))}
    new, promise = replace(new, positions=replace(table, length=length)), Promise(length=min(length, table.length))
    return Swapped(new, "exact", moved, {**summary, "rows": rows}, notes, promise)


def _lengths(spec: ModelSpec) -> tuple[str, ...]:
    """Return the values that `gptkit swaps` tries on a model: twice and half of its context length."""
    length = spec.context_length or (spec.positions.length if spec.positions is not None else None)
    return () if length is None or length > 2**20 else (str(2 * length), str(max(length // 2, 1)))


ORDER = 60
_PARTS: Parts = {"": ("positions", lambda spec: {usual_context(spec)})}
OPTIONS = (
    Option(
        "position",
        POSITIONS,
        1,
        "The new position encoding: rope, alibi, learned (a table with a vector for every position) or none.",
        "rope | alibi | learned | none",
        words="rope = rotary, rotary embeddings, roformer; alibi = linear biases; learned = absolute, learned "
        "absolute, table; none = nope",
    ),
    Option(
        "context",
        POSITIONS,
        5,
        "The new longest context of the model in tokens, such as 8192. If the model has learned positions, "
        "their table gets this length.",
        "N",
        parts=_PARTS,
    ),
)
SWAPS = (
    _entry(
        "rope:neutral",
        gives="RoPE whose angles are all 0, which encodes no positions",
        needs=_TRAINED + _TEXT,
        source="derived for gptkit: transformers' rope_type linear with factor 1e30",
        reshape=_to_rope,
        examples=partial(_examples, form="rope:neutral"),
        by_layer=True,
    ),
    _entry("rope", **_ROPE, clears=_TO_ROPE),
    _entry("rope:BASE", **{**_ROPE, "gives": "RoPE with the base BASE"}),
    _entry(
        "alibi",
        gives="ALiBi",
        guarantee="retrained",
        needs=_TEXT.removeprefix(". "),
        source="Press et al. 2108.12409; replacing RoPE by its mean rotation is derived for gptkit",
        reshape=_to_alibi,
        clears=(Clears("*.position", theirs=ALiBi), Clears("positions")),
        by_layer=True,
    ),
    _entry(
        "none",
        gives="no position encoding",
        needs=f"{_TRAINED}. Such models have a table of equal rows, or RoPE whose angles are all 0{_TEXT}",
        source=_DROPE,
        reshape=lambda spec, asked: _repositioned(spec, asked, dict.fromkeys(asked.chosen(spec)), "none"),
        clears=(Clears("*.position", theirs=None), Clears("positions", theirs=None)),
        by_layer=True,
    ),
    _entry("learned", **_LEARNED, clears=_TO_LEARNED),
    _entry(
        "learned:LENGTH",
        **{**_LEARNED, "gives": "a position table of LENGTH rows of zeros"},
        examples=partial(_examples, form="learned:LENGTH"),
    ),
    Swap(
        option="context",
        form="N",
        takes="context length",
        gives="a context length of N tokens",
        needs="With a position table, exact only up to the shorter of the two lengths",
        source="derived for gptkit, after Beltagy et al. 2004.05150",
        reshape=_to_context,
        examples=_lengths,
        clears=tuple(Clears(path, "context={theirs}") for path in ("context_length", "positions.length")),
    ),
)
