"""Formulas for rotary positions: the rotations of the pairs of a head, and how to fold rotations into weights.

A pair of elements is read as a complex number. At position m, it is multiplied by e^(iθm), and the scores depend on
Re(q · conj(k) · e^(iθ(m-n))). So

- any complex factor on a pair of q commutes with the rotation, and can be folded into the rows of W_q;
- a pair without its rotation is best replaced by the mean rotation over the distances m - n, a complex factor on q;
- pairs, and their elements, may be in any order if q and k agree.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Literal

import numpy as np
from msgspec.structs import replace

from ...components import Attention, LinearScaling, LongRopeScaling, ModelSpec, ProportionalScaling, RopeScaling, Rotary
from ...converter.dtypes import Array
from ...errors import SwapRefused
from ..base import Index, Model, Wide
from ..layerwise import regained, tensors_of, unclipped, weighed, with_mixers
from ..registry import Asked

Pairs = Literal["halves", "adjacent"]
NEUTRAL = LinearScaling(factor=1e30)
"""A scaling that divides positions by 1e30, so that nothing rotates: cos is 1 in every dtype, and sin at most 1e-21."""
_DISTANCES = 4096  # the maximum number of distances in a mean rotation


def is_neutral(rotary: Rotary) -> bool:
    """Return whether RoPE rotates nothing, because its scaling divides positions by 1e30 (`NEUTRAL`)."""
    return isinstance(rotary.scaling, LinearScaling) and rotary.scaling.factor >= NEUTRAL.factor


def rotary_layers(spec: ModelSpec, layers: Iterable[int]) -> dict[int, Rotary]:
    """Return the rotary positions of these layers, by layer. Layers without rotary positions are left out."""
    positions = {layer: spec.blocks[layer].attention.position for layer in layers}
    return {layer: position for layer, position in positions.items() if isinstance(position, Rotary)}


def require_rotary(spec: ModelSpec, asked: Asked) -> dict[int, Rotary]:
    """Return the rotary positions of the chosen layers, by layer. Raises SwapRefused if no chosen layer has any."""
    layers = rotary_layers(spec, asked.chosen(spec))
    if not layers:
        where = "these layers have" if asked.layers is not None else "this model has"
        raise SwapRefused(
            f"{where} no rotary positions", "--position rope adds RoPE; the model then has to be trained."
        )
    return layers


def frequencies(rotary: Rotary, length: int = 1) -> Wide:
    """Return the angle in radians by which each pair rotates from one position to the next, (dim/2,).

    With some scalings, the angles depend on `length`, the number of tokens of the sequence.
    """
    import torch

    from ...modules.positions import inverse_frequencies

    return np.asarray(inverse_frequencies(rotary, length, torch.float64).numpy())


def amplitude(rotary: Rotary) -> float:
    """Return the factor by which cos and sin are multiplied (attention_factor), which is 1 for most scalings."""
    return float(getattr(rotary.scaling, "attention_factor", 1.0))


def turns_alike(a: Rotary, b: Rotary, length: int = 1) -> bool:
    """Return whether two RoPEs rotate all pairs by the same angles, up to rounding, in sequences of `length` tokens."""
    same = a.dim == b.dim and math.isclose(amplitude(a), amplitude(b), rel_tol=1e-15)
    return same and bool(np.allclose(frequencies(a, length), frequencies(b, length), rtol=1e-14, atol=0))


def original_context(scaling: RopeScaling | None) -> int | None:
    """Return the context length that a model was trained for before RoPE was scaled, if known."""
    return None if scaling is None else getattr(scaling, "original_context", None)


def for_width(scaling: RopeScaling | None, dim: int) -> RopeScaling | None:
    """Adapt a RoPE scaling to another rotary dimension `dim`.

    If a scaling lists divisors by pair, the first ones are used, and the last one is repeated if there are too few.
    """
    half = dim // 2
    if isinstance(scaling, LongRopeScaling):
        short, long = (
            (*divisors, *(divisors[-1:] * half))[:half] for divisors in (scaling.short_factor, scaling.long_factor)
        )
        return replace(scaling, short_factor=short, long_factor=long)
    if isinstance(scaling, ProportionalScaling):
        return replace(scaling, turning=min(scaling.turning, half))
    return scaling


def pair_elements(dim: int, pairs: Pairs) -> tuple[Index, Index]:
    """Return the positions in a head of the first elements of all rotary pairs, and those of the second elements.

    Pairs with high frequencies come first. `pairs` is the order of pairs in the head.
    """
    index = np.arange(dim // 2)
    return (index, index + dim // 2) if pairs == "halves" else (2 * index, 2 * index + 1)


def mean_rotation(rotary: Rotary, context: int | None, window: int | None = None, near: float = 0.5) -> Array:
    """Return the mean rotation of each pair over all distances within a context, as complex factors (dim/2,).

    A distance d has the weight (context - d) / (1 + d)^near. The numerator is how often the distance occurs. With a
    larger `near`, short distances count more, as in attention. The factors include the squared amplitude of cos and
    sin. `window` limits the distances.
    """
    length = min(limit for limit in (context, window, _DISTANCES) if limit is not None)
    distances = np.arange(length)
    weights = (length - distances) / (1 + distances) ** near
    turned = np.exp(1j * np.outer(frequencies(rotary, context or 1), distances))
    return np.asarray(turned @ weights / weights.sum() * amplitude(rotary) ** 2)


def turn_rows(rows: Wide, factors: Array, rotary: Rotary, head_dim: int) -> Wide:
    """Multiply the rotary pairs of every head by complex factors (dim/2,). Elements that RoPE does not rotate stay.

    `rows` are (heads · head_dim, …).
    """
    first, second = pair_elements(rotary.dim, rotary.pairs)
    heads = rows.reshape(-1, head_dim, *rows.shape[1:])
    column = factors.reshape(-1, *[1] * (rows.ndim - 1))
    turned = (heads[:, first] + 1j * heads[:, second]) * column
    result = heads.copy()
    result[:, first], result[:, second] = turned.real, turned.imag
    return result.reshape(rows.shape)


def reordered(array: Array, order: Index) -> Array:
    """Reorder the elements of every head in the same way. `array` is (heads · head_dim, …).

    `order` has for each new element the old one.
    """
    return array.reshape(-1, len(order), *array.shape[1:])[:, order].reshape(array.shape)


def row_tensors(path: str, attention: Attention, side: Literal["q", "k"]) -> list[str]:
    """Return the tensors with a row (or element) for every element of q or k: the projection, and a norm after it."""
    norm = attention.q_norm if side == "q" else attention.k_norm
    norm_tensors = [] if norm is None else tensors_of(f"{path}.{side}_norm", norm)
    return tensors_of(path, attention, f"{side}_proj") + norm_tensors


def turned_queries(path: str, attention: Attention, rotary: Rotary, factors: Array) -> dict[str, Callable[..., Wide]]:
    """Multiply each rotary pair of the queries by a complex factor. Return functions that compute the new tensors.

    If query heads have a norm before the rotation, the norm's weight is multiplied by the absolute value of the factors
    instead, and the phase is lost.
    """
    if np.allclose(factors, 1, rtol=0, atol=1e-15):
        return {}
    weighed(path + ".q_norm", attention.q_norm, "1 + weight")
    unclipped(path, attention)
    if attention.norm_order == "after":
        raise SwapRefused(
            f"{path} normalises queries and keys after the position encoding (norm_order), which this swap "
            "does not support"
        )
    norm = attention.q_norm
    if norm is not None:
        times = partial(turn_rows, factors=np.abs(factors), rotary=rotary, head_dim=attention.head_dim)
        return {name: regained(norm, name, times) for name in tensors_of(f"{path}.q_norm", norm)}
    if rotary.direction == "backward":
        factors = factors.conj()

    def turned(name: str, model: Model) -> Wide:
        return turn_rows(model.wide(name), factors, rotary, attention.head_dim)

    return {name: partial(turned, name) for name in row_tensors(path, attention, "q")}


def with_rotary(spec: ModelSpec, positions: Mapping[int, Rotary], **fields: Any) -> ModelSpec:
    """Return the model with other rotary positions in some layers. `positions` has them by layer.

    `fields` has new values of other fields of the model, such as `context_length`.
    """
    changed = {layer: replace(spec.blocks[layer].attention, position=position) for layer, position in positions.items()}
    return with_mixers(spec, changed, **fields)
