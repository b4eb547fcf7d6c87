"""Multi-head latent attention in place of keys and values a head (DeepSeek-V2 2405.04434; TransMLA 2502.07864).

"mla:full" changes nothing: the latent is all values (and what of the keys is not rotated), and every rotary key head
stays a shared one, which queries of other heads multiply by zero. The cache is as large as before; it is where training
may start from.

"mla:R" keeps a latent of R numbers per token; where keys and values have no more than R, it is "mla:full". Values come
out of it by the best linear map of that rank on a text; keys without rotary positions too. Rotary keys become one that
all heads share, as `kv_fit` makes it. Lossless where R is as much as there is to hold and there is one rotary key head.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...components import Attention, LatentAttention, MixtureOfExperts, ModelSpec, Rotary
from ...errors import SwapRefused
from ..base import Filled, Moved, Swapped, Tensor
from ..fits.scratch import Scratch
from ..layerwise import attentions, with_attention
from ..registry import Asked, Swap

__all__ = ["SWAPS"]

replace = msgspec.structs.replace
Array = NDArray[Any]


def latent_of(attention: Attention, rank: int, rope_heads: int) -> LatentAttention:
    """The record in a grouped attention's place."""
    rotary = attention.position if isinstance(attention.position, Rotary) else None
    return LatentAttention(
        hidden_size=attention.hidden_size,
        heads=attention.heads,
        kv_rank=rank,
        nope_dim=plain_dim(attention),
        value_dim=attention.head_dim,
        scale=attention.scale,
        rope_heads=0 if rotary is None else rope_heads,
        position=attention.position,
        window=attention.window,
        qkv_bias=attention.qkv_bias,
        output_bias=attention.output_bias,
        arithmetic=attention.arithmetic,
    )


def plain_dim(attention: Attention) -> int:
    """Elements of a key head that no position is turned into."""
    rotary = attention.position if isinstance(attention.position, Rotary) else None
    return attention.head_dim - (0 if rotary is None else rotary.dim)


def whole(attention: Attention) -> int:
    """The rank that holds all there is of values, and of keys without rotary positions."""
    return attention.kv_heads * (attention.head_dim + plain_dim(attention))


def grouped(spec: ModelSpec, asked: Asked) -> dict[int, Attention]:
    """The attentions that change."""
    found = attentions(spec, asked.chosen(spec), " already")
    for layer, attention in found.items():
        if attention.q_norm is not None or attention.k_norm is not None:
            raise SwapRefused(
                f"layer {layer} normalises queries and keys head by head, which a shared key has no heads for",
                "Possible here: fewer key-value heads, --attention gqa:N or mqa.",
            )
        if attention.cap is not None:
            raise SwapRefused(
                f"layer {layer} has a cap on its scores ({attention.cap:g}), which latent attention has not"
            )
    return found


# --- all of it --------------------------------------------------------------------------------------------------------


def spread_queries(tensor: Array, attention: Attention) -> Array:
    """[heads · head_dim, …] -> [heads · (plain + kv_heads · rotary), …]: each query head's elements without positions,
    then a part for every key head, zero but for its own.
    """
    plain = plain_dim(attention)
    dim = attention.head_dim - plain
    heads = tensor.reshape(attention.heads, attention.head_dim, *tensor.shape[1:])
    new = np.zeros((attention.heads, plain + attention.kv_heads * dim, *tensor.shape[1:]), tensor.dtype)
    for head in range(attention.heads):
        new[head, :plain] = heads[head, dim:]
        start = plain + (head // attention.group) * dim
        new[head, start : start + dim] = heads[head, :dim]
    return new.reshape(-1, *tensor.shape[1:])


def key_rows(tensor: Array, attention: Attention, rotary: bool) -> Array:
    """The rows of the keys [kv_heads · head_dim, …] that are rotated, or those that are not, heads in order."""
    dim = attention.head_dim - plain_dim(attention)
    heads = tensor.reshape(attention.kv_heads, attention.head_dim, *tensor.shape[1:])
    part = heads[:, :dim] if rotary else heads[:, dim:]
    return np.ascontiguousarray(part).reshape(-1, *tensor.shape[1:])


def picking(attention: Attention, width: int, start: int, rank: int) -> Array:
    """The map [heads · width, rank] by which query heads take their group's `width` elements out of the latent, where
    they stand from `start` on.
    """
    found = np.zeros((attention.heads, width, rank))
    for head in range(attention.heads):
        first = start + (head // attention.group) * width
        found[head, np.arange(width), first + np.arange(width)] = 1
    return found.reshape(-1, rank)


def lossless(path: str, attention: Attention) -> dict[str, Tensor]:
    """Every tensor of "mla:full", nothing of it computed."""
    plain, rank = plain_dim(attention), whole(attention)
    made: dict[str, Tensor] = {}
    for part in ("weight", *(["bias"] if attention.qkv_bias else [])):
        q, k, v = (f"{path}.{name}_proj.{part}" for name in "qkv")
        made[q] = Moved(q, lambda tensor: spread_queries(tensor, attention))
        made[f"{path}.kv_down_proj.{part}"] = Moved(
            (k, v), lambda key, value: np.concatenate([key_rows(key, attention, False), value])
        )
        if plain < attention.head_dim:
            made[f"{path}.k_rope_proj.{part}"] = Moved(k, lambda key: key_rows(key, attention, True))
    like = f"{path}.v_proj.weight"
    if plain:
        made[f"{path}.k_up_proj.weight"] = Filled(
            (attention.heads * plain, rank), partial(picking, attention, plain, 0, rank), like
        )
    made[f"{path}.v_up_proj.weight"] = Filled(
        (attention.heads * attention.head_dim, rank),
        partial(picking, attention, attention.head_dim, attention.kv_heads * plain, rank),
        like,
    )
    return made


def to_whole(spec: ModelSpec, asked: Asked) -> Swapped:
    """Latent attention that computes what was there."""
    old = grouped(spec, asked)
    tensors: dict[str, Tensor] = {}
    for layer, attention in old.items():
        tensors.update(lossless(f"blocks.{layer}.attention", attention))
    changed = {layer: latent_of(each, whole(each), each.kv_heads) for layer, each in old.items()}
    summary = {"layers": sorted(changed), "rank": sorted({each.kv_rank for each in changed.values()})}
    return Swapped(with_attention(spec, changed), "exact", tensors, summary)


# --- some of it -------------------------------------------------------------------------------------------------------


def to_rank(spec: ModelSpec, asked: Asked) -> Swapped:
    """A latent of R numbers, and one rotary key."""
    rank = asked.number("numbers per token in the latent")
    old = grouped(spec, asked)
    most = max(2 * each.kv_heads * each.head_dim for each in old.values())
    if rank >= most:
        told = f"keys and values have {most} numbers per token, which a latent and rotary keys hold: none is left out"
        return dataclasses.replace(to_whole(spec, asked), notes=(told,))
    smaller = any(rank < whole(each) or rotary_heads(each) > 1 for each in old.values())
    for layer, each in old.items():
        if rank > whole(each):
            raise SwapRefused(
                f"layer {layer} has {whole(each)} numbers per token for a latent to hold, not {rank}",
                f"Possible here: mla:{whole(each)} or less, or mla:full ({most} with keys), which changes nothing.",
            )
    if not smaller:
        return to_whole(spec, asked)
    changed = {layer: latent_of(each, rank, 1) for layer, each in old.items()}
    if asked.approximate:
        scratch = Scratch.by("latent_fit.averaged_layers", changed)
    else:
        scratch = Scratch.by("latent_fit.fitted_layers", changed, asked.text("a latent is fitted"))
    new = with_attention(spec, changed)
    fitted = []
    for layer, latent in changed.items():
        path = f"blocks.{layer}"
        fitted += [f"{path}.attention.{name}" for name in latent.shapes() if name != "o_proj.bias"]
        if not (asked.approximate or isinstance(spec.blocks[layer].feed_forward, MixtureOfExperts)):
            fitted.append(f"{path}.feed_forward.down_proj.weight")
    tensors = scratch.waiting(fitted)
    summary = {"layers": sorted(changed), "rank": rank, "by": "weights alone" if asked.approximate else "regression"}
    return Swapped(new, "approximate", tensors, summary)


def rotary_heads(attention: Attention) -> int:
    """Key heads with rotary positions."""
    return attention.kv_heads if isinstance(attention.position, Rotary) else 0


def half(spec: ModelSpec) -> Iterable[str]:
    """Half of what there is to hold."""
    attention = spec.blocks[0].attention
    if isinstance(attention, Attention) and attention.q_norm is None:
        yield f"mla:{max(whole(attention) // 2, 1)}"


def entry(form: str, gives: str, guarantee: Any, reshape: Callable[[ModelSpec, Asked], Swapped], examples: Any) -> Swap:
    """One of the two forms."""
    return Swap(
        option="attention",
        form=form,
        takes="keys and values by head",
        gives=gives,
        guarantee=guarantee,
        needs="no norm of queries and keys" + (" and a calibration text" if form == "mla:R" else ""),
        source="DeepSeek-V2 2405.04434; TransMLA 2502.07864",
        reshape=reshape,
        examples=examples,
        by_layer=True,
        calibrated=form == "mla:R",
    )


ORDER = 100
SWAPS: tuple[Swap, ...] = (
    entry("mla:full", "a latent that holds all of them", "exact", to_whole, lambda spec: ("mla:full",)),
    entry("mla:R", "a latent of R numbers, one rotary key", "approximate", to_rank, half),
)
