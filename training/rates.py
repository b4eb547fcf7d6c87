"""The rate of a healing: a first guess by the gap, which short trials lower where it does damage.

A changed model that is close to its original is damaged by the rate that a distant one needs, and by how much depends
on the model, the batch and the budget. So a few steps are tried at the guess, and at lower rates where they made the
model worse. A short trial cannot find the best rate: from a distant start it favours high rates, and from a close one
low rates, because its noise is that of a long run and its progress is not. It shows damage, and a lower rate has to be
better by `MARGIN`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
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
POWER, MOST = 2 / 3, 0.5
"""How the best rate grows with the gap, and the share of the usual rate that it reaches at most: measured on eight
starts of three models, whose gaps were 0.0004 to 1.7 nats.
"""
TRIAL = 0.025
"""The share of the budget that one trial takes."""
MARGIN = 0.1
"""The share by which a trial at a lower rate has to be better."""
TRIES = 7  # trials at most
_LEAST = 5  # steps of a trial
FILE = "tried.json"


@dataclass(frozen=True)
class Trial(Record):
    """A short run at one rate."""

    rate: float
    loss: float | None
    """The loss on the held-out text at its end: KL or cross entropy in nats a token; None where it is no number."""
    seconds: float

    @property
    def value(self) -> float:
        """The loss, infinite where it is no number."""
        return math.inf if self.loss is None else self.loss


Tried = tuple[Trial, ...]


def first_guess(usual: float, gap: float) -> float:
    """Return the first rate to try for a gap in nats a token: in proportion to the gap to the power of `POWER`, and at
    most `MOST` of the usual rate.
    """
    return usual * min(MOST, math.pow(max(gap, 1e-6), POWER))


def trial_steps(steps: int) -> int:
    """Return how many steps each trial takes of a budget of `steps`, 0 where it is too small for any trial."""
    found = max(_LEAST, round(TRIAL * steps))
    return found if 2 * found <= steps else 0


def search(first: float, start: float, measure: Callable[[float], Trial]) -> tuple[float, Tried]:
    """Return the rate, and the trials in the order in which they were made: at `first`, and at lower rates for as long
    as the last trial ended with more than the loss at the `start`, and each is better than the one before by `MARGIN`.
    """
    tried = [measure(first)]
    best = tried[0]
    while best.value >= start and len(tried) < TRIES:
        tried.append(measure(best.rate / FACTOR))
        if tried[-1].value >= (1 - MARGIN) * best.value < math.inf:
            break
        best = tried[-1]
    return best.rate, tuple(tried)


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
            raise another(folder.parent, kept.call, self.kept.call, other)
        self.kept = kept
        group.total(0.0)  # every process has read it before the first writes

    def once(self, name: str, rate: float, trial: Callable[[], Trial]) -> Trial:
        """Return what was noted of a trial, or make it and note it."""
        trials = self.kept.tried.setdefault(name, [])
        for known in trials:
            if known.rate == rate:
                return known
        trials.append(trial())
        self.group.lead(lambda: put(self.path, json_bytes(msgspec.to_builtins(self.kept))))
        return trials[-1]


class _Kept(msgspec.Struct):
    call: dict[str, Any]
    tried: dict[str, list[Trial]]
