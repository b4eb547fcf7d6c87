"""A model as a graph that is drawn: its operations from tokens to logits with words for people, one block of each kind.

It has every weight and every operation between tokens and logits, so that whoever evaluates the nodes in their order
gets the model's logits; tests do that. What each computes is told in `components.operations`, whose class names in
lower case are `Node.op`. A linear with `copies` is one an expert: a second input says which of them each token takes.
No torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from ..components import Block, ModelSpec, Shape
from ..components import operations as ops
from ..components.operations import AnyOperation, Sizes
from ..components.ranges import range_label, some_of
from ..components.words import NOT_THERE
from ..display import Record
from .quantities import dimensions

_EdgeKind = Literal["data", "residual", "choice", "weights", "again"]
SYMBOLS = "B sequences, T tokens, S tokens in sight with those in the cache"


@dataclass(frozen=True)
class Edge(Record):
    """residual: past a branch, to the sum behind it; choice: which experts; weights: used again, by a tied head; again:
    a result used again, behind what it led to.
    """

    JSON = "from=source to=target kind"

    source: str
    target: str
    kind: _EdgeKind


@dataclass(frozen=True)
class Node(Record):
    """One operation.

    id: a module's shared name within its block, or a name for what has no weights; unique in a path. inputs: ids, in
    the order of the operation's arguments. shape: of its output. weights: the module's own, by name. copies: so many
    modules alike, of which a token takes some. residual: which input came past a branch. tied: whose weight it uses.
    operation: what else it needs. title, detail, formula: for people.
    """

    JSON = "id op shape parameters weights=shapes copies title detail formula"
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

    @property
    def shapes(self) -> dict[str, Shape]:
        return dict(self.weights)

    def edges(self) -> Iterator[Edge]:
        kinds: dict[str | None, _EdgeKind] = {self.choice: "choice", self.residual: "residual"}
        kinds |= {self.inputs[0]: "again"} if self.op == "altup" and self.residual is not None else {}
        for source in self.inputs:
            yield Edge(source, self.id, kinds.get(source, "data"))
        if self.tied is not None:
            yield Edge(self.tied, self.id, "weights")


@dataclass(frozen=True)
class Kind:
    """Layers alike: which they are, their record, and its nodes from the stream's node to the sum that leaves it."""

    layers: tuple[int, ...]
    block: Block
    nodes: tuple[Node, ...]


@dataclass(frozen=True)
class Structure:
    """A model: the nodes before its blocks, each kind of block in the order of appearance, the nodes behind them; and
    the same of its encoder, where it has one.

    The stream of a path's block is fed by the last node before it, and the first node behind it by the block's last.
    """

    spec: ModelSpec
    before: tuple[Node, ...]
    kinds: tuple[Kind, ...]
    after: tuple[Node, ...]
    encoder: Structure | None = None

    def kind_of(self, layer: int) -> Kind:
        """The kind of a layer; raises IndexError where there is none of that number."""
        for kind in self.kinds:
            if layer in kind.layers:
                return kind
        raise IndexError(f"there is no layer {layer}")

    def path(self, kind: Kind) -> tuple[Node, ...]:
        """From tokens to logits through one block of that kind, in an order in which it can be evaluated."""

        def fed(node: Node, source: Node) -> Node:
            """The node with another first input, wherever it takes that one."""
            inputs = (source.id if name == node.inputs[0] else name for name in node.inputs)
            return replace(node, inputs=tuple(inputs))

        stream, *block = kind.nodes
        first, *behind = self.after
        wanted = {self.before[-1].id}  # of what is before the blocks, what leads to the stream; the rest is for a layer
        for node in reversed(self.before):
            wanted |= {*node.inputs} if node.id in wanted else set()
        beside = [
            replace(node, inputs=()) if node.op == "given" else node for node in self.before if node.id not in wanted
        ]
        at = next((i for i, node in enumerate(block) if node.op == "given" and node.inputs), 0)
        before = [node for node in self.before if node.id in wanted]
        block = [*block[:at], *(beside if at else ()), *block[at:]]
        return (*before, fed(stream, self.before[-1]), *block, fed(first, kind.nodes[-1]), *behind)


def layers_label(graph: Structure, kind: Kind) -> str:
    """Which layers are of a kind: "each of 32 layers", "layers 0–3", "layer 5", "16 layers: 0, 2, 4, …"."""
    layers, total = kind.layers, len(graph.spec.blocks)
    if len(layers) == total:
        return "the layer" if total == 1 else f"each of {total:,} layers"
    if len(layers) == 1:
        return f"layer {layers[0]}"
    if layers[-1] - layers[0] + 1 == len(layers):
        return f"layers {range_label(layers[0], layers[-1])}"
    return f"{len(layers)} layers: {some_of(layers, 4, ', …')}"


def output_shape(node: Node) -> str:
    """The shape of what a node gives: (B, T, 32, 128)."""
    return f"({dimensions(node.shape, ', ')})"


def structure(spec: ModelSpec) -> Structure:
    """The graph of a tree. Layers alike share one kind."""
    layers: dict[Block, list[int]] = {}
    for layer, block in enumerate(spec.blocks):
        layers.setdefault(block, []).append(layer)
    kinds = []
    for block, of_block in layers.items():
        program = spec.block_operations(block)
        turned = any(isinstance(operation, ops.Rotate) for operation in program)
        positions = block.aspects().get("position", NOT_THERE).long if turned else ""
        kinds.append(Kind(tuple(of_block), block, _nodes(program, positions)))
    encoder = None if spec.encoder is None else structure(spec.encoder)
    return Structure(spec, _nodes(spec.before_blocks()), tuple(kinds), _nodes(spec.after_blocks()), encoder)


def _nodes(program: ops.Program, positions: str = "") -> tuple[Node, ...]:
    """A program's operations as nodes. That tokens are gathered for their experts is drawn where experts choose, unless
    they are weighed there.
    """
    operations = {each.id: each for each in program}
    gathered = {each.id: each.inputs[0] for each in program if isinstance(each, ops.Gather) and not each.weighs}
    nodes = []
    for each in program:
        if each.id not in gathered:
            op, inputs = type(each).__name__.lower(), tuple(gathered.get(name, name) for name in each.inputs)
            residual = each.residual if isinstance(each, ops.Add) else None
            if isinstance(each, ops.AltUp) and each.step == "correct":
                residual = inputs[1]
            choice = each.choice if isinstance(each, ops.Linear) else None
            choice = each.inputs[1] if isinstance(each, ops.Gather) else choice
            words = _caption(each, operations, positions)
            start = (each.id, op, inputs, each.shape, each)
            nodes.append(Node(*start, *words, each.weights, each.copies, residual, choice, each.tied))
    return tuple(nodes)


class _Caption(NamedTuple):
    """What a node is called, what stands below it, and its formula."""

    title: str
    detail: str = ""
    formula: str = ""


# Complex: one branch for each operation.
def _caption(operation: ops.AnyOperation, others: Mapping[str, ops.AnyOperation], positions: str) -> _Caption:  # noqa: C901
    """An operation for people; raises ConfigError for one that is not in the vocabulary."""
    *_, of, last = "", *operation.id.split(".")
    last = f"{of}.{last}" if last.isdecimal() else last
    matrix = dimensions(dict(operation.weights).get("weight", ()))
    match operation:
        case ops.Tokens(types=True):
            return _Caption("token types", formula="which segment each token is of")
        case ops.Tokens():
            return _Caption("token ids", formula="numbers of the vocabulary's entries")
        case ops.Stream(id="hidden_states"):
            return _Caption("hidden states")
        case ops.Stream():
            return _Caption("x", "" if operation.id.endswith(".past") else "the residual stream")
        case ops.Given(words=words, again=again):
            return _Caption(words, "made before this layer" if again else "")
        case ops.Embed(inputs=(ids,)) if getattr(others.get(ids), "types", False):
            return _Caption("token types", matrix, f"row of the type, {operation.shape[-1]:,} wide")
        case ops.Embed():
            row = f"row of the token, {operation.shape[-1]:,} wide"
            return _Caption("embedding", matrix or "the decoder's table", row)
        case ops.Positions(weights=weights, offset=offset, padding=padding):
            of = f"of the position{f' + {offset}' if offset else ''}"
            of += "" if padding is None else f", of tokens that are not {padding:,}"
            table = _Caption("positions", matrix, f"row {of}") if weights else None
            return table or _Caption("positions", "sines and cosines", f"sines and cosines {of}")
        case ops.Norm(kind=kind, formula=formula):
            return _Caption("embedding norm" if operation.id == "embedding.norm" else last, kind, formula)
        case ops.Linear(tied=tied):
            bias, with_bias = (" + b", " + bias") if operation.bias else ("", "")
            if tied in others:
                return _Caption(last, f"the {tied}'s", "x·Wᵀ")
            if tied is None and not operation.weights:
                return _Caption(last, "an earlier layer's", "x·Wᵀ")
            if tied is None:
                return _Caption(last, f"{matrix}{with_bias}", f"x·Wᵀ{bias}")
            theirs = dimensions((operation.shape[-1], operation.inputs_wide))
            return _Caption("head", f"the {tied}'s {theirs}{with_bias}", f"x·Eᵀ, E the {tied}{bias}")
        case ops.Rotate(turned=turned):
            size = operation.shape[-1]
            return _Caption(operation.rotary.title, "" if turned == size else f"{turned} of {size} dims", positions)
        case ops.Temper(temperature=temperature):
            growth, length = temperature.growth, temperature.original_context
            at = f"(t + {temperature.offset})" if temperature.offset else "t"
            return _Caption("temperature", f"from {length:,}", f"x · (1 + {growth:g} · log(1 + ⌊{at} / {length}⌋))")
        case ops.Cache(once=True, shape=shape):
            return _Caption("cache", "of the source, once", f"all tokens of the source, {dimensions(shape[2:])} each")
        case ops.Cache(window=window, shape=shape):
            cached = "all tokens so far" if window is None else f"the last {window:,} tokens"
            return _Caption(
                "cache", "" if window is None else f"last {window:,}", f"{cached}, {dimensions(shape[2:])} each"
            )
        case ops.Concat(shape=(_, _, width)):
            return _Caption("side by side", f"{width:,} wide", "x, and behind it what the first layer reads")
        case ops.Concat():
            formula = "the head's own part, then the rotated part that all heads share"
            return _Caption("key of each head", "rotated part shared by all heads", formula)
        case ops.Scores():
            title, heads, kv_heads = f"q·kᵀ {_scaled_by(operation)}", operation.heads, operation.kv_heads
            shared = "1 kv head" if kv_heads == 1 else f"{heads // kv_heads:,} to each kv head"
            alike = "1 head" if heads == 1 else f"{heads:,} heads"
            return _Caption(title, alike if heads == kv_heads else f"{heads:,} q heads, {shared}", title)
        case ops.Alibi():
            (scores,) = (others[name] for name in operation.inputs)
            scale = f" {_scaled_by(scores, operation.scale)}" if isinstance(scores, ops.Scores) else " "
            bias = operation.alibi.formula + (scale if operation.alibi.scaled else "")
            return _Caption(f"+ {operation.alibi.title}", bias, f"scores + {bias}, s the key's position")
        case ops.Cap(limit=limit, hard=True):
            return _Caption("clip", f"{limit:g}", f"min(max(x, −{limit:g}), {limit:g})")
        case ops.Cap(limit=limit):
            return _Caption("soft cap", f"{limit:g}", f"{limit:g} · tanh(x / {limit:g})")
        case ops.Softmax(shape=(*_, "U")):
            return _Caption("softmax", "all of the source", "softmax over all tokens of the source")
        case ops.Softmax(window=window, causal=False):
            sight = "both directions" + ("" if window is None else f", {window:,} each")
            near = "all keys" if window is None else f"the keys t − {window - 1:,} … t + {window - 1:,}"
            return _Caption("softmax", sight, f"softmax over {near} of query t")
        case ops.Softmax(window=window, chunked=chunked):
            sight = "causal" if window is None else f"causal, {'chunks of' if chunked else 'last'} {window:,}"
            first = "0" if window is None else f"t − t mod {window}" if chunked else f"t − {window - 1:,}"
            sink = " and the head's sink" if operation.weights else ""
            return _Caption("softmax", sight, f"softmax over the keys {first} … t of query t{sink}")
        case ops.Mix():
            return _Caption("weights · v", formula="Σ weight(t, s) · v(s)")
        case ops.Scan():
            return _Caption(operation.title, f"state {dimensions(operation.state)}", operation.formula)
        case ops.Pairs():
            return _Caption("token before", "beside each token", "x(t), x(t − 1)")
        case ops.Blend():
            name = operation.weights[0][0]
            return _Caption(last, dimensions(operation.weights[0][1]), f"{name} ⊙ x(t) + (1 − {name}) ⊙ x(t − 1)")
        case ops.Convolve(width=width):
            return _Caption("convolution", f"{width} tokens, {matrix}", "Σ w(i) · x(t − i)")
        case ops.Activation(function=function):
            return _Caption(function)
        case ops.Sparse(share=share):
            return _Caption("sparse", f"{share:g} of units 0", f"max(x − mean − Φ⁻¹({share:g}) · deviation, 0)")
        case ops.AltUp(step=step, index=index):
            return _Caption(*_STEPS[step]) if step != "pick" else _Caption(f"stream {index}")
        case ops.Product():
            gate, up = (others[name] for name in operation.inputs)
            if isinstance(gate, ops.Activation) and gate.shape == up.shape:
                return _Caption("gate · up", formula=f"{gate.function}(gate) · up")
            return _Caption("·", formula=f"{gate.id} · {up.id}")
        case ops.Scale(weights=weights) if weights:
            return _Caption(f"× {last}", matrix, f"{last} · x")
        case ops.Scale(factor=factor):
            return _Caption(f"× {factor:.4g}", formula=f"{factor:.4g} · x")
        case ops.Shift(number=number):
            return _Caption(f"+ {number:.4g}", formula=f"x + {number:.4g}")
        case ops.Add():
            past, branch = operation.inputs
            if branch.endswith("_adapter_up"):
                return _Caption("+", "its adapter", f"{past} + {branch}")
            if operation.residual is None:
                return _Caption("+", "both branches", "attention + feed-forward")
            if isinstance(others.get(branch), ops.Positions):
                return _Caption("+", "positions added")
            if isinstance(others.get(branch), ops.Embed):
                return _Caption("+", "token types added")
            stream = "the norm's output" if isinstance(others.get(past), ops.Norm) else "the stream"
            return _Caption("+", stream, f"{stream} + {branch}")
        case ops.Choose(top_k=top_k, scores=scores):
            title, formula = f"top {top_k} of {operation.experts}", f"largest {top_k} of {scores}"
            factors = "weight" in dict(operation.weights)
            if operation.weights and not factors:
                formula += f" + bias{' of logits' if operation.biased == 'logits' else ''}"
            if operation.groups > 1:
                by = " by one expert" if operation.group_best == 1 else ""
                formula += f", in the best {operation.top_groups} of {operation.groups} groups{by}"
            formula += ", each among those near it" if operation.jitter is not None else ""
            more = f" and {operation.added:g}" if operation.added else ""
            formula += f", divided by their sum{more}" if operation.normalise else ""
            formula += f", times {operation.multiplier:.4g}" if operation.multiplier != 1 else ""
            formula += ", times a factor of each expert's own" if factors else ""
            return _Caption(title, f"{scores}, renormalised" if operation.normalise else scores, formula)
        case ops.Combine(weighs=weighs):
            each = "weight(e) · expert e(x)" if weighs else "expert e(weight(e) · x)"
            return _Caption("weighted sum" if weighs else "sum", formula=f"Σ {each}")
        case ops.Gather():
            return _Caption("tokens by expert", formula="weight(e) · x")
        case _:
            raise ops.unknown(operation, "the drawing")


_STEPS = {
    "split": ("streams", "alike in length", "x, and each other · |x| / |other|"),
    "predict": ("predicted", "of all streams", "each stream + Σ number · stream"),
    "correct": ("corrected", "by the active one", "each stream + (1 + number) · (x − the active one)"),
    "spread": ("+", "all but the first", "x + what the layer's own input gives"),
    "join": ("mean of streams", "alike in length", "mean of x and each other · |x| / |other|"),
}
"""Of steps with several streams the title, what stands below it, and the formula."""


def _scaled_by(scores: ops.Scores, factor: float | None = None) -> str:
    """The scores' factor, or another that is multiplied with them, as 1/√d where it is that."""
    scale = scores.scale if factor is None else factor
    if math.isclose(scale, 1.0, rel_tol=1e-12):
        return "× 1"
    return f"/ √{scores.query_dim}" if math.isclose(scale, scores.query_dim**-0.5, rel_tol=1e-6) else f"× {scale:.4g}"
