"""LayerNorm -> RMSNorm.

Exact for a pre-norm model (SliceGPT 2401.15024, section 3; Jiang et al. 2305.14858; TransformerLens' centering): if
every vector in the residual stream has mean zero, LayerNorm(x) = RMSNorm(x) + β. So

- whatever writes into the stream is centred: W -= mean over outputs, b -= mean(b), the token and position tables too;
- β moves into what reads the norm: R.bias += R·β, for the last norm into a bias of the head;
- γ and eps stay.

The mean of the stream reaches nothing but the norms, so subtracting it changes nothing else. A tied head reads the
same matrix that must be centred on the embedding's side, so it is untied first. Where a norm sits on the embedding
(BLOOM) the table becomes centre(LayerNorm(table)) and the norm goes. Where the norm's *output* is the residual the
mean is not free, and no exact form is known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np

from ..errors import SwapRefused
from ..spec import Block, FeedForward, GatedFeedForward, LayerNorm, ModelSpec, Norm, RMSNorm
from .base import Computed, Model, Moved, Swapped, Tensor, Wide
from .registry import Asked, Swap

__all__ = ["SWAPS", "layernorm_to_rmsnorm", "replace_layernorm", "why_not_exact"]

replace = msgspec.structs.replace
Compute = Callable[[Model], Wide]


def layer_norms(spec: ModelSpec) -> list[str]:
    """The paths of the LayerNorms in a tree."""
    return [path for path, node in spec.nodes() if isinstance(node, LayerNorm)]


def why_not_exact(spec: ModelSpec) -> str | None:
    """The reason why LayerNorm -> RMSNorm cannot be exact for this tree, or None.

    Raises:
        SwapRefused: there is no LayerNorm to replace.

    """
    found = layer_norms(spec)
    if not found:
        raise SwapRefused("this model has no LayerNorm: its norms are RMSNorm already")
    if any(block.residual == "normed" for block in spec.blocks):
        return (
            "its residual is taken from the norm's output (apply_residual_connection_post_layernorm), so the mean that"
            " LayerNorm removes is part of what the model computes"
        )
    readers = ("attention_norm", "feed_forward_norm", "final_norm")
    kept = [path for path, node in spec.nodes() if isinstance(node, RMSNorm) and path.endswith(readers)]
    if kept:
        return f"{kept[0]} is an RMSNorm already and would see the centred stream, of which it sees the mean today"
    return None


def to_rms(norm: Norm) -> RMSNorm:
    """The RMSNorm in a LayerNorm's place."""
    return RMSNorm(size=norm.size, eps=norm.eps) if isinstance(norm, LayerNorm) else norm


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


def layernorm_to_rmsnorm(spec: ModelSpec) -> Swapped:
    """The exact swap.

    Raises:
        SwapRefused: there is no exact form for this tree; the message says why.

    """
    reason = why_not_exact(spec)
    if reason is not None:
        raise SwapRefused(
            f"LayerNorm -> RMSNorm cannot be exact here: {reason}",
            "--approximate replaces the norms all the same and measures the damage.",
        )
    computed: dict[str, Compute] = {}
    moved: dict[str, Tensor] = {}
    blocks = tuple(_block(block, f"blocks.{layer}", computed) for layer, block in enumerate(spec.blocks))
    head = spec.head
    if isinstance(spec.final_norm, LayerNorm) and spec.final_norm.bias:
        weight = "embedding.weight" if head.tied else "head.weight"
        computed["head.bias"] = shifted(weight, "head.bias" if head.bias else None, "final_norm.bias")
        head = replace(head, bias=True)
    if head.tied:
        head = replace(head, tied=False)
        moved["head.weight"] = Moved("embedding.weight")
    embedding = spec.embedding
    if embedding.norm is None:
        computed["embedding.weight"] = centred_rows("embedding.weight")
    else:
        norm = embedding.norm
        assert isinstance(norm, LayerNorm)
        computed["embedding.weight"] = normed_rows("embedding.weight", "embedding.norm", norm.eps, norm.bias)
        embedding = replace(embedding, norm=None)
    if spec.positions is not None:
        computed["positions.weight"] = centred_rows("positions.weight")
    new = replace(spec, embedding=embedding, blocks=blocks, final_norm=to_rms(spec.final_norm), head=head)
    notes = ("the head was untied from the embedding: it needs the table uncentred",) if spec.head.tied else ()
    return Swapped(new, "exact", made(computed) | moved, summary(spec), notes)


def made(computed: Mapping[str, Compute]) -> dict[str, Tensor]:
    """Functions of the old tree as tensors of the new one."""
    return {name: Computed(make) for name, make in computed.items()}


def _block(block: Block, path: str, computed: dict[str, Compute]) -> Block:
    """The block with its norms exchanged; what changes in its tensors goes into `computed`."""
    attention, feed_forward = block.attention, block.feed_forward
    inner_norm = "feed_forward_norm" if block.feed_forward_norm is not None else "attention_norm"
    if isinstance(block.attention_norm, LayerNorm) and block.attention_norm.bias:
        for projection in ("q_proj", "k_proj", "v_proj"):
            name = f"{path}.attention.{projection}"
            old = f"{name}.bias" if attention.qkv_bias else None
            computed[f"{name}.bias"] = shifted(f"{name}.weight", old, f"{path}.attention_norm.bias")
        attention = replace(attention, qkv_bias=True)
    source = block.feed_forward_norm or block.attention_norm
    if isinstance(source, LayerNorm) and source.bias:
        for projection in inner_projections(feed_forward):
            name = f"{path}.feed_forward.{projection}"
            old = f"{name}.bias" if feed_forward.up_bias else None
            computed[f"{name}.bias"] = shifted(f"{name}.weight", old, f"{path}.{inner_norm}.bias")
        feed_forward = replace(feed_forward, up_bias=True)
    for name, bias in (
        (f"{path}.attention.o_proj", attention.output_bias),
        (f"{path}.feed_forward.down_proj", feed_forward.down_bias),
    ):
        computed[f"{name}.weight"] = centred(f"{name}.weight")
        if bias:
            computed[f"{name}.bias"] = centred(f"{name}.bias")
    return replace(
        block,
        attention_norm=to_rms(block.attention_norm),
        attention=attention,
        feed_forward_norm=None if block.feed_forward_norm is None else to_rms(block.feed_forward_norm),
        feed_forward=feed_forward,
    )


def inner_projections(feed_forward: FeedForward | GatedFeedForward) -> tuple[str, ...]:
    """The linears that read the feed-forward's input."""
    return ("gate_proj", "up_proj") if isinstance(feed_forward, GatedFeedForward) else ("up_proj",)


def replace_layernorm(spec: ModelSpec) -> Swapped:
    """The plain replacement: γ and eps kept, β and the centring dropped. Approximate at best.

    Raises:
        SwapRefused: there is no LayerNorm to replace.

    """
    why_not_exact(spec)

    def swapped(block: Block) -> Block:
        inner = block.feed_forward_norm
        return replace(
            block,
            attention_norm=to_rms(block.attention_norm),
            feed_forward_norm=None if inner is None else to_rms(inner),
        )

    norm = spec.embedding.norm
    new = replace(
        spec,
        embedding=replace(spec.embedding, norm=None if norm is None else to_rms(norm)),
        blocks=tuple(swapped(block) for block in spec.blocks),
        final_norm=to_rms(spec.final_norm),
    )
    return Swapped(new, "approximate", {}, summary(spec))


def summary(spec: ModelSpec) -> dict[str, Any]:
    """What the output's record says of it."""
    return {"from": "layernorm", "to": "rmsnorm", "norms": len(layer_norms(spec))}


def to_rmsnorm(model: Model, asked: Asked) -> Swapped:
    """LayerNorm -> RMSNorm, as exactly as is asked."""
    return (replace_layernorm if asked.approximate else layernorm_to_rmsnorm)(model.spec)


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
        examples=lambda spec: ("rmsnorm",),
    ),
)
