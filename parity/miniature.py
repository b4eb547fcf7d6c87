"""A small copy of a tree, for what takes a pass a mistake: the same components, few and narrow.

Everything that a mistake can be made in stays: each kind of layer, how a component rounds, windows, rotary scaling,
eps, the dimension of a head, and how heads share keys. Only layers, heads, tokens and widths are fewer, so that the
probe's lengths and padding show on the copy what they show on the tree. Its weights are random.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace as replaced
from typing import Any

import msgspec
import torch
from torch import Tensor

from ..components import (
    ALiBi,
    Attention,
    Block,
    FeedForward,
    GatedFeedForward,
    LatentAttention,
    Mixer,
    MixtureOfExperts,
    ModelSpec,
    Norm,
)
from .probe import Batch
from .score import random_parameter

__all__ = ["miniature", "narrow_batches", "random_weights"]

HEADED = (Attention, LatentAttention)

HEADS = 2
"""Heads, key-value heads, and query heads a key-value head, where there are more."""
EXPERTS = 4
"""Experts, where there are more, and one more than a token takes."""
RANK = 64
"""The width of a latent, where it is more."""
TOKENS = 512
QUIET = 0.05
"""The size of the tables' values: as in a trained model the stream starts so small that a wrong eps shows."""

replace = msgspec.structs.replace


def miniature(spec: ModelSpec, tokens: int) -> ModelSpec:
    """The small copy, for rows of at most `tokens` tokens."""
    blocks = _layers(spec)
    heads = [_heads(block.mixer("attention")) for block in blocks]
    wide = [(block.mixer("attention"), few) for block, few in zip(blocks, heads, strict=True)]
    mixed = [(mixer.heads, few, _mixed_dim(mixer)) for mixer, (few, _) in wide if isinstance(mixer, HEADED)]
    square = not mixed or mixed[0][0] * mixed[0][2] == spec.hidden_size
    width = max((few * dim for _, few, dim in mixed), default=min(spec.hidden_size, RANK))
    hidden = width if square else width + 16
    vocab = min(spec.vocab_size, TOKENS)
    positions = spec.positions
    if positions is not None:
        positions = replace(positions, length=min(positions.length, tokens + 1), size=hidden)
    embedding = spec.embedding
    return replace(
        spec,
        embedding=replace(embedding, vocab_size=vocab, hidden_size=hidden, norm=_norm(embedding.norm, hidden)),
        blocks=tuple(_block(block, hidden, *count) for block, count in zip(blocks, heads, strict=True)),
        final_norm=_norm(spec.final_norm, hidden),
        head=replace(spec.head, vocab_size=vocab, hidden_size=hidden),
        positions=positions,
    )


def _layers(spec: ModelSpec) -> list[Block]:
    """The first two layers, and the first of every other kind; a scale of its own makes none (gpt2's by layer)."""
    kinds: dict[Block, Block] = {}
    for block in spec.blocks:
        kinds.setdefault(block.mapped(_unscaled), block)
    first = list(spec.blocks[:2])
    return first + [block for block in kinds.values() if block not in first]


def _unscaled(node: Any, _: str) -> Any:
    return replace(node, scale=1.0) if isinstance(node, HEADED) else node


def _mixed_dim(attention: Attention | LatentAttention) -> int:
    """What a head hands to the output projection."""
    return attention.value_dim if isinstance(attention, LatentAttention) else attention.head_dim


def _heads(attention: Mixer | None) -> tuple[int, int]:
    """(heads, key-value heads): one, all or a few for several, as they were; none of what has no heads."""
    if not isinstance(attention, HEADED):
        return 0, 0
    heads = attention.heads
    if isinstance(attention, LatentAttention):
        most = (4 if heads & (heads - 1) == 0 else 6) if isinstance(attention.position, ALiBi) else HEADS
        return min(heads, most), 1
    group = attention.group
    if isinstance(attention.position, ALiBi):
        # Slopes of a number that is no power of two come in an order of their own.
        few = min(heads, 4 if heads & (heads - 1) == 0 else 6)
        return few, {heads: few, 1: 1}.get(attention.kv_heads, 2)
    kv_heads = min(attention.kv_heads, HEADS)
    return kv_heads * min(group, HEADS), kv_heads


def _block(block: Block, hidden: int, heads: int, kv_heads: int) -> Block:
    def narrowed(part: Any) -> Any:
        if isinstance(part, Norm):
            return _norm(part, hidden)
        if isinstance(part, HEADED):
            return _attention(part, hidden, heads, kv_heads)
        return _mixer(part, hidden) if isinstance(part, Mixer) else part

    return block.replaced(**{name: narrowed(part) for name, part in block.entries().items()})


def _attention(attention: Attention | LatentAttention, hidden: int, heads: int, kv_heads: int) -> Any:
    if isinstance(attention, LatentAttention):
        rank = min(attention.kv_rank, RANK)
        return replace(attention, hidden_size=hidden, heads=heads, kv_rank=rank, kv_norm=_norm(attention.kv_norm, rank))
    return replace(attention, hidden_size=hidden, heads=heads, kv_heads=kv_heads)


def _mixer(node: Any, hidden: int) -> Any:
    if isinstance(node, MixtureOfExperts):
        top_k = min(node.top_k, EXPERTS - 1)
        # All experts where all were, one more than are taken where there are more.
        experts = top_k if node.top_k == node.experts else min(node.experts, EXPERTS)
        # Narrower than a feed-forward that is alone, since there are several.
        expert = replace(node.expert, hidden_size=hidden, intermediate_size=3 * hidden // 2)
        return replace(node, hidden_size=hidden, experts=experts, top_k=top_k, expert=expert)
    if isinstance(node, FeedForward | GatedFeedForward):
        return replace(node, hidden_size=hidden, intermediate_size=2 * hidden)
    # Of another kind every other size stays: it does not hang on the stream's.
    return replace(node, hidden_size=hidden)


def _norm(norm: Norm | None, size: int) -> Any:
    return None if norm is None else replace(norm, size=size)


def random_weights(spec: ModelSpec) -> dict[str, Tensor]:
    """Its parameters in fp64, of the size that trained ones have."""
    generator = torch.Generator().manual_seed(0)
    empty = {each.name: torch.empty(each.shape, dtype=torch.float64) for each in spec.parameters()}
    found = {name: random_parameter(name, tensor, generator) for name, tensor in empty.items()}
    for name in ("embedding.weight", "positions.weight"):
        if name in found:
            found[name] *= QUIET
    return found


def narrow_batches(batches: Sequence[Batch], spec: ModelSpec) -> list[Batch]:
    """The same probe over a smaller vocabulary: lengths, padding and repetitions as they are."""
    return [replaced(batch, input_ids=batch.input_ids % spec.vocab_size) for batch in batches]
