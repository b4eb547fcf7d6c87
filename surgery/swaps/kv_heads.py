"""Key-value heads: repeated for more of them, merged for fewer (MHA, GQA 2305.13245, MQA 1911.02150).

More is exact: every head is repeated for its share of the query heads. Fewer is exact where the heads that become one
are equal bit for bit, as after a repetition. Otherwise they are fitted on a text (`regression`), or, plainly, averaged
(the GQA paper's mean-pooling).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...components import Attention, LatentAttention, ModelSpec
from ...errors import SwapRefused
from ..base import Computed, Guarantee, Model, Moved, Swapped, Tensor, Wide
from ..fits.scratch import Scratch
from ..layerwise import attentions, with_attention
from ..registry import Asked, Clears, Step, Swap

__all__ = ["SWAPS"]

replace = msgspec.structs.replace
Array = NDArray[Any]


def projections(attention: Attention) -> tuple[str, ...]:
    """The tensors of an attention whose rows are its key-value heads."""
    bias = ("k_proj.bias", "v_proj.bias") if attention.qkv_bias else ()
    return ("k_proj.weight", "v_proj.weight", *bias)


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


def possible(attention: Attention) -> list[int]:
    """How many key-value heads the query heads can share."""
    return [count for count in range(1, attention.heads + 1) if attention.heads % count == 0]


def wanted_heads(spec: ModelSpec, asked: Asked) -> dict[int, tuple[Attention, int]]:
    """The layers that change: (their attention, its new number of key-value heads)."""
    found, latent = {}, ", whose heads share one latent"
    for layer, attention in attentions(spec, asked.chosen(spec), latent, "Possible for the others: --blocks.").items():
        kind = asked.value.partition(":")[0]
        wanted = {"mha": attention.heads, "mqa": 1}.get(kind) or asked.number("key-value heads")
        if attention.heads % wanted:
            raise SwapRefused(
                f"{wanted} key-value heads cannot be shared by {attention.heads} query heads",
                f"Possible here: {', '.join(map(str, possible(attention)))}.",
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
    group = attention.kv_heads // wanted
    for name in projections(attention):
        tensor, _ = model.tensor(f"{path}.{name}")
        heads = tensor.reshape(wanted, group, -1)
        equal = bool((heads == heads[:, :1]).all())
        model.release()
        if not equal:
            return False
    return True


def with_heads(attention: Attention, wanted: int) -> Attention:
    """The attention with so many key-value heads. One alone, or one a query head, broadcast in a product; others are
    repeated.
    """
    several = attention.kv_expansion == "broadcast" and wanted not in (1, attention.heads)
    expansion = "repeat" if several else attention.kv_expansion
    return replace(attention, kv_heads=wanted, kv_expansion=expansion)


def change(spec: ModelSpec, asked: Asked) -> Swapped:
    """Another number of key-value heads."""
    tensors: dict[str, Tensor] = {}
    changed: dict[int, Attention] = {}
    merged: list[int] = []
    before: dict[int, Attention] = {}
    for layer, (attention, wanted) in wanted_heads(spec, asked).items():
        before[layer] = attention
        path = f"blocks.{layer}.attention"
        changed[layer] = with_heads(attention, wanted)
        if wanted % attention.kv_heads == 0:
            move = mover(repeated_heads, wanted // attention.kv_heads, attention.head_dim)
        elif asked.weights.ask(partial(equal_in_groups, path=path, attention=attention, wanted=wanted), False, True):
            move = mover(first_of_groups, attention.kv_heads // wanted, attention.head_dim)
        else:
            merged.append(layer)
            continue
        tensors.update({f"{path}.{name}": Moved(f"{path}.{name}", move) for name in projections(attention)})
    new = with_attention(spec, changed)
    summary: dict[str, Any] = {"layers": sorted(changed), "merged": len(merged)}
    guarantee: Guarantee = "approximate" if merged else "exact"
    if merged and asked.approximate:
        for layer in merged:
            tensors.update(averaged(f"blocks.{layer}.attention", before[layer], changed[layer]))
        return Swapped(new, guarantee, tensors, {**summary, "by": "mean"})
    if merged:
        tensors.update(fit(spec, changed, merged, asked))
        return Swapped(new, guarantee, tensors, {**summary, "by": "regression"})
    return Swapped(new, guarantee, tensors, summary)


def mover(move: Callable[[Array, int, int], Array], count: int, head_dim: int) -> Callable[[Array], Array]:
    """A movement of heads with its numbers filled in."""
    return lambda tensor: move(tensor, count, head_dim)


def averaged(path: str, old: Attention, new: Attention) -> dict[str, Tensor]:
    """The naive form: keys and values are the means of those they stand for."""

    def mean(name: str) -> Computed:
        return Computed(
            lambda model: mean_of_groups(model.wide(name), old.kv_heads, new.kv_heads, old.heads, old.head_dim)
        )

    return {f"{path}.{name}": mean(f"{path}.{name}") for name in projections(old)}


def fit(spec: ModelSpec, changed: dict[int, Attention], merged: Sequence[int], asked: Asked) -> Mapping[str, Tensor]:
    """The layers whose heads are merged, fitted on a text."""
    chosen = {layer: changed[layer] for layer in merged}
    fitted = Scratch.by("kv_fit.fitted_layers", chosen, asked.text("fewer key-value heads are fitted"))
    names = [f"{which}_proj.{part}" for which in "qkv" for part in ("weight", "bias")]
    refitted = {f"blocks.{layer}.feed_forward.down_proj.weight" for layer in merged}
    refitted &= {parameter.name for parameter in spec.parameters()}
    own = [
        f"blocks.{layer}.attention.{name}"
        for layer in merged
        for name in (*names, "o_proj.weight")
        if changed[layer].qkv_bias or not name.endswith("bias")
    ]
    return fitted.waiting((*refitted, *own))


def back(before: ModelSpec, _: Asked) -> Step | None:
    """The step back from more heads, where all layers had the same number."""
    counts = {block.attention.kv_heads for block in before.blocks if isinstance(block.attention, Attention)}
    return Step("attention", f"gqa:{counts.pop()}") if len(counts) == 1 else None


def fewer(spec: ModelSpec) -> list[str]:
    """Half as many and so on, and twice as many, where the query heads can share them."""
    attention = spec.blocks[0].attention
    if not isinstance(attention, Attention):
        return []
    own = attention.kv_heads
    counts = [count for count in (own // 2, own * 2) if count > 1 and attention.heads % count == 0]
    return [f"gqa:{count}" for count in counts if count != attention.heads]


def entry(form: str, gives: str, examples: Callable[[ModelSpec], Iterable[str]], *clears: Clears) -> Swap:
    """A swap to another number of key-value heads; `change` sees which it is."""
    return Swap(
        option="attention",
        form=form,
        takes="key-value heads",
        gives=gives,
        guarantee="exact",
        needs="more heads than now, or heads that are equal; else a calibration text, and it is approximate",
        source="Ainslie et al. 2305.13245; Shazeer 1911.02150; the fit is derived for gptkit",
        reshape=change,
        examples=examples,
        by_layer=True,
        calibrated=True,
        inverse=back,
        exact_where="the heads of a group are equal",
        clears=clears,
    )


LATENT = Clears("*.attention", ours=LatentAttention, theirs=Attention)

ORDER = 90
SWAPS: tuple[Swap, ...] = (
    entry("mha", "one a query head (MHA)", lambda spec: ("mha",), Clears("*.kv_heads"), LATENT),
    entry("mqa", "one for all (MQA)", lambda spec: ("mqa",)),
    entry("gqa:N", "N, each for a group of query heads (GQA)", fewer, Clears("*.kv_heads", "attention=gqa:{theirs}")),
)
