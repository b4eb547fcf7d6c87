"""What a tree is, aspect by aspect, in the short words of a table and as data. Shapes alone: no weights, no torch.

Two trees whose aspects are all alike compute the same function in exact arithmetic: each aspect tells a part of it, and
none tells what `components.without_rounding` sets alike, which is how the last bits come about.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec

from ..components import (
    FACTS,
    ALiBi,
    Attention,
    Block,
    DynamicScaling,
    FeedForward,
    GatedFeedForward,
    LatentAttention,
    LayerNorm,
    LearnedPositions,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    MixtureOfExperts,
    ModelSpec,
    Norm,
    ProportionalScaling,
    RopeScaling,
    Rotary,
    YarnScaling,
    function_of,
    without_rounding,
)
from ..components.ranges import number_ranges, number_runs
from ..errors import MissingComponent
from .parameters import plain_number

__all__ = ["Aspect", "aspects", "attention_kind"]


@dataclass(frozen=True)
class Aspect:
    """One thing about a tree: "GQA 32/8", and as plain JSON values {"kind": "GQA", "heads": 32, "kv_heads": 8}.

    Where layers differ, data is {"layers_differ": [{"layers": [[first, last], …], "value": …}, …]}. `detail`: of little
    interest in a model by itself, where it is what most models have.
    """

    name: str
    words: str
    data: Any
    detail: bool = False


Said = tuple[str, Any]
"""Words, and the same as plain JSON values."""

MOST_RUNS, MOST_KINDS = 3, 4
"""So many runs of layers, and so many kinds of them, are told in words; data has them all."""

USUAL_SCALE = "1/sqrt(head dim)"


def aspects(spec: ModelSpec) -> list[Aspect]:
    """Every aspect of a tree, always the same ones in the same order."""

    def each(name: str, say: Callable[[Block], Said], detail: bool = False) -> Aspect:
        return Aspect(name, *_by_layer(spec.blocks, say), detail)

    context = spec.context_length
    return [
        Aspect("position", *_positions(spec)),
        each("rope pairs", _rope_pairs, detail=True),
        each("norm", _norms),
        each("norm eps", _eps, detail=True),
        Aspect("embedding norm", *_end_norm(spec.embedding.norm, spec)),
        Aspect("final norm", *_final_norm(spec), detail=True),
        each("activation", _activation),
        each("feed-forward", _feed_forward),
        each("attention", _attention),
        each("head dim", _head_dim),
        each("scale", _scale, detail=True),
        each("q/k norm", _head_norms),
        each("bias", _bias),
        each("block", _arrangement),
        Aspect("head", *_head(spec)),
        Aspect("layers", f"{len(spec.blocks):,}", len(spec.blocks)),
        Aspect("hidden size", f"{spec.hidden_size:,}", spec.hidden_size),
        Aspect("vocabulary", f"{spec.vocab_size:,}", spec.vocab_size),
        Aspect("context", "not stated" if context is None else f"{context:,}", context),
        each("window", _window),
    ]


# --- layers ----------------------------------------------------------------------------------------------------------


def _by_layer(blocks: Sequence[Block], say: Callable[[Block], Said]) -> Said:
    """What is said of every block, or of which ones."""
    said = {block: say(block) for block in set(blocks)}
    kinds: dict[str, tuple[str, Any, list[int]]] = {}
    for layer, block in enumerate(blocks):
        words, data = said[block]
        kinds.setdefault(json.dumps(data, sort_keys=True), (words, data, []))[2].append(layer)
    found = list(kinds.values())
    if len(found) == 1:
        return found[0][0], found[0][1]
    told = [f"{words} in {_which(layers)}" for words, _, layers in found[:MOST_KINDS]]
    more = len(found) - MOST_KINDS
    if more > 0:
        told.append(f"{more} more kinds" if more > 1 else "1 more kind")
    data = [{"layers": [list(run) for run in number_runs(layers)], "value": value} for _, value, layers in found]
    return "; ".join(told), {"layers_differ": data}


def _which(layers: Sequence[int]) -> str:
    """Which layers, in few words: 0–13; 0–3, 8; every 6th from 5; 20 layers."""
    runs = number_runs(layers)
    if len(runs) <= MOST_RUNS:
        return number_ranges(layers)
    steps = {after - before for before, after in pairwise(layers)}
    if len(steps) == 1:
        step = steps.pop()
        ending = {2: "nd", 3: "rd"}.get(step, "th")
        return f"every {step}{ending} from {layers[0]}"
    return f"{len(layers):,} layers"


# --- positions -------------------------------------------------------------------------------------------------------


def _positions(spec: ModelSpec) -> Said:
    """Those added to the embeddings, and those inside of attention."""
    words, data = _by_layer(spec.blocks, _position)
    learned = spec.positions
    if not isinstance(learned, LearnedPositions):
        return words, {"learned": None, "in_attention": data}
    told = f"learned {learned.length:,}"
    return told if words == "none" else f"{told}; {words}", {"learned": learned.length, "in_attention": data}


def _position(block: Block) -> Said:
    match block.attention.position:
        case None:
            return "none", None
        case ALiBi(scaled=scaled):
            return "ALiBi, scaled" if scaled else "ALiBi", {"kind": "ALiBi", "scaled": scaled}
        case Rotary(dim=dim, base=base, scaling=scaling):
            part = isinstance(block.attention, Attention) and dim != block.attention.head_dim
            words = f"RoPE {plain_number(base)}" + (f" on {dim} dims" if part else "") + _scaled(scaling)
            turned = dim if part else None  # of a latent's keys: told with the head's dimensions
            return words, {"kind": "RoPE", "base": base, "dims": turned, "scaling": _scaling(scaling)}
    raise MissingComponent(f"{type(block.attention.position).__name__} has no words here")


def _scaled(scaling: RopeScaling | None) -> str:
    match scaling:
        case None:
            return ""
        case LinearScaling(factor=factor):
            return f", linear ×{plain_number(factor)}"
        case DynamicScaling(factor=factor):
            return f", dynamic ×{plain_number(factor)}"
        case YarnScaling(factor=factor):
            return f", YaRN ×{plain_number(factor)}"
        case Llama3Scaling(factor=factor):
            return f", llama3 ×{plain_number(factor)}"
        case LongRopeScaling():
            return ", LongRoPE"
        case ProportionalScaling(factor=factor, turning=turning):
            return f", {turning:,} pairs turn" + ("" if factor == 1 else f", linear ×{plain_number(factor)}")


def _scaling(scaling: RopeScaling | None) -> dict[str, Any] | None:
    """All of its numbers."""
    if scaling is None:
        return None
    data: dict[str, Any] = msgspec.to_builtins(scaling)
    return {"kind": data.pop("type").removesuffix("Scaling").lower(), **data}


def _rope_pairs(block: Block) -> Said:
    """Which elements turn together. As data only what is unusual, since having no pairs at all is told elsewhere."""
    position = block.attention.position
    if not isinstance(position, Rotary):
        return "–", None
    return ("halves", None) if position.pairs == "halves" else ("neighbours", position.pairs)


# --- norms -----------------------------------------------------------------------------------------------------------


def _kind_of_norm(norm: Norm) -> str:
    if isinstance(norm, LayerNorm):
        return "LayerNorm" if norm.bias else "LayerNorm without bias"
    return "RMSNorm"


def _norms(block: Block) -> Said:
    """Of a layer: a tree has its norms before attention and feed-forward."""
    first = _kind_of_norm(block.attention_norm)
    second = first if block.feed_forward_norm is None else _kind_of_norm(block.feed_forward_norm)
    kinds = first if first == second else f"{first} and {second}"
    return f"{kinds}, pre", {"attention": first, "feed_forward": second, "placement": "pre"}


def _eps(block: Block) -> Said:
    """Of all norms of a layer; one number where it is all of theirs."""
    attention = block.attention
    names = ("q_norm", "k_norm", "kv_norm")
    norms = {"attention": block.attention_norm, "feed_forward": block.feed_forward_norm}
    norms |= {name: getattr(attention, name, None) for name in names}
    data = {name: norm.eps for name, norm in norms.items() if norm is not None}
    words = " and ".join(dict.fromkeys(f"{eps:g}" for eps in data.values()))
    return words, data if len(set(data.values())) > 1 else block.attention_norm.eps


def _end_norm(norm: Norm | None, spec: ModelSpec) -> Said:
    """One outside of the layers; its eps is told where it is not theirs."""
    if norm is None:
        return "none", None
    kind, eps = _kind_of_norm(norm), spec.blocks[0].attention_norm.eps
    return (kind, {"kind": kind}) if norm.eps == eps else (f"{kind}, {norm.eps:g}", {"kind": kind, "eps": norm.eps})


def _final_norm(spec: ModelSpec) -> Said:
    """Told where it is not the first layer's."""
    alike = without_rounding(spec.final_norm) == without_rounding(spec.blocks[0].attention_norm)
    return ("as in the layers", None) if alike else _end_norm(spec.final_norm, spec)


def _head_norms(block: Block) -> Said:
    """Of queries and keys a head, or of the latent; eps is told with those of the other norms."""
    attention = block.attention
    if isinstance(attention, LatentAttention):
        return ("none", []) if attention.kv_norm is None else ("RMSNorm on the latent", ["latent"])
    there = [name for name, norm in (("q", attention.q_norm), ("k", attention.k_norm)) if norm is not None]
    return {0: "none", 1: f"RMSNorm on {''.join(there)}", 2: "RMSNorm"}[len(there)], there


# --- attention -------------------------------------------------------------------------------------------------------


def attention_kind(attention: Attention | LatentAttention) -> str:
    """MHA, GQA (Ainslie et al. 2305.13245), MQA (Shazeer 1911.02150) or MLA (DeepSeek-V2 2405.04434)."""
    if isinstance(attention, LatentAttention):
        return "MLA"
    if attention.kv_heads == attention.heads:
        return "MHA"
    return "MQA" if attention.kv_heads == 1 else "GQA"


def _attention(block: Block) -> Said:
    attention = block.attention
    kind = attention_kind(attention)
    if isinstance(attention, LatentAttention):
        data = {"heads": attention.heads, "kv_rank": attention.kv_rank, "rope_heads": attention.rope_heads}
        keys = f", {attention.rope_heads} rope keys" if attention.rope_heads > 1 else ""
        return f"MLA {attention.heads}, latent {attention.kv_rank:,}{keys}", {"kind": kind, **data}
    heads = f"{attention.heads}" if kind == "MHA" else f"{attention.heads}/{attention.kv_heads}"
    return f"{kind} {heads}", {"kind": kind, "heads": attention.heads, "kv_heads": attention.kv_heads}


def _head_dim(block: Block) -> Said:
    attention = block.attention
    if isinstance(attention, LatentAttention):
        data = {"nope_dim": attention.nope_dim, "rope_dim": attention.rope_dim, "value_dim": attention.value_dim}
        return f"q/k {attention.query_dim:,}, v {attention.value_dim:,}", data
    return f"{attention.head_dim:,}", attention.head_dim


def _scale(block: Block) -> Said:
    """What scores are multiplied by, to the digits in which one family divides and another takes a power."""
    attention = block.attention
    dim = attention.query_dim if isinstance(attention, LatentAttention) else attention.head_dim
    scale = float(f"{attention.scale:.14g}")
    usual = scale == float(f"{dim**-0.5:.14g}")
    return (USUAL_SCALE, "1/sqrt(head_dim)") if usual else (f"{scale:.4g}", scale)


def _window(block: Block) -> Said:
    window = block.attention.window
    return "none" if window is None else f"{window:,}", window


# --- feed-forward and the rest ---------------------------------------------------------------------------------------


def _expert(block: Block) -> FeedForward | GatedFeedForward:
    node = block.feed_forward
    return node.expert if isinstance(node, MixtureOfExperts) else node


def _activation(block: Block) -> Said:
    function = function_of(_expert(block).activation)
    return FACTS[function].words, function


def _feed_forward(block: Block) -> Said:
    """Its kind and width; of a mixture each expert's."""
    one = _expert(block)
    gated = isinstance(one, GatedFeedForward)
    data: dict[str, Any] = {"kind": "gated" if gated else "plain", "width": one.intermediate_size}
    words = f"{FACTS[one.activation].gated if gated else 'plain'} {one.intermediate_size:,}"
    if isinstance(block.feed_forward, MixtureOfExperts):
        mixture = block.feed_forward
        data |= {"experts": mixture.experts, "top_k": mixture.top_k, "normalise": mixture.normalise}
        weights = "" if mixture.normalise else ", weights as routed"
        words = f"{words}, {mixture.top_k} of {mixture.experts} experts{weights}"
    return words, data


def _bias(block: Block) -> Said:
    """Which linears have one; the norms' are told with the norms, the head's with the head."""
    attention, feed_forward = block.attention, _expert(block)
    flags = {
        "q, latent" if isinstance(attention, LatentAttention) else "q, k, v": attention.qkv_bias,
        "attention out": attention.output_bias,
        "gate, up" if isinstance(feed_forward, GatedFeedForward) else "up": feed_forward.up_bias,
        "down": feed_forward.down_bias,
    }
    data = [name for flag, name in zip(flags.values(), ("qkv", "output", "up", "down"), strict=True) if flag]
    words = "all linears" if all(flags.values()) else ", ".join(name for name, flag in flags.items() if flag)
    return words or "none", data


def _arrangement(block: Block) -> Said:
    norms = 1 if block.feed_forward_norm is None else 2
    data: dict[str, Any] = {"parallel": block.parallel, "norms": norms, "residual": block.residual}
    data |= {f"{each.mixer.slot} multiplier": each.multiplier for each in block.sublayers if each.multiplier != 1}
    if block.parallel:
        return "parallel, one norm" if norms == 1 else "parallel, two norms", data
    return "serial" if block.residual == "stream" else "serial, residual from the norm", data


def _head(spec: ModelSpec) -> Said:
    words = "tied" if spec.head.tied else "own weight"
    return words + (", bias" if spec.head.bias else ""), {"tied": spec.head.tied, "bias": spec.head.bias}
