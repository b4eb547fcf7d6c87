"""Change the width of attention heads from d to N.

Wider heads are always exact: keys and values get elements that are zero, so scores are unchanged. Families compute the
scale 1/√N from the width, and the queries compensate for that: q·√(N/d).

- If RoPE rotates whole heads, both halves of a head are padded (with adjacent pairs, its end), and the base becomes
  θ^(N/d). So old pairs keep their frequencies θ^(-2i/d). With scaled RoPE, gptkit compares the frequencies as numbers.
  Linear and llama3 scaling depend only on frequencies, YaRN's ramp moves with the base, and longrope gets more
  divisors. Dynamic scaling uses a power of the width, so this is not possible.
- If the frequencies differ, or if fp32 would round them too differently, the head is padded at its end, and only its
  first d elements rotate. This keeps every bit, but no family here can express it.
- Norms of queries and keys take the mean of squares over more elements, so γ becomes γ·√(d/N), and eps becomes eps·d/N.
  γ of the queries does not change, since the scale needs the inverse factor.

Narrower heads are the reverse. This is possible if the removed elements affect no score and no output. (Derived for
this project.)
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

_SAME = 1e-13  # the largest relative difference of equal frequencies in fp64
_ANGLE = 1e-4  # the largest difference of angles in fp32, in radians, at the longest position
_POSITIONS = 1024  # the largest position that is compared


class _Plan(NamedTuple):
    """A way to pad the heads of an attention, or to remove elements from them."""

    within: Index  # for each element of a new head, the number of the old element that it copies, or -1 for zero
    position: object  # the new position encoding
    note: str = ""  # a message for the user


def _resize_heads(spec: ModelSpec, asked: Asked) -> Swapped:
    """Change the width of heads in the chosen layers."""
    size = asked.number("a width")
    how = asked.value.partition(":")[0] if asked.argument is not None else ""
    if how not in ("", "theta", "partial"):
        raise UsageError(f"--head-dim {asked.value!r} is not a head dimension", "Write a number, theta:N or partial:N.")
    changed, tensors, notes = dict[int, Attention](), dict[str, Tensor](), []
    old = attentions(spec, asked.chosen(spec), ", whose head dimension this swap cannot change")
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
            notes.append(
                "the attention scale stays as it was, because the ALiBi bias is multiplied by it; no family of "
                "transformers can express this"
            )
        changed[layer] = new
        tensors |= _refilled(path, attention, new, plan.within)
    if not tensors:
        raise SwapRefused(f"the head dimension is already {size}", "Give another dimension.")
    widths = [attention.head_dim for attention in old.values()]
    summary = {"from": widths[0] if len(set(widths)) == 1 else widths, "to": size}
    return Swapped(with_mixers(spec, changed), "exact", tensors, summary, tuple(dict.fromkeys(filter(None, notes))))


def _by_rms(path: str, attention: Attention) -> None:
    """Raise SwapRefused if queries or keys have a norm other than an RMSNorm of each head."""
    if not attention.by_head:
        raise SwapRefused(
            f"{path} normalises the queries or keys of all heads at once, which this swap does not support"
        )
    for name, norm in (("q_norm", attention.q_norm), ("k_norm", attention.k_norm)):
        if norm is not None and not isinstance(norm, RMSNorm):
            raise unknown(f"{path}.{name}", norm, "RMSNorm")


# --- the elements and the position encoding of a new head -------------------------------------------------------------


def _choose(spec: ModelSpec, asked: Asked, path: str, attention: Attention, size: int, how: str) -> _Plan:
    """Choose an exact way to give the heads of an attention the width `size`. Raises SwapRefused if there is none.

    The module's docstring lists the ways, the best first. `how` is "theta" to allow only a new RoPE base, "partial" to
    allow only RoPE on a part of the head, or "" to allow both.
    """
    old, rotary = attention.head_dim, attention.position
    plans, reason = list[_Plan](), ""
    if isinstance(rotary, Rotary) and rotary.dim == old and how != "partial":
        widened = _refit_base(rotary, size) if size % 2 == 0 else None
        if size % 2:
            reason = f"RoPE rotates pairs of dimensions, and {size} is odd"
        elif widened is None:
            reason = f"the base {rotary.base:g} to the power of {size}/{old} is too large"
        else:
            reason = _why_not_same(rotary, widened, spec, strict=how != "theta")
        if not reason:
            plans.append(_Plan(_spread(rotary, size), widened))
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
    """Return for each element of a new head the old element that it copies, or -1 for zero.

    This is for RoPE that rotates whole heads. Rotary pairs are appended after the old ones, or the last pairs are
    removed.
    """
    half, new_half = rotary.dim // 2, size // 2
    if rotary.pairs == "adjacent":
        return padded(rotary.dim, size)
    first = padded(half, new_half)
    return np.concatenate([first, np.where(first < 0, -1, first + half)])


def _refit_base(rotary: Rotary, size: int) -> Rotary | None:
    """Return RoPE over `size` elements, with a base for which the old pairs keep their frequencies.

    Return None if the base would be too large.
    """
    base = 0.0
    with suppress(OverflowError):
        base = rotary.base ** (size / rotary.exponent)
    finite = 0 < base < math.inf
    return (
        replace(rotary, dim=size, base=base, scaling=for_width(rotary.scaling, size), spread=None) if finite else None
    )


def _why_not_same(old: Rotary, new: Rotary, spec: ModelSpec, strict: bool = True) -> str:
    """Return the reason why the old and the new RoPE do not rotate their common first pairs equally, or "".

    With `strict`, the pairs must also rotate nearly equally if frequencies are computed in fp32.
    """
    pairs = min(old.dim, new.dim) // 2
    import torch

    from ...modules.positions import inverse_frequencies

    lengths = [1]
    if isinstance(old.scaling, DynamicScaling | LongRopeScaling | YarnScaling):
        lengths += [old.scaling.original_context + 1, 3 * old.scaling.original_context]
    for length in lengths:
        first, second = (inverse_frequencies(rotary, length, torch.float64)[:pairs] for rotary in (old, new))
        if not bool(((first - second).abs() <= _SAME * first).all()):
            return f"{type(old.scaling).__name__} depends on the head dimension"
    longest = min(spec.context_length or _POSITIONS, _POSITIONS)
    first, second = (inverse_frequencies(rotary, 1, torch.float32)[:pairs].double() for rotary in (old, new))
    angle = float((first - second).abs().max()) * longest
    if strict and angle > _ANGLE:
        return f"another base would rotate position {longest:,} differently by {angle:.0e} in fp32 (theta:{new.dim})"
    return ""


def _in_use(model: Model, path: str, attention: Attention, within: Index) -> bool:
    """Return whether narrower heads would change a score or an output, because removed elements are not zero.

    `within` are the elements that stay.
    """
    removed = np.setdiff1d(np.arange(attention.head_dim), within)

    def zero(name: str, heads: int, axis: int = 0) -> np.ndarray:
        """Return for each key-value head and each removed element whether all entries of a tensor for it are zero."""
        values = np.moveaxis(model.wide(f"{path}.{name}"), axis, 0)
        values = values.reshape(attention.kv_heads, heads // attention.kv_heads, attention.head_dim, -1)
        zeros: np.ndarray = np.asarray(~values[:, :, removed].any(axis=(1, 3)))
        return zeros

    def silent(projection: str, heads: int) -> np.ndarray:
        zeros = zero(f"{projection}.weight", heads)
        return zeros & zero(f"{projection}.bias", heads) if attention.qkv_bias else zeros

    q, k = silent("q_proj", attention.heads), silent("k_proj", attention.kv_heads)
    # A norm over the head depends on all elements, also on those that affect no score.
    scores = (q if attention.q_norm else q | k) & (k if attention.k_norm else q | k)
    outputs = silent("v_proj", attention.kv_heads) | zero("o_proj.weight", attention.heads, axis=1)
    return not bool((scores & outputs).all())


# --- the new heads ----------------------------------------------------------------------------------------------------


def _resized(attention: Attention, size: int, plan: _Plan) -> Attention:
    """Return the attention with heads of the width `size`, and with the usual scale of scores for this width.

    The scale is unchanged if it also multiplies an ALiBi bias.
    """
    old, scale = attention.head_dim, attention.scale
    if not (isinstance(attention.position, ALiBi) and attention.position.scaled):
        scale = float(size**-0.5 if scale == old**-0.5 else scale * (size**-0.5 / old**-0.5))

    old_norms = {"q_norm": attention.q_norm, "k_norm": attention.k_norm}
    norms = {n: norm and replace(norm, size=size, eps=eps_for(norm.eps, old, size)) for n, norm in old_norms.items()}
    return replace(attention, head_dim=size, scale=scale, position=plan.position, **norms)


def _refilled(path: str, old: Attention, new: Attention, within: Index) -> dict[str, Tensor]:
    """Return the tensors of an attention whose heads have another width.

    `within` has for each element of a new head the old element that it copies, or -1 for zero.
    """
    by_query = by_head(np.arange(old.heads), within, old.head_dim)
    by_key = by_head(np.arange(old.kv_heads), within, old.head_dim)
    # Where keys and values are zero, queries and outputs may have any weights. They are copies of other elements, so
    # that training changes both sides.
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
    """Return the old scale of the scores over the new scale, by which queries are multiplied if they have no norm."""
    return old.scale / new.scale


def _norm_factors(old: Attention, new: Attention) -> Iterator[tuple[str, float]]:
    """Yield the names of an attention's norms of queries and keys, and the factors for their weights.

    The factor is √(d/N) for the old width d and the new width N. For queries, it also compensates for the new scale.
    """
    ratio = length_ratio(old.head_dim, new.head_dim)
    if old.q_norm is not None:
        product = ratio * _query_factor(old, new)
        yield "q_norm", 1.0 if abs(product - 1) < _SAME else product
    if old.k_norm is not None:
        yield "k_norm", ratio


def _widths(spec: ModelSpec) -> set[int | None]:
    """Return the different head widths in a model. None stands for latent attention."""
    return {getattr(block.attention, "head_dim", None) for block in spec.blocks}


def _examples(spec: ModelSpec) -> list[str]:
    """Return the head widths that `gptkit swaps` tries on a model."""
    widths = _widths(spec)
    widest = max((width for width in widths if width), default=0)
    return [] if None in widths else [str(widest + 8), f"partial:{widest + 4}"]


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
        takes="heads of d dimensions",
        gives="heads of N dimensions",
        needs="A larger N must be even if RoPE rotates whole heads. A smaller N is possible only if the dropped"
        " dimensions affect no output",
        source="Net2Net 1511.05641; the new RoPE base and attention scale are derived for gptkit",
        reshape=_resize_heads,
        examples=_examples,
        clears=(Clears("*.head_dim", "head_dim={theirs}"),),
        by_layer=True,
    ),
)
