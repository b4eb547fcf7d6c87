"""What tells positions apart: rotary, ALiBi, a learned table, nothing. `context_length` has the length of the table.

From one to another is a start for training but where nothing was told apart before and after. The starts:

- a learned table goes: its mean joins the token embeddings, so that the stream keeps its place (a tied head keeps the
  old table, and is untied);
- rotary positions go: each pair of a head is turned by its mean rotation instead, folded into q (`rope.mean_rotation`);
- a learned table comes: it is zero. Neutral rotary positions turn nothing: a tree without positions in the form that
  llama-like families can hold.

`--approximate` leaves the means out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, Literal

from msgspec.structs import replace

from ...components import ALiBi, Attention, LatentAttention, LayerNorm, LearnedPositions, ModelSpec, Position, Rotary
from ...errors import SwapRefused, UsageError
from ..base import Computed, Filled, Model, Moved, Promise, Swapped, Tensor, Wide
from ..layerwise import unknown, with_mixers
from ..options import POSITIONS, Option
from ..registry import Asked, Clears, Step, Swap
from ..rotation import NEUTRAL, is_neutral, mean_rotation, turned_queries
from ..stream import tables

BASE = 10_000.0
"""RoPE's base (2104.09864)."""


def kind(spec: ModelSpec) -> str:
    """What tells positions apart in a tree: learned, rope, alibi, none; "mixed" where layers differ or there is a table
    besides. Neutral rotary positions tell nothing apart.
    """
    found = {kind_of(each) for each in _positions_in(spec, range(len(spec.blocks)))}
    if spec.positions is not None:
        if not isinstance(spec.positions, LearnedPositions):
            raise unknown("the model", spec.positions, "a table of positions")
        return "learned" if found == {"none"} else "mixed"
    return found.pop() if len(found) == 1 else "mixed"


def kind_of(position: Position | None) -> Literal["rope", "alibi", "none"]:
    """The same of one layer."""
    match position:
        case None:
            return "none"
        case ALiBi():
            return "alibi"
        case Rotary():
            return "none" if is_neutral(position) else "rope"
        case _:
            raise unknown("a layer", position, "positions that it knows")


def _positions_in(spec: ModelSpec, layers: Iterable[int]) -> set[Position | None]:
    """The positions of some layers."""
    return {spec.blocks[layer].attention.position for layer in layers}


# --- from one to another ----------------------------------------------------------------------------------------------


def _to_rope(spec: ModelSpec, asked: Asked) -> Swapped:
    """Rotary positions: of base 10,000, of the base that is asked for, or neutral ones.

    On rotary layers another base is all that changes.
    """
    neutral, base = asked.argument == "neutral", None
    if asked.argument is not None and not neutral:
        try:
            base = float(asked.argument)
        except ValueError:
            base = math.nan
        if not 1 < base < math.inf:
            text = f"--position rope:{asked.argument}"
            raise UsageError(f"{text}: expected a base above 1, as in rope:500000, or rope:neutral")

    def position(layer: int) -> Position:
        attention = spec.blocks[layer].attention
        now = attention.position
        if isinstance(now, Rotary) and neutral:
            return replace(now, scaling=NEUTRAL)
        if isinstance(now, Rotary):
            return replace(now, base=base or now.base, scaling=None if is_neutral(now) else now.scaling)
        if isinstance(attention, LatentAttention):
            raise SwapRefused(
                f"the keys of layer {layer} come from a latent and have no place for rotary positions",
                "--position rope goes before --attention mla.",
            )
        if attention.head_dim % 2:
            raise SwapRefused(
                f"rotary positions turn pairs of elements, and the heads of layer {layer} have {attention.head_dim}",
                f"First --head-dim {attention.head_dim + 1}.",
            )
        return Rotary(dim=attention.head_dim, base=base or BASE, scaling=NEUTRAL if neutral else None)

    chosen = {layer: position(layer) for layer in asked.chosen(spec)}
    hint = "Another base: --position rope:BASE. A longer context: --rope-scaling."
    return _repositioned(spec, asked, chosen, "rope:neutral" if neutral else "rope", hint)


def _to_alibi(spec: ModelSpec, asked: Asked) -> Swapped:
    """ALiBi: as other layers have it, else outside the scale of the scores, as in the paper."""
    others = (block.attention.position for block in spec.blocks)
    alibi = next((each for each in others if isinstance(each, ALiBi)), ALiBi())
    return _repositioned(spec, asked, dict.fromkeys(asked.chosen(spec), alibi), "alibi")


def _to_none(spec: ModelSpec, asked: Asked) -> Swapped:
    """No positions: causal attention alone tells them apart."""
    return _repositioned(spec, asked, dict.fromkeys(asked.chosen(spec)), "none")


def _to_learned(spec: ModelSpec, asked: Asked) -> Swapped:
    """A table of positions, all zero."""
    if asked.layers is not None:
        raise SwapRefused(
            "a table of positions is added to the token embeddings and reaches every layer", "Leave --blocks out."
        )
    if spec.positions is not None:
        raise SwapRefused(
            f"this model has a table of {spec.positions.length:,} positions already", "A longer one: --context N."
        )
    length = spec.context_length if asked.argument is None else asked.number("the table's length", most=10**9)
    if length is None:
        raise SwapRefused("nothing says how many positions the table needs", "Say it: --position learned:LENGTH.")
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
    """Each layer with the positions that are given for it, and the table that is, or none."""
    changed = {layer: each for layer, each in positions.items() if spec.blocks[layer].attention.position != each}
    if not changed and table is None and spec.positions is None:
        where = "these layers" if asked.layers is not None else "its layers"
        raise SwapRefused(f"{where} have these positions already: {to}", hint)
    if spec.positions is not None and asked.layers is not None:
        raise SwapRefused(
            "the table of positions is added to the token embeddings and reaches every layer",
            f"Leave --blocks out, or first --position none and then --position {to} in the layers that need it.",
        )
    attention = {layer: _with_position(layer, spec.blocks[layer].attention, each) for layer, each in changed.items()}
    tensors: dict[str, Tensor] = {}
    for layer in changed if not asked.approximate else ():
        tensors |= _without_rotation(spec, layer, changed[layer])
    after, notes = with_mixers(spec, attention), list[str]()
    if spec.positions is not None:
        tables(spec)  # one joins the other
        after = without_table(after, asked, tensors, notes)
    if table is not None:
        after = replace(after, positions=table, context_length=table.length)
        tensors["positions.weight"] = Filled((table.length, table.size), 0.0, "embedding.weight")
    # Exact where nothing told positions apart before and nothing does after.
    kinds = {kind_of(each) for layer, new in changed.items() for each in (spec.blocks[layer].attention.position, new)}
    exact = kinds <= {"none"} and (
        spec.positions is None
        or asked.weights.zero("positions.weight")
        or (not asked.approximate and asked.weights.ask(_rows_alike, False, True))
    )
    another_base = spec.positions is None and kinds == {"rope"}
    guarantee: Any = "exact" if exact else "approximate" if another_base else "retrained"
    summary = {"from": kind(spec), "to": to, "layers": sorted(changed)}
    return Swapped(after, guarantee, tensors, summary, tuple(notes), Promise(length=table.length if table else None))


def _with_position(layer: int, attention: Attention | LatentAttention, position: Position | None) -> Any:
    """An attention with other positions, and what of its rounding does not go with them as they need it."""
    if isinstance(attention, LatentAttention):
        if isinstance(attention.position, Rotary) != isinstance(position, Rotary):
            raise SwapRefused(
                f"layer {layer} has keys of their own for rotary positions, apart from its latent",
                "--position rope:neutral turns the rotation off and keeps them.",
            )
    elif isinstance(position, ALiBi):
        wide = "repeat" if attention.kv_expansion == "broadcast" else attention.kv_expansion
        return replace(attention, position=position, scores="input", kv_expansion=wide)
    return replace(attention, position=position)


def _without_rotation(spec: ModelSpec, layer: int, after: Position | None) -> dict[str, Tensor]:
    """The queries of a layer whose rotary positions go, turned by their mean rotation. Where ALiBi comes instead it
    draws attention nearer, and so does the mean.
    """
    attention = spec.blocks[layer].attention
    before = attention.position
    if not isinstance(before, Rotary) or is_neutral(before) or kind_of(after) == "rope":
        return {}
    if isinstance(attention, LatentAttention):
        return {}
    factors = mean_rotation(before, spec.context_length, attention.window, 1.0 if isinstance(after, ALiBi) else 0.5)
    made = turned_queries(f"blocks.{layer}.attention", attention, before, factors)
    return {name: Computed(make) for name, make in made.items()}


def _rows_alike(model: Model) -> bool:
    """Whether the table of positions has one row over and over."""
    rows = model.wide("positions.weight")
    return bool((rows == rows[0]).all())


def mean_row(rows: Wide) -> Wide:
    """The mean of a table's rows, and that row itself where all are alike: their sum may round."""
    mean: Wide = rows[0] if (rows == rows[0]).all() else rows.mean(axis=0)
    return mean


def without_table(spec: ModelSpec, asked: Asked, tensors: dict[str, Tensor], notes: list[str]) -> ModelSpec:
    """The tree without its table, whose mean joins the token embeddings."""
    after = replace(spec, positions=None)

    def joining(name: str, there: bool = True) -> Computed:
        def make(model: Model) -> Wide:
            mean = mean_row(model.wide("positions.weight"))
            return model.wide(name) + mean if there else mean

        return Computed(make)

    if asked.approximate or asked.weights.zero("positions.weight"):
        return after
    if asked.weights.ask(lambda model: not mean_row(model.wide("positions.weight")).any(), False, True):
        return after
    norm = spec.embedding.norm
    if norm is None:
        tensors["embedding.weight"] = joining("embedding.weight")
        if spec.head.tied:
            tensors["head.weight"] = Moved("embedding.weight")
            after = replace(after, head=replace(spec.head, tied=False))
            notes.append("the head was untied from the embedding: it needs the table without the mean position")
        return after
    if not isinstance(norm, LayerNorm):
        raise SwapRefused(
            "the mean position joins the token embeddings behind their RMSNorm, which has no bias to hold it",
            "--approximate leaves it out.",
        )
    tensors["embedding.norm.bias"] = joining("embedding.norm.bias", norm.bias)
    return replace(after, embedding=replace(spec.embedding, norm=replace(norm, bias=True)))


# --- the way back -----------------------------------------------------------------------------------------------------


def _back_to_none(before: ModelSpec, asked: Asked) -> Step | None:
    """Of neutral rotary positions or a table of zeros, where there were none."""
    if before.positions is not None or _positions_in(before, asked.chosen(before)) != {None}:
        return None
    table = asked.value.startswith("learned") and asked.argument is not None
    other_length = table and int(asked.argument or 0) != before.context_length
    return None if other_length else asked.again("position", "none")


def _back_to_neutral(before: ModelSpec, asked: Asked) -> Step | None:
    """Of none, where neutral rotary positions were on whole heads."""
    for attention in (before.blocks[layer].attention for layer in asked.chosen(before)):
        if isinstance(attention, LatentAttention) or before.positions is not None:
            return None
        if attention.position != Rotary(dim=attention.head_dim, base=BASE, scaling=NEUTRAL):
            return None
    return asked.again("position", "rope:neutral")


def examples(spec: ModelSpec, form: str) -> tuple[str, ...]:
    """Neutral RoPE where nothing is told apart; a table whose length is said for trees that know none."""
    bare = _positions_in(spec, range(len(spec.blocks))) == {None}
    if form == "rope:neutral":
        return (form,) if kind(spec) == "none" and bare else ()
    return ("learned:64",) if spec.positions is None and spec.context_length is None else ()


entry = partial(Swap, "position", takes="positions")
TRAINED = "to be trained, but where nothing told positions apart before either"
DROPE = "DroPE 2512.12167; the mean rotation is derived for gptkit"
ROPE: dict[str, Any] = {
    "gives": "RoPE",
    "guarantee": "retrained",
    "needs": "heads with an even number of elements",
    "source": "Su et al. 2104.09864",
    "reshape": _to_rope,
    "by_layer": True,
}
LEARNED: dict[str, Any] = {
    "gives": "a table of positions, all zero",
    "needs": TRAINED,
    "source": "derived for gptkit",
    "reshape": _to_learned,
    "inverse": _back_to_none,
}
TO_ROPE = tuple(
    clears
    for step in ("position=rope", "position=rope:neutral")
    for clears in (Clears("*.position", step, theirs=Rotary), Clears("positions", step))
)
"""Where both cost as much, RoPE that turns comes first."""
TO_LEARNED = (
    *(Clears("*.position", ours=turned, theirs=None) for turned in (Rotary, ALiBi)),
    Clears("positions", theirs=LearnedPositions),
)

ORDER = 60
OPTIONS = (
    Option(
        "position",
        POSITIONS,
        1,
        "How tokens know where they are.",
        "rope | alibi | learned | none",
        words="rope = rotary, rotary embeddings, roformer; alibi = linear biases; learned = absolute, learned "
        "absolute, table; none = nope",
    ),
)
SWAPS = (
    entry(
        "rope:neutral",
        gives="RoPE that turns nothing",
        needs=TRAINED,
        source="derived for gptkit: transformers' rope_type linear with factor 1e30",
        reshape=_to_rope,
        examples=partial(examples, form="rope:neutral"),
        by_layer=True,
        inverse=_back_to_none,
    ),
    entry("rope", **ROPE, clears=TO_ROPE),
    entry("rope:BASE", **ROPE),
    entry(
        "alibi",
        gives="ALiBi",
        guarantee="retrained",
        needs="nothing",
        source="Press et al. 2108.12409; the mean rotation is derived for gptkit",
        reshape=_to_alibi,
        clears=(Clears("*.position", theirs=ALiBi), Clears("positions")),
        by_layer=True,
    ),
    entry(
        "none",
        gives="no positions",
        needs=f"{TRAINED}: a table whose rows are alike, neutral RoPE",
        source=DROPE,
        reshape=_to_none,
        clears=(Clears("*.position", theirs=None), Clears("positions", theirs=None)),
        by_layer=True,
        inverse=_back_to_neutral,
    ),
    entry("learned", **LEARNED, clears=TO_LEARNED),
    entry("learned:LENGTH", **LEARNED, examples=partial(examples, form="learned:LENGTH")),
)
