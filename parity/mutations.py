"""Bugs that porting a model really makes, as changes of a tree and its weights.

A parity check is worth what it would have caught. Each mutation makes one mistake on purpose, in all layers, as a wrong
line of a weight map or a forgotten field would; `applicable` leaves out those that change nothing in the tree at hand
(no bias to drop, no window to ignore). Where a mistake can be undone without knowing what is right, that is a repair to
try on a model that is wrong: most undo themselves. Mistakes of code (RoPE on queries alone) have no form as weights or
as a tree that a checkpoint could hold: a tree names them for `make_in_code`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import msgspec
import torch
from torch import Tensor, nn

from ..components import (
    KINDS,
    Activation,
    ALiBi,
    Attention,
    Block,
    Component,
    FeedForward,
    GatedFeedForward,
    Head,
    LatentAttention,
    LayerNorm,
    MixtureOfExperts,
    ModelSpec,
    RMSNorm,
    Rotary,
    function_of,
)
from ..errors import ConfigError
from ..modules.attention import AttentionModule, Turn
from ..modules.positions import RotaryTables, RotaryTurn, alibi_slopes, apply_rotary
from ..modules.registry import computes

__all__ = ["MUTATIONS", "Mutant", "Mutation", "Weights", "applicable", "forgotten", "make_in_code", "of_ports"]

Weights = Mapping[str, Tensor]
"""Every parameter of a tree by shared name."""

Mutant = tuple[ModelSpec, dict[str, Tensor]]

replace = msgspec.structs.replace


@dataclass(frozen=True)
class Mutation:
    """One mistake.

    name: in the words of who makes it. component: where its effect is first seen, as the beginning of a label in
    `parity.bisect`; "norm" is whichever norm comes first, and "" says nothing. repair: what undoes it, for a diagnosis.
    apply: the changed tree and weights; None where it has no object. undo: the same the other way; None where making
    the mistake again does it, or where what it lost can only come from the reference. in_code: no checkpoint can hold
    it, so that there is nothing to repair in one.
    """

    name: str
    component: str
    repair: str
    apply: Callable[[ModelSpec, Weights], Mutant | None]
    undo: Callable[[ModelSpec, Weights], Mutant | None] | None = None
    in_code: bool = False

    def mend(self, spec: ModelSpec, weights: Weights) -> Mutant | None:
        """The tree and weights after the repair; None where it has no object."""
        return (self.undo or self.apply)(spec, weights)


def applicable(spec: ModelSpec, weights: Weights) -> Iterator[tuple[Mutation, Mutant]]:
    """The mutations that change this tree or these weights, each with its mutant."""
    for mutation in (*MUTATIONS, *forgotten()):
        mutant = mutation.apply(spec, weights)
        if mutant is not None and _changed(spec, weights, mutant):
            yield mutation, mutant


def of_ports(spec: ModelSpec, weights: Weights) -> Iterator[tuple[str, Mutant]]:
    """Every mistake that a port may have made, in words, each with its mutant: the usual wrong values, those that have
    a form in code, and those of checkpoints in either direction. Of two that come to the same the plainer one first.
    """
    tried = [(mutation.name, mutation.apply) for mutation in (*_usual_values(), *IN_PORTS, *MUTATIONS, *forgotten())]
    tried += [(f"{each.name}, the other way round", each.undo) for each in MUTATIONS if each.undo is not None]
    for name, apply in tried:
        mutant = apply(spec, weights)
        if mutant is not None and _changed(spec, weights, mutant):
            yield name, mutant


def _changed(spec: ModelSpec, weights: Weights, mutant: Mutant) -> bool:
    return mutant[0] != spec or any(not torch.equal(weights[name], tensor) for name, tensor in mutant[1].items())


# --- weights in each other's place -----------------------------------------------------------------------------------


def _paths(spec: ModelSpec, kind: type[Component] | tuple[type[Component], ...]) -> Iterator[tuple[str, Any]]:
    return ((path, node) for path, node in spec.nodes() if isinstance(node, kind))


def _exchange(first: str, second: str, kind: type[Component]) -> Callable[[ModelSpec, Weights], Mutant | None]:
    """Swap two projections of every `kind`; of unequal ones (grouped heads) the rows that both have."""

    def apply(spec: ModelSpec, weights: Weights) -> Mutant | None:
        new = dict(weights)
        for path, _ in _paths(spec, kind):
            for suffix in ("weight", "bias"):
                a, b = f"{path}.{first}.{suffix}", f"{path}.{second}.{suffix}"
                if a in weights and b in weights:
                    rows = min(weights[a].shape[0], weights[b].shape[0])
                    new[a] = torch.cat([weights[b][:rows], weights[a][rows:]])
                    new[b] = torch.cat([weights[a][:rows], weights[b][rows:]])
        return spec, new

    return apply


def _norms_exchanged(spec: ModelSpec, weights: Weights) -> Mutant | None:
    new = dict(weights)
    for layer, block in enumerate(spec.blocks):
        norms = [f"{each.mixer.slot}_norm" for each in block.sublayers if each.norm is not None]
        if len(norms) < 2:
            continue
        for suffix in ("weight", "bias"):
            a, b = (f"blocks.{layer}.{norm}.{suffix}" for norm in norms[:2])
            if a in weights and b in weights:
                new[a], new[b] = weights[b], weights[a]
    return spec, new


def _other_layer(spec: ModelSpec, weights: Weights) -> Mutant | None:
    """The first layer's matrix that writes the stream exchanged with that of the next layer that has such a one."""
    found: dict[str, list[str]] = {}
    for parameter in spec.parameters():
        if parameter.layer is not None and parameter.role == "writes":
            found.setdefault(parameter.name.removeprefix(f"blocks.{parameter.layer}."), []).append(parameter.name)
    a, b = next((names[:2] for names in found.values() if len(names) > 1), ("", ""))
    if not a or weights[a].shape != weights[b].shape:
        return None
    return spec, {**weights, a: weights[b], b: weights[a]}


def _square_transposed(spec: ModelSpec, weights: Weights) -> Mutant | None:
    new = dict(weights)
    for path, _ in _paths(spec, (Attention, LatentAttention)):
        name = f"{path}.o_proj.weight"
        if weights[name].shape[0] == weights[name].shape[1]:
            new[name] = weights[name].t()
    return spec, new


def _biases_dropped(spec: ModelSpec, weights: Weights) -> Mutant | None:
    new = dict(weights)
    for path, _ in _paths(spec, (Attention, LatentAttention)):
        for projection in ("q_proj", "k_proj", "v_proj", "kv_down_proj", "k_rope_proj"):
            name = f"{path}.{projection}.bias"
            if name in weights:
                new[name] = torch.zeros_like(weights[name])
    return spec, new


def _turned_back(spec: ModelSpec, weights: Weights) -> Mutant | None:
    """Rotation by the negative angle: the same as the two elements of every pair in each other's place. The norm over a
    head (qwen3) goes with them.
    """
    new = dict(weights)
    for path, attention in _paths(spec, Attention):
        if not isinstance(attention.position, Rotary):
            continue
        dim, halves = attention.position.dim, attention.position.pairs == "halves"
        order = torch.arange(attention.head_dim)
        pairs = order[:dim].view(2, -1).flip(0) if halves else order[:dim].view(-1, 2).flip(1)
        order[:dim] = pairs.reshape(-1)
        for side, heads in (("q", attention.heads), ("k", attention.kv_heads)):
            for part, count in (("proj.weight", heads), ("proj.bias", heads), ("norm.weight", 1)):
                name = f"{path}.{side}_{part}"
                if name in weights:
                    new[name] = _rows_of_heads(weights[name], count, partial(torch.index_select, dim=1, index=order))
    return spec, new


def _rows_of_heads(weight: Tensor, heads: int, order: Callable[[Tensor], Tensor]) -> Tensor:
    """The rows (heads · head_dim, …) after `order` was applied to (heads, head_dim, …)."""
    return order(weight.reshape(heads, -1, *weight.shape[1:])).flatten(0, 1)


def _interleave(by_head: Tensor) -> Tensor:
    """Half-split rotary pairs (i, i + n/2) -> neighbours (2i, 2i + 1)."""
    return torch.stack(by_head.chunk(2, dim=1), dim=2).flatten(1, 2)


def _split_halves(by_head: Tensor) -> Tensor:
    """The inverse of `_interleave`."""
    return torch.cat([by_head[:, 0::2], by_head[:, 1::2]], dim=1)


def _rope_rows(order: Callable[[Tensor], Tensor]) -> Callable[[ModelSpec, Weights], Mutant | None]:
    """Re-order the rows of q and k within each head; a norm over heads (qwen3) stays as it is."""

    def apply(spec: ModelSpec, weights: Weights) -> Mutant | None:
        new = dict(weights)
        for path, attention in _paths(spec, Attention):
            if not isinstance(attention.position, Rotary):
                continue
            for name, heads in ((f"{path}.q_proj", attention.heads), (f"{path}.k_proj", attention.kv_heads)):
                for suffix in ("weight", "bias"):
                    if f"{name}.{suffix}" in weights:
                        new[f"{name}.{suffix}"] = _rows_of_heads(weights[f"{name}.{suffix}"], heads, order)
        return spec, new

    return apply


def _heads_reordered(
    path: str, weights: Weights, heads: int, order: Tensor, projections: tuple[str, ...]
) -> dict[str, Tensor]:
    """One attention's weights with its heads in another order; the output projection follows its inputs."""
    found: dict[str, Tensor] = {}
    for projection in projections:
        for suffix in ("weight", "bias"):
            name = f"{path}.{projection}.{suffix}"
            if name in weights:
                found[name] = _rows_of_heads(weights[name], heads, lambda rows: rows[order])
    out = f"{path}.o_proj.weight"
    found[out] = _rows_of_heads(weights[out].t(), heads, lambda rows: rows[order]).t()
    return found


def _sorted_slopes(back: bool) -> Callable[[ModelSpec, Weights], Mutant | None]:
    """Slopes in descending order instead of the power-of-two order: the same as heads in that order."""

    def apply(spec: ModelSpec, weights: Weights) -> Mutant | None:
        new = dict(weights)
        for path, attention in _paths(spec, Attention):
            if not isinstance(attention.position, ALiBi) or attention.kv_heads not in (1, attention.heads):
                continue
            order = torch.argsort(alibi_slopes(attention.heads), descending=True)
            moved = ("q_proj", "k_proj", "v_proj") if attention.kv_heads > 1 else ("q_proj",)
            new |= _heads_reordered(path, weights, attention.heads, order if back else order.argsort(), moved)
        return spec, new

    return apply


def _heads_in_other_groups(back: bool) -> Callable[[ModelSpec, Weights], Mutant | None]:
    """Query heads dealt out over the key-value heads in turn instead of in runs."""

    def apply(spec: ModelSpec, weights: Weights) -> Mutant | None:
        new = dict(weights)
        for path, attention in _paths(spec, Attention):
            if attention.kv_heads in (1, attention.heads):
                continue
            order = torch.arange(attention.heads).view(attention.kv_heads, attention.group).t().reshape(-1)
            order = order.argsort() if back else order
            new |= _heads_reordered(path, weights, attention.heads, order, ("q_proj",))
        return spec, new

    return apply


def _head_not_tied(spec: ModelSpec, weights: Weights) -> Mutant | None:
    """The head at random, as a class leaves what it does not find and does not tie."""
    if not spec.head.tied:
        return None
    table = weights["embedding.weight"]
    noise = torch.randn(table.shape, generator=torch.Generator().manual_seed(0)).to(table) * 0.02
    return replace(spec, head=replace(spec.head, tied=False)), {**weights, "head.weight": noise}


def _positions_shifted(rows: int) -> Callable[[ModelSpec, Weights], Mutant | None]:
    """Of a table; rotary positions and ALiBi say how far two tokens are apart, whatever the first one's number."""

    def apply(spec: ModelSpec, weights: Weights) -> Mutant | None:
        if spec.positions is None:
            return None
        return spec, {**weights, "positions.weight": weights["positions.weight"].roll(rows, dims=0)}

    return apply


# --- fields of components --------------------------------------------------------------------------------------------


def _field(change: Callable[[Any], Any]) -> Callable[[ModelSpec, Weights], Mutant | None]:
    def apply(spec: ModelSpec, weights: Weights) -> Mutant | None:
        return spec.mapped(lambda node, _: change(node)), dict(weights)

    return apply


def _eps(factor: float) -> Callable[[Any], Any]:
    norms = (LayerNorm, RMSNorm)
    return lambda node: replace(node, eps=node.eps * factor) if isinstance(node, norms) else node


def _base(factor: float) -> Callable[[Any], Any]:
    return lambda node: replace(node, base=node.base * factor) if isinstance(node, Rotary) else node


def _not_scaled(node: Any) -> Any:
    return replace(node, scaling=None) if isinstance(node, Rotary) else node


def _activation(node: Any) -> Any:
    """GELU in another's place, and its approximation in its own (gelu_10 is GELU below 10)."""
    if isinstance(node, FeedForward | GatedFeedForward):
        gelu = function_of(node.activation) in ("gelu", "gelu_10")
        return replace(node, activation="gelu_tanh" if gelu else "gelu")
    return node


def _no_window(node: Any) -> Any:
    return replace(node, window=None) if isinstance(node, Attention | LatentAttention) else node


def _no_scale(node: Any) -> Any:
    return replace(node, scale=1.0) if isinstance(node, Attention | LatentAttention) else node


def _other_pairs(node: Any, kinds: Any = LatentAttention) -> Any:
    """Of latent attention; of any other, where q and k are projected apart, it is their rows in another order."""
    if isinstance(node, kinds) and isinstance(node.position, Rotary):
        other: Any = "adjacent" if node.position.pairs == "halves" else "halves"
        return replace(node, position=replace(node.position, pairs=other))
    return node


def _not_rotated(node: Any) -> Any:
    rotary = isinstance(node, Attention | LatentAttention) and isinstance(node.position, Rotary)
    return replace(node, position=None) if rotary else node


def _latent_not_normed(spec: ModelSpec, weights: Weights) -> Mutant:
    bare = spec.mapped(lambda node, _: replace(node, kv_norm=None) if isinstance(node, LatentAttention) else node)
    return bare, {name: each for name, each in weights.items() if ".kv_norm." not in name}


def _router_shifted(rows: int) -> Callable[[ModelSpec, Weights], Mutant | None]:
    """The router's rows, by as many experts."""

    def apply(spec: ModelSpec, weights: Weights) -> Mutant | None:
        names = [f"{path}.router.weight" for path, _ in _paths(spec, MixtureOfExperts)]
        return spec, {**weights, **{name: weights[name].roll(rows, dims=0) for name in names}}

    return apply


def _experts_taken(more: int) -> Callable[[Any], Any]:
    """So many more for each token, where there are as many."""

    def change(node: Any) -> Any:
        if isinstance(node, MixtureOfExperts) and 1 <= node.top_k + more <= node.experts:
            return replace(node, top_k=node.top_k + more)
        return node

    return change


def _weights_of_experts(node: Any) -> Any:
    """Where all experts are taken their weights sum to one anyway."""
    if isinstance(node, MixtureOfExperts) and node.top_k < node.experts:
        return replace(node, normalise=not node.normalise)
    return node


def _serial_for_parallel(node: Any) -> Any:
    if isinstance(node, Block) and node.parallel and all(each.norm is not None for each in node.sublayers):
        return replace(node, parallel=False)
    return node


def _other_kinds(back: bool) -> Callable[[ModelSpec, Weights], Mutant | None]:
    """Each layer's window and positions are those of the layer before it, the first one's of the last."""

    def apply(spec: ModelSpec, weights: Weights) -> Mutant | None:
        inner = [block.mixer("attention") for block in spec.blocks]
        attentions = [each for each in inner if isinstance(each, Attention | LatentAttention)]
        if len({(type(each), each.position is None) for each in attentions}) != 1 or len(attentions) < len(inner):
            return None
        others = attentions[1:] + attentions[:1] if back else attentions[-1:] + attentions[:-1]
        blocks = tuple(
            block.replaced(attention=replace(own, window=other.window, position=other.position))
            for block, own, other in zip(spec.blocks, attentions, others, strict=True)
        )
        return replace(spec, blocks=blocks), dict(weights)

    return apply


def _head_bias_dropped(spec: ModelSpec, weights: Weights) -> Mutant | None:
    if not isinstance(spec.head, Head) or not spec.head.bias:
        return None
    return spec, {**weights, "head.bias": torch.zeros_like(weights["head.bias"])}


# --- any field -------------------------------------------------------------------------------------------------------


def forgotten() -> list[Mutation]:
    """A mistake for every field of every kind that changes what it computes, as its record says it in words: that the
    field is as by default. What is written out in `MUTATIONS` under the same words is left out here.
    """
    fields: dict[str, dict[type[Component], str]] = {}
    written = {mutation.name for mutation in MUTATIONS}
    for kind in KINDS.values():
        for name in kind.choices():
            words = kind.forgotten.get(name, f"{name} of {kind.__name__} forgotten")
            fields.setdefault(words, {})[kind] = name
    return [
        Mutation(words, "", "the reference's " + " or ".join(sorted(set(found.values()))), _as_by_default(found))
        for words, found in fields.items()
        if words not in written
    ]


def _as_by_default(fields: Mapping[type[Component], str]) -> Callable[[ModelSpec, Weights], Mutant | None]:
    def change(node: Any, _: str) -> Any:
        name = fields.get(type(node))
        return node if name is None else replace(node, **{name: node.defaults()[name]})

    def apply(spec: ModelSpec, weights: Weights) -> Mutant | None:
        try:
            tree = spec.mapped(change)
            shapes = {each.name: each.shape for each in tree.parameters()}
        except ConfigError:  # without it there is no such tree
            return None
        if any(name not in weights or weights[name].shape != shape for name, shape in shapes.items()):
            return None
        return tree, {name: weights[name] for name in shapes}

    return apply


# --- code ------------------------------------------------------------------------------------------------------------


class MistakenRotary(Rotary, frozen=True, kw_only=True):
    """Rotary positions that code applies wrongly: to queries or to keys alone, or with both products of a pair added,
    which is rotate_half without its minus. No file holds it: `make_in_code` makes it in a module.
    """

    turn: Literal["queries", "keys", "added"]


del KINDS[MistakenRotary.__name__]  # no file says it
computes(MistakenRotary)(RotaryTurn)


def _in_code(turn: Literal["queries", "keys", "added"]) -> Callable[[ModelSpec, Weights], Mutant | None]:
    def change(node: Any) -> Any:
        if not isinstance(node, Attention) or not isinstance(node.position, Rotary):
            return node
        right = {name: getattr(node.position, name) for name in node.position.__struct_fields__}
        return replace(node, position=MistakenRotary(**right, turn=turn))

    return _field(change)


def make_in_code(model: nn.Module) -> None:
    """Have a module make the mistakes of code that its tree names."""
    turns: dict[str, Turn] = {
        "queries": lambda q, k, tables: (apply_rotary(q, tables), k),
        "keys": lambda q, k, tables: (q, apply_rotary(k, tables)),
        "added": lambda q, k, tables: (apply_rotary(q, _added(tables)), apply_rotary(k, _added(tables))),
    }
    for module in model.modules():
        if isinstance(module, AttentionModule) and isinstance(module.spec.position, MistakenRotary):
            module.turn = turns[module.spec.position.turn]


def _added(tables: RotaryTables) -> RotaryTables:
    """Tables whose sine is that of the second of each pair for both."""
    sin, half = tables.sin, tables.sin.shape[-1] // 2
    second = sin[..., 1::2].repeat_interleave(2, dim=-1) if tables.adjacent else sin[..., half:].repeat(1, 1, 1, 2)
    return tables._replace(sin=second)


# --- all of them -----------------------------------------------------------------------------------------------------


def _usual_values() -> Iterator[Mutation]:
    """Numbers and activations that others' models have, in the place of this one's."""
    for base in (1e4, 1e5, 5e5, 1e6, 1e7):

        def rebased(node: Any, base: float = base) -> Any:
            return replace(node, base=base) if isinstance(node, Rotary) else node

        yield Mutation(f"a RoPE base of {base:,.0f}", "attention mix", "the model's own RoPE base", _field(rebased))
    for eps in (1e-5, 1e-6, 1e-8, 1e-12):

        def with_eps(node: Any, eps: float = eps) -> Any:
            return replace(node, eps=eps) if isinstance(node, LayerNorm | RMSNorm) else node

        yield Mutation(f"norms with an eps of {eps:.0e}", "norm", "the model's own eps", _field(with_eps))
    for name in get_args(Activation):

        def activated(node: Any, name: Activation = name) -> Any:
            return replace(node, activation=name) if isinstance(node, FeedForward | GatedFeedForward) else node

        yield Mutation(f"the activation {name}", "feed-forward activation", "the model's own", _field(activated))


IN_PORTS: tuple[Mutation, ...] = (
    Mutation(
        "RoPE in the other pairs (neighbours or halves)",
        "attention mix",
        "the model's own pairs",
        _field(lambda node: _other_pairs(node, Attention | LatentAttention)),
    ),
    Mutation("no RoPE", "attention mix", "RoPE", _field(_not_rotated)),
)
"""Mistakes that in a checkpoint are others of `MUTATIONS`, or cannot be overlooked there."""

MUTATIONS: tuple[Mutation, ...] = (
    Mutation("q and k swapped", "attention q", "swapping q and k", _exchange("q_proj", "k_proj", Attention)),
    Mutation("k and v swapped", "attention k", "swapping k and v", _exchange("k_proj", "v_proj", Attention)),
    Mutation(
        "gate and up swapped",
        "feed-forward gate",
        "swapping gate and up",
        _exchange("gate_proj", "up_proj", GatedFeedForward),
    ),
    Mutation(
        "rope permute missing",
        "attention q",
        "undoing an interleaved RoPE layout",
        _rope_rows(_interleave),
        _rope_rows(_split_halves),
    ),
    Mutation(
        "rope permute done twice",
        "attention q",
        "undoing a RoPE permutation too many",
        _rope_rows(_split_halves),
        _rope_rows(_interleave),
    ),
    Mutation("RoPE turned the other way", "attention q", "turning RoPE the other way", _turned_back),
    Mutation("RoPE on queries alone", "attention mix", "RoPE on keys too", _in_code("queries"), in_code=True),
    Mutation("RoPE on keys alone", "attention mix", "RoPE on queries too", _in_code("keys"), in_code=True),
    Mutation(
        "RoPE adds where it should subtract",
        "attention mix",
        "the minus in rotate_half",
        _in_code("added"),
        in_code=True,
    ),
    Mutation(
        "key-value heads tiled, not repeated",
        "attention q",
        "repeating key-value heads in runs",
        _heads_in_other_groups(back=True),
        _heads_in_other_groups(back=False),
    ),
    Mutation(
        "query heads in other groups",
        "attention q",
        "re-grouping the query heads",
        _heads_in_other_groups(back=False),
        _heads_in_other_groups(back=True),
    ),
    Mutation(
        "wrong rope base", "attention mix", "a RoPE base ten times smaller", _field(_base(10.0)), _field(_base(0.1))
    ),
    Mutation("rope scaling dropped", "attention mix", "the RoPE scaling", _field(_not_scaled)),
    Mutation("norms swapped", "attention norm", "swapping a layer's two norms", _norms_exchanged),
    Mutation("QKV bias dropped", "attention q", "the q, k and v biases", _biases_dropped),
    Mutation("eps ten times as large", "norm", "norms' eps ten times smaller", _field(_eps(10.0)), _field(_eps(0.1))),
    Mutation("eps ten times as small", "norm", "norms' eps ten times larger", _field(_eps(0.1)), _field(_eps(10.0))),
    Mutation("another activation", "feed-forward activation", "another activation", _field(_activation)),
    Mutation("window ignored", "attention mix", "the sliding window", _field(_no_window)),
    Mutation(
        "kinds of layers shifted by one",
        "attention mix",
        "shifting the kinds of layers by one",
        _other_kinds(back=False),
        _other_kinds(back=True),
    ),
    Mutation("scores not scaled", "attention mix", "the scale of the scores", _field(_no_scale)),
    Mutation(
        "ALiBi slopes in descending order",
        "attention q",
        "ALiBi slopes in the paper's order",
        _sorted_slopes(back=False),
        _sorted_slopes(back=True),
    ),
    Mutation(
        "RoPE pairs of latent attention confused",
        "attention mix",
        "the other RoPE pairs of latent attention",
        _field(_other_pairs),
    ),
    Mutation("latent not normed", "attention k", "leaving out the latent's norm", _latent_not_normed),
    Mutation(
        "experts in other places",
        "feed-forward router",
        "shifting experts by one",
        _router_shifted(-1),
        _router_shifted(1),
    ),
    Mutation(
        "an expert a token too many",
        "feed-forward experts",
        "one expert a token less",
        _field(_experts_taken(1)),
        _field(_experts_taken(-1)),
    ),
    Mutation(
        "weights of experts normalised or not",
        "feed-forward experts",
        "normalising the weights of experts, or not",
        _field(_weights_of_experts),
    ),
    Mutation("tied head ignored", "head", "tying the head to the embedding", _head_not_tied),
    Mutation("head bias dropped", "head", "the head's bias", _head_bias_dropped),
    Mutation("another layer's tensor", "attention output projection", "exchanging layers 0 and 1", _other_layer),
    Mutation(
        "square matrix transposed", "attention output projection", "transposing a square matrix", _square_transposed
    ),
    Mutation(
        "positions off by one", "positions", "shifting positions by one", _positions_shifted(-1), _positions_shifted(1)
    ),
    Mutation(
        "parallel block run in series",
        "feed-forward norm",
        "running the block in parallel",
        _field(_serial_for_parallel),
    ),
)
