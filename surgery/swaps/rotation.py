"""What rotary positions do to the pairs of a head, and how weights take it over.

A pair of elements, read as a complex number z, is turned by e^(iθm) at position m, and the scores see
Re(q · conj(k) · e^(iθ(m-n))). So

- any complex factor on a pair of q commutes with the rotation, and folds into the rows of W_q;
- a pair whose rotation goes is best replaced by its mean over the distances m - n, a complex factor on q;
- pairs may be listed in any order, and their elements may lie in any place, if q and k agree.
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
"""Positions divided by so much that nothing turns: cos is 1 in every dtype and sin at most 1e-21."""
_DISTANCES = 4096  # distances that a mean rotation is taken over, at most


def is_neutral(rotary: Rotary) -> bool:
    """Whether it turns nothing at any position."""
    return isinstance(rotary.scaling, LinearScaling) and rotary.scaling.factor >= NEUTRAL.factor


def rotary_layers(spec: ModelSpec, layers: Iterable[int]) -> dict[int, Rotary]:
    """The layers of these that have rotary positions."""
    found = {layer: spec.blocks[layer].attention.position for layer in layers}
    return {layer: position for layer, position in found.items() if isinstance(position, Rotary)}


def require_rotary(spec: ModelSpec, asked: Asked) -> dict[int, Rotary]:
    """The layers that are asked for and have rotary positions. Raises SwapRefused where there are none."""
    found = rotary_layers(spec, asked.chosen(spec))
    if not found:
        where = "these layers have" if asked.layers is not None else "this model has"
        raise SwapRefused(
            f"{where} no rotary positions", "--position rope adds RoPE; the model then has to be trained."
        )
    return found


def frequencies(rotary: Rotary, length: int = 1) -> Wide:
    """The angle by which each pair turns from one position to the next, (dim/2,), in sequences of `length` tokens."""
    import torch

    from ...modules.positions import inverse_frequencies

    return np.asarray(inverse_frequencies(rotary, length, torch.float64).numpy())


def amplitude(rotary: Rotary) -> float:
    """What cos and sin are multiplied by."""
    return float(getattr(rotary.scaling, "attention_factor", 1.0))


def turns_alike(a: Rotary, b: Rotary, length: int = 1) -> bool:
    """Whether two turn every pair by the same angles, up to rounding."""
    same = a.dim == b.dim and math.isclose(amplitude(a), amplitude(b), rel_tol=1e-15)
    return same and bool(np.allclose(frequencies(a, length), frequencies(b, length), rtol=1e-14, atol=0))


def original_context(scaling: RopeScaling | None) -> int | None:
    """The context that a model was trained for before its positions were scaled, where the scaling says so."""
    return None if scaling is None else getattr(scaling, "original_context", None)


def for_width(scaling: RopeScaling | None, dim: int) -> RopeScaling | None:
    """A rotary's scaling for another dimension: the first divisors, the last one repeated; no more pairs that turn."""
    half = dim // 2
    if isinstance(scaling, LongRopeScaling):
        short, long = ((*each, *(each[-1:] * half))[:half] for each in (scaling.short_factor, scaling.long_factor))
        return replace(scaling, short_factor=short, long_factor=long)
    if isinstance(scaling, ProportionalScaling):
        return replace(scaling, turning=min(scaling.turning, half))
    return scaling


def pair_elements(dim: int, pairs: Pairs) -> tuple[Index, Index]:
    """Of each pair its first and its second element, the fastest pair first."""
    each = np.arange(dim // 2)
    return (each, each + dim // 2) if pairs == "halves" else (2 * each, 2 * each + 1)


def mean_rotation(rotary: Rotary, context: int | None, window: int | None = None, near: float = 0.5) -> Array:
    """Each pair's rotation averaged over the distances within a context, as a complex factor (dim/2,), the squared
    amplitude of cos and sin in it.

    A distance d counts (context - d) / (1 + d)^near: as often as it occurs, and more the nearer, since attention does.
    """
    length = min(each for each in (context, window, _DISTANCES) if each is not None)
    distances = np.arange(length)
    weights = (length - distances) / (1 + distances) ** near
    turned = np.exp(1j * np.outer(frequencies(rotary, context or 1), distances))
    return np.asarray(turned @ weights / weights.sum() * amplitude(rotary) ** 2)


def turn_rows(rows: Wide, factors: Array, rotary: Rotary, head_dim: int) -> Wide:
    """Every head's pairs times their complex factors (dim/2,); rows (heads·head_dim, …). What does not turn stays."""
    first, second = pair_elements(rotary.dim, rotary.pairs)
    heads = rows.reshape(-1, head_dim, *rows.shape[1:])
    column = factors.reshape(-1, *[1] * (rows.ndim - 1))
    turned = (heads[:, first] + 1j * heads[:, second]) * column
    result = heads.copy()
    result[:, first], result[:, second] = turned.real, turned.imag
    return result.reshape(rows.shape)


def reordered(array: Array, order: Index) -> Array:
    """The elements of every head in another order; array (heads·len(order), …)."""
    return array.reshape(-1, len(order), *array.shape[1:])[:, order].reshape(array.shape)


def row_tensors(path: str, attention: Attention, side: Literal["q", "k"]) -> list[str]:
    """The tensors whose rows are elements of query or of key heads, a norm of each head last."""
    norm = attention.q_norm if side == "q" else attention.k_norm
    own = [] if norm is None else tensors_of(f"{path}.{side}_norm", norm)
    return tensors_of(path, attention, f"{side}_proj") + own


def turned_queries(path: str, attention: Attention, rotary: Rotary, factors: Array) -> dict[str, Callable[..., Wide]]:
    """The query rows with each pair times a complex factor; with a norm of each query head, which the rotation comes
    after and which has no place for an angle, times its modulus in the norm's weight.
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
    """The tree with other rotary positions in some layers, and other fields of its own."""
    changed = {layer: replace(spec.blocks[layer].attention, position=each) for layer, each in positions.items()}
    return with_mixers(spec, changed, **fields)
