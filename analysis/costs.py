"""What a tree costs to run: parameters, FLOPs and cache, from its shapes alone. No torch, no weights.

FLOPs are those of the matrix products, two for a multiplication with its addition, as Kaplan et al. (2001.08361,
table 1) and PaLM (2204.02311, appendix B) count them: 2 a weight that a token meets, and in attention 2 an element of
a key and 2 an element of a value for every token in sight. Norms, activations, softmax, rotations and biases, which
grow with the width and not with its square, are left out, and so is looking up a row of a table.

Scores are counted twice where many tokens are read at once: as dense kernels make them, every query with every key,
which is what torch's FlopCounterMode counts whatever the kernel skips; and as the causal mask and windows need them.

A layer with a window w keeps w - 1 tokens between two steps, here and in transformers' DynamicSlidingWindowLayer: with
the step's own token they are the w that it looks at. A rolling buffer (Mistral 2310.06825, section 2) is made for w.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..components import Attention, Block, LatentAttention, MixtureOfExperts, ModelSpec
from .parameters import count
from .sizes import check_number, check_sizes, full_dtype, itemsize

__all__ = [
    "CONTEXT",
    "CacheSize",
    "Costs",
    "Flops",
    "LayerCosts",
    "TrainingFlops",
    "cache_bytes",
    "cache_curve",
    "costs",
    "forward_flops",
    "stated_context",
    "training_flops",
    "usual_context",
]

CONTEXT = 2048
"""Tokens in sight where a tree does not say what context it is for."""


@dataclass(frozen=True)
class LayerCosts:
    """One layer's share.

    flops: by component, of one token that sees `context` tokens, itself among them. cached: numbers that a token leaves
    in the cache. window: how many tokens a query sees, None for all. idle: parameters that a token does not meet.
    """

    flops: Mapping[str, int]
    cached: int
    window: int | None
    idle: int

    def held(self, context: int) -> int:
        """Numbers in the cache after so many tokens: of a window all but one, which the next token takes."""
        return self.cached * (context if self.window is None else min(context, self.window - 1))

    def buffered(self, context: int) -> int:
        """Numbers in a rolling buffer for so many tokens, or in the cache while the last of them is computed."""
        return self.cached * (context if self.window is None else min(context, self.window))


@dataclass(frozen=True)
class Costs:
    """What a tree costs.

    parameters: all of them, and `active` those that one token meets (of a mixture of experts, top_k experts a layer);
    `embedding` is the share of tables and, unless tied, the head, which no expert is among.
    flops: of the forward pass, for one token that sees `context` tokens, by component: the projections of attention,
    its scores (with the values that they weigh), feed-forward, router, head. cached: numbers that a token leaves in the
    key-value cache, all layers together; held: numbers there after `context` tokens, which windows make fewer.
    """

    parameters: int
    active: int
    embedding: int
    context: int
    flops: Mapping[str, int]
    cached: int
    held: int

    @property
    def total_flops(self) -> int:
        return sum(self.flops.values())

    @property
    def non_embedding(self) -> int:
        """All parameters but `embedding`."""
        return self.parameters - self.embedding

    @property
    def active_non_embedding(self) -> int:
        """Those that one token meets, but `embedding`: Kaplan's N, of a mixture."""
        return self.active - self.embedding

    def cache_bytes(self, itemsize: int = 2) -> int:
        """Bytes that a token leaves in the cache, stored in so many bytes per number (2: bf16, fp16)."""
        return self.cached * itemsize

    def held_bytes(self, itemsize: int = 2) -> int:
        """Bytes of the cache after `context` tokens."""
        return self.held * itemsize

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values, all whole numbers."""
        return {
            "parameters": self.parameters,
            "active": self.active,
            "embedding": self.embedding,
            "non_embedding": self.non_embedding,
            "active_non_embedding": self.active_non_embedding,
            "context": self.context,
            "flops_a_token": {**self.flops, "total": self.total_flops},
            "cache_bytes_a_token": {name: self.cache_bytes(size) for name, size in ITEMSIZES.items()},
            "cache_bytes_at_context": {name: self.held_bytes(size) for name, size in ITEMSIZES.items()},
        }


COMPONENTS = ("attention", "scores", "feed-forward", "router", "head")
ITEMSIZES = {"float32": 4, "bfloat16": 2}


def usual_context(spec: ModelSpec) -> int:
    """The context that a tree is for: as it says, or as long as its table of positions, or `CONTEXT`."""
    stated = stated_context(spec)
    return CONTEXT if stated is None else stated


def stated_context(spec: ModelSpec) -> int | None:
    """The context that a tree says it is for, or that its table of positions is long enough for; None: it does not."""
    if spec.context_length is not None:
        return spec.context_length
    return None if spec.positions is None else spec.positions.length


def costs(spec: ModelSpec, context: int | None = None) -> Costs:
    """What a tree costs at a context, by default its own. Trees are compared at one context, which may be more than one
    of them has positions for.

    Raises:
        UsageError: no tokens in sight, or absurdly many.

    """
    length = usual_context(spec) if context is None else context
    check_number("tokens", length)
    repeats = Counter(spec.blocks)  # layers alike are counted once: there may be thousands
    layers = [(layer_costs(block, length), number) for block, number in repeats.items()]
    flops: Counter[str] = Counter()
    for layer, number in layers:
        flops.update({name: value * number for name, value in layer.flops.items()})
    flops["head"] = 2 * spec.vocab_size * spec.hidden_size
    counted = count(spec)
    return Costs(
        parameters=counted.total,
        active=counted.total - sum(layer.idle * number for layer, number in layers),
        embedding=counted.embedding,
        context=length,
        flops={name: flops[name] for name in COMPONENTS if flops[name]},
        cached=sum(layer.cached * number for layer, number in layers),
        held=sum(layer.held(length) * number for layer, number in layers),
    )


def layer_costs(block: Block, context: int) -> LayerCosts:
    """One layer, with `context` tokens in sight."""
    attention, feed_forward = block.attention, block.feed_forward
    seen = context if attention.window is None else min(context, attention.window)
    flops = {"attention": 2 * matrices(attention.shapes()), "scores": 2 * scored_behind(attention, seen)}
    idle = 0
    if isinstance(feed_forward, MixtureOfExperts):
        expert = feed_forward.expert.shapes()
        flops["feed-forward"] = 2 * feed_forward.top_k * matrices(expert)
        flops["router"] = 2 * matrices(feed_forward.shapes())
        idle = (feed_forward.experts - feed_forward.top_k) * sum(map(math.prod, expert.values()))
    else:
        flops["feed-forward"] = 2 * matrices(feed_forward.shapes())
    return LayerCosts(flops, cached(attention), attention.window, idle)


def matrices(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Weights of a component that take part in matrix products."""
    return sum(math.prod(shape) for shape in shapes.values() if len(shape) == 2)


def scored(attention: Attention | LatentAttention) -> int:
    """Multiplications for each pair of tokens when many are read at once: a query with its key, and a weight with the
    value. Keys and values of a latent are made once a token then, by the up projections, which are counted with the
    other projections.
    """
    if isinstance(attention, LatentAttention):
        return attention.heads * (attention.query_dim + attention.value_dim)
    return attention.heads * 2 * attention.head_dim


def scored_behind(attention: Attention | LatentAttention, seen: int) -> int:
    """Multiplications of one token that sees `seen`, itself among them, those before it being in the cache.

    Of a latent neither keys nor values are there. They are made again of each cached latent, or the up projections are
    taken into the query and the output, which then meet the latents themselves (DeepSeek-V2 2405.04434, section 2.1.2):
    whichever is less, as an implementation chooses. gptkit's own modules make them again.
    """
    if not isinstance(attention, LatentAttention):
        return seen * scored(attention)
    absorbed = seen * attention.heads * (2 * attention.kv_rank + attention.rope_dim)
    up = attention.heads * attention.kv_rank * (attention.nope_dim + attention.value_dim)
    return min(absorbed, seen * scored(attention) + (seen - 1) * up)


def cached(attention: Attention | LatentAttention) -> int:
    """Numbers that a token leaves in the cache: keys and values, or the latent and the rotated keys."""
    if isinstance(attention, LatentAttention):
        return attention.kv_rank + attention.rope_dim
    return 2 * attention.kv_heads * attention.head_dim


# --- many tokens at once ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Flops:
    """FLOPs of a forward pass over `batch` sequences of `tokens` tokens, none of them in a cache.

    products: by component, what weights are multiplied with: the projections of attention, feed-forward, router, head
    (of every token; `head_of_last` is what a prefill needs instead, which asks for the last token's logits alone).
    scores: queries with keys and weights with values, each of a sequence's tokens with each: what dense kernels
    compute, and what torch's FlopCounterMode counts. needed_scores: those that the causal mask and windows leave.
    """

    tokens: int
    batch: int
    products: Mapping[str, int]
    scores: int
    needed_scores: int

    @property
    def dense(self) -> int:
        """All products, scores as dense kernels make them."""
        return sum(self.products.values()) + self.scores

    @property
    def causal(self) -> int:
        """All products, scores as far as the causal mask and windows need them."""
        return sum(self.products.values()) + self.needed_scores

    @property
    def head_of_last(self) -> int:
        return self.products["head"] // self.tokens

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values, all whole numbers."""
        return {
            "tokens": self.tokens,
            "batch": self.batch,
            "components": dict(self.products),
            "scores": {"dense": self.scores, "causal": self.needed_scores},
            "total": {"dense": self.dense, "causal": self.causal},
            "head_of_last_token": self.head_of_last,
        }


@dataclass(frozen=True)
class TrainingFlops:
    """FLOPs of a forward and a backward pass, and beside them what the usual estimates say.

    forward: the forward pass. The backward pass makes two products for each of its products, one for the gradient of
    either factor: 2 × forward. six_n: 6·N·D, D = batch · tokens, N all parameters that a token meets (Hoffmann et al.
    2203.15556); six_n_non_embedding: N without tables and head (Kaplan et al. 2001.08361), which leaves scores and
    head out.
    """

    forward: Flops
    six_n: int
    six_n_non_embedding: int

    @property
    def flash_extra(self) -> int:
        """What fused kernels add, which keep no scores: each is made again, a product more to the four of the backward
        pass, as dense kernels make them. torch's own counter counts so.
        """
        return self.forward.scores // 2

    @property
    def checkpointing_extra(self) -> int:
        """What running every layer again adds (Chen et al. 1604.06174), scores as dense kernels make them."""
        return self.forward.dense - self.forward.products["head"]

    @property
    def dense(self) -> int:
        return 3 * self.forward.dense

    @property
    def causal(self) -> int:
        return 3 * self.forward.causal

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values, all whole numbers."""
        return {
            "tokens": self.forward.tokens,
            "batch": self.forward.batch,
            "total": {"dense": self.dense, "causal": self.causal},
            "extra": {"fused_attention": self.flash_extra, "checkpointing": self.checkpointing_extra},
            "6N": {"active": self.six_n, "active_non_embedding": self.six_n_non_embedding},
        }


def forward_flops(spec: ModelSpec, tokens: int, batch: int = 1) -> Flops:
    """FLOPs of a forward pass over `batch` sequences of `tokens` tokens each (a prefill, or a step of training).

    Raises:
        UsageError: no tokens or sequences, or more tokens than the tree has positions for.

    """
    check_sizes(spec, tokens, batch)
    products: Counter[str] = Counter()
    scores = needed = 0
    for block, number in Counter(spec.blocks).items():
        layer, attention = layer_costs(block, 1), block.attention
        products.update({name: value * number for name, value in layer.flops.items() if name != "scores"})
        scores += number * 2 * scored(attention) * tokens * tokens
        needed += number * 2 * scored(attention) * pairs_in_sight(tokens, attention.window)
    products["head"] = 2 * spec.vocab_size * spec.hidden_size
    every = {name: products[name] * tokens * batch for name in COMPONENTS if products[name]}
    return Flops(tokens, batch, every, scores * batch, needed * batch)


def training_flops(spec: ModelSpec, tokens: int, batch: int = 1) -> TrainingFlops:
    """FLOPs of a step of training on `batch` sequences of `tokens` tokens each; raises as `forward_flops`."""
    forward, found = forward_flops(spec, tokens, batch), costs(spec, tokens)
    seen = 6 * tokens * batch
    return TrainingFlops(forward, seen * found.active, seen * found.active_non_embedding)


def pairs_in_sight(tokens: int, window: int | None) -> int:
    """Pairs of a query and a key that the causal mask and a window leave: Σ min(t, window) for t = 1 … tokens."""
    near = tokens if window is None else min(tokens, window)
    return near * (near + 1) // 2 + (tokens - near) * near


# --- the cache -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CacheSize:
    """Bytes of the key-value cache of `batch` sequences of `context` tokens.

    a_token: what one more token of one sequence leaves, all layers together, before windows let go of older ones.
    held: what is there once all tokens were read, and until the next. buffer: what a cache made once for so many
    tokens takes, where windows roll: of each window one token more than `held`. in_transformers: what its DynamicCache
    holds: the same, but where it repeats keys and values for their query heads before the cache (Falcon's new decoder
    architecture). None with latent attention, which none of its families here has.
    """

    context: int
    batch: int
    dtype: str
    a_token: int
    held: int
    buffer: int
    in_transformers: int | None

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values; figures are whole numbers of bytes."""
        return {
            "context": self.context,
            "batch": self.batch,
            "dtype": self.dtype,
            "bytes_a_token": self.a_token,
            "bytes": self.held,
            "rolling_buffer_bytes": self.buffer,
            "bytes_in_transformers": self.in_transformers,
        }


def cache_bytes(spec: ModelSpec, context: int, dtype: str = "bfloat16", batch: int = 1) -> CacheSize:
    """Bytes of the key-value cache after `context` tokens; of latent attention, of the latent and the rotated keys.

    Raises:
        UsageError: no tokens or sequences, more tokens than the tree has positions for, or an unknown dtype.

    """
    check_sizes(spec, context, batch)
    layers = {block: (layer_costs(block, context), number) for block, number in Counter(spec.blocks).items()}
    size = itemsize(dtype)
    expanded = [layer.held(context) * number * _repeats(block) for block, (layer, number) in layers.items()]
    latent = any(isinstance(block.attention, LatentAttention) for block in layers)
    return CacheSize(
        context=context,
        batch=batch,
        dtype=full_dtype(dtype),
        a_token=size * sum(layer.cached * number for layer, number in layers.values()),
        held=size * batch * sum(layer.held(context) * number for layer, number in layers.values()),
        buffer=size * batch * sum(layer.buffered(context) * number for layer, number in layers.values()),
        in_transformers=None if latent else size * batch * sum(expanded),
    )


def _repeats(block: Block) -> int:
    """How often a key head stands in the cache of code that repeats it before."""
    node = block.attention
    return node.group if isinstance(node, Attention) and node.kv_expansion == "projection" else 1


def cache_curve(
    spec: ModelSpec, contexts: Iterable[int], dtype: str = "bfloat16", batch: int = 1
) -> tuple[CacheSize, ...]:
    """The cache at each of several contexts, for charts. Those beyond the tree's table of positions are left out.

    Raises:
        UsageError: a context below 1, no sequences, or an unknown dtype.

    """
    table = spec.positions
    within = [each for each in contexts if table is None or each <= table.length]
    return tuple(cache_bytes(spec, context, dtype, batch) for context in within)
