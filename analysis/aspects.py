"""A description of a model by aspects such as "attention" or "norm", without weights or torch.

An aspect has short words for a table ("GQA 32/8"), JSON values, and in `describe` a longer phrase. Components describe
themselves (see `Component.words`), and layers that differ are described separately. Two models with equal aspects
compute the same function in exact arithmetic. Fields that only change rounding are not part of any aspect.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ..components import Block, ModelSpec, Norm, without_rounding
from ..components.ranges import layer_ranges, number_ranges, number_runs, range_label
from ..components.words import NOT_THERE, Words


@dataclass(frozen=True)
class Aspect:
    """One property of a model, such as its attention."""

    name: str
    words: str  # the short form for a table: "GQA 32/8"
    data: Any
    """Plain JSON values: {"kind": "GQA", "heads": 32, "kv_heads": 8}. If layers differ, they are
    {"layers_differ": [{"layers": [[first, last], …], "value": …}, …]}."""
    detail: bool = False  # whether it is of little interest unless models are compared


_MOST_RUNS = 3  # the words list at most this many runs of consecutive layers; the data list all
_MOST_KINDS = 4  # the words list at most this many kinds of layers

ORDER = (
    *("position", "rope pairs", "norm", "norm eps", "embedding norm", "final norm", "activation", "feed-forward"),
    *("attention", "head dim", "scale", "q/k norm", "bias", "block", "head", "layers", "hidden size", "vocabulary"),
    *("context", "window"),
)
"""The names of the aspects that every model has, in the order of tables. A plugin's component may add others."""

_DETAILS = ("rope pairs", "norm eps", "final norm", "scale")


def aspects(spec: ModelSpec) -> list[Aspect]:
    """Return the aspects of a model.

    Every model has the aspects in `ORDER`, in this order. Others follow if the model has unusual components.
    """
    described = {name: _by_layer(layers) for name, layers in _components(spec, spec.blocks).items()}
    head, context, first = _head(spec), spec.context_length, next(iter(spec.blocks[0].norms().values()), None)
    alike = without_rounding(spec.final_norm) == without_rounding(first)
    described |= {
        "position": _positions(spec, *described.get("position", NOT_THERE)[:2]),
        "embedding norm": _end_norm(spec.embedding.norm or spec.first_norm, first),
        "final norm": ("none", [])
        if spec.final_norm is None
        else ("as in the layers", None)
        if alike
        else _end_norm(spec.final_norm, first),
        "head": (head.short, head.data),
        "layers": (f"{len(spec.blocks):,}", len(spec.blocks)),
        "hidden size": (f"{spec.hidden_size:,}", spec.hidden_size),
        "vocabulary": (f"{spec.vocab_size:,}", spec.vocab_size),
        "context": ("not stated" if context is None else f"{context:,}", context),
    }
    names = dict.fromkeys((*ORDER, *described))
    return [Aspect(name, *described.get(name, NOT_THERE)[:2], name in _DETAILS) for name in names]


def _head(spec: ModelSpec) -> Words:
    """Return the description of a model's head. A model without a head returns hidden states."""
    return Words("none", None, "none: it gives hidden states") if spec.head is None else spec.head.named()


def describe(spec: ModelSpec, blocks: Sequence[Block] = ()) -> dict[str, str]:
    """Return a phrase for every aspect of a model. If `blocks` are given, they replace all layers of the model.

    If layers differ in an aspect, its phrase starts with "layers differ: " and names the layers.
    """
    blocks = blocks or spec.blocks
    layers = _components(spec, blocks)
    described = {name: _in_words([words.long for words in by_layer]) for name, by_layer in layers.items()}
    usual = {name: described.get(name, NOT_THERE.long) for name in ORDER}
    positions, inner = usual["position"], {norm for block in set(blocks) for norm in block.norms().values()}
    norms = usual["norm"]  # and the norms outside of the layers, if they differ
    for norm, place in ((spec.embedding.norm, "embedding"), (spec.first_norm, "sum of what is embedded")):
        norms += "" if norm is None else f"; {norm.named().long}, on the {place}"
    final = "none" if spec.final_norm is None else spec.final_norm.named().long
    norms += "" if spec.final_norm in inner else f"; {final}, at the end"
    if spec.positions is not None:
        positions = spec.positions.named().long + ("" if positions == "none" else f"; {positions}")
    return {
        "layers": f"{len(blocks):,}" + ("" if len(set(blocks)) == 1 else " (they differ)"),
        "hidden size": f"{spec.hidden_size:,}",
        "vocabulary": f"{spec.vocab_size:,}",
        "context": "not stated" if spec.context_length is None else f"{spec.context_length:,}",
        "positions": positions,
        "norm": norms,
        **{name: usual[name] for name in ("attention", "q/k norm", "window", "feed-forward")},
        "biases": usual["bias"] + ("; and the head" if spec.head is not None and spec.head.bias else ""),
        "block": usual["block"],
        "head": _head(spec).long,
        **{name: words for name, words in described.items() if name not in ORDER},
    }


def _components(spec: ModelSpec, blocks: Sequence[Block]) -> dict[str, list[Words]]:
    """Return the descriptions of a model's components, by aspect: a list with one description per layer.

    Unusual components outside of the layers, such as a pooler, are included with a list of one description.
    """
    by_block = {block: block.aspects() for block in dict.fromkeys(blocks)}
    names = dict.fromkeys(name for described in by_block.values() for name in described)
    by_layer = {name: [by_block[block].get(name, NOT_THERE) for block in blocks] for name in names}
    ends = (spec.embedding, spec.layer_inputs, spec)
    unusual = [node.aspects() for node in ends if node is not None and node.undescribed()]
    unusual += [node.aspects() for node in (spec.token_types, spec.pooler) if node is not None]
    unusual += [] if spec.encoder is None else [{"encoder": _encoder(spec.encoder)}]
    return by_layer | {name: [words] for described in unusual for name, words in described.items()}


def _encoder(spec: ModelSpec) -> Words:
    """Return the description of an encoder-decoder model's encoder. Its `data` are the aspects of the encoder."""
    described, encoder_aspects = describe(spec), aspects(spec)
    words = {aspect.name: aspect.words for aspect in encoder_aspects}
    short = f"{words['layers']} layers, {words['attention']}, {words['feed-forward']}"
    names = ("positions", "attention", "window", "feed-forward", "norm")
    whole = f"{described['layers']} layers; " + "; ".join(described[name] for name in names)
    return Words(short, {aspect.name: aspect.data for aspect in encoder_aspects}, whole)


def _by_layer(by_layer: Sequence[Words]) -> tuple[str, Any]:
    kinds: dict[str, tuple[Words, list[int]]] = {}
    for layer, words in enumerate(by_layer):
        key = json.dumps(words.data, sort_keys=True)
        first, layers = kinds.get(key, (words, []))
        # A layer that has the component describes it better than one without.
        kinds[key] = words if first == NOT_THERE else first, [*layers, layer]
    listed = list(kinds.values())
    if len(listed) == 1:
        return listed[0][0].short, listed[0][0].data
    texts = [f"{words.short} in {_which(layers)}" for words, layers in listed[:_MOST_KINDS]]
    more = len(listed) - _MOST_KINDS
    if more > 0:
        texts.append(f"{more} more kinds" if more > 1 else "1 more kind")
    data = [{"layers": [list(run) for run in number_runs(layers)], "value": words.data} for words, layers in listed]
    return "; ".join(texts), {"layers_differ": data}


def _in_words(by_layer: Sequence[str]) -> str:
    runs = layer_ranges(by_layer)
    if len(runs) == 1:
        return str(runs[0][2])
    if len(runs) <= 4:
        words = "; ".join(f"{text} in {range_label(first, last)}" for first, last, text in runs)
    else:  # a list of all alternating layers would be too long
        tally = Counter(by_layer)
        words = "; ".join(f"{text} in {number} layers" for text, number in tally.most_common(4))
        words += f"; {len(tally) - 4} more kinds" if len(tally) > 4 else ""
    return f"layers differ: {words}"


def _which(layers: Sequence[int]) -> str:
    """Return a short form of a list of layers: "0–13", "0–3, 8", "every 6th from 5" or "20 layers"."""
    if len(number_runs(layers)) <= _MOST_RUNS:
        return number_ranges(layers)
    first, *other_steps = {after - before for before, after in pairwise(layers)}
    ending = {2: "nd", 3: "rd"}.get(first, "th")
    return f"{len(layers):,} layers" if other_steps else f"every {first}{ending} from {layers[0]}"


def _positions(spec: ModelSpec, words: str, data: Any) -> tuple[str, Any]:
    """Return words and data for how a model encodes positions: a position embedding, or RoPE or ALiBi in the attention.

    `words` and `data` describe the attention. The result adds the position embedding, if the model has one.
    """
    if spec.positions is None:
        return words, {"learned": None, "in_attention": data}
    learned = spec.positions.named()
    text = learned.short if words in ("none", NOT_THERE.short) else f"{learned.short}; {words}"
    return text, {"learned": learned.data, "in_attention": data}


def _end_norm(norm: Norm | None, first: Norm | None) -> tuple[str, Any]:
    """Return words and data for a norm outside of the layers, such as the final norm.

    Args:
        norm: the norm, or None.
        first: the first norm in the layers. If its eps is different, the result includes the eps of `norm`.
    """
    if norm is None:
        return "none", None
    words = norm.named()
    data = words.data if isinstance(words.data, dict) else {"kind": words.data}
    if first is not None and norm.eps == first.eps:
        return words.short, data
    return f"{words.short}, {norm.eps:g}", {**data, "eps": norm.eps}
