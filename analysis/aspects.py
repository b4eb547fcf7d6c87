"""What a tree is, aspect by aspect: in the short words of a table and as data, or in whole words. No weights, no torch.

Components say it (see `Component.words`); layers that differ are told apart. Two trees whose aspects are all alike
compute the same function in exact arithmetic: each aspect tells a part of it, and none tells what
`components.without_rounding` sets alike, which is how the last bits come about.
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
    """One thing about a tree: "GQA 32/8", and as plain JSON values {"kind": "GQA", "heads": 32, "kv_heads": 8}.

    Where layers differ, data is {"layers_differ": [{"layers": [[first, last], …], "value": …}, …]}. `detail`: of little
    interest in a model by itself, where it is what most models have.
    """

    name: str
    words: str
    data: Any
    detail: bool = False


_MOST_RUNS, _MOST_KINDS = (
    3,
    4,
)  # so many runs of layers, and so many kinds of them, are told in words; data has them all

ORDER = (
    *("position", "rope pairs", "norm", "norm eps", "embedding norm", "final norm", "activation", "feed-forward"),
    *("attention", "head dim", "scale", "q/k norm", "bias", "block", "head", "layers", "hidden size", "vocabulary"),
    *("context", "window"),
)
"""What is told of every tree; a component from elsewhere may have aspects beside these."""

_DETAILS = ("rope pairs", "norm eps", "final norm", "scale")


def aspects(spec: ModelSpec) -> list[Aspect]:
    """Every aspect of a tree: always the same ones in the same order, and then those of unusual components."""
    told = {name: _by_layer(layers) for name, layers in _components(spec, spec.blocks).items()}
    head, context, first = _head(spec), spec.context_length, next(iter(spec.blocks[0].norms().values()), None)
    alike = without_rounding(spec.final_norm) == without_rounding(first)
    told |= {
        "position": _positions(spec, *told.get("position", NOT_THERE)[:2]),
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
    names = dict.fromkeys((*ORDER, *told))
    return [Aspect(name, *told.get(name, NOT_THERE)[:2], name in _DETAILS) for name in names]


def _head(spec: ModelSpec) -> Words:
    """Of a tree without one, that it gives hidden states."""
    return Words("none", None, "none: it gives hidden states") if spec.head is None else spec.head.named()


def describe(spec: ModelSpec, blocks: Sequence[Block] = ()) -> dict[str, str]:
    """What the tree is, aspect by aspect, in a few words each; with `blocks` as if it had these alone.

    An aspect in which layers differ starts with "layers differ: " and tells which layers are what.
    """
    blocks = blocks or spec.blocks
    layers = _components(spec, blocks)
    told = {name: _in_words([each.long for each in said]) for name, said in layers.items()}
    each = {name: told.get(name, NOT_THERE.long) for name in ORDER}
    positions, inner = each["position"], {norm for block in set(blocks) for norm in block.norms().values()}
    norms = each["norm"]  # and those outside of the layers, where they are not what the layers have
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
        **{name: each[name] for name in ("attention", "q/k norm", "window", "feed-forward")},
        "biases": each["bias"] + ("; and the head" if spec.head is not None and spec.head.bias else ""),
        "block": each["block"],
        "head": _head(spec).long,
        **{name: words for name, words in told.items() if name not in ORDER},
    }


def _components(spec: ModelSpec, blocks: Sequence[Block]) -> dict[str, list[Words]]:
    """What layers say by aspect, a layer each, and what the tree and its embedding have that is told of no other."""
    by_block = {block: block.aspects() for block in dict.fromkeys(blocks)}
    names = dict.fromkeys(name for said in by_block.values() for name in said)
    told = {name: [by_block[block].get(name, NOT_THERE) for block in blocks] for name in names}
    ends = (spec.embedding, spec.layer_inputs, spec)
    unusual = [node.aspects() for node in ends if node is not None and node.untold()]
    unusual += [node.aspects() for node in (spec.token_types, spec.pooler) if node is not None]
    unusual += [] if spec.encoder is None else [{"encoder": _encoder(spec.encoder)}]
    return told | {name: [words] for each in unusual for name, words in each.items()}


def _encoder(spec: ModelSpec) -> Words:
    """An encoder beside a decoder: its own aspects as data."""
    said, own = describe(spec), aspects(spec)
    words = {each.name: each.words for each in own}
    short = f"{words['layers']} layers, {words['attention']}, {words['feed-forward']}"
    names = ("positions", "attention", "window", "feed-forward", "norm")
    whole = f"{said['layers']} layers; " + "; ".join(said[name] for name in names)
    return Words(short, {each.name: each.data for each in own}, whole)


def _by_layer(said: Sequence[Words]) -> tuple[str, Any]:
    kinds: dict[str, tuple[Words, list[int]]] = {}
    for layer, words in enumerate(said):
        key = json.dumps(words.data, sort_keys=True)
        first, layers = kinds.get(key, (words, []))
        # The words of a layer that has such a thing say more.
        kinds[key] = words if first == NOT_THERE else first, [*layers, layer]
    found = list(kinds.values())
    if len(found) == 1:
        return found[0][0].short, found[0][0].data
    told = [f"{words.short} in {_which(layers)}" for words, layers in found[:_MOST_KINDS]]
    more = len(found) - _MOST_KINDS
    if more > 0:
        told.append(f"{more} more kinds" if more > 1 else "1 more kind")
    data = [{"layers": [list(run) for run in number_runs(layers)], "value": words.data} for words, layers in found]
    return "; ".join(told), {"layers_differ": data}


def _in_words(said: Sequence[str]) -> str:
    runs = layer_ranges(said)
    if len(runs) == 1:
        return str(runs[0][2])
    if len(runs) <= 4:
        told = "; ".join(f"{text} in {range_label(first, last)}" for first, last, text in runs)
    else:  # alternating layers: which is which would fill the page
        tally = Counter(said)
        told = "; ".join(f"{text} in {number} layers" for text, number in tally.most_common(4))
        told += f"; {len(tally) - 4} more kinds" if len(tally) > 4 else ""
    return f"layers differ: {told}"


def _which(layers: Sequence[int]) -> str:
    """Which layers, in few words: 0–13; 0–3, 8; every 6th from 5; 20 layers."""
    if len(number_runs(layers)) <= _MOST_RUNS:
        return number_ranges(layers)
    first, *other_steps = {after - before for before, after in pairwise(layers)}
    ending = {2: "nd", 3: "rd"}.get(first, "th")
    return f"{len(layers):,} layers" if other_steps else f"every {first}{ending} from {layers[0]}"


def _positions(spec: ModelSpec, words: str, data: Any) -> tuple[str, Any]:
    """Those added to the embeddings, and those inside of attention."""
    if spec.positions is None:
        return words, {"learned": None, "in_attention": data}
    learned = spec.positions.named()
    told = learned.short if words in ("none", NOT_THERE.short) else f"{learned.short}; {words}"
    return told, {"learned": learned.data, "in_attention": data}


def _end_norm(norm: Norm | None, first: Norm | None) -> tuple[str, Any]:
    """One outside of the layers; its eps is told where it is not that of their first."""
    if norm is None:
        return "none", None
    words = norm.named()
    data = words.data if isinstance(words.data, dict) else {"kind": words.data}
    if first is not None and norm.eps == first.eps:
        return words.short, data
    return f"{words.short}, {norm.eps:g}", {**data, "eps": norm.eps}
