"""recommend: components for a goal and a size, each with what it costs and the paper that speaks for it.

The choices are what is usually advised; the costs are counted, each choice exchanged alone in a GPT-2 of the same size
(`design.BASELINE`). Where they contradict the advice that is told, and the advice stands: the reader decides. Costs say
nothing of quality: for that there are the papers. No torch, no weights.
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

_LEAST, _MOST = 10**5, 10**12  # parameters
_CONTEXT, _LONG_CONTEXT = 4_096, 131_072  # tokens where none are asked for; of the goal "context"
_WINDOW = 4_096  # of Mistral (2310.06825)
_MOST_CONTEXT, _MOST_VOCABULARY = 2**27, 2**24
_TOKENS_EACH = 20  # tokens of text a parameter, about what is best for so many FLOPs (2203.15556)
_LARGE_HEAD = 0.1  # a head that would take more of the budget than this is tied


@dataclass(frozen=True)
class Goal:
    """What is aimed at: the design, in words whose way it is, and what else may be considered (as changes of it).

    tied None: the head is tied where one of its own would take more than `_LARGE_HEAD` of the budget.
    """

    what: str
    design: Design
    tied: bool | None
    considered: tuple[dict[str, Any], ...] = ()


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
"""Choices in the order of their effect; the first four are in the order of what is usually advised."""

_ASPECTS = {"placement": "norm", "positions": "position", "feed_forward": "feed-forward", "tied": "head"}
"""In which aspect of a tree a choice is seen, where that is not called as it is."""

_EXCHANGES: tuple[tuple[str, Any], ...] = (
    *(("feed_forward", "geglu"), ("feed_forward", "swiglu")),  # the first is llama's class with hidden_act "gelu"
    *(("positions", "rope"), ("attention", "gqa"), ("norm", "rmsnorm")),
    *(("block", "serial"), ("bias", False), ("window", None)),
)
"""What a family may have in place of a component, in the order in which they are tried: what changes least of how the
model computes comes first.
"""

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
    """What an exchange in the baseline changes: parameters, bytes of cache at the context (bf16), FLOPs per token."""

    parameters: int
    cache: int
    flops: int


@dataclass(frozen=True)
class ComponentChoice(Record):
    """A component: its kind, what it is in this model, why, and which paper says so.

    cost: what it changes in the baseline, where it is called `alone`, for other heads or widths than this model has.
    usual: whether the baseline has it too.
    """

    JSON = (
        "kind words why paper exchanged_alone.words=alone exchanged_alone.parameters=cost.parameters"
        " exchanged_alone.cache_bytes_at_context=cost.cache exchanged_alone.flops_a_token=cost.flops in_baseline=usual"
    )

    kind: str
    words: str
    why: str
    paper: Paper | None
    alone: str
    cost: _Delta
    usual: bool = False


@dataclass(frozen=True)
class Recommendation(Record, Shown):
    """A model for a goal and a budget.

    spec: the tree, in a family's own arithmetic where one has it; family: that one, None where only gptkit's own format
    holds it. baseline: GPT-2 of the same size, with a table of positions on top, which is large where contexts are long
    and would leave nothing else of a small model. Costs are at `context` tokens.
    """

    JSON = (
        "goal budget parameters context family costs=costs.figures baseline=baseline_costs.figures"
        " choices considered findings notes"
    )

    goal: str
    budget: int
    context: int
    shape: Shape
    spec: ModelSpec
    family: str | None
    costs: Costs
    baseline: ModelSpec
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
        """Whose way it is, or what its idea is: "Falcon's design"."""
        return GOALS[self.goal].what

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values; figures are integers. `spec` is what `gptkit params FILE.json` reads."""
        words = {each.name: {"words": each.words, "value": each.data} for each in aspects(self.spec)}
        return {"schema_version": 1, **super().as_json(), "aspects": words, "spec": to_json(self.spec)}


def recommend(
    goal: str, params: int | str, *, vocab: int | None = None, context: int | None = None, loadable: bool = False
) -> Recommendation:
    """Components for a goal and a number of parameters.

    Args:
        goal: quality, speed, memory, context, simplicity or balance.
        params: how many, from a hundred thousand to a trillion: 7_000_000_000, "7B", "1.5e9".
        vocab: tokens of the vocabulary; 32,000 unless told, and fewer below ten million parameters.
        context: tokens that the model is for; 4,096 unless told, 131,072 for the goal "context".
        loadable: where no transformers family has the goal's components together, exchange the one with which one does.

    Raises:
        UsageError: an unknown goal, a size that is none, or one that no shape comes near; loadable, and no exchange of
            one component would do.
    """
    if goal not in GOALS:
        raise UsageError(f"unknown goal {goal!r:.40}", f"Choose one of {', '.join(GOALS)}.")
    budget = parse_budget(params)
    vocab = usual_vocabulary(budget) if vocab is None else vocab
    length = context if context is not None else _LONG_CONTEXT if goal == "context" else _CONTEXT
    for what, value, most in (("--vocab", vocab, _MOST_VOCABULARY), ("--context", length, _MOST_CONTEXT)):
        if not 1 <= value <= most:
            raise UsageError(f"{what} must be from 1 to {most:,}, not {value:,}")
    design = _settled(GOALS[goal], budget, vocab, length)
    shape = fit(design, budget, vocab, length)
    family, spec = expressed(build(design, shape, vocab, length))
    if loadable and family is None:
        near = _nearest(design, shape, vocab, length)
        if near is None:
            raise UsageError(
                "no transformers class has this combination of components, not even with one of them exchanged",
                "Leave out --loadable: gptkit's own format can store any combination.",
            )
        design = near.design
        shape = fit(design, budget, vocab, length)
        family, spec = expressed(build(design, shape, vocab, length))
    # Its table of positions comes on top.
    base = Baseline(fit(replace(BASELINE, positions="rope"), budget, vocab, length), vocab, length)
    kinds = {kind: "pre" if kind == "placement" else getattr(design, kind) for kind in _ORDER}
    choices = tuple(_choice({k: value}, base, spec) for k, value in kinds.items() if (k, value) != ("window", None))
    considered = []  # what the design has not got; in a small model grouped heads may be one
    for changes in GOALS[goal].considered:
        kind, value = next(iter(changes.items()))
        if kinds[kind] != value and (kind != "window" or length > value):
            considered.append(_choice(changes, base))
    alone = [each.alone for each in choices]
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
        considered=tuple(each for each in considered if each.alone not in alone),
        findings=findings(goal, design, spec, base),
        notes=_notes(design, shape, family, spec, costs(spec, length)),
    )


def parse_budget(text: int | str) -> int:
    """A number of parameters: 7_000_000_000, "7B", "124M", "1.5e9", "124,439,808".

    Raises:
        UsageError: it is no number, or not from a hundred thousand to a trillion.
    """
    found = _NUMBER.fullmatch(str(text).strip())
    hint = "Give it as 7B, 124M, 1.5e9 or a plain number."
    if found is None:
        raise UsageError(f"{str(text)!r:.40} is not a number of parameters", hint)
    whole, part, power, unit = found.groups()
    scale = {"": 0, "k": 3, "m": 6, "b": 9, "g": 9, "t": 12}[unit.lower()] + int(power or 0)
    digits = re.sub("[,_]", "", whole)
    number: int = int(digits + (part or ".")[1:]) * 10**scale // 10 ** len((part or ".")[1:])
    if not _LEAST <= number <= _MOST:
        raise UsageError(f"the number of parameters must be from 100k to 1T, not {text}", hint)
    return number


_NUMBER = re.compile(r"(\d{1,3}(?:[,_]\d{3})+|\d{1,15})(\.\d{1,12})?(?:[eE]\+?(\d{1,2}))? ?([kKmMbBgGtT]?)", re.ASCII)


def _settled(goal: Goal, budget: int, vocab: int, context: int) -> Design:
    """The goal's design for this size: whether its head is tied; a window only where texts are longer than it."""
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
    """A design with another component of a kind, its tree in the arithmetic of the family that has it, and that."""

    kind: str
    design: Design
    spec: ModelSpec
    family: str


def _nearest(design: Design, shape: Shape, vocab: int, context: int) -> _Near | None:
    """The first of some exchanges after which a family has the design, at the same shape; None where none is enough."""
    for kind, value in _EXCHANGES:
        other = replace(design, **{kind: value})
        family, spec = expressed(build(other, shape, vocab, context))
        if other != design and family is not None:
            return _Near(kind, other, spec, family)
    return None


def _choice(changes: Mapping[str, Any], base: Baseline, spec: ModelSpec | None = None) -> ComponentChoice:
    """The first of some changes of the baseline, the others there before too; in a tree that has it, or considered."""
    kind, value = next(iter(changes.items()))
    own = {} if kind == "placement" else changes
    alone = _named(kind, value, base.tree(**own))
    words = alone if spec is None else _named(kind, value, spec)
    # Of few heads one group is all of them, and what is said of grouped heads is not about that.
    why, paper = _WHY[kind, "mqa" if words.startswith("MQA") else value]
    before, after = base.costs(**{name: each for name, each in own.items() if name != kind}), base.costs(**own)
    more = (after.parameters - before.parameters, after.held_bytes() - before.held_bytes())
    cost = _Delta(*more, after.total_flops - before.total_flops)
    usual = kind == "placement" or getattr(BASELINE, kind) == value
    return ComponentChoice(kind.replace("_", "-"), words, why, PAPERS.get(paper or ""), alone, cost, usual)


def _named(kind: str, value: Any, spec: ModelSpec) -> str:
    told = {each.name: each.words for each in aspects(spec)}
    words = told[_ASPECTS.get(kind, kind)]
    match kind:
        case "placement":
            return "pre-norm"
        case "norm":
            return words.removesuffix(", pre")
        case "feed_forward":
            return words.replace("plain", told["activation"])
        case "bias":
            return "biases" if value else "no biases"
        case "tied":
            return "tied head" if value else "separate head"
    return f"window {words}" if kind == "window" else words


def _notes(design: Design, shape: Shape, family: str | None, spec: ModelSpec, found: Costs) -> tuple[str, ...]:
    """Where it can be used, how much text it wants, and what to look at again."""
    vocab, notes = spec.vocab_size, []
    if family is None:
        notes.append(_only_here(design, _nearest(design, shape, vocab, found.context), spec, found))
    else:
        notes.append(f"transformers can load it as {ARCHITECTURES[family].hf_class}.")
    notes.append(
        f"Hidden size divided by layers is {shape.hidden / shape.layers:.0f}, as near to GPT-3's models of this size"
        f" ({PAPERS['gpt3']}) as a number of parameters within {100 * TOLERANCE:.0f}% allows; quality depends on it"
        f" only weakly ({PAPERS['scaling']})."
    )
    tokens = _TOKENS_EACH * found.parameters
    text = f"{tokens / 1e9:,.0f} billion" if tokens >= 10**10 else f"{tokens / 1e9:.2g} billion"
    text = text if tokens >= 10**8 else f"{tokens / 1e6:.2g} million"
    flops = f"{6.0 * found.parameters * tokens:.1e}".replace("e+", "e")
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
    if design.positions == "rope" and found.context > LOW_UP_TO:
        notes.append(
            f"The rotary base, {rotary_base(found.context):,.0f}, is large enough for {found.context:,} tokens"
            f" ({PAPERS['base']})."
        )
    return tuple(notes)


def _only_here(design: Design, near: _Near | None, spec: ModelSpec, found: Costs) -> str:
    """What to do with a tree that no family has: the exchange after which one does, and what that costs."""
    told = (
        "No transformers family has this combination of components. gptkit can store it in its own format, load it and"
        " generate with it, but `convert --to hf:auto` refuses it."
    )
    if near is None:
        return told
    other = costs(near.spec, found.context)
    more, cache = other.parameters - found.parameters, other.held_bytes() - found.held_bytes()
    flops = other.total_flops / found.total_flops - 1
    new, old = (
        _named(near.kind, getattr(way, near.kind), it) for way, it in ((near.design, near.spec), (design, spec))
    )
    kept = "the same cache" if cache == 0 else f"{cache / found.held_bytes():+.1%} of cache"
    return (
        f"{told} With {new} instead of {old}, {ARCHITECTURES[near.family].hf_class} can hold it, at"
        f" {more:+,} parameters ({more / found.parameters:+.1%}), {flops:+.1%} FLOPs per token and {kept}. --loadable"
        " chooses this variant, at the size that was asked for."
    )
