"""Make the mistakes that people make when they implement a model, as changes of its component tree or weights.

`verify` uses them to test itself, and to find the cause of a difference. A mutation makes one mistake in all layers, as
a wrong line of a weight map or a forgotten field would. `applicable` leaves out mutations without an effect on the
model (no bias to drop, no window to ignore). A component's class declares the mistakes that concern only it (`slips`,
`disorder`, `misread`, `forgotten`, `usual`). This module adds those that involve several components, and the inverse of
each mistake. An inverse is tried as a repair, unless it needs values that only the correct model has.

Some mistakes can only be made in code, such as RoPE on queries alone: no weights and no config describe them. For
these, this module has components that compute wrongly.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
from msgspec.structs import replace
from torch import Tensor

from ..components import KINDS, Component, CrossAttention, MixtureOfExperts, ModelSpec, Rotary
from ..components.positions import DIVIDED, PAIRED_HALVES, PAIRED_NEIGHBOURS
from ..errors import ConfigError
from ..modules.context import Context
from ..modules.cross_attention import CrossAttentionModule
from ..modules.feed_forward import MixtureOfExpertsModule
from ..modules.positions import RotaryTables, RotaryTurn, apply_rotary
from ..modules.registry import computes

Weights = Mapping[str, Tensor]  # all parameters of a model by gptkit's names
Mutant = tuple[ModelSpec, dict[str, Tensor]]
Apply = Callable[[ModelSpec, Weights], Mutant | None]
"""Makes a mistake. Returns the changed component tree and weights; None if this model cannot have it."""

_IN_PORTS = (PAIRED_NEIGHBOURS, PAIRED_HALVES, "no RoPE")
"""Wrong values (`Component.slips`) that are only tried on a user's port. In a checkpoint, another mistake covers
them, or every probe detects them.
"""
_BACK = ", the other way round"


@dataclass(frozen=True)
class Mutation:
    """One deliberate mistake, made in a model's component tree or weights, and the repair of this mistake."""

    name: str  # the mistake in words
    repair: str  # the repair in words, for a diagnosis
    apply: Apply  # makes the mistake
    undo: Apply | None = None  # None if `apply` undoes itself, or if only the reference has the lost values
    in_code: bool = False  # whether no checkpoint can contain it, so that there is nothing to repair in one

    def mend(self, spec: ModelSpec, weights: Weights) -> Mutant | None:
        """Apply the repair of this mistake to a model.

        Return the repaired component tree and weights, or None if the repair is not possible.
        """
        return (self.undo or self.apply)(spec, weights)


def applicable(
    spec: ModelSpec, weights: Weights, wanted: Callable[[str], bool] = lambda _: True
) -> Iterator[tuple[Mutation, Mutant]]:
    """Yield the mutations that have an effect on this model, each with the changed component tree and weights.

    `wanted` selects mutations by name.
    """
    for mutation in (*MUTATIONS, *_OF_TWO_STACKS, *forgotten(), *_declared(spec)):
        mutant = mutation.apply(spec, weights) if wanted(mutation.name) else None
        if mutant is not None and _changed(spec, weights, mutant):
            yield mutation, mutant


def of_ports(spec: ModelSpec) -> list[tuple[str, Apply]]:
    """Return every mistake that a user's implementation of this model may contain: its name, and a function that makes
    it.

    These are wrong values that are common in other models, mistakes of code, the mutations, and the inverses of
    mutations. If two mistakes have the same effect, the simpler one comes first.
    """
    mistakes = [(words, _valued(fields)) for words, fields in _mistaken_fields(usual=True).items()]
    mistakes += [(name, _slipped(name)) for name in _IN_PORTS]
    mistakes += [
        (mutation.name, mutation.apply) for mutation in (*MUTATIONS, *_OF_TWO_STACKS, *forgotten(), *_declared(spec))
    ]
    return [*mistakes, *((mutation.name + _BACK, mutation.undo) for mutation in MUTATIONS if mutation.undo is not None)]


def mutated(apply: Apply, spec: ModelSpec, weights: Weights) -> Mutant | None:
    """Make a mistake in a model. Return the changed component tree and weights, or None if nothing changes."""
    mutant = apply(spec, weights)
    return None if mutant is None or not _changed(spec, weights, mutant) else mutant


def _changed(spec: ModelSpec, weights: Weights, mutant: Mutant) -> bool:
    """Return whether a mutated model differs from the original component tree and weights."""
    return mutant[0] != spec or any(not torch.equal(weights[name], tensor) for name, tensor in mutant[1].items())


def _exchanged(pairs: Callable[[ModelSpec], Iterable[tuple[str, str]]]) -> Apply:
    """Return a mistake that exchanges the weights and biases of two modules, for several pairs of modules.

    `pairs` returns the names of the modules of a component tree, two at a time. Pairs that the model does not have are
    skipped. If the sizes differ (grouped heads), only the rows that both have are exchanged.
    """

    def apply(spec: ModelSpec, weights: Weights) -> Mutant:
        new = dict(weights)
        for first, second in pairs(spec):
            for a, b in ((f"{first}.{suffix}", f"{second}.{suffix}") for suffix in ("weight", "bias")):
                if a in weights and b in weights:
                    rows = min(weights[a].shape[0], weights[b].shape[0])
                    new[a] = torch.cat([weights[b][:rows], weights[a][rows:]])
                    new[b] = torch.cat([weights[a][:rows], weights[b][rows:]])
        return spec, new

    return apply


def _projections(first: str, second: str) -> Apply:
    """Return a mistake that exchanges two projections ("q_proj" and "k_proj") in every component that has both."""
    return _exchanged(lambda spec: [(f"{path}.{first}", f"{path}.{second}") for path, _ in spec.nodes()])


def _two_norms(spec: ModelSpec) -> Iterator[tuple[str, str]]:
    """Yield, for each layer with at least two pre-norms, the names of the first two."""
    for layer, block in enumerate(spec.blocks):
        norms = [f"blocks.{layer}.{part.mixer.slot}_norm" for part in block.sublayers if part.norm is not None]
        if len(norms) > 1:
            yield norms[0], norms[1]


def _other_layer(spec: ModelSpec, weights: Weights) -> Mutant | None:
    """Exchange an output projection of the first layer with the same projection of the next layer that has it."""
    names: dict[str, list[str]] = {}
    for parameter in spec.parameters():
        if parameter.layer is not None and parameter.role == "writes":
            names.setdefault(parameter.name.removeprefix(f"blocks.{parameter.layer}."), []).append(parameter.name)
    a, b = next((tensors[:2] for tensors in names.values() if len(tensors) > 1), ("", ""))
    if not a or weights[a].shape != weights[b].shape:
        return None
    return spec, {**weights, a: weights[b], b: weights[a]}


def _square_transposed(spec: ModelSpec, weights: Weights) -> Mutant:
    """Transpose the output projections of attention that are square."""
    new = dict(weights)
    for parameter in spec.parameters():
        rows, *columns = parameter.shape
        if parameter.role == "writes" and ".attention." in parameter.name and columns == [rows]:
            new[parameter.name] = weights[parameter.name].t()
    return spec, new


_disorder = lru_cache(maxsize=64)(lambda node: node.disorder())


def _disordered(name: str, back: bool = False) -> Apply:
    """Return a mistake that permutes the rows of weights, or the columns of output projections.

    The components declare the permutation under `name` (`Component.disorder`). With `back`, the inverse is applied.
    """

    def apply(spec: ModelSpec, weights: Weights) -> Mutant:
        new = dict(weights)
        for path, node in spec.nodes():
            for module, order in _disorder(node).get(name, {}).items():
                rows = torch.tensor(order).argsort() if back else torch.tensor(order)
                full = f"{path}.{module}".rstrip(".")
                parameter = node.weights().get(f"{module}.weight")
                if parameter is not None and parameter.role == "writes":
                    new[f"{full}.weight"] = weights[f"{full}.weight"][:, rows]
                    continue
                parts = (f"{full}.weight", f"{full}.bias")
                new |= {part: weights[part][rows] for part in parts if part in weights}
        return spec, new

    return apply


def _head_not_tied(spec: ModelSpec, weights: Weights) -> Mutant | None:
    """Give a tied head random weights of its own, as an implementation does that forgets to tie the head."""
    if spec.head is None or not spec.head.tied:
        return None
    table = weights["embedding.weight"]
    # On the meta device only the shape matters, and a table may be large.
    noise = table if table.is_meta else torch.randn(table.shape, generator=torch.Generator().manual_seed(0)).to(table)
    return replace(spec, head=replace(spec.head, tied=False)), {**weights, "head.weight": noise * 0.02}


def _slipped(name: str) -> Apply:
    """Return a mistake that sets a component's field to a wrong value, as components declare under `name`.

    See `Component.slips`. Weights that the changed model does not have are dropped.
    """

    def apply(spec: ModelSpec, weights: Weights) -> Mutant:
        tree: ModelSpec = spec.mapped(lambda node, _: node.slips().get(name, node))
        names_in_tree = {parameter.name for parameter in tree.parameters()}
        return tree, {name: weight for name, weight in weights.items() if name in names_in_tree}

    return apply


def _misread(name: str) -> Apply:
    """Return a mistake that reads parameters in a wrong way, as components declare under `name`
    (`Component.misread`).
    """

    def apply(spec: ModelSpec, weights: Weights) -> Mutant:
        new = dict(weights)
        for path, node in spec.nodes():
            if name in (readings := node.misread()):
                originals = {parameter: weights[f"{path}.{parameter}"] for parameter in node.weights()}
                new |= {f"{path}.{parameter}": tensor for parameter, tensor in readings[name](originals).items()}
        return spec, new

    return apply


_OF_KINDS = ("window", "chunked", "position", "temperature", "q_norm", "k_norm", "norm_order")


def _other_kinds(back: bool) -> Apply:
    """Return a mistake that gives each attention layer the window and positions of the previous attention layer.

    With `back`, it gives those of the next attention layer.
    """

    def apply(spec: ModelSpec, weights: Weights) -> Mutant | None:
        attending = {layer: block.mixer("attention") for layer, block in enumerate(spec.blocks)}
        attending = {layer: mixer for layer, mixer in attending.items() if mixer is not None}
        mixers: list[Any] = [*attending.values()]
        if not all(hasattr(mixer, "window") and hasattr(mixer, "position") for mixer in mixers):
            return None
        if len({type(mixer) for mixer in mixers}) != 1:
            return None
        sources = mixers[1:] + mixers[:1] if back else mixers[-1:] + mixers[:-1]
        names = [name for name in _OF_KINDS if hasattr(mixers[0], name)]
        fields = [{name: getattr(source, name) for name in names} for source in sources]
        try:
            new = [replace(mixer, **values) for mixer, values in zip(mixers, fields, strict=True)]
            if any(mixer.weights() != other.weights() for mixer, other in zip(mixers, new, strict=True)):
                return None
            changed = dict(zip(attending, new, strict=True))
            blocks = (
                block.replaced(attention=changed[i]) if i in changed else block for i, block in enumerate(spec.blocks)
            )
            return replace(spec, blocks=tuple(blocks)), dict(weights)
        except ConfigError:  # the positions of one kind need another head width than the other kind has
            return None

    return apply


_Fields = dict[type[Component], tuple[str, Any]]  # by component class, a field and its wrong value


def _mistaken_fields(usual: bool = False) -> dict[str, _Fields]:
    """Return mistakes by name. A mistake gives fields of components a wrong value: class -> (field, value).

    A wrong value is the field's default, as if the field were forgotten; a bias is removed. With `usual`, the wrong
    values are those that are common in other models, as the components declare them.
    """
    mistaken: dict[str, _Fields] = {}
    for kind in KINDS.values():
        slips = {name: kind.forgotten.get(name, f"{name} of {kind.__name__} forgotten") for name in kind.choices()}
        defaults = {name: False if name == "bias" else value for name, value in kind.choices().items()}
        mistakes = [(slips[name], name, value) for name, value in defaults.items()]
        if usual:
            mistakes = [(words.format(v), name, v) for name, (words, values) in kind.usual.items() for v in values]
        for words, name, value in mistakes:
            mistaken.setdefault(words, {})[kind] = (name, value)
    return mistaken


def forgotten() -> list[Mutation]:
    """Return the mutations that reset one field to its default value, except those in `MUTATIONS`."""
    known, mistaken = {mutation.name for mutation in MUTATIONS}, _mistaken_fields()
    names = {words: " or ".join(sorted({name for name, _ in fields.values()})) for words, fields in mistaken.items()}
    return [Mutation(w, f"the reference's {names[w]}", _valued(mistaken[w])) for w in mistaken if w not in known]


def _declared(spec: ModelSpec) -> list[Mutation]:
    """Return the mutations that components of this model declare and `MUTATIONS` does not list, such as a plugin's."""
    nodes = dict.fromkeys(spec.components())
    makers = {name: _slipped for node in nodes for name in node.slips() if not name.endswith(_BACK)}
    makers |= {name: _disordered for node in nodes for name in _disorder(node)}
    makers |= {name: _misread for node in nodes for name in node.misread()}
    known = {*_IN_PORTS, *(mutation.name for mutation in MUTATIONS)}
    return [Mutation(name, f"undoing: {name}", apply(name)) for name, apply in makers.items() if name not in known]


def _forgotten(words: str) -> Apply:
    """Return a mistake that resets a field to its default. `words` names the mistake: "window ignored"."""
    return lambda spec, weights: _valued(_mistaken_fields()[words])(spec, weights)


def _valued(fields: _Fields) -> Apply:
    """Return a mistake that sets fields of components to wrong values: class -> (field, value).

    The mistake returns None if the model cannot have these values, or would need additional weights or other shapes.
    """

    def change(node: Any, _: str) -> Any:
        name, value = fields.get(type(node), (None, None))
        return node if name is None else replace(node, **{name: value})

    def apply(spec: ModelSpec, weights: Weights) -> Mutant | None:
        try:
            tree = spec.mapped(change)
            parameters = list(tree.parameters())
        except ConfigError:
            return None
        shapes = {parameter.name: parameter.shape for parameter in parameters}
        for parameter in parameters:  # a smaller table gets the first rows
            rows = weights.get(parameter.name)
            if parameter.role == "table" and rows is not None and rows.shape[0] > parameter.shape[0]:
                weights = {**weights, parameter.name: rows[: parameter.shape[0]]}
        if any(name not in weights or weights[name].shape != shape for name, shape in shapes.items()):
            return None
        unused = weights.keys() - shapes.keys()
        if unused and all(value is False for _, value in fields.values()) and all(n.endswith(".bias") for n in unused):
            return spec, {**weights, **{name: torch.zeros_like(weights[name]) for name in unused}}
        return tree, {name: weights[name] for name in shapes}

    return apply


class _MistakenRotary(Rotary, frozen=True, kw_only=True):
    """Rotary positions with a mistake: applied to queries or keys only, or without the minus of rotate_half."""

    mistake: Literal["queries", "keys", "added"]


del KINDS[_MistakenRotary.__name__]  # no file can contain it


@computes(_MistakenRotary)
class _MistakenTurn(RotaryTurn):
    """The torch computation of `_MistakenRotary`."""

    @staticmethod
    def both(rotary: _MistakenRotary, q: Tensor, k: Tensor, tables: RotaryTables) -> tuple[Tensor, Tensor]:
        """Return queries and keys after the mistaken rotation."""
        if rotary.mistake == "added":  # both members of a pair use the sine of the second one
            sin, half = tables.sin, tables.sin.shape[-1] // 2
            second = sin[..., 1::2].repeat_interleave(2, -1) if tables.adjacent else sin[..., half:].repeat(1, 1, 1, 2)
            tables = tables._replace(sin=second)
        return (
            q if rotary.mistake == "keys" else apply_rotary(q, tables),
            k if rotary.mistake == "queries" else apply_rotary(k, tables),
        )


class _MistakenMixture(MixtureOfExperts, frozen=True, kw_only=True):
    """A mixture of experts that makes a mistake: the bias for choosing experts is also used in the routing weights."""


del KINDS[_MistakenMixture.__name__]


@computes(_MistakenMixture)
class _MistakenRouting(MixtureOfExpertsModule):
    """The torch module of `_MistakenMixture`."""

    def weighing(self, scores: Tensor) -> Tensor:
        """Return the scores from which routing weights are computed, wrongly with the bias for choosing experts."""
        return scores if self.choice is None else self.choice(scores)


def _choice_weighs(spec: ModelSpec, weights: Weights) -> Mutant:
    """Make the mistake of `_MistakenMixture` in all mixtures of experts that have such a bias."""

    def change(node: Any, _: str) -> Any:
        fields = {name: getattr(node, name) for name in MixtureOfExperts.__struct_fields__ if hasattr(node, name)}
        return _MistakenMixture(**fields) if getattr(node, "choice_bias", False) else node

    return spec.mapped(change), dict(weights)


class _MistakenCross(CrossAttention, frozen=True, kw_only=True):
    """A cross-attention that makes a mistake: keys and values come from the decoder's text, not the
    encoder's output.
    """


del KINDS[_MistakenCross.__name__]


@computes(_MistakenCross)
class _MistakenSource(CrossAttentionModule):
    """The torch module of `_MistakenCross`."""

    def source(self, x: Tensor, context: Context) -> Tensor:  # noqa: ARG002
        """Return the decoder's hidden states instead of the encoder's."""
        return x


def _own_keys(spec: ModelSpec, weights: Weights) -> Mutant | None:
    """Make the mistake of `_MistakenCross` in all cross-attentions. Return None if the model has no encoder."""

    def change(node: Any, _: str) -> Any:
        if getattr(node, "slot", "") != CrossAttention.slot:
            return node
        return _MistakenCross(**{name: getattr(node, name) for name in CrossAttention.__struct_fields__})

    return None if spec.encoder is None else (spec.mapped(change), dict(weights))


def _in_code(mistake: Literal["queries", "keys", "added"]) -> Apply:
    """Return a function that makes the mistake of `_MistakenRotary` in all attentions with rotary positions."""

    def change(node: Any, _: str) -> Any:
        if "no RoPE" not in node.slips():  # an attention that turns queries and keys
            return node
        fields = {name: getattr(node.position, name) for name in Rotary.__struct_fields__}
        return replace(node, position=_MistakenRotary(**fields, mistake=mistake))

    return lambda spec, weights: (spec.mapped(change), dict(weights))


def _once(make: Callable[[str], Apply], name: str, repair: str) -> Mutation:
    """Return a mutation that is its own inverse.

    Args:
        make: returns the function that makes the mistake, given its name.
        name: the name of the mistake.
        repair: the words for its repair in messages.
    """
    return Mutation(name, repair, make(name))


def _both_ways(name: str, repair: str, inverse: str = "") -> Mutation:
    """Return a mutation that sets a wrong value that components declare as `name` (`Component.slips`).

    Args:
        name: the name of the mistake.
        repair: the words for its repair in messages.
        inverse: the name of the opposite mistake; by default `name` with ", the other way round" at the end.
    """
    return Mutation(name, repair, _slipped(name), _slipped(inverse or name + _BACK))


def _reordered(name: str, repair: str, disorder: str = "", back: bool = False) -> Mutation:
    """Return a mutation that permutes rows of weights, with its inverse.

    Components declare the permutation under `disorder`, or under `name` by default. With `back`, the mistake is the
    inverse permutation.
    """
    return Mutation(name, repair, _disordered(disorder or name, back), _disordered(disorder or name, not back))


LARGE, SMALL = "eps ten times as large", "eps ten times as small"
_PERMUTE, GROUPS = "rope permute missing", "query heads in other groups"

MUTATIONS: tuple[Mutation, ...] = (
    Mutation("q and k swapped", "swapping q and k", _projections("q_proj", "k_proj")),
    Mutation("k and v swapped", "swapping k and v", _projections("k_proj", "v_proj")),
    Mutation("gate and up swapped", "swapping gate and up", _projections("gate_proj", "up_proj")),
    _reordered(_PERMUTE, "undoing an interleaved RoPE layout"),
    _reordered("rope permute done twice", "undoing a RoPE permutation too many", _PERMUTE, back=True),
    _once(_disordered, "RoPE turned the other way", "turning RoPE the other way"),
    Mutation("RoPE on queries alone", "RoPE on keys too", _in_code("queries"), in_code=True),
    Mutation("RoPE on keys alone", "RoPE on queries too", _in_code("keys"), in_code=True),
    Mutation("RoPE adds where it should subtract", "the minus in rotate_half", _in_code("added"), in_code=True),
    _reordered("key-value heads tiled, not repeated", "repeating key-value heads in runs", GROUPS, back=True),
    _reordered(GROUPS, "re-grouping the query heads"),
    _both_ways("wrong rope base", "a RoPE base ten times smaller"),
    _once(_forgotten, "rope scaling dropped", "leaving out the RoPE scaling"),
    _both_ways(DIVIDED, "multiplying RoPE positions by 2"),
    Mutation("norms swapped", "swapping a layer's two norms", _exchanged(_two_norms)),
    _once(_forgotten, "QKV bias dropped", "leaving out the q, k and v biases"),
    _both_ways(LARGE, "norms' eps ten times smaller", SMALL),
    _both_ways(SMALL, "norms' eps ten times larger", LARGE),
    _once(_slipped, "another activation", "another activation"),
    _once(_forgotten, "window ignored", "leaving out the sliding window"),
    Mutation(
        "kinds of layers shifted by one",
        "shifting the kinds of layers by one",
        _other_kinds(back=False),
        _other_kinds(back=True),
    ),
    _once(_slipped, "scores not scaled", "the scale of the scores"),
    _reordered("ALiBi slopes in descending order", "ALiBi slopes in the paper's order", back=True),
    _once(_slipped, "RoPE pairs of latent attention confused", "the other RoPE pairs of latent attention"),
    _once(_forgotten, "latent not normed", "leaving out the latent's norm"),
    _reordered("experts in other places", "shifting experts by one"),
    _both_ways("an expert a token too many", "one expert a token less"),
    _once(_slipped, "weights of experts normalised or not", "normalising the weights of experts, or not"),
    Mutation(
        "bias of the choice in the weights of experts",
        "weighing experts without the bias of their choice",
        _choice_weighs,
        in_code=True,
    ),
    Mutation("tied head ignored", "tying the head to the embedding", _head_not_tied),
    _once(_forgotten, "head bias dropped", "leaving out the head's bias"),
    Mutation("another layer's tensor", "exchanging layers 0 and 1", _other_layer),
    Mutation("square matrix transposed", "transposing a square matrix", _square_transposed),
    _reordered("positions off by one", "shifting positions by one"),
    _once(_slipped, "parallel block run in series", "running the block in parallel"),
)

_OF_TWO_STACKS: tuple[Mutation, ...] = (
    Mutation(
        "keys of the decoder's own text in cross-attention",
        "making keys and values of the encoder's output",
        _own_keys,
        in_code=True,
    ),
    Mutation(
        "tables of biases exchanged between encoder and decoder",
        "exchanging the tables of biases of encoder and decoder",
        _exchanged(lambda _: [("relative_bias", "encoder.relative_bias")]),
    ),
    Mutation(
        "tables of positions exchanged between encoder and decoder",
        "exchanging the tables of positions of encoder and decoder",
        _exchanged(lambda _: [("positions", "encoder.positions")]),
    ),
)
"""Mistakes in a model with an encoder and a decoder."""
