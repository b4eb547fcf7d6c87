"""Train or heal variants of one model under the same budget, and compare their losses with the base's.

Runs of two variants with the same seed start with equal values in all parameters that both models have, and read the
same windows of text in the same order. A variant is therefore compared with the base seed by seed. The module `plan`
reads the plan. The folder OUT has the tokens, the architectures, a file for every finished run, the checkpoints of an
unfinished run, and the table of results, ablation.json.
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
from typing import Any, Unpack

from ..analysis.costs import Costs, costs
from ..components import to_json
from ..converter.files import locked, read_small
from ..converter.names import json_bytes
from ..converter.opening import Opening
from ..converter.publish import require_place
from ..converter.tree import write_spec
from ..display import Record, Shown
from ..errors import InvalidInput, NoNumber, UsageError
from ..signatures import takes
from ..surgery.recipe import in_messages
from ..surgery.swap import swap
from .data import ProgressCallback, TokenFile, open_tokens, paths_of
from .heal import heal
from .loop import TrainingStep, usual_rate
from .parallel import process_group
from .plan import Arm, Plan, PlannedVariant, arms_of, label_of, planned_variants, read_plan, slug_of
from .state import METRICS, put, remove_empty
from .train import CONTEXT, TextReader, folder_of, longest, require_trainable, size_of, split, train, tree_of

_RESULT = "ablation.json"
_OWN = ("data", "held-out", "trees", "changed", "runs")  # the folders that an ablation writes next to its table
_PREPARED = ".ablation-begun"
"""The folder inside OUT in which the files of a new ablation are prepared, before they replace those of an old one."""
_CHANGED = {
    "tree": "the architecture of the variant changed",
    "swaps": "the swaps of the variant changed",
    "data": "it was trained on other tokens",
    "held_out": "another share or text was held out",
}
"""For settings whose stored values are hashes or lists: what an error message says if the setting of a finished run
differs from the plan. For other settings, the message quotes both values."""


@dataclass(frozen=True)
class RunResult(Record):
    """A finished run."""

    seed: int
    loss: float
    """The loss on the held-out text, in nats per token."""
    kl: float | None
    """The KL divergence from the base, in nats per token; None if the run trained from random weights."""
    seconds: float
    """The training time in seconds."""
    pace: float
    """Training tokens per second in the median step."""
    curve: list[dict[str, Any]]
    """The evaluations during training, as JSON objects. `tokens` is the number of training tokens until then.
    `held_out` is the loss on the held-out text, or the KL divergence from the base in a run that heals."""


@dataclass(frozen=True)
class Difference(Record):
    """The loss of a variant minus the loss of the base with the same seed, over all seeds."""

    mean: float
    low: float | None
    """The lower end of the 95 % interval of the mean (Student's t); None with one seed."""
    high: float | None
    """The upper end of the 95 % interval of the mean; None with one seed."""
    seeds: int
    """The number of seeds for which both the variant and the base have a finished run."""

    @property
    def significant(self) -> bool:
        """Whether the difference is significant: its 95 % interval does not contain 0."""
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high


@dataclass(frozen=True)
class VariantResult(Record):
    """The results of a variant, or of the base, at one training budget."""

    JSON = "name comment tokens flops costs loss spread pace difference runs"

    name: str
    comment: str
    """The comment on this variant in the plan."""
    tokens: int
    """Training tokens per run."""
    flops: int
    """FLOPs per run. For runs that heal, they include the teacher's forward passes."""
    costs: Costs
    """The size of the model, and the cost of one token at the context length of the training."""
    runs: tuple[RunResult, ...]
    """The finished runs."""
    difference: Difference | None = None
    """The difference between the losses of this variant and of the base; None for the base itself."""

    @property
    def loss(self) -> float | None:
        """The mean loss over the seeds."""
        return statistics.mean(run.loss for run in self.runs) if self.runs else None

    @property
    def spread(self) -> float | None:
        """The largest loss of the runs minus the smallest; None with fewer than two runs."""
        losses = [run.loss for run in self.runs]
        return max(losses) - min(losses) if len(losses) > 1 else None

    @property
    def pace(self) -> float | None:
        """The median of the runs' tokens per second."""
        return statistics.median(run.pace for run in self.runs) if self.runs else None


@dataclass(frozen=True)
class Ablation(Record, Shown):
    """The table of an ablation, with the runs that are finished so far."""

    JSON = "schema_version name description how seeds context data held_out left rows"

    name: str
    """The name of the plan."""
    description: str
    """The description of the ablation in the plan."""
    how: str
    """Whether the runs "train" from random weights, or "heal" variants of the base."""
    seeds: int
    """The number of runs of a variant at every budget. They differ in their seeds."""
    context: int
    """Tokens per window."""
    data: str
    """The sha256 of the training tokens."""
    held_out: float | str
    """The share of the tokens that is held out, or the sha256 of the tokens of a separate held-out text."""
    rows: tuple[VariantResult, ...]
    """The base and the variants, the base first, at every budget."""
    left: int
    """The number of runs that are not finished yet."""
    schema_version: int = field(default=1, repr=False)


# --- the runs ---------------------------------------------------------------------------------------------------------


@takes(Opening)
def ablate(
    plan: str | Path,
    out: str | Path,
    *,
    data: str | Path | Sequence[str | Path] = (),
    device: str = "auto",
    resume: bool = False,
    force: bool = False,
    tell: Callable[[str, int, TrainingStep], None] = lambda name, seed, step: None,
    ended: Callable[[str, int, RunResult], None] = lambda name, tokens, result: None,
    progress: ProgressCallback | None = None,
    **opening: Unpack[Opening],
) -> Ablation:
    """Run the base and every variant of a plan with every seed. Finished runs are not repeated.

    Args:
        plan: a TOML file, or the name of a plan that comes with gptkit.
        out: the folder for all files. After every run, gptkit writes its ablation.json again.
        data: text files, or one folder that `tokenize` wrote, instead of the texts in the plan.
        device: where to train: "cpu", "cuda", "cuda:1" or "mps"; by default ("auto") on a GPU if there is one.
        resume: continue the ablation in `out`. Variants and seeds that are new in the plan are also run.
        force: start again in a folder that an ablation wrote. Its earlier results are replaced.
        offline, allow_pickle: see `Opening`.
        tell: called after every step, with the variant's name, the seed and the step.
        ended: called after every run, with the variant's name, the budget in tokens and the result.
        progress: called during tokenisation after every piece of text, with its number of bytes and the number of bytes
            of all texts.

    Raises:
        InvalidInput: the plan is not valid, or the runs in `out` belong to another plan.
        UsageError, SwapRefused, ConfigError, Offline, GptkitError, KeyboardInterrupt: as in `train`, `heal` and `swap`.
    """
    target = Path(out).expanduser()
    inputs = _Inputs.of(read_plan(plan), data, device, opening)
    with ExitStack() as stack:
        require_place(target)
        stack.enter_context(locked(target))
        resumed = _claim(target, resume, force)
        stack.callback(_tidy, target)
        prepared = target / _PREPARED
        if not resumed:
            prepared.mkdir(parents=True)
            runs, _ = inputs.prepared_in(prepared, tell, progress)
            put(prepared / _RESULT, json_bytes(_table(runs, inputs.variants, {}).as_json()))
            _take_over(target, prepared)
        runs, models = inputs.prepared_in(target, tell, progress)
        results = {(variant, seed): runs.result(variant, seed) for seed in inputs.seeds for variant in inputs.variants}
        (target / "runs").mkdir(exist_ok=True)
        put(target / _RESULT, json_bytes(_table(runs, inputs.variants, results).as_json()))
        for (variant, seed), result in results.items():
            if result is None:
                results[variant, seed] = result = runs.run(variant, seed, models[variant.arm.name])
                ended(variant.arm.name, variant.tokens, result)
                put(target / _RESULT, json_bytes(_table(runs, inputs.variants, results).as_json()))
        return _table(runs, inputs.variants, results)


@dataclass(frozen=True)
class _Inputs:
    """Everything that an ablation reads, checked before any file is written."""

    plan: Plan
    arms: list[Arm]  # the base and the variants, the base first
    variants: list[PlannedVariant]  # the base and the variants, once for every budget
    texts: list[Path | str]
    settings: dict[str, Any]  # the arguments of `train` and `heal` that all runs share
    device: str
    opening: Opening
    tokenizer: str | None  # the model whose tokenizer reads the texts; None trains a new tokenizer

    @classmethod
    def of(cls, plan: Plan, data: str | Path | Sequence[str | Path], device: str, opening: Opening) -> _Inputs:
        """Return the inputs for a plan. The training texts are `data`, or those in the plan if `data` is empty.

        Raises:
            UsageError, InvalidInput, SwapRefused, ConfigError, Offline: as in `ablate`.
        """
        texts: list[Path | str] = [*paths_of(data)] or [*plan.data]
        if not texts:
            raise UsageError(
                "the plan does not name a training text", 'Give --data FILE, or set data = ["FILE"] in the plan.'
            )
        arms = arms_of(plan, opening)
        length = plan.context or min(CONTEXT, *(longest(arm.spec) for arm in arms))
        variants = planned_variants(plan, arms, length)
        base = plan.base if isinstance(plan.base, str) else None
        has_weights = base is not None and not tree_of(base, False, opening)[1]
        settings: dict[str, Any] = {
            "context": length, "batch": plan.windows(length) * length, "warmup": plan.warmup, "clip": plan.clip,
            "rate": usual_rate(size_of(arms[0].spec)) if plan.rate is None and plan.how == "train" else plan.rate,
            "decay": {"train": 0.1, "heal": 0.0}[plan.how] if plan.decay is None else plan.decay,
        }  # fmt: skip
        return cls(plan, arms, variants, texts, settings, device, opening, base if has_weights else None)

    @property
    def seeds(self) -> range:
        return range(self.plan.seed, self.plan.seed + self.plan.seeds)

    def prepared_in(
        self, folder: Path, tell: Callable[[str, int, TrainingStep], None], progress: ProgressCallback | None
    ) -> tuple[_Runs, dict[str, Path | str]]:
        """Write the tokens of the texts and the models of all variants into a folder, before the first run.

        After this, only the runs themselves are expected to fail.

        Args:
            folder: the folder.
            tell: see `ablate`. It is called by the object that makes the runs.
            progress: see `ablate`.

        Returns:
            An object that makes the runs; and a dictionary from the name of the base or of a variant to the model from
            which its runs start.
        """
        held_out, length, vocabulary = self.plan.held_out, self.settings["context"], self.arms[0].spec.vocab_size
        windows = self.plan.windows(length)
        with process_group(self.device) as group:
            reader = TextReader(
                folder, True, group, self.tokenizer, vocabulary, progress, self.opening.get("offline", False)
            )
            tokens = reader(self.texts, "data")
            if tokens.vocabulary > vocabulary:
                raise UsageError(
                    f"the texts are tokenised with a vocabulary of {tokens.vocabulary:,} tokens, but the vocabulary of"
                    f" the plan's models has only {vocabulary:,}",
                    "Give the text files themselves, or tokenise them with a smaller --vocabulary.",
                )
            for arm in self.arms:
                with in_messages(label_of(arm)):
                    require_trainable(arm.spec, tokens.documents > 1, False)
            split(tokens, held_out, reader, length, windows, True)
        held_out = str(folder_of([held_out], folder / "held-out")) if isinstance(held_out, str) else held_out
        settings = {**self.settings, "held_out": held_out}
        runs = _Runs(self.plan, folder, self.texts, tokens, settings, self.device, self.opening, tell)
        return runs, {arm.name: runs.model(arm) for arm in self.arms}


def _claim(target: Path, resume: bool, force: bool) -> bool:
    """Return whether the folder `target` has an ablation to be continued, and remove interrupted preparations in it.

    Raises:
        UsageError: the folder has other files, or it has an ablation and neither `resume` nor `force` was given.
    """
    if not target.exists() or (target.is_dir() and all(path.name == _PREPARED for path in target.iterdir())):
        shutil.rmtree(target / _PREPARED, ignore_errors=True)
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
    shutil.rmtree(target / _PREPARED, ignore_errors=True)  # a killed call may have written it
    return resume


def _take_over(target: Path, prepared: Path) -> None:
    """Move the files of a new ablation from `prepared` to `target`. An older ablation in `target` is removed.

    ablation.json is moved first, because gptkit recognises the folder of an ablation by this file.
    """
    (prepared / _RESULT).replace(target / _RESULT)
    for name in _OWN:  # keep other files, such as a user's notes
        shutil.rmtree(target / name, ignore_errors=True)
    for path in prepared.iterdir():
        path.rename(target / path.name)
    prepared.rmdir()


def _tidy(target: Path) -> None:
    """Remove the files of an ablation whose preparation was interrupted, or of which no run has started."""
    runs = target / "runs"
    empty = not runs.is_dir() or not any(runs.iterdir())
    for name in (_PREPARED, *(_OWN if empty else ())):
        shutil.rmtree(target / name, ignore_errors=True)
    if empty:
        (target / _RESULT).unlink(missing_ok=True)
        remove_empty(target)


@dataclass(frozen=True)
class _Runs:
    """An object that makes the runs of an ablation, in a folder that has the tokens of the texts."""

    plan: Plan
    folder: Path
    texts: Sequence[str | Path]
    data: TokenFile
    settings: dict[str, Any]  # the arguments of `train` and `heal` that all runs share
    device: str
    opening: Opening
    tell: Callable[[str, int, TrainingStep], None]

    @property
    def digest(self) -> str:
        """The sha256 of the training tokens."""
        return str(self.data.digest)

    @property
    def held_out(self) -> float | str:
        """The share of the tokens that is held out, or the sha256 of the tokens of a separate held-out text."""
        held_out: float | str = self.settings["held_out"]
        return str(open_tokens(Path(held_out)).digest) if isinstance(held_out, str) else held_out

    def _path(self, variant: PlannedVariant, seed: int) -> Path:
        return self.folder / "runs" / f"{variant.slug}-{seed}"

    def _about(self, variant: PlannedVariant, seed: int) -> dict[str, Any]:
        """Return the settings, seed and hashes that identify a run, as JSON values.

        The file of the run's result contains them, because a run of another plan may have the same file name.
        """
        tree = hashlib.sha256(json_bytes(to_json(variant.arm.spec))).hexdigest()
        base = variant.arm.start if self.plan.how == "heal" else ""
        steps = [step.as_json() for step in variant.arm.steps] if self.plan.how == "heal" else []
        return {
            "how": self.plan.how, "tree": tree, "base": base, "swaps": steps, "tokens": variant.tokens, "seed": seed,
            **self.settings, "data": self.digest, "held_out": self.held_out,
        }  # fmt: skip

    def result(self, variant: PlannedVariant, seed: int) -> RunResult | None:
        """Return the result of a finished run from its file, or None if the run is not finished.

        Raise InvalidInput if the file is damaged or was written for another plan.
        """
        path, identity = self._path(variant, seed).with_suffix(".json"), self._about(variant, seed)
        if not path.is_file():
            return None
        try:
            content = json.loads(read_small(path, 2**26))
            result, stored = RunResult(**content["result"]), dict(content["about"])
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise InvalidInput(
                f"{path} cannot be read: {error}", "Remove this file, and repeat the run with --resume."
            ) from error
        for key in identity:
            if stored.get(key) != json.loads(json.dumps(identity[key])):
                reason = _CHANGED.get(key, f"its {key} is {stored.get(key)}, not {identity[key]}")
                raise InvalidInput(
                    f"{path} belongs to another plan: {reason}",
                    "Restore the plan, choose another OUT, or start again with --force.",
                )
        return result

    def model(self, arm: Arm) -> Path | str:
        """Return the path (or the name on the hub) of the model from which the runs of a variant start.

        If the runs train from random weights, this is a file with the variant's architecture. If they heal, it is a
        checkpoint: the base after the variant's swaps. The file or checkpoint is written if it does not exist yet.
        """
        name = slug_of(arm.name)
        if self.plan.how == "train":
            (self.folder / "trees").mkdir(exist_ok=True)
            return write_spec(arm.spec, self.folder / "trees" / f"{name}.json", force=True)
        if not arm.steps:
            return str(arm.start)
        identity = json_bytes([arm.start, self.digest, *(step.as_json() for step in arm.steps)])
        path = self.folder / "changed" / f"{name}-{hashlib.sha256(identity).hexdigest()[:8]}"
        path.parent.mkdir(exist_ok=True)
        if not path.is_dir():
            with in_messages(label_of(arm)):
                text = next((text for text in self.texts if Path(text).is_file()), None)  # some swaps are fitted on it
                how: Any = {"measured": False, "calibrate": text, "device": self.device, **self.opening}
                swap(str(arm.start), path, arm.steps, **how)
        return path

    def run(self, variant: PlannedVariant, seed: int, model: Path | str) -> RunResult:
        """Train or heal a model, and write and return the result of the run.

        An interrupted run continues from its last checkpoint.
        """
        path, name = self._path(variant, seed), variant.arm.name
        kl: float | None
        options: Any = {**self.settings, **self.opening, "device": self.device, "every": self.plan.every}
        options |= {"tokens": variant.tokens, "seed": seed}
        options |= {"resume": True, "force": True}  # files without a result are of this run, which was interrupted
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
            # A run that continued at another rate could not be compared with the other runs.
            shutil.rmtree(folder, ignore_errors=True)
            raise NoNumber(
                error.message,
                "Try a smaller rate (learning rate) or clip (gradient norm) in the plan. Start all runs with --force.",
            ) from error
        *earlier_lines, last_lines = [_metrics(phase) for phase in phases if phase.is_dir()]
        # Evaluations are only in the last phase: when layers are trained alone, no KL is measured.
        tokens_before = sum(lines[-1]["tokens"] for lines in earlier_lines)
        curve = [
            {"tokens": tokens_before + line["tokens"], "held_out": line["held_out"]}
            for line in last_lines
            if line["held_out"] is not None
        ]
        pace = last_lines[0]["tokens"] / statistics.median(
            line["took"] for line in itertools.chain(*earlier_lines, last_lines)
        )
        result = RunResult(seed, loss, kl, seconds, pace, curve)
        put(path.with_suffix(".json"), json_bytes({"about": self._about(variant, seed), "result": result.as_json()}))
        if not self.plan.keep:
            shutil.rmtree(path)
        shutil.rmtree(folder)
        return result


def _metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the measurements in a run's metrics.jsonl, one entry per step."""
    return [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]


# --- the table --------------------------------------------------------------------------------------------------------


def _table(
    runs: _Runs, variants: Sequence[PlannedVariant], results: Mapping[tuple[PlannedVariant, int], RunResult | None]
) -> Ablation:
    """Return the table of the finished runs, in which every variant is compared with the base at the same budget."""
    plan, length = runs.plan, runs.settings["context"]

    def finished(variant: PlannedVariant) -> tuple[RunResult, ...]:
        return tuple(result for (other, _), result in results.items() if other is variant and result is not None)

    bases = {variant.budget: finished(variant) for variant in variants if variant.arm.name == "base"}
    rows = []
    for variant in variants:
        arm = variant.arm
        difference = None if arm.name == "base" else paired(finished(variant), bases[variant.budget])
        about = arm.name, arm.comment, variant.tokens, variant.flops, costs(arm.spec, length)
        rows.append(VariantResult(*about, finished(variant), difference))
    unfinished = plan.seeds * len(rows) - sum(len(row.runs) for row in rows)
    texts = runs.digest, runs.held_out
    return Ablation(plan.name, plan.description, plan.how, plan.seeds, length, *texts, tuple(rows), unfinished)


def paired(runs: Sequence[RunResult], base_runs: Sequence[RunResult]) -> Difference | None:
    """Return the mean difference between the losses of a variant's runs and of the base's runs with the same seeds.

    The result is None if there is no seed with which both the variant and the base were run.
    """
    base_losses = {run.seed: run.loss for run in base_runs}
    differences = [run.loss - base_losses[run.seed] for run in runs if run.seed in base_losses]
    if not differences:
        return None
    mean, low, high = statistics.mean(differences), None, None
    if len(differences) > 1:
        reach = student(len(differences) - 1) * statistics.stdev(differences) / math.sqrt(len(differences))
        low, high = mean - reach, mean + reach
    return Difference(mean, low, high, len(differences))


_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # for 1 to 9 degrees of freedom


def student(freedom: int) -> float:
    """Return half the width of the 95 % confidence interval of a mean, in standard errors (Student's t).

    `freedom` is the number of degrees of freedom. Up to nine, the result is from a table. Above nine, it is computed by
    the Cornish-Fisher expansion, to three correct digits.
    """
    if freedom <= len(_STUDENT):
        return _STUDENT[freedom - 1]
    z = statistics.NormalDist().inv_cdf(0.975)
    terms = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + math.fsum(term / freedom**power for power, term in enumerate(terms, 1))


def read_ablation(folder: str | Path) -> dict[str, Any]:
    """Return the content of ablation.json in the folder of an ablation. Raise UsageError if it has no such file."""
    path = Path(folder) / _RESULT
    try:
        content = json.loads(read_small(path, 2**28))
        rows = content["rows"]
        assert isinstance(rows, list) and all(isinstance(row, dict) for row in rows)
    except (OSError, ValueError, KeyError, TypeError, AssertionError) as error:
        raise UsageError(
            f"{folder} is not a folder that gptkit ablate wrote", "Run one first: gptkit ablate PLAN OUT"
        ) from error
    return dict(content)
