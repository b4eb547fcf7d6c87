"""Constants that move from one place of a block to another, which changes nothing it computes.

value-bias: attention weights of a query sum to one, so a bias of the values is one of the outputs: b_o += W_o b_v, b_v
of a key-value head for every query head of its group (TransformerLens, `fold_value_biases`).
scale: the scale of the scores goes into the queries, and becomes 1, or 1/√head_dim with "scale:head", which is what
most families have. Where a norm follows the projection its weight takes the factor.
norm: γ goes into the weights that read the norm, β into their biases (TransformerLens, `fold_ln`).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec
import numpy as np

from ...components import ALiBi, Attention, Block, LayerNorm, ModelSpec, Norm
from ...errors import SwapRefused
from ..base import Computed, Filled, Model, Swapped, Tensor, Wide
from ..layerwise import attentions, replaced, weighed, with_attention, with_blocks
from ..registry import Asked, Clears, Step, Swap
from ..stream import head_weight, norms, readers, require_weights
from .norm import shifted

Reshape = Callable[[ModelSpec, Asked], Swapped]
Inverse = Callable[[ModelSpec, Asked], Step | None]

UNSCALED = "an ALiBi bias, where there is one, outside the scale"

__all__ = ["SWAPS"]

replace = msgspec.structs.replace


# --- the bias of the values -------------------------------------------------------------------------------------------


def output_of_value_bias(output: Wide, bias: Wide, group: int, head_dim: int) -> Wide:
    """W_o b_v: output [hidden, heads · head_dim], bias [kv_heads · head_dim], which `group` query heads share."""
    every_head = np.repeat(bias.reshape(-1, head_dim), group, axis=0).reshape(-1)
    result: Wide = output @ every_head
    return result


def fold_value_bias(spec: ModelSpec, asked: Asked) -> Swapped:
    """The values' bias into the output's."""
    tensors: dict[str, Tensor] = {}
    changed = {}
    for layer, attention in attentions(spec, asked.chosen(spec), ", which has no bias of the values").items():
        path = f"blocks.{layer}.attention"
        if asked.weights.zero(f"{path}.v_proj.bias"):
            continue

        def make(model: Model, path: str = path, attention: Attention = attention) -> Wide:
            moved = output_of_value_bias(
                model.wide(f"{path}.o_proj.weight"), model.wide(f"{path}.v_proj.bias"), attention.group,
                attention.head_dim,
            )  # fmt: skip
            return moved + model.wide(f"{path}.o_proj.bias") if attention.output_bias else moved

        tensors[f"{path}.o_proj.bias"] = Computed(make)
        tensors[f"{path}.v_proj.bias"] = Filled((attention.kv_heads * attention.head_dim,), 0.0, f"{path}.v_proj.bias")
        changed[layer] = replace(attention, output_bias=True)
    if not changed:
        raise SwapRefused("no layer's values have a bias, or it is zero in all of them")
    return Swapped(with_attention(spec, changed), "exact", tensors, {"layers": sorted(changed)})


# --- the scale of the scores ------------------------------------------------------------------------------------------


def rescaled(name: str, factor: float) -> Computed:
    """A tensor times a factor."""
    return Computed(lambda model: model.wide(name) * factor)


def fold_scale(spec: ModelSpec, asked: Asked) -> Swapped:
    """The scale into the queries."""
    if asked.argument not in (None, "head"):
        raise SwapRefused(f"--fold {asked.value!r} is unknown", "Known: scale, scale:head.")
    tensors: dict[str, Tensor] = {}
    changed = {}
    for layer, attention in attentions(spec, asked.chosen(spec), ", which has no scale of its own heads").items():
        wanted = attention.head_dim**-0.5 if asked.argument == "head" else 1.0
        if math.isclose(attention.scale, wanted, rel_tol=1e-14):  # families write 1/√d in several ways
            continue
        if isinstance(attention.position, ALiBi) and attention.position.scaled:
            raise SwapRefused(
                f"layer {layer} multiplies its ALiBi bias by the scale too, which no weight can take over",
                "Possible here: the layers without (--blocks), or other positions first (--position).",
            )
        path, factor = f"blocks.{layer}.attention", attention.scale / wanted
        weighed(f"{path}.q_norm", attention.q_norm)
        if attention.q_norm is not None:
            tensors[f"{path}.q_norm.weight"] = rescaled(f"{path}.q_norm.weight", factor)
        else:
            tensors[f"{path}.q_proj.weight"] = rescaled(f"{path}.q_proj.weight", factor)
            if attention.qkv_bias:
                tensors[f"{path}.q_proj.bias"] = rescaled(f"{path}.q_proj.bias", factor)
        changed[layer] = replace(attention, scale=wanted, scaling="multiply")
    if not changed:
        raise SwapRefused("every layer's scale is that already")
    return Swapped(with_attention(spec, changed), "exact", tensors, {"layers": sorted(changed)})


def unscaled(before: ModelSpec, asked: Asked) -> Step | None:
    """The step back, where the scale before was the usual one."""
    found = [block.attention for block in before.blocks]
    usual = all(isinstance(a, Attention) and math.isclose(a.scale, a.head_dim**-0.5, rel_tol=1e-14) for a in found)
    return Step("fold", "scale:head") if usual and asked.argument is None else None


# --- the weight and bias of norms -------------------------------------------------------------------------------------


def scaled_inputs(weight: str, gamma: str) -> Computed:
    """A reader [out, in] of a norm whose weight has become 1: R·diag(γ)."""
    return Computed(lambda model: model.wide(weight) * model.wide(gamma))


def fold_norm(spec: ModelSpec, asked: Asked) -> Swapped:
    """γ and β of the norms before attention and feed-forward, and of the last one, into what reads them."""
    require_weights(spec)
    layers = asked.chosen(spec)
    tensors: dict[str, Tensor] = {}
    blocks = {}
    for layer in layers:
        block, path = spec.blocks[layer], f"blocks.{layer}"
        if block.residual == "normed":
            raise SwapRefused(f"layer {layer} takes its residual from its norms' outputs, not from what they read")
        blocks[layer] = folded_block(block, path, tensors)
        for name, norm in norms(block, path):
            clear(norm, name, tensors)
    head, final = spec.head, spec.final_norm
    if asked.layers is None:
        weight = head_weight(spec)
        tensors["head.weight"] = scaled_inputs(weight, "final_norm.weight")
        head = replace(head, tied=False)
        if has_bias(final):
            tensors["head.bias"] = Computed(shifted(weight, "head.bias" if head.bias else None, "final_norm.bias"))
            head = replace(head, bias=True)
        clear(final, "final_norm", tensors)
        final = without_bias(final)
    new = with_blocks(spec, blocks, head=head, final_norm=final)
    untied = asked.layers is None and spec.head.tied
    notes = ("the head was untied from the embedding: it takes the last norm's weight",) if untied else ()
    return Swapped(new, "exact", tensors, {"layers": list(layers), "head": asked.layers is None}, notes)


def has_bias(norm: Norm) -> bool:
    """Whether a norm has a bias."""
    return isinstance(norm, LayerNorm) and norm.bias


def without_bias(norm: Norm) -> Norm:
    """The norm without its bias."""
    return replace(norm, bias=False) if isinstance(norm, LayerNorm) else norm


def clear(norm: Norm, path: str, tensors: dict[str, Tensor]) -> None:
    """A norm's weight becomes 1."""
    tensors[f"{path}.weight"] = Filled((norm.size,), 1.0, f"{path}.weight")


def folded_block(block: Block, path: str, tensors: dict[str, Tensor]) -> Block:
    """A block whose readers have taken over what its norms had; their tensors go into `tensors`."""
    biased = {name for name, norm in norms(block, path) if has_bias(norm)}
    for reader in readers(block, path):
        tensors[reader.weight] = scaled_inputs(reader.weight, f"{reader.norm}.weight")
        if reader.norm in biased:
            if not reader.may_have_bias:
                raise SwapRefused(f"{reader.path} has no bias to take over that of {reader.norm}")
            old = reader.bias_name if reader.bias else None
            tensors[reader.bias_name] = Computed(shifted(reader.weight, old, f"{reader.norm}.bias"))
    attention, inner = block.attention, block.feed_forward
    source = block.feed_forward_norm or block.attention_norm
    if has_bias(block.attention_norm):
        attention = replace(attention, qkv_bias=True)
    if has_bias(source):
        inner = replace(inner, up_bias=True)
    return replaced(
        block,
        attention=attention,
        feed_forward=inner,
        attention_norm=without_bias(block.attention_norm),
        feed_forward_norm=None if block.feed_forward_norm is None else without_bias(block.feed_forward_norm),
    )


def folds(
    what: str,
    takes: str,
    gives: str,
    needs: str,
    reshape: Reshape,
    inverse: Inverse | None = None,
    clears: tuple[Clears, ...] = (),
) -> Swap:
    """The entry of one fold; all of them are exact."""
    return Swap(
        option="fold",
        form=what,
        takes=takes,
        gives=gives,
        guarantee="exact",
        needs=needs,
        source="TransformerLens",
        reshape=reshape,
        examples=lambda spec: (what.replace("WHERE", "head"),),
        by_layer=True,
        inverse=inverse or (lambda before, asked: None),
        clears=clears,
    )


NORM_BIAS, SCALE, HEAD_SCALE = Clears("*norm.bias"), Clears("*.scale"), Clears("*.scale", "fold=scale:head")

ORDER = 190
SWAPS: tuple[Swap, ...] = (
    folds(
        "norm",
        "γ and β of norms",
        "weights and biases of their readers",
        "pre-norm blocks",
        fold_norm,
        None,
        (NORM_BIAS,),
    ),
    folds("value-bias", "the bias of values", "one of outputs", "a bias that is not zero", fold_value_bias),
    folds("scale", "the scale of scores", "queries, and a scale of 1", UNSCALED, fold_scale, unscaled, (SCALE,)),
    folds(
        "scale:WHERE",
        "the scale of scores",
        "queries, and a scale of 1/√head_dim",
        UNSCALED,
        fold_scale,
        None,
        (HEAD_SCALE,),
    ),
)
