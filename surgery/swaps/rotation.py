"""The effect of rotary positions on the pairs of a head, and its transfer into weights.

A pair of elements is read as a complex number z. It is rotated by e^(iθm) at position m, and the scores depend on Re(q
· conj(k) · e^(iθ(m-n))). So

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
"""Positions divided by 1e30, so that nothing rotates: cos is 1 in every dtype and sin at most 1e-21."""
_DISTANCES = 4096  # distances in a mean rotation, at most


def is_neutral(rotary: Rotary) -> bool:
    """Return whether the positions rotate nothing."""
    return isinstance(rotary.scaling, LinearScaling) and rotary.scaling.factor >= NEUTRAL.factor


def rotary_layers(spec: ModelSpec, layers: Iterable[int]) -> dict[int, Rotary]:
    """Select the layers that have rotary positions."""
    positions = {layer: spec.blocks[layer].attention.position for layer in layers}
    return {layer: position for layer, position in positions.items() if isinstance(position, Rotary)}


def require_rotary(spec: ModelSpec, asked: Asked) -> dict[int, Rotary]:
    """Return the chosen layers with rotary positions. Raises SwapRefused if there are none."""
    layers = rotary_layers(spec, asked.chosen(spec))
    if not layers:
        where = "these layers have" if asked.layers is not None else "this model has"
        raise SwapRefused(
            f"{where} no rotary positions", "--position rope adds RoPE; the model then has to be trained."
        )
    return layers


def frequencies(rotary: Rotary, length: int = 1) -> Wide:
    """Return the angle of each pair from one position to the next, (dim/2,), in sequences of `length` tokens."""
    import torch

    from ...modules.positions import inverse_frequencies

    return np.asarray(inverse_frequencies(rotary, length, torch.float64).numpy())


def amplitude(rotary: Rotary) -> float:
    """Return the factor of cos and sin."""
    return float(getattr(rotary.scaling, "attention_factor", 1.0))


def turns_alike(a: Rotary, b: Rotary, length: int = 1) -> bool:
    """Return whether two rotaries rotate every pair by the same angles, up to rounding."""
    same = a.dim == b.dim and math.isclose(amplitude(a), amplitude(b), rel_tol=1e-15)
    return same and bool(np.allclose(frequencies(a, length), frequencies(b, length), rtol=1e-14, atol=0))


def original_context(scaling: RopeScaling | None) -> int | None:
    """Return the context that a model was trained for before its positions were scaled, if known."""
    return None if scaling is None else getattr(scaling, "original_context", None)


def for_width(scaling: RopeScaling | None, dim: int) -> RopeScaling | None:
    """Return a rotary's scaling for another dimension: the first divisors, the last one repeated."""
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
    """Return the first and the second element of each pair, the fastest pair first."""
    index = np.arange(dim // 2)
    return (index, index + dim // 2) if pairs == "halves" else (2 * index, 2 * index + 1)


def mean_rotation(rotary: Rotary, context: int | None, window: int | None = None, near: float = 0.5) -> Array:
    """Return each pair's mean rotation over the distances within a context, a complex factor (dim/2,).

    It includes the squared amplitude of cos and sin. A distance d counts (context - d) / (1 + d)^near: by its
    frequency, and more if it is short, as in attention.
    """
    length = min(limit for limit in (context, window, _DISTANCES) if limit is not None)
    distances = np.arange(length)
    weights = (length - distances) / (1 + distances) ** near
    turned = np.exp(1j * np.outer(frequencies(rotary, context or 1), distances))
    return np.asarray(turned @ weights / weights.sum() * amplitude(rotary) ** 2)


def turn_rows(rows: Wide, factors: Array, rotary: Rotary, head_dim: int) -> Wide:
    """Multiply every head's pairs in rows (heads·head_dim, …) by complex factors (dim/2,). Other rows are unchanged."""
    first, second = pair_elements(rotary.dim, rotary.pairs)
    heads = rows.reshape(-1, head_dim, *rows.shape[1:])
    column = factors.reshape(-1, *[1] * (rows.ndim - 1))
    turned = (heads[:, first] + 1j * heads[:, second]) * column
    result = heads.copy()
    result[:, first], result[:, second] = turned.real, turned.imag
    return result.reshape(rows.shape)


def reordered(array: Array, order: Index) -> Array:
    """Reorder the elements of every head in an array (heads·len(order), …)."""
    return array.reshape(-1, len(order), *array.shape[1:])[:, order].reshape(array.shape)


def row_tensors(path: str, attention: Attention, side: Literal["q", "k"]) -> list[str]:
    """Return the tensors whose rows are elements of query or key heads, with a norm of each head last."""
    norm = attention.q_norm if side == "q" else attention.k_norm
    norm_tensors = [] if norm is None else tensors_of(f"{path}.{side}_norm", norm)
    return tensors_of(path, attention, f"{side}_proj") + norm_tensors


def turned_queries(path: str, attention: Attention, rotary: Rotary, factors: Array) -> dict[str, Callable[..., Wide]]:
    """Return functions that compute the query rows with each pair multiplied by a complex factor.

    With a norm of each query head before the rotation, only the modulus is used, in the norm's weight.
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
    """Return the model with other rotary positions in some layers, and other fields of its own."""
    changed = {layer: replace(spec.blocks[layer].attention, position=position) for layer, position in positions.items()}
    return with_mixers(spec, changed, **fields)
