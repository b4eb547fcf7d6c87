"""The width of a feed-forward, and of each expert in a mixture.

Wider, exact: new units whose columns in down_proj are zero, so that nothing of them gets out (Net2Net 1511.05641).
Their rows in up_proj and gate_proj are those of old units, so that training reaches the zeros.

Narrower, exact: units go that nothing comes out of, because their column in down_proj is zero, or what goes into it is.
Otherwise the least important ones go: with a text those that the others can best make up for, down_proj being fitted
again to give from the rest what it gave from all (ridge regression on the text's activations; Hassibi & Stork 1993);
without one (--approximate) those of the smallest product of the norms of their weights. "N:active" keeps those that are
most active on the text, as they are, and tells which (Minitron 2407.14679).
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from msgspec.structs import replace

from ...architectures.obstacles import ranges
from ...components import FACTS, ModelSpec
from ...errors import SwapRefused
from ..base import Guarantee, Index, Model, Swapped, Tensor, padded, taken
from ..fits.scratch import Scratch
from ..layerwise import Inner, by_weights, experts, largest, one_or_all, with_blocks
from ..options import FEED_FORWARD, Option
from ..registry import Asked, Clears, Swap, active
from .mlp import dense_of, with_dense


def _widths(spec: ModelSpec) -> set[int | None]:
    """How wide feed-forwards are."""
    return {block.feed_forward.intermediate_size for block in spec.blocks}


def _resize_feed_forward(spec: ModelSpec, asked: Asked, active: bool = False) -> Swapped:
    """The tree with feed-forwards of another width, in the layers asked for; `active` keeps the most active units."""
    size = asked.number("a width")
    none = f"the hidden size of these feed-forwards is {size} already"
    layers = asked.those(spec, lambda block: dense_of(block).intermediate_size != size, none, "Give another dimension.")
    inner = [each for layer in layers for each in experts(spec.blocks[layer], layer)]
    changed = {layer: replace(dense_of(spec.blocks[layer]), intermediate_size=size) for layer in layers}
    new = with_blocks(spec, {layer: with_dense(spec.blocks[layer], dense) for layer, dense in changed.items()})
    summary: dict[str, Any] = {"intermediate_size": [one_or_all(each.units for each in inner), size]}
    tensors: dict[str, Tensor] = {}
    for each in inner:
        if each.units < size:  # out of more units nothing comes
            tensors |= {name: taken(name, padded(each.units, size, repeat=True)) for name in each.up}
            tensors[each.down] = taken(each.down, padded(each.units, size), 1)
    shrinking = [each for each in inner if each.units > size]
    if not shrinking:
        return Swapped(new, "exact", tensors, summary)
    guarantee, narrow, how = _narrowed(shrinking, size, asked, active)
    return Swapped(new, guarantee, tensors | narrow, {**summary, **how})


# --- narrower ---------------------------------------------------------------------------------------------------------


def _narrowed(
    inner: Sequence[Inner], size: int, asked: Asked, active: bool
) -> tuple[Guarantee, dict[str, Tensor], dict[str, Any]]:
    """Fewer units: the dead ones go first, and exactly. (What is guaranteed, the tensors, the record.)"""
    silent = {}
    for each in inner:
        every = np.ones(each.units, dtype=bool)
        silent[each.path] = asked.weights.ask(partial(_dead, inner=each), ~every, every)
    alive = {each.path: each.units - int(silent[each.path].sum()) for each in inner}
    short = [each for each in inner if alive[each.path] > size]
    tensors: dict[str, Tensor] = {}
    if not short:
        for each in inner:  # all that are alive, and the first of the dead ones as far as there is room
            tensors |= _kept_units(each, largest(-silent[each.path].astype(float), size))
        return "exact", tensors, {"method": "dead units"}
    if asked.approximate:
        for each in inner:
            alike = np.ones(each.units)
            weights = asked.weights.ask(partial(by_weights, inner=each), alike, alike)
            tensors |= _kept_units(each, largest(np.where(silent[each.path], -1.0, weights), size))
        return "approximate", tensors, {"method": "norms of weights"}
    if active:
        scores, stay = _activities(inner, asked), {}
        for each in inner:
            index = largest(np.where(silent[each.path], -1.0, scores[each.path]), size)
            stay[each.path] = ranges(index.tolist())
            tensors |= _kept_units(each, index)
        return "approximate", tensors, {"method": "activity", "kept": stay}
    if asked.calibration is None:
        first = short[0].path
        reason = (
            f"{first} has {alive[first]} units that affect the output, and gptkit needs a text to measure "
            "which ones matter least"
        )
        hint = (
            f"Keep {alive[first]} or more, give a text with --calibrate FILE, or use --approximate to choose units by"
        )
        hint += " their weights."
        raise SwapRefused(reason, hint)
    scratch = Scratch.by("pruning.units", asked.calibration(), inner, size)
    for each in inner:
        tensors |= scratch.waiting((*each.up, each.down, *([each.down_bias] if each.record.down_bias else [])))
    return "approximate", tensors, {"method": "activations, ridge refit"}


def _activities(inner: Sequence[Inner], asked: Asked) -> dict[str, np.ndarray]:
    """How active each unit is on the text, by the path of its feed-forward."""
    calibration = asked.text("how active units are is seen")

    def question(model: Model) -> dict[str, np.ndarray]:
        from ..fits.pruning import unit_activity

        return unit_activity(model, calibration, inner)

    return asked.weights.run(question)


def _dead(model: Model, inner: Inner) -> np.ndarray:
    """For each unit whether nothing comes out of it; the first of what reads the input is what is activated."""
    silent: np.ndarray = np.asarray(~model.wide(inner.down).any(axis=0))
    for name in inner.inputs if FACTS[inner.record.activation].zero else inner.inputs[1:]:
        nothing = ~model.wide(f"{inner.path}.{name}.weight").any(axis=1)
        if inner.record.up_bias:
            nothing &= model.wide(f"{inner.path}.{name}.bias") == 0
        silent |= nothing
    return silent


def _kept_units(inner: Inner, index: Index) -> dict[str, Tensor]:
    """The tensors of some units alone."""
    tensors: dict[str, Tensor] = {name: taken(name, index) for name in inner.up}
    return tensors | {inner.down: taken(inner.down, index, 1)}


def _examples(spec: ModelSpec) -> tuple[str, ...]:
    """Widths worth trying."""
    width = max(block.feed_forward.intermediate_size for block in spec.blocks)
    return (str(width + 16), *([str(width * 3 // 4)] if width >= 4 else []))


ORDER = 150
OPTIONS = (
    Option(
        "intermediate",
        FEED_FORWARD,
        3,
        "The width of the feed-forward (intermediate size), such as 1024. For fewer units, 1024:active "
        "keeps those with the largest activations; without :active, gptkit chooses units that the others "
        "can replace, and fits the weights to a text.",
        "N | N:active",
        parts={"": ("dimensions", _widths)},
    ),
)
_entry = partial(
    Swap,
    option="intermediate",
    apart=True,
    each_stack=True,
    takes="a feed-forward of m units",
    by_layer=True,
    calibrated=True,
)
SWAPS = (
    _entry(
        form="N:active",
        gives="the N most active of them, as they are",
        needs="a text to choose by; exact where nothing comes out of the others",
        source="Minitron 2407.14679",
        reshape=lambda spec, asked: _resize_feed_forward(spec, asked.before_colon(), active=True),
        examples=lambda spec: tuple(f"{value}:active" for value in _examples(spec)[1:]),
    ),
    _entry(
        form="N",
        gives="a feed-forward of N units",
        needs="a larger width, or units that nothing comes out of; otherwise a text to choose and fit by",
        source="Net2Net 1511.05641; narrower: Hassibi & Stork 1993 (Optimal Brain Surgeon), ridge regression",
        reshape=_resize_feed_forward,
        cheaper=active,
        examples=_examples,
        clears=(Clears("*.intermediate_size", "intermediate={theirs}"),),
    ),
)
