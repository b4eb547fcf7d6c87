"""Activations: what a forward pass keeps for the backward pass, and what is alive while one is run without."""

from __future__ import annotations

from collections import Counter
from typing import Literal

from ..spec import Attention, Block, GatedFeedForward, LatentAttention, MixtureOfExperts, ModelSpec

__all__ = ["inference_peak", "kept_for_backward"]

WIDE = 4
"""Bytes of fp32, in which norms and softmax are computed."""


def kept_for_backward(
    spec: ModelSpec, size: int, tokens: int, batch: int, attention: Literal["sdpa", "eager"], checkpointed: bool = False
) -> int:
    """Bytes that autograd keeps of a forward pass and its loss."""
    rows = tokens * batch
    each = {block: _block_kept(block, size, tokens, attention) for block in set(spec.blocks)}
    repeats = Counter(spec.blocks)
    inputs = rows * spec.hidden_size * size
    if checkpointed:
        layers = len(spec.blocks) * inputs + rows * max(each.values())
    else:
        layers = rows * sum(each[block] * number for block, number in repeats.items())
    return layers + inputs * 3 + rows * spec.vocab_size * WIDE


def _block_kept(block: Block, size: int, tokens: int, attention: Literal["sdpa", "eager"]) -> int:
    """Bytes a token."""
    node, hidden = block.attention, block.attention.hidden_size
    norms = (2 if block.feed_forward_norm is not None else 1) * hidden * (size + max(size, WIDE))
    mixed = _mixed(node)
    scores = node.heads * tokens * (size + max(size, WIDE)) if attention == "eager" else node.heads * WIDE
    return norms + mixed * size + scores + _feed_forward_kept(block) * size


def _mixed(node: Attention | LatentAttention) -> int:
    if isinstance(node, LatentAttention):
        return node.kv_rank + node.heads * (2 * node.query_dim + 2 * node.value_dim)
    return 2 * (node.heads + node.kv_heads) * node.head_dim


def _feed_forward_kept(block: Block) -> int:
    node = block.feed_forward
    if isinstance(node, MixtureOfExperts):
        return node.top_k * (2 * node.hidden_size + _inner(node.expert))
    return _inner(node)


def _inner(node: object) -> int:
    width: int = getattr(node, "intermediate_size", 0)
    return width * (4 if isinstance(node, GatedFeedForward) else 2)


def inference_peak(spec: ModelSpec, size: int, tokens: int, batch: int, logits: Literal["last", "all"]) -> int:
    """Bytes alive, beside weights and cache, at the worst moment of reading so many tokens at once."""
    rows, hidden = tokens * batch, spec.hidden_size
    layers = 0
    for block in set(spec.blocks):
        inner = _feed_forward_kept(block)
        layers = max(layers, rows * size * (2 * hidden + max(inner, _mixed(block.attention))))
    told = batch if logits == "last" else rows
    return max(layers, rows * hidden * size * 2 + told * spec.vocab_size * size)
