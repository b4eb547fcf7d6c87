"""fit-scaling: the law that the losses of runs over sizes and tokens follow, L(N, D) = E + A / N^α + B / D^β.

As Hoffmann et al. (2203.15556, section 3.3 and appendix D.3) fit theirs: Huber's loss (δ = 1e-3) of the logarithm of
what is predicted less that of what was measured, from the best of their grid of beginnings. N are all parameters, D the
tokens trained on. Intervals are by bootstrap: the fit again of runs that are drawn with replacement.
Of a budget of C = 6·N·D FLOPs the best N and D follow in closed form. Beyond ten times what was run nothing is told.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..display import Record, Shown
from ..errors import UsageError
from .ablate import read_ablation

FARTHEST = 10
"""How many times beyond the runs' range something is still told."""
_LEAST = 6  # runs: there are five unknowns
_DELTA = 1e-3
_GRID = (
    *((-1.0, -0.5, 0.0, 0.5, 1.0), (0.0, 5.0, 10.0, 15.0, 20.0, 25.0), (0.0, 5.0, 10.0, 15.0, 20.0, 25.0)),
    *((0.0, 0.5, 1.0, 1.5, 2.0), (0.0, 0.5, 1.0, 1.5, 2.0)),
)
"""Where log E, log A, log B, α and β begin."""
_BEGINNINGS = 8  # the best of the grid, from which is gone on
_STEPS, _LOOKED = 2000, 100  # at the most, and after how many it is looked whether any fit still gets better
_TOGETHER = 200  # sets of runs that are fitted at once, for their memory's sake
_MOST = torch.tensor([300.0, 300.0, 300.0, 20.0, 20.0], dtype=torch.float64)
"""How far the unknowns may go from 0, either way: powers and exponentials of these are still numbers."""
_Values = np.ndarray[Any, np.dtype[np.float64]]
"""Runs, (…, 3): parameters, tokens, loss."""
NAMES = ("E", "A", "B", "alpha", "beta")


@dataclass(frozen=True)
class Point(Record):
    """A run: its parameters, the tokens that it was trained on, and its held-out loss in nats a token."""

    parameters: int
    tokens: int
    loss: float


def _exp(power: float) -> float:
    """As `math.exp`, within what a float holds: laws that were fitted to runs drawn again may be anything."""
    return math.exp(max(-700.0, min(power, 700.0)))


@dataclass(frozen=True)
class Law(Record):
    """L(N, D) = E + A / N^α + B / D^β."""

    E: float
    A: float
    B: float
    alpha: float
    beta: float

    def loss(self, parameters: float, tokens: float) -> float:
        """Predicted, in nats a token."""
        terms = (self.A, self.alpha, parameters), (self.B, self.beta, tokens)
        return self.E + sum(_exp(math.log(factor) - power * math.log(of)) for factor, power, of in terms)

    def best(self, flops: float) -> tuple[float, float]:
        """The parameters and the tokens of the least loss for a budget of 6·N·D FLOPs."""
        whole, share = math.log(flops / 6), math.log(self.alpha / self.beta) + math.log(self.A) - math.log(self.B)
        parameters = (share + self.beta * whole) / (self.alpha + self.beta)
        return _exp(parameters), _exp(whole - parameters)


_Interval = tuple[float, float]


@dataclass(frozen=True)
class Optimum(Record):
    """What to train with a budget: parameters, tokens and the loss that they come to, each with its interval."""

    flops: float
    parameters: float
    tokens: float
    loss: float
    intervals: dict[str, _Interval]


@dataclass(frozen=True)
class Scaling(Record, Shown):
    """A law that was fitted. intervals: where each of its numbers lies in 95 of 100 fits of runs drawn again, of
    `drawn` fits. parameters, tokens: from the least to the most of the runs. error: the median of predicted less
    measured, as a share.
    """

    JSON = "schema_version law intervals drawn error parameters tokens optima points"

    law: Law
    intervals: dict[str, _Interval]
    drawn: int
    error: float
    parameters: tuple[int, int]
    tokens: tuple[int, int]
    optima: tuple[Optimum, ...]
    points: tuple[Point, ...]
    schema_version: int = field(default=1, repr=False)


def _points_of(folders: Sequence[str | Path]) -> list[Point]:
    """Every run of some ablations, which must have been trained on the same tokens, and held to the same. Raises
    UsageError.
    """
    found, read = list[Point](), dict[tuple[object, object], str | Path]()
    for each in folders:
        table = read_ablation(each)
        if table.get("how") == "heal":
            raise UsageError(
                f"the runs in {each} healed changed models, but a scaling law needs runs from random weights",
                'Leave out this folder, or repeat its runs with how = "train" in the plan.',
            )
        if "data" not in table and len(folders) > 1:
            raise UsageError(
                f"{each}/ablation.json does not record on which text its runs were trained",
                f"This command adds it without repeating runs: gptkit ablate PLAN {each} --resume",
            )
        read.setdefault((table.get("data"), table.get("held_out")), each)
        try:
            for row in table["rows"]:
                size, tokens = int(row["costs"]["parameters"]), int(row["tokens"])
                found += [Point(size, tokens, float(run["loss"])) for run in row["runs"]]
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(
                f"{each}/ablation.json is damaged", f"Write it again: gptkit ablate PLAN {each} --resume"
            ) from error
    if len(read) > 1:
        one, other, *_ = read.values()
        what = "texts" if len({data for data, _ in read}) > 1 else "held-out texts"
        raise UsageError(
            f"the runs in {one} and in {other} have different {what}, so their losses do not follow one scaling law",
            "Give only folders whose runs have the same texts.",
        )
    return found


def fit_scaling(
    runs: Sequence[str | Path] | Sequence[Point], *, flops: Sequence[float] = (), drawn: int = 100, seed: int = 0
) -> Scaling:
    """Fit the law to runs.

    Args:
        runs: folders that `ablate` wrote, or points.
        flops: budgets to tell the best parameters and tokens for.
        drawn: how many times runs are drawn with replacement, and fitted again, for intervals.
        seed: of what is drawn.

    Raises:
        UsageError: runs of one size, or of one number of tokens, or too few; a loss that falls with neither; runs that
            were healed, or that read other texts; a budget that is none, or whose best run is more than `FARTHEST`
            times beyond those that were made.
    """
    for budget in flops:
        if not 0 < budget < math.inf:
            raise UsageError(f"--flops must be a number above 0, not {budget:g}", "For example: --flops 1e18")
    if drawn < 0:
        raise UsageError(
            f"the number of bootstrap samples must be 0 or more, not {drawn}", "Give 0 to compute no intervals."
        )
    points = [each for each in runs if isinstance(each, Point)]
    points = points or _points_of([each for each in runs if not isinstance(each, Point)])
    _require(points)
    values = np.array([(each.parameters, each.tokens, each.loss) for each in points], float)
    beginnings = _beginnings(values)
    (law,) = _laws(values[None], beginnings)
    if min(law.alpha, law.beta) <= 0:
        what = "parameters" if law.alpha <= 0 else "tokens"
        raise UsageError(
            f"the loss in these runs does not fall with more {what}, so no scaling law fits them",
            "Add runs of a wider range, or more seeds.",
        )
    generator, draws = np.random.default_rng(seed), list[_Values]()
    while len(draws) < drawn:
        some = values[generator.integers(0, len(values), len(values))]
        if all(len(set(some[:, column])) > 1 for column in (0, 1)):
            draws.append(some)
    parts = [np.stack(draws[first : first + _TOGETHER]) for first in range(0, len(draws), _TOGETHER)]
    again = [each for part in parts for each in _laws(part, beginnings)]
    spans = {name: _span([getattr(each, name) for each in again]) for name in NAMES} if again else {}
    predicted = np.array([law.loss(each.parameters, each.tokens) for each in points])
    sizes, lengths = ((int(values[:, n].min()), int(values[:, n].max())) for n in (0, 1))
    optima = tuple(_optimum(law, each, again, (sizes, lengths)) for each in flops)
    error = float(np.median(np.abs(predicted / values[:, 2] - 1)))
    return Scaling(law, spans, len(again), error, sizes, lengths, optima, tuple(points))


def _require(points: Sequence[Point]) -> None:
    """Raise UsageError where no law can be told from these."""
    sizes, lengths = ({getattr(each, name) for each in points} for name in ("parameters", "tokens"))
    for what, found in (("size", sizes), ("number of tokens", lengths)):
        if len(found) < 2:
            message = (
                f"the runs have {'only one' if found else 'no'} {what}, so its effect on the loss cannot be fitted"
            )
            raise UsageError(message, "Make runs of several sizes: gptkit ablate sizes OUT --data FILE")
    if len(points) < _LEAST:
        raise UsageError(
            f"{len(points)} runs are too few to fit the five constants of the scaling law",
            f"Give at least {_LEAST} runs of different sizes and budgets.",
        )
    if not all(0 < each.loss < math.inf and min(each.parameters, each.tokens) > 0 for each in points):
        raise UsageError(
            "a run has a number of parameters, a number of tokens or a loss that is not a positive, finite number"
        )


# --- the fit ----------------------------------------------------------------------------------------------------------


def _predicted(unknowns: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Of unknowns (…, 5), log E, log A, log B, α, β: the logarithms of the law's three parts, (3, …, runs), and that of
    their sum less that of what was measured.
    """
    e, a, b, alpha, beta = (each.unsqueeze(-1) for each in unknowns.unbind(-1))
    n, d, wanted = values.log().unbind(-1)
    terms = torch.stack([e.expand_as(a - alpha * n), a - alpha * n, b - beta * d])
    return terms, torch.logsumexp(terms, dim=0) - wanted


def _objective(unknowns: Tensor, values: Tensor) -> Tensor:
    """Huber's loss, summed over runs."""
    _, off = _predicted(unknowns, values)
    return torch.nn.functional.huber_loss(off, torch.zeros_like(off), reduction="none", delta=_DELTA).sum(-1)


def _beginnings(values: _Values) -> Tensor:
    """The best of the grid, (`_BEGINNINGS`, 5)."""
    grid = torch.tensor(list(itertools.product(*_GRID)), dtype=torch.float64)
    return grid[_objective(grid, torch.from_numpy(values)).argsort()[:_BEGINNINGS]]


def _laws(values: _Values, beginnings: Tensor) -> list[Law]:
    """Of each set of runs, (sets, runs, 3), the law with the least objective of those that the beginnings, (K, 5), lead
    to: by Gauss and Newton's steps, damped after Levenberg and Marquardt. Plain gradients and L-BFGS stop early in the
    long flat valley that E, α and β lie in, and at another place from another beginning.
    """
    sets = torch.from_numpy(values)
    runs = sets.repeat_interleave(len(beginnings), 0)
    found, damping = beginnings.repeat(len(sets), 1), torch.full((len(runs),), 1e-3, dtype=torch.float64)
    least = before = _objective(found, runs)
    n, d, _ = runs.log().unbind(-1)
    for number in range(1, _STEPS + 1):
        terms, off = _predicted(found, runs)
        e, a, b = torch.softmax(terms, dim=0)
        slopes = torch.stack([e, a, b, -a * n, -b * d], dim=-1)
        weighed = slopes * (_DELTA / off.abs().clamp_min(1e-30)).clamp_max(1).unsqueeze(-1)
        curved, gradient = weighed.mT @ slopes, weighed.mT @ off.unsqueeze(-1)
        damped = damping.unsqueeze(-1) * curved.diagonal(dim1=-2, dim2=-1).clamp_min(1e-12)
        step = torch.linalg.solve_ex(curved + torch.diag_embed(damped), gradient)[0].squeeze(-1)
        tried = (found - step).clamp(-_MOST, _MOST)
        lost = _objective(tried, runs)
        better = lost < least  # of what is no number too
        found, least = torch.where(better.unsqueeze(-1), tried, found), torch.where(better, lost, least)
        damping = torch.where(better, damping / 4, damping * 4).clamp(1e-15, 1e12)
        if number % _LOOKED == 0:
            if bool((least >= before * (1 - 1e-9)).all()):
                break
            before = least
    best = least.view(len(sets), -1).argmin(-1)
    each = found.view(len(sets), len(beginnings), -1)[torch.arange(len(sets)), best]
    return [Law(*map(math.exp, row[:3]), *row[3:]) for row in each.tolist()]


def _span(found: Sequence[float]) -> _Interval:
    low, high = np.quantile(found, [0.025, 0.975])
    return float(low), float(high)


def _optimum(law: Law, flops: float, again: Sequence[Law], ranges: Sequence[tuple[int, int]]) -> Optimum:
    """The best run of a budget. Raises UsageError where that is too far from those that were made."""
    best = law.best(flops)
    for what, value, (least, most) in zip(("parameters", "tokens"), best, ranges, strict=True):
        if not least / FARTHEST <= value <= FARTHEST * most:
            message = f"the best run for {flops:.3g} FLOPs has {value:,.0f} {what}, but the given runs have {least:,}"
            raise UsageError(
                f"{message} to {most:,}",
                f"gptkit predicts only up to {FARTHEST} times beyond the given runs. Choose a budget nearer "
                "to theirs, or add larger or smaller runs.",
            )
    others = [each for each in again if min(each.alpha, each.beta) > 0]
    found = [(*each.best(flops), each.loss(*each.best(flops))) for each in others]
    spans = dict(zip(("parameters", "tokens", "loss"), map(_span, zip(*found, strict=True)), strict=False))
    return Optimum(flops, *best, law.loss(*best), spans)
