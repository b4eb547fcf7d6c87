"""gptkit fit-scaling: a law that is known comes back, and nothing is told of what no run has shown."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.command import call
from helpers.covering import exhaustive

from gptkit.errors import UsageError
from gptkit.training.scaling import NAMES, Law, Point, fit_scaling

LAW = Law(E=1.69, A=406.4, B=410.7, alpha=0.34, beta=0.28)  # Hoffmann et al., equation 10
SIZES, TOKENS = (1e7, 3e7, 1e8, 3e8, 1e9), (2e8, 1e9, 4e9, 2e10)


def points(
    noise: float, seed: int = 0, sizes: Sequence[float] = SIZES, tokens: Sequence[float] = TOKENS
) -> list[Point]:
    draw = np.random.default_rng(seed)
    return [Point(int(n), int(d), LAW.loss(n, d) * float(np.exp(draw.normal(0, noise)))) for n in sizes for d in tokens]


def few_and_small(seed: int) -> list[Point]:
    """Runs that hardly tell E, and from which a fit that stops early comes to another law each time."""
    return points(0.002, seed, (1e5, 2e5, 4e5, 8e5), (1e5, 2e5, 4e5))


def far(law: Law, runs: Sequence[Point]) -> float:
    """Huber's loss of a law, as the fit has it."""
    off = [abs(np.log(law.loss(each.parameters, each.tokens) / each.loss)) for each in runs]
    return float(sum(each**2 / 2 if each < 1e-3 else 1e-3 * (each - 5e-4) for each in off))


def test_a_law_without_noise_comes_back() -> None:
    found = fit_scaling(points(0.0), flops=[1e20], drawn=0)
    for name in NAMES:
        assert getattr(found.law, name) == pytest.approx(getattr(LAW, name), rel=2e-3)
    (best,) = found.optima
    assert best.parameters == pytest.approx(LAW.best(1e20)[0], rel=2e-3)
    assert best.parameters * best.tokens * 6 == pytest.approx(1e20)
    # It is the best: neither a larger model on fewer tokens nor the other way round comes to less.
    near = [LAW.loss(best.parameters * factor, best.tokens / factor) for factor in (0.8, 1.25)]
    assert min(near) > best.loss == pytest.approx(LAW.loss(best.parameters, best.tokens), rel=1e-4)
    assert found.parameters == (10**7, 10**9) and found.tokens == (2 * 10**8, 2 * 10**10) and not found.intervals


@exhaustive
def test_a_law_with_noise_is_within_its_intervals() -> None:
    found = fit_scaling(points(0.003, seed=1), flops=[1e20], drawn=30)
    for name in NAMES:
        low, high = found.intervals[name]
        assert low < high and low <= getattr(LAW, name) <= high, name
    (best,) = found.optima
    for value, name in zip(LAW.best(1e20), ("parameters", "tokens"), strict=True):
        assert getattr(best, name) == pytest.approx(value, rel=0.1)
        assert best.intervals[name][0] <= getattr(best, name) <= best.intervals[name][1]
    assert json.loads(json.dumps(found.as_json()))["law"]["alpha"] == found.law.alpha


def test_a_law_that_hardly_falls_is_told_of_in_numbers() -> None:
    law = Law(E=0.0, A=1e100, B=1e-100, alpha=1e-4, beta=1e-4)
    assert all(np.isfinite(each) for each in (*law.best(1e18), law.loss(*law.best(1e18))))


@pytest.mark.parametrize("seed", range(4))
def test_the_fit_comes_to_the_best_law(seed: int) -> None:
    runs = few_and_small(seed)
    law = fit_scaling(runs, drawn=0).law
    twice = fit_scaling(runs * 2, drawn=0).law
    assert far(law, runs) <= far(LAW, runs)
    for name in NAMES:
        assert getattr(twice, name) == pytest.approx(getattr(law, name), rel=1e-4, abs=1e-6), name
        for factor in (0.99, 1.01):  # whatever else the others then are: no law nearby is better
            assert far(law, runs) <= far(replace(law, **{name: getattr(law, name) * factor}), runs), name


@exhaustive
def test_intervals_hold_the_law_of_few_and_small_runs() -> None:
    inside = dict.fromkeys(NAMES, 0)
    for seed in range(5):
        found = fit_scaling(few_and_small(seed), drawn=30)
        for name, (low, high) in found.intervals.items():
            inside[name] += low <= getattr(LAW, name) <= high
    assert min(inside.values()) >= 4, inside


def test_what_no_run_has_shown_is_not_told() -> None:
    for some, why in (
        (points(0.0, sizes=(1e8,)), "have only one size"),
        ([each for each in points(0.0) if each.tokens == 10**9], "have only one number of tokens"),
        (points(0.0, sizes=(1e8, 1e9))[:5], "5 runs are too few to fit the five constants"),
        ([], "have no size"),
    ):
        with pytest.raises(UsageError, match=why):
            fit_scaling(some, drawn=0)
    rising = [Point(each.parameters, each.tokens, 10 - each.loss) for each in points(0.0)]
    with pytest.raises(UsageError, match="does not fall"):
        fit_scaling(rising, drawn=0)


def table(folder: Path, sizes: Sequence[float] = SIZES, **head: object) -> Path:
    """An ablation of the law's runs, as ablation.json has it."""
    rows = [{"costs": {"parameters": each.parameters}, "tokens": each.tokens, "runs": [{"loss": each.loss}]}
            for each in points(0.0, sizes=sizes)]  # fmt: skip
    folder.mkdir(exist_ok=True)
    (folder / "ablation.json").write_text(json.dumps({**head, "rows": rows}))
    return folder


def test_runs_that_are_of_no_one_law_are_refused_by_name(tmp_path: Path) -> None:
    about = {"how": "train", "data": "a" * 64, "held_out": 0.05}
    one = table(tmp_path / "one", SIZES[:3], **about)
    other = table(tmp_path / "other", SIZES[3:], **about)
    assert len(fit_scaling([one, other], drawn=0).points) == len(SIZES) * len(TOKENS)
    for head, why in (
        ({**about, "data": "b" * 64}, "one and in .*other have different texts"),
        ({**about, "held_out": 0.1}, "one and in .*other have different held-out texts"),
        ({**about, "how": "heal"}, "the runs in .*other start from changed models"),
        ({"how": "train"}, "other/ablation.json does not record on which text"),
    ):
        told = call("fit-scaling", one, table(tmp_path / "other", SIZES[3:], **head), "--draws", "0")
        assert told.exit_code == 2 and re.search(why, told.stderr.replace("\n", " ")), told.stderr
    (tmp_path / "other/ablation.json").write_text('{"rows": [{"a": 1}]}')
    told = call("fit-scaling", tmp_path / "other")
    assert told.exit_code == 2 and "other/ablation.json is damaged" in told.stderr


def test_numbers_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    runs = table(tmp_path / "one")
    for budget in ("0", "-1", "inf", "nan"):
        told = call("fit-scaling", runs, "--draws", "0", "--flops", budget)
        assert told.exit_code == 2 and f"--flops must be a number above 0, not {budget}" in told.stderr
    assert call("fit-scaling", runs, "--draws", "-1").exit_code == 2
    told = call("fit-scaling", runs, "--draws", "0")
    assert told.exit_code == 0 and "there are no intervals" in " ".join(told.stdout.split())


@pytest.mark.exhaustive
def test_beyond_ten_times_the_runs_nothing_is_told(tmp_path: Path) -> None:
    words = ["fit-scaling", table(tmp_path), "--draws", "0"]
    told = call(*words, "--flops", "1e21", "--html", tmp_path / "law.html")
    assert told.exit_code == 0, told.output
    assert "10,000,000 to 1,000,000,000 parameters" in told.stdout and "10 times beyond" in told.stdout
    assert "Loss by tokens and size" in (tmp_path / "law.html").read_text()
    far = call(*words, "--flops", "1e26")
    assert far.exit_code == 2 and "predicts only up to 10 times beyond the given runs" in far.stderr
    assert call("fit-scaling", tmp_path / "nothing").exit_code == 2
