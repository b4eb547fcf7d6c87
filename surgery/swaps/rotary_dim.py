"""RoPE on part of each head: some pairs go on turning as they did, the others no longer turn."""

from __future__ import annotations

import re
from functools import partial
from typing import Literal

import numpy as np
from msgspec.structs import replace

from ...components import Attention, DynamicScaling, LatentAttention, LinearScaling, LongRopeScaling, ModelSpec, Rotary
from ...errors import SwapRefused, UsageError
from ..base import Computed, Model, Moved, Promise, Swapped, Tensor
from ..layerwise import with_mixers
from ..registry import Asked, Clears, Swap
from ..rotation import (
    Elements,
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
)


def rotary_dim(spec: ModelSpec, asked: Asked) -> Swapped:
    """RoPE on part of each head. The pairs that go are replaced by their mean rotation, and lie behind those that
    stay; with --approximate the first elements of each head go on turning, at the frequencies that dim gives, as
    partial_rotary_factor in a config has it.
    """
    match = re.fullmatch(r"(\d{1,9})(?::(slowest|fastest))?", asked.value)
    if match is None:
        raise UsageError(f"--rotary-dim {asked.value!r}: expected a number, or 16:fastest to drop the fastest pairs")
    size, drop = int(match[1]), match[2] or "slowest"
    layers = require_rotary(spec, asked)
    after, tensors, exact = dict[int, Attention](), dict[str, Tensor](), not asked.approximate
    for layer, rotary in layers.items():
        attention, path = spec.blocks[layer].attention, f"blocks.{layer}.attention"
        if isinstance(attention, LatentAttention):
            raise SwapRefused(
                f"the keys of layer {layer} come from a latent, and its rotary keys are apart",
                "--rotary-dim goes before --attention mla.",
            )
        _require_part(layer, rotary, size)
        if asked.approximate:
            plain = replace(rotary, dim=size, scaling=for_width(rotary.scaling, size))
            after[layer] = replace(attention, position=plain)
            continue
        after[layer] = replace(attention, position=kept_rotary(rotary, size, drop))
        kept = kept_pairs(rotary.dim, size, drop)
        matter = partial(_dropped_matter, path=path, attention=attention, rotary=rotary, kept=kept)
        exact = exact and (is_neutral(rotary) or not asked.weights.ask(matter, True, False))
        tensors |= part_tensors(path, attention, rotary, kept, spec.context_length)
    summary = {
        "dropped": "in place" if asked.approximate else f"{drop} pairs",
        "dims": sorted({rotary.dim for rotary in layers.values()}),
        "to": size,
        "layers": list(layers),
    }
    grows = [rotary.scaling for rotary in layers.values() if isinstance(rotary.scaling, DynamicScaling)]
    # Beyond its original context a base that grows does so by the dimension, which has changed.
    promise = Promise(length=min((each.original_context for each in grows), default=None) if exact else None)
    new = with_mixers(spec, after)
    return Swapped(new, "exact" if exact else "approximate", tensors, summary, promise=promise)


def _require_part(layer: int, rotary: Rotary, size: int) -> None:
    """Raise SwapRefused where a rotary of this dimension has no part of that one."""
    widest, has = rotary.dim - 2, f"layer {layer} turns {rotary.dim} elements of each head"
    possible = f"Possible here: the even numbers from 2 to {widest}." if widest >= 2 else "There is no smaller part."
    if size % 2 or size < 2:
        raise SwapRefused(f"rotary positions turn pairs of elements: {size} is not an even number from 2", possible)
    if size >= rotary.dim:
        raise SwapRefused(f"{has} already" if size == rotary.dim else f"{has}, which is less than {size}", possible)
    if isinstance(rotary.scaling, DynamicScaling) and size == 2:
        raise SwapRefused("dynamic scaling divides by the rotary dimension less 2", "Possible here: from 4.")


def kept_pairs(dim: int, size: int, drop: str) -> Elements:
    """The pairs that stay: the first are the fastest."""
    return np.arange(size // 2) if drop == "slowest" else np.arange((dim - size) // 2, dim // 2)


def kept_rotary(rotary: Rotary, size: int, drop: str) -> Rotary:
    """Rotary positions of `size` elements that turn them as the pairs that stay turned.

    base^(-2i/dim) = (base^(size/dim))^(-2i/size), so the base changes alone; where a scaling depends on more than the
    frequency, the divisor of every pair is written down.
    """
    kept = kept_pairs(rotary.dim, size, drop)
    original = original_context(rotary.scaling)
    dynamic_scaling = isinstance(rotary.scaling, DynamicScaling)
    lengths = [1] if original is None or dynamic_scaling else [1, original + 1]
    wanted = [frequencies(rotary, length)[kept] for length in lengths]
    first = rotary.base ** (2 * kept[0] / rotary.dim)  # how much slower the first one that stays is
    part = replace(rotary, dim=size, base=rotary.base ** (size / rotary.dim), scaling=None)
    by_pair = isinstance(rotary.scaling, LongRopeScaling)
    candidates = [] if by_pair else [replace(part, scaling=for_width(rotary.scaling, size))]
    if rotary.scaling is None or isinstance(rotary.scaling, LinearScaling):
        divided = getattr(rotary.scaling, "factor", 1.0)
        candidates.append(replace(part, scaling=LinearScaling(factor=divided * float(first))))
    for each in candidates:
        pairs = zip((frequencies(each, length) for length in lengths), wanted, strict=True)
        if all(np.allclose(one, other, rtol=1e-13, atol=0) for one, other in pairs):
            return each
    if dynamic_scaling or original is None:
        raise SwapRefused("its scaling turns all pairs together", "Only the slowest pairs can be dropped here.")
    plain = frequencies(part)
    short, long = (tuple(map(float, plain / each)) for each in wanted)
    scaling = LongRopeScaling(
        short_factor=short, long_factor=long, original_context=original, attention_factor=amplitude(rotary)
    )
    return replace(part, scaling=scaling)


def part_order(rotary: Rotary, kept: Elements, head_dim: int) -> Elements:
    """The elements of a head, those of the pairs that stay first, as pairs lie; then the others as they lay."""
    first, second = (elements[kept] for elements in pair_elements(rotary.dim, rotary.pairs))
    together = np.concatenate((first, second)) if rotary.pairs == "halves" else np.stack((first, second), 1).ravel()
    rest = np.setdiff1d(np.arange(head_dim), together)
    return np.concatenate((together, rest))


def _dropped_matter(model: Model, path: str, attention: Attention, rotary: Rotary, kept: Elements) -> bool:
    """Whether any score holds anything of the pairs that go: neither their queries nor their keys are zero."""
    first, second = pair_elements(rotary.dim, rotary.pairs)

    def sizes(side: Literal["q", "k"]) -> np.ndarray:
        """The largest weight of each pair, by key-value head."""
        total = np.zeros(1)
        for name in row_tensors(path, attention, side):
            rows = np.abs(model.wide(name))
            each = rows.reshape(len(rows) // attention.head_dim, attention.head_dim, -1).max(axis=2)
            total = total * each if name.endswith("norm.weight") else total + each
        by_group = total.reshape(attention.kv_heads, -1, attention.head_dim).max(axis=1)
        largest: np.ndarray = np.maximum(by_group[:, first], by_group[:, second])
        return largest

    dropped = np.setdiff1d(np.arange(rotary.dim // 2), kept)
    return bool((sizes("q") * sizes("k"))[:, dropped].any())


def part_tensors(
    path: str, attention: Attention, rotary: Rotary, kept: Elements, context: int | None
) -> dict[str, Tensor]:
    """The rows of q and k in their new order, those of the pairs that go turned by their mean on the side of q."""
    order = part_order(rotary, kept, attention.head_dim)
    names = row_tensors(path, attention, "q") + row_tensors(path, attention, "k")
    tensors: dict[str, Tensor] = {}
    if not np.array_equal(order, np.arange(attention.head_dim)):
        tensors = {name: Moved(name, partial(reordered, order=order)) for name in names}
    factors = mean_rotation(rotary, context, attention.window, near=1.0)
    factors[kept] = 1
    for name, make in turned_queries(path, attention, rotary, factors).items():
        tensors[name] = Computed(lambda model, make=make: reordered(make(model), order))  # type: ignore[misc]
    return tensors


def examples(spec: ModelSpec) -> tuple[str, ...]:
    """Half of the least that turns."""
    dims = [rotary.dim for rotary in rotary_layers(spec, range(len(spec.blocks))).values()]
    half = min(dims, default=0) // 4 * 2
    return (f"{half}", f"{half}:fastest") if half else ()


def dims(spec: ModelSpec) -> set[int | None]:
    """How many dimensions turn; None where there are no rotary positions."""
    found = (block.attention.position for block in spec.blocks)
    return {each.dim if isinstance(each, Rotary) else None for each in found}


SWAP = Swap(
    option="rotary_dim",
    form="N",
    takes="RoPE",
    gives="RoPE on part of each head",
    needs="an even number less than what turns now; exact where the pairs that go do not turn or are zero",
    source="derived for gptkit, after GPT-NeoX' partial rotary and DroPE 2512.12167",
    reshape=rotary_dim,
    examples=examples,
    clears=(Clears("*.dim", "rotary_dim={theirs}"),),
    by_layer=True,
)
