"""Constants that move from one place of a block to another, which changes nothing it computes.

value-bias: attention weights of a query sum to one, so a bias of the values is one of the outputs: b_o += W_o b_v, b_v
of a key-value head for every query head of its group (TransformerLens, `fold_value_biases`).
scale: the scale of the scores goes into the queries, and becomes 1, or 1/√head_dim with "scale:head", which is what
most families have. Where a norm follows the projection its weight takes the factor.
norm: γ goes into the weights that read the norm, β into their biases (TransformerLens, `fold_ln`).
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np
from msgspec.structs import replace

from ...components import ALiBi, Attention, ModelSpec, Norm
from ...errors import SwapRefused
from ..base import Computed, Filled, Model, Swapped, Tensor, Wide
from ..basis import with_norms
from ..layerwise import attentions, tensors_of, unclipped, weighed, with_blocks, with_mixers
from ..options import WEIGHTS, Option
from ..registry import Asked, Clears, Step, Swap
from ..stream import head_weight, last_norm, norms, readers, require_weights
from .norm import has_bias, shifted, with_read_biases


def output_of_value_bias(output: Wide, bias: Wide, group: int, head_dim: int) -> Wide:
    """W_o b_v: output [hidden, heads · head_dim], bias [kv_heads · head_dim], which `group` query heads share."""
    every_head = np.repeat(bias.reshape(-1, head_dim), group, axis=0).reshape(-1)
    result: Wide = output @ every_head
    return result


def _fold_value_bias(spec: ModelSpec, asked: Asked) -> Swapped:
    """The values' bias into the output's."""
    tensors, changed = dict[str, Tensor](), dict[int, Attention]()
    for layer, attention in attentions(spec, asked.chosen(spec), ", which has no bias of the values").items():
        path = f"blocks.{layer}.attention"
        unclipped(path, attention)
        value, output = f"{path}.v_proj.bias", f"{path}.o_proj"
        if asked.weights.zero(value):
            continue

        def make(model: Model, value: str = value, output: str = output, attention: Attention = attention) -> Wide:
            given = model.wide(f"{output}.weight"), model.wide(value), attention.group, attention.head_dim
            moved = output_of_value_bias(*given)
            return moved + model.wide(f"{output}.bias") if attention.output_bias else moved

        tensors[f"{output}.bias"] = Computed(make)
        tensors[value] = Filled((attention.kv_heads * attention.head_dim,), 0.0, value)
        changed[layer] = replace(attention, output_bias=True)
    if not changed:
        raise SwapRefused("no layer's values have a bias, or it is zero in all of them")
    return Swapped(with_mixers(spec, changed), "exact", tensors, {"layers": sorted(changed)})


def rescaled(name: str, factor: float) -> Computed:
    """A tensor times a factor."""
    return Computed(lambda model: model.wide(name) * factor)


def _fold_scale(spec: ModelSpec, asked: Asked) -> Swapped:
    """The scale of the scores into the queries."""
    if asked.argument not in (None, "head"):
        raise SwapRefused(f"--fold {asked.value!r} is unknown", "Known: scale, scale:head.")
    tensors, changed = dict[str, Tensor](), dict[int, Attention]()
    for layer, attention in attentions(spec, asked.chosen(spec), ", which has no scale of its own heads").items():
        wanted = attention.head_dim**-0.5 if asked.argument == "head" else 1.0
        if math.isclose(attention.scale, wanted, rel_tol=1e-14):  # families write 1/√d in several ways
            continue
        unclipped(f"blocks.{layer}.attention", attention)
        if isinstance(attention.position, ALiBi) and attention.position.scaled:
            raise SwapRefused(
                f"layer {layer} multiplies its ALiBi bias by the scale too, which no weight can take over",
                "Possible here: the layers without (--blocks), or other positions first (--position).",
            )
        path, factor = f"blocks.{layer}.attention", attention.scale / wanted
        weighed(f"{path}.q_norm", attention.q_norm)
        normed = attention.q_norm is not None
        names = [f"{path}.q_norm.weight"] if normed else tensors_of(path, attention, "q_proj")
        tensors |= {name: rescaled(name, factor) for name in names}
        changed[layer] = replace(attention, scale=wanted, scaling="multiply")
    if not changed:
        raise SwapRefused("every layer's scale is that already")
    return Swapped(with_mixers(spec, changed), "exact", tensors, {"layers": sorted(changed)})


def unscaled(before: ModelSpec, asked: Asked) -> Step | None:
    """The step back, where the scale before was the usual one."""
    found = [block.attention for block in before.blocks]
    usual = all(isinstance(a, Attention) and math.isclose(a.scale, a.head_dim**-0.5, rel_tol=1e-14) for a in found)
    return Step("fold", "scale:head") if usual and asked.argument is None else None


def scaled_inputs(weight: str, gamma: str) -> Computed:
    """A reader [out, in] of a norm whose weight has become 1: R·diag(γ)."""
    return Computed(lambda model: model.wide(weight) * model.wide(gamma))


def _fold_norm(spec: ModelSpec, asked: Asked) -> Swapped:
    """γ and β of the norms before attention and feed-forward, and of the last one, into what reads them."""
    require_weights(spec)
    tensors: dict[str, Tensor] = {}
    blocks = {}
    for layer in asked.chosen(spec):
        block, path = spec.blocks[layer], f"blocks.{layer}"
        if block.residual == "normed":
            raise SwapRefused(f"layer {layer} takes its residual from its norms' outputs, not from what they read")
        own = dict(norms(block, path))
        biased = {name for name, norm in own.items() if has_bias(norm)}
        for reader in readers(block, path):
            tensors[reader.weight] = scaled_inputs(reader.weight, f"{reader.norm}.weight")
            if reader.norm in biased:
                if not reader.may_have_bias:
                    raise SwapRefused(f"{reader.path} has no bias to take over that of {reader.norm}")
                old = reader.bias_name if reader.bias else None
                tensors[reader.bias_name] = Computed(shifted(reader.weight, old, f"{reader.norm}.bias"))
        plain = {name: _without_bias(norm) for name, norm in own.items()}
        blocks[layer] = with_norms(with_read_biases(block, path, biased), path, plain)
        for name, norm in own.items():
            clear(norm, name, tensors)
    head, final = spec.head, last_norm(spec)
    if asked.layers is None:
        weight = head_weight(spec)
        tensors["head.weight"] = scaled_inputs(weight, "final_norm.weight")
        if has_bias(final):
            tensors["head.bias"] = Computed(shifted(weight, "head.bias" if head.bias else None, "final_norm.bias"))
        head = replace(head, tied=False, bias=head.bias or has_bias(final))
        clear(final, "final_norm", tensors)
        final = _without_bias(final)
    untied = asked.layers is None and spec.head.tied
    notes = ("the head was untied from the embedding: it takes the last norm's weight",) if untied else ()
    summary = {"layers": list(asked.chosen(spec)), "head": asked.layers is None}
    return Swapped(with_blocks(spec, blocks, head=head, final_norm=final), "exact", tensors, summary, notes)


def _without_bias(norm: Norm) -> Norm:
    """The norm without its bias."""
    return replace(norm, bias=False) if has_bias(norm) else norm


def clear(norm: Norm, path: str, tensors: dict[str, Tensor]) -> None:
    """A norm's weight becomes 1."""
    tensors[f"{path}.weight"] = Filled((norm.size,), 1.0, f"{path}.weight")


entry = partial(Swap, option="fold", source="TransformerLens", by_layer=True)
UNSCALED = "an ALiBi bias, where there is one, outside the scale"

ORDER = 190
OPTIONS = (
    Option(
        "fold",
        WEIGHTS,
        3,
        "Fold constants into the weights beside them.",
        "value-bias | scale | norm",
        words="norm = norms; value-bias = value_bias; scale = scales",
    ),
)
SWAPS = (
    entry(
        form="norm",
        takes="γ and β of norms",
        gives="weights and biases of their readers",
        needs="pre-norm blocks",
        reshape=_fold_norm,
        clears=(Clears("*norm.bias"),),
    ),
    entry(
        form="value-bias",
        takes="the bias of values",
        gives="one of outputs",
        needs="a bias that is not zero",
        reshape=_fold_value_bias,
    ),
    entry(
        form="scale",
        takes="the scale of scores",
        gives="queries, and a scale of 1",
        needs=UNSCALED,
        reshape=_fold_scale,
        inverse=unscaled,
        clears=(Clears("*.scale"),),
    ),
    entry(
        form="scale:WHERE",
        takes="the scale of scores",
        gives="queries, and a scale of 1/√head_dim",
        needs=UNSCALED,
        reshape=_fold_scale,
        examples=lambda spec: ("scale:head",),
        clears=(Clears("*.scale", "fold=scale:head"),),
    ),
)
