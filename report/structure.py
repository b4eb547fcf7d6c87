"""The graph that drawings show: a model's operations from tokens to logits, with one layer of every kind.

The graph contains all weights and operations between tokens and logits. Tests evaluate the nodes in their order, and
compare the result with the model's logits. `components.operations` defines what every operation computes. `Node.op` is
the name of the operation's class in lower case. A linear of experts is one node with several `copies`, and its second
input is the router's choice of experts for every token. This module does not import torch.
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
SYMBOLS = "B sequences, T tokens, S tokens in sight including the cache"


@dataclass(frozen=True)
class Edge(Record):
    """A line from one node to another."""

    JSON = "from=source to=target kind"

    source: str
    target: str
    kind: _EdgeKind
    """data: an ordinary input. residual: the residual stream skips a branch, and goes to the sum after it. choice: the
    choice of experts for every token. weights: a tied head uses the embedding's weight. again: a result is used a
    second time, after other results have been computed from it.
    """


@dataclass(frozen=True)
class Node(Record):
    """One operation."""

    JSON = "id op shape parameters weights=shapes copies title detail formula"
    id: str  # the module's name within its layer, or a name for an operation without weights; unique in a path
    op: str  # the kind of operation, such as "linear"
    inputs: tuple[str, ...]  # ids of nodes, in the order of the operation's arguments
    shape: Sizes  # of the output
    operation: AnyOperation
    title: str  # its name in the drawing
    detail: str = ""  # the text below the title
    formula: str = ""  # the formula in the hover text
    weights: tuple[tuple[str, Shape], ...] = ()  # the module's own
    copies: int = 1  # the number of equal modules: the experts, of which a token uses some
    residual: str | None = None  # of a sum: the id of the input that skipped a branch
    choice: str | None = None  # the id of the input that says which experts a token uses
    tied: str | None = None  # the module whose weight a tied head uses

    @property
    def parameters(self) -> int:
        """Return the number of parameters of this node. All copies (experts) count."""
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
    """A kind of layer: layers of a model that have the same components and sizes."""

    layers: tuple[int, ...]  # their indices
    block: Block
    nodes: tuple[Node, ...]  # the operations from the hidden states that enter a layer to those that leave it


@dataclass(frozen=True)
class Structure:
    """The graph of a model's operations: those before the layers, those of every kind of layer, and those after the
    layers.

    The kinds are in the order of their first layers. The input of the first layer is the last node of `before`. The
    input of the first node of `after` is the last node of the last layer.
    """

    spec: ModelSpec
    before: tuple[Node, ...]  # the operations before the layers
    kinds: tuple[Kind, ...]  # one item for all equal layers
    after: tuple[Node, ...]  # the operations after the layers
    encoder: Structure | None = None  # the graph of the encoder, if the model has one

    def kind_of(self, layer: int) -> Kind:
        """Return the kind of a layer. Raise IndexError if there is no such layer."""
        for kind in self.kinds:
            if layer in kind.layers:
                return kind
        raise IndexError(f"there is no layer {layer}")

    def path(self, kind: Kind) -> tuple[Node, ...]:
        """Return the nodes from tokens to logits, with one layer of the given kind, in an order of evaluation."""

        def fed(node: Node, source: Node) -> Node:
            """Return a copy of the node with `source` as its first input."""
            inputs = (source.id if name == node.inputs[0] else name for name in node.inputs)
            return replace(node, inputs=tuple(inputs))

        stream, *block = kind.nodes
        first, *after = self.after
        # Some nodes before the blocks do not lead to the stream: the block uses them directly.
        leading = {self.before[-1].id}
        for node in reversed(self.before):
            leading |= {*node.inputs} if node.id in leading else set()
        before = [node for node in self.before if node.id in leading]
        others = [node for node in self.before if node.id not in leading]
        others = [replace(node, inputs=()) if node.op == "given" else node for node in others]
        at = next((i for i, node in enumerate(block) if node.op == "given" and node.inputs), 0)
        block = [*block[:at], *(others if at else ()), *block[at:]]
        return (*before, fed(stream, self.before[-1]), *block, fed(first, kind.nodes[-1]), *after)


def layers_label(graph: Structure, kind: Kind) -> str:
    """Return the layers of a kind in words: "each of 32 layers", "layers 0–3", "layer 5", "16 layers: 0, 2, 4, …"."""
    layers, total = kind.layers, len(graph.spec.blocks)
    if len(layers) == total:
        return "the layer" if total == 1 else f"each of {total:,} layers"
    if len(layers) == 1:
        return f"layer {layers[0]}"
    if layers[-1] - layers[0] + 1 == len(layers):
        return f"layers {range_label(layers[0], layers[-1])}"
    return f"{len(layers)} layers: {some_of(layers, 4, ', …')}"


def output_shape(node: Node) -> str:
    """Return the shape of a node's output: (B, T, 32, 128)."""
    return f"({dimensions(node.shape, ', ')})"


def structure(spec: ModelSpec) -> Structure:
    """Return the graph of a model, with one `Kind` for equal layers."""
    layers_by_block: dict[Block, list[int]] = {}
    for layer, block in enumerate(spec.blocks):
        layers_by_block.setdefault(block, []).append(layer)
    kinds = []
    for block, layers in layers_by_block.items():
        program = spec.block_operations(block)
        rotates = any(isinstance(operation, ops.Rotate) for operation in program)
        positions = block.aspects().get("position", NOT_THERE).long if rotates else ""
        kinds.append(Kind(tuple(layers), block, _nodes(program, positions)))
    encoder = None if spec.encoder is None else structure(spec.encoder)
    return Structure(spec, _nodes(spec.before_blocks()), tuple(kinds), _nodes(spec.after_blocks()), encoder)


def _nodes(program: ops.Program, positions: str = "") -> tuple[Node, ...]:
    """Return the operations of a program as nodes of the graph. `positions` describes its RoPE in words.

    The operation that gathers the tokens of every expert is left out, because the line from the router to the experts
    shows it. It is kept if it also multiplies the tokens by routing weights.
    """
    operations = {operation.id: operation for operation in program}
    gathered = {
        gather.id: gather.inputs[0] for gather in program if isinstance(gather, ops.Gather) and not gather.weighs
    }
    nodes = []
    for operation in program:
        if operation.id in gathered:
            continue
        inputs = tuple(gathered.get(name, name) for name in operation.inputs)
        residual = operation.residual if isinstance(operation, ops.Add) else None
        if isinstance(operation, ops.AltUp) and operation.step == "correct":
            residual = inputs[1]
        choice = operation.choice if isinstance(operation, ops.Linear) else None
        choice = operation.inputs[1] if isinstance(operation, ops.Gather) else choice
        caption = _caption(operation, operations)
        if isinstance(operation, ops.Rotate):
            caption = caption._replace(formula=positions)
        start = (
            operation.id,
            type(operation).__name__.removesuffix("Operation").lower(),
            inputs,
            operation.shape,
            operation,
        )
        nodes.append(Node(*start, *caption, operation.weights, operation.copies, residual, choice, operation.tied))
    return tuple(nodes)


class _Caption(NamedTuple):
    """The texts of a node."""

    title: str
    detail: str = ""  # the text below the title
    formula: str = ""


_Others = Mapping[str, ops.AnyOperation]  # the operations of the same program, by id
_Source = ops.Tokens | ops.Stream | ops.Given | ops.Embed | ops.Positions
_Linear = ops.NormOperation | ops.Linear | ops.Scan | ops.Pairs | ops.Blend | ops.Convolve
_Attention = ops.Rotate | ops.Temper | ops.CacheOperation | ops.Concat | ops.Scores | ops.Alibi | ops.Softmax | ops.Mix
_Experts = ops.Choose | ops.Combine | ops.Gather
_Elementwise = ops.ActivationOperation | ops.Cap | ops.Sparse | ops.AltUp | ops.Product | ops.ScaleOperation | ops.Shift


def _caption(operation: ops.AnyOperation, others: _Others) -> _Caption:
    """Return the texts of an operation's node. Raise ConfigError if the class of the operation is not known.

    `others` are all operations of the program by id.
    """
    if isinstance(operation, _Source):
        return _source_caption(operation, others)
    if isinstance(operation, _Linear):
        return _linear_caption(operation, others)
    if isinstance(operation, _Attention):
        return _attention_caption(operation, others)
    if isinstance(operation, _Experts):
        return _expert_caption(operation)
    if isinstance(operation, _Elementwise):
        return _elementwise_caption(operation, others)
    if isinstance(operation, ops.Add):
        return _sum_caption(operation, others)
    raise ops.unknown(operation, "the drawing")


def _name(operation: ops.AnyOperation) -> str:
    """Return the last part of an operation's id. If this is a number, include the part before it: "experts.0"."""
    *_, parent, last = "", *operation.id.split(".")
    return f"{parent}.{last}" if last.isdecimal() else last


def _matrix(operation: ops.AnyOperation) -> str:
    return dimensions(dict(operation.weights).get("weight", ()))


def _source_caption(operation: _Source, others: _Others) -> _Caption:
    """Return the texts of a node where data enter: token ids, hidden states, or rows of an embedding table."""
    match operation:
        case ops.Tokens(types=True):
            return _Caption("token types", formula="the segment of each token")
        case ops.Tokens():
            return _Caption("token ids", formula="indices of the vocabulary's entries")
        case ops.Stream(id="hidden_states"):
            return _Caption("hidden states")
        case ops.Stream():
            return _Caption("x", "" if operation.id.endswith(".past") else "the residual stream")
        case ops.Given(words=words, again=again):
            return _Caption(words, "made before this layer" if again else "")
        case ops.Embed(inputs=(ids,)) if getattr(others.get(ids), "types", False):
            return _Caption("token types", _matrix(operation), f"row of the type, {operation.shape[-1]:,} wide")
        case ops.Embed():
            row = f"row of the token, {operation.shape[-1]:,} wide"
            return _Caption("embedding", _matrix(operation) or "the decoder's table", row)
        case ops.Positions(weights=weights, offset=offset, padding=padding):
            of = f"of the position{f' + {offset}' if offset else ''}"
            of += "" if padding is None else f", of tokens that are not {padding:,}"
            if weights:
                return _Caption("positions", _matrix(operation), f"row {of}")
            return _Caption("positions", "sines and cosines", f"sines and cosines {of}")


def _linear_caption(operation: _Linear, others: _Others) -> _Caption:
    name, matrix = _name(operation), _matrix(operation)
    match operation:
        case ops.NormOperation(kind=kind, formula=formula):
            return _Caption("embedding norm" if operation.id == "embedding.norm" else name, kind, formula)
        case ops.Linear(tied=tied):
            bias, with_bias = (" + b", " + bias") if operation.bias else ("", "")
            if tied in others:
                return _Caption(name, f"the {tied}'s", "x·Wᵀ")
            if tied is None and not operation.weights:
                return _Caption(name, "an earlier layer's", "x·Wᵀ")
            if tied is None:
                return _Caption(name, f"{matrix}{with_bias}", f"x·Wᵀ{bias}")
            theirs = dimensions((operation.shape[-1], operation.inputs_wide))
            return _Caption("head", f"the {tied}'s {theirs}{with_bias}", f"x·Eᵀ, E the {tied}{bias}")
        case ops.Scan():
            return _Caption(operation.title, f"state {dimensions(operation.state)}", operation.formula)
        case ops.Pairs():
            return _Caption("token before", "beside each token", "x(t), x(t − 1)")
        case ops.Blend():
            weight, shape = operation.weights[0]
            return _Caption(name, dimensions(shape), f"{weight} ⊙ x(t) + (1 − {weight}) ⊙ x(t − 1)")
        case ops.Convolve(width=width):
            return _Caption("convolution", f"{width} tokens, {matrix}", "Σ w(i) · x(t − i)")


def _attention_caption(operation: _Attention, others: _Others) -> _Caption:
    match operation:
        case ops.Rotate(turned=turned):
            size = operation.shape[-1]
            return _Caption(operation.rotary.title, "" if turned == size else f"{turned} of {size} dims")
        case ops.Temper(temperature=temperature):
            growth, length = temperature.growth, temperature.original_context
            at = f"(t + {temperature.offset})" if temperature.offset else "t"
            return _Caption("temperature", f"from {length:,}", f"x · (1 + {growth:g} · log(1 + ⌊{at} / {length}⌋))")
        case ops.CacheOperation(once=True, shape=shape):
            return _Caption("cache", "of the source, once", f"all tokens of the source, {dimensions(shape[2:])} each")
        case ops.CacheOperation(window=window, shape=shape):
            tokens = "all tokens so far" if window is None else f"the last {window:,} tokens"
            detail = "" if window is None else f"last {window:,}"
            return _Caption("cache", detail, f"{tokens}, {dimensions(shape[2:])} each")
        case ops.Concat(shape=(_, _, width)):
            return _Caption("side by side", f"{width:,} wide", "x, followed by the input of the first layer")
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


def _expert_caption(operation: _Experts) -> _Caption:
    match operation:
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
        case ops.Combine(weighs=True):
            return _Caption("weighted sum", formula="Σ weight(e) · expert e(x)")
        case ops.Combine():
            return _Caption("sum", formula="Σ expert e(weight(e) · x)")
        case ops.Gather():
            return _Caption("tokens by expert", formula="weight(e) · x")


def _elementwise_caption(operation: _Elementwise, others: _Others) -> _Caption:
    match operation:
        case ops.ActivationOperation(function=function):
            return _Caption(function)
        case ops.Cap(limit=limit, hard=True):
            return _Caption("clip", f"{limit:g}", f"min(max(x, −{limit:g}), {limit:g})")
        case ops.Cap(limit=limit):
            return _Caption("soft cap", f"{limit:g}", f"{limit:g} · tanh(x / {limit:g})")
        case ops.Sparse(share=share):
            return _Caption("sparse", f"{share:g} of units 0", f"max(x − mean − Φ⁻¹({share:g}) · deviation, 0)")
        case ops.AltUp(step="pick", index=index):
            return _Caption(f"stream {index}")
        case ops.AltUp(step=step):
            return _ALTUP_CAPTIONS[step]
        case ops.Product():
            gate, up = (others[name] for name in operation.inputs)
            if isinstance(gate, ops.ActivationOperation) and gate.shape == up.shape:
                return _Caption("gate · up", formula=f"{gate.function}(gate) · up")
            return _Caption("·", formula=f"{gate.id} · {up.id}")
        case ops.ScaleOperation(weights=weights) if weights:
            return _Caption(f"× {_name(operation)}", _matrix(operation), f"{_name(operation)} · x")
        case ops.ScaleOperation(factor=factor):
            return _Caption(f"× {factor:.4g}", formula=f"{factor:.4g} · x")
        case ops.Shift(number=number):
            return _Caption(f"+ {number:.4g}", formula=f"x + {number:.4g}")


def _sum_caption(operation: ops.Add, others: _Others) -> _Caption:
    past, branch = operation.inputs
    if branch.endswith("_adapter_up"):
        return _Caption("+", "its adapter", f"{past} + {branch}")
    if operation.residual is None:
        return _Caption("+", "both branches", "attention + feed-forward")
    if isinstance(others.get(branch), ops.Positions):
        return _Caption("+", "positions added")
    if isinstance(others.get(branch), ops.Embed):
        return _Caption("+", "token types added")
    stream = "the norm's output" if isinstance(others.get(past), ops.NormOperation) else "the stream"
    return _Caption("+", stream, f"{stream} + {branch}")


_ALTUP_CAPTIONS = {
    "split": _Caption("streams", "alike in length", "x, and each other · |x| / |other|"),
    "predict": _Caption("predicted", "of all streams", "each stream + Σ number · stream"),
    "correct": _Caption("corrected", "by the active one", "each stream + (1 + number) · (x − the active one)"),
    "spread": _Caption("+", "all but the first", "x + what the layer's own input gives"),
    "join": _Caption("mean of streams", "alike in length", "mean of x and each other · |x| / |other|"),
}
"""The words on the steps of models with several streams."""


def _scaled_by(scores: ops.Scores, factor: float | None = None) -> str:
    """Return the factor of attention scores as text, such as "× 0.5" or, for 1/√d, "/ √64".

    `factor` takes precedence over the factor in `scores`.
    """
    scale = scores.scale if factor is None else factor
    if math.isclose(scale, 1.0, rel_tol=1e-12):
        return "× 1"
    return f"/ √{scores.query_dim}" if math.isclose(scale, scores.query_dim**-0.5, rel_tol=1e-6) else f"× {scale:.4g}"
