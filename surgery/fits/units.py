"""Which units of a feed-forward are needed most, and the projection behind them fitted to those that stay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...components import FeedForward, GatedFeedForward
from ..base import Model, Wide
from ..gather import Index
from ..stream import inner_projections

if TYPE_CHECKING:
    from .calibration import Calibration, Layer

__all__ = ["Inner", "by_weights", "fit", "largest", "least_needed", "refit", "with_ridge"]

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
    def down_bias(self) -> str:
        """The name of the bias behind it, whether there is one or not."""
        return f"{self.path}.down_proj.bias"

    @property
    def units(self) -> int:
        """How many units there are."""
        return self.record.intermediate_size

    @property
    def inside(self) -> str:
        """The path of its down_proj within the block."""
        return f"{self.path.split('.', 2)[2]}.down_proj"


def largest(score: Wide, size: int) -> Index:
    """The units of the largest scores, in order."""
    return np.sort(np.argsort(-score, kind="stable")[:size])


def by_weights(model: Model, inner: Inner) -> Wide:
    """For each unit the product of the norms of its rows and its column."""
    score: Wide = np.linalg.norm(model.wide(inner.down), axis=0)
    for name in inner_projections(inner.record):
        score = score * np.linalg.norm(model.wide(f"{inner.path}.{name}.weight"), axis=1)
    return score


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


def fit(model: Model, inner: Sequence[Inner], size: int, calibration: Calibration) -> Iterator[dict[str, Wide]]:
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
        yield each, np.zeros((0, each.units)) if rows is None else rows.reshape(-1, each.units).double().numpy()


def fit_one(model: Model, inner: Inner, activations: Wide, size: int) -> dict[str, Wide]:
    """The tensors of one feed-forward: the units that are needed most, and down_proj fitted to them.

    A bias is the weight of an input that is always 1, and always stays.
    """
    units, old, bias_name = inner.units, model.wide(inner.down), inner.down_bias
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
