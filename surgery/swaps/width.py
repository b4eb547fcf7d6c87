"""The width of a feed-forward, and of each expert in a mixture.

Wider, exact: new units whose columns in down_proj are zero, so that nothing of them gets out (Net2Net 1511.05641).
Their rows in up_proj and gate_proj are those of old units, so that training reaches the zeros.

Narrower, exact: units go that nothing comes out of, because their column in down_proj is zero, or what goes into it is.
Otherwise the least important ones go: with a text those that the others can best make up for, down_proj being fitted
again to give from the rest what it gave from all (ridge regression on the text's activations; Hassibi & Stork 1993);
without one (--approximate) those of the smallest product of the norms of their weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from ...components import FACTS, FeedForward, GatedFeedForward, MixtureOfExperts, ModelSpec
from ...errors import SwapRefused
from ..base import Guarantee, Model, Swapped, Tensor
from ..fits.scratch import Scratch
from ..fits.units import Inner, by_weights, fit, largest
from ..gather import Index, padded, taken
from ..layerwise import one_or_all, replaced, smaller_again, unknown, with_blocks
from ..registry import Asked, Clears, Step, Swap
from ..stream import experts, inner_projections

__all__ = ["SWAPS"]

replace = msgspec.structs.replace


def resize_feed_forward(spec: ModelSpec, asked: Asked) -> Swapped:
    """The tree with feed-forwards of another width, in the layers asked for."""
    size = asked.number("a width")
    layers = [layer for layer in asked.chosen(spec) if spec.blocks[layer].feed_forward.intermediate_size != size]
    if not layers:
        raise SwapRefused(f"the feed-forwards are {size} wide already", "Possible: another width.")
    inner = [
        Inner(path, record, layer)
        for layer in layers
        for path, record in experts(spec.blocks[layer], f"blocks.{layer}")
    ]
    blocks = {
        layer: replaced(
            spec.blocks[layer], feed_forward=resized(f"layer {layer}", spec.blocks[layer].feed_forward, size)
        )
        for layer in layers
    }
    new = with_blocks(spec, blocks)
    summary: dict[str, Any] = {"intermediate_size": [one_or_all(each.units for each in inner), size]}
    tensors = {name: tensor for each in inner if each.units < size for name, tensor in widened(each, size).items()}
    shrinking = [each for each in inner if each.units > size]
    if not shrinking:
        return Swapped(new, "exact", tensors, summary)
    guarantee, narrow, method = narrowed(shrinking, size, asked)
    return Swapped(new, guarantee, tensors | narrow, {**summary, "method": method})


def resized(where: str, feed_forward: Any, size: int) -> Any:
    """The record with another width."""
    match feed_forward:
        case MixtureOfExperts():
            return replace(feed_forward, expert=resized(where, feed_forward.expert, size))
        case FeedForward() | GatedFeedForward():
            return replace(feed_forward, intermediate_size=size)
        case _:
            raise unknown(where, feed_forward, "a feed-forward")


def widened(inner: Inner, size: int) -> dict[str, Tensor]:
    """More units, out of which nothing comes."""
    tensors: dict[str, Tensor] = {name: taken(name, padded(inner.units, size, repeat=True)) for name in inner.up}
    return tensors | {inner.down: taken(inner.down, padded(inner.units, size), 1)}


# --- narrower ---------------------------------------------------------------------------------------------------------


def narrowed(inner: Sequence[Inner], size: int, asked: Asked) -> tuple[Guarantee, dict[str, Tensor], str]:
    """Fewer units: the dead ones go first, and exactly. (What is guaranteed, the tensors, the method.)"""
    silent = {each.path: silent_units(each, asked) for each in inner}
    alive = {each.path: each.units - int(silent[each.path].sum()) for each in inner}
    short = [each for each in inner if alive[each.path] > size]
    tensors: dict[str, Tensor] = {}
    if not short:
        for each in inner:
            tensors |= kept_units(each, alive_first(silent[each.path], size))
        return "exact", tensors, "dead units"
    if asked.approximate:
        for each in inner:
            alike = np.ones(each.units)
            weights = asked.weights.ask(lambda model, each=each: by_weights(model, each), alike, alike)  # type: ignore[misc]
            tensors |= kept_units(each, largest(np.where(silent[each.path], -1.0, weights), size))
        return "approximate", tensors, "norms of weights"
    if asked.calibration is None:
        first = short[0].path
        raise SwapRefused(
            f"{first} has {alive[first]} units in use, and which of them matter least shows on a text alone",
            f"Possible: {alive[first]} or more; --calibrate FILE; --approximate, which goes by the weights.",
        )
    calibration = asked.calibration()
    scratch = Scratch(lambda model: fit(model, inner, size, calibration))
    for each in inner:
        tensors |= scratch.waiting((*each.up, each.down, *([each.down_bias] if each.record.down_bias else [])))
    return "approximate", tensors, "activations, ridge refit"


def silent_units(inner: Inner, asked: Asked) -> np.ndarray:
    """For each unit whether nothing comes out of it, as far as is known."""
    every = np.ones(inner.units, dtype=bool)
    return asked.weights.ask(lambda model: dead(model, inner), ~every, every)


def dead(model: Model, inner: Inner) -> np.ndarray:
    """For each unit whether nothing comes out of it."""
    silent: np.ndarray = np.asarray(~model.wide(inner.down).any(axis=0))
    activated = "gate_proj" if isinstance(inner.record, GatedFeedForward) else "up_proj"
    for name in inner_projections(inner.record):
        if name == activated and not FACTS[inner.record.activation].zero:
            continue
        nothing = ~model.wide(f"{inner.path}.{name}.weight").any(axis=1)
        if inner.record.up_bias:
            nothing &= model.wide(f"{inner.path}.{name}.bias") == 0
        silent |= nothing
    return silent


def alive_first(silent: np.ndarray, size: int) -> Index:
    """The units that stay, in order: all that are alive, and the first of the dead ones as far as there is room."""
    return np.sort(np.argsort(silent, kind="stable")[:size])


def kept_units(inner: Inner, index: Index) -> dict[str, Tensor]:
    """The tensors of some units alone."""
    tensors: dict[str, Tensor] = {name: taken(name, index) for name in inner.up}
    return tensors | {inner.down: taken(inner.down, index, 1)}


def undone(before: ModelSpec, asked: Asked) -> Step | None:
    """The width as it was, where it was one and the feed-forwards grew."""
    return smaller_again("intermediate", asked, (block.feed_forward.intermediate_size for block in before.blocks))


def examples(spec: ModelSpec) -> tuple[str, ...]:
    """Widths worth trying."""
    width = max(block.feed_forward.intermediate_size for block in spec.blocks)
    return (str(width + 16), *([str(width * 3 // 4)] if width >= 4 else []))


ORDER = 150
SWAPS: tuple[Swap, ...] = (
    Swap(
        option="intermediate",
        form="N",
        takes="a feed-forward of m units",
        gives="a feed-forward of N units",
        guarantee="exact",
        needs="a larger width, or units that nothing comes out of; otherwise a text to choose and fit by",
        source="Net2Net 1511.05641; narrower: Hassibi & Stork 1993 (Optimal Brain Surgeon), ridge regression",
        reshape=resize_feed_forward,
        examples=examples,
        by_layer=True,
        calibrated=True,
        inverse=undone,
        clears=(Clears("*.intermediate_size", "intermediate={theirs}"),),
    ),
)
"""The width of a feed-forward."""
