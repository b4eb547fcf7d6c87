"""Make the training runs of `heal` with several seeds: of the changed model, of the control and of the floor.

The module `heal` explains these three kinds of runs, and `rates` the trials that choose the learning rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from ..display import Record
from ..errors import NoNumber
from ..modules import Decoder
from .data import NOWHERE, Stretch, TokenFile, Windows
from .distillation import TeacherLogits, block_local, distilled, divergence
from .loop import Abandoned, Batch, Loss, Run, Settings, TrainingStep, cross_entropy, fit, next_token
from .parallel import Group
from .rates import TRIAL, Trial, TrialNotes, Trials, first_guess, next_run, trial_steps
from .state import RUN, Store
from .trainable import adapted, chosen, rank_of, touched

_EVALUATED = 2048  # the fewest tokens that are evaluated at once
_CHECKED = 100  # steps between two checks of the token file, if evaluations are timed by the clock
_LOW_RANK = 3.0  # the learning rate of low-rank updates, as a multiple of the usual one
_CONTROLS_GAP = 1 / 27  # the gap in nats from which the control's first rate is guessed: a ninth of the usual rate


@dataclass(frozen=True)
class HeldOutFigures(Record):
    """The measurements of a model on the held-out text, in nats per token."""

    kl: float  # the KL divergence of the model's predictions from the teacher's
    loss: float  # the cross entropy of the model's predictions

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700))


@dataclass(frozen=True)
class Outcome(Record):
    """The results of one kind of run over all seeds."""

    JSON = "runs seconds kl loss kl_spread loss_spread rate tried"

    runs: tuple[HeldOutFigures, ...]
    """The measurements of the trained model, for every seed."""
    seconds: float
    """The training time of all seeds in seconds, without runs that were abandoned for a lower learning rate."""
    rate: float
    """AdamW's highest learning rate."""
    tried: Trials = ()
    """The trials that chose the rate. There are none if the user gave the rate, and for the floor."""

    @property
    def kl(self) -> float:
        return sum(run.kl for run in self.runs) / len(self.runs)

    @property
    def loss(self) -> float:
        return sum(run.loss for run in self.runs) / len(self.runs)

    @property
    def perplexities(self) -> list[float]:
        return [run.perplexity for run in self.runs]

    @property
    def kl_spread(self) -> float:
        """The largest KL divergence of the runs minus the smallest."""
        return max(run.kl for run in self.runs) - min(run.kl for run in self.runs)

    @property
    def loss_spread(self) -> float:
        return max(run.loss for run in self.runs) - min(run.loss for run in self.runs)


def stores_in(folder: Path, group: Group) -> list[Store]:
    """Return the unfinished runs of a call of `heal`. `folder` contains a folder for every run of the call."""
    return [Store(path.parent, group) for path in sorted(folder.glob(f"*/{RUN}"))]


@dataclass
class Runs:
    """An object that makes the training runs of one call of `heal`, with the models and settings that they share."""

    original: Decoder  # the teacher
    windows: Windows  # the windows of the held-out text
    settings: Settings  # the settings of all runs; its learning rate is replaced by that of a run
    rate: float | None  # the learning rate that the user gave for the healed model
    local: float  # the share of the budget in which changed layers are trained alone
    layers: tuple[int, ...]  # the changed layers
    hidden: float  # the weight of the hidden-state loss
    tokens: TokenFile
    training: Stretch  # the part of the tokens to train on
    group: Group
    folder: Path  # the folder that contains the folders of all runs
    about: Mapping[str, Any]  # the JSON values that identify the call of `heal`: hashes of its inputs, and options
    resume: bool
    force: bool
    tell: Callable[[str, TrainingStep], None]  # called with the name of the run and a step

    def __post_init__(self) -> None:
        call = {**self.about, **msgspec.to_builtins(self.settings), "rate": self.rate}
        self.notes = TrialNotes(self.folder, call, self.group)
        self.teacher_logits = TeacherLogits(self.original)

    def _sample(self) -> Batch:
        """Return a batch of held-out text, with as many tokens as one step has. It is the same in every process."""
        parts = max(1, len(self.windows.ids) // self.settings.windows)
        return Batch.of(self.windows.part(0, parts), self.group.device)

    def figures_of(self, model: Decoder) -> HeldOutFigures:
        """Return a model's loss on the held-out text, and its KL divergence from the teacher.

        The model is not put into eval mode. In eval mode, gptkit's modules may join several parameters in one matrix,
        and an optimizer whose moments have the old memory layout would fail.
        """
        windows, sums, settings = self.windows, [0.0, 0.0], self.settings
        # Read as many windows as a part of a step has, or more if that is little work for a forward pass.
        at_once = max(-(-settings.windows // (settings.accumulate * self.group.size)), _EVALUATED // settings.context)
        parts = -(-len(windows.ids) // at_once)
        with torch.no_grad():
            for number in range(parts):
                batch = Batch.of(windows.part(number, parts), self.group.device)
                target = self.teacher_logits(batch)
                logits = target if model is self.original else model(batch.ids, documents=batch.documents)
                sums[0] += float(divergence(target, logits, batch.targets != NOWHERE))
                sums[1] += float(cross_entropy(logits, batch.targets))
        counted = max(1, windows.counted)
        return HeldOutFigures(max(sums[0], 0.0) / counted, sums[1] / counted)

    def _teacher(self) -> Decoder:
        """Return the teacher. It is compiled if the option asks for it and the loss needs no hidden states of it."""
        compiles = self.settings.compiled and not self.hidden
        return torch.compile(self.original) if compiles else self.original  # type: ignore[return-value]

    def _fit(
        self,
        name: str,
        model: Decoder,
        loss: Loss,
        settings: Settings,
        trained: set[str] | None = None,
        earlier: Run | None = None,
        trial: _TrialJudge | None = None,
        **evaluation: Any,
    ) -> Run:
        """Make one run, or continue it from its last checkpoint. The checkpoint stays until all runs have ended.

        Args:
            name: the name of the run and of its folder.
            model: the model, which is trained in place.
            loss: the loss to minimise.
            settings: the budget and all other settings.
            trained: the names of the parameters to train; by default all.
            earlier: the run that trained the same model before this one, if any. This run reads the windows after those
                that `earlier` read.
            trial: a function that decides whether the run continues, if the run is on trial.
            evaluation: further arguments of `fit`.
        """
        store, earlier = Store(self.folder / name, self.group), earlier or Run()

        def begin() -> None:
            store.folder.mkdir(parents=True, exist_ok=True)
            store.begin({"run": name, **self.about, **msgspec.to_builtins(settings)}, self.resume, self.force)

        def step_of(number: int) -> Windows:
            if number % (settings.every or _CHECKED) == 0:
                self.tokens.require_unchanged()
            return self.training.step(earlier.step + number, settings.windows, settings.seed)

        self.group.lead(begin)
        evaluation = {"held_out": self.windows, **evaluation}
        if trial is not None:
            evaluation["continues"] = lambda run: trial(model, earlier.step + run.step, earlier.seconds + run.seconds)
        return fit(
            model, step_of, settings=settings, group=self.group, store=store, loss=loss, trained=trained,
            tell=partial(self.tell, name), **evaluation,
        )  # fmt: skip

    def _distil(
        self,
        name: str,
        model: Decoder,
        settings: Settings,
        *,
        trained: str,
        seed: int,
        trial: _TrialJudge | None = None,
        **evaluation: Any,
    ) -> _Totals:
        """Train a model to predict like the teacher: first the changed layers alone, if `local` asks for it, then all.

        The second run continues with the text where the first one ended.

        Args:
            name: the kind of run, such as "healed". With the `seed`, it names the folders of both runs.
            model: the model, which is trained in place.
            settings: the settings of both runs together.
            trained: the parameters to train, as in `HealOptions`.
            seed: the number of the seed, from 0.
            trial: a function that decides whether the runs continue, if they are on trial.
            evaluation: further arguments of `fit`.
        """
        declared, rank, alone = list(model.spec.parameters()), rank_of(trained), Run()
        with ExitStack() as stack:
            if rank:
                torch.manual_seed(settings.seed)
                names = stack.enter_context(adapted(model, declared, rank))
            else:
                names = chosen(trained, declared, lambda: touched(self.original, model))
            count = sum(tensor.numel() for tensor_name, tensor in model.named_parameters() if tensor_name in names)
            prefixes = tuple(f"blocks.{layer}." for layer in self.layers)
            inside = {parameter for parameter in names if parameter.startswith(prefixes)} if self.local else set()
            first, rest = _parts(settings, self.local if inside and settings.steps != 1 else 0.0)
            if inside and first is not None:
                loss = block_local(self.original, self.layers, self._sample())
                alone = self._fit(f"{name}-layers-{seed}", model, loss, first, inside, trial=trial, held_out=None)
                evaluation |= {"start_loss": None}  # the loss is no longer that at the start
            loss = distilled(self._teacher(), self.hidden, self._sample(), self.teacher_logits)
            run = self._fit(f"{name}-{seed}", model, loss, rest, names, alone, trial, **evaluation)
        return _Totals(alone.step + run.step, alone.seconds + run.seconds, count)

    def _settings_of(self, seed: int, rate: float, spent: float = 0.0) -> Settings:
        """Return the settings of the run with this seed and learning rate.

        `spent` is the number of seconds that abandoned trials took. A budget in seconds is reduced by it.
        """
        common = self.settings
        seconds = None if common.seconds is None else max(common.seconds - spent, common.seconds / 10)
        return msgspec.structs.replace(common, rate=rate, seed=common.seed + seed, seconds=seconds)

    def _all_seeds(
        self,
        name: str,
        model: Decoder,
        start: HeldOutFigures,
        loss_of: Callable[[HeldOutFigures], float],
        rate: float,
        train: _TrainFunction,
        seeds: int,
        *,
        on_trial: bool = True,
    ) -> tuple[Decoder, Outcome, _Totals]:
        """Make the runs of one kind with all seeds.

        Args:
            name: the kind of run, such as "healed". Trials are recorded under this name.
            model: the model to train. Every run trains a copy of it.
            start: the measurements of the model before training. They are also the result of a run that makes the model
                worse.
            loss_of: returns, from the measurements of a model, the value that training minimises.
            rate: AdamW's highest learning rate, or the rate of the first trial if `on_trial` is true.
            train: a function that trains one copy.
            seeds: the number of runs.
            on_trial: whether trials at the start of the first run choose the rate.

        Returns:
            The model of the first run, the results, and the totals of the last run.
        """
        finished, figures, seconds, trials, spent = model, [], 0.0, Trials(), 0.0
        for seed in range(seeds):
            if seed == 0 and on_trial:
                copy, totals, rate, trials, spent = self._first_run(name, model, loss_of(start), loss_of, rate, train)
            else:
                copy, settings = deepcopy(model), self._settings_of(seed, rate, spent)
                totals = train(copy, settings, seed, start_loss=self._known_start(loss_of(start)))
            result = self.figures_of(copy.eval())
            better = loss_of(result) < loss_of(start)
            figures.append(result if better else start)
            if seed == 0:
                finished = copy if better else deepcopy(model)
            seconds += totals.seconds
        return finished, Outcome(tuple(figures), seconds, rate, trials), totals

    def _known_start(self, loss: float) -> float | None:
        """Return `loss`, the loss before training, or None if it was measured in another dtype than that of the run."""
        return loss if self.settings.dtype == "float32" else None

    def _first_run(self, name: str, model: Decoder, *arguments: Any) -> tuple[Decoder, _Totals, float, Trials, float]:
        """Make the first run of a kind. If a trial makes the model worse, start the run again at a lower learning rate.

        Args:
            name: the kind of run, such as "healed".
            model: the model, of which copies are trained.
            arguments: `start`, `loss_of`, `first` and `train`; see `_attempt`.

        Returns:
            The trained copy of the model, the totals of its run, its learning rate, the trials, and the seconds of the
            runs that were abandoned.
        """
        while True:
            copy = deepcopy(model)
            if (result := self._attempt(name, copy, *arguments)) is not None:
                return copy, *result

    def _attempt(
        self,
        name: str,
        copy: Decoder,
        start: float,
        loss_of: Callable[[HeldOutFigures], float],
        first: float,
        train: _TrainFunction,
    ) -> tuple[_Totals, float, Trials, float] | None:
        """Try to make the first run of a kind, at the learning rate that follows from the trials so far.

        Args:
            name: the kind of run, such as "healed".
            copy: the model to train, in place.
            start: the model's loss on the held-out text before training. A run on trial continues only if its loss is
                smaller than `start`.
            loss_of: returns, from the measurements of a model, the value that training minimises.
            first: the learning rate of the first trial.
            train: a function that trains the copy.

        Returns:
            The totals of the run, its learning rate, the trials, and the seconds of the runs that were abandoned. If
            this run was abandoned, its trial is recorded, and the result is None.
        """
        steps, seconds = self.settings.steps, self.settings.seconds
        trial_end = 0 if steps is None else trial_steps(steps)
        trials = self.notes.trials(name)
        rate, on_trial = next_run(first, start, trials)
        continued = bool(trials) and not on_trial and trials[-1].rate == rate
        spent = sum(trial.seconds for trial in (trials[:-1] if continued else trials))
        own_trial: list[Trial] = []

        def continues(copy: Decoder, step: int, took: float) -> bool:
            if own_trial or (step < trial_end if seconds is None else took < TRIAL * seconds):
                return True
            loss = loss_of(self.figures_of(copy))
            own_trial.append(Trial(rate, loss if math.isfinite(loss) else None, took))
            good = next_run(first, start, (*trials, *own_trial)) == (rate, False)
            if good:
                self.notes.add(name, own_trial[0])
            return good

        judge = continues if on_trial and (trial_end or seconds is not None) else None
        try:
            settings = self._settings_of(0, rate, spent)
            totals = train(copy, settings, 0, start_loss=self._known_start(start), trial=judge)
            return totals, rate, self.notes.trials(name), spent
        except Abandoned:
            pass
        except NoNumber:
            if own_trial or judge is None:
                raise  # the trial was over
            own_trial.append(Trial(rate, None, 0.0))
        for part in (f"{name}-0", f"{name}-layers-0"):
            self.group.lead(Store(self.folder / part, self.group).forget)
        self.notes.add(name, own_trial[0])  # last, because a recorded trial is not repeated
        return None

    def healed(
        self, model: Decoder, start: HeldOutFigures, trained: str, seeds: int
    ) -> tuple[Decoder, Outcome, int, int]:
        """Train the changed model to predict like the teacher, once with every seed.

        Args:
            model: the changed model.
            start: its measurements on the held-out text before training.
            trained: the parameters to train, as in `HealOptions`.
            seeds: the number of runs.

        Returns:
            The model of the first seed, or the untrained changed model if training did not make it better; the results;
            the number of steps of a run; and the number of trained parameters.
        """

        def train(copy: Decoder, settings: Settings, seed: int, **options: Any) -> _Totals:
            return self._distil("healed", copy, settings, trained=trained, seed=seed, keep_best=True, **options)

        usual = self.settings.rate * (_LOW_RANK if rank_of(trained) else 1.0)
        rate = first_guess(usual, start.kl) if self.rate is None else self.rate
        finished, outcome, totals = self._all_seeds(
            "healed", model, start, lambda figures: figures.kl, rate, train, seeds, on_trial=self.rate is None
        )
        return finished, outcome, totals.steps, totals.parameters

    def control(self, original: HeldOutFigures, seeds: int) -> Outcome:
        """Train the teacher further on the same tokens as a language model (the control). Trials choose the rate.

        The results are those of the best evaluation, which may be the one before training.

        Args:
            original: the teacher's measurements on the held-out text before training.
            seeds: the number of runs.
        """

        def train(copy: Decoder, settings: Settings, seed: int, **options: Any) -> _Totals:
            run = self._fit(f"control-{seed}", copy, next_token, settings, keep_best=True, **options)
            return _Totals(run.step, run.seconds, 0)

        rate = first_guess(self.settings.rate, _CONTROLS_GAP)
        return self._all_seeds("control", self.original, original, lambda figures: figures.loss, rate, train, seeds)[1]

    def floor(self, make: Callable[..., Decoder], seeds: int) -> Outcome:
        """Train all parameters of the changed architecture from random weights (the floor), at the usual rate.

        `make` is called with a `seed`, and returns the model with its random weights.
        """
        figures, seconds = [], 0.0
        for seed in range(seeds):
            model, settings = make(seed=self.settings.seed + seed), self._settings_of(seed, self.settings.rate)
            totals = self._distil("floor", model, settings, trained="all", seed=seed, keep_best=True)
            figures.append(self.figures_of(model.eval()))
            seconds += totals.seconds
        return Outcome(tuple(figures), seconds, self.settings.rate)

    def done(self) -> None:
        """Remove the checkpoints after all runs have ended. The measurements stay."""
        for store in stores_in(self.folder, self.group):
            store.done()


@dataclass(frozen=True)
class _Totals:
    """The number of steps and seconds of a training. It may consist of two runs: changed layers alone, then all."""

    steps: int
    seconds: float
    parameters: int  # the number of trained parameters


_TrainFunction = Callable[..., _Totals]
"""A function that trains a model. Its arguments are the model, the settings of the run, the number of the seed, and
further arguments of `fit` by name.
"""
_TrialJudge = Callable[[Decoder, int, float], bool]
"""A function that decides whether a run on trial continues. Its arguments are the model, and the number of steps and
seconds since the start of the run."""


def _parts(settings: Settings, local: float) -> tuple[Settings | None, Settings]:
    """Divide a budget in two, and return the settings of both runs.

    The first run has the share `local` of the budget, and trains changed layers alone. It is None if `local` is 0. The
    second run has the rest of the budget.
    """
    if not local:
        return None, settings
    if settings.steps is None:
        assert settings.seconds is not None
        first: dict[str, Any] = {"seconds": settings.seconds * local}
        rest: dict[str, Any] = {"seconds": settings.seconds * (1 - local)}
    else:
        steps = min(max(1, round(settings.steps * local)), settings.steps - 1)
        first, rest = {"steps": steps}, {"steps": settings.steps - steps}
    return msgspec.structs.replace(settings, **first), msgspec.structs.replace(settings, **rest)
