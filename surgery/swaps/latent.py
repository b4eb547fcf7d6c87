"""Multi-head latent attention in place of keys and values a head (DeepSeek-V2 2405.04434; TransMLA 2502.07864).

"mla:full" changes nothing: the latent is all values (and what of the keys is not rotated), and every rotary key head
stays a shared one, which queries of other heads multiply by zero. The cache is as large as before; it is where training
may start from.

"mla:R" keeps a latent of R numbers per token; where keys and values have no more than R, it is "mla:full". Values come
out of it by the best linear map of that rank on a text; keys without rotary positions too. Rotary keys become one that
all heads share, as `kv_fit` makes it. Lossless where R is as much as there is to hold and there is one rotary key head.

"mla:deepseek" changes nothing either: it is the form in which DeepSeek-V3's own code has a latent. Several rotary keys
become one, as wide as all of them, in which frequencies repeat (LongRoPE's divisors say any). A latent without a norm
gets one that leaves it as it is, beside constant elements so large that they alone decide what it divides by.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import numpy as np
from msgspec.structs import replace

from ...components import (
    Attention,
    DynamicScaling,
    LatentAttention,
    LongRopeScaling,
    ModelSpec,
    RMSNorm,
    Rotary,
    recast,
)
from ...errors import SwapRefused
from ..base import Array, Computed, Filled, Moved, Swapped, Tensor
from ..fits.scratch import Scratch
from ..layerwise import attentions, tensors_of, with_mixers
from ..registry import Asked, Clears, Swap
from ..rotation import NEUTRAL, Elements, amplitude, frequencies, original_context, pair_elements, reordered
from .kv_heads import fitted_names


def latent_of(attention: Attention, rank: int, rope_heads: int) -> LatentAttention:
    """The record in a grouped attention's place."""
    found: LatentAttention = recast(
        attention,
        LatentAttention,
        kv_rank=rank,
        nope_dim=_plain_dim(attention),
        value_dim=attention.head_dim,
        rope_heads=rope_heads if isinstance(attention.position, Rotary) else 0,
        fused=False,  # which says of what other products
    )
    return found


def _plain_dim(attention: Attention) -> int:
    """Elements of a key head that no position is turned into."""
    return attention.head_dim - (attention.position.dim if isinstance(attention.position, Rotary) else 0)


def whole(attention: Attention) -> int:
    """The rank that holds all there is of values, and of keys without rotary positions."""
    return attention.kv_heads * (attention.head_dim + _plain_dim(attention))


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
    plain = _plain_dim(attention)
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
    dim = attention.head_dim - _plain_dim(attention)
    heads = tensor.reshape(attention.kv_heads, attention.head_dim, *tensor.shape[1:])
    part = heads[:, :dim] if rotary else heads[:, dim:]
    return np.ascontiguousarray(part).reshape(-1, *tensor.shape[1:])


def picking(attention: Attention, width: int, start: int, rank: int) -> Array:
    """The map [heads · width, rank] by which query heads take their group's part out of the latent at `start`."""
    found = np.zeros((attention.heads, width, rank))
    for head in range(attention.heads):
        first = start + (head // attention.group) * width
        found[head, np.arange(width), first + np.arange(width)] = 1
    return found.reshape(-1, rank)


def _lossless(path: str, attention: Attention) -> dict[str, Tensor]:
    """Every tensor of "mla:full", nothing of it computed."""
    plain, rank = _plain_dim(attention), whole(attention)
    made: dict[str, Tensor] = {}
    for part in ("weight", "bias") if attention.qkv_bias else ("weight",):
        q, k, v = (f"{path}.{name}_proj.{part}" for name in "qkv")
        made[q] = Moved(q, lambda tensor: spread_queries(tensor, attention))
        made[f"{path}.kv_down_proj.{part}"] = Moved(
            (k, v), lambda key, value: np.concatenate([key_rows(key, attention, False), value])
        )
        if plain < attention.head_dim:
            made[f"{path}.k_rope_proj.{part}"] = Moved(k, lambda key: key_rows(key, attention, True))
    ups = (("k_up_proj", plain, 0), ("v_up_proj", attention.head_dim, attention.kv_heads * plain))
    for name, width, start in ups if plain else ups[1:]:
        maps = partial(picking, attention, width, start, rank)
        made[f"{path}.{name}.weight"] = Filled((attention.heads * width, rank), maps, f"{path}.v_proj.weight")
    return made


def _to_whole(spec: ModelSpec, asked: Asked) -> Swapped:
    """Latent attention that computes what was there."""
    old = grouped(spec, asked)
    tensors: dict[str, Tensor] = {}
    for layer, attention in old.items():
        tensors.update(_lossless(f"blocks.{layer}.attention", attention))
    changed = {layer: latent_of(each, whole(each), each.kv_heads) for layer, each in old.items()}
    summary = {"layers": sorted(changed), "rank": sorted({each.kv_rank for each in changed.values()})}
    return Swapped(with_mixers(spec, changed), "exact", tensors, summary)


# --- as DeepSeek-V3 has it --------------------------------------------------------------------------------------------

CONSTANT = 2.0**40
"""Of a latent's elements: the square of any other vanishes beside its own, in fp64 too."""
SHARE = 64
"""One element in so many of a latent is constant. With the root of this, a power of two, no dtype rounds."""
EPS = 1e-6
"""Of DeepSeek's norms on latents."""


def deepseek_form(layer: int, attention: LatentAttention, context: int | None) -> LatentAttention:
    """The record in a latent attention's place."""
    position = attention.position
    if not isinstance(position, Rotary):
        hint = "First --position rope:neutral, before --attention mla:full."
        raise SwapRefused(f"layer {layer} has no rotary positions, which DeepSeek's latents have", hint)
    found = replace(attention, rope_heads=1, position=widened(layer, position, attention.rope_heads, context))
    found = replace(found, fused=True, gathered=position.pairs == "adjacent")
    if attention.kv_norm is not None:
        return found
    rank, low = SHARE * -(-attention.kv_rank // (SHARE - 1)), attention.q_rank is not None
    found = replace(found, kv_rank=rank, kv_norm=RMSNorm(size=rank, eps=EPS))
    return replace(found, qkv_bias=low, kv_bias=not low, output_bias=True)


def widened(layer: int, rotary: Rotary, keys: int, context: int | None) -> Rotary:
    """Rotary positions of one key as wide as so many, which turn the pairs of each as before."""
    if keys == 1:
        return rotary
    if isinstance(rotary.scaling, DynamicScaling):
        raise SwapRefused(f"the rotary base of layer {layer} grows with the length, and divisors do not")
    original = original_context(rotary.scaling)
    by_length = isinstance(rotary.scaling, LongRopeScaling) and original is not None
    lengths = (1, original + 1 if by_length and original is not None else 1)
    slowest = 1 / NEUTRAL.factor  # of pairs that do not turn
    short, long = (tuple(1 / np.maximum(frequencies(rotary, each), slowest)) for each in lengths)
    scaling = LongRopeScaling(
        short_factor=tuple(map(float, short)) * keys,
        long_factor=tuple(map(float, long)) * keys,
        original_context=original if by_length and original is not None else context or 2048,
        attention_factor=amplitude(rotary),
    )
    return replace(rotary, dim=keys * rotary.dim, base=1.0, scaling=scaling)


def key_order(rotary: Rotary, keys: int) -> Elements:
    """Where the elements of a wide key come from: those of several, one behind the other."""
    if rotary.pairs == "adjacent":
        return np.arange(keys * rotary.dim)
    starts = rotary.dim * np.arange(keys)[:, None]
    return np.concatenate([(starts + part).ravel() for part in pair_elements(rotary.dim, rotary.pairs)])


def _to_deepseek(spec: ModelSpec, asked: Asked) -> Swapped:
    """Latent attention in DeepSeek-V3's form."""
    changed: dict[int, LatentAttention] = {}
    tensors: dict[str, Tensor] = {}
    for layer in asked.chosen(spec):
        attention, path = spec.blocks[layer].attention, f"blocks.{layer}.attention"
        if not isinstance(attention, LatentAttention):
            raise SwapRefused(f"layer {layer} has keys and values by head, no latent", "First --attention mla:full.")
        biased = attention.qkv_bias and attention.q_rank is None
        if biased and not asked.weights.zero(f"{path}.q_proj.bias"):
            hint = "--drop query.bias, after --attention mla:full, leaves it out."
            raise SwapRefused(f"the queries of layer {layer} have a bias, which DeepSeek's have not", hint)
        new = deepseek_form(layer, attention, spec.context_length)
        if new != attention:
            changed[layer] = new
            tensors |= _in_deepseeks_form(path, attention, new)
    if not changed:
        raise SwapRefused("its latents have DeepSeek's form already")
    return Swapped(with_mixers(spec, changed), "exact", tensors, {"layers": sorted(changed)})


def _in_deepseeks_form(path: str, old: LatentAttention, new: LatentAttention) -> dict[str, Tensor]:
    """The tensors that are otherwise."""
    made: dict[str, Tensor] = {}
    assert isinstance(old.position, Rotary)
    order = key_order(old.position, old.rope_heads)
    if old.rope_heads > 1:
        queries = np.concatenate((np.arange(old.nope_dim), old.nope_dim + order))
        for part, rows in ((old.queries, queries), ("k_rope_proj", order)):
            made |= {name: Moved(name, partial(reordered, order=rows)) for name in tensors_of(path, old, part)}
    if new.kv_rank == old.kv_rank:
        return made
    down, more = f"{path}.kv_down_proj", new.kv_rank - old.kv_rank
    constants = np.zeros(new.kv_rank)
    constants[-(new.kv_rank // SHARE) :] = CONSTANT
    made[f"{down}.weight"] = Moved(f"{down}.weight", lambda weight: np.pad(weight, ((0, more), (0, 0))))
    before = old.shapes()
    for name, shape in new.shapes().items():
        if name.endswith("bias") and name not in before:
            made[f"{path}.{name}"] = Filled(shape, 0.0, f"{down}.weight")
    if "kv_down_proj.bias" in before:
        made[f"{down}.bias"] = Computed(lambda model: np.pad(model.wide(f"{down}.bias"), (0, more)) + constants)
    else:
        made[f"{down}.bias"] = Filled((new.kv_rank,), lambda: constants, f"{down}.weight")
    norm = CONSTANT / SHARE**0.5
    made[f"{path}.kv_norm.weight"] = Filled((new.kv_rank,), norm, f"{down}.weight")
    for name in (name for part in ("k_up_proj", "v_up_proj") for name in tensors_of(path, old, part)):
        made[name] = Moved(name, lambda weight: np.pad(weight, ((0, 0), (0, more))))
    return made


# --- some of it -------------------------------------------------------------------------------------------------------


def _to_rank(spec: ModelSpec, asked: Asked) -> Swapped:
    """A latent of R numbers, and one rotary key."""
    rank = asked.number("numbers per token in the latent")
    old = grouped(spec, asked)
    most = max(2 * each.kv_heads * each.head_dim for each in old.values())
    if rank >= most:
        note = f"keys and values have {most} numbers per token, which a latent and rotary keys hold: none is left out"
        return dataclasses.replace(_to_whole(spec, asked), notes=(note,))
    for layer, each in old.items():
        if rank > whole(each):
            raise SwapRefused(
                f"layer {layer} has {whole(each)} numbers per token for a latent to hold, not {rank}",
                f"Possible here: mla:{whole(each)} or less, or mla:full ({most} with keys), which changes nothing.",
            )
    several = any(isinstance(each.position, Rotary) and each.kv_heads > 1 for each in old.values())
    if not several and all(rank == whole(each) for each in old.values()):
        return _to_whole(spec, asked)
    changed = {layer: latent_of(each, rank, 1) for layer, each in old.items()}
    if asked.approximate:
        scratch = Scratch.by("latent_fit.averaged_layers", changed)
    else:
        scratch = Scratch.by("latent_fit.fitted_layers", changed, asked.text("a latent is fitted"))
    names = fitted_names(spec, changed, down=not asked.approximate)
    summary = {"layers": sorted(changed), "rank": rank, "by": "weights alone" if asked.approximate else "regression"}
    return Swapped(with_mixers(spec, changed), "approximate", scratch.waiting(names), summary)


def half(spec: ModelSpec) -> list[str]:
    """Half of what there is to hold."""
    attention = spec.blocks[0].attention
    if not isinstance(attention, Attention) or attention.q_norm is not None:
        return []
    return [f"mla:{max(whole(attention) // 2, 1)}"]


entry = partial(
    Swap,
    option="attention",
    takes="keys and values by head",
    source="DeepSeek-V2 2405.04434; TransMLA 2502.07864",
    by_layer=True,
)

ORDER = 100
SWAPS = (
    entry(
        form="mla:full",
        gives="a latent that holds all of them",
        needs="no norm of queries and keys",
        reshape=_to_whole,
        examples=lambda spec: ("mla:full",),
    ),
    entry(
        form="mla:deepseek",
        takes="a latent",
        gives="the form of DeepSeek-V3's: one wide rotary key, a norm of the latent",
        needs="rotary positions, and no bias of queries",
        reshape=_to_deepseek,
        clears=(Clears("*.rope_heads", ours=int), Clears("*.kv_norm", ours=type(None))),
    ),
    entry(
        form="mla:R",
        gives="a latent of R numbers, one rotary key",
        guarantee="approximate",
        needs="no norm of queries and keys and a calibration text",
        reshape=_to_rank,
        examples=half,
        calibrated=True,
    ),
)
