"""The graph of a tree: its operations from tokens to logits with words for people, one block of each kind. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from ..components import Block, ModelSpec
from ..components import operations as ops
from ..components.words import NOT_THERE
from .graph import Kind, Node, Structure, sizes

__all__ = ["structure"]


def structure(spec: ModelSpec) -> Structure:
    """The graph of a tree. Layers alike share one kind."""
    layers: dict[Block, list[int]] = {}
    for layer, block in enumerate(spec.blocks):
        layers.setdefault(block, []).append(layer)
    kinds = (
        Kind(tuple(layers[block]), block, _nodes(spec.block_operations(block), _positions(spec, block)))
        for block in layers
    )
    return Structure(spec, _nodes(spec.before_blocks()), tuple(kinds), _nodes(spec.after_blocks()))


def _positions(spec: ModelSpec, block: Block) -> str:
    """A block's positions in words, where it turns any."""
    turned = any(isinstance(each, ops.Rotate) for each in spec.block_operations(block))
    return block.aspects().get("position", NOT_THERE).long if turned else ""


def _nodes(program: ops.Program, positions: str = "") -> tuple[Node, ...]:
    """A program's operations as nodes. That tokens are gathered for their experts is drawn where experts choose."""
    operations = {each.id: each for each in program}
    nodes = []
    for each in program:
        if isinstance(each, ops.Gather):
            continue
        sources = (operations.get(name) for name in each.inputs)
        inputs = (
            source.inputs[0] if isinstance(source, ops.Gather) else name
            for name, source in zip(each.inputs, sources, strict=True)
        )
        words = _caption(each, operations, positions)
        node = Node(
            *(each.id, type(each).__name__.lower(), tuple(inputs), each.shape, each),
            *words,
            weights=each.weights,
            copies=each.copies,
            residual=each.residual if isinstance(each, ops.Add) else None,
            choice=each.choice if isinstance(each, ops.Linear) else None,
            tied=each.tied if isinstance(each, ops.Linear) else None,
        )
        nodes.append(node)
    return tuple(nodes)


class Caption(NamedTuple):
    """What a node is called, what stands below it, and its formula."""

    title: str
    detail: str = ""
    formula: str = ""


def _caption(operation: ops.AnyOperation, others: Mapping[str, ops.AnyOperation], positions: str) -> Caption:
    """An operation for people; raises ConfigError for one that is not in the vocabulary."""
    match operation:
        case ops.Tokens():
            return Caption("token ids", formula="numbers of the vocabulary's entries")
        case ops.Stream():
            return Caption("x", "the residual stream")
        case ops.Embed():
            return Caption("embedding", _matrix(operation), f"row of the token, {operation.shape[-1]:,} wide")
        case ops.Positions():
            return Caption("positions", _matrix(operation), "row of the position")
        case ops.Norm(kind=kind, formula=formula):
            title = "embedding norm" if operation.id == "embedding.norm" else _last(operation)
            return Caption(title, kind, formula)
        case ops.Linear():
            bias = " + b" if operation.bias else ""
            if operation.tied is not None:
                matrix = sizes((operation.shape[-1], operation.inputs_wide))
                return Caption(
                    "head",
                    f"the {operation.tied}'s {matrix}" + _with_bias(operation),
                    f"x·Eᵀ, E the {operation.tied}{bias}",
                )
            return Caption(_last(operation), _matrix(operation) + _with_bias(operation), f"x·Wᵀ{bias}")
        case ops.Rotate(turned=turned):
            size = operation.shape[-1]
            return Caption(operation.rotary.title, "" if turned == size else f"{turned} of {size} dims", positions)
        case ops.Cache(window=window, shape=shape):
            kept = "all tokens so far" if window is None else f"the last {window:,} tokens"
            return Caption("cache", "" if window is None else f"last {window:,}", f"{kept}, {sizes(shape[2:])} each")
        case ops.Concat():
            formula = "the head's own part, then the rotated part that all heads share"
            return Caption("key of each head", "rotated part shared by all heads", formula)
        case ops.Scores():
            title = f"q·kᵀ {_scale(operation.scale, operation.query_dim)}"
            return Caption(title, _shared(operation.heads, operation.kv_heads), title)
        case ops.Alibi():
            (scores,) = (others[name] for name in operation.inputs)
            scale = _scale(operation.scale, scores.query_dim) if isinstance(scores, ops.Scores) else ""
            bias = operation.alibi.formula + (f" {scale}" if operation.alibi.scaled else "")
            return Caption(f"+ {operation.alibi.title}", bias, f"scores + {bias}, s the key's position")
        case ops.Cap(limit=limit):
            return Caption("soft cap", f"{limit:g}", f"{limit:g} · tanh(x / {limit:g})")
        case ops.Softmax(window=window):
            sight = "causal" if window is None else f"causal, last {window:,}"
            first = "0" if window is None else f"t − {window - 1:,}"
            return Caption("softmax", sight, f"softmax over the keys {first} … t of query t")
        case ops.Mix():
            return Caption("weights · v", formula="Σ weight(t, s) · v(s)")
        case ops.Scan():
            return Caption(operation.title, f"state {sizes(operation.state)}", operation.formula)
        case ops.Convolve(width=width):
            return Caption("convolution", f"{width} tokens, {_matrix(operation)}", "Σ w(i) · x(t − i)")
        case ops.Activation(function=function):
            return Caption(function)
        case ops.Product():
            return _product(*(others[name] for name in operation.inputs))
        case ops.Scale(factor=factor):
            return Caption(f"× {factor:.4g}", formula=f"{factor:.4g} · x")
        case ops.Add():
            return _sum(operation, others)
        case ops.Choose(top_k=top_k, normalise=normalise):
            normalised = ", divided by their sum" if normalise else ""
            return Caption(
                f"top {top_k} of {operation.experts}",
                "softmax, renormalised" if normalise else "softmax",
                f"largest {top_k} of softmax{normalised}",
            )
        case ops.Combine():
            return Caption("weighted sum", formula="Σ weight(e) · expert e(x)")
        case ops.Gather():
            return Caption("tokens by expert")
        case _:
            raise ops.unknown(operation, "the drawing")


def _last(operation: ops.AnyOperation) -> str:
    return operation.id.rpartition(".")[2]


def _matrix(operation: ops.AnyOperation) -> str:
    return sizes(dict(operation.weights)["weight"])


def _with_bias(operation: ops.Linear) -> str:
    return " + bias" if operation.bias else ""


def _product(one: ops.AnyOperation, other: ops.AnyOperation) -> Caption:
    if isinstance(one, ops.Activation):
        return Caption("gate · up", formula=f"{one.function}(gate) · up")
    return Caption("·", formula=f"{one.id} · {other.id}")


def _sum(operation: ops.Add, others: Mapping[str, ops.AnyOperation]) -> Caption:
    past, branch = operation.inputs
    if operation.residual is None:
        return Caption("+", "both branches", "attention + feed-forward")
    if isinstance(others.get(branch), ops.Positions):
        return Caption("+", "positions added")
    stream = "the norm's output" if isinstance(others.get(past), ops.Norm) else "the stream"
    return Caption("+", stream, f"{stream} + {branch}")


def _scale(scale: float, size: int) -> str:
    """The factor of the scores, as 1/√d where it is that."""
    if math.isclose(scale, 1.0, rel_tol=1e-12):
        return "× 1"
    return f"/ √{size}" if math.isclose(scale, size**-0.5, rel_tol=1e-6) else f"× {scale:.4g}"


def _shared(heads: int, kv_heads: int) -> str:
    if heads == 1:
        return "1 head"
    if heads == kv_heads:
        return f"{heads:,} heads"
    return f"{heads:,} q heads, " + ("1 kv head" if kv_heads == 1 else f"{heads // kv_heads:,} to each kv head")
