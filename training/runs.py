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
from .distillation import block_local, distilled, divergence
from .loop import Batch, Loss, Run, Settings, Step, fit, lost, next_token
from .parallel import Group
from .rates import TRIAL, Notes, Trial, Tried, first_guess, search, trial_steps
from .state import RUN, Store
from .trainable import adapted, chosen, rank_of, touched

_EVALUATED = 2048  # tokens that are evaluated at once, at the least
_LOOKED = 100  # steps after which the tokens' file is looked at, of a run that evaluates by the clock
_LOW_RANK = 3.0  # times the usual rate is that of updates of a low rank
_CONTROLS_GAP = 1 / 27  # in nats, by which the control's first rate is guessed: a ninth of the usual one
TRIALS = "rates"
"""The folder of the trials, in that of the runs."""


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
    """What all seeds took together, without the trials."""
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
    """Return the runs that earlier calls left, trials too."""
    return [Store(each.parent, us) for each in sorted([*folder.glob(f"*/{RUN}"), *folder.glob(f"{TRIALS}/*/{RUN}")])]


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
    tell: Callable[[str, Step], None]

    def __post_init__(self) -> None:
        asked = {**self.about, **msgspec.to_builtins(self.settings), "rate": self.rate}
        self.notes = Notes(self.folder / TRIALS, asked, self.group)

    def _sample(self) -> Batch:
        """As much held-out text as a step has, the same in every process."""
        parts = max(1, len(self.windows.ids) // self.settings.windows)
        return Batch.of(self.windows.part(0, parts), self.group.device)

    def held(self, model: Decoder, windows: Windows | None = None) -> Held:
        """Return what a model comes to on the held-out text, or on some windows of it."""
        windows = self.windows if windows is None else windows
        training, sums, settings = model.training, [0.0, 0.0], self.settings
        # As many windows as a part of a step has, or more where that is little work for a whole pass.
        once = max(-(-settings.windows // (settings.accumulate * self.group.size)), _EVALUATED // settings.context)
        parts = -(-len(windows.ids) // once)
        model.eval()
        with torch.no_grad():
            for number in range(parts):
                batch = Batch.of(windows.part(number, parts), self.group.device)
                wanted = self.original(batch.ids, documents=batch.documents)
                given = wanted if model is self.original else model(batch.ids, documents=batch.documents)
                sums[0] += float(divergence(wanted, given, batch.targets != NOWHERE))
                sums[1] += float(lost(given, batch.targets))
        model.train(training)
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
        behind: int = 0,
        **evaluating: Any,
    ) -> Run:
        """Make one run, from its last checkpoint where there is one, which then stays until all have ended. Its windows
        are those after the first `behind` steps.
        """
        store = Store(self.folder / name, self.group)

        def begin() -> None:
            store.folder.mkdir(parents=True, exist_ok=True)
            store.begin({"run": name, **self.about, **msgspec.to_builtins(settings)}, self.resume, self.force)

        def step_of(number: int) -> Windows:
            if number % (settings.every or _LOOKED) == 0:
                self.found.require_unchanged()
            windows: Windows = self.training.step(behind + number, settings.windows, settings.seed)
            return windows

        self.group.lead(begin)
        evaluating = {"held_out": self.windows, **evaluating}
        return fit(
            model, step_of, settings=settings, group=self.group, store=store, loss=loss, trained=trained,
            tell=partial(self.tell, name), **evaluating,
        )  # fmt: skip

    def _both(
        self, name: str, model: Decoder, settings: Settings, *, trained: str, suffix: str = "", **evaluating: Any
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
                begun = self._fit(f"{name}-layers{suffix}", model, loss, first, inside, held_out=None)
                evaluating |= {"begun": None}  # layers by themselves moved it from there
            loss = distilled(self._answering(), self.hidden, self._sample())
            run = self._fit(f"{name}{suffix}", model, loss, rest, names, begun.step, **evaluating)
        return _Done(begun.step + run.step, begun.seconds + run.seconds, count, run)

    def _with(self, seed: int, rate: float, seconds: float = 0.0) -> Settings:
        """Return the settings of a run, of whose budget trials took so many `seconds`."""
        given = self.settings
        left = None if given.seconds is None else max(given.seconds - seconds, given.seconds / 10)
        return msgspec.structs.replace(given, rate=rate, seed=given.seed + seed, seconds=left)

    def _rate_of(
        self, name: str, first: float, start: Callable[[Held], float], model: Decoder, fit: _Trains
    ) -> tuple[float, Tried]:
        """Return the rate of a kind of run, and the trials that chose it, none where the budget is too small. Each
        trains a copy of the model; `start` takes of the model's figures the loss that `fit` trains it by.
        """
        given = self.settings
        steps = None if given.steps is None else trial_steps(given.steps)
        if steps == 0:
            return first, ()
        # Half of the tokens that a trial reads judge it, and of the held-out text a quarter where that is not known.
        there = len(self.windows.ids)
        wanted = there // 4 if steps is None else steps * given.windows // 2
        some = self.windows.part(0, max(1, there // max(wanted, 2, self.group.size)))
        budget = {"steps": steps, "seconds": None if given.seconds is None else given.seconds * TRIAL}

        def measure(rate: float) -> Trial:
            own = f"{TRIALS}/{name}-{rate:.2g}"
            settings = msgspec.structs.replace(self._with(0, rate), **budget, every=steps or 10**9)

            def run() -> Trial:
                try:
                    done = fit(own, deepcopy(model), settings, held_out=some)
                    loss, took = done.run.curve[-1]["held_out"], done.seconds
                except NoNumber:
                    loss, took = None, 0.0
                for part in (own, f"{own}-layers"):
                    self.group.lead(Store(self.folder / part, self.group).done)
                return Trial(rate, loss, took)

            return self.notes.once(name, rate, run)

        return search(first, start(self.held(model, some)), measure)

    def healed(self, model: Decoder, start: Held, trained: str, seeds: int) -> tuple[Decoder, Outcome, int, int]:
        """Heal the changed model, whose figures are `start`, over some seeds. Return the model of the first one, which
        is the changed model itself where no training made it better, the figures, the steps and the number of
        parameters that were trained.
        """
        fit = partial(self._both, trained=trained)
        tried: Tried = ()
        rate = self.rate or 0.0
        if self.rate is None:
            first = first_guess(self.settings.rate * (_LOW_RANK if rank_of(trained) else 1.0), start.kl)
            rate, tried = self._rate_of("healed", first, lambda held: held.kl, model, fit)
        finished, held, taken, steps, count = model, [], 0.0, 0, 0
        for seed in range(seeds):
            own = deepcopy(model)
            settings = self._with(seed, rate, sum(each.seconds for each in tried))
            begun = start.kl if settings.dtype == "float32" else None
            done = fit("healed", own, settings, suffix=f"-{seed}", keep_best=True, begun=begun)
            found = self.held(own)
            own, found = (own, found) if found.kl < start.kl else (deepcopy(model), start)
            held.append(found)
            taken, steps, count = taken + done.seconds, done.steps, done.count
            finished = own if seed == 0 else finished
        return finished, Outcome(tuple(held), taken, rate, tried), steps, count

    def control(self, original: Held, seeds: int) -> Outcome:
        """Train the original on the same tokens to predict them, at the rate that is best for it. Its figures are those
        at its best evaluation, which may be those before: `original`.
        """

        def fit(name: str, model: Decoder, settings: Settings, **evaluating: Any) -> _Done:
            run = self._fit(name, model, next_token, settings, **evaluating)
            return _Done(run.step, run.seconds, 0, run)

        guess = first_guess(self.settings.rate, _CONTROLS_GAP)
        rate, tried = self._rate_of("control", guess, lambda held: held.loss, self.original, fit)
        held, taken = [], 0.0
        for seed in range(seeds):
            own = deepcopy(self.original)
            settings = self._with(seed, rate, sum(each.seconds for each in tried))
            begun = original.loss if settings.dtype == "float32" else None
            done = fit(f"control-{seed}", own, settings, keep_best=True, begun=begun)
            found = self.held(own)
            held.append(found if found.loss < original.loss else original)
            taken += done.seconds
        return Outcome(tuple(held), taken, rate, tried)

    def floor(self, make: Callable[..., Decoder], seeds: int) -> Outcome:
        """Train the changed tree from random weights as the changed model was, all of it, at the usual rate."""
        held, taken = [], 0.0
        for seed in range(seeds):
            own, settings = make(seed=self.settings.seed + seed), self._with(seed, self.settings.rate)
            done = self._both("floor", own, settings, trained="all", suffix=f"-{seed}", keep_best=True)
            held.append(self.held(own))
            taken += done.seconds
        return Outcome(tuple(held), taken, self.settings.rate)

    def done(self) -> None:
        """Remove the checkpoints once all runs have ended; what was measured stays."""
        for each in stores_in(self.folder, self.group):
            each.done()


@dataclass(frozen=True)
class _Done:
    """What was trained: the steps and seconds of all parts, and the run of the whole model."""

    steps: int
    seconds: float
    count: int
    """How many parameters were trained."""
    run: Run


_Trains = Callable[..., _Done]
"""Trains a model, given its name, the model and settings, and how `fit` evaluates it."""


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
