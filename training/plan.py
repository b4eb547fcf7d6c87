"""Read the plan of an ablation: variants of one model, and the training budget of every run.

    name = "positions"
    base = "sample:gpt2"         # a model's name or path, or a table with the values of a config.json
    tokens = 500_000             # per run; or flops = 1e13; a list runs every variant at every budget
    seeds = 3

    [[variant]]
    name = "RoPE"
    swap = ["position=rope"]     # as in gptkit params --swap; or recipe = "FILE", or model = "REFERENCE"

    [[variant]]
    name = "no biases"
    set = { "blocks.*.attention.*_bias" = false }

`set` and `remove` change the model's architecture, in the form that gptkit.json stores (nested tables of components).
They do so at all paths that match a pattern. A table with a `type` replaces the component at the path, and a table
without one changes only the fields that it names. A variant with `include` starts with the changes of the variants that
are named there.
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
from ..converter.opening import Opening
from ..errors import ConfigError, InvalidInput, UsageError
from ..surgery.recipe import MOST_BYTES, in_messages, read_recipe
from ..surgery.registry import Step, steps_named
from ..surgery.shapes import steps_from, swapped
from .options import FURTHER, HELD_OUT, STEPS, settings_of, windows_of
from .train import size_of, tree_of

_FOLDER = Path(__file__).parent / "plans"  # the plans that come with gptkit
_WIDTHS = 17, 31  # two widths of the feed-forwards, from which the number of parameters per unit is measured


class _Variant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A variant as the plan describes it. The changes are made in the order of the fields."""

    name: str
    comment: str = ""
    model: str | dict[str, Any] = ""  # the model to start from, instead of the base
    include: tuple[str, ...] = ()  # the names of earlier variants whose changes this one starts with
    recipe: str = ""  # a file with swaps
    swap: tuple[str, ...] = ()  # swaps as on the command line, such as "position=rope"
    changes: dict[str, Any] = msgspec.field(name="set", default_factory=dict)  # path pattern: new value
    remove: tuple[str, ...] = ()  # path patterns of the fields to remove


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a plan's file. The fields without a comment mean the same as in `RunOptions`."""

    base: str | dict[str, Any]  # the model that the variants are compared with: a reference, or config.json values
    variant: tuple[_Variant, ...]
    name: str = ""  # by default the name of the file
    description: str = ""
    how: Literal["train", "heal"] = "train"  # whether runs train from random weights, or heal variants of the base
    tokens: int | tuple[int, ...] | None = None  # the budgets in tokens; a plan has either `tokens` or `flops`
    flops: int | float | tuple[int | float, ...] | None = None  # the budgets in FLOPs
    parameters: Literal["", "equal"] = ""  # "equal" resizes the feed-forwards until variants are as large as the base
    seeds: int = 3  # the number of runs of a variant at a budget
    seed: int = 0  # the seed of the first run
    data: tuple[str, ...] = ()  # the training texts, or one folder of tokens
    held_out: float | str = HELD_OUT
    context: int | None = None
    batch: int | None = None
    rate: float | None = None
    warmup: float = 0.05
    decay: float | None = None
    clip: float = 1.0
    every: int | None = None
    keep: bool = False  # whether to keep the checkpoints of finished runs

    def windows(self, length: int) -> int:
        """Return the number of windows of `length` tokens per step, such that the smallest budget has enough steps."""
        steps = {"train": STEPS, "heal": FURTHER}[self.how]
        return windows_of(self.batch, length, min(_as_tuple(self.tokens), default=None), 1, steps)


def shipped() -> dict[str, Path]:
    """Return the paths of the plans that come with gptkit, by the plans' names."""
    return {path.stem: path for path in sorted(_FOLDER.glob("*.toml"))}


def read_plan(reference: str | Path) -> Plan:
    """Read a plan from a file, or a plan that comes with gptkit by its name.

    Raises:
        UsageError: there is no such plan.
        InvalidInput: the file is not a valid plan. The message names the wrong key.
    """
    bundled, path, name = shipped(), Path(reference), str(reference)
    if not path.is_file() and name not in bundled:
        raise UsageError(
            f"there is no file {name}, and gptkit has no plan with this name",
            f"Give a TOML file, or the name of a plan that comes with gptkit: {', '.join(bundled)}.",
        )
    try:
        content = tomllib.loads(read_small(path if path.is_file() else bundled[name], MOST_BYTES).decode())
        plan = msgspec.convert(content, Plan)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise InvalidInput(f"{name} cannot be read as TOML: {error}") from error
    except msgspec.ValidationError as error:
        raise InvalidInput(
            f"{name}: {_in_words(error)}", "The page 'Ablate a model' of the documentation lists all keys."
        ) from error
    for mistake in _mistakes(plan):
        raise InvalidInput(f"{name}: {mistake}")
    return msgspec.structs.replace(plan, name=plan.name or path.stem)


_KINDS = {
    "int": "a whole number", "float": "a number", "str": "text", "bool": "true or false", "array": "a list",
    "object": "a table",
}  # fmt: skip


def _in_words(error: msgspec.ValidationError) -> str:
    """Return the message of msgspec's error about a plan, with the terms of TOML instead of those of Python."""

    def type_names(types: str) -> str:
        return " or ".join(_KINDS.get(type_name, type_name) for type_name in types.split(" | ") if type_name != "null")

    message = explained(error, Plan).replace("$.", "")
    message = re.sub(r"^Object contains unknown field `(.*?)` - at `(.*?)`", r"\2: no key is called \1", message)
    message = re.sub(r"^Object contains unknown field `(.*?)`", r"no key is called \1", message)
    message = re.sub(r"^Object missing required field `(.*?)` - at `(.*?)`", r"\2: \1 is missing", message)
    message = re.sub(r"^Object missing required field `(.*?)`", r"\1 is missing", message)
    message = re.sub(r"^Invalid enum value ('.*?') - at `(.*?)`", r"\2 cannot be \1", message)
    mismatch = re.match(r"Expected `(.*?)`, got `(.*?)` - at `(.*?)`$", message)
    return f"{mismatch[3]} must be {type_names(mismatch[1])}, not {type_names(mismatch[2])}" if mismatch else message


def _mistakes(plan: Plan) -> Iterator[str]:
    """Yield a message on every mistake in a plan that msgspec does not find by the types of the fields."""
    names = [variant.name for variant in plan.variant]
    if not names:
        yield "variant is empty, but a plan needs at least one [[variant]]"
    for number, name in enumerate(["base", *names]):
        if slug_of(name) in [slug_of(earlier) for earlier in ["base", *names][:number]]:
            yield f"variant {name!r}: two variants have this name"
    for variant in plan.variant:
        for other in variant.include:
            if other not in names[: names.index(variant.name)]:
                yield f"variant {variant.name!r}: include names {other!r}, but no earlier variant has this name"
        if plan.how == "heal" and (variant.changes or variant.remove):
            yield (
                f"variant {variant.name!r}: the keys set and remove need how = 'train'; with 'heal', use swap or recipe"
            )
        if not any((variant.model, variant.include, variant.recipe, variant.swap, variant.changes, variant.remove)):
            yield f"variant {variant.name!r} changes nothing: give it swap, recipe, set, remove, include or model"
    if (plan.tokens is None) == (plan.flops is None):
        yield "a plan needs exactly one budget: tokens or flops"
    if plan.how == "heal" and plan.parameters:
        yield (
            "the key parameters does not work with how = 'heal', because the swaps determine the size of the variants"
        )
    least = {"seeds": 1, "seed": 0, "context": 1, "batch": 1, "every": 1, "tokens": 1, "flops": 1}
    for key, bound in least.items():
        if not all(bound <= value < math.inf for value in _as_tuple(getattr(plan, key))):
            yield f"{key} is {getattr(plan, key)}, but must be finite and at least {bound}"


def _as_tuple(value: Any) -> tuple[Any, ...]:
    """Return a tuple as it is, another value as a tuple of one, and None as an empty tuple."""
    return () if value is None else value if isinstance(value, tuple) else (value,)


def slug_of(name: str) -> str:
    """Return a variant's name in a form that can be part of a file name."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "variant"


# --- trees ------------------------------------------------------------------------------------------------------------


def edited(spec: ModelSpec, changes: Mapping[str, Any], removed: Sequence[str] = ()) -> ModelSpec:
    """Return an architecture after the changes of `set` and `remove` in a plan (see the docstring of this module).

    Args:
        spec: the architecture before the changes.
        changes: new values by path pattern, such as {"blocks.*.attention.kv_heads": 2}.
        removed: the path patterns of the fields to remove.

    Raises:
        InvalidInput: a pattern matches no path of the architecture.
        ConfigError: the result is not a valid architecture.
    """
    tree = to_json(spec)
    for path, value in changes.items():
        for parent, name in _places(tree, path):
            before, merge = parent.get(name), isinstance(value, dict) and "type" not in value
            parent[name] = {**before, **value} if merge and isinstance(before, dict) else value
    for path in removed:
        for parent, name in _places(tree, path):
            if parent.pop(name, None) is None:
                raise InvalidInput(f"remove = {path!r}: the model has no {name} at this path")
    try:
        return from_json(tree)
    except ConfigError as error:
        error.hint = None  # the hint is about files that a newer gptkit wrote
        raise


def _places(tree: Any, path: str) -> list[tuple[dict[str, Any], str]]:
    """Return the fields in nested JSON objects that a path pattern matches, as (object, key in it) pairs.

    If the last part of the pattern has no star, it may be a key that does not exist yet. Raise InvalidInput if the
    pattern matches nothing.
    """
    *parents, last_pattern = path.split(".")
    nodes = [tree]
    for pattern in parents:
        children = (
            node_items.items() if isinstance(node_items, dict) else enumerate(node_items) for node_items in nodes
        )
        nodes = [node for node_items in children for name, node in node_items if fnmatchcase(str(name), pattern)]
        nodes = [node for node in nodes if isinstance(node, dict | list)]
    tables = [node for node in nodes if isinstance(node, dict)]
    places = [(node, name) for node in tables for name in node if fnmatchcase(name, last_pattern) and name != "type"]
    places = places or [(node, last_pattern) for node in tables if "*" not in last_pattern]
    if not places:
        raise InvalidInput(
            f"the path {path!r} matches no field of the model",
            "Write paths as in gptkit.json, such as blocks.0.attention.kv_heads.",
        )
    return places


@dataclass(frozen=True)
class Arm:
    """The base model or a variant of an ablation, with its architecture after all changes."""

    name: str
    comment: str
    spec: ModelSpec  # after all changes
    start: str | dict[str, Any]  # the model before the changes: its name or path, or config.json values
    steps: tuple[Step, ...] = ()  # the swaps


def arms_of(plan: Plan, opening: Opening) -> list[Arm]:
    """Return the base and all variants of a plan with their architectures.

    Raises:
        InvalidInput, SwapRefused, ConfigError: a variant cannot be made. The message names the variant.
    """
    variants_by_name = {variant.name: variant for variant in plan.variant}

    hint = 'Give a checkpoint, or choose how = "train".'

    def tree(model: str | dict[str, Any]) -> ModelSpec:
        if isinstance(model, dict):
            if plan.how == "heal":
                raise InvalidInput(
                    "how = 'heal' needs a base with weights, but this plan describes the base by a table of sizes", hint
                )
            return architecture_of(model).spec(model)
        outline, scratch = tree_of(model, False, opening)
        if scratch and plan.how == "heal":
            raise InvalidInput(f"how = 'heal' needs a base with weights, but {model} has none", hint)
        return outline.spec

    def arm_of(start_arm: Arm, variant: _Variant) -> Arm:
        spec, start, steps = start_arm.spec, start_arm.start, start_arm.steps
        if variant.model:
            spec, start, steps = tree(variant.model), variant.model, ()
        for other in variant.include:
            included = arm_of(Arm("", "", spec, start, steps), variants_by_name[other])
            spec, start, steps = included.spec, included.start, included.steps
        if variant.recipe and read_recipe(variant.recipe).heal is not None:
            hint = 'Remove that step: how = "heal" heals every variant.'
            raise InvalidInput(
                f"the recipe {variant.recipe} has a heal step, which a plan does not allow: the plan itself "
                "trains all variants with one budget",
                hint,
            )
        if variant.swap or variant.recipe:
            new_steps = [
                *steps_from((), variant.recipe or None),
                *(step for text in variant.swap for step in steps_from([text])),
            ]
            spec, steps = swapped(spec, new_steps, reference=variant.name, **opening).spec, (*steps, *new_steps)
        return Arm(variant.name, variant.comment, edited(spec, variant.changes, variant.remove), start, steps)

    with in_messages("base"):
        base = Arm("base", "", tree(plan.base), plan.base)
    arms = [base]
    for variant in plan.variant:
        with in_messages(f"variant {variant.name!r}"):
            arm = arm_of(base, variant)
            if plan.parameters == "equal":
                arm = replace(arm, spec=_resized(arm.spec, size_of(base.spec)))
            if arm.spec.vocab_size != base.spec.vocab_size:
                raise InvalidInput(
                    f"the variant's vocabulary has {arm.spec.vocab_size:,} tokens, but the vocabulary of the "
                    f"base has {base.spec.vocab_size:,}",
                    "Use the same vocabulary for all variants: their losses per token are compared.",
                )
        arms.append(arm)
    return arms


def _resized(spec: ModelSpec, parameters: int) -> ModelSpec:
    """Return the architecture with feed-forwards of another width, so that it has about `parameters` parameters.

    The width is the one that gives the closest number. Raise InvalidInput if even width 1 gives more parameters.
    """

    def with_units(units: int) -> ModelSpec:
        return swapped(spec, steps_named("intermediate", str(units))).spec

    first, second = _WIDTHS
    smaller, larger = (size_of(with_units(units)) for units in _WIDTHS)
    per_unit = (larger - smaller) / (second - first)
    if abs(parameters - size_of(spec)) <= per_unit / 2:
        return spec
    units = first + round((parameters - smaller) / per_unit)
    if units < 1:
        raise InvalidInput(
            f"the variant cannot have as few parameters as the base, {parameters:,}: even with the smallest "
            "feed-forward, it has more"
        )
    return with_units(units)


# --- variants and budgets --------------------------------------------------------------------------------------------


def label_of(variant: Arm) -> str:
    """Return the name of a variant as it appears in messages, such as "variant 'RoPE'"."""
    return f"variant {variant.name!r}"


@dataclass(frozen=True)
class PlannedVariant:
    """A variant at one of the plan's budgets."""

    arm: Arm
    budget: float  # in tokens or FLOPs, as in the plan
    tokens: int  # training tokens per run
    flops: int  # FLOPs per run; in healing they include the teacher's forward passes

    @property
    def slug(self) -> str:
        return f"{slug_of(self.arm.name)}-{self.tokens}"

    def __hash__(self) -> int:
        return hash(self.slug)


def planned_variants(plan: Plan, arms: Sequence[Arm], length: int) -> list[PlannedVariant]:
    """Return the base and all variants, once for every budget of the plan. Each of these is run once per seed.

    Args:
        plan: the plan.
        arms: the base and the variants.
        length: tokens per window.

    Raises:
        InvalidInput: a position table is shorter than `length`, or two budgets have the same number of steps.
        UsageError: a number in the plan is out of range.
    """
    windows = plan.windows(length)
    options = {
        "rate": 1e-3 if plan.rate is None else plan.rate,
        "warmup": plan.warmup,
        "decay": plan.decay or 0.0,
        "clip": plan.clip,
    }
    settings_of(windows, length, 1, None, every=plan.every, accumulate=1, seed=plan.seed, **options)
    variants = list[PlannedVariant]()
    for budget in _as_tuple(plan.flops) or _as_tuple(plan.tokens):
        for arm in arms:
            table = arm.spec.positions
            if table is not None and length > table.length:
                raise InvalidInput(
                    f"context is {length:,}, but the position table of {label_of(arm)} has only {table.length:,} rows"
                )
            flops_per_step = training_flops(arm.spec, length, windows).dense
            if plan.how == "heal" and arm is not arms[0]:  # the teacher's forward pass
                flops_per_step += forward_flops(arms[0].spec, length, windows).dense
            steps = (
                max(1, round(budget / flops_per_step)) if plan.flops is not None else -(-budget // (windows * length))
            )
            planned = PlannedVariant(arm, budget, steps * windows * length, steps * flops_per_step)
            for other in variants:
                if (other.arm, other.tokens) == (arm, planned.tokens):
                    raise InvalidInput(
                        f"the budgets {other.budget:,} and {budget:,} both come to {planned.tokens:,} tokens for "
                        f"{label_of(arm)}, because training takes whole steps",
                        f"A step has {windows * length:,} tokens. Choose budgets that differ by more than this.",
                    )
            variants.append(planned)
    return variants
