"""How many parameters a tree has, and what it is in words. Reads shapes alone: no weights, no torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ..components import (
    ALiBi,
    Block,
    DynamicScaling,
    FeedForward,
    GatedFeedForward,
    LatentAttention,
    LayerNorm,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    MixtureOfExperts,
    ModelSpec,
    Norm,
    Parameter,
    ProportionalScaling,
    RopeScaling,
    Rotary,
    YarnScaling,
)
from ..components import operations as ops
from ..components.ranges import layer_ranges, range_label
from ..display import Shown
from ..errors import MissingComponent

__all__ = [
    "LayerCount",
    "ParameterCount",
    "choice_of",
    "count",
    "count_of",
    "describe",
    "layer_ranges",
    "plain_number",
    "position_words",
    "range_label",
    "to_json",
]

VOCABULARY_SIDE = ("embedding", "positions", "head")
"""Components that grow with the vocabulary or the context, not with what is computed between them."""


@dataclass(frozen=True)
class LayerCount:
    """One layer's parameters by component, in order of appearance. Layers alike share one record."""

    by_component: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.by_component.values())


@dataclass(frozen=True)
class ParameterCount(Shown):
    """A tree's parameters, in numbers (not bytes). A tied head is the embedding's weight, and not counted again.

    by_component: the whole tree's, in order of appearance; sums to `total`.
    by_layer: one a layer.
    outside: what lies in no layer, by component. With the layers it sums to `total`.
    tied: the head shares the embedding's weight.
    active: what one token meets: of a mixture's experts, those that its router takes. Otherwise all.
    """

    total: int
    by_component: Mapping[str, int]
    by_layer: Sequence[LayerCount]
    outside: Mapping[str, int]
    tied: bool
    active: int

    def __repr__(self) -> str:
        parts = ", ".join(f"{label} {number:,}" for label, number in self.by_component.items())
        return f"<{self.total:,} parameters: {parts}>"

    @property
    def embedding(self) -> int:
        """Token table, learned positions and, unless tied, the head."""
        return sum(self.outside.get(component, 0) for component in VOCABULARY_SIDE)

    @property
    def non_embedding(self) -> int:
        """All but `embedding`: layers and norms, as Kaplan et al. (2001.08361) and Qwen's model cards count."""
        return self.total - self.embedding


def count(spec: ModelSpec) -> ParameterCount:
    """Count the parameters of a tree. Layers alike are counted once and multiplied."""
    kinds = {block: kind for kind, block in enumerate(dict.fromkeys(spec.blocks))}
    outside: Counter[str] = Counter()
    layers: list[Counter[str]] = [Counter() for _ in kinds]
    by_component: Counter[str] = Counter()
    repeats = Counter(kinds[block] for block in spec.blocks)
    for parameter in msgspec.structs.replace(spec, blocks=tuple(kinds)).parameters():
        kind = parameter.layer
        (outside if kind is None else layers[kind])[parameter.component] += parameter.count
        by_component[parameter.component] += parameter.count * (1 if kind is None else repeats[kind])
    records = [LayerCount(dict(layer)) for layer in layers]
    return ParameterCount(
        total=by_component.total(),
        by_component=dict(by_component),
        by_layer=[records[kinds[block]] for block in spec.blocks],
        outside=dict(outside),
        tied=spec.head.tied,
        active=by_component.total() - sum(_idle(spec, block) * repeats[kind] for block, kind in kinds.items()),
    )


def count_of(spec: ModelSpec, size: Callable[[Parameter], int]) -> ParameterCount:
    """The same of another number than that of parameters, of bytes say, which layers alike may differ in."""
    outside: Counter[str] = Counter()
    layers: list[Counter[str]] = [Counter() for _ in spec.blocks]
    idle = 0
    choices = {block: choice_of(spec, block) for block in set(spec.blocks)}
    for each in spec.parameters():
        number = size(each)
        (outside if each.layer is None else layers[each.layer])[each.component] += number
        choice = None if each.layer is None else choices[spec.blocks[each.layer]]
        if choice is not None and ".experts." in each.name:
            idle += number * (choice.experts - choice.top_k) // choice.experts
    whole: Counter[str] = Counter()
    for part in (outside, *layers):
        whole.update(part)
    order = count(spec).by_component
    return ParameterCount(
        total=whole.total(),
        by_component={label: whole[label] for label in order},
        by_layer=[LayerCount(dict(layer)) for layer in layers],
        outside=dict(outside),
        tied=spec.head.tied,
        active=whole.total() - idle,
    )


def _idle(spec: ModelSpec, block: Block) -> int:
    """Parameters of the experts that a token does not meet."""
    choice = choice_of(spec, block)
    if choice is None:
        return 0
    stored = sum(each.parameters // each.copies for each in spec.block_operations(block) if each.copies > 1)
    return (choice.experts - choice.top_k) * stored


def choice_of(spec: ModelSpec, block: Block) -> ops.Choose | None:
    """How a block chooses its experts, where it has any."""
    return next((each for each in spec.block_operations(block) if isinstance(each, ops.Choose)), None)


def to_json(name: str, family: str, count: ParameterCount) -> dict[str, Any]:
    """The count as plain JSON values; every figure is an integer number of parameters but `layers`."""
    return {
        "model": name,
        "family": family,
        "total": count.total,
        "active": count.active,
        "embedding_positions_head": count.embedding,
        "non_embedding": count.non_embedding,
        "tied": count.tied,
        "layers": len(count.by_layer),
        "components": dict(count.by_component),
        "by_layer": [
            {"layer": index, "total": layer.total, "components": dict(layer.by_component)}
            for index, layer in enumerate(count.by_layer)
        ],
    }


# --- in words --------------------------------------------------------------------------------------------------------


def describe(spec: ModelSpec) -> dict[str, str]:
    """What the tree is, aspect by aspect, in a few words each.

    An aspect in which layers differ starts with "layers differ: " and tells which layers are what.
    """

    def each(words: Callable[[Block], str]) -> str:
        return _by_layer(spec.blocks, words)

    learned = spec.positions
    in_layers = each(position_words)
    if learned is None:
        positions = in_layers
    else:
        positions = f"learned, {learned.length:,}" + ("" if in_layers == "none" else f"; {in_layers}")
    return {
        "layers": f"{len(spec.blocks):,}" + ("" if len(set(spec.blocks)) == 1 else " (they differ)"),
        "hidden size": f"{spec.hidden_size:,}",
        "vocabulary": f"{spec.vocab_size:,}",
        "context": "not stated" if spec.context_length is None else f"{spec.context_length:,}",
        "positions": positions,
        "norm": each(_block_norm) + _end_norms(spec),
        "attention": each(_attention),
        "q/k norm": each(_query_key_norm),
        "window": each(lambda block: "none" if block.attention.window is None else f"{block.attention.window:,}"),
        "feed-forward": each(_feed_forward),
        "biases": each(_biases) + ("; and the head" if spec.head.bias else ""),
        "block": each(_arrangement),
        "head": "tied to the embedding" if spec.head.tied else "its own weight",
    }


def _by_layer(blocks: Sequence[Block], words: Callable[[Block], str]) -> str:
    said = {block: words(block) for block in set(blocks)}
    runs = layer_ranges(said[block] for block in blocks)
    if len(runs) == 1:
        return str(runs[0][2])
    if len(runs) <= 4:
        told = "; ".join(f"{text} in {range_label(first, last)}" for first, last, text in runs)
    else:  # alternating layers: which is which would fill the page
        tally = Counter(said[block] for block in blocks)
        told = "; ".join(f"{text} in {number} layers" for text, number in tally.most_common(4))
        told += f"; {len(tally) - 4} more kinds" if len(tally) > 4 else ""
    return f"layers differ: {told}"


def plain_number(value: float) -> str:
    """A float without loss, and without an exponent where it is whole and of usual size: 1,000,000; 8; 1.25."""
    return f"{int(value):,}" if value.is_integer() and value < 1e15 else repr(value)


def position_words(block: Block) -> str:
    """What positions a layer's attention has."""
    attention = block.attention
    match attention.position:
        case None:
            return "none"
        case ALiBi():
            return "ALiBi"
        case Rotary(dim=dim, base=base, scaling=scaling, pairs=pairs):
            if isinstance(attention, LatentAttention):
                keys = "key" if attention.rope_heads == 1 else "keys"
                where = f", on {attention.rope_heads} {keys} of {dim} dimensions for all heads"
            else:
                where = "" if dim == attention.head_dim else f", on {dim} of {attention.head_dim} dimensions"
            kind = "" if pairs == "halves" else ", pairs of neighbours"
            return f"rotary, base {plain_number(base)}{where}{kind}{_scaling(scaling)}"
    raise MissingComponent(f"{type(block.attention.position).__name__} has no words here")


def _scaling(scaling: RopeScaling | None) -> str:
    match scaling:
        case None:
            return ""
        case LinearScaling(factor=factor):
            return f", linear ×{plain_number(factor)}"
        case DynamicScaling(factor=factor, original_context=original):
            return f", dynamic ×{plain_number(factor)} beyond {original:,}"
        case YarnScaling(factor=factor, original_context=original):
            return f", YaRN ×{plain_number(factor)} from {original:,}"
        case Llama3Scaling(factor=factor, original_context=original):
            return f", llama3 ×{plain_number(factor)} from {original:,}"
        case LongRopeScaling(original_context=original):
            return f", LongRoPE from {original:,}"
        case ProportionalScaling(factor=factor, turning=turning):
            return f", of which {turning:,} pairs turn" + ("" if factor == 1 else f", linear ×{plain_number(factor)}")


def _norm(norm: Norm) -> str:
    if isinstance(norm, LayerNorm):
        return f"LayerNorm{'' if norm.bias else ' without bias'}, eps {norm.eps:g}"
    return f"RMSNorm, eps {norm.eps:g}"


def _block_norm(block: Block) -> str:
    norms = [block.attention_norm, *(() if block.feed_forward_norm is None else (block.feed_forward_norm,))]
    return " and ".join(dict.fromkeys(_norm(norm) for norm in norms)) + ", pre-norm"


def _end_norms(spec: ModelSpec) -> str:
    """The norms outside of the layers, where they are not what the layers have."""
    told = "" if spec.embedding.norm is None else f"; {_norm(spec.embedding.norm)}, on the embedding"
    alike = any(spec.final_norm in (block.attention_norm, block.feed_forward_norm) for block in spec.blocks)
    return told if alike else f"{told}; {_norm(spec.final_norm)}, at the end"


def _attention(block: Block) -> str:
    attention = block.attention
    if isinstance(attention, LatentAttention):
        dims = f"query dim {attention.query_dim}, value dim {attention.value_dim}"
        if not math.isclose(attention.scale, attention.query_dim**-0.5, rel_tol=1e-6):
            dims += f", scale {attention.scale:.4g}"
        return f"MLA, {attention.heads} heads, latent {attention.kv_rank}, {dims}"
    heads, kv_heads, size = attention.heads, attention.kv_heads, f"head dim {attention.head_dim}"
    if not math.isclose(attention.scale, attention.head_dim**-0.5, rel_tol=1e-6):
        size += f", scale {attention.scale:.4g}"
    if kv_heads == heads:
        return f"MHA, {heads} heads, {size}"
    if kv_heads == 1:
        return f"MQA, {heads} q, 1 kv, {size}"
    return f"GQA, {heads} q, {kv_heads} kv, {size}"


def _query_key_norm(block: Block) -> str:
    if isinstance(block.attention, LatentAttention):
        norm = block.attention.kv_norm
        return "none" if norm is None else f"RMSNorm on the latent, eps {norm.eps:g}"
    norms = {"q": block.attention.q_norm, "k": block.attention.k_norm}
    there = [name for name, norm in norms.items() if norm is not None]
    eps = dict.fromkeys(f"{norm.eps:g}" for norm in norms.values() if norm is not None)
    return f"RMSNorm on {' and '.join(there)} heads, eps {' and '.join(eps)}" if there else "none"


def _feed_forward(block: Block) -> str:
    node = block.feed_forward
    if isinstance(node, MixtureOfExperts):
        weights = "" if node.normalise else ", weights as the router gives them"
        return f"{node.top_k} of {node.experts} experts{weights}, each {_one_feed_forward(node.expert)}"
    return _one_feed_forward(node)


def _one_feed_forward(node: FeedForward | GatedFeedForward) -> str:
    kind = "gated" if isinstance(node, GatedFeedForward) else "plain"
    return f"{kind}, {node.activation}, {node.intermediate_size:,}"


def _biases(block: Block) -> str:
    """Which linears have one; the norms' are told with the norms."""
    attention, feed_forward = block.attention, block.feed_forward
    if isinstance(feed_forward, MixtureOfExperts):
        feed_forward = feed_forward.expert
    up = "gate and up" if isinstance(feed_forward, GatedFeedForward) else "up"
    flags = {
        "q and latent" if isinstance(attention, LatentAttention) else "q, k, v": attention.qkv_bias,
        "attention output": attention.output_bias,
        up: feed_forward.up_bias,
        "down": feed_forward.down_bias,
    }
    if all(flags.values()):
        return "every linear"
    return ", ".join(name for name, there in flags.items() if there) or "none"


def _arrangement(block: Block) -> str:
    if block.parallel:
        return "parallel, one norm" if block.feed_forward_norm is None else "parallel, two norms"
    return "serial" if block.residual == "stream" else "serial, residual from the norms' output"
