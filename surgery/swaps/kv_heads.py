"""Change the number of key-value heads (MHA, GQA 2305.13245, MQA 1911.02150), or replace them by latent attention.

More key-value heads are exact: every head is repeated for its share of the query heads. Fewer are exact if the merged
heads are equal bit for bit, as they are after a repetition. Otherwise the new heads are fitted on a text
(`regression`), or with --approximate averaged (the GQA paper's mean-pooling).

Multi-head latent attention replaces keys and values per head (DeepSeek-V2 2405.04434; TransMLA 2502.07864). "mla:full"
is exact: the latent stores all values, and all parts of keys without rotation. Every rotary key head becomes a part of
the shared rotary key, which queries of other heads multiply by zero. The KV cache is as large as before, so this is
only a start for training. "mla:R" has a latent of R numbers per token, and equals "mla:full" if keys and values have no
more than R. Values, and keys without rotary positions, are computed from the latent by the best linear map of rank R on
a text. The rotary key heads become one that all heads share. "mla:R" is lossless if R is large enough for all values
and keys, and there is only one rotary key head.
"""

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from msgspec.structs import replace

from ...analysis.costs import work_of
from ...components import Attention, LatentAttention, ModelSpec, Rotary, recast
from ...converter.dtypes import Array
from ...errors import SwapRefused
from ..base import Computed, Filled, Model, Moved, Swapped, Tensor, Wide
from ..fits.scratch import Scratch
from ..layerwise import attentions, tensors_of, with_mixers
from ..options import ATTENTION, Option
from ..registry import Asked, Clears, Swap


def _repeated_heads(tensor: Array, times: int, head_dim: int) -> Array:
    """Repeat every head `times` times: [kv_heads · head_dim, …] -> [kv_heads · times · head_dim, …]."""
    heads = tensor.reshape(-1, head_dim, *tensor.shape[1:])
    return np.repeat(heads, times, axis=0).reshape(-1, *tensor.shape[1:])


def first_of_groups(tensor: Array, group: int, head_dim: int) -> Array:
    """Return the first of every `group` heads: [kv_heads · head_dim, …] -> [kv_heads / group · head_dim, …]."""
    heads = tensor.reshape(-1, group, head_dim, *tensor.shape[1:])
    return np.ascontiguousarray(heads[:, 0]).reshape(-1, *tensor.shape[1:])


def mean_of_groups(tensor: Wide, old: int, new: int, heads: int, head_dim: int) -> Wide:
    """Average the rows of `old` key-value heads to `new` heads (mean-pooling; Ainslie et al., section 2.1).

    A new head is the mean of the old heads that its query heads read. `heads` is the number of query heads.
    """
    repeated = _repeated_heads(
        tensor, heads // old, head_dim
    )  # one per query head, so that groups need not divide the old heads
    grouped = repeated.reshape(new, heads // new, head_dim, *tensor.shape[1:])
    return np.asarray(grouped.mean(axis=1).reshape(-1, *tensor.shape[1:]))


def _wanted_heads(spec: ModelSpec, asked: Asked) -> dict[int, tuple[Attention, int]]:
    """Return the attentions to change, each with its new number of key-value heads, by layer."""
    changes, latent = {}, ", whose heads share one latent"
    for layer, attention in attentions(
        spec, asked.chosen(spec), latent, "Choose the other layers with --blocks."
    ).items():
        kind, heads = asked.value.partition(":")[0], attention.heads
        wanted = {"mha": heads, "mqa": 1}.get(kind) or asked.number("key-value heads")
        if heads % wanted:
            possible = ", ".join(str(count) for count in range(1, heads + 1) if heads % count == 0)
            hint = f"Possible here: {possible}."
            raise SwapRefused(f"{wanted} key-value heads cannot be shared evenly by {heads} query heads", hint)
        if wanted != attention.kv_heads:
            changes[layer] = (attention, wanted)
    if not changes:
        raise SwapRefused(f"all layers to be changed already have {wanted} key-value heads")
    return changes


def _equal_in_groups(model: Model, path: str, attention: Attention, wanted: int) -> bool:
    """Return whether reducing the key-value heads to `wanted` merges only heads that are equal bit for bit."""
    if attention.kv_heads % wanted:
        return False
    for name in tensors_of(path, attention, "k_proj", "v_proj"):
        heads = model.tensor(name)[0].reshape(wanted, attention.kv_heads // wanted, -1)
        if not (heads == heads[:, :1]).all():
            return False
        model.release()
    return True


def with_heads(attention: Attention, wanted: int) -> Attention:
    """Return the attention with `wanted` key-value heads.

    Only a single key-value head can be broadcast to all query heads. If the old attention does that and the new one has
    several, each of them is repeated for its query heads instead.
    """
    several = attention.kv_expansion == "broadcast" and wanted not in (1, attention.heads)
    return replace(attention, kv_heads=wanted, kv_expansion="repeat" if several else attention.kv_expansion)


def _change(spec: ModelSpec, asked: Asked) -> Swapped:
    """Change the number of key-value heads.

    Heads that are merged and not equal are fitted on a text, or with --approximate averaged.
    """
    tensors: dict[str, Tensor] = {}
    changed, merged = dict[int, Attention](), dict[int, Attention]()
    for layer, (old, wanted) in _wanted_heads(spec, asked).items():
        path, dim = f"blocks.{layer}.attention", old.head_dim
        names = tensors_of(path, old, "k_proj", "v_proj")
        changed[layer] = with_heads(old, wanted)
        if wanted % old.kv_heads == 0:
            move = partial(_repeated_heads, times=wanted // old.kv_heads, head_dim=dim)
        elif asked.weights.ask(partial(_equal_in_groups, path=path, attention=old, wanted=wanted), False, True):
            move = partial(first_of_groups, group=old.kv_heads // wanted, head_dim=dim)
        else:
            merged[layer] = changed[layer]
            mean = partial(mean_of_groups, old=old.kv_heads, new=wanted, heads=old.heads, head_dim=dim)
            for name in names if asked.approximate else ():
                tensors[name] = Computed(lambda model, name=name, mean=mean: mean(model.wide(name)))  # type: ignore[misc]
            continue
        tensors |= {name: Moved(name, move) for name in names}
    summary: dict[str, Any] = {"layers": sorted(changed), "merged": len(merged)}
    if merged:
        summary["by"] = "mean" if asked.approximate else "regression"
    if merged and not asked.approximate:
        fitted = Scratch.by("kv_fit.fitted_layers", merged, asked.text("fitting fewer key-value heads"))
        tensors |= fitted.waiting(_fitted_names(spec, merged))
    return Swapped(with_mixers(spec, changed), "approximate" if merged else "exact", tensors, summary)


def _fitted_names(spec: ModelSpec, changed: Mapping[int, Attention | LatentAttention], down: bool = True) -> list[str]:
    """Return the names of the tensors that a fit changes: all attention projections, and with `down` also down_proj.

    `changed` has the new attentions by layer.
    """
    names = [f"blocks.{i}.attention.{name}" for i, new in changed.items() for name in new.shapes() if "_proj." in name]
    downs = {f"blocks.{layer}.feed_forward.down_proj.weight" for layer in changed if down}
    downs &= {parameter.name for parameter in spec.parameters()}
    return [*(name for name in names if not name.endswith("o_proj.bias")), *downs]


def _fewer(spec: ModelSpec) -> list[str]:
    """Return the values that `gptkit swaps` tries on a model: half and twice its number of key-value heads.

    Numbers that do not divide the number of query heads are left out.
    """
    attention = spec.blocks[0].attention
    present = getattr(attention, "kv_heads", 0)
    counts = [count for count in (present // 2, present * 2) if count > 1 and attention.heads % count == 0]
    return [f"gqa:{count}" for count in counts if count != attention.heads]


# --- latent attention -------------------------------------------------------------------------------------------------


def _latent_of(attention: Attention, rank: int, rope_heads: int) -> LatentAttention:
    """Return the component of the latent attention that replaces an attention.

    `rank` is the size of its latent, and `rope_heads` its number of rotary keys.
    """
    rotary, dims = isinstance(attention.position, Rotary), (_plain_dim(attention), attention.head_dim)
    sizes = {"kv_rank": rank, "nope_dim": dims[0], "value_dim": dims[1], "rope_heads": rope_heads if rotary else 0}
    record: LatentAttention = recast(attention, LatentAttention, **sizes, fused=False)
    return record


def _plain_dim(attention: Attention) -> int:
    """Return the number of elements of a key head that RoPE does not rotate."""
    return attention.head_dim - (attention.position.dim if isinstance(attention.position, Rotary) else 0)


def whole(attention: Attention) -> int:
    """Return the size of a latent that stores all values and the non-rotary parts of all keys."""
    return attention.kv_heads * (attention.head_dim + _plain_dim(attention))


def _grouped(spec: ModelSpec, asked: Asked) -> dict[int, Attention]:
    """Return the attentions of the chosen layers. Raises SwapRefused if one cannot become latent attention."""
    grouped = attentions(spec, asked.chosen(spec), " already")
    for layer, attention in grouped.items():
        if attention.q_norm is not None or attention.k_norm is not None:
            reason = f"layer {layer} normalises queries and keys per head, which latent attention does not support"
            raise SwapRefused(reason, "Use fewer key-value heads: --attention gqa:N or mqa.")
        if attention.cap is not None:
            raise SwapRefused(
                f"layer {layer} soft-caps attention scores at {attention.cap:g}, which latent attention "
                "does not support"
            )
    return grouped


# --- a latent that stores all keys and values (mla:full) --------------------------------------------------------------


def _spread_queries(tensor: Array, attention: Attention) -> Array:
    """Extend queries for one shared rotary key that consists of the rotary parts of all key heads.

    The rotary part of a query is put where its own key head is in the shared key, with zeros elsewhere: [heads ·
    head_dim, …] becomes [heads · (plain + kv_heads · rotary), …]. plain and rotary are the sizes of the two parts of a
    head.
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


def _key_rows(tensor: Array, attention: Attention, rotary: bool) -> Array:
    """Return the rotary part of every key head, one after the other. If not `rotary`, return the other parts.

    `tensor` has the rows of all key heads, [kv_heads · head_dim, …].
    """
    dim = attention.head_dim - _plain_dim(attention)
    heads = tensor.reshape(attention.kv_heads, attention.head_dim, *tensor.shape[1:])
    part = heads[:, :dim] if rotary else heads[:, dim:]
    return np.ascontiguousarray(part).reshape(-1, *tensor.shape[1:])


def _picking(attention: Attention, width: int, start: int, rank: int) -> Array:
    """Return the matrix of zeros and ones that copies the key or value of every query head out of the latent.

    The latent has `rank` numbers. From `start` on, it stores the keys (or values) of all key-value heads one after the
    other, `width` numbers each. The matrix is [heads · width, rank].
    """
    selection = np.zeros((attention.heads, width, rank))
    for head in range(attention.heads):
        first = start + (head // attention.group) * width
        selection[head, np.arange(width), first + np.arange(width)] = 1
    return selection.reshape(-1, rank)


def _lossless(path: str, attention: Attention) -> dict[str, Tensor]:
    """Return the tensors of latent attention for "mla:full". They consist of old values, zeros and ones."""
    plain, rank = _plain_dim(attention), whole(attention)
    tensors: dict[str, Tensor] = {}
    for part in ("weight", "bias") if attention.qkv_bias else ("weight",):
        q, k, v = (f"{path}.{name}_proj.{part}" for name in "qkv")
        tensors[q] = Moved(q, lambda tensor: _spread_queries(tensor, attention))
        tensors[f"{path}.kv_down_proj.{part}"] = Moved(
            (k, v), lambda key, value: np.concatenate([_key_rows(key, attention, False), value])
        )
        if plain < attention.head_dim:
            tensors[f"{path}.k_rope_proj.{part}"] = Moved(k, lambda key: _key_rows(key, attention, True))
    ups = (("k_up_proj", plain, 0), ("v_up_proj", attention.head_dim, attention.kv_heads * plain))
    for name, width, start in ups if plain else ups[1:]:
        maps = partial(_picking, attention, width, start, rank)
        tensors[f"{path}.{name}.weight"] = Filled((attention.heads * width, rank), maps, f"{path}.v_proj.weight")
    return tensors


def _to_whole(spec: ModelSpec, asked: Asked) -> Swapped:
    """Convert attention into latent attention that computes the same function ("mla:full")."""
    old = _grouped(spec, asked)
    tensors: dict[str, Tensor] = {}
    for layer, attention in old.items():
        tensors |= _lossless(f"blocks.{layer}.attention", attention)
    changed = {layer: _latent_of(new, whole(new), new.kv_heads) for layer, new in old.items()}
    summary = {"layers": sorted(changed), "rank": sorted({new.kv_rank for new in changed.values()})}
    return Swapped(with_mixers(spec, changed), "exact", tensors, summary)


# --- a smaller latent (mla:R) -----------------------------------------------------------------------------------------


def _to_rank(spec: ModelSpec, asked: Asked) -> Swapped:
    """Convert attention into latent attention with a latent of R numbers per token, and one rotary key ("mla:R")."""
    rank = asked.number("numbers per token in the latent")
    old = _grouped(spec, asked)
    most = max(2 * attention.kv_heads * attention.head_dim for attention in old.values())
    if rank >= most:
        note = f"keys and values have {most} numbers per token, and the latent with the rotary keys stores all of them"
        return dataclasses.replace(_to_whole(spec, asked), notes=(note,))
    for layer, attention in old.items():
        if rank > whole(attention):
            reason = f"a latent of layer {layer} stores at most {whole(attention)} numbers per token, not {rank}"
            hint = f"Possible here: mla:{whole(attention)} or less, or mla:full, which stores all keys and values."
            raise SwapRefused(reason, hint)
    several = any(isinstance(attention.position, Rotary) and attention.kv_heads > 1 for attention in old.values())
    if not several and all(rank == whole(attention) for attention in old.values()):
        return _to_whole(spec, asked)
    changed = {layer: _latent_of(attention, rank, 1) for layer, attention in old.items()}
    if asked.approximate:
        scratch = Scratch.by("kv_fit.averaged_layers", changed)
    else:
        scratch = Scratch.by("kv_fit.fitted_layers", changed, asked.text("fitting a latent"))
    names = _fitted_names(spec, changed, down=not asked.approximate)
    summary = {"layers": sorted(changed), "rank": rank, "by": "weights alone" if asked.approximate else "regression"}
    return Swapped(with_mixers(spec, changed), "approximate", scratch.waiting(names), summary)


def _half(spec: ModelSpec) -> list[str]:
    """Return the value that `gptkit swaps` tries on a model: "mla:R" with half of the size that stores everything."""
    attention = spec.blocks[0].attention
    if not isinstance(attention, Attention) or attention.q_norm is not None:
        return []
    return [f"mla:{max(whole(attention) // 2, 1)}"]


_entry = partial(
    Swap,
    option="attention",
    takes="key-value heads",
    needs="Exact for more key-value heads than before, or if merged heads are equal. Otherwise approximate, and fitted"
    " to a calibration text",
    source="Ainslie et al. 2305.13245; Shazeer 1911.02150; the fit is derived for gptkit",
    reshape=_change,
    by_layer=True,
    calibrated=True,
    exact_where="the heads of a group are equal",
)
latent = partial(
    Swap,
    option="attention",
    takes="keys and values per head",
    source="DeepSeek-V2 2405.04434; TransMLA 2502.07864",
    by_layer=True,
)
_LATENT = Clears("*.attention", ours=LatentAttention, theirs=Attention)

ORDER = 90
OPTIONS = (
    Option(
        "attention",
        ATTENTION,
        1,
        "The kind of attention: mha (a key-value head per query head), mqa (a single key-value head), gqa:4 "
        "(4 key-value heads), mla:64 (multi-head latent attention with a latent of 64 numbers per token) or "
        "linear (linear attention).",
        "mha | mqa | gqa:N | mla:N | linear",
        words="mha = multi-head, multi-head attention; mqa = multi-query, multi-query attention; gqa = "
        "grouped-query, grouped-query attention; mla = multi-head latent, multi-head latent attention, "
        "latent; linear = linear attention",
        two={"deepseek": (("attention", "mla:full"), ("attention", "mla:deepseek"))},
        parts={
            "gqa:": ("key-value heads", lambda spec: {getattr(b.attention, "kv_heads", None) for b in spec.blocks}),
            "mla:": (
                "numbers that a token leaves in a layer's cache",
                lambda spec: {
                    sum(work_of(operation).cached_per_token for operation in spec.block_operations(b))
                    for b in set(spec.blocks)
                },
            ),
        },
    ),
)
SWAPS = (
    _entry(form="mha", gives="one key-value head per query head (MHA)", clears=(Clears("*.kv_heads"), _LATENT)),
    _entry(form="mqa", gives="one key-value head for all query heads (MQA)"),
    _entry(
        form="gqa:N",
        gives="N key-value heads, each for a group of query heads (GQA)",
        examples=_fewer,
        clears=(Clears("*.kv_heads", "attention=gqa:{theirs}"),),
    ),
    latent(
        form="mla:full",
        gives="latent attention (MLA), with a latent that stores all keys and values",
        needs="Needs attention without norms of queries and keys",
        reshape=_to_whole,
        examples=lambda spec: ("mla:full",),
    ),
    latent(
        form="mla:R",
        gives="latent attention (MLA), with a latent of R numbers and one rotary key",
        guarantee="approximate",
        needs="Needs attention without norms of queries and keys, and a calibration text",
        reshape=_to_rank,
        examples=_half,
        calibrated=True,
    ),
)
