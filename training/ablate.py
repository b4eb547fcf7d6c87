"""ablate: variants of one model, each trained or healed under the same budget, and what each gives and takes. A plan:

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
what is there, and one without is laid over it. `include` begins with what other variants do. A run of a seed begins
with the same values wherever two trees have the same parameter, and meets the same windows in the same order: so
variants are paired with the base seed by seed. OUT has everything: tokens, trees, runs/, and ablation.json after each.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
import statistics
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec

from ..analysis.costs import Costs, costs, training_flops
from ..architectures import architecture_of
from ..components import ModelSpec, from_json, to_json
from ..converter.files import locked, read_small
from ..converter.manifest import manifest_of
from ..converter.names import json_bytes
from ..converter.tree import write_spec
from ..display import Record, Shown
from ..errors import InvalidInput, UsageError
from ..surgery.recipe import MOST_BYTES, told_as
from ..surgery.registry import Step as SwapStep
from ..surgery.registry import steps_named
from ..surgery.shapes import steps_from, swapped
from ..surgery.swap import swap
from .data import TOKENS, Progress, TokenFile, is_tokens, open_tokens
from .heal import heal
from .loop import Step
from .optimiser import usual_rate
from .state import METRICS, put, remove_empty
from .train import (
    CONTEXT,
    HELD_OUT,
    WINDOWS,
    folder_of,
    longest,
    require_texts,
    require_trainable,
    settings_of,
    size_of,
    tokenized,
    train,
    tree_of,
)

FOLDER = Path(__file__).parent / "plans"  # those that come along
RESULT = "ablation.json"
_WIDTHS = 17, 31  # by which it is seen what a unit of a feed-forward takes


class Variant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
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
    variant: tuple[Variant, ...]
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


@dataclass(frozen=True)
class Result(Record):
    """A run that has ended. loss: on the held-out text, in nats a token; kl: of a healed one, from the base. pace:
    tokens a second, of the median step. curve: what was evaluated on the way.
    """

    seed: int
    loss: float
    kl: float | None
    seconds: float
    pace: float
    curve: list[dict[str, Any]]


@dataclass(frozen=True)
class Difference(Record):
    """A variant's loss less the base's, seed by seed: the mean, and where it lies in 95 of 100 (Student's t), which
    one seed cannot tell.
    """

    mean: float
    low: float | None
    high: float | None
    seeds: int

    @property
    def tells(self) -> bool:
        """Whether it is something else than chance."""
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high


@dataclass(frozen=True)
class Row(Record):
    """A variant at a budget. flops: of the whole run. costs: of its tree, at the context that it is trained at."""

    JSON = "name comment tokens flops costs loss spread pace difference runs"

    name: str
    comment: str
    tokens: int
    flops: int
    costs: Costs
    runs: tuple[Result, ...]
    difference: Difference | None = None

    @property
    def loss(self) -> float | None:
        return statistics.mean(each.loss for each in self.runs) if self.runs else None

    @property
    def spread(self) -> float | None:
        """The largest less the smallest."""
        losses = [each.loss for each in self.runs]
        return max(losses) - min(losses) if len(losses) > 1 else None

    @property
    def pace(self) -> float | None:
        return statistics.median(each.pace for each in self.runs) if self.runs else None


@dataclass(frozen=True)
class Ablation(Record, Shown):
    """The table, the base first, as far as it has come. left: runs that have not ended."""

    JSON = "schema_version name description how seeds context left rows"

    name: str
    description: str
    how: str
    seeds: int
    context: int
    rows: tuple[Row, ...]
    left: int
    schema_version: int = field(default=1, repr=False)


# --- the plan ---------------------------------------------------------------------------------------------------------


def shipped() -> dict[str, Path]:
    """The plans that come along, by name."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.toml"))}


def read_plan(reference: str | Path) -> Plan:
    """A plan from a file, or one that comes along by its name. Raises UsageError where there is none, InvalidInput
    where it is none, with the key that is wrong.
    """
    known, path, where = shipped(), Path(reference), str(reference)
    if not path.is_file() and where not in known:
        raise UsageError(f"there is no plan {where}", f"Name a TOML file, or one of ours: {', '.join(known)}.")
    try:
        data = tomllib.loads(read_small(path if path.is_file() else known[where], MOST_BYTES).decode())
        plan = msgspec.convert(data, Plan)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise InvalidInput(f"{where} cannot be read as TOML: {error}") from error
    except msgspec.ValidationError as error:
        raise InvalidInput(f"{where}: {error}".replace("$.", ""), "The keys are in docs: Ablate a model.") from error
    for wrong in _wrong(plan):
        raise InvalidInput(f"{where}: {wrong}")
    return msgspec.structs.replace(plan, name=plan.name or path.stem)


def _wrong(plan: Plan) -> Iterator[str]:
    """What no type says of a plan, key by key."""
    names = [each.name for each in plan.variant]
    if not names:
        yield "variant is empty: a plan has one [[variant]] or more"
    for number, name in enumerate(["base", *names]):
        if _slug(name) in [_slug(each) for each in ["base", *names][:number]]:
            yield f"variant {name!r}: two have this name"
    for each in plan.variant:
        for other in each.include:
            if other not in names[: names.index(each.name)]:
                yield f"variant {each.name!r}: include names {other!r}, and no variant before it is called so"
        if plan.how == "heal" and (each.changes or each.remove):
            yield f"variant {each.name!r}: set and remove are for trees; what is healed comes of swaps"
        if not any((each.model, each.include, each.recipe, each.swap, each.changes, each.remove)):
            yield f"variant {each.name!r} changes nothing: give it swap, recipe, set, remove, include or model"
    if (plan.tokens is None) == (plan.flops is None):
        yield "a plan has a budget: tokens or flops"
    if plan.how == "heal" and plan.parameters:
        yield "parameters: what is healed keeps the size that its swaps give it"
    least = {"seeds": 1, "seed": 0, "context": 1, "batch": 1, "every": 1, "tokens": 1, "flops": 1}
    for key, bound in least.items():
        if any(each < bound for each in _each(getattr(plan, key))):
            yield f"{key} is {getattr(plan, key)}, and is to be {bound} or more"


def _each(value: Any) -> tuple[Any, ...]:
    return () if value is None else value if isinstance(value, tuple) else (value,)


def _slug(name: str) -> str:
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
                raise InvalidInput(f"remove {path!r}: {name} is not there")
    return from_json(tree)


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
            f"{path!r} is nowhere in the tree", "gptkit show MODEL --json, or its gptkit.json, has paths."
        )
    return found


@dataclass(frozen=True)
class _Variant:
    """A variant as the plan means it: its tree, and the reference and the swaps that it is made of."""

    name: str
    comment: str
    spec: ModelSpec
    start: str | dict[str, Any]
    steps: tuple[SwapStep, ...] = ()


def _variants(plan: Plan, offline: bool, allow_pickle: bool) -> list[_Variant]:
    """The base and every variant. Raises InvalidInput, SwapRefused and ConfigError, with the variant's name."""
    asked = {each.name: each for each in plan.variant}

    def tree(model: str | dict[str, Any]) -> ModelSpec:
        if isinstance(model, dict):
            return architecture_of(model).spec(model)
        found, scratch = tree_of(model, False, offline, allow_pickle)
        if scratch and plan.how == "heal":
            raise InvalidInput(f"how is heal, and {model} has no weights", 'Trees alone are for how = "train".')
        return found.spec

    def changed(before: _Variant, each: Variant) -> _Variant:
        spec, start, steps = before.spec, before.start, before.steps
        if each.model:
            spec, start, steps = tree(each.model), each.model, ()
        for other in each.include:
            included = changed(_Variant("", "", spec, start, steps), asked[other])
            spec, start, steps = included.spec, included.start, included.steps
        if each.swap or each.recipe:
            own = [*steps_from((), each.recipe or None), *(step for text in each.swap for step in steps_from([text]))]
            spec, steps = swapped(spec, own, reference=each.name, offline=offline).spec, (*steps, *own)
        return _Variant(each.name, each.comment, edited(spec, each.changes, each.remove), start, steps)

    with told_as("base"):
        base = _Variant("base", "", tree(plan.base), plan.base)
    found = [base]
    for each in plan.variant:
        with told_as(f"variant {each.name!r}"):
            made = changed(base, each)
            if plan.parameters == "equal":
                made = replace(made, spec=_as_large(made.spec, size_of(base.spec)))
            if made.spec.vocab_size != base.spec.vocab_size:
                message = f"it has {made.spec.vocab_size:,} tokens, and the base {base.spec.vocab_size:,}"
                raise InvalidInput(message, "Losses are in nats a token: all read the same tokens.")
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
        raise InvalidInput(f"it has more than the base's {wanted:,} parameters without any feed-forward")
    return wide(units)


# --- the runs ---------------------------------------------------------------------------------------------------------


def ablate(
    plan: str | Path,
    out: str | Path,
    *,
    data: Sequence[str | Path] = (),
    device: str | None = None,
    resume: bool = False,
    force: bool = False,
    offline: bool = False,
    allow_pickle: bool = False,
    tell: Callable[[str, int, Step], None] = lambda name, seed, step: None,
    ended: Callable[[str, int, Result], None] = lambda name, tokens, result: None,
    progress: Progress | None = None,
) -> Ablation:
    """Run the base and every variant of a plan with each seed; a run that has ended is not run again.

    Args:
        plan: a TOML file, or the name of a plan that comes along.
        out: the folder of all of it; ablation.json in it is written anew when a run has ended.
        data: texts, or one folder that `tokenize` wrote, in place of the plan's.
        device: by default a GPU where there is one.
        resume: go on where `out` was left; variants and seeds that the plan did not have are run too.
        force: begin anew in an `out` that an ablation made.
        offline: use local files and the hub's cache only.
        allow_pickle: read .bin files too (weights only).
        tell: given the variant, the seed and every step.
        ended: given the variant, its tokens and the result of each run that has ended now.
        progress: of tokenising, as in `tokenize`.

    Raises:
        InvalidInput: a plan that is none, or another than the runs in `out` are of.
        UsageError, SwapRefused, ConfigError, Offline, GptkitError, KeyboardInterrupt: as `train`, `heal` and `swap`.
    """
    asked, target = read_plan(plan), Path(out)
    texts = list(data) or list(asked.data)
    if not texts:
        raise UsageError("the plan names no data", '--data FILE, or data = ["FILE"] in the plan.')
    variants = _variants(asked, offline, allow_pickle)
    base, opening = variants[0], {"device": device, "offline": offline, "allow_pickle": allow_pickle}
    length = asked.context or min(CONTEXT, *(longest(each.spec) for each in variants))
    rows = _planned(asked, variants, length)
    with ExitStack() as stack:
        stack.enter_context(locked(target))
        _claim(target, resume, force)
        (target / "runs").mkdir(parents=True, exist_ok=True)
        stack.callback(remove_empty, target)

        def take(paths: Sequence[str | Path], name: str, tokenizer: str | Path | None) -> TokenFile:
            own = target / name
            where = folder_of(paths, own)
            if where == own and is_tokens(own):
                require_texts(paths, own)
            elif where == own:
                tokenized(paths, own, tokenizer, base.spec.vocab_size, progress)
            return open_tokens(where)

        named = asked.base if isinstance(asked.base, str) else None
        trained = named is not None and not tree_of(named, False, offline, allow_pickle)[1]
        found = take(texts, "data", named if trained else None)
        held = asked.held_out
        if isinstance(held, str):
            held = str(take([held], "held-out", found.folder / "tokenizer.json").folder)
        for each in variants:
            with told_as(_called(each)):
                require_trainable(each.spec, found.documents > 1, False)
        settings: dict[str, Any] = {
            "context": length, "batch": asked.batch, "warmup": asked.warmup, "clip": asked.clip, "held_out": held,
            "rate": asked.rate or usual_rate(size_of(base.spec)),
            "decay": {"train": 0.1, "heal": 0.0}[asked.how] if asked.decay is None else asked.decay,
        }  # fmt: skip
        runs = _Runs(asked, target, found, settings, opening, tell)
        seeds = range(asked.seed, asked.seed + asked.seeds)
        results = {(one, seed): runs.result(one, seed) for seed in seeds for one in rows}
        models = {each.name: runs.model(each) for each in variants}
        for (one, seed), result in results.items():
            if result is None:
                results[one, seed] = result = runs.run(one, seed, models[one.variant.name])
                ended(one.variant.name, one.tokens, result)
                put(target / RESULT, json_bytes(_table(asked, rows, results, length).as_json()))
        return _table(asked, rows, results, length)


def _claim(target: Path, resume: bool, force: bool) -> None:
    """Raise UsageError where something else is in the folder, or an ablation that is neither resumed nor lost."""
    there = list(target.iterdir()) if target.is_dir() else []
    if target.exists() and not (target.is_dir() and (not there or (target / "runs").is_dir())):
        raise UsageError(f"{target} exists, and no ablation made it", "Choose another name.")
    if there and not resume and not force:
        raise UsageError(f"an ablation lies in {target}", "--resume goes on from there; --force begins anew.")
    if there and not resume:
        shutil.rmtree(target)


def _called(variant: _Variant) -> str:
    return f"variant {variant.name!r}"


@dataclass(frozen=True)
class _Planned:
    """A variant at one of the plan's budgets: how many tokens that are, and FLOPs."""

    variant: _Variant
    budget: float
    tokens: int
    flops: int

    @property
    def slug(self) -> str:
        return f"{_slug(self.variant.name)}-{self.tokens}"

    def __hash__(self) -> int:
        return hash(self.slug)


def _planned(plan: Plan, variants: Sequence[_Variant], length: int) -> list[_Planned]:
    """What is to be run of each seed. Raises InvalidInput and UsageError for numbers that make no sense."""
    windows = WINDOWS if plan.batch is None else plan.batch // length
    how = {"rate": plan.rate or 1e-3, "warmup": plan.warmup, "decay": plan.decay or 0.0, "clip": plan.clip}
    settings_of(windows, length, 1, None, every=plan.every, accumulate=1, seed=plan.seed, **how)
    found = []
    for budget in _each(plan.flops) or _each(plan.tokens):
        for each in variants:
            if length > longest(each.spec):
                raise InvalidInput(f"context is {length:,}, and {_called(each)} has {longest(each.spec):,} positions")
            a_step = training_flops(each.spec, length, windows).dense
            steps = max(1, round(budget / a_step)) if plan.flops is not None else -(-budget // (windows * length))
            found.append(_Planned(each, budget, steps * windows * length, steps * a_step))
    return found


@dataclass(frozen=True)
class _Runs:
    """What all runs have in common."""

    plan: Plan
    folder: Path
    data: TokenFile
    settings: dict[str, Any]
    opening: dict[str, Any]
    tell: Callable[[str, int, Step], None]

    def _path(self, one: _Planned, seed: int) -> Path:
        return self.folder / "runs" / f"{one.slug}-{seed}"

    def _about(self, one: _Planned, seed: int) -> dict[str, Any]:
        """What a run is, in JSON values: by what it is told from another of the same name."""
        data = manifest_of(self.data.folder)["files"][TOKENS]["sha256"]
        tree = hashlib.sha256(json_bytes(to_json(one.variant.spec))).hexdigest()
        start = one.variant.start if self.plan.how == "heal" else ""
        steps = [step.as_json() for step in one.variant.steps] if self.plan.how == "heal" else []
        about = {"how": self.plan.how, "tree": tree, "base": start, "swaps": steps, "tokens": one.tokens, "seed": seed}
        return {**about, "data": data, **self.settings}

    def result(self, one: _Planned, seed: int) -> Result | None:
        """What a run came to, where it has ended. Raises InvalidInput where it was another."""
        path, about = self._path(one, seed).with_suffix(".json"), self._about(one, seed)
        if not path.is_file():
            return None
        try:
            kept = json.loads(read_small(path, 2**26))
            result, before = Result(**kept["result"]), dict(kept["about"])
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise InvalidInput(f"{path} cannot be read: {error}", "Remove it; --resume runs it again.") from error
        for key in about:
            if before.get(key) != json.loads(json.dumps(about[key])):
                message = f"{path} is of another plan: its {key} is {before.get(key)}, not {about[key]}"
                raise InvalidInput(message, "Put the plan back, or choose another OUT; --force begins anew.")
        return result

    def model(self, variant: _Variant) -> Path | str:
        """What is trained: the tree in a file, or what its swaps make of a checkpoint."""
        name = _slug(variant.name)
        if self.plan.how == "train":
            (self.folder / "trees").mkdir(exist_ok=True)
            return write_spec(variant.spec, self.folder / "trees" / f"{name}.json", force=True)
        if not variant.steps:
            return str(variant.start)
        path = self.folder / "changed" / name
        path.parent.mkdir(exist_ok=True)
        if not path.is_dir():
            with told_as(_called(variant)):
                texts = [each for each in self.plan.data if Path(each).is_file()]
                swap(str(variant.start), path, variant.steps, measured=False, calibrate=next(iter(texts), None))
        return path

    def run(self, one: _Planned, seed: int, model: Path | str) -> Result:
        """Train or heal, from the last checkpoint where there is one, and keep what came out."""
        path, name = self._path(one, seed), one.variant.name
        options: Any = {**self.settings, **self.opening, "every": self.plan.every, "tokens": one.tokens, "seed": seed}
        options |= {"resume": True, "force": True}  # what is there is this run's, or was left before it was noted
        if self.plan.how == "heal" and name != "base":
            tell: Any = lambda _, step: self.tell(name, seed, step)  # noqa: E731
            done = heal(model, str(self.plan.base), [self.data.folder], path, **options, beside=False, tell=tell).healed
            loss, kl, folder, inside = done.loss, done.kl, path.with_name(f"{path.name}.healing"), "healed-0"
        else:
            done = train(model, [self.data.folder], path, **options, tell=partial(self.tell, name, seed))
            loss, kl, folder, inside = done.held_out, None, path.with_name(f"{path.name}.training"), ""
        lines = [json.loads(line) for line in (folder / inside / METRICS).read_text().splitlines()]
        curve = [{key: line[key] for key in ("tokens", "held_out")} for line in lines if line["held_out"] is not None]
        pace = lines[0]["tokens"] / statistics.median(line["took"] for line in lines)
        result = Result(seed, loss, kl, done.seconds, pace, curve)
        put(path.with_suffix(".json"), json_bytes({"about": self._about(one, seed), "result": result.as_json()}))
        if not self.plan.keep:
            shutil.rmtree(path)
        shutil.rmtree(folder)
        return result


# --- the table --------------------------------------------------------------------------------------------------------


def _table(
    plan: Plan, rows: Sequence[_Planned], results: Mapping[tuple[_Planned, int], Result | None], length: int
) -> Ablation:
    """What has ended, beside the base of the same budget."""

    def of(one: _Planned) -> tuple[Result, ...]:
        return tuple(result for (each, _), result in results.items() if each is one and result is not None)

    bases = {one.budget: of(one) for one in rows if one.variant.name == "base"}
    found = []
    for one in rows:
        beside = None if one.variant.name == "base" else paired(of(one), bases[one.budget])
        about = one.variant.name, one.variant.comment, one.tokens, one.flops, costs(one.variant.spec, length)
        found.append(Row(*about, of(one), beside))
    left = sum(result is None for result in results.values())
    return Ablation(plan.name, plan.description, plan.how, plan.seeds, length, tuple(found), left)


def paired(runs: Sequence[Result], others: Sequence[Result]) -> Difference | None:
    """Losses less those of the runs that have the same seeds; None where there are none."""
    beside = {each.seed: each.loss for each in others}
    found = [each.loss - beside[each.seed] for each in runs if each.seed in beside]
    if not found:
        return None
    mean, low, high = statistics.mean(found), None, None
    if len(found) > 1:
        reach = student(len(found) - 1) * statistics.stdev(found) / math.sqrt(len(found))
        low, high = mean - reach, mean + reach
    return Difference(mean, low, high, len(found))


_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


def student(freedom: int) -> float:
    """Within how many standard errors a mean lies in 95 of 100: from a table, and by Cornish and Fisher's series for
    ten degrees of freedom and more, where it is right to three digits.
    """
    if freedom <= len(_STUDENT):
        return _STUDENT[freedom - 1]
    z = statistics.NormalDist().inv_cdf(0.975)
    terms = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + sum(term / freedom**power for power, term in enumerate(terms, 1))


def read_ablation(folder: str | Path) -> dict[str, Any]:
    """The values of an ablation's JSON, from its folder. Raises UsageError where there is none."""
    path = Path(folder) / RESULT
    try:
        found = json.loads(read_small(path, 2**28))
        rows = found["rows"]
        assert isinstance(rows, list) and all(isinstance(each, dict) for each in rows)
    except (OSError, ValueError, KeyError, TypeError, AssertionError) as error:
        raise UsageError(f"{folder} holds no ablation", "gptkit ablate PLAN OUT makes one.") from error
    return dict(found)
