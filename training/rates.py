"""Choose the learning rate with which a model is healed (trained to predict like its teacher).

gptkit guesses a rate, and lowers it if the first steps make the model worse.

The first guess depends on the *gap*, the KL divergence of the changed model from its teacher. A high rate suits a
changed model that is far from its teacher, and damages one that is close. How much damage it does depends on the model,
the batch and the budget. gptkit therefore evaluates every run once after a few steps. If the model is worse than at the
start of the run, the run starts again at a lower rate. Otherwise it continues, so that its first steps are not lost.

These first steps are a *trial*. A trial cannot find the best rate: it has as much noise as a long run, but makes less
progress. With a large gap it would therefore favour high rates, and with a small gap low rates. It can only show
damage, and a lower rate is chosen only if it is better by `MARGIN`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ..converter.files import read_own
from ..converter.names import json_bytes
from ..display import Record
from .parallel import Group
from .state import put, settings_error

FACTOR = 3.0
"""The factor by which the learning rate is lowered after a trial that made the model worse."""
SHARE, POWER, MOST = 0.68, 0.6, 0.35
"""The first rate to try is the usual rate times `SHARE` · gap^`POWER`, and at most `MOST` times the usual rate. The gap
is the KL divergence from the teacher. The numbers were measured on eight changed models made from three models, with
gaps from 0.0003 to 3.7 nats.
"""
TRIAL = 0.1
"""The share of the budget that a trial takes. This is twice the default warm-up, so half of the trial's steps have the
highest learning rate.
"""
MARGIN = 0.1
"""The share by which the loss of a trial must be lower than that of the trial before it, which had a higher rate."""
TRIES = 5  # the largest number of trials
_LEAST = 5  # the fewest steps of a trial
FILE = "tried.json"
"""The name of the file that records the trials, in the folder with the training runs of `heal`."""


@dataclass(frozen=True)
class Trial(Record):
    """The result of a trial: the first steps of a run at one learning rate."""

    rate: float
    loss: float | None  # on the held-out text after these steps, in nats per token; None if it is NaN or infinite
    seconds: float

    @property
    def value(self) -> float:
        """The loss, or infinity if it is NaN or infinite."""
        return math.inf if self.loss is None else self.loss


Trials = tuple[Trial, ...]


def first_guess(usual: float, gap: float) -> float:
    """Return the learning rate of the first trial.

    Args:
        usual: the usual learning rate for a model with random weights (`loop.usual_rate`).
        gap: the KL divergence of the changed model from its teacher, in nats per token.
    """
    return usual * min(MOST, SHARE * math.pow(max(gap, 1e-6), POWER))


def trial_steps(steps: int) -> int:
    """Return the number of steps of a trial in a run of `steps` steps. It is 0 if the run is too short for a trial."""
    first = max(_LEAST, round(TRIAL * steps))
    return first if 2 * first <= steps else 0


def next_run(first: float, start: float, trials: Sequence[Trial]) -> tuple[float, bool]:
    """Return the learning rate of the next run, and whether this run is on trial.

    A run on trial is evaluated after its first steps, and abandoned if its loss is then too high. Every trial has a
    lower rate than the trial before it. The rules are:

    1. If there are no trials yet, the rate is `first`, and the run is on trial.
    2. If the last trial lowered the loss of the previous one by less than the share `MARGIN`, the rate is that of the
       previous trial, and the run is not on trial. This needs a finite loss of the previous trial.
    3. If the last trial's loss is below `start`, or there were `TRIES` trials, the rate is that of the last trial, and
       the run is not on trial.
    4. Otherwise the rate is that of the last trial, divided by `FACTOR`, and the run is on trial.

    Args:
        first: the rate of the first run.
        start: the loss before training.
        trials: the trials so far.
    """
    if not trials:
        return first, True
    last = trials[-1]
    if len(trials) > 1 and last.value >= (1 - MARGIN) * trials[-2].value < math.inf:
        return trials[-2].rate, False
    if last.value < start or len(trials) == TRIES:
        return last.rate, False
    return last.rate / FACTOR, True


class TrialNotes:
    """The file that records the trials of a call of `heal`, so that `--resume` does not repeat them.

    Args:
        folder: the folder with the training runs of the call.
        call: the JSON values that identify the call: hashes of the inputs, and settings.
        group: the processes that train.

    Raises:
        UsageError: the file belongs to a call with other values.
    """

    def __init__(self, folder: Path, call: Mapping[str, Any], group: Group) -> None:
        self.path, self.group = folder / FILE, group
        new = _TrialFile(json.loads(json.dumps(call)), {})
        try:
            self.content = msgspec.json.decode(read_own(self.path, 2**26), type=_TrialFile)
        except (OSError, ValueError):
            self.content = new  # the trials are repeated, with the same results
        before, now = self.content.call, new.call
        if changed := {name for name in {*before, *now} if before.get(name) != now.get(name)}:
            raise settings_error(folder, before, now, changed)
        group.total(0.0)  # wait until every process has read the file, before the first process writes

    def trials(self, name: str) -> Trials:
        """Return the trials of one kind of run ("healed" or "control"), in the order in which they were made."""
        return tuple(self.content.tried.get(name, ()))

    def add(self, name: str, trial: Trial) -> None:
        """Record a trial of one kind of run ("healed" or "control")."""
        self.content.tried.setdefault(name, []).append(trial)
        self.group.lead(lambda: put(self.path, json_bytes(msgspec.to_builtins(self.content))))


class _TrialFile(msgspec.Struct):
    """The content of the file that `TrialNotes` reads and writes."""

    call: dict[str, Any]  # the values that identify the call of `heal`
    tried: dict[str, list[Trial]]  # the trials of every kind of run
