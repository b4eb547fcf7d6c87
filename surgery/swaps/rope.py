"""Change rotary positions: scale them for a longer context, reorder the pairs, or restrict RoPE to part of a head.

With RoPE on part of a head, some pairs rotate as before, and the others no longer rotate.
"""

import math
import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Literal

import numpy as np
from msgspec.structs import replace

from ...components import (
    Attention,
    DynamicScaling,
    LatentAttention,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ModelSpec,
    RopeScaling,
    Rotary,
    YarnScaling,
)
from ...errors import SwapRefused, UsageError
from ..base import Computed, Guarantee, Index, Model, Moved, Promise, Swapped, Tensor, Wide
from ..layerwise import Grouped, tensors_of, with_mixers
from ..options import POSITIONS, Option, Parts
from ..refits import with_refits
from ..registry import Asked, Clears, Swap
from .rotation import (
    Pairs,
    amplitude,
    for_width,
    frequencies,
    is_neutral,
    mean_rotation,
    original_context,
    pair_elements,
    reordered,
    require_rotary,
    rotary_layers,
    row_tensors,
    turned_queries,
    turns_alike,
    with_rotary,
)

# --- scaling ----------------------------------------------------------------------------------------------------------


_KINDS = {
    "yarn": ("YaRN", "Peng et al. 2309.00071; transformers modeling_rope_utils.py"),
    "llama3": ("as in Llama 3", "Llama 3.1; transformers modeling_rope_utils.py"),
    "ntk": ("NTK: a larger base", "bloc97 2023, NTK-aware scaled RoPE; 2309.00071, section 3.1"),
    "linear": ("positions divided by the factor", "Chen et al. 2306.15595; kaiokendev 2023"),
    "dynamic": ("dynamic NTK: the base grows with the sequence", "emozilla 2023; transformers modeling_rope_utils.py"),
}
"""The titles and sources of the scaling methods."""


def scaled(rotary: Rotary, name: str, factor: float, context: int) -> Rotary:
    """Return RoPE scaled by the method `name` and a factor. `context` is the context length before the scaling."""
    fields: dict[str, Any] = {"factor": factor, "original_context": context}
    scaling: RopeScaling
    match name:
        case "ntk":  # the fastest pair turns as it did, the slowest `factor` times slower
            return replace(rotary, base=rotary.base * factor ** (rotary.exponent / (rotary.dim - 2)))
        case "linear":  # on divided positions, divided again
            before = rotary.scaling.factor if isinstance(rotary.scaling, LinearScaling) else 1.0
            scaling = LinearScaling(factor=before * factor)
        case "dynamic":
            scaling = DynamicScaling(**fields)
        case "yarn":  # with the paper's temperature (section 3.4) and transformers' defaults (_compute_yarn_parameters)
            scaling = YarnScaling(**fields, attention_factor=0.1 * math.log(factor) + 1.0)
        case "llama3":  # Llama 3.1's own bounds of the ramp, 1 and 4 turns within the original context
            scaling = Llama3Scaling(**fields, low_freq_factor=1.0, high_freq_factor=4.0)
        case _:
            raise AssertionError(name)
    return replace(rotary, scaling=scaling)


def _rope_scaling(kind: str, spec: ModelSpec, asked: Asked) -> Swapped:
    """Scale rotary positions for a longer context by the method `kind`.

    With --approximate, positions are only divided by the factor.
    """
    text = asked.argument or ""
    if not re.fullmatch(r"\d{1,6}(\.\d{1,6})?", text) or not float(text) > 1:
        raise UsageError(f"--rope-scaling {asked.value!r}: expected a factor above 1 after the colon, such as yarn:4")
    factor, layers, context = float(text), require_rotary(spec, asked), spec.context_length
    if context is None:
        hint = "First set it with --context N."
        raise SwapRefused("RoPE scaling extends the context length of a model, but this model states none", hint)
    for layer, rotary in layers.items():
        _require_unscaled(layer, rotary, kind)
    name = "linear" if asked.approximate else kind
    after = {layer: scaled(rotary, name, factor, context) for layer, rotary in layers.items()}
    whole = layers.keys() == rotary_layers(spec, range(len(spec.blocks))).keys()
    longer = math.floor(context * factor) if whole and name != "dynamic" else context
    notes: tuple[str, ...] = ()
    if name == "dynamic":
        notes = (
            f"the model computes the same function up to {context:,} tokens; the context length is "
            "unchanged, as in transformers",
        )
    elif not whole:
        notes = (f"the other layers are not scaled, so the context length stays {context:,} tokens",)
    return _rescaled(spec, layers, after, longer, {"scaling": name, "factor": factor}, notes)


def _rescaled(
    spec: ModelSpec,
    before: Mapping[int, Rotary],
    after: Mapping[int, Rotary],
    context: int | None,
    summary: dict[str, Any],
    notes: tuple[str, ...] = (),
) -> Swapped:
    """Return the result of a swap that changes the rotary positions of some layers, and the context length.

    `before` and `after` have the old and new rotary positions by layer. `summary` is added to the output's record.
    """
    guarantee, promise = _guarantee_of_angles(before, after)
    record = summary | {"context": [spec.context_length, context], "layers": list(before)}
    return Swapped(with_rotary(spec, after, context_length=context), guarantee, {}, record, notes, promise)


def _guarantee_of_angles(before: Mapping[int, Rotary], after: Mapping[int, Rotary]) -> tuple[Guarantee, Promise]:
    """Return the guarantee of a change of rotary positions, and the sequence length up to which it holds.

    The change is exact if all pairs rotate by the same angles. With dynamic scaling, this may be so only up to the
    original context.
    """
    lengths: list[int] = []
    for layer, rotary in before.items():
        scalings = [rotary.scaling, after[layer].scaling]
        limits = [scaling.original_context for scaling in scalings if isinstance(scaling, DynamicScaling)]
        trained = (original_context(scaling) for scaling in scalings)
        checked = limits or [1, *(limit + 1 for limit in trained if limit is not None)]
        if not all(turns_alike(rotary, after[layer], length) for length in checked):
            return "approximate", Promise()
        if rotary != after[layer]:
            lengths += limits
    return "exact", Promise(length=min(lengths, default=None))


def _require_unscaled(layer: int, rotary: Rotary, name: str) -> None:
    """Raise SwapRefused if a layer's RoPE is scaled already, and the method `name` cannot be added to this scaling."""
    if is_neutral(rotary):
        raise SwapRefused(f"RoPE of layer {layer} has only frequencies of 0, so scaling would change nothing")
    if rotary.scaling is not None and not (name == "linear" and isinstance(rotary.scaling, LinearScaling)):
        raise SwapRefused(
            f"RoPE of layer {layer} is already scaled ({type(rotary.scaling).__name__}), and {name}"
            " cannot be combined with that",
            "First use --rope-scaling none. Only linear scalings can be combined: their factors multiply.",
        )
    if name in ("ntk", "dynamic") and rotary.dim == 2:
        hint = "Possible here: linear, yarn, llama3."
        raise SwapRefused(f"{name} divides by the rotary dimension minus 2, which is 0 in layer {layer}", hint)


def _no_scaling(spec: ModelSpec, asked: Asked) -> Swapped:
    """Remove the scaling of RoPE. If the context length before the scaling is known, restore it."""
    layers = {layer: rotary for layer, rotary in require_rotary(spec, asked).items() if rotary.scaling is not None}
    if not layers:
        hint = "If it was scaled by a larger base (ntk), restore the base with --position rope:BASE."
        raise SwapRefused("the model's RoPE is not scaled", hint)
    if any(is_neutral(rotary) for rotary in layers.values()):
        raise SwapRefused(
            "the model's RoPE has only frequencies of 0, so scaling would change nothing",
            "Use --position rope to turn it on.",
        )

    def shorter(rotary: Rotary, context: int) -> int:
        """Return the context length that the model had before the scaling of this layer's RoPE."""
        if isinstance(rotary.scaling, LinearScaling):
            return max(math.floor(context / rotary.scaling.factor), 1)
        return min(original_context(rotary.scaling) or context, context)

    after = {layer: replace(rotary, scaling=None) for layer, rotary in layers.items()}
    context = spec.context_length
    if context is not None and layers.keys() == rotary_layers(spec, range(len(spec.blocks))).keys():
        context = min(shorter(rotary, context) for rotary in layers.values())
    kinds = sorted({type(rotary.scaling).__name__ for rotary in layers.values()})
    return _rescaled(spec, layers, after, context, {"scaling": "none", "from": kinds})


# --- the order of pairs -----------------------------------------------------------------------------------------------


def _pair_order(dim: int, pairs: Pairs) -> Index:
    """Return for each rotated element of a head its old position, if the order of rotary pairs becomes `pairs`."""
    if pairs == "adjacent":
        return np.stack(pair_elements(dim, "halves"), axis=1).ravel()
    return np.concatenate(pair_elements(dim, "adjacent"))


def _rope_pairs(spec: ModelSpec, asked: Asked) -> Swapped:
    """Change the order of rotary pairs to "halves" or "adjacent". This permutes rows of q and k within each head."""
    wanted: Pairs = "adjacent" if asked.value == "adjacent" else "halves"
    layers = {layer: rotary for layer, rotary in require_rotary(spec, asked).items() if rotary.pairs != wanted}
    if not layers:
        raise SwapRefused(f"the pairs of dimensions that RoPE rotates are already {wanted}")
    tensors: dict[str, Tensor] = {}
    for layer, rotary in layers.items():
        for name, order in _pair_orders(f"blocks.{layer}.attention", spec.blocks[layer].attention, rotary, wanted):
            tensors[name] = Moved(name, partial(reordered, order=order))
    new = with_rotary(spec, {layer: replace(rotary, pairs=wanted) for layer, rotary in layers.items()})
    return Swapped(new, "exact", tensors, {"to": wanted, "layers": list(layers)})


def _pair_orders(path: str, attention: Grouped, rotary: Rotary, wanted: Pairs) -> Iterator[tuple[str, Index]]:
    """Yield the names of an attention's tensors whose rows RoPE rotates, each with the new order of rows in a head.

    `wanted` is the new order of rotary pairs.
    """
    order = _pair_order(rotary.dim, wanted)
    if isinstance(attention, Attention):
        whole = np.concatenate((order, np.arange(rotary.dim, attention.head_dim)))
        for name in row_tensors(path, attention, "q") + row_tensors(path, attention, "k"):
            yield name, whole
        return
    parts = [attention.nope_dim + part * rotary.dim + order for part in range(attention.rope_heads)]
    queries = np.concatenate((np.arange(attention.nope_dim), *parts))
    yield from ((name, queries) for name in tensors_of(path, attention, attention.queries))
    yield from ((name, order) for name in tensors_of(path, attention, "k_rope_proj"))


# --- RoPE on part of each head ----------------------------------------------------------------------------------------


def _rotary_dim(spec: ModelSpec, asked: Asked) -> Swapped:
    """Restrict RoPE to part of each head.

    The other pairs are moved to the end of the head, and the mean of their rotation is folded into the queries. With
    --approximate, no weights change: the first elements of each head rotate at the frequencies of the new rotary
    dimension, as with partial_rotary_factor in a config.
    """
    match = re.fullmatch(r"(\d{1,9})(?::(slowest|fastest))?", asked.value)
    if match is None:
        raise UsageError(
            f"--rotary-dim {asked.value!r}: expected a number such as 16, or 16:fastest, which drops the pairs with "
            "the highest frequencies"
        )
    size, drop = int(match[1]), match[2] or "slowest"
    layers = require_rotary(spec, asked)
    after, tensors, exact = dict[int, Attention](), dict[str, Tensor](), not asked.approximate
    for layer, rotary in layers.items():
        attention, path = spec.blocks[layer].attention, f"blocks.{layer}.attention"
        if isinstance(attention, LatentAttention):
            hint = "Put --rotary-dim before --attention mla, because swaps are applied in their order."
            raise SwapRefused(
                f"layer {layer} has latent attention with separate rotary keys, which this swap does not support", hint
            )
        _require_part(layer, rotary, size)
        if asked.approximate:
            plain = replace(rotary, dim=size, scaling=for_width(rotary.scaling, size), spread=None)
            after[layer] = replace(attention, position=plain)
            continue
        after[layer] = replace(attention, position=kept_rotary(rotary, size, drop))
        pairs = kept_pairs(rotary.dim, size, drop)
        matter = partial(_dropped_matter, path=path, attention=attention, rotary=rotary, pairs=pairs)
        exact = exact and (is_neutral(rotary) or not asked.weights.ask(matter, True, False))
        tensors |= _part_tensors(path, attention, rotary, pairs, spec.context_length)
    summary = {
        "dropped": "in place" if asked.approximate else f"{drop} pairs",
        "dims": sorted({rotary.dim for rotary in layers.values()}),
        "to": size,
        "layers": list(layers),
    }
    dynamic = [rotary.scaling for rotary in layers.values() if isinstance(rotary.scaling, DynamicScaling)]
    # Beyond the original context, the growth of a dynamic base depends on the rotary dimension, which has changed.
    promise = Promise(length=min((scaling.original_context for scaling in dynamic), default=None) if exact else None)
    new = with_mixers(spec, after)
    swapped = Swapped(new, "exact" if exact else "approximate", tensors, summary, promise=promise)
    return with_refits(swapped, asked, list(layers))


def _require_part(layer: int, rotary: Rotary, size: int) -> None:
    """Raise SwapRefused if RoPE cannot be restricted to `size` elements of a head."""
    widest, state = rotary.dim - 2, f"RoPE rotates {rotary.dim} dimensions of each head in layer {layer}"
    possible = (
        f"Possible here: the even numbers from 2 to {widest}." if widest >= 2 else "No smaller number is possible."
    )
    if size % 2 or size < 2:
        raise SwapRefused(f"RoPE rotates pairs of dimensions: expected an even number from 2, not {size}", possible)
    if size >= rotary.dim:
        raise SwapRefused(f"{state} already" if size == rotary.dim else f"{state}, which is less than {size}", possible)
    if isinstance(rotary.scaling, DynamicScaling) and size == 2:
        raise SwapRefused(
            "dynamic RoPE scaling divides by the rotary dimension minus 2, which would be 0", "Possible here: from 4."
        )


def kept_pairs(dim: int, size: int, drop: str) -> Index:
    """Return the numbers of the pairs that still rotate if RoPE is restricted from `dim` to `size` elements of a head.

    `drop` is "slowest" or "fastest": the pairs that no longer rotate. Pair 0 is the fastest.
    """
    return np.arange(size // 2) if drop == "slowest" else np.arange((dim - size) // 2, dim // 2)


def kept_rotary(rotary: Rotary, size: int, drop: str) -> Rotary:
    """Return RoPE of `size` elements whose pairs have the same frequencies as the pairs in `kept_pairs` have now.

    base^(-2i/dim) = (base^(size/dim))^(-2i/size), so another base gives the same frequencies. If a scaling does not fit
    that, the frequency of every pair is listed as a divisor, as in longrope.
    """
    remaining = kept_pairs(rotary.dim, size, drop)
    original = original_context(rotary.scaling)
    dynamic_scaling = isinstance(rotary.scaling, DynamicScaling)
    lengths = [1] if original is None or dynamic_scaling else [1, original + 1]
    wanted = [frequencies(rotary, length)[remaining] for length in lengths]
    first = rotary.base ** (2 * remaining[0] / rotary.exponent)  # the slowdown of the first remaining pair
    part = replace(rotary, dim=size, base=rotary.base ** (size / rotary.exponent), scaling=None, spread=None)
    by_pair = isinstance(rotary.scaling, LongRopeScaling)
    candidates = [] if by_pair else [replace(part, scaling=for_width(rotary.scaling, size))]
    if rotary.scaling is None or isinstance(rotary.scaling, LinearScaling):
        divided = getattr(rotary.scaling, "factor", 1.0)
        candidates.append(replace(part, scaling=LinearScaling(factor=divided * float(first))))
    for candidate in candidates:
        pairs = zip((frequencies(candidate, length) for length in lengths), wanted, strict=True)
        if all(np.allclose(new, old, rtol=1e-13, atol=0) for new, old in pairs):
            return candidate
    if dynamic_scaling or original is None:
        raise SwapRefused(
            "the model's RoPE scaling computes each frequency from all pairs, so gptkit cannot drop the fastest pairs",
            f"Use --rotary-dim {size} to drop the slowest pairs.",
        )
    plain = frequencies(part)
    short, long = (tuple(map(float, plain / turns)) for turns in wanted)
    scaling = LongRopeScaling(
        short_factor=short, long_factor=long, original_context=original, attention_factor=amplitude(rotary)
    )
    return replace(part, scaling=scaling)


def _part_order(rotary: Rotary, pairs: Index, head_dim: int) -> Index:
    """Return the new order of a head's elements: first the pairs that still rotate (`pairs`), then the others."""
    first, second = (elements[pairs] for elements in pair_elements(rotary.dim, rotary.pairs))
    together = np.concatenate((first, second)) if rotary.pairs == "halves" else np.stack((first, second), 1).ravel()
    rest = np.setdiff1d(np.arange(head_dim), together)
    return np.concatenate((together, rest))


def _dropped_matter(model: Model, path: str, attention: Attention, rotary: Rotary, pairs: Index) -> bool:
    """Return whether a pair that no longer rotates affects a score, because neither its queries nor keys are zero.

    `pairs` are the pairs that still rotate.
    """
    first, second = pair_elements(rotary.dim, rotary.pairs)

    def sizes(side: Literal["q", "k"]) -> np.ndarray:
        """Return the largest absolute weight of each rotary pair, (kv_heads, pairs), for queries or keys.

        If a norm subtracts the mean of a head, no pair counts as zero.
        """
        heads, norm = (attention.heads, attention.q_norm) if side == "q" else (attention.kv_heads, attention.k_norm)
        total = np.full((heads, rotary.dim // 2), float(norm is not None and norm.centred))

        def of_pairs(rows: Wide) -> np.ndarray:
            elements = rows.reshape(len(rows) // attention.head_dim, attention.head_dim, -1).max(axis=2)
            return np.asarray(np.maximum(elements[:, first], elements[:, second]))

        for name in tensors_of(path, attention, f"{side}_proj"):
            total = total + of_pairs(np.abs(model.wide(name)))
        if norm is not None and "weight" in norm.shapes():
            total = total * of_pairs(np.abs(norm.factor(model.wide(f"{path}.{side}_norm.weight"))))
        if norm is not None and "bias" in norm.shapes():
            total = total + of_pairs(np.abs(model.wide(f"{path}.{side}_norm.bias")))
        return np.asarray(total.reshape(attention.kv_heads, -1, rotary.dim // 2).max(axis=1))

    dropped = np.setdiff1d(np.arange(rotary.dim // 2), pairs)
    return bool((sizes("q") * sizes("k"))[:, dropped].any())


def _part_tensors(
    path: str, attention: Attention, rotary: Rotary, pairs: Index, context: int | None
) -> dict[str, Tensor]:
    """Return the tensors of q and k in the new order of elements, for RoPE on the pairs `pairs` only.

    The mean rotation of the other pairs is folded into q. `context` is the context length.
    """
    order = _part_order(rotary, pairs, attention.head_dim)
    names = row_tensors(path, attention, "q") + row_tensors(path, attention, "k")
    tensors: dict[str, Tensor] = {}
    if not np.array_equal(order, np.arange(attention.head_dim)):
        tensors = {name: Moved(name, partial(reordered, order=order)) for name in names}
    factors = mean_rotation(rotary, context, attention.window, near=1.0)
    factors[pairs] = 1
    for name, make in turned_queries(path, attention, rotary, factors).items():
        tensors[name] = Computed(lambda model, make=make: reordered(make(model), order))  # type: ignore[misc]
    return tensors


def _examples(spec: ModelSpec) -> tuple[str, ...]:
    """Return the values that `gptkit swaps` tries on a model: half of its smallest rotary dimension."""
    dims = [rotary.dim for rotary in rotary_layers(spec, range(len(spec.blocks))).values()]
    half = min(dims, default=0) // 4 * 2
    return (f"{half}", f"{half}:fastest") if half else ()


def _dims(spec: ModelSpec) -> set[int | None]:
    """Return the different rotary dimensions of a model's layers. None stands for layers without RoPE."""
    positions = (block.attention.position for block in spec.blocks)
    return {position.dim if isinstance(position, Rotary) else None for position in positions}


_entry = partial(Swap, by_layer=True)


def _way(kind: str, title: str, source: str) -> Swap:
    """Return the swap for one method of scaling RoPE.

    `kind` is the method's name as a value of the option, `title` its name in tables, and `source` the paper or code.
    """
    needs, guarantee = "Needs RoPE that is not scaled, and a known context length", "approximate"
    if kind == "dynamic":
        needs, guarantee = f"{needs}. Exact up to the original context length", "exact"

    def examples(spec: ModelSpec) -> tuple[str, ...]:
        rotaries = rotary_layers(spec, range(len(spec.blocks))).values()
        plain = rotaries and all(rotary.scaling is None and rotary.dim > 2 for rotary in rotaries)
        return (f"{kind}:2",) if plain and spec.context_length is not None else ()

    fields: dict[str, Any] = {"needs": needs, "guarantee": guarantee, "source": source, "examples": examples}
    fields["reshape"] = partial(_rope_scaling, kind)
    return _entry("rope_scaling", f"{kind}:FACTOR", takes="RoPE", gives=f"scaled RoPE ({title})", **fields)


ORDER = 70
_PARTS: Parts = {"": ("rotary dimensions", _dims)}
OPTIONS = (
    Option(
        "rope_scaling",
        POSITIONS,
        2,
        "Scale RoPE for a longer context. Give the method and the factor: yarn:4 is for four times the "
        "context. --rope-scaling none removes the scaling.",
        "yarn:4 | llama3:8 | ntk:2 | linear:2 | dynamic:2",
        words="yarn; llama3; ntk = ntk-aware; linear = pi, position interpolation; dynamic = dynamic ntk; none "
        "= default",
    ),
    Option(
        "rotary_dim",
        POSITIONS,
        3,
        "The number of dimensions of each head that RoPE rotates, such as 32.",
        "N",
        parts=_PARTS,
    ),
    Option(
        "rope_pairs",
        POSITIONS,
        4,
        "The pairs of dimensions that RoPE rotates together: halves (dimension i with i + d/2, as in LLaMA) "
        "or adjacent (2i with 2i + 1, as in GPT-J).",
        "halves | adjacent",
        words="halves = half, split half, rotate half, neox, gpt-neox; adjacent = interleaved, gpt-j",
    ),
)
SWAPS = (
    *(_way(kind, *words) for kind, words in _KINDS.items()),
    _entry(
        option="rope_scaling",
        form="none",
        takes="scaled RoPE",
        gives="RoPE without scaling",
        needs="Needs scaled RoPE. Exact only for dynamic scaling, up to the original context length",
        source="the definitions of the scaling methods",
        reshape=_no_scaling,
        clears=(Clears("*.scaling", theirs=None),),
    ),
    _entry(
        option="rotary_dim",
        form="N",
        takes="RoPE",
        gives="RoPE on a smaller part of each head",
        needs="N must be even, and smaller than the number of dimensions that RoPE rotates now. Exact only if the"
        " dropped pairs do not rotate or are zero. With a calibration text, o_proj and down_proj are fitted to it",
        exact_where="the dropped pairs do not rotate or are zero",
        source="derived for gptkit, after partial RoPE in GPT-NeoX, and DroPE 2512.12167",
        reshape=_rotary_dim,
        examples=_examples,
        calibrated=True,
        cheaper=lambda _: (),
        clears=(Clears("*.dim", "rotary_dim={theirs}"),),
    ),
    *(
        _entry(
            option="rope_pairs",
            form=wanted,
            takes="RoPE",
            gives=f"RoPE that rotates {described}",
            needs="Needs RoPE that pairs the dimensions in the other way",
            source="transformers, convert_llama_weights_to_hf.py: permute",
            reshape=_rope_pairs,
            clears=(Clears("*.pairs", theirs=wanted),),
        )
        for wanted, described in (
            ("adjacent", "dimension 2i together with 2i + 1"),
            ("halves", "dimension i together with i + d/2"),
        )
    ),
)
