"""The width of a feed-forward, and of each expert in a mixture.

Wider, exact: new units whose columns in down_proj are zero, so that nothing of them gets out (Net2Net 1511.05641).
Their rows in up_proj and gate_proj are those of old units, so that training reaches the zeros.

Narrower, exact: units go that nothing comes out of, because their column in down_proj is zero, or what goes into it is.
Otherwise the least important ones go: with a text those that the others can best make up for, down_proj being fitted
again to give from the rest what it gave from all (ridge regression on the text's activations; Hassibi & Stork 1993);
without one (--approximate) those of the smallest product of the norms of their weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from ..components import FACTS, FeedForward, GatedFeedForward, MixtureOfExperts, ModelSpec
from ..errors import SwapRefused
from .base import Model, Swapped, Tensor, Wide
from .calibration import Calibration, Layer, Scratch
from .gather import Index, padded, taken
from .registry import Asked, Clears, Step, Swap
from .stream import experts, inner_projections

__all__ = ["SWAPS", "refit", "resize_feed_forward"]

replace = msgspec.structs.replace

RIDGE = 1e-6
"""What is added to the diagonal of the activations' second moments, beside their mean."""
ROUNDS = 8
"""In so many steps units go; on the trained samples 8 cost a sixth to a quarter less than one."""


@dataclass(frozen=True)
class Inner:
    """A feed-forward or an expert: its path, record and layer."""

    path: str
    record: FeedForward | GatedFeedForward
    layer: int

    @property
    def up(self) -> tuple[str, ...]:
        """The tensors with a row a unit."""
        suffixes = ("weight", "bias") if self.record.up_bias else ("weight",)
        return tuple(f"{self.path}.{name}.{suffix}" for name in inner_projections(self.record) for suffix in suffixes)

    @property
    def down(self) -> str:
        """The tensor with a column a unit."""
        return f"{self.path}.down_proj.weight"

    @property
    def inside(self) -> str:
        """The path of its down_proj within the block."""
        return f"{self.path.split('.', 2)[2]}.down_proj"


def resize_feed_forward(model: Model, asked: Asked) -> Swapped:
    """The tree with feed-forwards of another width, in the layers asked for.

    Raises:
        SwapRefused: they have it already; units in use would go and there is no text to choose and fit by.

    """
    spec, size = model.spec, asked.number("a width")
    layers = [layer for layer in asked.chosen(spec) if spec.blocks[layer].feed_forward.intermediate_size != size]
    if not layers:
        raise SwapRefused(f"the feed-forwards are {size} wide already", "Possible: another width.")
    inner = [
        Inner(path, record, layer)
        for layer in layers
        for path, record in experts(spec.blocks[layer], f"blocks.{layer}")
    ]
    blocks = list(spec.blocks)
    for layer in layers:
        blocks[layer] = blocks[layer].replaced(feed_forward=resized(blocks[layer].feed_forward, size))
    new = replace(spec, blocks=tuple(blocks))
    found = sorted({each.record.intermediate_size for each in inner})
    summary = {"intermediate_size": [found[0] if len(found) == 1 else found, size]}
    growing = [each for each in inner if each.record.intermediate_size < size]
    shrinking = [each for each in inner if each.record.intermediate_size > size]
    tensors = {name: tensor for each in growing for name, tensor in widened(each, size).items()}
    if not shrinking:
        return Swapped(new, "exact", tensors, summary)
    done = narrowed(model, shrinking, size, asked)
    return Swapped(new, done.guarantee, tensors | dict(done.tensors), {**summary, **done.summary}, done.notes)


def resized(feed_forward: Any, size: int) -> Any:
    """The record with another width."""
    if isinstance(feed_forward, MixtureOfExperts):
        return replace(feed_forward, expert=resized(feed_forward.expert, size))
    return replace(feed_forward, intermediate_size=size)


def widened(inner: Inner, size: int) -> dict[str, Tensor]:
    """More units, out of which nothing comes."""
    old = inner.record.intermediate_size
    tensors: dict[str, Tensor] = {name: taken(name, padded(old, size, repeat=True)) for name in inner.up}
    return tensors | {inner.down: taken(inner.down, padded(old, size), 1)}


# --- narrower ---------------------------------------------------------------------------------------------------------


def narrowed(model: Model, inner: list[Inner], size: int, asked: Asked) -> Swapped:
    """Fewer units: the dead ones go first, and exactly."""
    spec = model.spec
    silent = {each.path: dead(model, each) for each in inner}
    short = [each for each in inner if each.record.intermediate_size - int(silent[each.path].sum()) > size]
    if not short:
        tensors = {
            name: tensor
            for each in inner
            for name, tensor in kept_units(each, alive_first(silent[each.path], size)).items()
        }
        return Swapped(spec, "exact", tensors, {"method": "dead units"})
    if asked.approximate:
        tensors = {}
        for each in inner:
            score = np.where(silent[each.path], -1.0, by_weights(model, each))
            tensors |= kept_units(each, largest(score, size))
            model.release()
        return Swapped(spec, "approximate", tensors, {"method": "norms of weights"})
    if asked.calibration is None:
        first = short[0]
        alive = first.record.intermediate_size - int(silent[first.path].sum())
        raise SwapRefused(
            f"{first.path} has {alive} units in use, and which of them matter least shows on a text alone",
            f"Possible: {alive} or more; --calibrate FILE; --approximate, which goes by the weights.",
        )
    tensors = fitted(model, inner, size, asked.calibration())
    return Swapped(spec, "approximate", tensors, {"method": "activations, ridge refit"})


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
    model.release()
    return silent


def alive_first(silent: np.ndarray, size: int) -> Index:
    """The units that stay, in order: all that are alive, and the first of the dead ones as far as there is room."""
    return np.sort(np.argsort(silent, kind="stable")[:size])


def largest(score: Wide, size: int) -> Index:
    """The units of the largest scores, in order."""
    return np.sort(np.argsort(-score, kind="stable")[:size])


def kept_units(inner: Inner, index: Index) -> dict[str, Tensor]:
    """The tensors of some units alone."""
    tensors: dict[str, Tensor] = {name: taken(name, index) for name in inner.up}
    return tensors | {inner.down: taken(inner.down, index, 1)}


def by_weights(model: Model, inner: Inner) -> Wide:
    """For each unit the product of the norms of its rows and its column."""
    score: Wide = np.linalg.norm(model.wide(inner.down), axis=0)
    for name in inner_projections(inner.record):
        score = score * np.linalg.norm(model.wide(f"{inner.path}.{name}.weight"), axis=1)
    return score


# --- narrower, fitted on a text ---------------------------------------------------------------------------------------


def refit(old: Wide, moments: Wide, kept: Index) -> Wide:
    """W' [out, kept] that gives from some inputs, as nearly as can be, what W [out, n] gives from all.

    moments [n, n] are the means of a·aᵀ over the text. Least squares with a ridge that draws to W itself.
    """
    gram = with_ridge(moments, kept)
    target = old @ moments[:, kept] + old[:, kept] * (gram - moments[np.ix_(kept, kept)]).diagonal()
    found: Wide = np.asarray(np.linalg.solve(gram, target.T).T, dtype=np.float64)
    return found


def with_ridge(moments: Wide, kept: Index) -> Wide:
    """The second moments of some inputs, with a little added to the diagonal."""
    gram: Wide = moments[np.ix_(kept, kept)]
    ridge = RIDGE * max(float(np.trace(gram)) / len(kept), 1e-30)
    return gram + ridge * np.eye(len(kept))


def least_needed(old: Wide, moments: Wide, units: int, size: int) -> Index:
    """Which `size` of the first `units` inputs of W [out, n] stay, the others being refitted each time some go.

    Without input j, the rest refitted, the output is off by ‖W_j‖² / (M⁻¹)_jj on average, M the inputs' second moments
    (Optimal Brain Surgeon, Hassibi & Stork 1993). Some go at a time, since that changes what the rest are needed for.
    """
    rest = np.arange(units, old.shape[1])
    kept = np.arange(units)
    for left in np.linspace(units, size, ROUNDS + 1).round().astype(int)[1:]:
        index = np.append(kept, rest)
        weight = refit(old, moments, index)[:, : len(kept)]
        cost = (weight**2).sum(axis=0) / np.linalg.inv(with_ridge(moments, index)).diagonal()[: len(kept)]
        kept = kept[largest(cost, left)]
    return kept


def fitted(model: Model, inner: list[Inner], size: int, calibration: Calibration) -> dict[str, Tensor]:
    """Tensors that wait for the text to have run through the model, once for all of them."""
    scratch = Scratch(lambda: fit(model, inner, size, calibration))
    names = [name for each in inner for name in (*each.up, each.down)]
    names += [f"{each.path}.down_proj.bias" for each in inner if each.record.down_bias]
    return {name: scratch.waiting(name) for name in names}


def fit(model: Model, inner: list[Inner], size: int, calibration: Calibration) -> Iterator[dict[str, Wide]]:
    """The tensors of one feed-forward after the other."""
    by_layer: dict[int, list[Inner]] = {}
    for each in inner:
        by_layer.setdefault(each.layer, []).append(each)
    for layer in calibration.walk(model):
        for each, activations in seen(layer, by_layer.get(layer.index, [])):
            yield fit_one(model, each, activations, size)


def seen(layer: Layer, inner: list[Inner]) -> Iterator[tuple[Inner, Wide]]:
    """What comes into each down_proj of a layer on the text, (tokens, units); an expert that got no token has none."""
    if not inner:
        return
    _, found = layer.run([each.inside for each in inner])
    for each in inner:
        rows = found[each.inside][0] if each.inside in found else None
        width = each.record.intermediate_size
        yield each, np.zeros((0, width)) if rows is None else rows.reshape(-1, width).double().numpy()


def fit_one(model: Model, inner: Inner, activations: Wide, size: int) -> dict[str, Wide]:
    """The tensors of one feed-forward: the units that are needed most, and down_proj fitted to them.

    A bias is the weight of an input that is always 1, and always stays.
    """
    units = inner.record.intermediate_size
    old = model.wide(inner.down)
    bias_name = f"{inner.path}.down_proj.bias"
    if inner.record.down_bias:
        old = np.concatenate([old, model.wide(bias_name)[:, None]], axis=1)
        activations = np.concatenate([activations, np.ones((len(activations), 1))], axis=1)
    if len(activations):
        moments = activations.T @ activations / len(activations)
        index = least_needed(old, moments, units, size)
        new = refit(old, moments, np.append(index, np.arange(units, old.shape[1])))
    else:
        index = largest(by_weights(model, inner), size)
        new = old[:, np.append(index, np.arange(units, old.shape[1]))]
    arrays: dict[str, Wide] = {name: model.wide(name)[index] for name in inner.up}
    arrays[inner.down] = new[:, :size]
    return arrays | ({bias_name: new[:, size]} if inner.record.down_bias else {})


def undone(before: ModelSpec, asked: Asked) -> Step | None:
    """The width as it was, where it was one and the feed-forwards grew."""
    found = {block.feed_forward.intermediate_size for block in before.blocks}
    return Step("intermediate", str(max(found))) if len(found) == 1 and int(asked.value) > max(found) else None


def examples(spec: ModelSpec) -> tuple[str, ...]:
    """Widths worth trying."""
    width = max(block.feed_forward.intermediate_size for block in spec.blocks)
    return (str(width + 16), *([str(width * 3 // 4)] if width >= 4 else []))


SWAPS: tuple[Swap, ...] = (
    Swap(
        option="intermediate",
        form="N",
        takes="a feed-forward of m units",
        gives="a feed-forward of N units",
        guarantee="exact",
        needs="a larger width, or units that nothing comes out of; otherwise a text to choose and fit by",
        source="Net2Net 1511.05641; narrower: Hassibi & Stork 1993 (Optimal Brain Surgeon), ridge regression",
        apply=resize_feed_forward,
        examples=examples,
        by_layer=True,
        calibrated=True,
        inverse=undone,
        clears=(Clears("*.intermediate_size", "intermediate={theirs}"),),
    ),
)
"""The width of a feed-forward."""
