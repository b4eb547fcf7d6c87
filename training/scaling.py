"""Fit the scaling law L(N, D) = E + A / N^α + B / D^β to the losses of runs of several sizes and numbers of tokens.

N is the number of all parameters, and D the number of training tokens. The fit follows Hoffmann et al. (2203.15556,
section 3.3 and appendix D.3). It minimises Huber's loss (δ = 1e-3) of the difference between the logarithms of the
predicted and the measured loss, and starts from the best points of their grid. Confidence intervals are by bootstrap:
the law is fitted again to runs that are drawn with replacement. For a budget of C = 6·N·D FLOPs, the best N and D have
a closed form. gptkit predicts nothing that is more than ten times beyond the range of the runs.
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
"""gptkit predicts for models and numbers of tokens up to this many times beyond the range of the runs."""
_LEAST = 6  # the fewest runs: the law has five unknowns
_DELTA = 1e-3
_GRID = (
    *((-1.0, -0.5, 0.0, 0.5, 1.0), (0.0, 5.0, 10.0, 15.0, 20.0, 25.0), (0.0, 5.0, 10.0, 15.0, 20.0, 25.0)),
    *((0.0, 0.5, 1.0, 1.5, 2.0), (0.0, 0.5, 1.0, 1.5, 2.0)),
)
"""For log E, log A, log B, α and β, the values from which the fit may start. All combinations are tried."""
_STARTS = 8  # the number of points of the grid, those of the least objective, that the fit continues from
_STEPS, _CHECKED = 2000, 100  # the most steps of a fit; after every 100, the fit stops if no law has improved
_BATCH = 200  # the number of bootstrap samples that are fitted at once, which limits the memory
_MOST = torch.tensor([300.0, 300.0, 300.0, 20.0, 20.0], dtype=torch.float64)
"""The largest absolute values of log E, log A, log B, α and β, for which exponentials and powers are still finite."""
_Values = np.ndarray[Any, np.dtype[np.float64]]
"""An array of shape (…, 3) with the number of parameters, the number of training tokens and the loss of every run."""
NAMES = ("E", "A", "B", "alpha", "beta")


@dataclass(frozen=True)
class Point(Record):
    """A training run to which the scaling law is fitted."""

    parameters: int
    tokens: int  # training tokens
    loss: float  # on the held-out text, in nats per token


def _exp(power: float) -> float:
    """Return e^power without an OverflowError. A law fitted to a bootstrap sample may have extreme constants."""
    return math.exp(max(-700.0, min(power, 700.0)))


@dataclass(frozen=True)
class Law(Record):
    """A scaling law, L(N, D) = E + A / N^α + B / D^β."""

    E: float
    A: float
    B: float
    alpha: float
    beta: float

    def loss(self, parameters: float, tokens: float) -> float:
        """Return the predicted loss in nats per token."""
        terms = (self.A, self.alpha, parameters), (self.B, self.beta, tokens)
        return self.E + sum(_exp(math.log(factor) - power * math.log(of)) for factor, power, of in terms)

    def best(self, flops: float) -> tuple[float, float]:
        """Return the parameters N and the tokens D with the lowest predicted loss for a budget of 6·N·D FLOPs."""
        whole, share = math.log(flops / 6), math.log(self.alpha / self.beta) + math.log(self.A) - math.log(self.B)
        parameters = (share + self.beta * whole) / (self.alpha + self.beta)
        return _exp(parameters), _exp(whole - parameters)


_Interval = tuple[float, float]


@dataclass(frozen=True)
class Optimum(Record):
    """The size of the model and the number of training tokens with the lowest predicted loss for a budget."""

    flops: float  # the budget
    parameters: float
    tokens: float
    loss: float  # predicted, in nats per token
    intervals: dict[str, _Interval]  # 95 % intervals of parameters, tokens and loss


@dataclass(frozen=True)
class Scaling(Record, Shown):
    """A fitted scaling law, and what it predicts."""

    JSON = "schema_version law intervals drawn error parameters tokens optima points"

    law: Law
    intervals: dict[str, _Interval]  # 95 % intervals of the law's constants
    drawn: int  # the number of bootstrap fits
    error: float  # the median of |predicted / measured - 1| over the runs
    parameters: tuple[int, int]  # the smallest and the largest number of parameters of the runs
    tokens: tuple[int, int]  # the smallest and the largest number of training tokens of the runs
    optima: tuple[Optimum, ...]  # one for each budget
    points: tuple[Point, ...]  # the runs
    schema_version: int = field(default=1, repr=False)


def _points_of(folders: Sequence[str | Path]) -> list[Point]:
    """Return the runs of several ablations. Raise UsageError if their training texts or held-out texts differ."""
    points, folder_of = list[Point](), dict[tuple[object, object], str | Path]()
    for folder in folders:
        table = read_ablation(folder)
        if table.get("how") == "heal":
            raise UsageError(
                f"the runs in {folder} start from changed models, but a scaling law needs runs that start from random "
                "weights",
                'Leave out this folder, or repeat its runs with how = "train" in the plan.',
            )
        if "data" not in table and len(folders) > 1:
            raise UsageError(
                f"{folder}/ablation.json does not record on which text its runs were trained",
                f"This command adds it without repeating runs: gptkit ablate PLAN {folder} --resume",
            )
        folder_of.setdefault((table.get("data"), table.get("held_out")), folder)
        try:
            for row in table["rows"]:
                size, tokens = int(row["costs"]["parameters"]), int(row["tokens"])
                points += [Point(size, tokens, float(run["loss"])) for run in row["runs"]]
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(
                f"{folder}/ablation.json is damaged", f"Write it again: gptkit ablate PLAN {folder} --resume"
            ) from error
    if len(folder_of) > 1:
        one, other, *_ = folder_of.values()
        what = "texts" if len({data for data, _ in folder_of}) > 1 else "held-out texts"
        raise UsageError(
            f"the runs in {one} and in {other} have different {what}, so their losses do not follow one scaling law",
            "Give only folders whose runs have the same texts.",
        )
    return points


def fit_scaling(
    runs: Sequence[str | Path] | Sequence[Point], *, flops: Sequence[float] = (), drawn: int = 100, seed: int = 0
) -> Scaling:
    """Fit the scaling law to runs.

    Args:
        runs: folders that `ablate` wrote, or points.
        flops: budgets, in FLOPs, for which to predict the best numbers of parameters and tokens.
        drawn: the number of bootstrap samples for the intervals; 0 computes no intervals.
        seed: the seed of the bootstrap samples.

    Raises:
        UsageError: the runs are too few, or all of one size or one number of tokens; the loss does not fall with more
            parameters or with more tokens; the runs healed changed models, or had different texts; a budget is not a
            positive number, or the best number of parameters or tokens for it is more than `FARTHEST` times beyond
            those of the runs.
    """
    for budget in flops:
        if not 0 < budget < math.inf:
            raise UsageError(f"--flops must be a number above 0, not {budget:g}", "For example: --flops 1e18")
    if drawn < 0:
        raise UsageError(
            f"the number of bootstrap samples must be 0 or more, not {drawn}", "Give 0 to compute no intervals."
        )
    points = [run for run in runs if isinstance(run, Point)]
    points = points or _points_of([run for run in runs if not isinstance(run, Point)])
    _require(points)
    values = np.array([(point.parameters, point.tokens, point.loss) for point in points], float)
    starts = _starts(values)
    (law,) = _laws(values[None], starts)
    if min(law.alpha, law.beta) <= 0:
        what = "parameters" if law.alpha <= 0 else "tokens"
        raise UsageError(
            f"the loss in these runs does not fall with more {what}, so no scaling law fits them",
            "Add runs of a wider range, or more seeds.",
        )
    generator, samples = np.random.default_rng(seed), list[_Values]()
    while len(samples) < drawn:
        sample = values[generator.integers(0, len(values), len(values))]
        if all(len(set(sample[:, column])) > 1 for column in (0, 1)):
            samples.append(sample)
    batches = [np.stack(samples[first : first + _BATCH]) for first in range(0, len(samples), _BATCH)]
    resampled = [sample_law for batch in batches for sample_law in _laws(batch, starts)]
    intervals = {name: _interval([getattr(other, name) for other in resampled]) for name in NAMES} if resampled else {}
    predicted = np.array([law.loss(point.parameters, point.tokens) for point in points])
    sizes, lengths = ((int(values[:, n].min()), int(values[:, n].max())) for n in (0, 1))
    optima = tuple(_optimum(law, budget, resampled, (sizes, lengths)) for budget in flops)
    error = float(np.median(np.abs(predicted / values[:, 2] - 1)))
    return Scaling(law, intervals, len(resampled), error, sizes, lengths, optima, tuple(points))


def _require(points: Sequence[Point]) -> None:
    """Raise UsageError if no law can be fitted to these runs."""
    sizes, lengths = ({getattr(point, name) for point in points} for name in ("parameters", "tokens"))
    for what, values in (("size", sizes), ("number of tokens", lengths)):
        if len(values) < 2:
            message = (
                f"the runs have {'only one' if values else 'no'} {what}, so its effect on the loss cannot be fitted"
            )
            raise UsageError(message, "Make runs of several sizes: gptkit ablate sizes OUT --data FILE")
    if len(points) < _LEAST:
        raise UsageError(
            f"{len(points)} runs are too few to fit the five constants of the scaling law",
            f"Give at least {_LEAST} runs of different sizes and budgets.",
        )
    if not all(0 < point.loss < math.inf and min(point.parameters, point.tokens) > 0 for point in points):
        raise UsageError(
            "a run has a number of parameters, a number of tokens or a loss that is not a positive, finite number"
        )


# --- the fit ----------------------------------------------------------------------------------------------------------


def _predicted(unknowns: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logarithms of the law's three terms, (3, …, runs), and log(predicted) - log(measured), (…, runs).

    Args:
        unknowns: log E, log A, log B, α and β, (…, 5).
        values: the parameters, tokens and loss of the runs, (…, runs, 3).
    """
    e, a, b, alpha, beta = (unknown.unsqueeze(-1) for unknown in unknowns.unbind(-1))
    n, d, measured = values.log().unbind(-1)
    terms = torch.stack([e.expand_as(a - alpha * n), a - alpha * n, b - beta * d])
    return terms, torch.logsumexp(terms, dim=0) - measured


def _objective(unknowns: Tensor, values: Tensor) -> Tensor:
    """Return the objective of the fit: Huber's loss, summed over the runs."""
    _, residuals = _predicted(unknowns, values)
    return torch.nn.functional.huber_loss(residuals, torch.zeros_like(residuals), reduction="none", delta=_DELTA).sum(
        -1
    )


def _starts(values: _Values) -> Tensor:
    """Return the points of the grid that have the smallest objective, from which the fit starts, (`_STARTS`, 5)."""
    grid = torch.tensor(list(itertools.product(*_GRID)), dtype=torch.float64)
    return grid[_objective(grid, torch.from_numpy(values)).argsort()[:_STARTS]]


def _laws(values: _Values, starts: Tensor) -> list[Law]:
    """Fit the law to every set of runs in `values`, (sets, runs, 3), and return one law per set.

    Every fit is made from all `starts`, (K, 5), and the one with the smallest objective is returned. The method is
    Gauss-Newton with the damping of Levenberg and Marquardt. Gradient descent and L-BFGS would stop early in the long
    flat valley of E, α and β, at a different place from every start.
    """
    sets = torch.from_numpy(values)
    runs = sets.repeat_interleave(len(starts), 0)
    unknowns, damping = starts.repeat(len(sets), 1), torch.full((len(runs),), 1e-3, dtype=torch.float64)
    least = before = _objective(unknowns, runs)
    n, d, _ = runs.log().unbind(-1)
    for number in range(1, _STEPS + 1):
        terms, residuals = _predicted(unknowns, runs)
        e, a, b = torch.softmax(terms, dim=0)
        slopes = torch.stack([e, a, b, -a * n, -b * d], dim=-1)
        weighed = slopes * (_DELTA / residuals.abs().clamp_min(1e-30)).clamp_max(1).unsqueeze(-1)
        curved, gradient = weighed.mT @ slopes, weighed.mT @ residuals.unsqueeze(-1)
        damped = damping.unsqueeze(-1) * curved.diagonal(dim1=-2, dim2=-1).clamp_min(1e-12)
        step = torch.linalg.solve_ex(curved + torch.diag_embed(damped), gradient)[0].squeeze(-1)
        tried = (unknowns - step).clamp(-_MOST, _MOST)
        lost = _objective(tried, runs)
        better = lost < least  # False for NaN, so such a step is not taken
        unknowns, least = torch.where(better.unsqueeze(-1), tried, unknowns), torch.where(better, lost, least)
        damping = torch.where(better, damping / 4, damping * 4).clamp(1e-15, 1e12)
        if number % _CHECKED == 0:
            if bool((least >= before * (1 - 1e-9)).all()):
                break
            before = least
    best = least.view(len(sets), -1).argmin(-1)
    rows = unknowns.view(len(sets), len(starts), -1)[torch.arange(len(sets)), best]
    return [Law(*map(math.exp, row[:3]), *row[3:]) for row in rows.tolist()]


def _interval(values: Sequence[float]) -> _Interval:
    """Return the 95 % interval of values from bootstrap fits."""
    low, high = np.quantile(values, [0.025, 0.975])
    return float(low), float(high)


def _optimum(law: Law, flops: float, resampled: Sequence[Law], ranges: Sequence[tuple[int, int]]) -> Optimum:
    """Return the numbers of parameters and tokens with the lowest predicted loss for a budget of `flops` FLOPs.

    Raise UsageError if they are too far beyond those of the measured runs.

    Args:
        law: the scaling law.
        flops: the budget.
        resampled: laws that were fitted to bootstrap samples, for the intervals.
        ranges: the smallest and largest number of parameters of the measured runs, and those of tokens.
    """
    best = law.best(flops)
    for what, value, (least, most) in zip(("parameters", "tokens"), best, ranges, strict=True):
        if not least / FARTHEST <= value <= FARTHEST * most:
            message = f"the best run for {flops:.3g} FLOPs has {value:,.0f} {what}, but the given runs have {least:,}"
            raise UsageError(
                f"{message} to {most:,}",
                f"gptkit predicts only up to {FARTHEST} times beyond the given runs. Choose a budget nearer "
                "to theirs, or add larger or smaller runs.",
            )
    usable = [other for other in resampled if min(other.alpha, other.beta) > 0]
    optima = [(*other.best(flops), other.loss(*other.best(flops))) for other in usable]
    intervals = dict(zip(("parameters", "tokens", "loss"), map(_interval, zip(*optima, strict=True)), strict=False))
    return Optimum(flops, *best, law.loss(*best), intervals)
