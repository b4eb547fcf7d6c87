"""The width of a head.

Wider, exact: keys and values get elements that are zero. Scores stay as they are, and the scale that families compute
from the width, 1/√N, is made up for in the queries: q·√(N/d).

- Rotary positions over the whole head: a family that exports rotates whole heads, so both halves (or the end, with
  adjacent pairs) are filled up, and the base becomes θ^(N/d): the pairs there were keep their frequencies θ^(-2i/d).
  What a scaling makes of them is compared as numbers: linear and llama3 look at frequencies alone, YaRN's ramp moves
  with the base, longrope's divisors are appended to, dynamic scaling takes a power of the width and does not fit.
- Where that does not fit, or fp32 would round the frequencies otherwise by too much, the head is filled up at its end
  and only its first d elements go on turning: not a bit differs, but no family here exports it.
- q and k norms: the mean of squares is over more elements, so γ·√(d/N) and eps·d/N; the query's γ is left as it was,
  for the scale asks for the inverse.

Narrower: the same backwards, where the elements that go reach no score and no output. (Derived for this project.)
"""

import math
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from ...components import ALiBi, Attention, DynamicScaling, LongRopeScaling, ModelSpec, RMSNorm, Rotary, YarnScaling
from ...errors import SwapRefused, UsageError
from ..base import Computed, Index, Model, Swapped, Tensor, by_head, gather, padded, scaled, taken
from ..layerwise import attentions, regained, tensors_of, unclipped, unknown, weighed, with_mixers
from ..options import ATTENTION, Option
from ..registry import Asked, Clears, Swap
from .basis import eps_for, length_ratio
from .rotation import for_width

_SAME = 1e-13  # how near, relative, frequencies in fp64 are to be called the same
_ANGLE = 1e-4  # radians by which fp32 may round angles otherwise, at the longest of the positions looked at
_POSITIONS = 1024  # positions looked at, at most


class _Plan(NamedTuple):
    """How a head is filled up or cut: for each new element the old one, -1 for zero, and the positions it gets."""

    within: Index
    position: object
    note: str = ""


def _resize_heads(spec: ModelSpec, asked: Asked) -> Swapped:
    """The tree with heads of another width, in the layers asked for."""
    size = asked.number("a width")
    how = asked.value.partition(":")[0] if asked.argument is not None else ""
    if how not in ("", "theta", "partial"):
        raise UsageError(f"--head-dim {asked.value!r}", "expected a number, theta:N or partial:N")
    changed, tensors, notes = dict[int, Attention](), dict[str, Tensor](), []
    old = attentions(spec, asked.chosen(spec), ", whose heads are made of a latent")
    for layer, attention in old.items():
        if attention.head_dim == size:
            continue
        path = f"blocks.{layer}.attention"
        unclipped(path, attention)
        _by_rms(path, attention)
        weighed(f"{path}.q_norm", attention.q_norm, "1 + weight")
        weighed(f"{path}.k_norm", attention.k_norm, "1 + weight")
        plan = _choose(spec, asked, path, attention, size, how)
        new = _resized(attention, size, plan)
        notes.append(plan.note)
        if new.scale == attention.scale:
            notes.append("the scale stays, since the ALiBi bias is multiplied by it; no family here exports that")
        changed[layer] = new
        tensors |= _refilled(path, attention, new, plan.within)
    if not tensors:
        raise SwapRefused(f"the head dimension is already {size}", "Give another dimension.")
    found = [attention.head_dim for attention in old.values()]
    summary = {"from": found[0] if len(set(found)) == 1 else found, "to": size}
    return Swapped(with_mixers(spec, changed), "exact", tensors, summary, tuple(dict.fromkeys(filter(None, notes))))


def _by_rms(path: str, attention: Attention) -> None:
    """Raise SwapRefused where queries or keys are normed otherwise than each head by its mean square, for a swap that
    changes how wide heads are.
    """
    if not attention.by_head:
        raise SwapRefused(
            f"{path} normalises the queries or keys of all heads at once, which this swap does not support"
        )
    for name, norm in (("q_norm", attention.q_norm), ("k_norm", attention.k_norm)):
        if norm is not None and not isinstance(norm, RMSNorm):
            raise unknown(f"{path}.{name}", norm, "RMSNorm")


# --- which elements, which positions ----------------------------------------------------------------------------------


def _choose(spec: ModelSpec, asked: Asked, path: str, attention: Attention, size: int, how: str) -> _Plan:
    """The plan that is exact; see the module's text for the order of preference."""
    old, rotary = attention.head_dim, attention.position
    plans, reason = list[_Plan](), ""
    if isinstance(rotary, Rotary) and rotary.dim == old and how != "partial":
        other = _refit_base(rotary, size) if size % 2 == 0 else None
        if size % 2:
            reason = f"RoPE rotates pairs of dimensions, and {size} is odd"
        elif other is None:
            reason = f"the base {rotary.base:g} to the power of {size}/{old} is too large"
        else:
            reason = _why_not_same(rotary, other, spec, strict=how != "theta")
        if not reason:
            plans.append(_Plan(_spread(rotary, size), other))
    if how == "theta" and not plans:
        raise SwapRefused(
            f"the head dimension cannot change from {old} to {size}: {reason or 'RoPE does not rotate whole heads'}"
        )
    if how != "theta" and (not isinstance(rotary, Rotary) or rotary.dim <= size):
        note = ""
        if reason and isinstance(rotary, Rotary):
            note = f"RoPE rotates only the first {rotary.dim} dimensions of a head: {reason}"
        plans.append(_Plan(padded(old, size), rotary, note))
    if size > old:
        return plans[0]
    for plan in plans:
        if not asked.weights.ask(partial(_in_use, path=path, attention=attention, within=plan.within), True, False):
            return plan
    raise SwapRefused(
        f"the head dimension cannot change from {old} to {size}: the dimensions to be removed are not zero in {path}"
        + (f" ({reason})" if reason else ""),
        "Use fewer heads (--heads), or fewer key-value heads (--attention), instead.",
    )


def _spread(rotary: Rotary, size: int) -> Index:
    """Where a head's elements come from when pairs are appended to its rotary, or the last ones taken off."""
    half, new_half = rotary.dim // 2, size // 2
    if rotary.pairs == "adjacent":
        return padded(rotary.dim, size)
    first = padded(half, new_half)
    return np.concatenate([first, np.where(first < 0, -1, first + half)])


def _refit_base(rotary: Rotary, size: int) -> Rotary | None:
    """The rotary over `size` elements whose first pairs turn as the old ones do, or None where there is none."""
    base = 0.0
    with suppress(OverflowError):
        base = rotary.base ** (size / rotary.exponent)
    there = 0 < base < math.inf
    return replace(rotary, dim=size, base=base, scaling=for_width(rotary.scaling, size), spread=None) if there else None


def _why_not_same(old: Rotary, new: Rotary, spec: ModelSpec, strict: bool = True) -> str:
    """Why the pairs that two rotaries share do not turn alike, or nothing. `strict`: in fp32 too."""
    pairs = min(old.dim, new.dim) // 2
    import torch

    from ...modules.positions import inverse_frequencies

    lengths = [1]
    if isinstance(old.scaling, DynamicScaling | LongRopeScaling | YarnScaling):
        lengths += [old.scaling.original_context + 1, 3 * old.scaling.original_context]
    for length in lengths:
        first, second = (inverse_frequencies(each, length, torch.float64)[:pairs] for each in (old, new))
        if not bool(((first - second).abs() <= _SAME * first).all()):
            return f"{type(old.scaling).__name__} depends on the head dimension"
    longest = min(spec.context_length or _POSITIONS, _POSITIONS)
    first, second = (inverse_frequencies(each, 1, torch.float32)[:pairs].double() for each in (old, new))
    angle = float((first - second).abs().max()) * longest
    if strict and angle > _ANGLE:
        return f"another base would rotate position {longest:,} differently by {angle:.0e} in fp32 (theta:{new.dim})"
    return ""


def _in_use(model: Model, path: str, attention: Attention, within: Index) -> bool:
    """Whether elements of a head that go reach a score or an output."""
    gone = np.setdiff1d(np.arange(attention.head_dim), within)

    def zero(name: str, heads: int, axis: int = 0) -> np.ndarray:
        """For each key-value head and element that goes, whether all there is of it is zero."""
        values = np.moveaxis(model.wide(f"{path}.{name}"), axis, 0)
        values = values.reshape(attention.kv_heads, heads // attention.kv_heads, attention.head_dim, -1)
        found: np.ndarray = np.asarray(~values[:, :, gone].any(axis=(1, 3)))
        return found

    def silent(projection: str, heads: int) -> np.ndarray:
        found = zero(f"{projection}.weight", heads)
        return found & zero(f"{projection}.bias", heads) if attention.qkv_bias else found

    q, k = silent("q_proj", attention.heads), silent("k_proj", attention.kv_heads)
    # A norm over the head sees what no score does.
    scores = (q if attention.q_norm else q | k) & (k if attention.k_norm else q | k)
    outputs = silent("v_proj", attention.kv_heads) | zero("o_proj.weight", attention.heads, axis=1)
    return not bool((scores & outputs).all())


# --- the new heads ----------------------------------------------------------------------------------------------------


def _resized(attention: Attention, size: int, plan: _Plan) -> Attention:
    """The record with heads of another width, and the scale that goes with it unless a bias has it too."""
    old, scale = attention.head_dim, attention.scale
    if not (isinstance(attention.position, ALiBi) and attention.position.scaled):
        scale = float(size**-0.5 if scale == old**-0.5 else scale * (size**-0.5 / old**-0.5))

    own = {"q_norm": attention.q_norm, "k_norm": attention.k_norm}
    norms = {n: each and replace(each, size=size, eps=eps_for(each.eps, old, size)) for n, each in own.items()}
    return replace(attention, head_dim=size, scale=scale, position=plan.position, **norms)


def _refilled(path: str, old: Attention, new: Attention, within: Index) -> dict[str, Tensor]:
    """The tensors of heads of another width."""
    by_query = by_head(np.arange(old.heads), within, old.head_dim)
    by_key = by_head(np.arange(old.kv_heads), within, old.head_dim)
    # Where keys and values are zero, queries and outputs are free: as other elements, so that training reaches both.
    free = np.where(within < 0, np.arange(len(within)) % old.head_dim, within)
    open_query = by_head(np.arange(old.heads), within if old.q_norm or old.k_norm else free, old.head_dim)
    output, louder = f"{path}.o_proj.weight", _query_factor(old, new)
    tensors: dict[str, Tensor] = {output: taken(output, by_head(np.arange(old.heads), free, old.head_dim), 1)}
    for name in tensors_of(path, old, "q_proj"):
        tensors[name] = taken(name, by_query) if old.q_norm else scaled(name, open_query, louder)
    tensors |= {name: taken(name, by_key) for name in tensors_of(path, old, "k_proj", "v_proj")}
    for which, factor in _norm_factors(old, new):
        name, norm = f"{path}.{which}.weight", getattr(old, which)
        widened = Computed(regained(norm, name, lambda values, factor=factor: gather(values, within, 0) * factor))  # type: ignore[misc]
        tensors[name] = scaled(name, within, factor) if norm.gain == "weight" else widened
    return tensors


def _query_factor(old: Attention, new: Attention) -> float:
    """What queries are multiplied by, where no norm follows: the scale before over the scale after."""
    return old.scale / new.scale


def _norm_factors(old: Attention, new: Attention) -> Iterator[tuple[str, float]]:
    """What the weights of the norms on heads are multiplied by: √(d/N), and for queries the scale as well."""
    ratio = length_ratio(old.head_dim, new.head_dim)
    if old.q_norm is not None:
        product = ratio * _query_factor(old, new)
        yield "q_norm", 1.0 if abs(product - 1) < _SAME else product
    if old.k_norm is not None:
        yield "k_norm", ratio


def _widths(spec: ModelSpec) -> set[int | None]:
    """How wide heads are; None for those that are made of a latent."""
    return {getattr(block.attention, "head_dim", None) for block in spec.blocks}


def _examples(spec: ModelSpec) -> list[str]:
    """Widths worth trying."""
    found = _widths(spec)
    widest = max((each for each in found if each), default=0)
    return [] if None in found else [str(widest + 8), f"partial:{widest + 4}"]


ORDER = 110
OPTIONS = (
    Option(
        "head_dim",
        ATTENTION,
        3,
        "The dimension of each attention head, such as 64.",
        "N",
        parts={"": ("dimensions of a head", _widths)},
    ),
)
SWAPS = (
    Swap(
        option="head_dim",
        form="N",
        takes="heads of d",
        gives="heads of N",
        needs="for wider ones, an even N for rotary positions over whole heads; for narrower ones, elements that"
        " reach no output",
        source="zeros after Net2Net 1511.05641; θ^(N/d) and √(N/d) derived for gptkit",
        reshape=_resize_heads,
        examples=_examples,
        clears=(Clears("*.head_dim", "head_dim={theirs}"),),
        by_layer=True,
    ),
)
