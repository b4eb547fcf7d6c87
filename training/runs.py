"""The runs of a healing: of the changed model, of the control and of the floor, each over several seeds."""

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
from .data import NOWHERE, TokenFile, Windows
from .distillation import Answers, block_local, distilled, divergence
from .loop import Abandoned, Batch, Loss, Run, Settings, TrainingStep, fit, lost, next_token
from .parallel import Group
from .rates import TRIAL, Notes, Trial, Tried, first_guess, next_run, trial_steps
from .state import RUN, Store
from .trainable import adapted, chosen, rank_of, touched

_EVALUATED = 2048  # tokens that are evaluated at once, at the least
_LOOKED = 100  # steps after which the tokens' file is looked at, of a run that evaluates by the clock
_LOW_RANK = 3.0  # times the usual rate is that of updates of a low rank
_CONTROLS_GAP = 1 / 27  # in nats, by which the control's first rate is guessed: a ninth of the usual one


@dataclass(frozen=True)
class Held(Record):
    """A model on the held-out text: the KL divergence of its predictions from the original's and its cross entropy,
    each in nats a token.
    """

    kl: float
    loss: float

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700))


@dataclass(frozen=True)
class Outcome(Record):
    """One kind of run over its seeds."""

    JSON = "runs=held seconds kl loss kl_spread loss_spread rate tried"

    held: tuple[Held, ...]
    """What the model of each seed comes to on the held-out text."""
    seconds: float
    """What all seeds took together, without runs that began again at a lower rate."""
    rate: float
    """AdamW's highest rate."""
    tried: Tried = ()
    """The trials by which the rate was chosen; none where it was given, or follows from a rule."""

    @property
    def kl(self) -> float:
        return sum(each.kl for each in self.held) / len(self.held)

    @property
    def loss(self) -> float:
        return sum(each.loss for each in self.held) / len(self.held)

    @property
    def perplexities(self) -> list[float]:
        return [each.perplexity for each in self.held]

    @property
    def kl_spread(self) -> float:
        """The largest less the smallest."""
        return max(each.kl for each in self.held) - min(each.kl for each in self.held)

    @property
    def loss_spread(self) -> float:
        return max(each.loss for each in self.held) - min(each.loss for each in self.held)


def stores_in(folder: Path, us: Group) -> list[Store]:
    """Return the runs that earlier calls left."""
    return [Store(each.parent, us) for each in sorted(folder.glob(f"*/{RUN}"))]


@dataclass
class Runs:
    """The runs of one healing, and what they have in common."""

    original: Decoder
    windows: Windows
    settings: Settings
    """Their rate is the usual one for random weights; `rate` and the trials say which one a run has."""
    rate: float | None
    """The rate that was asked for, of the healed model."""
    local: float
    layers: tuple[int, ...]
    hidden: float
    found: TokenFile
    training: Any
    group: Group
    folder: Path
    about: Mapping[str, Any]
    resume: bool
    force: bool
    tell: Callable[[str, TrainingStep], None]

    def __post_init__(self) -> None:
        asked = {**self.about, **msgspec.to_builtins(self.settings), "rate": self.rate}
        self.notes = Notes(self.folder, asked, self.group)
        self.answers = Answers(self.original)

    def _sample(self) -> Batch:
        """As much held-out text as a step has, the same in every process."""
        parts = max(1, len(self.windows.ids) // self.settings.windows)
        return Batch.of(self.windows.part(0, parts), self.group.device)

    def held(self, model: Decoder) -> Held:
        """Return what a model comes to on the held-out text. The model stays in its mode: in eval mode its parameters
        may move in memory, which an optimiser with moments of their layout does not survive.
        """
        windows, sums, settings = self.windows, [0.0, 0.0], self.settings
        # As many windows as a part of a step has, or more where that is little work for a whole pass.
        once = max(-(-settings.windows // (settings.accumulate * self.group.size)), _EVALUATED // settings.context)
        parts = -(-len(windows.ids) // once)
        with torch.no_grad():
            for number in range(parts):
                batch = Batch.of(windows.part(number, parts), self.group.device)
                wanted = self.answers(batch)
                given = wanted if model is self.original else model(batch.ids, documents=batch.documents)
                sums[0] += float(divergence(wanted, given, batch.targets != NOWHERE))
                sums[1] += float(lost(given, batch.targets))
        counted = max(1, windows.counted)
        return Held(max(sums[0], 0.0) / counted, sums[1] / counted)

    def _answering(self) -> Decoder:
        """The original, compiled where the model that learns of it is, and none looks into it."""
        found: Any = torch.compile(self.original) if self.settings.compiled and not self.hidden else self.original
        return found  # type: ignore[no-any-return]

    def _fit(
        self,
        name: str,
        model: Decoder,
        loss: Loss,
        settings: Settings,
        trained: set[str] | None = None,
        before: Run | None = None,
        trial: _Judges | None = None,
        **evaluating: Any,
    ) -> Run:
        """Make one run, from its last checkpoint where there is one, which then stays until all have ended. Its windows
        are those after the steps of the run `before`. A `trial` says whether the run goes on.
        """
        store, before = Store(self.folder / name, self.group), before or Run()

        def begin() -> None:
            store.folder.mkdir(parents=True, exist_ok=True)
            store.begin({"run": name, **self.about, **msgspec.to_builtins(settings)}, self.resume, self.force)

        def step_of(number: int) -> Windows:
            if number % (settings.every or _LOOKED) == 0:
                self.found.require_unchanged()
            windows: Windows = self.training.step(before.step + number, settings.windows, settings.seed)
            return windows

        self.group.lead(begin)
        evaluating = {"held_out": self.windows, **evaluating}
        if trial is not None:
            evaluating["goes_on"] = lambda run: trial(model, before.step + run.step, before.seconds + run.seconds)
        return fit(
            model, step_of, settings=settings, group=self.group, store=store, loss=loss, trained=trained,
            tell=partial(self.tell, name), **evaluating,
        )  # fmt: skip

    def _both(
        self,
        name: str,
        model: Decoder,
        settings: Settings,
        *,
        trained: str,
        suffix: str = "",
        trial: _Judges | None = None,
        **evaluating: Any,
    ) -> _Done:
        """Train layers by themselves, then the whole model on what is left of the text. The suffix is of both names."""
        declared, rank, begun = list(model.spec.parameters()), rank_of(trained), Run()
        with ExitStack() as stack:
            if rank:
                torch.manual_seed(settings.seed)
                names = stack.enter_context(adapted(model, declared, rank))
            else:
                names = chosen(trained, declared, lambda: touched(self.original, model))
            count = sum(each.numel() for each_name, each in model.named_parameters() if each_name in names)
            prefixes = tuple(f"blocks.{layer}." for layer in self.layers)
            inside = {each for each in names if each.startswith(prefixes)} if self.local else set()
            first, rest = _parts(settings, self.local if inside and settings.steps != 1 else 0.0)
            if inside and first is not None:
                loss = block_local(self.original, self.layers, self._sample())
                begun = self._fit(f"{name}-layers{suffix}", model, loss, first, inside, trial=trial, held_out=None)
                evaluating |= {"begun": None}  # layers by themselves moved it from there
            loss = distilled(self._answering(), self.hidden, self._sample(), self.answers)
            run = self._fit(f"{name}{suffix}", model, loss, rest, names, begun, trial, **evaluating)
        return _Done(begun.step + run.step, begun.seconds + run.seconds, count)

    def _with(self, seed: int, rate: float, seconds: float = 0.0) -> Settings:
        """Return the settings of a run, of whose budget trials took so many `seconds`."""
        given = self.settings
        left = None if given.seconds is None else max(given.seconds - seconds, given.seconds / 10)
        return msgspec.structs.replace(given, rate=rate, seed=given.seed + seed, seconds=left)

    def _seeded(
        self,
        name: str,
        model: Decoder,
        start: Held,
        loss: Callable[[Held], float],
        rate: float,
        train: _Trains,
        seeds: int,
        *,
        on_trial: bool = True,
    ) -> tuple[Decoder, Outcome, _Done]:
        """Make the runs of a kind, over some seeds.

        Args:
            name: of the kind, by which its trials are noted.
            model: what is trained, a copy in each run.
            start: its figures on the held-out text. A run that ends no better counts as the model as it was.
            loss: takes the loss that `train` lowers of such figures.
            rate: AdamW's highest, or the first to try where the runs are `on_trial`.
            train: trains.
            seeds: the number of runs.
            on_trial: whether the first run chooses the rate.

        Returns:
            The model of the first run, the figures, and what the last run came to.
        """
        finished, held, taken, tried, wasted = model, [], 0.0, Tried(), 0.0
        for seed in range(seeds):
            if seed == 0 and on_trial:
                own, done, rate, tried, wasted = self._first_of(name, model, loss(start), loss, rate, train)
            else:
                own, settings = deepcopy(model), self._with(seed, rate, wasted)
                done = train(own, settings, seed, begun=self._begun(loss(start)))
            found = self.held(own.eval())
            better = loss(found) < loss(start)
            held.append(found if better else start)
            if seed == 0:
                finished = own if better else deepcopy(model)
            taken += done.seconds
        return finished, Outcome(tuple(held), taken, rate, tried), done

    def _begun(self, loss: float) -> float | None:
        """Return the loss of a model as its run sees it, None where the run computes in another dtype."""
        return loss if self.settings.dtype == "float32" else None

    def _first_of(self, name: str, model: Decoder, *how: Any) -> tuple[Decoder, _Done, float, Tried, float]:
        """Make the first run of a kind: at its first rate, or again at a lower one where that does damage. See
        `_attempt` for the arguments.

        Returns:
            The trained copy of the model, what its run came to, its rate, the trials, and the seconds of the runs that
            did not go on.
        """
        while True:
            own = deepcopy(model)
            if (finished := self._attempt(name, own, *how)) is not None:
                return own, *finished

    def _attempt(
        self, name: str, own: Decoder, start: float, loss: Callable[[Held], float], first: float, train: _Trains
    ) -> tuple[_Done, float, Tried, float] | None:
        """Make the first run of a kind at the rate that follows from its trials.

        Args:
            name: of the kind.
            own: what is trained, in place.
            start: its loss on the held-out text; a run on trial goes on when it is below that.
            loss: takes the loss that counts of a model's figures.
            first: the rate of the first trial.
            train: trains.

        Returns:
            What the run came to, its rate, the trials, and the seconds of the runs that did not go on; None where this
            run did not go on, which is noted.
        """
        steps, seconds = self.settings.steps, self.settings.seconds
        after = 0 if steps is None else trial_steps(steps)
        tried = self.notes.tried(name)
        rate, on_trial = next_run(first, start, tried)
        went_on = bool(tried) and not on_trial and tried[-1].rate == rate
        wasted = sum(each.seconds for each in (tried[:-1] if went_on else tried))
        looked: list[Trial] = []

        def goes_on(own: Decoder, step: int, took: float) -> bool:
            if looked or (step < after if seconds is None else took < TRIAL * seconds):
                return True
            value = loss(self.held(own))
            looked.append(Trial(rate, value if math.isfinite(value) else None, took))
            good = next_run(first, start, (*tried, *looked)) == (rate, False)
            if good:
                self.notes.add(name, looked[0])
            return good

        trial = goes_on if on_trial and (after or seconds is not None) else None
        try:
            done = train(own, self._with(0, rate, wasted), 0, begun=self._begun(start), trial=trial)
            return done, rate, self.notes.tried(name), wasted
        except Abandoned:
            pass
        except NoNumber:
            if looked or trial is None:
                raise  # the trial was before
            looked.append(Trial(rate, None, 0.0))
        for part in (f"{name}-0", f"{name}-layers-0"):
            self.group.lead(Store(self.folder / part, self.group).forget)
        self.notes.add(name, looked[0])  # last: what is noted does not run again
        return None

    def healed(self, model: Decoder, start: Held, trained: str, seeds: int) -> tuple[Decoder, Outcome, int, int]:
        """Heal the changed model, whose figures are `start`, over some seeds. Return the model of the first one, which
        is the changed model itself where no training made it better, the figures, the steps and the number of
        parameters that were trained.
        """

        def train(own: Decoder, settings: Settings, seed: int, **how: Any) -> _Done:
            return self._both("healed", own, settings, trained=trained, suffix=f"-{seed}", keep_best=True, **how)

        usual = self.settings.rate * (_LOW_RANK if rank_of(trained) else 1.0)
        rate = first_guess(usual, start.kl) if self.rate is None else self.rate
        finished, outcome, done = self._seeded(
            "healed", model, start, lambda held: held.kl, rate, train, seeds, on_trial=self.rate is None
        )
        return finished, outcome, done.steps, done.count

    def control(self, original: Held, seeds: int) -> Outcome:
        """Train the original on the same tokens to predict them, at the rate that is best for it. Its figures are those
        at its best evaluation, which may be those before: `original`.
        """

        def train(own: Decoder, settings: Settings, seed: int, **how: Any) -> _Done:
            run = self._fit(f"control-{seed}", own, next_token, settings, keep_best=True, **how)
            return _Done(run.step, run.seconds, 0)

        rate = first_guess(self.settings.rate, _CONTROLS_GAP)
        return self._seeded("control", self.original, original, lambda held: held.loss, rate, train, seeds)[1]

    def floor(self, make: Callable[..., Decoder], seeds: int) -> Outcome:
        """Train the changed tree from random weights as the changed model was, all of it, at the usual rate."""
        held, taken = [], 0.0
        for seed in range(seeds):
            own, settings = make(seed=self.settings.seed + seed), self._with(seed, self.settings.rate)
            done = self._both("floor", own, settings, trained="all", suffix=f"-{seed}", keep_best=True)
            held.append(self.held(own.eval()))
            taken += done.seconds
        return Outcome(tuple(held), taken, self.settings.rate)

    def done(self) -> None:
        """Remove the checkpoints once all runs have ended; what was measured stays."""
        for each in stores_in(self.folder, self.group):
            each.done()


@dataclass(frozen=True)
class _Done:
    """What was trained: the steps and seconds of all parts."""

    steps: int
    seconds: float
    count: int
    """How many parameters were trained."""


_Trains = Callable[..., _Done]
"""Trains a model, given the model, settings, the seed's number, and how `fit` evaluates it."""
_Judges = Callable[[Decoder, int, float], bool]
"""Says whether a run on trial goes on, given its model, steps and seconds."""


def _parts(settings: Settings, local: float) -> tuple[Settings | None, Settings]:
    """Return the settings with what layers by themselves get of the budget, None for nothing, and with the rest."""
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
