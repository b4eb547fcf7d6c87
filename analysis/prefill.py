"""What is alive at the worst moment of reading a context at once, without gradients: from shapes alone.

The moments are those of gptkit's modules, which hold what Python's names hold: a layer's input until the layer is done,
the projections until its attention is. What kernels need inside and what an allocator leaves unused is not told. In
tests this is within 6 % of what is alive in a run, and a tenth with experts, whose share of the tokens is chance.
"""

from __future__ import annotations

from typing import Literal

from ..components import (
    ALiBi,
    Attention,
    Block,
    FeedForward,
    GatedFeedForward,
    LatentAttention,
    LayerNorm,
    MixtureOfExperts,
    ModelSpec,
    Norm,
    Rotary,
)
from .activations import ACTIVATION_COSTS, Pass, is_masked, key_heads, rotaries, score_sizes, way
from .costs import cached

__all__ = ["Logits", "peak"]

Logits = Literal["last", "all"]


def peak(spec: ModelSpec, run: Pass, logits: Logits = "last", ends: bool = True) -> int:
    """Bytes beside the weights at the worst moment of a forward pass that fills a cache, the cache among them.

    A layer's keys and values are all there until the next step, whatever its window: what the cache gives on is a view.
    Without `ends` the layers alone, of which others make logits.
    """
    shared = _shared(spec, run)
    layers = {block: _block(block, run) for block in set(spec.blocks)}
    worst = held = 0
    for block in spec.blocks:
        held += cached(block.attention) * run.rows * run.size
        worst = max(worst, held + layers[block])
    stream = run.rows * spec.hidden_size * run.size
    told = run.batch if logits == "last" else run.rows
    last = max(_norm(spec.final_norm, run.rows, run), told * spec.vocab_size * run.size) if ends else 0
    return shared + max(worst, held + stream + last)


def _shared(spec: ModelSpec, run: Pass) -> int:
    """What all layers of a pass share: rotary tables, ALiBi biases, and masks where a kernel's own will not do."""
    tables = sum(2 * run.tokens * rotary.dim * run.size for rotary in rotaries(spec.blocks))
    nodes = {block.attention for block in spec.blocks}
    biases = {(node.position, node.heads) for node in nodes if isinstance(node.position, ALiBi)}
    written = {node.window for node in nodes if way(node, run.kernel) == "eager"}
    masks = {node.window for node in nodes if is_masked(node, run.tokens)} | written
    pairs = run.tokens**2
    return (
        tables
        + run.rows * run.size * sum(heads for _, heads in biases)
        + pairs * (len(masks) + run.size * len(written))
    )


def _norm(norm: Norm, rows: int, run: Pass) -> int:
    """Beside its input."""
    if isinstance(norm, LayerNorm):
        return rows * (norm.size + 2) * run.size
    return rows * norm.size * run.wide * (1 if run.size == run.wide else 2)


def _block(block: Block, run: Pass) -> int:
    node, second = block.attention, block.feed_forward_norm
    stream = run.rows * node.hidden_size * run.size
    mixed = _latent(node, run) if isinstance(node, LatentAttention) else _attention(node, run)
    moments = [stream + _norm(block.attention_norm, run.rows, run) - _left(node, run), 2 * stream + mixed]
    # The layer's input, what was normed of it, what attention gave, and in a serial block their sum.
    behind = (3 if block.parallel else 4) * stream
    if second is not None:
        moments.append(behind + _norm(second, run.rows, run))
    inside = behind + (stream if block.parallel and second is not None else 0)
    moments.append(inside + _feed_forward(block.feed_forward, run))
    moments.append(inside + 2 * stream)  # its result, and the sum
    return max(moments)


def _left(node: Attention | LatentAttention, run: Pass) -> int:
    """What the layer leaves in the cache, and is not there while keys and values are made."""
    return cached(node) * run.rows * run.size


# --- attention -------------------------------------------------------------------------------------------------------


def _attention(node: Attention, run: Pass) -> int:
    """Beside its input, and the keys and values that the cache holds in the end."""
    unit = run.rows * node.head_dim * run.size
    q, kv = node.heads * unit, node.kv_heads * unit
    raw = q + 2 * kv
    moments = [raw * (2 if node.fused and node.qkv_bias and node.arithmetic == "matmul_add" else 1)]
    queries = 0  # those that are no view of the projection's result
    normed_k = kv if node.k_norm is not None else 0
    if node.q_norm is not None:
        moments.append(raw + _norm(node.q_norm, run.rows * node.heads, run))
        queries = q
    if node.k_norm is not None:
        moments.append(raw + queries + _norm(node.k_norm, run.rows * node.kv_heads, run))
    if isinstance(node.position, Rotary):
        turned, of = node.position.dim, node.head_dim
        moments.append(raw + queries + normed_k + q + q * turned // of)
        moments.append(raw + queries + normed_k + q + kv + kv * turned // of)
        queries, normed_k = q, kv
    moments = [moment - _left(node, run) for moment in moments]
    moments.append(raw + queries + normed_k)
    there = raw + queries
    expanded = node.kv_expansion == "projection" and node.group > 1
    there += 2 * q if expanded else 0
    if node.kv_expansion == "repeat" and 1 < node.kv_heads < node.heads and key_heads(node, run) == node.heads:
        repeated = 2 * q
    else:
        repeated = 0
    moments += [there + each for each in _mixing(node, node.head_dim, node.head_dim, repeated, run)]
    return max(moments)


def _latent(node: LatentAttention, run: Pass) -> int:
    """Beside its input and the cached latent; keys and values of every head are made of it."""
    unit = run.rows * run.size
    q, v = node.heads * node.query_dim * unit, node.heads * node.value_dim * unit
    turned, own = node.heads * node.rope_dim * unit, node.heads * node.nope_dim * unit
    latent = (node.kv_rank + node.rope_dim) * unit
    moments = [latent + 2 * q + 2 * turned]
    if node.kv_norm is not None:
        moments.append(node.kv_rank * unit + _norm(node.kv_norm, run.rows, run))
    moments = [moment - _left(node, run) for moment in moments]
    there = turned + q + own + q + v
    moments += [there + each for each in _mixing(node, node.query_dim, node.value_dim, 0, run)]
    return max(moments)


def _mixing(node: Attention | LatentAttention, query_dim: int, value_dim: int, repeated: int, run: Pass) -> list[int]:
    """Moments from queries, keys and values to the output projection, beside these and `repeated`, keys and values
    that were repeated for it.
    """
    rows, heads = run.rows, node.heads
    pairs = run.batch * heads * run.tokens**2
    mixed = rows * heads * value_dim * run.size
    copied = isinstance(node.position, Rotary) and query_dim > node.position.dim and heads > 1
    projected = rows * node.hidden_size * run.size
    if node.output_bias and node.arithmetic == "matmul_add":
        projected *= 2
    match way(node, run.kernel):
        case "fused":
            mask = 0
            if is_masked(node, run.tokens):
                mask = (pairs if isinstance(node.position, ALiBi) else run.tokens**2) * run.size
            making = repeated + mask + mixed + rows * heads * run.wide
            return [making, mixed * 2 if copied else mixed, mixed * (2 if copied else 1) + projected]
        case "unfused":
            keys = heads if isinstance(node, LatentAttention) else node.kv_heads
            numbers = query_dim * (heads + keys) + (value_dim * keys if run.size < run.wide else 0)
            mask = pairs * run.size if isinstance(node.position, ALiBi) else run.tokens**2 * run.wide
            return [repeated + rows * run.wide * numbers + mask + 2 * pairs * run.wide, 2 * mixed + projected]
        case "eager":
            scored, softmax, weights = (pairs * size for size in score_sizes(node, run))
            return [
                repeated + rows * heads * query_dim * run.size + scored,
                repeated + 2 * scored,
                repeated + scored + softmax * (1 if softmax == scored else 2),
                repeated + scored + softmax + (0 if softmax == weights else weights),
                repeated + scored + weights + 2 * mixed,
                2 * mixed + projected,
            ]


# --- feed-forward ----------------------------------------------------------------------------------------------------


def _feed_forward(node: FeedForward | GatedFeedForward | MixtureOfExperts, run: Pass) -> int:
    """Beside its input."""
    if not isinstance(node, MixtureOfExperts):
        return _plain(node, run.rows, run)
    taken = run.rows * node.top_k
    rows = taken * node.hidden_size
    # Tokens by expert, the experts' results, these weighted and put back in order.
    summed = rows * (2 * run.size + 2 * run.wide) + run.rows * node.hidden_size * run.wide
    if isinstance(node.expert, GatedFeedForward) and node.expert.fused:
        inside = rows * run.size + _plain(node.expert, taken, run)
    else:  # one after the other, each with its share of the tokens
        inside = 2 * rows * run.size + _plain(node.expert, -(-taken // node.experts), run)
    return max(summed, inside, run.rows * node.experts * (run.size + 2 * run.wide))


def _plain(node: FeedForward | GatedFeedForward, rows: int, run: Pass) -> int:
    inner, out = rows * node.intermediate_size * run.size, rows * node.hidden_size * run.size
    activation = ACTIVATION_COSTS[node.activation].alive
    if node.down_bias and node.arithmetic == "matmul_add":
        out *= 2
    if isinstance(node, GatedFeedForward) and node.fused:
        return max(4, 1 + activation) * inner
    return max(activation * inner, inner + out)
