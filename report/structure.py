"""The graph of a tree: its nodes from tokens to logits, with one block of each kind.

All of it is computed from the tree; no family is asked for. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec

from ..analysis.parameters import describe
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
    Shape,
)
from .graph import Kind, Node, Structure, fed, sizes

__all__ = ["structure"]

B, T, S = "B", "T", "S"
"""Sizes that a call decides: sequences, tokens of each, and tokens in sight, those in the cache included."""


def structure(spec: ModelSpec) -> Structure:
    """The graph of a tree. Layers alike share one kind."""
    found: dict[Block, list[int]] = {}
    for layer, block in enumerate(spec.blocks):
        found.setdefault(block, []).append(layer)
    before = tuple(_before(spec))
    kinds = tuple(Kind(tuple(layers), block, _block(spec, block)) for block, layers in found.items())
    return Structure(spec, before, kinds, tuple(_after(spec)))


# --- the ends --------------------------------------------------------------------------------------------------------

STREAM, OUT = "x", "block_output"


def _before(spec: ModelSpec) -> Iterator[Node]:
    width = spec.hidden_size
    yield Node("tokens", "tokens", (), (B, T), "token ids", formula="numbers of the vocabulary's entries")
    table = spec.embedding.shapes()
    row = f"row of the token, {width:,} wide"
    last = Node("embedding", "embed", ("tokens",), (B, T, width), "embedding", _matrix(table), row, _weights(table))
    yield last
    if spec.embedding.norm is not None:
        last = _norm("embedding.norm", last.id, spec.embedding.norm, (B, T, width))
        yield last
    if spec.positions is not None:
        rows = spec.positions.shapes()
        yield Node(
            "positions", "positions", (), (T, width), "positions", _matrix(rows), "row of the position", _weights(rows)
        )
        yield Node("embedded", "add", (last.id, "positions"), (B, T, width), "+", "positions added", residual=last.id)


def _after(spec: ModelSpec) -> Iterator[Node]:
    yield _norm("final_norm", OUT, spec.final_norm, (B, T, spec.hidden_size))
    head, shapes = spec.head, spec.head.shapes()
    matrix = sizes((spec.vocab_size, spec.hidden_size))
    detail = f"the embedding's {matrix}" if head.tied else matrix
    yield Node(
        "head",
        "linear",
        ("final_norm",),
        (B, T, spec.vocab_size),
        "head",
        detail + (" + bias" if head.bias else ""),
        ("x·Eᵀ, E the embedding" if head.tied else "x·Wᵀ") + (" + b" if head.bias else ""),
        _weights(shapes),
        tied="embedding" if head.tied else None,
    )


# --- a block ---------------------------------------------------------------------------------------------------------


def _block(spec: ModelSpec, block: Block) -> tuple[Node, ...]:
    stream = (B, T, spec.hidden_size)
    nodes = [Node(STREAM, "stream", (STREAM,), stream, "x", "the residual stream")]
    normed = _norm("attention_norm", STREAM, block.attention_norm, stream)
    nodes.append(normed)
    nodes += _attention(spec, block, normed.id)
    if block.parallel:
        inner = normed
        if block.feed_forward_norm is not None:
            inner = _norm("feed_forward_norm", STREAM, block.feed_forward_norm, stream)
            nodes.append(inner)
        branch = _feed_forward(block, inner.id)
        nodes += branch
        both = ("attention.o_proj", branch[-1].id)
        nodes.append(Node("both", "add", both, stream, "+", "both branches", "attention + feed-forward"))
        nodes.append(_residual(OUT, STREAM, "both", stream))
        return tuple(nodes)
    assert block.feed_forward_norm is not None
    past = block.residual == "normed"
    first = _residual("attention_output", normed.id if past else STREAM, "attention.o_proj", stream)
    normed = _norm("feed_forward_norm", first.id, block.feed_forward_norm, stream)
    branch = _feed_forward(block, normed.id)
    nodes += [first, normed, *branch]
    nodes.append(_residual(OUT, normed.id if past else first.id, branch[-1].id, stream))
    return tuple(nodes)


def _residual(name: str, past: str, branch: str, shape: tuple[int | str, ...]) -> Node:
    stream = "the stream" if past in (STREAM, "attention_output") else "the norm's output"
    return Node(name, "add", (past, branch), shape, "+", stream, f"{stream} + {branch}", residual=past)


def _norm(name: str, source: str, norm: Norm, shape: tuple[int | str, ...]) -> Node:
    title = name.rpartition(".")[2] if name != "embedding.norm" else "embedding norm"
    if isinstance(norm, LayerNorm):
        kind, formula = "LayerNorm", f"(x − mean) / √(var + {norm.eps:g}) · w" + (" + b" if norm.bias else "")
        kind += "" if norm.bias else ", no bias"
    else:
        kind, formula = "RMSNorm", f"x / √(mean(x²) + {norm.eps:g}) · w"
    return Node(name, "norm", (source,), shape, title, kind, formula, _weights(norm.shapes()), component=norm)


def _linear(
    name: str,
    source: str,
    shapes: dict[str, Shape],
    shape: tuple[int | str, ...],
    copies: int = 1,
    choice: str | None = None,
) -> Node:
    """The linear of a component whose shapes are given: those under the last part of `name`."""
    title = name.rpartition(".")[2]
    own = {key.partition(".")[2]: value for key, value in shapes.items() if key.partition(".")[0] == title}
    bias = "bias" in own
    detail = sizes(own["weight"]) + (" + bias" if bias else "")
    inputs = (source,) if choice is None else (source, choice)
    formula = "x·Wᵀ + b" if bias else "x·Wᵀ"
    return Node(name, "linear", inputs, shape, title, detail, formula, _weights(own), copies, choice=choice)


def _weights(shapes: dict[str, Shape]) -> tuple[tuple[str, Shape], ...]:
    return tuple(shapes.items())


def _matrix(shapes: dict[str, Shape]) -> str:
    return sizes(shapes["weight"])


# --- attention -------------------------------------------------------------------------------------------------------


def _attention(spec: ModelSpec, block: Block, source: str) -> list[Node]:
    attention = block.attention
    nodes = list(
        _latent(spec, block, source) if isinstance(attention, LatentAttention) else _heads(spec, block, source)
    )
    q, k, v = (next(node.id for node in reversed(nodes) if node.id.startswith(f"attention.{each}")) for each in "qkv")
    if isinstance(attention, LatentAttention):
        size, group, out = attention.query_dim, 1, (B, T, attention.heads, attention.value_dim)
    else:
        size, group, out = attention.head_dim, attention.group, (B, T, attention.heads, attention.head_dim)
    seen = (B, attention.heads, T, S)
    scale, shared = _scale(attention.scale, size), _shared(attention.heads, group)
    nodes.append(
        Node("attention.scores", "scores", (q, k), seen, f"q·kᵀ {scale}", shared, f"q·kᵀ {scale}", component=attention)
    )
    if isinstance(attention.position, ALiBi):
        bias = "slope(head) · s" + (f" {scale}" if attention.position.scaled else "")
        nodes.append(
            Node(
                *("attention.alibi", "alibi", ("attention.scores",), seen, "+ ALiBi", bias),
                f"scores + {bias}, s the key's position",
                component=attention.position,
            )
        )
    window = attention.window
    sight = "causal" if window is None else f"causal, last {window:,}"
    first = "0" if window is None else f"t − {window - 1:,}"
    nodes.append(
        Node(
            *("attention.weights", "softmax", (nodes[-1].id,), seen, "softmax", sight),
            f"softmax over the keys {first} … t of query t",
            component=attention,
        )
    )
    nodes.append(
        Node(
            *("attention.mixed", "mix", ("attention.weights", v), out, "weights · v"),
            formula="Σ weight(t, s) · v(s)",
            component=attention,
        )
    )
    nodes.append(_linear("attention.o_proj", "attention.mixed", attention.shapes(), (B, T, attention.hidden_size)))
    return nodes


def _heads(spec: ModelSpec, block: Block, source: str) -> Iterator[Node]:
    """q, k and v of heads that lie side by side."""
    attention = block.attention
    assert isinstance(attention, Attention)
    for part, heads in (("q", attention.heads), ("k", attention.kv_heads), ("v", attention.kv_heads)):
        shape = (B, T, heads, attention.head_dim)
        node = _linear(f"attention.{part}_proj", source, attention.shapes(), shape)
        yield node
        norm = {"q": attention.q_norm, "k": attention.k_norm}.get(part)
        if norm is not None:
            node = _norm(f"attention.{part}_norm", node.id, norm, shape)
            yield node
        if isinstance(attention.position, Rotary) and part != "v":
            node = _rotate(spec, block, f"attention.{part}_rotated", node.id, shape, attention.head_dim)
            yield node
        if part != "q":
            yield _cache(f"attention.{part}_cached", node.id, shape, attention.window)


def _latent(spec: ModelSpec, block: Block, source: str) -> Iterator[Node]:
    """Queries, and keys and values of a latent, as `components.LatentAttention` says."""
    attention = block.attention
    assert isinstance(attention, LatentAttention)
    shapes, heads = attention.shapes(), attention.heads
    rotary = attention.position if isinstance(attention.position, Rotary) else None
    whole = (B, T, heads, attention.query_dim)
    node = _linear("attention.q_proj", source, shapes, whole)
    yield node
    if rotary is not None:
        yield _rotate(spec, block, "attention.q_rotated", node.id, whole, attention.query_dim)
        keys = (B, T, attention.rope_heads, rotary.dim)
        node = _linear("attention.k_rope_proj", source, shapes, keys)
        yield node
        node = _rotate(spec, block, "attention.k_rope_rotated", node.id, keys, rotary.dim)
        yield node
        yield _cache("attention.k_rope_cached", node.id, keys, attention.window)
    rank = (B, T, attention.kv_rank)
    node = _linear("attention.kv_down_proj", source, shapes, rank)
    yield node
    if attention.kv_norm is not None:
        node = _norm("attention.kv_norm", node.id, attention.kv_norm, rank)
        yield node
    latent = _cache("attention.latent_cached", node.id, rank, attention.window)
    yield latent
    parts = []
    if attention.nope_dim:
        node = _linear("attention.k_up_proj", latent.id, shapes, (B, S, heads, attention.nope_dim))
        yield node
        parts.append(node.id)
    if rotary is not None:
        parts.append("attention.k_rope_cached")
        shape = (B, S, heads, attention.query_dim)
        yield Node(
            *("attention.k_whole", "concat", tuple(parts), shape, "key of each head"),
            *("rotated part shared by all heads", "the head's own part, then the rotated part that all heads share"),
        )
    yield _linear("attention.v_up_proj", latent.id, shapes, (B, S, heads, attention.value_dim))


def _rotate(spec: ModelSpec, block: Block, name: str, source: str, shape: tuple[int | str, ...], size: int) -> Node:
    attention = block.attention
    rotary = attention.position
    assert isinstance(rotary, Rotary)
    turned = attention.rope_dim if isinstance(attention, LatentAttention) and size != rotary.dim else rotary.dim
    part = "" if turned == size else f"{turned} of {size} dims"
    one_layer = msgspec.structs.replace(spec, blocks=(block,), positions=None)
    words = describe(one_layer)["positions"]
    return Node(name, "rotate", (source,), shape, "RoPE", part, words, component=rotary)


def _cache(name: str, source: str, shape: tuple[int | str, ...], window: int | None) -> Node:
    kept = "all tokens so far" if window is None else f"the last {window:,} tokens"
    detail = "" if window is None else f"last {window:,}"
    return Node(name, "cache", (source,), (B, S, *shape[2:]), "cache", detail, f"{kept}, {sizes(shape[2:])} each")


def _scale(scale: float, size: int) -> str:
    """The factor of the scores, as 1/√d where it is that."""
    if math.isclose(scale, 1.0, rel_tol=1e-12):
        return "× 1"
    return f"/ √{size}" if math.isclose(scale, size**-0.5, rel_tol=1e-6) else f"× {scale:.4g}"


def _shared(heads: int, group: int) -> str:
    if heads == 1:
        return "1 head"
    if group == 1:
        return f"{heads:,} heads"
    return f"{heads:,} q heads, {group:,} to each kv head" if heads > group else f"{heads:,} q heads, 1 kv head"


# --- feed-forward ----------------------------------------------------------------------------------------------------


def _feed_forward(block: Block, source: str) -> list[Node]:
    node = block.feed_forward
    if not isinstance(node, MixtureOfExperts):
        return list(_one("feed_forward", node, source, (B, T)))
    router = _linear("feed_forward.router", source, node.shapes(), (B, T, node.experts))
    normalised = ", divided by their sum" if node.normalise else ""
    choice = Node(
        *("feed_forward.chosen", "choose", (router.id,), (B, T, node.top_k), f"top {node.top_k} of {node.experts}"),
        *("softmax, renormalised" if node.normalise else "softmax", f"largest {node.top_k} of softmax{normalised}"),
        component=node,
    )
    experts = list(_one("feed_forward.experts", node.expert, source, (B, T, node.top_k), node.experts, choice.id))
    combine = Node(
        *("feed_forward.combined", "combine", (choice.id, experts[-1].id), (B, T, node.hidden_size), "weighted sum"),
        formula="Σ weight(e) · expert e(x)",
        component=node,
    )
    return [router, choice, *experts, combine]


def _one(
    path: str,
    node: FeedForward | GatedFeedForward,
    source: str,
    lead: tuple[int | str, ...],
    copies: int = 1,
    choice: str | None = None,
) -> Iterator[Node]:
    """A feed-forward, or `copies` of it of which `choice` tells the ones that a token takes."""
    shapes, inner = node.shapes(), (*lead, node.intermediate_size)
    activated = f"{path}.activated"
    function = Node(activated, "activation", (f"{path}.up_proj",), inner, node.activation, component=node)
    if isinstance(node, GatedFeedForward):
        yield _linear(f"{path}.gate_proj", source, shapes, inner, copies, choice)
        yield fed(function, {f"{path}.up_proj": f"{path}.gate_proj"})
        yield _linear(f"{path}.up_proj", source, shapes, inner, copies, choice)
        product = (activated, f"{path}.up_proj")
        yield Node(f"{path}.gated", "product", product, inner, "gate · up", formula=f"{node.activation}(gate) · up")
        last = f"{path}.gated"
    else:
        yield _linear(f"{path}.up_proj", source, shapes, inner, copies, choice)
        yield function
        last = activated
    yield _linear(f"{path}.down_proj", last, shapes, (*lead, node.hidden_size), copies, choice)
