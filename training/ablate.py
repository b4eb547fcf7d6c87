"""ablate: variants of one model, each trained or healed under the same budget, and what each gives and takes.

A run of a seed begins with the same values wherever two trees have the same parameter, and meets the same windows in
the same order: so variants are paired with the base seed by seed. What a plan says is in `plan`; OUT has everything:
tokens, trees, a file of every run that has ended, the checkpoints of one that has not, and ablation.json.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import shutil
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ..analysis.costs import Costs, costs
from ..components import to_json
from ..converter.files import locked, read_small
from ..converter.names import json_bytes
from ..converter.publish import require_place
from ..converter.tree import write_spec
from ..display import Record, Shown
from ..errors import InvalidInput, NoNumber, UsageError
from ..surgery.recipe import in_messages
from ..surgery.swap import swap
from .data import Progress, TokenFile, open_tokens, paths_of
from .heal import heal
from .loop import TrainingStep, usual_rate
from .parallel import group
from .plan import Arm, Plan, Planned, arms_of, called, planned, read_plan, slug_of
from .state import METRICS, put, remove_empty
from .train import CONTEXT, TextReader, folder_of, longest, require_trainable, size_of, split, train, tree_of

_RESULT = "ablation.json"
_OWN = ("data", "held-out", "trees", "changed", "runs")  # what an ablation writes beside its table
_BEGUN = ".ablation-begun"  # within OUT, what is prepared beside an ablation that it may take the place of
_CHANGED = {
    "tree": "the architecture of the variant changed",
    "swaps": "the swaps of the variant changed",
    "data": "it was trained on other tokens",
    "held_out": "another share or text was held out",
}
"""What a run of another plan is told by, where a value tells a person nothing."""


@dataclass(frozen=True)
class Result(Record):
    """The result of one run of an ablation.

    Attributes:
        seed: the seed of the run.
        loss: the loss on the held-out text, in nats per token.
        kl: for a healed model, the KL divergence from the base, in nats per token; otherwise None.
        seconds: the training time.
        pace: the number of tokens per second in the median step.
        curve: the losses during training, one entry per evaluation.
    """

    seed: int
    loss: float
    kl: float | None
    seconds: float
    pace: float
    curve: list[dict[str, Any]]


@dataclass(frozen=True)
class Difference(Record):
    """The difference between a variant's loss and the base's loss with the same seeds.

    Attributes:
        mean: the mean over seeds, in nats per token.
        low: the lower bound of the 95 % interval (Student's t); None with one seed.
        high: the upper bound of the interval; None with one seed.
        seeds: the number of seeds.
    """

    mean: float
    low: float | None
    high: float | None
    seeds: int

    @property
    def tells(self) -> bool:
        """Return whether the 95 % interval excludes 0."""
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high


@dataclass(frozen=True)
class Row(Record):
    """A variant of an ablation at one training budget.

    Attributes:
        name: the name of the variant.
        comment: the comment of the plan.
        tokens: the number of training tokens of a run.
        flops: the training FLOPs of a run.
        costs: the costs of the variant's model at the context of the training.
        runs: the results of the runs that have ended.
        difference: how the loss differs from the base's; None for the base.
    """

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
        """Return the mean loss of the runs; None without a run."""
        return statistics.mean(each.loss for each in self.runs) if self.runs else None

    @property
    def spread(self) -> float | None:
        """Return the largest loss minus the smallest; None with fewer than two runs."""
        losses = [each.loss for each in self.runs]
        return max(losses) - min(losses) if len(losses) > 1 else None

    @property
    def pace(self) -> float | None:
        """Return the median number of tokens per second; None without a run."""
        return statistics.median(each.pace for each in self.runs) if self.runs else None


@dataclass(frozen=True)
class Ablation(Record, Shown):
    """The results of an ablation, also of an unfinished one.

    Attributes:
        name: the name of the plan.
        description: the plan's description.
        how: how a run is trained.
        seeds: the number of seeds.
        context: the number of tokens in a training window.
        data: the sha256 of the tokens that all runs read.
        held_out: the share of these tokens that is held out, or the sha256 of the tokens of a separate text.
        rows: a row per variant and budget; the first row is the base.
        left: the number of runs that have not ended.
    """

    JSON = "schema_version name description how seeds context data held_out left rows"

    name: str
    description: str
    how: str
    seeds: int
    context: int
    data: str
    held_out: float | str
    rows: tuple[Row, ...]
    left: int
    schema_version: int = field(default=1, repr=False)


# --- the runs ---------------------------------------------------------------------------------------------------------


def ablate(
    plan: str | Path,
    out: str | Path,
    *,
    data: str | Path | Sequence[str | Path] = (),
    device: str | None = None,
    resume: bool = False,
    force: bool = False,
    offline: bool = False,
    allow_pickle: bool = False,
    tell: Callable[[str, int, TrainingStep], None] = lambda name, seed, step: None,
    ended: Callable[[str, int, Result], None] = lambda name, tokens, result: None,
    progress: Progress | None = None,
) -> Ablation:
    """Train or heal the base and every variant of an ablation plan, once per seed. Runs that have ended are not
    repeated.

    Args:
        plan: a TOML file, or the name of a plan that comes with gptkit.
        out: the folder of all results. Its file ablation.json is written again after every run.
        data: text files, or one folder that `tokenize` wrote, instead of the plan's.
        device: by default a GPU if there is one.
        resume: continue an unfinished ablation in `out`. Variants and seeds that were added to the plan are run too.
        force: start again in a folder that `ablate` wrote.
        offline: use local files and the hub's cache only.
        allow_pickle: also read .bin files (weights only).
        tell: called after every step with the variant, the seed and the step.
        ended: called after every run with the variant, its number of tokens and the result.
        progress: progress of tokenising, as in `tokenize`.

    Raises:
        InvalidInput: the plan is invalid, or the runs in `out` belong to another plan.
        UsageError, SwapRefused, ConfigError, Offline, GptkitError, KeyboardInterrupt: as in `train`, `heal` and `swap`.
    """
    asked, target = read_plan(plan), Path(out).expanduser()
    texts: list[Path | str] = [*paths_of(data)] or [*asked.data]
    if not texts:
        raise UsageError(
            "the plan does not name a training text", 'Give --data FILE, or set data = ["FILE"] in the plan.'
        )
    variants = arms_of(asked, offline, allow_pickle)
    base, opening = variants[0], {"device": device, "offline": offline, "allow_pickle": allow_pickle}
    length = asked.context or min(CONTEXT, *(longest(each.spec) for each in variants))
    rows, seeds = planned(asked, variants, length), range(asked.seed, asked.seed + asked.seeds)
    named = asked.base if isinstance(asked.base, str) else None
    trained = named is not None and not tree_of(named, False, offline, allow_pickle)[1]
    settings: dict[str, Any] = {
        "context": length, "batch": asked.windows(length) * length, "warmup": asked.warmup, "clip": asked.clip,
        "rate": usual_rate(size_of(base.spec)) if asked.rate is None and asked.how == "train" else asked.rate,
        "decay": {"train": 0.1, "heal": 0.0}[asked.how] if asked.decay is None else asked.decay,
    }  # fmt: skip

    def prepared(folder: Path) -> tuple[_Runs, dict[str, Path | str]]:
        """The runs with their tokens and models in a folder, once nothing but a run itself can go wrong."""
        held = asked.held_out
        with group(device) as us:
            reader = TextReader(folder, True, us, named if trained else None, base.spec.vocab_size, progress, offline)
            found = reader(texts, "data")
            if found.vocabulary > base.spec.vocab_size:
                raise UsageError(
                    f"the texts are tokenised with a vocabulary of {found.vocabulary:,} tokens, but the vocabulary of"
                    f" the plan's models has only {base.spec.vocab_size:,}",
                    "Give the text files themselves, or tokenise them with a smaller --vocabulary.",
                )
            for each in variants:
                with in_messages(called(each)):
                    require_trainable(each.spec, found.documents > 1, False)
            split(found, held, reader, length, asked.windows(length), True)
        held = str(folder_of([held], folder / "held-out")) if isinstance(held, str) else held
        runs = _Runs(asked, folder, texts, found, {**settings, "held_out": held}, opening, tell)
        return runs, {each.name: runs.model(each) for each in variants}

    with ExitStack() as stack:
        require_place(target)
        stack.enter_context(locked(target))
        going_on = _claim(target, resume, force)
        stack.callback(_leave, target)
        begun = target / _BEGUN
        if not going_on:
            begun.mkdir(parents=True)
            runs, _ = prepared(begun)
            put(begun / _RESULT, json_bytes(_table(runs, rows, {}).as_json()))
            _take_over(target, begun)
        runs, models = prepared(target)
        results = {(one, seed): runs.result(one, seed) for seed in seeds for one in rows}
        (target / "runs").mkdir(exist_ok=True)
        put(target / _RESULT, json_bytes(_table(runs, rows, results).as_json()))
        for (one, seed), result in results.items():
            if result is None:
                results[one, seed] = result = runs.run(one, seed, models[one.variant.name])
                ended(one.variant.name, one.tokens, result)
                put(target / _RESULT, json_bytes(_table(runs, rows, results).as_json()))
        return _table(runs, rows, results)


def _claim(target: Path, resume: bool, force: bool) -> bool:
    """Whether there is an ablation to go on with. Raises UsageError where something else is in the folder, or an
    ablation that is neither resumed nor lost.
    """
    if not target.exists() or (target.is_dir() and all(each.name == _BEGUN for each in target.iterdir())):
        shutil.rmtree(target / _BEGUN, ignore_errors=True)
        return False
    try:
        read_ablation(target)
    except UsageError as error:
        raise UsageError(
            f"the folder {target} exists, but gptkit ablate did not write it", "Choose another folder for OUT."
        ) from error
    if not resume and not force:
        raise UsageError(
            f"the folder {target} already contains the runs of an ablation",
            "Continue it with --resume, or start again with --force.",
        )
    shutil.rmtree(target / _BEGUN, ignore_errors=True)  # of a call that was killed
    return resume


def _take_over(target: Path, begun: Path) -> None:
    """Put what was begun in the place of what was there. The table goes first, by which the folder is known."""
    (begun / _RESULT).replace(target / _RESULT)
    for name in _OWN:  # and no more: somebody's notes may be there
        shutil.rmtree(target / name, ignore_errors=True)
    for each in begun.iterdir():
        each.rename(target / each.name)
    begun.rmdir()


def _leave(target: Path) -> None:
    """Remove what was begun, and an ablation of which no run began."""
    runs = target / "runs"
    empty = not runs.is_dir() or not any(runs.iterdir())
    for name in (_BEGUN, *(_OWN if empty else ())):
        shutil.rmtree(target / name, ignore_errors=True)
    if empty:
        (target / _RESULT).unlink(missing_ok=True)
        remove_empty(target)


@dataclass(frozen=True)
class _Runs:
    """What all runs have in common."""

    plan: Plan
    folder: Path
    texts: Sequence[str | Path]
    data: TokenFile
    settings: dict[str, Any]
    opening: dict[str, Any]
    tell: Callable[[str, int, TrainingStep], None]

    @property
    def read(self) -> str:
        """The sha256 of all tokens."""
        return str(self.data.digest)

    @property
    def held_out(self) -> float | str:
        """The share that is held out, or the sha256 of another text's tokens: those of a folder of another name too."""
        held: float | str = self.settings["held_out"]
        return str(open_tokens(Path(held)).digest) if isinstance(held, str) else held

    def _path(self, one: Planned, seed: int) -> Path:
        return self.folder / "runs" / f"{one.slug}-{seed}"

    def _about(self, one: Planned, seed: int) -> dict[str, Any]:
        """What a run is, in JSON values: by what it is told from another of the same name."""
        tree = hashlib.sha256(json_bytes(to_json(one.variant.spec))).hexdigest()
        start = one.variant.start if self.plan.how == "heal" else ""
        steps = [step.as_json() for step in one.variant.steps] if self.plan.how == "heal" else []
        about = {"how": self.plan.how, "tree": tree, "base": start, "swaps": steps, "tokens": one.tokens, "seed": seed}
        return {**about, **self.settings, "data": self.read, "held_out": self.held_out}

    def result(self, one: Planned, seed: int) -> Result | None:
        """What a run came to, where it has ended. Raises InvalidInput where it was another."""
        path, about = self._path(one, seed).with_suffix(".json"), self._about(one, seed)
        if not path.is_file():
            return None
        try:
            kept = json.loads(read_small(path, 2**26))
            result, before = Result(**kept["result"]), dict(kept["about"])
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise InvalidInput(
                f"{path} cannot be read: {error}", "Remove this file, and repeat the run with --resume."
            ) from error
        for key in about:
            if before.get(key) != json.loads(json.dumps(about[key])):
                why = _CHANGED.get(key, f"its {key} is {before.get(key)}, not {about[key]}")
                raise InvalidInput(
                    f"{path} belongs to another plan: {why}",
                    "Restore the plan, choose another OUT, or start again with --force.",
                )
        return result

    def model(self, variant: Arm) -> Path | str:
        """What is trained: the tree in a file, or what its swaps make of a checkpoint."""
        name = slug_of(variant.name)
        if self.plan.how == "train":
            (self.folder / "trees").mkdir(exist_ok=True)
            return write_spec(variant.spec, self.folder / "trees" / f"{name}.json", force=True)
        if not variant.steps:
            return str(variant.start)
        made = json_bytes([variant.start, self.read, *(step.as_json() for step in variant.steps)])
        path = self.folder / "changed" / f"{name}-{hashlib.sha256(made).hexdigest()[:8]}"
        path.parent.mkdir(exist_ok=True)
        if not path.is_dir():
            with in_messages(called(variant)):
                text = next((each for each in self.texts if Path(each).is_file()), None)  # where a swap is fitted
                opening = {name: self.opening[name] for name in ("offline", "allow_pickle")}
                swap(str(variant.start), path, variant.steps, measured=False, calibrate=text, **opening)
        return path

    def run(self, one: Planned, seed: int, model: Path | str) -> Result:
        """Train or heal, from the last checkpoint where there is one, and keep what came out."""
        path, name = self._path(one, seed), one.variant.name
        kl: float | None
        options: Any = {**self.settings, **self.opening, "every": self.plan.every, "tokens": one.tokens, "seed": seed}
        options |= {"resume": True, "force": True}  # what is there is this run's, or was left before it was noted
        healed = self.plan.how == "heal" and name != "base"
        folder = path.with_name(f"{path.name}.{'healing' if healed else 'training'}")
        try:
            if healed:
                tell: Any = lambda _, step: self.tell(name, seed, step)  # noqa: E731
                done = heal(model, str(self.plan.base), [self.data.folder], path, **options, beside=False, tell=tell)
                loss, seconds, kl = done.healed.loss, done.healed.seconds, done.healed.kl
                phases = [folder / "healed-layers-0", folder / "healed-0"]
            else:
                trained = train(model, [self.data.folder], path, **options, tell=partial(self.tell, name, seed))
                loss, seconds, kl = trained.held_out, trained.seconds, None
                phases = [folder]
        except NoNumber as error:
            # Going on at another rate would lay a run of two rates beside runs of one.
            shutil.rmtree(folder, ignore_errors=True)
            raise NoNumber(
                error.message,
                "Try a smaller rate (learning rate) or clip (gradient norm) in the plan. Start all runs with --force.",
            ) from error
        *before, lines = [_metrics(each) for each in phases if each.is_dir()]
        first = sum(each[-1]["tokens"] for each in before)  # where layers are trained by themselves, no KL is evaluated
        curve = [
            {"tokens": first + line["tokens"], "held_out": line["held_out"]}
            for line in lines
            if line["held_out"] is not None
        ]
        pace = lines[0]["tokens"] / statistics.median(line["took"] for line in itertools.chain(*before, lines))
        result = Result(seed, loss, kl, seconds, pace, curve)
        put(path.with_suffix(".json"), json_bytes({"about": self._about(one, seed), "result": result.as_json()}))
        if not self.plan.keep:
            shutil.rmtree(path)
        shutil.rmtree(folder)
        return result


def _metrics(folder: Path) -> list[dict[str, Any]]:
    """What a run measured, a step each."""
    return [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]


# --- the table --------------------------------------------------------------------------------------------------------


def _table(runs: _Runs, rows: Sequence[Planned], results: Mapping[tuple[Planned, int], Result | None]) -> Ablation:
    """What has ended, beside the base of the same budget."""
    plan, length = runs.plan, runs.settings["context"]

    def of(one: Planned) -> tuple[Result, ...]:
        return tuple(result for (each, _), result in results.items() if each is one and result is not None)

    bases = {one.budget: of(one) for one in rows if one.variant.name == "base"}
    found = []
    for one in rows:
        beside = None if one.variant.name == "base" else paired(of(one), bases[one.budget])
        about = one.variant.name, one.variant.comment, one.tokens, one.flops, costs(one.variant.spec, length)
        found.append(Row(*about, of(one), beside))
    left = plan.seeds * len(rows) - sum(len(each.runs) for each in found)
    read = runs.read, runs.held_out
    return Ablation(plan.name, plan.description, plan.how, plan.seeds, length, *read, tuple(found), left)


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
    return z + math.fsum(term / freedom**power for power, term in enumerate(terms, 1))


def read_ablation(folder: str | Path) -> dict[str, Any]:
    """The values of an ablation's JSON, from its folder. Raises UsageError where there is none."""
    path = Path(folder) / _RESULT
    try:
        found = json.loads(read_small(path, 2**28))
        rows = found["rows"]
        assert isinstance(rows, list) and all(isinstance(each, dict) for each in rows)
    except (OSError, ValueError, KeyError, TypeError, AssertionError) as error:
        raise UsageError(
            f"{folder} is not a folder that gptkit ablate wrote", "Run one first: gptkit ablate PLAN OUT"
        ) from error
    return dict(found)
