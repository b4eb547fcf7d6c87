"""Check the files of a stopped run against its settings before the run is resumed.

Anyone can edit the files of a stopped run, so gptkit checks that they agree with each other. `state.json` has the
progress of the run, and `metrics.jsonl` has a line for every step so far. Every number in them is stored in both files
or follows from the settings.
"""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from ..converter.files import read_own
from ..errors import InvalidInput

MOST_THREADS = 1024
_MOST_METRICS = 2**30  # bytes; a step takes about 150
_HINT = "Start again with --force."


class EvaluationRecord(msgspec.Struct, forbid_unknown_fields=True):
    """One evaluation on the held-out text: an entry of a run's curve."""

    step: int
    tokens: int  # training tokens up to this step
    loss: float | None  # of this step; None before the first step
    held_out: float  # the loss on the held-out text
    averaged: float | None = None  # the held-out loss of the averaged parameters


class RunProgress(msgspec.Struct, forbid_unknown_fields=True):
    """The progress of a run: the content of its state.json."""

    step: int  # the last step that the checkpoint includes
    seconds: float  # training time so far
    curve: list[EvaluationRecord]
    threads: int  # the number of threads that torch computes with


class _SettingChange(msgspec.Struct, forbid_unknown_fields=True):
    """A change of the learning rate or of the gradient clipping, made when a run was resumed."""

    last_step: int = msgspec.field(name="behind")  # the last step before the change
    clip: float | None = None
    rate: float | None = None


class _MetricsLine(msgspec.Struct, forbid_unknown_fields=True):
    """A line of metrics.jsonl, with the fields of `loop.TrainingStep`."""

    step: int
    tokens: int
    seconds: float
    took: float
    loss: float
    rate: float
    norm: float
    held_out: float | None
    averaged: float | None
    sample: str | None


def progress_of(about: Any, metrics: Path, steps: int | None, tokens: int, from_start: bool) -> RunProgress:
    """Return the progress of a run from the content of its state.json.

    Args:
        about: the JSON value of state.json.
        metrics: the run's metrics.jsonl.
        steps: the run's budget in steps, or None if the budget is a time.
        tokens: the number of tokens per step.
        from_start: whether the run was evaluated before its first step, as runs with `keep_best` or `patience` are.

    Raises:
        InvalidInput: a field is missing, unknown or of another type, or contradicts the settings or metrics.jsonl.
    """
    try:
        progress = msgspec.convert(about, RunProgress)
        _require(
            0 <= progress.step <= (progress.step if steps is None else steps), "its step is beyond the run's budget"
        )
        _require(_finite([progress.seconds]) and progress.seconds >= 0, "its seconds are not a valid time")
        _require(1 <= progress.threads <= MOST_THREADS, "its number of threads is not valid")
    except (ValueError, RecursionError) as error:
        raise InvalidInput(
            f"the run in {metrics.parent} cannot be resumed, because its state.json cannot be read: {error!s:.200}",
            _HINT,
        ) from error
    steps_done = _lines(metrics, progress.step, tokens)
    evaluated = [
        EvaluationRecord(line.step, line.tokens, line.loss, line.held_out, line.averaged)
        for line in steps_done
        if line.held_out is not None
    ]
    first, rest = (progress.curve[:1], progress.curve[1:]) if from_start else ([], progress.curve)
    start = [(entry.step, entry.tokens, entry.loss, math.isfinite(entry.held_out)) for entry in first]
    same = rest == evaluated and start == [(0, 0, None, True)][: int(from_start)]
    if not same or (steps_done and steps_done[-1].seconds != progress.seconds):
        raise InvalidInput(f"{metrics.parent}: the files state.json and metrics.jsonl are from different runs", _HINT)
    return progress


def lines_until(metrics: Path, step: int) -> list[bytes]:
    """Return the lines of metrics.jsonl for the first `step` steps. A resumed run makes the later steps again."""
    if not step:
        return []
    try:
        return read_own(metrics, _MOST_METRICS).split(b"\n")[:step]
    except OSError as error:
        raise InvalidInput(f"cannot read {metrics}: {error.strerror or error}", _HINT) from error


def _lines(metrics: Path, step: int, tokens: int) -> list[_MetricsLine]:
    """Read and check the first `step` lines of metrics.jsonl. Raise InvalidInput if a line is damaged or missing."""
    lines = []
    for number, text in enumerate(lines_until(metrics, step), 1):
        try:
            step_line = msgspec.json.decode(text, type=_MetricsLine)
            _require(
                _finite(
                    [
                        step_line.seconds,
                        step_line.took,
                        step_line.loss,
                        step_line.rate,
                        step_line.norm,
                        step_line.held_out,
                        step_line.averaged,
                    ]
                ),
                "a value is NaN or infinite",
            )
            _require((step_line.step, step_line.tokens) == (number, number * tokens), "it belongs to another step")
        except (ValueError, RecursionError) as error:
            raise InvalidInput(f"{metrics} is damaged in line {number:,}: {error!s:.120}", _HINT) from error
        lines.append(step_line)
    if len(lines) < step:
        raise InvalidInput(
            f"{metrics} has only {len(lines):,} lines, but needs one for each of the {step:,} steps of the run", _HINT
        )
    return lines


def require_changes(changes: Any, settings: dict[str, Any], last: int) -> None:
    """Raise ValueError unless `changes` is a valid list of changes of a run's learning rate and gradient clipping.

    Args:
        changes: the value of `changes` in run.json.
        settings: the current settings of the run.
        last: the step of the last checkpoint.
    """
    records = msgspec.convert(changes, list[_SettingChange])
    _require(
        all(0 <= change.last_step <= last for change in records),
        "a change comes after a step that the run has not made",
    )
    for name in ("rate", "clip"):
        values = [getattr(change, name) for change in records if getattr(change, name) is not None]
        _require(_finite(values), f"a change of its {name} is NaN or infinite")
        _require(not values or values[-1] == settings.get(name), f"its last change of {name} differs from its {name}")


def _require(condition: bool, message: str) -> None:
    """Raise ValueError with the message if the condition is false."""
    if not condition:
        raise ValueError(message)


def _finite(values: Iterable[float | None]) -> bool:
    """Return whether no value is NaN or infinite. None counts as finite."""
    return all(value is None or math.isfinite(value) for value in values)
