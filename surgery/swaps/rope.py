"""Rotary positions: scaling for a longer context, how pairs lie; `rotary_dim` has those on part of each head."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace

from ...components import Attention, DynamicScaling, LinearScaling, Llama3Scaling, ModelSpec, Rotary, YarnScaling
from ...errors import SwapRefused, UsageError
from ..base import Guarantee, Moved, Promise, Swapped, Tensor
from ..heads import Grouped
from ..layerwise import tensors_of
from ..options import POSITIONS, Option
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
from .rotary_dim import SWAP as PART_OF_A_HEAD
from .rotary_dim import dims

# --- scaling ----------------------------------------------------------------------------------------------------------


class Kind(NamedTuple):
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


def rope_scaling(spec: ModelSpec, asked: Asked, kind: Kind) -> Swapped:
    """Scaled rotary positions; with --approximate positions divided, or nothing but a longer context."""
    text = asked.argument or ""
    if not re.fullmatch(r"\d{1,6}(\.\d{1,6})?", text) or not float(text) > 1:
        raise UsageError(f"--rope-scaling {asked.value!r}: expected a factor above 1 behind the colon, as in yarn:4")
    factor, layers, context = float(text), require_rotary(spec, asked), spec.context_length
    if context is None:
        raise SwapRefused(
            "nothing says for which context this model was trained, which scaling starts from",
            "Say it first: --context N.",
        )
    for layer, rotary in layers.items():
        _require_unscaled(layer, rotary, kind.name)
    name, scale = (kind.name, kind.scale) if not asked.approximate else ("linear", linear)
    after = {layer: scale(rotary, factor, context) for layer, rotary in layers.items()}
    if asked.approximate and kind.name == "linear":
        name, after = "nothing", dict(layers)
    whole = everywhere(spec, layers)
    longer = math.floor(context * factor) if whole and name != "dynamic" else context
    notes: tuple[str, ...] = ()
    if name == "dynamic":
        notes = (f"the same function up to {context:,} tokens; the context stays so in the tree, as in transformers",)
    elif not whole:
        notes = (f"other layers turn as they did: the context stays {context:,} tokens",)
    return rescaled(spec, layers, after, longer, {"scaling": name, "factor": factor}, notes)


def everywhere(spec: ModelSpec, layers: Mapping[int, Rotary]) -> bool:
    """Whether these are all the layers that have rotary positions."""
    return set(layers) == set(rotary_layers(spec, range(len(spec.blocks))))


def rescaled(
    spec: ModelSpec,
    before: Mapping[int, Rotary],
    after: Mapping[int, Rotary],
    context: int | None,
    summary: dict[str, Any],
    notes: tuple[str, ...] = (),
) -> Swapped:
    """The tree with other angles in some layers, and another context."""
    guarantee, promise = held(before, after)
    told = summary | {"context": [spec.context_length, context], "layers": list(before)}
    return Swapped(with_rotary(spec, after, context_length=context), guarantee, {}, told, notes, promise)


def held(before: Mapping[int, Rotary], after: Mapping[int, Rotary]) -> tuple[Guarantee, Promise]:
    """What can be said of the logits when only the angles change: the same where the angles are, and those of dynamic
    scaling are up to the original context.
    """
    lengths: list[int] = []
    for layer, rotary in before.items():
        scalings = [rotary.scaling, after[layer].scaling]
        limits = [each.original_context for each in scalings if isinstance(each, DynamicScaling)]
        trained = (original_context(each) for each in scalings)
        checked = limits or [1, *(limit + 1 for limit in trained if limit is not None)]
        if not all(turns_alike(rotary, after[layer], length) for length in checked):
            return "approximate", Promise()
        if rotary != after[layer]:
            lengths += limits
    return "exact", Promise(length=min(lengths, default=None))


def _require_unscaled(layer: int, rotary: Rotary, name: str) -> None:
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


def _no_scaling(spec: ModelSpec, asked: Asked) -> Swapped:
    """Without scaling, and the context as it was before, where it is known."""
    layers = {layer: rotary for layer, rotary in require_rotary(spec, asked).items() if rotary.scaling is not None}
    if not layers:
        raise SwapRefused(
            "its rotary positions are not scaled", "A larger base (ntk) leaves no record: --position rope:BASE."
        )
    if any(is_neutral(rotary) for rotary in layers.values()):
        raise SwapRefused("its rotary positions are neutral, not scaled", "--position rope turns them on.")

    def shorter(rotary: Rotary, context: int) -> int:
        """The context that a model had before this scaling."""
        if isinstance(rotary.scaling, LinearScaling):
            return max(math.floor(context / rotary.scaling.factor), 1)
        return min(original_context(rotary.scaling) or context, context)

    after = {layer: replace(rotary, scaling=None) for layer, rotary in layers.items()}
    context = spec.context_length
    if context is not None and everywhere(spec, layers):
        context = min(shorter(rotary, context) for rotary in layers.values())
    kinds = sorted({type(rotary.scaling).__name__ for rotary in layers.values()})
    return rescaled(spec, layers, after, context, {"scaling": "none", "from": kinds})


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
        for name, order in _pair_orders(f"blocks.{layer}.attention", spec.blocks[layer].attention, rotary, wanted):
            tensors[name] = Moved(name, partial(reordered, order=order))
    new = with_rotary(spec, {layer: replace(rotary, pairs=wanted) for layer, rotary in layers.items()})
    return Swapped(new, "exact", tensors, {"to": wanted, "layers": list(layers)})


def _pair_orders(path: str, attention: Grouped, rotary: Rotary, wanted: Pairs) -> Iterator[tuple[str, Elements]]:
    """Each tensor with rows that turn, and the order of its rows within a head."""
    order = pair_order(rotary.dim, wanted)
    if isinstance(attention, Attention):
        whole = np.concatenate((order, np.arange(rotary.dim, attention.head_dim)))
        for name in row_tensors(path, attention, "q") + row_tensors(path, attention, "k"):
            yield name, whole
        return
    parts = [attention.nope_dim + part * rotary.dim + order for part in range(attention.rope_heads)]
    queries = np.concatenate((np.arange(attention.nope_dim), *parts))
    yield from ((name, queries) for name in tensors_of(path, attention, attention.queries))
    yield from ((name, order) for name in tensors_of(path, attention, "k_rope_proj"))


def _other_pairs(before: ModelSpec, asked: Asked) -> Step | None:
    """The way back, where all layers go the same way."""
    found = {rotary.pairs for rotary in rotary_layers(before, asked.chosen(before)).values()}
    return asked.again("rope_pairs", found.pop()) if len(found) == 1 else None


entry = partial(Swap, by_layer=True)


def scaled(kind: Kind) -> Swap:
    """A way to scale."""
    needs = "rotary positions that are not scaled, a known context length"
    dynamic: dict[str, Any] = {"guarantee": "approximate"}
    if kind.name == "dynamic":
        needs += "; exact up to the original context"
        dynamic = {"inverse": lambda before, asked: asked.again("rope_scaling", "none")}

    def examples(spec: ModelSpec) -> tuple[str, ...]:
        found = rotary_layers(spec, range(len(spec.blocks))).values()
        plain = found and all(each.scaling is None and each.dim > 2 for each in found)
        return (f"{kind.name}:2",) if plain and spec.context_length is not None else ()

    return entry(
        option="rope_scaling",
        form=f"{kind.name}:FACTOR",
        takes="RoPE",
        gives=f"scaled RoPE ({kind.title})",
        needs=needs,
        source=kind.source,
        reshape=partial(rope_scaling, kind=kind),
        examples=examples,
        **dynamic,
    )


ORDER = 70
OPTIONS = (
    Option(
        "rope_scaling",
        POSITIONS,
        2,
        "Stretch RoPE to a context so many times as long.",
        "yarn:4 | llama3:8 | ntk:2 | linear:2 | dynamic:2",
        words="yarn; llama3; ntk = ntk-aware; linear = pi, position interpolation; dynamic = dynamic ntk; none "
        "= default",
    ),
    Option(
        "rotary_dim",
        POSITIONS,
        3,
        "How many dimensions of a head RoPE turns.",
        "N",
        parts={"": ("rotary dimensions", dims)},
    ),
    Option(
        "rope_pairs",
        POSITIONS,
        4,
        "Which dimensions of a head RoPE turns together.",
        "halves | adjacent",
        words="halves = half, split half, rotate half, neox, gpt-neox; adjacent = interleaved, gpt-j",
    ),
)
SWAPS = (
    *map(scaled, KINDS),
    entry(
        option="rope_scaling",
        form="none",
        takes="scaled RoPE",
        gives="RoPE",
        needs="rotary positions that are scaled; exact for dynamic scaling, up to the original context",
        source="the definitions of the scalings",
        reshape=_no_scaling,
        clears=(Clears("*.scaling", theirs=None),),
    ),
    PART_OF_A_HEAD,
    *(
        entry(
            option="rope_pairs",
            form=wanted,
            takes="RoPE",
            gives=f"RoPE, pairs {described}",
            needs="rotary positions whose pairs lie otherwise",
            source="transformers, convert_llama_weights_to_hf.py: permute",
            reshape=rope_pairs,
            inverse=_other_pairs,
            clears=(Clears("*.pairs", theirs=wanted),),
        )
        for wanted, described in (("adjacent", "of neighbours"), ("halves", "half a head apart"))
    ),
)
