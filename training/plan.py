"""What a plan of `ablate` says: variants of one model, and the budget that each is run under.

    name = "positions"
    base = "sample:gpt2"         # a reference, or a table: a config.json's values
    tokens = 500_000             # of each run; or flops = 1e13; of a list each is run
    seeds = 3

    [[variant]]
    name = "RoPE"
    swap = ["position=rope"]     # as gptkit params --swap takes them; or recipe = "FILE", or model = "REFERENCE"

    [[variant]]
    name = "no biases"
    set = { "blocks.*.attention.*_bias" = false }

`set` and `remove` change the tree as gptkit.json has it, by patterns of paths; a table with a `type` takes the place of
what is there, and one without is laid over it. `include` begins with what other variants do.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import msgspec

from ..analysis.costs import forward_flops, training_flops
from ..architectures import architecture_of
from ..components import ModelSpec, from_json, to_json
from ..components.serialise import explained
from ..converter.files import read_small
from ..errors import ConfigError, InvalidInput, UsageError
from ..surgery.recipe import MOST_BYTES, in_messages, read_recipe
from ..surgery.registry import Step, steps_named
from ..surgery.shapes import steps_from, swapped
from .options import FURTHER, HELD_OUT, STEPS, settings_of, windows_of
from .train import longest, size_of, tree_of

_FOLDER = Path(__file__).parent / "plans"  # those that come along
_WIDTHS = 17, 31  # by which it is seen what a unit of a feed-forward takes


class _Variant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a variant is: the tree of `model`, else of the base; then what other variants do, swaps, and edits."""

    name: str
    comment: str = ""
    model: str | dict[str, Any] = ""
    include: tuple[str, ...] = ()
    recipe: str = ""
    swap: tuple[str, ...] = ()
    changes: dict[str, Any] = msgspec.field(name="set", default_factory=dict)
    remove: tuple[str, ...] = ()


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A plan as its file has it; what is left out is as `train` or `heal` have it. tokens, flops: the budget, one of
    the two. parameters: "equal" makes feed-forwards as wide as gives each variant the base's number of them. keep:
    leave the checkpoints of runs that have ended.
    """

    base: str | dict[str, Any]
    variant: tuple[_Variant, ...]
    name: str = ""
    description: str = ""
    how: Literal["train", "heal"] = "train"
    tokens: int | tuple[int, ...] | None = None
    flops: int | float | tuple[int | float, ...] | None = None
    parameters: Literal["", "equal"] = ""
    seeds: int = 3
    seed: int = 0
    data: tuple[str, ...] = ()
    held_out: float | str = HELD_OUT
    context: int | None = None
    batch: int | None = None
    rate: float | None = None
    warmup: float = 0.05
    decay: float | None = None
    clip: float = 1.0
    every: int | None = None
    keep: bool = False

    def windows(self, length: int) -> int:
        """How many sequences of a length a step has, of every run: what suits the smallest of the budgets."""
        steps = {"train": STEPS, "heal": FURTHER}[self.how]
        return windows_of(self.batch, length, min(_each(self.tokens), default=None), 1, steps)


def shipped() -> dict[str, Path]:
    """The plans that come along, by name."""
    return {path.stem: path for path in sorted(_FOLDER.glob("*.toml"))}


def read_plan(reference: str | Path) -> Plan:
    """A plan from a file, or one that comes along by its name. Raises UsageError where there is none, InvalidInput
    where it is none, with the key that is wrong.
    """
    known, path, where = shipped(), Path(reference), str(reference)
    if not path.is_file() and where not in known:
        raise UsageError(
            f"there is no file {where}, and gptkit has no plan with this name",
            f"Give a TOML file, or the name of a plan that comes with gptkit: {', '.join(known)}.",
        )
    try:
        data = tomllib.loads(read_small(path if path.is_file() else known[where], MOST_BYTES).decode())
        plan = msgspec.convert(data, Plan)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise InvalidInput(f"{where} cannot be read as TOML: {error}") from error
    except msgspec.ValidationError as error:
        raise InvalidInput(
            f"{where}: {_told(error)}", "The page 'Ablate a model' of the documentation lists all keys."
        ) from error
    for wrong in _wrong(plan):
        raise InvalidInput(f"{where}: {wrong}")
    return msgspec.structs.replace(plan, name=plan.name or path.stem)


_KINDS = {
    "int": "a whole number", "float": "a number", "str": "text", "bool": "true or false", "array": "a list",
    "object": "a table",
}  # fmt: skip


def _told(error: msgspec.ValidationError) -> str:
    """What msgspec says of a plan, in a person's words."""

    def words(kinds: str) -> str:
        return " or ".join(_KINDS.get(kind, kind) for kind in kinds.split(" | ") if kind != "null")

    told = explained(error, Plan).replace("$.", "")
    told = re.sub(r"^Object contains unknown field `(.*?)` - at `(.*?)`", r"\2: no key is called \1", told)
    told = re.sub(r"^Object contains unknown field `(.*?)`", r"no key is called \1", told)
    told = re.sub(r"^Object missing required field `(.*?)` - at `(.*?)`", r"\2: \1 is missing", told)
    told = re.sub(r"^Object missing required field `(.*?)`", r"\1 is missing", told)
    told = re.sub(r"^Invalid enum value ('.*?') - at `(.*?)`", r"\2 cannot be \1", told)
    expected = re.match(r"Expected `(.*?)`, got `(.*?)` - at `(.*?)`$", told)
    return f"{expected[3]} must be {words(expected[1])}, not {words(expected[2])}" if expected else told


def _wrong(plan: Plan) -> Iterator[str]:
    """What no type says of a plan, key by key."""
    names = [each.name for each in plan.variant]
    if not names:
        yield "variant is empty, but a plan needs at least one [[variant]]"
    for number, name in enumerate(["base", *names]):
        if slug_of(name) in [slug_of(each) for each in ["base", *names][:number]]:
            yield f"variant {name!r}: two variants have this name"
    for each in plan.variant:
        for other in each.include:
            if other not in names[: names.index(each.name)]:
                yield f"variant {each.name!r}: include names {other!r}, but no earlier variant has this name"
        if plan.how == "heal" and (each.changes or each.remove):
            yield f"variant {each.name!r}: the keys set and remove need how = 'train'; with 'heal', use swap or recipe"
        if not any((each.model, each.include, each.recipe, each.swap, each.changes, each.remove)):
            yield f"variant {each.name!r} changes nothing: give it swap, recipe, set, remove, include or model"
    if (plan.tokens is None) == (plan.flops is None):
        yield "a plan needs exactly one budget: tokens or flops"
    if plan.how == "heal" and plan.parameters:
        yield (
            "the key parameters does not work with how = 'heal', because the swaps determine the size of the variants"
        )
    least = {"seeds": 1, "seed": 0, "context": 1, "batch": 1, "every": 1, "tokens": 1, "flops": 1}
    for key, bound in least.items():
        if not all(bound <= each < math.inf for each in _each(getattr(plan, key))):
            yield f"{key} is {getattr(plan, key)}, but must be finite and at least {bound}"


def _each(value: Any) -> tuple[Any, ...]:
    return () if value is None else value if isinstance(value, tuple) else (value,)


def slug_of(name: str) -> str:
    """A variant's name in names of files."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "variant"


# --- trees ------------------------------------------------------------------------------------------------------------


def edited(spec: ModelSpec, changes: Mapping[str, Any], removed: Sequence[str] = ()) -> ModelSpec:
    """A tree in which nodes and fields are set and others removed, by patterns of their paths; see the module's text.
    Raises InvalidInput for a path that the tree does not have, ConfigError for a tree that is none.
    """
    tree = to_json(spec)
    for path, value in changes.items():
        for above, name in _places(tree, path):
            old, merged = above.get(name), isinstance(value, dict) and "type" not in value
            above[name] = {**old, **value} if merged and isinstance(old, dict) else value
    for path in removed:
        for above, name in _places(tree, path):
            if above.pop(name, None) is None:
                raise InvalidInput(f"remove = {path!r}: the model has no {name} at this path")
    try:
        return from_json(tree)
    except ConfigError as error:
        error.hint = None  # for files, which a newer gptkit may have written
        raise


def _places(tree: Any, path: str) -> list[tuple[dict[str, Any], str]]:
    """The nodes that a pattern means, each by the one above it and its name there; a name without a star may be new."""
    *above, last = path.split(".")
    nodes = [tree]
    for part in above:
        inside = (each.items() if isinstance(each, dict) else enumerate(each) for each in nodes)
        nodes = [node for each in inside for name, node in each if fnmatchcase(str(name), part)]
        nodes = [node for node in nodes if isinstance(node, dict | list)]
    tables = [node for node in nodes if isinstance(node, dict)]
    found = [(node, name) for node in tables for name in node if fnmatchcase(name, last) and name != "type"]
    found = found or [(node, last) for node in tables if "*" not in last]
    if not found:
        raise InvalidInput(
            f"the path {path!r} matches no field of the model",
            "Write paths as in gptkit.json, such as blocks.0.attention.kv_heads.",
        )
    return found


@dataclass(frozen=True)
class Arm:
    """The base or a variant as the plan means it: its tree, and the reference and the swaps that it is made of."""

    name: str
    comment: str
    spec: ModelSpec
    start: str | dict[str, Any]
    steps: tuple[Step, ...] = ()


def arms_of(plan: Plan, offline: bool, allow_pickle: bool) -> list[Arm]:
    """The base and every variant. Raises InvalidInput, SwapRefused and ConfigError, with the variant's name."""
    asked = {each.name: each for each in plan.variant}

    hint = 'Give a checkpoint, or choose how = "train".'

    def tree(model: str | dict[str, Any]) -> ModelSpec:
        if isinstance(model, dict):
            if plan.how == "heal":
                raise InvalidInput(
                    "how = 'heal' needs a base with weights, but this plan describes the base by a table of sizes", hint
                )
            return architecture_of(model).spec(model)
        found, scratch = tree_of(model, False, offline, allow_pickle)
        if scratch and plan.how == "heal":
            raise InvalidInput(f"how = 'heal' needs a base with weights, but {model} has none", hint)
        return found.spec

    def changed(before: Arm, each: _Variant) -> Arm:
        spec, start, steps = before.spec, before.start, before.steps
        if each.model:
            spec, start, steps = tree(each.model), each.model, ()
        for other in each.include:
            included = changed(Arm("", "", spec, start, steps), asked[other])
            spec, start, steps = included.spec, included.start, included.steps
        if each.recipe and read_recipe(each.recipe).heal is not None:
            hint = 'Remove that step: how = "heal" heals every variant.'
            raise InvalidInput(
                f"the recipe {each.recipe} has a heal step, which a plan does not allow: the plan itself "
                "trains all variants with one budget",
                hint,
            )
        if each.swap or each.recipe:
            own = [*steps_from((), each.recipe or None), *(step for text in each.swap for step in steps_from([text]))]
            spec, steps = swapped(spec, own, reference=each.name, offline=offline).spec, (*steps, *own)
        return Arm(each.name, each.comment, edited(spec, each.changes, each.remove), start, steps)

    with in_messages("base"):
        base = Arm("base", "", tree(plan.base), plan.base)
    found = [base]
    for each in plan.variant:
        with in_messages(f"variant {each.name!r}"):
            made = changed(base, each)
            if plan.parameters == "equal":
                made = replace(made, spec=_as_large(made.spec, size_of(base.spec)))
            if made.spec.vocab_size != base.spec.vocab_size:
                raise InvalidInput(
                    f"the variant's vocabulary has {made.spec.vocab_size:,} tokens, but the vocabulary of the "
                    f"base has {base.spec.vocab_size:,}",
                    "Use the same vocabulary for all variants: their losses per token are compared.",
                )
        found.append(made)
    return found


def _as_large(spec: ModelSpec, wanted: int) -> ModelSpec:
    """The tree with feed-forwards so wide that it has as many parameters as are wanted, or as near as units allow."""

    def wide(units: int) -> ModelSpec:
        return swapped(spec, steps_named("intermediate", str(units))).spec

    first, second = _WIDTHS
    least, more = (size_of(wide(units)) for units in _WIDTHS)
    a_unit = (more - least) / (second - first)
    if abs(wanted - size_of(spec)) <= a_unit / 2:
        return spec
    units = first + round((wanted - least) / a_unit)
    if units < 1:
        raise InvalidInput(
            f"the variant cannot have as few parameters as the base, {wanted:,}: even with the smallest "
            "feed-forward, it has more"
        )
    return wide(units)


# --- what is run -----------------------------------------------------------------------------------------------------


def called(variant: Arm) -> str:
    """What messages call a variant."""
    return f"variant {variant.name!r}"


@dataclass(frozen=True)
class Planned:
    """A variant at one of the plan's budgets: how many tokens that are, and FLOPs: of what is healed, those of the
    original's answers too.
    """

    variant: Arm
    budget: float
    tokens: int
    flops: int

    @property
    def slug(self) -> str:
        return f"{slug_of(self.variant.name)}-{self.tokens}"

    def __hash__(self) -> int:
        return hash(self.slug)


def planned(plan: Plan, variants: Sequence[Arm], length: int) -> list[Planned]:
    """What is to be run of each seed. Raises InvalidInput and UsageError for numbers that make no sense."""
    windows = plan.windows(length)
    how = {
        "rate": 1e-3 if plan.rate is None else plan.rate,
        "warmup": plan.warmup,
        "decay": plan.decay or 0.0,
        "clip": plan.clip,
    }
    settings_of(windows, length, 1, None, every=plan.every, accumulate=1, seed=plan.seed, **how)
    found = list[Planned]()
    for budget in _each(plan.flops) or _each(plan.tokens):
        for each in variants:
            if length > longest(each.spec):
                raise InvalidInput(
                    f"context is {length:,}, but the position table of {called(each)} has only "
                    f"{longest(each.spec):,} rows"
                )
            a_step = training_flops(each.spec, length, windows).dense
            if plan.how == "heal" and each is not variants[0]:  # the original answers first
                a_step += forward_flops(variants[0].spec, length, windows).dense
            steps = max(1, round(budget / a_step)) if plan.flops is not None else -(-budget // (windows * length))
            one = Planned(each, budget, steps * windows * length, steps * a_step)
            for other in found:
                if (other.variant, other.tokens) == (each, one.tokens):
                    raise InvalidInput(
                        f"the budgets {other.budget:,} and {budget:,} both come to {one.tokens:,} tokens for "
                        f"{called(each)}, because training takes whole steps",
                        f"A step has {windows * length:,} tokens. Choose budgets that differ by more than this.",
                    )
            found.append(one)
    return found
