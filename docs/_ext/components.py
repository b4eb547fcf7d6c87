"""Tables for the explanations, from the presets: the models that have a component, and its costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from gptkit.analysis.costs import cache_bytes
from gptkit.analysis.costs import costs as costs_of
from gptkit.analysis.parameters import count
from gptkit.architectures import architecture_of
from gptkit.architectures.presets import presets
from gptkit.components import (
    RGLRU,
    ALiBi,
    Attention,
    Block,
    DenseBesideExperts,
    FeedForward,
    GatedDeltaNet,
    GatedFeedForward,
    LatentAttention,
    LayerNorm,
    Mamba,
    Mamba2,
    MixtureOfExperts,
    ModelSpec,
    RMSNorm,
    Rotary,
    TimeMixing,
)

Table = tuple[Sequence[str], Iterable[Sequence[str]], Sequence[int]]
"""Headings, rows, and the indices of columns with figures."""


@cache
def spec_of(name: str) -> ModelSpec:
    """Return the tree of a preset."""
    config = presets()[name].config
    return architecture_of(config).spec(config)


def blocks(test: Callable[[Block], bool]) -> Callable[[ModelSpec], bool]:
    """Return whether any layer passes a test, as a function of a tree."""
    return lambda spec: any(test(block) for block in spec.blocks)


def attention_of(block: Block) -> Any:
    """Return the attention of a block, or None."""
    return block.mixer("attention")


def rotary(block: Block) -> Rotary | None:
    """Return the rotary positions of a block, or None."""
    position = getattr(attention_of(block), "position", None)
    return position if isinstance(position, Rotary) else None


def scaled(name: str) -> Callable[[Block], bool]:
    """Return whether the rotary positions of a block have this scaling, as a function of the block."""
    return lambda block: type(getattr(rotary(block), "scaling", None)).__name__ == name


def heads(block: Block) -> tuple[int, int] | None:
    """Return the numbers of query heads and of key-value heads; None for latent attention."""
    attention = attention_of(block)
    return (attention.heads, attention.kv_heads) if isinstance(attention, Attention) else None


def is_mha(block: Block) -> bool:
    """Return whether the numbers of query heads and of key-value heads are equal."""
    found = heads(block)
    return found is not None and found[0] == found[1]


def is_mqa(block: Block) -> bool:
    """Return whether there is one key-value head."""
    found = heads(block)
    return found is not None and found[1] == 1 < found[0]


def is_gqa(block: Block) -> bool:
    """Return whether there are several key-value heads, and more query heads."""
    found = heads(block)
    return found is not None and 1 < found[1] < found[0]


def dense(block: Block) -> FeedForward | GatedFeedForward:
    """Return the feed-forward of a block, or one of its experts."""
    found = block.mixer("feed_forward")
    if isinstance(found, DenseBesideExperts):
        return found.dense
    return found.expert if isinstance(found, MixtureOfExperts) else found


def has_bias(block: Block) -> bool:
    """Return whether any linear layer of the block has a bias."""
    return any(words.data for each in block.sublayers for words in each.mixer.biases().values())


USERS: Mapping[str, Callable[[ModelSpec], bool]] = {
    "LayerNorm": lambda spec: isinstance(spec.final_norm, LayerNorm),
    "RMSNorm": lambda spec: isinstance(spec.final_norm, RMSNorm),
    "q and k norms": blocks(lambda block: getattr(attention_of(block), "q_norm", None) is not None),
    "norm on the embedding": lambda spec: spec.embedding.norm is not None,
    "learned positions": lambda spec: spec.positions is not None and bool(spec.positions.shapes()),
    "rotary": blocks(lambda block: rotary(block) is not None),
    "llama3 scaling": blocks(scaled("Llama3Scaling")),
    "alibi": blocks(lambda block: isinstance(getattr(attention_of(block), "position", None), ALiBi)),
    "mha": blocks(is_mha),
    "gqa": blocks(is_gqa),
    "mqa": blocks(is_mqa),
    "latent": blocks(lambda block: isinstance(attention_of(block), LatentAttention)),
    "window": blocks(lambda block: getattr(attention_of(block), "window", None) is not None),
    "plain": blocks(lambda block: isinstance(dense(block), FeedForward)),
    "gated": blocks(lambda block: isinstance(dense(block), GatedFeedForward)),
    "short convolution": blocks(lambda block: block.mixer("convolution") is not None),
    "delta": blocks(lambda block: isinstance(block.mixer("recurrence"), GatedDeltaNet)),
    "mamba": blocks(lambda block: isinstance(block.mixer("recurrence"), Mamba)),
    "shared": lambda spec: spec.has_shared_blocks,
    "rg-lru": blocks(lambda block: isinstance(block.mixer("recurrence"), RGLRU)),
    "rwkv": blocks(lambda block: isinstance(block.mixer("recurrence"), TimeMixing)),
    "mamba2": blocks(lambda block: isinstance(block.mixer("recurrence"), Mamba2)),
    "experts": blocks(lambda block: hasattr(block.mixer("feed_forward"), "experts")),
    "parallel": blocks(lambda block: block.parallel),
    "serial": blocks(lambda block: not block.parallel),
    "tied": lambda spec: spec.tied,
    "untied": lambda spec: spec.head is not None and not spec.tied,
    "both directions": lambda spec: not spec.causal,
    "cross-attention": lambda spec: spec.encoder is not None,
    "biases": blocks(has_bias),
    "no biases": lambda spec: not any(map(has_bias, spec.blocks)),
}
"""The names that a page may request, and tests for them on a tree."""


def users(what: str) -> Table:
    """Return the families and presets that have a component, or one row that says that there are none."""
    found: dict[str, list[str]] = {}
    for name, preset in presets().items():
        if USERS[what](spec_of(name)):
            found.setdefault(architecture_of(preset.config).name, []).append(name)
    rows = []
    for family, names in found.items():
        some = ", ".join(f"`{name}`" for name in names[:5])
        rows.append([f"`{family}`", str(len(names)), some + (f" and {len(names) - 5} more" if len(names) > 5 else "")])
    return ["family", "number of presets", "presets"], rows or [["none", "0", "no preset has this component"]], [1]


# --- costs ------------------------------------------------------------------------------------------------------------


def share(part: int, whole: int) -> str:
    """Return a share in per cent."""
    return "<0.01 %" if 0 < part < whole / 20_000 else f"{100 * part / whole:.2f} %"


def norm_row(spec: ModelSpec) -> list[str]:
    """Return the cells of a model; see `TOPICS`."""
    counted = count(spec)
    return [
        "–" if spec.final_norm is None else type(spec.final_norm).__name__,
        f"{counted.by_component['norms']:,}",
        share(counted.by_component["norms"], counted.total),
    ]


def attention_row(spec: ModelSpec) -> list[str]:
    """Return the cells of a model; see `TOPICS`."""
    found, attention = costs_of(spec), spec.blocks[0].attention
    kv = str(attention.kv_heads) if isinstance(attention, Attention) else f"latent {attention.kv_rank}"
    weights = f"{count(spec).by_component['attention']:,}"
    projections, scores = f"{found.flops['attention']:,}", f"{found.flops['scores']:,}"
    of_query = f"{attention.heads} / {kv}"
    return [of_query, weights, f"{found.cache_bytes(2):,}", f"{found.context:,}", projections, scores]


def cache_row(spec: ModelSpec) -> list[str]:
    """Return the window and the cache at three context lengths, in bf16."""
    window = spec.blocks[0].attention.window
    held = [costs_of(spec, context).cache_bytes_at_context(2) / 10**6 for context in (4096, 8192, 32768)]
    return ["none" if window is None else f"{window:,}", *(f"{each:,.0f}" for each in held)]


def state_row(spec: ModelSpec) -> list[str]:
    """Return the states and the whole cache at two context lengths. Caches are in bf16, and some states in fp32."""
    sizes = [cache_bytes(spec, context) for context in (4096, 32768)]
    recurrent = sum(block.mixer("attention") is None for block in spec.blocks)
    cells = (sizes[0].states, *(size.nbytes for size in sizes))
    return [f"{recurrent} of {len(spec.blocks)}", *(f"{each / 10**6:,.1f}" for each in cells)]


def feed_forward_row(spec: ModelSpec) -> list[str]:
    """Return the cells of a model; see `TOPICS`."""
    found, inner = costs_of(spec), dense(spec.blocks[0])
    form = "gated" if isinstance(inner, GatedFeedForward) else "plain"
    counted = count(spec)
    weights = counted.by_component["feed-forward"]
    return [
        f"{form}, {inner.activation}",
        f"{inner.intermediate_size:,}",
        f"{inner.intermediate_size / spec.hidden_size:.2f}",
        f"{weights:,}",
        share(weights, counted.total),
        f"{found.flops['feed-forward']:,}",
    ]


def expert_row(spec: ModelSpec) -> list[str]:
    """Return the cells of a model; see `TOPICS`."""
    found, feed_forward = costs_of(spec), spec.blocks[0].feed_forward
    mixed = isinstance(feed_forward, MixtureOfExperts)
    number = (
        f"{feed_forward.experts}, {feed_forward.top_k} per token"
        if isinstance(feed_forward, MixtureOfExperts)
        else "none"
    )
    router = found.flops["router"] if mixed else 0
    return [number, f"{found.parameters:,}", f"{found.active:,}", f"{found.flops['feed-forward']:,}", f"{router:,}"]


def ends_row(spec: ModelSpec) -> list[str]:
    """Return the cells of a model; see `TOPICS`."""
    counted = count(spec)
    table = spec.vocab_size * spec.hidden_size
    return [
        "tied" if spec.tied else "untied",
        f"{spec.vocab_size:,} × {spec.hidden_size:,}",
        f"{counted.total:,}",
        share(table * (1 if spec.tied else 2), counted.total),
        f"{costs_of(spec).flops['head']:,}",
    ]


def position_row(spec: ModelSpec) -> list[str]:
    """Return the cells of a model; see `TOPICS`."""
    position = spec.blocks[0].attention.position
    if isinstance(position, Rotary):
        scaling = "" if position.scaling is None else f", {type(position.scaling).__name__}"
        told = f"RoPE on {position.dim}, base {position.base:,.0f}{scaling}"
    else:
        told = "ALiBi" if isinstance(position, ALiBi) else "learned table" if spec.positions is not None else "none"
    length = "–" if spec.context_length is None else f"{spec.context_length:,}"
    return [told, length, f"{count(spec).by_component.get('positions', 0):,}"]


def block_row(spec: ModelSpec) -> list[str]:
    """Return the cells of a model; see `TOPICS`."""
    block = spec.blocks[0]
    norms = 1 + (block.feed_forward_norm is not None)
    return ["parallel" if block.parallel else "serial", str(norms), f"{len(spec.blocks)}"]


def bias_row(spec: ModelSpec) -> list[str]:
    """Return the number and share of parameters in biases of linear layers, without those of norms."""
    shapes = [(parameter.name, parameter.count) for parameter in spec.parameters()]
    biases = sum(number for name, number in shapes if name.endswith(".bias") and "norm" not in name.split(".")[-2])
    return [f"{biases:,}", share(biases, count(spec).total)]


_ATTENTION = (
    "heads, q / kv",
    "parameters of attention",
    "cache, bytes per token",
    "context, tokens",
    "FLOPs, projections",
    "FLOPs, scores",
)
_STATES = ("layers without attention", "states, MB", "states and cache, MB at 4,096 tokens", "MB at 32,768 tokens")
_FEED_FORWARD = ("form", "width", "width / hidden size", "parameters", "share of all parameters", "FLOPs per token")
_EXPERTS = ("experts", "all parameters", "active parameters", "FLOPs per token, experts", "FLOPs per token, router")

TOPICS: Mapping[str, tuple[Callable[[ModelSpec], list[str]], Sequence[str]]] = {
    "norms": (norm_row, ("norm", "parameters in norms", "share of all parameters")),
    "positions": (position_row, ("position encoding", "context, tokens", "parameters of positions")),
    "attention": (attention_row, _ATTENTION),
    "cache": (cache_row, ("window, tokens", "cache, MB at 4,096 tokens", "MB at 8,192 tokens", "MB at 32,768 tokens")),
    "states": (state_row, _STATES),
    "feed-forward": (feed_forward_row, _FEED_FORWARD),
    "experts": (expert_row, _EXPERTS),
    "ends": (ends_row, ("head", "embedding table", "all parameters", "share of the tables", "FLOPs per token, head")),
    "block": (block_row, ("block", "norms per layer", "layers")),
    "biases": (bias_row, ("parameters in biases", "share of all parameters")),
}
"""The topics of cost tables: a function that returns the cells of a row, and the headings."""


def costs(topic: str, names: Sequence[str]) -> Table:
    """Return the costs of a component in some presets. FLOPs are for one token that sees the whole context; caches are
    in bf16.
    """
    row, heads = TOPICS[topic]
    rows = [[f"`{name}`", *row(spec_of(name))] for name in names]
    figures = [column for column in range(1, len(heads) + 1) if all(line[column][:1] in "<0123456789" for line in rows)]
    return ["model", *heads], rows, figures
