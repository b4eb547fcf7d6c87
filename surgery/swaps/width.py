"""Change the width of a feed-forward, or of each expert in a mixture.

A unit is one element of the intermediate dimension.

A wider feed-forward is exact: the columns of new units in down_proj are zero, so the output is unchanged (Net2Net
1511.05641). Their rows in up_proj and gate_proj are copies of old units, so that training can change the zeros.

A narrower one is exact if only units without output are removed, whose column in down_proj or whose input is zero.
Otherwise the least important units are removed. With a text, these are the units that the others can best replace, and
down_proj is fitted again (ridge regression on the text's activations; Hassibi & Stork 1993). Without a text
(--approximate), they are the units whose weights have the smallest product of norms. "N:active" keeps the units that
are most active on the text, does not change their weights, and records their numbers (Minitron 2407.14679).
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
    """Return the different widths (intermediate sizes) of a model's feed-forwards."""
    return {block.feed_forward.intermediate_size for block in spec.blocks}


def _resize_feed_forward(spec: ModelSpec, asked: Asked, active: bool = False) -> Swapped:
    """Change the width of the feed-forwards in the chosen layers.

    With `active`, the intermediate elements (units) that are most active on a text stay, and nothing is fitted.
    """
    size = asked.number("a width")
    none = f"the width of these feed-forwards is {size} already"
    layers = asked.those(spec, lambda block: dense_of(block).intermediate_size != size, none, "Give another width.")
    mlps = [mlp for layer in layers for mlp in experts(spec.blocks[layer], layer)]
    changed = {layer: replace(dense_of(spec.blocks[layer]), intermediate_size=size) for layer in layers}
    new = with_blocks(spec, {layer: with_dense(spec.blocks[layer], dense) for layer, dense in changed.items()})
    summary: dict[str, Any] = {"intermediate_size": [one_or_all(mlp.units for mlp in mlps), size]}
    tensors: dict[str, Tensor] = {}
    for mlp in mlps:
        if mlp.units < size:  # the new units have no output
            tensors |= {name: taken(name, padded(mlp.units, size, repeat=True)) for name in mlp.up}
            tensors[mlp.down] = taken(mlp.down, padded(mlp.units, size), 1)
    shrinking = [mlp for mlp in mlps if mlp.units > size]
    if not shrinking:
        return Swapped(new, "exact", tensors, summary)
    guarantee, narrow, how = _narrowed(shrinking, size, asked, active)
    return Swapped(new, guarantee, tensors | narrow, {**summary, **how})


# --- narrower feed-forwards -------------------------------------------------------------------------------------------


def _narrowed(
    mlps: Sequence[Inner], size: int, asked: Asked, active: bool
) -> tuple[Guarantee, dict[str, Tensor], dict[str, Any]]:
    """Reduce feed-forwards to `size` intermediate elements. Return the guarantee, the new tensors and the record.

    Elements whose output is always zero are removed first. If only such elements are removed, the result is exact.
    """
    silent = {}
    for mlp in mlps:
        all_units = np.ones(mlp.units, dtype=bool)
        silent[mlp.path] = asked.weights.ask(partial(_dead, inner=mlp), ~all_units, all_units)
    alive = {mlp.path: mlp.units - int(silent[mlp.path].sum()) for mlp in mlps}
    crowded = [mlp for mlp in mlps if alive[mlp.path] > size]
    tensors: dict[str, Tensor] = {}
    if not crowded:
        for mlp in mlps:  # all live units, then the first dead ones
            tensors |= _remaining_units(mlp, largest(-silent[mlp.path].astype(float), size))
        return "exact", tensors, {"method": "dead units"}
    if asked.approximate:
        for mlp in mlps:
            equal = np.ones(mlp.units)
            weights = asked.weights.ask(partial(by_weights, inner=mlp), equal, equal)
            tensors |= _remaining_units(mlp, largest(np.where(silent[mlp.path], -1.0, weights), size))
        return "approximate", tensors, {"method": "norms of weights"}
    if active:
        scores, stay = _activities(mlps, asked), {}
        for mlp in mlps:
            index = largest(np.where(silent[mlp.path], -1.0, scores[mlp.path]), size)
            stay[mlp.path] = ranges(index.tolist())
            tensors |= _remaining_units(mlp, index)
        return "approximate", tensors, {"method": "activity", "kept": stay}
    if asked.calibration is None:
        first = crowded[0].path
        reason = (
            f"{first} has {alive[first]} units that affect the output, and gptkit needs a text to measure "
            "which ones matter least"
        )
        hint = (
            f"Keep {alive[first]} or more, give a text with --calibrate FILE, or use --approximate to choose units by"
        )
        hint += " their weights."
        raise SwapRefused(reason, hint)
    scratch = Scratch.by("pruning.units", asked.calibration(), mlps, size)
    for mlp in mlps:
        tensors |= scratch.waiting((*mlp.up, mlp.down, *([mlp.down_bias] if mlp.record.down_bias else [])))
    return "approximate", tensors, {"method": "activations, ridge refit"}


def _activities(mlps: Sequence[Inner], asked: Asked) -> dict[str, np.ndarray]:
    """Return the activity of each intermediate element on the text, by the path of its feed-forward.

    See `pruning.unit_activity`.
    """
    calibration = asked.text("choosing the units to remove")

    def question(model: Model) -> dict[str, np.ndarray]:
        from ..fits.pruning import unit_activity

        return unit_activity(model, calibration, mlps)

    return asked.weights.run(question)


def _dead(model: Model, inner: Inner) -> np.ndarray:
    """Return for each intermediate element whether it never affects the output.

    Either its column of down_proj is zero, or it is itself always zero.
    """
    silent: np.ndarray = np.asarray(~model.wide(inner.down).any(axis=0))
    for name in inner.inputs if FACTS[inner.record.activation].zero else inner.inputs[1:]:
        nothing = ~model.wide(f"{inner.path}.{name}.weight").any(axis=1)
        if inner.record.up_bias:
            nothing &= model.wide(f"{inner.path}.{name}.bias") == 0
        silent |= nothing
    return silent


def _remaining_units(inner: Inner, index: Index) -> dict[str, Tensor]:
    """Return the tensors of a feed-forward with only the intermediate elements in `index`."""
    tensors: dict[str, Tensor] = {name: taken(name, index) for name in inner.up}
    return tensors | {inner.down: taken(inner.down, index, 1)}


def _examples(spec: ModelSpec) -> tuple[str, ...]:
    """Return the widths that `gptkit swaps` tries on a model."""
    width = max(block.feed_forward.intermediate_size for block in spec.blocks)
    return (str(width + 16), *([str(width * 3 // 4)] if width >= 4 else []))


ORDER = 150
OPTIONS = (
    Option(
        "intermediate",
        FEED_FORWARD,
        3,
        "The width of the feed-forward (intermediate size), such as 1024. To reduce it, 1024:active keeps "
        "the units with the largest activations on a text. Without :active, gptkit removes the units that "
        "the others can replace best, and fits the remaining weights on a text.",
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
    exact_where="the dropped units output zeros",
    by_layer=True,
    calibrated=True,
)
SWAPS = (
    _entry(
        form="N:active",
        gives="the N units with the largest outputs, unchanged",
        needs="Needs a calibration text, to choose the units. Exact only if the dropped units output zeros",
        source="Minitron 2407.14679",
        reshape=lambda spec, asked: _resize_feed_forward(spec, asked.before_colon(), active=True),
        examples=lambda spec: tuple(f"{value}:active" for value in _examples(spec)[1:]),
    ),
    _entry(
        form="N",
        gives="a feed-forward of N units",
        needs="Exact for a larger N, or if the dropped units output zeros. Otherwise gptkit chooses units and fits the"
        " weights on a calibration text",
        source="Net2Net 1511.05641 (larger); Hassibi & Stork 1993, Optimal Brain Surgeon (smaller)",
        reshape=_resize_feed_forward,
        cheaper=active,
        examples=_examples,
        clears=(Clears("*.intermediate_size", "intermediate={theirs}"),),
    ),
)
