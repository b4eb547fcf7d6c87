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
from ..modules import Decoder
from .data import NOWHERE, TokenFile, Windows
from .distillation import block_local, distilled, divergence
from .loop import Batch, Loss, Run, Settings, Step, fit, lost, next_token
from .parallel import Group
from .state import RUN, Store
from .trainable import adapted, chosen, rank_of, touched

_EVALUATED = 2048  # tokens that are evaluated at once, at the least
Budget = tuple[int | None, float | None]
"""Of a run: steps, or seconds."""


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
    """One kind of run over its seeds: what each came to, and its steps, tokens and seconds."""

    JSON = "runs=held seconds kl loss kl_spread loss_spread"

    held: tuple[Held, ...]
    seconds: float

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
    """What earlier calls left of their runs."""
    return [Store(each.parent, us) for each in sorted(folder.glob(f"*/{RUN}"))]


@dataclass
class Runs:
    """The runs of one healing, and what they have in common."""

    original: Decoder
    windows: Windows
    settings: Settings
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

    def _sample(self) -> Batch:
        """As much held-out text as a step has, the same in every process."""
        parts = max(1, len(self.windows.ids) // self.settings.windows)
        return Batch.of(self.windows.part(0, parts), self.group.device)

    def held(self, model: Decoder) -> Held:
        """A model on the held-out text."""
        training, sums, settings = model.training, [0.0, 0.0], self.settings
        # As many windows as a part of a step has, or more where that is little work for a whole pass.
        once = max(-(-settings.windows // (settings.accumulate * self.group.size)), _EVALUATED // settings.context)
        parts = -(-len(self.windows.ids) // once)
        model.eval()
        with torch.no_grad():
            for number in range(parts):
                batch = Batch.of(self.windows.part(number, parts), self.group.device)
                wanted = self.original(batch.ids, documents=batch.documents)
                given = wanted if model is self.original else model(batch.ids, documents=batch.documents)
                sums[0] += float(divergence(wanted, given, batch.targets != NOWHERE))
                sums[1] += float(lost(given, batch.targets))
        model.train(training)
        counted = max(1, self.windows.counted)
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
        trained: set[str] | None,
        seed: int,
        budget: Budget,
        behind: int = 0,
    ) -> Run:
        """One run, from its last checkpoint where there is one, which then stays until all have ended. Its windows are
        those behind so many steps.
        """
        steps, seconds = budget
        settings = msgspec.structs.replace(self.settings, steps=steps, seconds=seconds, seed=self.settings.seed + seed)
        store = Store(self.folder / name, self.group)

        def begin() -> None:
            store.folder.mkdir(parents=True, exist_ok=True)
            store.begin({"run": name, **self.about, **msgspec.to_builtins(settings)}, self.resume, self.force)

        def step_of(number: int) -> Windows:
            if number % settings.every == 0:
                self.found.require_unchanged()
            windows: Windows = self.training.step(behind + number, settings.windows, settings.seed)
            return windows

        self.group.lead(begin)
        return fit(
            model,
            step_of,
            self.windows,
            settings,
            group=self.group,
            store=store,
            loss=loss,
            trained=trained,
            tell=partial(self.tell, name),
        )

    def _budgets(self, local: float) -> tuple[Budget, Budget]:
        """What layers by themselves get of the budget, and the whole model."""
        steps, seconds = self.settings.steps, self.settings.seconds
        if steps is None:
            assert seconds is not None
            return (None, seconds * local), (None, seconds * (1 - local))
        first = min(max(1, round(steps * local)), steps - 1) if local else 0
        return (first, None), (steps - first, None)

    def _both(self, name: str, model: Decoder, trained: str, seed: int) -> tuple[int, float, int]:
        """Layers by themselves, then the whole model on what is left of the text: steps, seconds, and how many
        parameters were trained.
        """
        declared, rank, begun = list(model.spec.parameters()), rank_of(trained), Run()
        with ExitStack() as stack:
            if rank:
                torch.manual_seed(self.settings.seed + seed)
                names = stack.enter_context(adapted(model, declared, rank))
            else:
                names = chosen(trained, declared, lambda: touched(self.original, model))
            count = sum(each.numel() for name, each in model.named_parameters() if name in names)
            prefixes = tuple(f"blocks.{layer}." for layer in self.layers)
            inside = {each for each in names if each.startswith(prefixes)} if self.local else set()
            first, rest = self._budgets(self.local if inside else 0.0)
            if inside:
                loss = block_local(self.original, self.layers, self._sample())
                begun = self._fit(f"{name}-layers-{seed}", model, loss, inside, seed, first)
            loss = distilled(self._answering(), self.hidden, self._sample())
            run = self._fit(f"{name}-{seed}", model, loss, names, seed, rest, begun.step)
        return begun.step + run.step, begun.seconds + run.seconds, count

    def healed(self, model: Decoder, trained: str, seeds: int) -> tuple[Decoder, Outcome, int, int]:
        """The changed model, healed; of the first seed."""
        finished, held, taken, steps, count = model, [], 0.0, 0, 0
        for seed in range(seeds):
            own = deepcopy(model)
            steps, seconds, count = self._both("healed", own, trained, seed)
            held.append(self.held(own))
            taken += seconds
            finished = own if seed == 0 else finished
        return finished, Outcome(tuple(held), taken), steps, count

    def control(self, seeds: int) -> Outcome:
        """The original, trained on the same tokens to predict them."""
        held, taken = [], 0.0
        for seed in range(seeds):
            own = deepcopy(self.original)
            run = self._fit(f"control-{seed}", own, next_token, None, seed, self._budgets(0.0)[1])
            held.append(self.held(own))
            taken += run.seconds
        return Outcome(tuple(held), taken)

    def floor(self, make: Callable[..., Decoder], seeds: int) -> Outcome:
        """The changed tree from random weights, trained as the changed model was, all of it."""
        held, taken = [], 0.0
        for seed in range(seeds):
            own = make(seed=self.settings.seed + seed)
            _, seconds, _ = self._both("floor", own, "all", seed)
            held.append(self.held(own))
            taken += seconds
        return Outcome(tuple(held), taken)

    def done(self) -> None:
        """All have ended: their checkpoints go, what was measured stays."""
        for each in stores_in(self.folder, self.group):
            each.done()
