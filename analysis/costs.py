"""What a tree costs to run: parameters, FLOPs and cache, from its shapes alone. No torch, no weights.

FLOPs are those of the matrix products, two for a multiplication with its addition, as Kaplan et al. (2001.08361,
table 1) and PaLM (2204.02311, appendix B) count them: 2 a weight that a token meets, and in attention 2 an element of
a key and 2 an element of a value for every token in sight. Norms, activations, softmax, rotations and biases, which
grow with the width and not with its square, are left out, and so is looking up a row of a table.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..spec import Attention, Block, LatentAttention, MixtureOfExperts, ModelSpec
from .parameters import count

__all__ = ["CONTEXT", "Costs", "LayerCosts", "costs", "usual_context"]

CONTEXT = 2048
"""Tokens in sight where a tree does not say what context it is for."""


@dataclass(frozen=True)
class LayerCosts:
    """One layer's share.

    flops: by component, of one token that sees `context` tokens, itself among them. cached: numbers that a token leaves
    in the cache. window: how many tokens stay there, None for all. idle: parameters that a token does not meet.
    """

    flops: Mapping[str, int]
    cached: int
    window: int | None
    idle: int

    def held(self, context: int) -> int:
        """Numbers in the cache after so many tokens."""
        return self.cached * (context if self.window is None else min(context, self.window))


@dataclass(frozen=True)
class Costs:
    """What a tree costs.

    parameters: all of them, and `active` those that one token meets (of a mixture of experts, top_k experts a layer).
    flops: of the forward pass, for one token that sees `context` tokens, by component: the projections of attention,
    its scores (with the values that they weigh), feed-forward, router, head. cached: numbers that a token leaves in the
    key-value cache, all layers together; held: numbers there after `context` tokens, which windows make fewer.
    """

    parameters: int
    active: int
    context: int
    flops: Mapping[str, int]
    cached: int
    held: int

    @property
    def total_flops(self) -> int:
        return sum(self.flops.values())

    def cache_bytes(self, itemsize: int = 2) -> int:
        """Bytes that a token leaves in the cache, stored in so many bytes a number (2: bf16, fp16)."""
        return self.cached * itemsize

    def held_bytes(self, itemsize: int = 2) -> int:
        """Bytes of the cache after `context` tokens."""
        return self.held * itemsize

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values, all whole numbers."""
        return {
            "parameters": self.parameters,
            "active": self.active,
            "context": self.context,
            "flops_a_token": {**self.flops, "total": self.total_flops},
            "cache_bytes_a_token": {name: self.cache_bytes(size) for name, size in ITEMSIZES.items()},
            "cache_bytes_at_context": {name: self.held_bytes(size) for name, size in ITEMSIZES.items()},
        }


ITEMSIZES = {"float32": 4, "bfloat16": 2}


def usual_context(spec: ModelSpec) -> int:
    """The context that a tree is for: as it says, or as long as its table of positions, or `CONTEXT`."""
    if spec.context_length is not None:
        return spec.context_length
    return CONTEXT if spec.positions is None else spec.positions.length


def costs(spec: ModelSpec, context: int | None = None) -> Costs:
    """What a tree costs at a context, by default its own. Trees are compared at one context."""
    length = usual_context(spec) if context is None else context
    repeats = Counter(spec.blocks)  # layers alike are counted once: there may be thousands
    layers = [(layer_costs(block, length), number) for block, number in repeats.items()]
    flops: Counter[str] = Counter()
    for layer, number in layers:
        flops.update({name: value * number for name, value in layer.flops.items()})
    flops["head"] = 2 * spec.vocab_size * spec.hidden_size
    total = count(spec).total
    return Costs(
        parameters=total,
        active=total - sum(layer.idle * number for layer, number in layers),
        context=length,
        flops={name: flops[name] for name in ("attention", "scores", "feed-forward", "router", "head") if flops[name]},
        cached=sum(layer.cached * number for layer, number in layers),
        held=sum(layer.held(length) * number for layer, number in layers),
    )


def layer_costs(block: Block, context: int) -> LayerCosts:
    """One layer, with `context` tokens in sight."""
    attention, feed_forward = block.attention, block.feed_forward
    seen = context if attention.window is None else min(context, attention.window)
    flops = {"attention": 2 * matrices(attention.shapes()), "scores": 2 * seen * scored(attention)}
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
    """Multiplications for each token in sight: a query with its key, and a weight with the value.

    Keys and values of a latent are counted as made once a token, as when a text is read; how the up projections are
    taken into the query and the output when single tokens are written is another count.
    """
    if isinstance(attention, LatentAttention):
        return attention.heads * (attention.query_dim + attention.value_dim)
    return attention.heads * 2 * attention.head_dim


def cached(attention: Attention | LatentAttention) -> int:
    """Numbers that a token leaves in the cache: keys and values, or the latent and the rotated keys."""
    if isinstance(attention, LatentAttention):
        return attention.kv_rank + attention.rope_dim
    return 2 * attention.kv_heads * attention.head_dim
