"""A model as a graph that is drawn: its operations with words for people. `structure` makes it of a tree.

It has every weight and every operation between tokens and logits, so that whoever evaluates the nodes in their order
gets the model's logits; tests do that. What each computes is told in `components.operations`, whose class names in
lower case are `Node.op`. A linear with `copies` is one an expert: a second input says which of them each token takes.
No torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ..analysis.parameters import range_label
from ..components import Block, ModelSpec, Shape
from ..components.operations import AnyOperation, Sizes

__all__ = [
    "SYMBOLS",
    "Edge",
    "EdgeKind",
    "Kind",
    "Node",
    "Structure",
    "fed",
    "layers_label",
    "shape_words",
    "sizes",
]

EdgeKind = Literal["data", "residual", "choice", "weights"]

SYMBOLS = "B sequences, T tokens, S tokens in sight with those in the cache"


@dataclass(frozen=True)
class Edge:
    """From the node that computes to the one that uses. "residual": past a branch, to the sum behind it; "choice":
    which experts; "weights": a weight that is used a second time, by a tied head.
    """

    source: str
    target: str
    kind: EdgeKind


@dataclass(frozen=True)
class Node:
    """One operation.

    id: a module's shared name within its block, or a name for what has no weights; unique in a path. inputs: ids, in
    the order of the operation's arguments. shape: of its output. weights: the module's own, by name. copies: so many
    modules alike, of which a token takes some. residual: which input came past a branch. tied: whose weight it uses.
    operation: what else it needs. title, detail, formula: for people.
    """

    id: str
    op: str
    inputs: tuple[str, ...]
    shape: Sizes
    operation: AnyOperation
    title: str
    detail: str = ""
    formula: str = ""
    weights: tuple[tuple[str, Shape], ...] = ()
    copies: int = 1
    residual: str | None = None
    choice: str | None = None
    tied: str | None = None

    @property
    def parameters(self) -> int:
        """Stored under this node, all copies together."""
        return self.copies * sum(math.prod(shape) for _, shape in self.weights)

    def edges(self) -> Iterator[Edge]:
        """What leads here."""
        for source in self.inputs:
            kind: EdgeKind = "data"
            if source == self.residual:
                kind = "residual"
            elif source == self.choice:
                kind = "choice"
            yield Edge(source, self.id, kind)
        if self.tied is not None:
            yield Edge(self.tied, self.id, "weights")

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "id": self.id,
            "op": self.op,
            "shape": list(self.shape),
            "parameters": self.parameters,
            "weights": {name: list(shape) for name, shape in self.weights},
            "copies": self.copies,
            "title": self.title,
            "detail": self.detail,
            "formula": self.formula,
        }


@dataclass(frozen=True)
class Kind:
    """Layers alike: which they are, their record, and its nodes from the stream's node to the sum that leaves it."""

    layers: tuple[int, ...]
    block: Block
    nodes: tuple[Node, ...]


@dataclass(frozen=True)
class Structure:
    """A model: the nodes before its blocks, each kind of block in the order of appearance, the nodes behind them.

    The stream of a path's block is fed by the last node before it, and the first node behind it by the block's last.
    """

    spec: ModelSpec
    before: tuple[Node, ...]
    kinds: tuple[Kind, ...]
    after: tuple[Node, ...]

    def kind_of(self, layer: int) -> Kind:
        """The kind of a layer; raises IndexError where there is none of that number."""
        for kind in self.kinds:
            if layer in kind.layers:
                return kind
        raise IndexError(f"there is no layer {layer}")

    def path(self, kind: Kind) -> tuple[Node, ...]:
        """From tokens to logits through one block of that kind, in an order in which it can be evaluated."""
        first, last = self.after[0], kind.nodes[-1].id
        behind = (fed(first, {first.inputs[0]: last}), *self.after[1:])
        stream = kind.nodes[0]
        return (*self.before, fed(stream, {stream.inputs[0]: self.before[-1].id}), *kind.nodes[1:], *behind)


def sizes(shape: Sequence[int | str], times: str = " × ") -> str:
    """A shape in words: 4,096 × 1,024."""
    return times.join(each if isinstance(each, str) else f"{each:,}" for each in shape)


def layers_label(graph: Structure, kind: Kind) -> str:
    """Which layers are of a kind: "each of 32 layers", "layers 0–3", "layer 5", "16 layers: 0, 2, 4, …"."""
    layers, total = kind.layers, len(graph.spec.blocks)
    if len(layers) == total:
        return "the layer" if total == 1 else f"each of {total:,} layers"
    if len(layers) == 1:
        return f"layer {layers[0]}"
    if layers[-1] - layers[0] + 1 == len(layers):
        return f"layers {range_label(layers[0], layers[-1])}"
    named = ", ".join(map(str, layers[:4])) + (", …" if len(layers) > 4 else "")
    return f"{len(layers)} layers: {named}"


def shape_words(node: Node) -> str:
    """The shape of what a node gives: (B, T, 32, 128)."""
    return f"({sizes(node.shape, ', ')})"


def fed(node: Node, names: dict[str, str]) -> Node:
    """The node with other inputs where `names` has some."""
    return replace(node, inputs=tuple(names.get(each, each) for each in node.inputs))
