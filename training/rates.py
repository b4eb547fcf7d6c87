"""The rate of a healing: a first guess by the gap, and a lower rate where the first steps show damage.

A changed model that is close to its original is damaged by the rate that a distant one needs, and by how much depends
on the model, the batch and the budget. So each run is looked at once, early. A run that is worse than its start by then
begins again at a lower rate; any other run goes on, so that its first steps are not lost. A short trial cannot find the
best rate: from a distant start it favours high rates, and from a close one low rates, because its noise is that of a
long run and its progress is not. It shows damage, and a lower rate has to be better by `MARGIN`.
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
from .state import another, put

FACTOR = 3.0
"""Between two rates that are tried."""
SHARE, POWER, MOST = 0.68, 0.6, 0.35
"""The first rate as a share of the usual one: `SHARE` times the gap to the power of `POWER`, and at most `MOST`. It was
measured on eight starts of three models, whose gaps were 0.0003 to 3.7 nats.
"""
TRIAL = 0.1
"""The share of the budget after which a run is looked at. It is longer than the default warm-up, so that half of these
steps have the highest rate.
"""
MARGIN = 0.1
"""The share by which a trial at a lower rate has to be better."""
TRIES = 5  # trials at most
_LEAST = 5  # steps of a trial
FILE = "tried.json"
"""The notes about trials, in the folder of the runs."""


@dataclass(frozen=True)
class Trial(Record):
    """The first steps of a run at one rate."""

    rate: float
    loss: float | None
    """The loss on the held-out text after them: KL or cross entropy in nats per token; None where it is no number."""
    seconds: float

    @property
    def value(self) -> float:
        """The loss, infinite where it is no number."""
        return math.inf if self.loss is None else self.loss


Tried = tuple[Trial, ...]


def first_guess(usual: float, gap: float) -> float:
    """Return the first rate to try for a gap in nats per token."""
    return usual * min(MOST, SHARE * math.pow(max(gap, 1e-6), POWER))


def trial_steps(steps: int) -> int:
    """Return after how many steps a run of `steps` is looked at, 0 where it is too short for that."""
    first = max(_LEAST, round(TRIAL * steps))
    return first if 2 * first <= steps else 0


def next_run(first: float, start: float, tried: Sequence[Trial]) -> tuple[float, bool]:
    """Return the rate of the next run, and whether that run is on trial.

    The first run has the rate `first`. A trial that is not better than the loss at the `start` is followed by one at
    a lower rate, unless it was the last of `TRIES`. When a lower rate is not better by `MARGIN` than the one before,
    the run has the rate before and is not on trial.
    """
    if not tried:
        return first, True
    last = tried[-1]
    if len(tried) > 1 and last.value >= (1 - MARGIN) * tried[-2].value < math.inf:
        return tried[-2].rate, False
    if last.value < start or len(tried) == TRIES:
        return last.rate, False
    return last.rate / FACTOR, True


class Notes:
    """The file in which the trials of a healing are kept, so that `--resume` makes none of them twice.

    It is of one call: `call` has what distinguishes it, in JSON values.

    Raises:
        UsageError: the file is of another call.
    """

    def __init__(self, folder: Path, call: Mapping[str, Any], group: Group) -> None:
        self.path, self.group = folder / FILE, group
        self.kept = _Kept(json.loads(json.dumps(call)), {})
        try:
            kept = msgspec.json.decode(read_own(self.path, 2**26), type=_Kept)
        except (OSError, ValueError):
            kept = self.kept  # trials are made again, and give the same
        if other := {name for name in {*kept.call, *self.kept.call} if kept.call.get(name) != self.kept.call.get(name)}:
            raise another(folder, kept.call, self.kept.call, other)
        self.kept = kept
        group.total(0.0)  # every process has read it before the first writes

    def tried(self, name: str) -> Tried:
        """Return the trials of a kind of run, in their order."""
        return tuple(self.kept.tried.get(name, ()))

    def add(self, name: str, trial: Trial) -> None:
        """Note a trial of a kind of run."""
        self.kept.tried.setdefault(name, []).append(trial)
        self.group.lead(lambda: put(self.path, json_bytes(msgspec.to_builtins(self.kept))))


class _Kept(msgspec.Struct):
    call: dict[str, Any]
    tried: dict[str, list[Trial]]
