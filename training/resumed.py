"""Check the files of a stopped run against its settings before the run is resumed.

Anyone can edit the files of a stopped run. Every figure in them follows from the settings or is stored twice:
`state.json` has the progress of the run, and `metrics.jsonl` has a line for every step until then.
"""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from ..converter.files import read_own
from ..errors import InvalidInput

MOST_THREADS = 1024
_MOST_METRICS = 2**30  # bytes; a step takes 150
_ANEW = "Start again with --force."


class EvaluationRecord(msgspec.Struct, forbid_unknown_fields=True):
    """One evaluation on the held-out text: an entry of a run's curve."""

    step: int
    tokens: int
    loss: float | None
    held_out: float
    averaged: float | None = None


class Progress(msgspec.Struct, forbid_unknown_fields=True):
    """The progress of a run: the content of its state.json."""

    step: int
    seconds: float
    curve: list[EvaluationRecord]
    threads: int


class _Change(msgspec.Struct, forbid_unknown_fields=True):
    """A change of the rate or clip, which holds after the step `behind`."""

    behind: int
    clip: float | None = None
    rate: float | None = None


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    """A line of metrics.jsonl: `loop.TrainingStep`."""

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


def progress_of(about: Any, metrics: Path, steps: int | None, tokens: int, from_start: bool) -> Progress:
    """Return the progress of a run from the content of its state.json.

    Args:
        about: the JSON value of state.json.
        metrics: the run's metrics.jsonl.
        steps: the run's budget, or None if the budget is a time.
        tokens: the tokens of one step.
        from_start: whether the run is evaluated before its first step, as one with patience is.

    Raises:
        InvalidInput: a field is missing, unknown, of another type, or not what the settings and metrics.jsonl say.
    """
    try:
        found = msgspec.convert(about, Progress)
        _require(0 <= found.step <= (found.step if steps is None else steps), "its step is beyond the run's budget")
        _require(_finite([found.seconds]) and found.seconds >= 0, "its seconds are not a valid time")
        _require(1 <= found.threads <= MOST_THREADS, "its number of threads is not valid")
    except (ValueError, RecursionError) as error:
        raise InvalidInput(
            f"the run in {metrics.parent} cannot be resumed, because its state.json cannot be read: {error!s:.200}",
            _ANEW,
        ) from error
    lines = _lines(metrics, found.step, tokens)
    evaluated = [
        EvaluationRecord(line.step, line.tokens, line.loss, line.held_out, line.averaged)
        for line in lines
        if line.held_out is not None
    ]
    first, rest = (found.curve[:1], found.curve[1:]) if from_start else ([], found.curve)
    begun = [(each.step, each.tokens, each.loss, math.isfinite(each.held_out)) for each in first]
    same = rest == evaluated and begun == [(0, 0, None, True)][: int(from_start)]
    if not same or (lines and lines[-1].seconds != found.seconds):
        raise InvalidInput(f"{metrics.parent}: the files state.json and metrics.jsonl are from different runs", _ANEW)
    return found


def kept_lines(metrics: Path, step: int) -> list[bytes]:
    """Return the lines of the first `step` steps in metrics.jsonl, without those of steps that will be repeated."""
    if not step:
        return []
    try:
        return read_own(metrics, _MOST_METRICS).split(b"\n")[:step]
    except OSError as error:
        raise InvalidInput(f"cannot read {metrics}: {error.strerror or error}", _ANEW) from error


def _lines(metrics: Path, step: int, tokens: int) -> list[_Line]:
    found = []
    for number, text in enumerate(kept_lines(metrics, step), 1):
        try:
            line = msgspec.json.decode(text, type=_Line)
            _require(
                _finite([line.seconds, line.took, line.loss, line.rate, line.norm, line.held_out, line.averaged]),
                "a value is NaN or infinite",
            )
            _require((line.step, line.tokens) == (number, number * tokens), "it belongs to another step")
        except (ValueError, RecursionError) as error:
            raise InvalidInput(f"{metrics} is damaged in line {number:,}: {error!s:.120}", _ANEW) from error
        found.append(line)
    if len(found) < step:
        raise InvalidInput(
            f"{metrics} has only {len(found):,} lines, but needs one for each of the {step:,} steps of the run", _ANEW
        )
    return found


def require_changes(changes: Any, kept: dict[str, Any], last: int) -> None:
    """Raise ValueError unless `changes` are valid changes of a run's rate and clip up to its last step."""
    found = msgspec.convert(changes, list[_Change])
    _require(all(0 <= each.behind <= last for each in found), "a change comes after a step that the run has not made")
    for name in ("rate", "clip"):
        values = [getattr(each, name) for each in found if getattr(each, name) is not None]
        _require(_finite(values), f"a change of its {name} is NaN or infinite")
        _require(not values or values[-1] == kept.get(name), f"its last change of {name} differs from its {name}")


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)


def _finite(values: Iterable[float | None]) -> bool:
    return all(value is None or math.isfinite(value) for value in values)
