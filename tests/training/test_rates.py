"""heal's defaults harm nothing: the rate follows from the gap and from trials, and no worse model is published."""

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.command import call
from helpers.covering import exhaustive, few
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import gptkit
from gptkit.converter.manifest import manifest_of
from gptkit.errors import UsageError
from gptkit.modules import Decoder
from gptkit.parity.diff import diff
from gptkit.surgery.recipe import read_recipe
from gptkit.training import loop, runs
from gptkit.training.data import Windows
from gptkit.training.distillation import TeacherLogits
from gptkit.training.heal import BUDGET, Healed, heal
from gptkit.training.loop import Batch, Settings, TrainingStep
from gptkit.training.parallel import process_group
from gptkit.training.rates import FACTOR, MARGIN, TRIES, Trial, TrialNotes, first_guess, next_run, trial_steps
from gptkit.training.runs import HeldOutFigures, Runs

PLAY = Path(gptkit.__file__).parent / "samples" / "play.txt"
TEACHER = "sample:llama"
SMALL: dict[str, Any] = {"tokens": 16 * 256, "context": 64, "batch": 256, "held_out": 0.02}
SHORT: dict[str, Any] = {"tokens": 12 * 64, "context": 32, "batch": 64, "held_out": 0.05}


def high(usual: float, gap: float) -> float:
    """Return a first rate that does damage."""
    return 1e-3


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As much of the play as a short run reads."""
    path = tmp_path_factory.mktemp("text") / "short.txt"
    path.write_bytes(PLAY.read_bytes()[:8000])
    return path


@pytest.fixture(scope="module")
def near(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that is 0.0004 nats from its original, which the rate for random weights takes a hundred times as far."""
    folder = tmp_path_factory.mktemp("near") / "gelu"
    gptkit.swap(TEACHER, folder, activation="gelu", measured=False)
    return folder


@exhaustive
def test_a_model_that_starts_close_comes_closer_and_so_does_its_control(near: Path, tmp_path: Path) -> None:
    done = heal(near, TEACHER, PLAY, tmp_path / "out", **SMALL, beside="control")
    assert 0 < done.healed.kl < done.start.kl < 0.01 and not done.kept
    assert done.control is not None and done.control.loss <= done.original.loss
    assert done.healed.tried and done.healed.rate in [trial.rate for trial in done.healed.tried]


@exhaustive
@pytest.mark.parametrize("local", [0.0, 0.5])
def test_a_model_that_training_makes_worse_is_written_as_it_was(near: Path, tmp_path: Path, local: float) -> None:
    done = heal(near, TEACHER, PLAY, tmp_path / "out", **SMALL, rate=0.1, local=local, beside="control")
    assert done.kept and done.healed.kl == done.start.kl and done.recovered == 0
    assert not diff(near, tmp_path / "out", rank=False).changed
    assert done.control is not None and done.control.rate < 0.01  # the rate of one is not that of the other
    assert manifest_of(tmp_path / "out")["history"][-1]["healed"]["kept"] is True


def test_the_output_reports_the_rate_and_what_was_tried(near: Path, tmp_path: Path) -> None:
    words = ["heal", near, tmp_path / "out", "--teacher", TEACHER, "--data", PLAY, "--tokens", "4k", "--context", "64"]
    words += ["--batch", "256", "--held-out", "0.02", "--alone", "--every", "8"]
    told = call(*words)
    assert told.exit_code == 0, told.output
    assert "chosen by trials: " in told.stdout
    evaluated = [line.split()[1] for line in told.stdout.splitlines() if line.startswith("healed-0")]
    assert evaluated == ["8", "16"]
    told = call(*words, "--force", "--lr", "0.1")
    assert "Training did not bring the model closer; it is written unchanged" in told.stdout
    assert "trials" not in told.stdout


def test_what_was_chosen_is_the_recipe(near: Path, tmp_path: Path) -> None:
    done = heal(near, TEACHER, PLAY, tmp_path / "out", **SMALL, beside=False)
    record = manifest_of(tmp_path / "out")["history"][-1]["healed"]
    assert record["rate"] == done.healed.rate
    assert [each["rate"] for each in record["healed"]["tried"]] == [each.rate for each in done.healed.tried]
    healing = read_recipe(tmp_path / "out").heal
    assert healing is not None and healing.settings["rate"] == done.healed.rate
    gptkit.swap(TEACHER, tmp_path / "again", recipe=tmp_path / "out", measured=False)
    assert diff(tmp_path / "out", tmp_path / "again", rank=False).same_bytes


@exhaustive
@pytest.mark.parametrize("teacher", ["sample:gpt2", TEACHER])
def test_a_run_that_goes_on_after_its_trial_is_one_run_at_that_rate(teacher: str, text: Path, tmp_path: Path) -> None:
    """A look at the model on the way moves nothing: neither its parameters nor their layout in memory."""
    gptkit.swap(teacher, tmp_path / "changed", activation="relu", measured=False)
    folders = tmp_path / "tried", tmp_path / "given"
    tried = heal(tmp_path / "changed", teacher, text, folders[0], **SHORT, beside=False)
    assert len(tried.healed.tried) == 1
    given = heal(tmp_path / "changed", teacher, text, folders[1], **SHORT, beside=False, rate=tried.healed.rate)
    assert given.healed.tried == () and given.healed.runs == tried.healed.runs
    assert not diff(*folders, rank=False).changed


@pytest.fixture(scope="module")
def harmed(near: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Healed, dict[str, bytes], int]:
    """A healing whose first guess does damage twice: what it came to, its files, and the steps of all runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "first_guess", high)
        out, steps = tmp_path_factory.mktemp("harmed") / "out", []
        done = heal(near, TEACHER, text, out, **SHORT, beside="control", tell=lambda *step: steps.append(step))
    return done, {each.name: each.read_bytes() for each in out.iterdir()}, len(steps)


def test_a_run_that_does_damage_begins_again_at_a_lower_rate(harmed: tuple[Healed, dict[str, bytes], int]) -> None:
    done, _, steps = harmed
    trials, control = done.healed.tried, done.control.tried if done.control else ()
    assert [each.rate for each in trials] == [pytest.approx(high(0, 0) / FACTOR**n) for n in range(len(trials))]
    assert len(trials) > 2 and done.healed.rate == trials[-1].rate and done.healed.kl < done.start.kl
    assert all(each.value >= done.start.kl for each in trials[:-1]) and trials[-1].value < done.start.kl
    again = len(trials) + len(control) - 2
    assert steps == 2 * done.steps + again * trial_steps(done.steps)


@few(2)
@pytest.mark.parametrize(
    "after", [2, 7, 13, 28, *(pytest.param(after, marks=pytest.mark.slow) for after in (5, 10, 20, 32))]
)
def test_a_run_that_was_stopped_among_its_trials_goes_on_to_the_same_bytes(
    near: Path, text: Path, tmp_path: Path, harmed: Any, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "first_guess", high)
    whole, files, count = harmed
    made: list[tuple[str, int]] = []

    def stop(name: str, step: TrainingStep) -> None:
        made.append((name, step.step))
        if len(made) == after:
            signal.raise_signal(signal.SIGINT)

    options: dict[str, Any] = {**SHORT, "beside": "control", "tell": stop}
    with pytest.raises(KeyboardInterrupt):
        heal(near, TEACHER, text, tmp_path / "out", **options)
    with pytest.raises(UsageError, match=r"decay was 0\.0, and is now 0\.1"):
        heal(near, TEACHER, text, tmp_path / "out", **options, decay=0.1, resume=True)
    done = heal(near, TEACHER, text, tmp_path / "out", **options, resume=True)
    assert len(made) in (count, count + 1)  # an interrupt ends a run after its next step at the latest
    assert {each.name: each.read_bytes() for each in (tmp_path / "out").iterdir()} == files
    assert done.healed.kl == whole.healed.kl and not list((tmp_path / "out.healing").rglob("step-*"))


@exhaustive
def test_evaluation_takes_a_share_of_the_time(near: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However small the budget and however large the held-out text are.

    What comes before and after the run counts too. The original reads the held-out text once for all evaluations, or
    twice if they divide it into other batches.
    """
    read: list[int] = []
    evaluate, held, answer = loop._Engine.evaluate, Runs.figures_of, TeacherLogits.__call__

    def count_evaluation(self: Any, number: int, windows: Windows) -> float:
        read.append(windows.ids.size)
        return evaluate(self, number, windows)

    def count_model(self: Runs, model: Decoder) -> HeldOutFigures:
        read.append(0 if model is self.original else self.windows.ids.size)
        return held(self, model)

    def count_teacher(self: TeacherLogits, batch: Batch) -> Tensor:
        known = len(self.known)
        logits = answer(self, batch)
        read.append(batch.ids.numel() * (len(self.known) > known))
        return logits

    monkeypatch.setattr(loop._Engine, "evaluate", count_evaluation)
    monkeypatch.setattr(Runs, "figures_of", count_model)
    monkeypatch.setattr(TeacherLogits, "__call__", count_teacher)
    done = heal(near, TEACHER, PLAY, tmp_path / "out", **{**SMALL, "tokens": 12_800, "held_out": 0.5}, beside=False)
    assert 0 < sum(read) <= 0.6 * done.tokens and len(done.healed.tried) == 1


@pytest.mark.parametrize(("size", "budget"), [(20_000, BUDGET[0]), (None, None)])
def test_the_text_is_the_default_budget(near: Path, tmp_path: Path, size: int | None, budget: int | None) -> None:
    (tmp_path / "text.txt").write_bytes(PLAY.read_bytes()[:size])

    def stop(name: str, step: TrainingStep) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        heal(near, TEACHER, tmp_path / "text.txt", tmp_path / "out", rate=1e-4, beside=False, tell=stop)
    run = json.loads((tmp_path / "out.healing/healed-0/run.json").read_text())
    read = json.loads((tmp_path / "out.healing/data/tokens.json").read_text())["tokens"]
    tokens = run["steps"] * run["windows"] * run["context"]
    assert 0 <= tokens - (budget or read) < run["windows"] * run["context"]


def test_a_budget_in_seconds_is_evaluated_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(loop.time, "monotonic", lambda: now[0])
    rhythm, evaluated = loop._Rhythm(Settings(1, 8, seconds=100.0, every=0)), 0
    while now[0] < 100:
        now[0] += 0.5  # a step
        if rhythm.due(int(2 * now[0])):
            now[0] += 3.0
            rhythm.evaluated(3.0)
            evaluated += 1
    assert evaluated >= 3 and 3.0 * evaluated <= 0.12 * now[0]


# --- the search -------------------------------------------------------------------------------------------------------


def search(first: float, start: float, measure: Callable[[float], Trial]) -> tuple[float, list[Trial]]:
    """Make trials until a run is not on trial, or goes on after it; return its rate, and the trials."""
    tried: list[Trial] = []
    while True:
        rate, on_trial = next_run(first, start, tried)
        if not on_trial:
            return rate, tried
        tried.append(measure(rate))


@given(best=st.floats(1e-7, 1e-2), first=st.floats(1e-6, 1e-2), broken=st.floats(1e-6, 1), noise=st.floats(0, 1))
def test_the_search_ends_at_no_rate_that_is_worse_than_another_it_tried(
    best: float, first: float, broken: float, noise: float
) -> None:
    def measure(rate: float) -> Trial:
        far = abs(gap) if (gap := rate / best - 1) > 0 else noise * abs(gap)
        return Trial(rate, None if rate > broken else 1 + far, 0.0)

    rate, tried = search(first, 1.05, measure)
    assert 1 <= len(tried) <= TRIES and rate in [each.rate for each in tried]
    assert all(each.rate <= first for each in tried)
    (chosen,) = (each for each in tried if each.rate == rate)
    assert chosen.value * (1 - MARGIN) <= min(each.value for each in tried)


def test_a_rate_at_which_nothing_is_a_number_is_left() -> None:
    rate, tried = search(1.0, 0.1, lambda rate: Trial(rate, None if rate > 0.2 else 0.5, 0.0))
    assert rate == pytest.approx(1 / FACTOR**2) and len(tried) == 4


@given(gap=st.floats(0, 100), less=st.floats(0, 1))
def test_the_first_guess_grows_with_the_gap_up_to_the_usual_rate(gap: float, less: float) -> None:
    assert 0 < first_guess(1e-3, gap * less) <= first_guess(1e-3, gap) <= 0.5e-3


def test_notes_that_cannot_be_read_are_made_again(tmp_path: Path) -> None:
    call_of, made = {"run": 1}, Trial(0.5, 1.0, 2.0)
    with process_group("cpu") as group:
        TrialNotes(tmp_path, call_of, group).add("healed", made)
        assert TrialNotes(tmp_path, call_of, group).trials("healed") == (made,)
        path = tmp_path / "tried.json"
        whole = path.read_text()
        for broken in ("{}", "[]", "{", whole.replace("1.0", '"low"')):
            path.write_text(broken)
            assert TrialNotes(tmp_path, call_of, group).trials("healed") == ()
        path.write_text(whole)
        with pytest.raises(UsageError, match="run was 1, and is now 2"):
            TrialNotes(tmp_path, {"run": 2}, group)
