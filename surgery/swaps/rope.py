"""Rotary positions: scaling for a longer context, how pairs lie; `rotary_dim` has those on part of each head."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
import numpy as np

from ...components import (
    Attention,
    DynamicScaling,
    LatentAttention,
    LinearScaling,
    Llama3Scaling,
    ModelSpec,
    RopeScaling,
    Rotary,
    YarnScaling,
)
from ...errors import SwapRefused, UsageError
from ..base import Guarantee, Moved, Promise, Swapped, Tensor
from ..layerwise import blocks_text, unknown, with_attention
from ..registry import Asked, Clears, Step, Swap
from ..rotation import (
    Elements,
    Pairs,
    is_neutral,
    original_context,
    pair_elements,
    reordered,
    require_rotary,
    rotary_layers,
    row_tensors,
    turns_alike,
    with_rotary,
)
from .rotary_dim import rotary_dim

__all__ = ["SWAPS"]

replace = msgspec.structs.replace


# --- scaling ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """A way to scale: its name, what becomes of the positions, what it is called, and its source."""

    name: str
    scale: Callable[[Rotary, float, int], Rotary]
    title: str
    source: str


def ntk(rotary: Rotary, factor: float, _context: int) -> Rotary:
    """A larger base: the fastest pair turns as it did, the slowest `factor` times slower."""
    return replace(rotary, base=rotary.base * factor ** (rotary.dim / (rotary.dim - 2)))


def linear(rotary: Rotary, factor: float, _context: int) -> Rotary:
    """Positions divided; on divided positions, divided again."""
    before = rotary.scaling.factor if isinstance(rotary.scaling, LinearScaling) else 1.0
    return replace(rotary, scaling=LinearScaling(factor=before * factor))


def unchanged(rotary: Rotary, _factor: float, _context: int) -> Rotary:
    """As it is."""
    return rotary


def dynamic(rotary: Rotary, factor: float, context: int) -> Rotary:
    """The base grows with the sequence, from the original context on."""
    return replace(rotary, scaling=DynamicScaling(factor=factor, original_context=context))


def yarn(rotary: Rotary, factor: float, context: int) -> Rotary:
    """With the paper's temperature (section 3.4) and transformers' defaults (_compute_yarn_parameters)."""
    attention = 0.1 * math.log(factor) + 1.0
    return replace(rotary, scaling=YarnScaling(factor=factor, original_context=context, attention_factor=attention))


def llama3(rotary: Rotary, factor: float, context: int) -> Rotary:
    """With Llama 3.1's own bounds of the ramp, 1 and 4 turns within the original context."""
    scaling = Llama3Scaling(factor=factor, low_freq_factor=1.0, high_freq_factor=4.0, original_context=context)
    return replace(rotary, scaling=scaling)


KINDS = (
    Kind("yarn", yarn, "YaRN", "Peng et al. 2309.00071; transformers modeling_rope_utils.py"),
    Kind("llama3", llama3, "Llama 3's", "Llama 3.1; transformers modeling_rope_utils.py"),
    Kind("ntk", ntk, "larger base (NTK)", "bloc97 2023, NTK-aware scaled RoPE; 2309.00071, section 3.1"),
    Kind("linear", linear, "positions divided", "Chen et al. 2306.15595; kaiokendev 2023"),
    Kind("dynamic", dynamic, "base grows with the sequence", "emozilla 2023; transformers modeling_rope_utils.py"),
)


def factor_of(asked: Asked) -> float:
    """The factor that is asked for."""
    text = asked.argument or ""
    if not re.fullmatch(r"\d{1,6}(\.\d{1,6})?", text) or not float(text) > 1:
        raise UsageError(f"--rope-scaling {asked.value!r}: expected a factor above 1 behind the colon, as in yarn:4")
    return float(text)


def rope_scaling(spec: ModelSpec, asked: Asked, kind: Kind) -> Swapped:
    """Scaled rotary positions; with --approximate positions divided, and where that is what is asked for, nothing but
    a longer context.
    """
    factor = factor_of(asked)
    layers = require_rotary(spec, asked)
    context = spec.context_length
    if context is None:
        raise SwapRefused(
            "nothing says for which context this model was trained, which scaling starts from",
            "Say it first: --context N.",
        )
    for layer, rotary in layers.items():
        require_unscaled(layer, rotary, kind.name)
    name, scale = (kind.name, kind.scale) if not asked.approximate else ("linear", linear)
    if asked.approximate and kind.name == "linear":
        name, scale = "nothing", unchanged
    after = {layer: scale(rotary, factor, context) for layer, rotary in layers.items()}
    whole = set(layers) == set(rotary_layers(spec, range(len(spec.blocks))))
    longer = math.floor(context * factor) if whole and name != "dynamic" else context
    new = with_attention(spec, with_rotary(spec, after), context_length=longer)
    notes: tuple[str, ...] = ()
    if name == "dynamic":
        notes = (f"the same function up to {context:,} tokens; the context stays so in the tree, as in transformers",)
    elif not whole:
        notes = (f"other layers turn as they did: the context stays {context:,} tokens",)
    summary = {"scaling": name, "factor": factor, "context": [context, longer], "layers": list(layers)}
    guarantee, promise = held(layers, after)
    return Swapped(new, guarantee, {}, summary, notes, promise)


def held(before: dict[int, Rotary], after: dict[int, Rotary]) -> tuple[Guarantee, Promise]:
    """What can be said of the logits when only the angles change: the same where the angles are, and those of dynamic
    scaling are up to the original context.
    """
    lengths: list[int] = []
    for layer, rotary in before.items():
        limits = [original_context(each.scaling) for each in (rotary, after[layer])]
        dynamic_limits = [
            each.scaling.original_context for each in (rotary, after[layer]) if isinstance(each.scaling, DynamicScaling)
        ]
        checked = dynamic_limits or [1, *(limit + 1 for limit in limits if limit is not None)]
        if not all(turns_alike(rotary, after[layer], length) for length in checked):
            return "approximate", Promise()
        if rotary != after[layer]:
            lengths += dynamic_limits
    return "exact", Promise(length=min(lengths, default=None))


def require_unscaled(layer: int, rotary: Rotary, name: str) -> None:
    """Raise SwapRefused where a scaling does not compose with what is there."""
    if is_neutral(rotary):
        raise SwapRefused(f"the rotary positions of layer {layer} are neutral: there is nothing to scale")
    if rotary.scaling is not None and not (name == "linear" and isinstance(rotary.scaling, LinearScaling)):
        raise SwapRefused(
            f"the rotary positions of layer {layer} are scaled already ({type(rotary.scaling).__name__}), and {name}"
            " does not compose with that",
            "First --rope-scaling none. Only linear on linear composes: their factors multiply.",
        )
    if name in ("ntk", "dynamic") and rotary.dim == 2:
        raise SwapRefused(
            f"{name} divides by the rotary dimension less 2, which is 0 in layer {layer}",
            "Possible here: linear, yarn, llama3.",
        )


def no_scaling(spec: ModelSpec, asked: Asked) -> Swapped:
    """Without scaling, and the context as it was before, where it is known."""
    layers = {layer: rotary for layer, rotary in require_rotary(spec, asked).items() if rotary.scaling is not None}
    if not layers:
        raise SwapRefused(
            "its rotary positions are not scaled", "A larger base (ntk) leaves no record: --position rope:BASE."
        )
    if any(is_neutral(rotary) for rotary in layers.values()):
        raise SwapRefused("its rotary positions are neutral, not scaled", "--position rope turns them on.")
    context = spec.context_length
    after = {layer: replace(rotary, scaling=None) for layer, rotary in layers.items()}
    whole = set(layers) == set(rotary_layers(spec, range(len(spec.blocks))))
    shorter = context
    if context is not None and whole:
        shorter = min(unscaled_context(rotary.scaling, context) for rotary in layers.values())
    new = with_attention(spec, with_rotary(spec, after), context_length=shorter)
    guarantee, promise = held(layers, after)
    kinds = sorted({type(rotary.scaling).__name__ for rotary in layers.values()})
    summary = {"scaling": "none", "from": kinds, "context": [context, shorter], "layers": list(layers)}
    return Swapped(new, guarantee, {}, summary, (), promise)


def unscaled_context(scaling: RopeScaling | None, context: int) -> int:
    """The context that a model had before this scaling."""
    if isinstance(scaling, LinearScaling):
        return max(math.floor(context / scaling.factor), 1)
    return min(original_context(scaling) or context, context)


def unscale(_before: ModelSpec, asked: Asked) -> Step | None:
    """What undoes dynamic scaling."""
    return Step("rope_scaling", "none", blocks=blocks_text(asked))


# --- how pairs lie ----------------------------------------------------------------------------------------------------


def pair_order(dim: int, pairs: Pairs) -> Elements:
    """Where the elements of a head come from when their pairs are to lie as `pairs` says, from the other way."""
    if pairs == "adjacent":
        return np.stack(pair_elements(dim, "halves"), axis=1).ravel()
    return np.concatenate(pair_elements(dim, "adjacent"))


def rope_pairs(spec: ModelSpec, asked: Asked) -> Swapped:
    """The rows of q and k permuted, within each head."""
    wanted: Pairs = "adjacent" if asked.value == "adjacent" else "halves"
    layers = {layer: rotary for layer, rotary in require_rotary(spec, asked).items() if rotary.pairs != wanted}
    if not layers:
        raise SwapRefused(f"its rotary pairs are {wanted} already")
    tensors: dict[str, Tensor] = {}
    for layer, rotary in layers.items():
        for name, order in pair_orders(f"blocks.{layer}.attention", spec.blocks[layer].attention, rotary, wanted):
            tensors[name] = Moved(name, partial(reordered, order=order))
    after = {layer: replace(rotary, pairs=wanted) for layer, rotary in layers.items()}
    new = with_attention(spec, with_rotary(spec, after))
    return Swapped(new, "exact", tensors, {"to": wanted, "layers": list(layers)})


def pair_orders(
    path: str, attention: Attention | LatentAttention, rotary: Rotary, wanted: Pairs
) -> Iterator[tuple[str, Elements]]:
    """Each tensor with rows that turn, and the order of its rows within a head."""
    order = pair_order(rotary.dim, wanted)
    match attention:
        case Attention():
            whole = np.concatenate((order, np.arange(rotary.dim, attention.head_dim)))
            for name in row_tensors(path, attention, "q") + row_tensors(path, attention, "k"):
                yield name, whole
        case LatentAttention():
            parts = [attention.nope_dim + part * rotary.dim + order for part in range(attention.rope_heads)]
            queries = np.concatenate((np.arange(attention.nope_dim), *parts))
            for suffix in ("weight", *(["bias"] if attention.qkv_bias else [])):
                yield f"{path}.q_proj.{suffix}", queries
                yield f"{path}.k_rope_proj.{suffix}", order
        case _:
            raise unknown(path, attention, "attention")


def other_pairs(before: ModelSpec, asked: Asked) -> Step | None:
    """The way back, where all layers go the same way."""
    found = {rotary.pairs for rotary in rotary_layers(before, asked.chosen(before)).values()}
    return Step("rope_pairs", found.pop(), blocks=blocks_text(asked)) if len(found) == 1 else None


# --- the list ---------------------------------------------------------------------------------------------------------


def _rotary(spec: ModelSpec) -> list[Rotary]:
    return list(rotary_layers(spec, range(len(spec.blocks))).values())


def _scalable(kind: Kind, spec: ModelSpec) -> Sequence[str]:
    found = _rotary(spec)
    plain = found and all(rotary.scaling is None and rotary.dim > 2 for rotary in found)
    return (f"{kind.name}:2",) if plain and spec.context_length is not None else ()


def _parts(spec: ModelSpec) -> Sequence[str]:
    dims = [rotary.dim for rotary in _rotary(spec)]
    half = min(dims, default=0) // 4 * 2
    return (f"{half}", f"{half}:fastest") if half else ()


ORDER = 70
SWAPS: tuple[Swap, ...] = (
    *(
        Swap(
            option="rope_scaling",
            form=f"{kind.name}:FACTOR",
            takes="RoPE",
            gives=f"scaled RoPE ({kind.title})",
            guarantee="exact" if kind.name == "dynamic" else "approximate",
            needs="rotary positions that are not scaled, a known context length"
            + ("; exact up to the original context" if kind.name == "dynamic" else ""),
            source=kind.source,
            reshape=partial(rope_scaling, kind=kind),
            examples=partial(_scalable, kind),
            by_layer=True,
            inverse=unscale if kind.name == "dynamic" else lambda before, asked: None,
        )
        for kind in KINDS
    ),
    Swap(
        option="rope_scaling",
        form="none",
        takes="scaled RoPE",
        gives="RoPE",
        guarantee="exact",
        needs="rotary positions that are scaled; exact for dynamic scaling, up to the original context",
        source="the definitions of the scalings",
        reshape=no_scaling,
        examples=lambda spec: ("none",) if any(rotary.scaling for rotary in _rotary(spec)) else (),
        clears=(Clears("*.scaling", theirs=None),),
        by_layer=True,
    ),
    Swap(
        option="rotary_dim",
        form="N",
        takes="RoPE",
        gives="RoPE on part of each head",
        guarantee="exact",
        needs="an even number less than what turns now; exact where the pairs that go do not turn or are zero",
        source="derived for gptkit, after GPT-NeoX' partial rotary and DroPE 2512.12167",
        reshape=rotary_dim,
        examples=_parts,
        clears=(Clears("*.dim", "rotary_dim={theirs}"),),
        by_layer=True,
    ),
    *(
        Swap(
            option="rope_pairs",
            form=wanted,
            takes="RoPE",
            gives=f"RoPE, pairs {described}",
            guarantee="exact",
            needs="rotary positions whose pairs lie otherwise",
            source="transformers, convert_llama_weights_to_hf.py: permute",
            reshape=rope_pairs,
            examples=partial(
                lambda wanted, spec: (wanted,) if any(r.pairs != wanted for r in _rotary(spec)) else (), wanted
            ),
            by_layer=True,
            inverse=other_pairs,
            clears=(Clears("*.pairs", theirs=wanted),),
        )
        for wanted, described in (("adjacent", "of neighbours"), ("halves", "half a head apart"))
    ),
)
