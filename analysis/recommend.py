"""The `recommend` command: components for a goal and a size, with their costs and a paper. No torch, no weights.

The components follow the usual advice. The costs of a component are those of GPT-2 at the same size
(`design.BASELINE`) with this component exchanged. If the costs contradict the advice, a remark says so, and the reader
decides. Costs say nothing about quality; the papers do.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..architectures import ARCHITECTURES, expressed
from ..components import ModelSpec, to_json
from ..display import Record, Shown
from ..errors import UsageError
from .aspects import aspects
from .costs import Costs, costs
from .design import (
    BASELINE,
    LOW_UP_TO,
    TOLERANCE,
    TRAINED,
    Baseline,
    Design,
    Shape,
    build,
    fit,
    rotary_base,
    usual_vocabulary,
)
from .findings import Remark, findings
from .papers import PAPERS, Paper

_LEAST, _MOST = 10**5, 10**12  # the smallest and the largest number of parameters
_CONTEXT, _LONG_CONTEXT = 4_096, 131_072  # the default number of tokens, and that for the goal "context"
_WINDOW = 4_096  # of Mistral (2310.06825)
_MOST_CONTEXT, _MOST_VOCABULARY = 2**27, 2**24
_TOKENS_EACH = 20  # training tokens per parameter, about the compute-optimal number (2203.15556)
_LARGE_HEAD = 0.1  # a head with a larger share of the budget is tied


@dataclass(frozen=True)
class Goal:
    """A goal such as "speed", with the components that `recommend` chooses for it."""

    what: str  # whose design it is ("LLaMA-2's design"), or its idea in words
    design: Design
    tied: bool | None  # whether the head is tied; None ties it if it would have more than `_LARGE_HEAD` of the budget
    considered: tuple[dict[str, Any], ...] = ()  # alternatives: changed fields of the design


_LLAMA = Design("rope", "rmsnorm", "swiglu", "gqa", "serial", bias=False)

GOALS: Mapping[str, Goal] = {
    "quality": Goal(
        "LLaMA-2's design", _LLAMA, None, ({"attention": "mla", "positions": "rope"}, {"block": "parallel"})
    ),
    "speed": Goal(
        "Falcon's design",
        Design("alibi", "layernorm", "gelu", "mqa", "parallel", bias=False),
        True,
        ({"norm": "rmsnorm"}, {"positions": "rope"}, {"attention": "gqa"}),
    ),
    "memory": Goal(
        "the smallest cache per token",
        replace(_LLAMA, attention="mqa", window=_WINDOW),
        True,
        ({"attention": "gqa"}, {"attention": "mla", "positions": "rope"}, {"tied": False}),
    ),
    "context": Goal(
        "trained on short texts, extended to long ones",
        replace(_LLAMA, positions="yarn"),
        None,
        ({"positions": "alibi"}, {"attention": "mqa"}, {"attention": "mla", "positions": "rope"}, {"window": _WINDOW}),
    ),
    "simplicity": Goal(
        "the fewest concepts",
        Design("alibi", "layernorm", "gelu", "mha", "serial", bias=True),
        True,
        ({"positions": "rope"}, {"bias": False}),
    ),
    "balance": Goal(
        "what helps most and costs nothing",
        replace(_LLAMA, feed_forward="gelu"),
        None,
        ({"feed_forward": "swiglu"}, {"attention": "mqa"}),
    ),
}

_ORDER = ("placement", "positions", "norm", "feed_forward", "attention", "block", "bias", "tied", "window")
"""The kinds of components in the order of the output. The usual advice lists the first four in this order."""

_ASPECTS = {"placement": "norm", "positions": "position", "feed_forward": "feed-forward", "tied": "head"}
"""For some kinds of components, the name of the aspect (see `aspects`) that describes them. Others have equal names."""

_EXCHANGES: tuple[tuple[str, Any], ...] = (
    *(("feed_forward", "geglu"), ("feed_forward", "swiglu")),  # the first is llama's class with hidden_act "gelu"
    *(("positions", "rope"), ("attention", "gqa"), ("norm", "rmsnorm")),
    *(("block", "serial"), ("bias", False), ("window", None)),
)
"""Changes of one component of a design, as (kind, new component), in the order in which they are tried.

If no transformers family has all components of a design, the first change after which a family has them is used."""

_WHY: Mapping[tuple[str, Any], tuple[str, str | None]] = {
    ("placement", "pre"): ("norms before attention and feed-forward: trains without a warm-up", "pre-norm"),
    ("positions", "learned"): ("a vector per position, added to the tokens", "transformer"),
    ("positions", "rope"): ("queries and keys rotated by position: relative, no table", "rope"),
    ("positions", "yarn"): ("rotary, trained short, then extended with little training", "yarn"),
    ("positions", "alibi"): ("a bias by distance: no table, works beyond its training", "alibi"),
    ("norm", "layernorm"): ("mean and variance; the norm that most code has", "layernorm"),
    ("norm", "rmsnorm"): ("subtracts no mean, and as good: 7 to 64% less time in its paper", "rmsnorm"),
    ("feed_forward", "gelu"): ("two matrices, four times as wide as the residual stream", "gelu"),
    ("feed_forward", "swiglu"): ("a gate on each unit: better at the same size", "glu"),
    ("feed_forward", "geglu"): ("a GELU as the gate of each unit: better at the same size", "glu"),
    ("attention", "mha"): ("keys and values of its own for each head", "transformer"),
    ("attention", "gqa"): ("heads share keys and values: near MHA's quality, MQA's speed", "gqa"),
    ("attention", "mqa"): ("one key and value for all heads: least to read, a little worse", "mqa"),
    ("attention", "mla"): ("keys and values from a small latent: above MHA in its paper", "mla"),
    ("block", "serial"): ("attention, then feed-forward", "transformer"),
    ("block", "parallel"): ("both at once: 15% faster training at scale", "palm"),
    ("bias", True): ("on each linear, as GPT-2 has them", None),
    ("bias", False): ("none in linears: large models train more stably", "palm"),
    ("tied", True): ("one table for input and output", "tied"),
    ("tied", False): ("a separate table, as in LLaMA", "llama"),
    ("window", _WINDOW): ("the cache stops growing there; layers above still see further", "mistral"),
}


@dataclass(frozen=True)
class _Delta:
    """How costs change if one component of the baseline (GPT-2) is replaced."""

    parameters: int
    cache: int  # bytes of a bf16 cache at the context
    flops: int  # FLOPs per token


@dataclass(frozen=True)
class ComponentChoice(Record):
    """A component that is recommended, or considered as an alternative."""

    JSON = (
        "kind words why paper exchanged_alone.words=alone exchanged_alone.parameters=cost.parameters"
        " exchanged_alone.cache_bytes_at_context=cost.cache exchanged_alone.flops_a_token=cost.flops in_baseline=usual"
    )

    kind: str  # the kind of component, such as "norm" or "attention"
    words: str  # the component as the recommended model has it
    why: str
    paper: Paper | None  # the source of `why`
    alone: str  # the component as it replaces that of the baseline, perhaps with other heads and widths
    cost: _Delta  # how this replacement changes the baseline's costs
    usual: bool = False  # whether the baseline has this component itself


@dataclass(frozen=True)
class Recommendation(Record, Shown):
    """A model for a goal and a budget. Its costs are at `context` tokens."""

    JSON = (
        "goal budget parameters context family costs=costs.figures baseline=baseline_costs.figures"
        " choices considered findings notes"
    )

    goal: str
    budget: int
    context: int
    shape: Shape
    spec: ModelSpec
    """The recommended model. Its rounding is that of transformers' code for `family`."""
    family: str | None
    """The transformers family that can load this model, or None if only gptkit's own format can store it."""
    costs: Costs
    baseline: ModelSpec
    """GPT-2 with about as many parameters, not counting its position embedding, which is large for long contexts."""
    baseline_costs: Costs
    choices: tuple[ComponentChoice, ...]
    considered: tuple[ComponentChoice, ...]
    findings: tuple[Remark, ...]
    notes: tuple[str, ...]

    def __repr__(self) -> str:
        return f"<a model for {self.goal}: {self.parameters:,} parameters, {len(self.spec.blocks):,} layers>"

    @property
    def parameters(self) -> int:
        return self.costs.parameters

    @property
    def way(self) -> str:
        """Return the idea of the design in words, such as "Falcon's design"."""
        return GOALS[self.goal].what

    def as_json(self) -> dict[str, Any]:
        """Return plain JSON values. Figures are integers. `gptkit params FILE.json` reads the value of the key spec."""
        words = {aspect.name: {"words": aspect.words, "value": aspect.data} for aspect in aspects(self.spec)}
        return {"schema_version": 1, **super().as_json(), "aspects": words, "spec": to_json(self.spec)}


def recommend(
    goal: str, params: int | str, *, vocab: int | None = None, context: int | None = None, loadable: bool = False
) -> Recommendation:
    """Recommend components for a goal and a number of parameters.

    Args:
        goal: quality, speed, memory, context, simplicity or balance.
        params: the number of parameters, from 100 thousand to a trillion: 7_000_000_000, "7B", "1.5e9".
        vocab: the size of the vocabulary; by default 32,000, and less for models below ten million parameters.
        context: the context in tokens; by default 4,096, and 131,072 for the goal "context".
        loadable: whether transformers must be able to load the model. If no transformers family has all components, one
            of them is replaced.

    Raises:
        UsageError: the goal is unknown, the size is invalid, or no shape has this size. With `loadable`, also if
            replacing one component is not enough.
    """
    if goal not in GOALS:
        raise UsageError(f"unknown goal {goal!r:.40}", f"Choose one of {', '.join(GOALS)}.")
    budget = parse_budget(params)
    vocab = usual_vocabulary(budget) if vocab is None else vocab
    length = context if context is not None else _LONG_CONTEXT if goal == "context" else _CONTEXT
    for option, value, most in (("--vocab", vocab, _MOST_VOCABULARY), ("--context", length, _MOST_CONTEXT)):
        if not 1 <= value <= most:
            raise UsageError(f"{option} must be from 1 to {most:,}, not {value:,}")
    design = _settled(GOALS[goal], budget, vocab, length)
    shape = fit(design, budget, vocab, length)
    family, spec = expressed(build(design, shape, vocab, length))
    if loadable and family is None:
        near = _nearest(design, shape, vocab, length)
        if near is None:
            raise UsageError(
                "no transformers class has this combination of components, even if gptkit exchanges one of them",
                "Leave out --loadable: gptkit's own format can store any combination.",
            )
        design = near.design
        shape = fit(design, budget, vocab, length)
        family, spec = expressed(build(design, shape, vocab, length))
    # The baseline's position embedding does not count towards the budget.
    base = Baseline(fit(replace(BASELINE, positions="rope"), budget, vocab, length), vocab, length)
    kinds = {kind: "pre" if kind == "placement" else getattr(design, kind) for kind in _ORDER}
    choices = tuple(_choice({k: value}, base, spec) for k, value in kinds.items() if (k, value) != ("window", None))
    considered = []  # only components that the design does not have; a small model may have one group of heads
    for changes in GOALS[goal].considered:
        kind, value = next(iter(changes.items()))
        if kinds[kind] != value and (kind != "window" or length > value):
            considered.append(_choice(changes, base))
    names = [choice.alone for choice in choices]
    return Recommendation(
        goal=goal,
        budget=budget,
        context=length,
        shape=shape,
        spec=spec,
        family=family,
        costs=costs(spec, length),
        baseline=base.tree(),
        baseline_costs=base.costs(),
        choices=choices,
        considered=tuple(choice for choice in considered if choice.alone not in names),
        findings=findings(goal, design, spec, base),
        notes=_notes(design, shape, family, spec, costs(spec, length)),
    )


def parse_budget(text: int | str) -> int:
    """Return a number of parameters from text: 7_000_000_000, "7B", "124M", "1.5e9", "124,439,808".

    Raises:
        UsageError: the text is no number from 100 thousand to a trillion.
    """
    match = _NUMBER.fullmatch(str(text).strip())
    hint = "Give it as 7B, 124M, 1.5e9 or a plain number."
    if match is None:
        raise UsageError(f"{str(text)!r:.40} is not a number of parameters", hint)
    whole, part, power, unit = match.groups()
    scale = {"": 0, "k": 3, "m": 6, "b": 9, "g": 9, "t": 12}[unit.lower()] + int(power or 0)
    digits = re.sub("[,_]", "", whole)
    number: int = int(digits + (part or ".")[1:]) * 10**scale // 10 ** len((part or ".")[1:])
    if not _LEAST <= number <= _MOST:
        raise UsageError(f"the number of parameters must be from 100k to 1T, not {text}", hint)
    return number


_NUMBER = re.compile(r"(\d{1,3}(?:[,_]\d{3})+|\d{1,15})(\.\d{1,12})?(?:[eE]\+?(\d{1,2}))? ?([kKmMbBgGtT]?)", re.ASCII)


def _settled(goal: Goal, budget: int, vocab: int, context: int) -> Design:
    """Return the design of a goal, adapted to a size.

    The head is tied if the goal or the size asks for it. A window or YaRN is left out if the context does not need it.
    """
    design = goal.design
    if design.window is not None and context <= design.window:
        design = replace(design, window=None)
    if design.positions == "yarn" and context <= TRAINED:
        design = replace(design, positions="rope")
    if goal.tied is not None:
        return replace(design, tied=goal.tied)
    tied = replace(design, tied=True)
    return replace(design, tied=vocab * fit(tied, budget, vocab, context).hidden > _LARGE_HEAD * budget)


@dataclass(frozen=True)
class _Near:
    """A design in which one component was replaced, so that a transformers family has all components."""

    kind: str  # the kind of component that was exchanged
    design: Design
    spec: ModelSpec
    family: str


def _nearest(design: Design, shape: Shape, vocab: int, context: int) -> _Near | None:
    """Replace one component of a design so that a transformers family has all components.

    The result is for the first change in `_EXCHANGES` that achieves this, or None if there is no such change.
    """
    for kind, value in _EXCHANGES:
        other = replace(design, **{kind: value})
        family, spec = expressed(build(other, shape, vocab, context))
        if other != design and family is not None:
            return _Near(kind, other, spec, family)
    return None


def _choice(changes: Mapping[str, Any], base: Baseline, spec: ModelSpec | None = None) -> ComponentChoice:
    """Return a component, with the difference in costs between the baseline with it and the baseline without it.

    Args:
        changes: changed fields of the baseline's design. The first field is the component. Other fields are changed in
            both models that are compared.
        base: the baseline.
        spec: the recommended model, if it has the component; None for an alternative.
    """
    kind, value = next(iter(changes.items()))
    exchanged = {} if kind == "placement" else changes
    alone = _named(kind, value, base.tree(**exchanged))
    words = alone if spec is None else _named(kind, value, spec)
    # A model with few heads may have one group of heads, which is MQA and not GQA.
    why, paper = _WHY[kind, "mqa" if words.startswith("MQA") else value]
    others = {name: other for name, other in exchanged.items() if name != kind}
    before, after = base.costs(**others), base.costs(**exchanged)
    more = (after.parameters - before.parameters, after.cache_bytes_at_context() - before.cache_bytes_at_context())
    cost = _Delta(*more, after.total_flops - before.total_flops)
    usual = kind == "placement" or getattr(BASELINE, kind) == value
    return ComponentChoice(kind.replace("_", "-"), words, why, PAPERS.get(paper or ""), alone, cost, usual)


def _named(kind: str, value: Any, spec: ModelSpec) -> str:
    by_name = {aspect.name: aspect.words for aspect in aspects(spec)}
    words = by_name[_ASPECTS.get(kind, kind)]
    match kind:
        case "placement":
            return "pre-norm"
        case "norm":
            return words.removesuffix(", pre")
        case "feed_forward":
            return words.replace("plain", by_name["activation"])
        case "bias":
            return "biases" if value else "no biases"
        case "tied":
            return "tied head" if value else "separate head"
    return f"window {words}" if kind == "window" else words


def _notes(design: Design, shape: Shape, family: str | None, spec: ModelSpec, own_costs: Costs) -> tuple[str, ...]:
    """Return notes on loading and training the model, and on possible problems.

    Args:
        design: the recommended design.
        shape: the hidden size and the number of layers of the model.
        family: the transformers family that can load the model, or None.
        spec: the model.
        own_costs: the model's costs.
    """
    vocab, notes = spec.vocab_size, []
    if family is None:
        notes.append(_only_here(design, _nearest(design, shape, vocab, own_costs.context), spec, own_costs))
    else:
        notes.append(f"transformers can load it as {ARCHITECTURES[family].hf_class}.")
    notes.append(
        f"Hidden size divided by layers is {shape.hidden / shape.layers:.0f}, as near to GPT-3's models of this size"
        f" ({PAPERS['gpt3']}) as a number of parameters within {100 * TOLERANCE:.0f}% allows; quality depends on it"
        f" only weakly ({PAPERS['scaling']})."
    )
    tokens = _TOKENS_EACH * own_costs.parameters
    text = f"{tokens / 1e9:,.0f} billion" if tokens >= 10**10 else f"{tokens / 1e9:.2g} billion"
    text = text if tokens >= 10**8 else f"{tokens / 1e6:.2g} million"
    flops = f"{6.0 * own_costs.parameters * tokens:.1e}".replace("e+", "e")
    notes.append(
        f"Training on {text} tokens, {_TOKENS_EACH} per parameter ({PAPERS['chinchilla']}), takes"
        f" {flops} FLOPs, 6 per parameter and token."
    )
    if design.positions == "alibi":
        notes.append("Its ALiBi is Falcon's, which is multiplied by the scale of the scores; the paper's is not.")
    if vocab % 64:
        notes.append(
            f"A vocabulary of {vocab + -vocab % 64:,}, a multiple of 64, is faster in matrix products than {vocab:,}."
        )
    if design.positions == "rope" and own_costs.context > LOW_UP_TO:
        notes.append(
            f"The rotary base, {rotary_base(own_costs.context):,.0f}, is large enough for {own_costs.context:,} tokens"
            f" ({PAPERS['base']})."
        )
    return tuple(notes)


def _only_here(design: Design, near: _Near | None, spec: ModelSpec, own_costs: Costs) -> str:
    """Return the note for a model that no transformers family can load.

    If replacing one component makes it loadable, the note names this component and how the costs change.

    Args:
        design: the recommended design.
        near: the design in which one component is replaced, or None if that is not enough.
        spec: the model of `design`.
        own_costs: the costs of this model.
    """
    note = (
        "No transformers family has this combination of components. gptkit can store it in its own format, load it and"
        " generate with it, but `convert --to hf:auto` refuses it."
    )
    if near is None:
        return note
    other = costs(near.spec, own_costs.context)
    more, cache = (
        other.parameters - own_costs.parameters,
        other.cache_bytes_at_context() - own_costs.cache_bytes_at_context(),
    )
    flops = other.total_flops / own_costs.total_flops - 1
    new, old = (
        _named(near.kind, getattr(variant, near.kind), tree)
        for variant, tree in ((near.design, near.spec), (design, spec))
    )
    change = "the same cache" if cache == 0 else f"{cache / own_costs.cache_bytes_at_context():+.1%} of cache"
    return (
        f"{note} With {new} instead of {old}, {ARCHITECTURES[near.family].hf_class} can hold it, at"
        f" {more:+,} parameters ({more / own_costs.parameters:+.1%}), {flops:+.1%} FLOPs per token and {change}."
        " --loadable chooses this variant, at the size that was asked for."
    )
