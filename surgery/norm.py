"""LayerNorm <-> RMSNorm.

LayerNorm -> RMSNorm, exact for a pre-norm model (SliceGPT 2401.15024, section 3; Jiang et al. 2305.14858;
TransformerLens' centering): if every vector in the residual stream has mean zero, LayerNorm(x) = RMSNorm(x) + β. So

- whatever writes into the stream is centred: W -= mean over outputs, b -= mean(b), the token and position tables too;
- β moves into what reads the norm: R.bias += R·β, for the last norm into a bias of the head;
- γ and eps stay.

The mean of the stream reaches nothing but the norms, so subtracting it changes nothing else. A tied head reads the
same matrix that must be centred on the embedding's side, so it is untied first. Where a norm sits on the embedding
(BLOOM) the table becomes centre(LayerNorm(table)) and the norm goes. Where the norm's *output* is the residual the
mean is not free, and no exact form is known: what is left of it is the mean of γ⊙n, n being the normed vector.

RMSNorm -> LayerNorm is in `layernorm`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from ..components import Block, LayerNorm, MixtureOfExperts, ModelSpec, Norm, RMSNorm
from ..errors import SwapRefused
from .base import Computed, Model, Moved, Swapped, Tensor, Wide
from .basis import CENTRED, Compute, exchanged, with_norms
from .layernorm import has_rms_norm, rmsnorm_again, to_layernorm
from .registry import Asked, Clears, Step, Swap
from .stream import head_weight, norms, readers, stream_norms, writers

__all__ = [
    "SWAPS",
    "layernorm_to_rmsnorm",
    "off_centre",
    "replace_layernorm",
    "why_not_exact",
]

replace = msgspec.structs.replace


def layer_norms(spec: ModelSpec) -> list[str]:
    """The paths of the LayerNorms in a tree."""
    return [path for path, node in spec.nodes() if isinstance(node, LayerNorm)]


def why_not_exact(spec: ModelSpec) -> str | None:
    """The reason why LayerNorm -> RMSNorm cannot be exact for this tree, or None.

    Raises:
        SwapRefused: there is no LayerNorm to replace.

    """
    if not layer_norms(spec):
        raise SwapRefused("this model has no LayerNorm: its norms are RMSNorm already")
    if any(block.residual == "normed" for block in spec.blocks):
        return (
            "its residual is taken from the norm's output (apply_residual_connection_post_layernorm), so the mean that"
            " LayerNorm removes is part of what the model computes"
        )
    kept = [path for path, norm in stream_norms(spec) if isinstance(norm, RMSNorm)]
    if kept:
        return f"{kept[0]} is an RMSNorm already and would see the centred stream, of which it sees the mean today"
    return None


def to_rms(norm: Norm) -> RMSNorm:
    """The RMSNorm in a LayerNorm's place."""
    match norm:
        case LayerNorm():
            return RMSNorm(size=norm.size, eps=norm.eps, gain=norm.gain)
        case RMSNorm():
            return norm
    raise SwapRefused(f"a {type(norm).__name__} has no RMSNorm in its place")


def centred(name: str) -> Compute:
    """A writer's weight [out, in] or bias [out], with the mean over its outputs taken off."""

    def compute(model: Model) -> Wide:
        weight = model.wide(name)
        result: Wide = weight - weight.mean(axis=0, keepdims=True)
        return result

    return compute


def centred_rows(name: str) -> Compute:
    """A table whose rows go into the stream."""
    return lambda model: centre_rows(model.wide(name))


def centre_rows(rows: Wide) -> Wide:
    """Each row without its mean."""
    result: Wide = rows - rows.mean(axis=1, keepdims=True)
    return result


def normed_rows(table: str, norm: str, eps: float, bias: bool) -> Compute:
    """centre(LayerNorm(row)) for every row of a table."""

    def compute(model: Model) -> Wide:
        rows = centre_rows(model.wide(table))
        rows = rows / np.sqrt((rows**2).mean(axis=1, keepdims=True) + eps) * model.wide(f"{norm}.weight")
        return centre_rows(rows + model.wide(f"{norm}.bias") if bias else rows)

    return compute


def shifted(weight: str, bias: str | None, beta: str) -> Compute:
    """A reader's bias after β moved into it: bias + W·β."""

    def compute(model: Model) -> Wide:
        moved: Wide = model.wide(weight) @ model.wide(beta)
        return moved if bias is None else np.add(moved, model.wide(bias))

    return compute


def centred_with(bias: str | None, beta: str) -> Compute:
    """A writer's bias after β moved into it, without its mean: where the norm's output is the residual."""

    def compute(model: Model) -> Wide:
        whole = model.wide(beta) if bias is None else model.wide(bias) + model.wide(beta)
        result: Wide = whole - whole.mean()
        return result

    return compute


# --- LayerNorm -> RMSNorm ---------------------------------------------------------------------------------------------


def layernorm_to_rmsnorm(spec: ModelSpec, layers: tuple[int, ...] | None = None) -> Swapped:
    """The exact swap, for all norms or those of some layers.

    Raises:
        SwapRefused: there is no exact form for this tree; the message says why.

    """
    reason = why_not_exact(spec)
    if reason is not None:
        raise SwapRefused(
            f"LayerNorm -> RMSNorm cannot be exact here: {reason}",
            "--approximate replaces the norms all the same and measures the damage.",
        )
    new, tensors = centred_tree(spec, layers)
    notes = ("the head was untied from the embedding: it needs the table uncentred",) if spec.head.tied else ()
    return Swapped(new, "exact", tensors, summary(spec, layers), notes)


def centred_tree(spec: ModelSpec, layers: tuple[int, ...] | None) -> tuple[ModelSpec, dict[str, Tensor]]:
    """A tree with a stream of mean zero, as far as it is not a norm's output, and RMSNorms for LayerNorms."""
    computed: dict[str, Compute] = {}
    moved: dict[str, Tensor] = {}
    blocks = tuple(
        _block(block, f"blocks.{layer}", layers is None or layer in layers, computed)
        for layer, block in enumerate(spec.blocks)
    )
    head, final = spec.head, spec.final_norm
    if layers is None:
        if isinstance(final, LayerNorm) and final.bias:
            old = "head.bias" if head.bias else None
            computed["head.bias"] = shifted(head_weight(spec), old, "final_norm.bias")
            head = replace(head, bias=True)
        final = to_rms(final)
    if head.tied:
        head = replace(head, tied=False)
        moved["head.weight"] = Moved("embedding.weight")
    embedding = spec.embedding
    if isinstance(embedding.norm, LayerNorm):
        norm = embedding.norm
        computed["embedding.weight"] = normed_rows("embedding.weight", "embedding.norm", norm.eps, norm.bias)
        embedding = replace(embedding, norm=None)
    else:
        assert embedding.norm is None
        computed["embedding.weight"] = centred_rows("embedding.weight")
    if spec.positions is not None:
        computed["positions.weight"] = centred_rows("positions.weight")
    return replace(spec, embedding=embedding, blocks=blocks, final_norm=final, head=head), made(computed) | moved


def made(computed: Mapping[str, Compute]) -> dict[str, Tensor]:
    """Functions of the old tree as tensors of the new one."""
    return {name: Computed(make) for name, make in computed.items()}


def _block(block: Block, path: str, chosen: bool, computed: dict[str, Compute]) -> Block:
    """The block with its writers centred and, where it is chosen, its norms exchanged; what changes in its tensors
    goes into `computed`.
    """
    attention, inner = block.attention, block.feed_forward
    gone = dict(norms(block, path)) if chosen else {}
    shifting = {name for name, norm in gone.items() if isinstance(norm, LayerNorm) and norm.bias}
    for each in readers(block, path):
        if each.norm in shifting and each.may_have_bias:
            old = each.bias_name if each.bias else None
            computed[each.bias_name] = shifted(each.weight, old, f"{each.norm}.bias")
    if f"{path}.attention_norm" in shifting:
        attention = replace(attention, qkv_bias=True)
    if inner_norm(block, path) in shifting:
        inner = with_biases(inner, up=True)
    for each in writers(block, path):
        computed[each.weight] = centred(each.weight)
        if each.bias:
            computed[each.bias_name] = centred(each.bias_name)
    if block.residual == "normed":  # β is part of the residual too
        for each in writers(block, path):
            beta = f"{path}.attention_norm" if each.path.endswith("o_proj") else f"{path}.feed_forward_norm"
            if beta in shifting:
                computed[each.bias_name] = centred_with(each.bias_name if each.bias else None, f"{beta}.bias")
        if f"{path}.attention_norm" in shifting:
            attention = replace(attention, output_bias=True)
        if f"{path}.feed_forward_norm" in shifting:
            inner = with_biases(inner, down=True)
    normed = with_norms(block, path, {name: to_rms(norm) for name, norm in gone.items()})
    return normed.replaced(attention=attention, feed_forward=inner)


def inner_norm(block: Block, path: str) -> str:
    """The path of the norm that the feed-forward reads."""
    return f"{path}.attention_norm" if block.feed_forward_norm is None else f"{path}.feed_forward_norm"


def with_biases(feed_forward: Any, up: bool = False, down: bool = False) -> Any:
    """A feed-forward, or a mixture's experts, with more biases."""
    if isinstance(feed_forward, MixtureOfExperts):
        return replace(feed_forward, expert=with_biases(feed_forward.expert, up, down))
    return replace(feed_forward, up_bias=feed_forward.up_bias or up, down_bias=feed_forward.down_bias or down)


def replace_layernorm(spec: ModelSpec, layers: tuple[int, ...] | None = None) -> Swapped:
    """The plain replacement: γ and eps kept, β and the centring dropped. Approximate at best.

    Raises:
        SwapRefused: there is no LayerNorm to replace.

    """
    why_not_exact(spec)
    norm = spec.embedding.norm
    new = exchanged(spec, layers, to_rms)
    if norm is not None and layers is None:
        new = replace(new, embedding=replace(spec.embedding, norm=to_rms(norm)))
    return Swapped(new, "approximate", {}, summary(spec, layers))


def summary(spec: ModelSpec, layers: tuple[int, ...] | None = None) -> dict[str, Any]:
    """What the output's record says of it."""
    if layers is None:
        return {"from": "layernorm", "to": "rmsnorm", "norms": len(layer_norms(spec))}
    inside = [name for name in layer_norms(spec) if name.startswith("blocks.") and int(name.split(".")[1]) in layers]
    return {"from": "layernorm", "to": "rmsnorm", "norms": len(inside)}


def off_centre(model: Model, layers: tuple[int, ...] | None) -> str | None:
    """The first router that LayerNorm's β would steer: it has no bias that could take it up. A shift of all of its
    experts alike is none to the softmax.
    """
    for layer, block in enumerate(model.spec.blocks):
        if not isinstance(block.feed_forward, MixtureOfExperts) or not (layers is None or layer in layers):
            continue
        path = f"blocks.{layer}"
        norm = inner_norm(block, path)
        record = dict(norms(block, path))[norm]
        if not (isinstance(record, LayerNorm) and record.bias):
            continue
        router = f"{path}.feed_forward.router"
        shift = shifted(f"{router}.weight", None, f"{norm}.bias")(model)
        if np.ptp(shift) > CENTRED * max(1.0, float(np.abs(shift).max())):
            return router
    return None


def to_rmsnorm(model: Model, asked: Asked) -> Swapped:
    """LayerNorm -> RMSNorm, as exactly as is asked."""
    spec = model.spec
    if asked.approximate:
        reason = why_not_exact(spec)
        mixture = any(isinstance(block.feed_forward, MixtureOfExperts) for block in spec.blocks)
        normed = all(block.residual == "normed" for block in spec.blocks)
        if reason is None or mixture or not normed or asked.layers is not None:
            return replace_layernorm(spec, asked.layers)
        new, tensors = centred_tree(spec, None)
        notes = ("all but the mean of each norm's own output was taken care of",)
        return Swapped(new, "approximate", tensors, summary(spec), notes)
    if why_not_exact(spec) is None:
        router = off_centre(model, asked.layers)
        if router is not None:
            raise SwapRefused(
                f"LayerNorm -> RMSNorm cannot be exact here: the bias of the norm steers {router}, which has none",
                "Exchange the norms before the feed-forwards become experts, or --approximate.",
            )
    return layernorm_to_rmsnorm(spec) if asked.layers is None else layernorm_to_rmsnorm(spec, asked.layers)


SWAPS = (
    Swap(
        option="norm",
        form="rmsnorm",
        takes="LayerNorm",
        gives="RMSNorm",
        guarantee="exact",
        needs="norms before attention and feed-forward (pre-norm), all of them LayerNorms",
        source="SliceGPT 2401.15024; Jiang et al. 2305.14858; TransformerLens",
        apply=to_rmsnorm,
        examples=lambda spec: ("rmsnorm",) if layer_norms(spec) else (),
        by_layer=True,
        inverse=lambda before, asked: None if asked.approximate else Step("norm", "layernorm"),
        clears=(Clears("*norm", theirs=RMSNorm), Clears("*.norm", theirs=None)),
    ),
    Swap(
        option="norm",
        form="layernorm",
        takes="RMSNorm",
        gives="LayerNorm",
        guarantee="exact",
        needs="pre-norm, all norms on the residual stream RMSNorms; one more dimension, unless it has no mean already",
        source="an isometry onto the vectors of mean zero; after SliceGPT 2401.15024, section 3",
        apply=to_layernorm,
        examples=lambda spec: ("layernorm",) if has_rms_norm(spec) else (),
        by_layer=True,
        inverse=rmsnorm_again,
        clears=(Clears("*norm", theirs=LayerNorm),),
    ),
)
