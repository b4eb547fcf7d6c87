"""Lists as text: numbers of layers or rows as ranges ("0–3, 8"), and the first few of many names."""

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

__all__ = ["layer_ranges", "number_ranges", "number_runs", "range_label", "some_of"]


def layer_ranges(values: Iterable[Any]) -> list[tuple[int, int, Any]]:
    """Return the runs of equal consecutive values, as (first index, last index, value)."""
    runs = []
    for value, run in groupby(enumerate(values), key=lambda pair: pair[1]):
        indices = [index for index, _ in run]
        runs.append((indices[0], indices[-1], value))
    return runs


def range_label(first: int, last: int) -> str:
    """Return the range from `first` to `last`, both included, as text: "3" or "0–13"."""
    return f"{first}" if first == last else f"{first}–{last}"


def number_runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return the runs of consecutive numbers in ascending `numbers`, as (first, last)."""
    listed = list(numbers)
    # In a run of consecutive numbers, every number minus its index is the same.
    runs = layer_ranges(number - index for index, number in enumerate(listed))
    return [(listed[first], listed[last]) for first, last, _ in runs]


def number_ranges(numbers: Iterable[int]) -> str:
    """Return ascending numbers as text with ranges: "0–3, 8"."""
    return ", ".join(range_label(*run) for run in number_runs(numbers))


def some_of(names: Sequence[object], most: int, more: str = " and {} more") -> str:
    """Return at most `most` names as a text such as "a, b and 3 more".

    `more` is the text for the names that are left out. {} in it is replaced by their number.
    """
    return ", ".join(map(str, names[:most])) + (more.format(len(names) - most) if len(names) > most else "")
