"""Convert latent attention into the form that DeepSeek-V3's code needs ("mla:deepseek"). The function does not change.

Several rotary keys become one that is as wide as all of them together, with repeated frequencies. (The divisors of
LongRoPE can express any frequencies.) A latent without a norm gets a norm without effect: the latent gets constant
elements that are so large that they alone determine the norm's divisor.
"""

from functools import partial

import numpy as np
from msgspec.structs import replace

from ...components import Block, DynamicScaling, LatentAttention, LongRopeScaling, ModelSpec, RMSNorm, Rotary
from ...errors import SwapRefused
from ..base import Computed, Filled, Index, Moved, Swapped, Tensor
from ..layerwise import tensors_of, with_mixers
from ..registry import Asked, Clears
from .kv_heads import latent
from .rotation import NEUTRAL, amplitude, frequencies, original_context, pair_elements, reordered

CONSTANT = 2.0**40  # the value of the constant elements of a latent; next to their squares, others vanish even in fp64
SHARE = 64
"""One of 64 elements of the latent is constant. The square root of 64 is a power of two, so no dtype rounds."""
EPS = 1e-6  # the eps of DeepSeek's norms on latents


def _is_latent(block: Block) -> bool:
    return isinstance(block.mixer("attention"), LatentAttention)


def _deepseek_form(layer: int, attention: LatentAttention, context: int | None) -> LatentAttention:
    """Return the component of a layer's latent attention in DeepSeek-V3's form. `context` is the context length."""
    position = attention.position
    if not isinstance(position, Rotary):
        hint = "Put --position rope:neutral before --attention mla:full, because swaps are applied in their order."
        raise SwapRefused(f"layer {layer} has no RoPE, which DeepSeek's latent attention needs", hint)
    form = replace(attention, rope_heads=1, position=_widened(layer, position, attention.rope_heads, context))
    form = replace(form, fused=True, gathered=position.pairs == "adjacent")
    if attention.kv_norm is not None:
        return form
    rank, low = SHARE * -(-attention.kv_rank // (SHARE - 1)), attention.q_rank is not None
    form = replace(form, kv_rank=rank, kv_norm=RMSNorm(size=rank, eps=EPS))
    return replace(form, qkv_bias=low, kv_bias=not low, output_bias=True)


def _widened(layer: int, rotary: Rotary, keys: int, context: int | None) -> Rotary:
    """Return RoPE for one wide key that replaces `keys` rotary keys. All rotary pairs keep their frequencies."""
    if keys == 1:
        return rotary
    if isinstance(rotary.scaling, DynamicScaling):
        raise SwapRefused(
            f"the RoPE base of layer {layer} depends on the length of the text, which DeepSeek's latent "
            "attention cannot express"
        )
    original = original_context(rotary.scaling)
    by_length = isinstance(rotary.scaling, LongRopeScaling) and original is not None
    lengths = (1, original + 1 if by_length and original is not None else 1)
    slowest = 1 / NEUTRAL.factor  # of pairs that do not turn
    short, long = (tuple(1 / np.maximum(frequencies(rotary, length), slowest)) for length in lengths)
    scaling = LongRopeScaling(
        short_factor=tuple(map(float, short)) * keys,
        long_factor=tuple(map(float, long)) * keys,
        original_context=original if by_length and original is not None else context or 2048,
        attention_factor=amplitude(rotary),
    )
    return replace(rotary, dim=keys * rotary.dim, base=1.0, scaling=scaling, spread=None)


def _key_order(rotary: Rotary, keys: int) -> Index:
    """Return for each element of one wide rotary key its position among the old keys, stored one after the other."""
    if rotary.pairs == "adjacent":
        return np.arange(keys * rotary.dim)
    starts = rotary.dim * np.arange(keys)[:, None]
    return np.concatenate([(starts + part).ravel() for part in pair_elements(rotary.dim, rotary.pairs)])


def _to_deepseek(spec: ModelSpec, asked: Asked) -> Swapped:
    """Convert latent attention into DeepSeek-V3's form."""
    changed: dict[int, LatentAttention] = {}
    tensors: dict[str, Tensor] = {}
    for layer in asked.chosen(spec):
        attention, path = spec.blocks[layer].attention, f"blocks.{layer}.attention"
        if not isinstance(attention, LatentAttention):
            raise SwapRefused(f"layer {layer} does not have latent attention", "First use --attention mla:full.")
        biased = attention.qkv_bias and attention.q_rank is None
        if biased and not asked.weights.zero(f"{path}.q_proj.bias"):
            hint = "Remove it with --drop query.bias, after --attention mla:full."
            raise SwapRefused(
                (f"the queries of layer {layer} have a bias, which DeepSeek's latent attention does not support"), hint
            )
        new = _deepseek_form(layer, attention, spec.context_length)
        if new != attention:
            changed[layer] = new
            tensors |= _in_deepseeks_form(path, attention, new)
    if not changed:
        raise SwapRefused("the latent attention of this model has the form of DeepSeek-V3 already")
    return Swapped(with_mixers(spec, changed), "exact", tensors, {"layers": sorted(changed)})


def _in_deepseeks_form(path: str, old: LatentAttention, new: LatentAttention) -> dict[str, Tensor]:
    """Return the tensors of a latent attention that the conversion into DeepSeek-V3's form changes."""
    tensors: dict[str, Tensor] = {}
    assert isinstance(old.position, Rotary)
    order = _key_order(old.position, old.rope_heads)
    if old.rope_heads > 1:
        queries = np.concatenate((np.arange(old.nope_dim), old.nope_dim + order))
        for part, rows in ((old.queries, queries), ("k_rope_proj", order)):
            tensors |= {name: Moved(name, partial(reordered, order=rows)) for name in tensors_of(path, old, part)}
    if new.kv_rank == old.kv_rank:
        return tensors
    down, added = f"{path}.kv_down_proj", new.kv_rank - old.kv_rank
    constants = np.zeros(new.kv_rank)
    constants[-(new.kv_rank // SHARE) :] = CONSTANT
    tensors[f"{down}.weight"] = Moved(f"{down}.weight", lambda weight: np.pad(weight, ((0, added), (0, 0))))
    before = old.shapes()
    for name, shape in new.shapes().items():
        if name.endswith("bias") and name not in before:
            tensors[f"{path}.{name}"] = Filled(shape, 0.0, f"{down}.weight")
    if "kv_down_proj.bias" in before:
        tensors[f"{down}.bias"] = Computed(lambda model: np.pad(model.wide(f"{down}.bias"), (0, added)) + constants)
    else:
        tensors[f"{down}.bias"] = Filled((new.kv_rank,), lambda: constants, f"{down}.weight")
    norm = CONSTANT / SHARE**0.5
    tensors[f"{path}.kv_norm.weight"] = Filled((new.kv_rank,), norm, f"{down}.weight")
    for name in (name for part in ("k_up_proj", "v_up_proj") for name in tensors_of(path, old, part)):
        tensors[name] = Moved(name, lambda weight: np.pad(weight, ((0, 0), (0, added))))
    return tensors


ORDER = 91
SWAPS = (
    latent(
        form="mla:deepseek",
        takes="latent attention (MLA)",
        gives="latent attention in DeepSeek-V3's form, with one wide rotary key and a norm of the latent",
        needs="Needs RoPE, and queries without a bias",
        reshape=_to_deepseek,
        examples=lambda spec: ("mla:deepseek",) if any(map(_is_latent, spec.blocks)) else (),
        clears=(Clears("*.rope_heads", ours=int), Clears("*.kv_norm", ours=type(None))),
    ),
)
