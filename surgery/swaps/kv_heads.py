"""Key-value heads: repeated for more of them, merged for fewer (MHA, GQA 2305.13245, MQA 1911.02150).

More is exact: every head is repeated for its share of the query heads. Fewer is exact where the heads that become one
are equal bit for bit, as after a repetition. Otherwise they are fitted on a text (`regression`), or, plainly, averaged
(the GQA paper's mean-pooling).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from msgspec.structs import replace

from ...analysis.costs import cached
from ...components import Attention, LatentAttention, ModelSpec
from ...errors import SwapRefused
from ..base import Array, Computed, Model, Moved, Swapped, Tensor, Wide
from ..fits.scratch import Scratch
from ..layerwise import attentions, tensors_of, with_mixers
from ..options import ATTENTION, Option
from ..registry import Asked, Clears, Step, Swap


def repeated_heads(tensor: Array, times: int, head_dim: int) -> Array:
    """[kv_heads · head_dim, …] -> [kv_heads · times · head_dim, …], each head `times` times in a row."""
    heads = tensor.reshape(-1, head_dim, *tensor.shape[1:])
    return np.repeat(heads, times, axis=0).reshape(-1, *tensor.shape[1:])


def first_of_groups(tensor: Array, group: int, head_dim: int) -> Array:
    """[kv_heads · head_dim, …] -> [kv_heads / group · head_dim, …], the first head of each group."""
    heads = tensor.reshape(-1, group, head_dim, *tensor.shape[1:])
    return np.ascontiguousarray(heads[:, 0]).reshape(-1, *tensor.shape[1:])


def mean_of_groups(tensor: Wide, own: int, new: int, heads: int, head_dim: int) -> Wide:
    """Rows of `own` heads -> `new` heads: the mean over the query heads of a group (Ainslie et al., section 2.1)."""
    every = repeated_heads(tensor, heads // own, head_dim)  # one a query head, so that groups need not divide the old
    grouped = every.reshape(new, heads // new, head_dim, *tensor.shape[1:])
    result: Wide = grouped.mean(axis=1).reshape(-1, *tensor.shape[1:])
    return result


def _wanted_heads(spec: ModelSpec, asked: Asked) -> dict[int, tuple[Attention, int]]:
    """The layers that change: (their attention, its new number of key-value heads)."""
    found, latent = {}, ", whose heads share one latent"
    for layer, attention in attentions(spec, asked.chosen(spec), latent, "Possible for the others: --blocks.").items():
        kind, heads = asked.value.partition(":")[0], attention.heads
        wanted = {"mha": heads, "mqa": 1}.get(kind) or asked.number("key-value heads")
        if heads % wanted:
            possible = ", ".join(str(count) for count in range(1, heads + 1) if heads % count == 0)
            raise SwapRefused(
                f"{wanted} key-value heads cannot be shared by {heads} query heads", f"Possible here: {possible}."
            )
        if wanted != attention.kv_heads:
            found[layer] = (attention, wanted)
    if not found:
        raise SwapRefused(f"every layer asked for has {wanted} key-value heads already")
    return found


def equal_in_groups(model: Model, path: str, attention: Attention, wanted: int) -> bool:
    """Whether the heads that would become one are the same bits."""
    if attention.kv_heads % wanted:
        return False
    for name in tensors_of(path, attention, "k_proj", "v_proj"):
        heads = model.tensor(name)[0].reshape(wanted, attention.kv_heads // wanted, -1)
        equal = bool((heads == heads[:, :1]).all())
        model.release()
        if not equal:
            return False
    return True


def with_heads(attention: Attention, wanted: int) -> Attention:
    """The attention with so many key-value heads: one, or one a query head, broadcast; others are repeated."""
    several = attention.kv_expansion == "broadcast" and wanted not in (1, attention.heads)
    return replace(attention, kv_heads=wanted, kv_expansion="repeat" if several else attention.kv_expansion)


def change(spec: ModelSpec, asked: Asked) -> Swapped:
    """Another number of key-value heads; those that are merged are fitted on a text, or plainly their mean."""
    tensors: dict[str, Tensor] = {}
    changed, merged = dict[int, Attention](), dict[int, Attention]()
    for layer, (old, wanted) in _wanted_heads(spec, asked).items():
        path, dim = f"blocks.{layer}.attention", old.head_dim
        names = tensors_of(path, old, "k_proj", "v_proj")
        changed[layer] = with_heads(old, wanted)
        if wanted % old.kv_heads == 0:
            move = partial(repeated_heads, times=wanted // old.kv_heads, head_dim=dim)
        elif asked.weights.ask(partial(equal_in_groups, path=path, attention=old, wanted=wanted), False, True):
            move = partial(first_of_groups, group=old.kv_heads // wanted, head_dim=dim)
        else:
            merged[layer] = changed[layer]
            mean = partial(mean_of_groups, own=old.kv_heads, new=wanted, heads=old.heads, head_dim=dim)
            for name in names if asked.approximate else ():
                tensors[name] = Computed(lambda model, name=name, mean=mean: mean(model.wide(name)))  # type: ignore[misc]
            continue
        tensors |= {name: Moved(name, move) for name in names}
    summary: dict[str, Any] = {"layers": sorted(changed), "merged": len(merged)}
    if merged:
        summary["by"] = "mean" if asked.approximate else "regression"
    if merged and not asked.approximate:
        fitted = Scratch.by("kv_fit.fitted_layers", merged, asked.text("fewer key-value heads are fitted"))
        tensors |= fitted.waiting(fitted_names(spec, merged))
    return Swapped(with_mixers(spec, changed), "approximate" if merged else "exact", tensors, summary)


def fitted_names(spec: ModelSpec, changed: Mapping[int, Attention | LatentAttention], down: bool = True) -> list[str]:
    """What a fit of these layers makes: their new attention, but for the bias of its output, and with `down` what
    leaves the feed-forward, where there is one such projection.
    """
    found = [f"blocks.{i}.attention.{name}" for i, new in changed.items() for name in new.shapes()]
    downs = {f"blocks.{layer}.feed_forward.down_proj.weight" for layer in changed if down}
    downs &= {parameter.name for parameter in spec.parameters()}
    return [*(name for name in found if not name.endswith("o_proj.bias")), *downs]


def back(before: ModelSpec, _: Asked) -> Step | None:
    """The step back from more heads, where all layers had the same number."""
    counts = {getattr(block.attention, "kv_heads", None) for block in before.blocks} - {None}
    return Step("attention", f"gqa:{counts.pop()}") if len(counts) == 1 else None


def fewer(spec: ModelSpec) -> list[str]:
    """Half as many and so on, and twice as many, where the query heads can share them."""
    attention = spec.blocks[0].attention
    own = getattr(attention, "kv_heads", 0)
    counts = [count for count in (own // 2, own * 2) if count > 1 and attention.heads % count == 0]
    return [f"gqa:{count}" for count in counts if count != attention.heads]


entry = partial(
    Swap,
    option="attention",
    takes="key-value heads",
    needs="more heads than now, or heads that are equal; else a calibration text, and it is approximate",
    source="Ainslie et al. 2305.13245; Shazeer 1911.02150; the fit is derived for gptkit",
    reshape=change,
    by_layer=True,
    calibrated=True,
    inverse=back,
    exact_where="the heads of a group are equal",
)
LATENT = Clears("*.attention", ours=LatentAttention, theirs=Attention)

ORDER = 90
OPTIONS = (
    Option(
        "attention",
        ATTENTION,
        1,
        "How many key-value heads, or how wide a latent.",
        "mha | mqa | gqa:N | mla:N",
        words="mha = multi-head, multi-head attention; mqa = multi-query, multi-query attention; gqa = "
        "grouped-query, grouped-query attention; mla = multi-head latent, multi-head latent attention, "
        "latent",
        two={"deepseek": (("attention", "mla:full"), ("attention", "mla:deepseek"))},
        parts={
            "gqa:": ("key-value heads", lambda spec: {getattr(b.attention, "kv_heads", None) for b in spec.blocks}),
            "mla:": (
                "numbers that a token leaves in a layer's cache",
                lambda spec: {cached(spec.block_operations(block)) for block in set(spec.blocks)},
            ),
        },
    ),
)
SWAPS = (
    entry(form="mha", gives="one a query head (MHA)", clears=(Clears("*.kv_heads"), LATENT)),
    entry(form="mqa", gives="one for all (MQA)"),
    entry(
        form="gqa:N",
        gives="N, each for a group of query heads (GQA)",
        examples=fewer,
        clears=(Clears("*.kv_heads", "attention=gqa:{theirs}"),),
    ),
)
