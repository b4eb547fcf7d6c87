"""--swap and --recipe of the commands that count: what swaps would make of a model, from shapes alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..analysis.params import ModelCount
    from ..surgery.shapes import Reshaped

__all__ = ["reshaped"]


def reshaped(
    models: Sequence[ModelCount], swaps: Sequence[str] | None, recipe: str | None, offline: bool
) -> Iterator[tuple[ModelCount, Reshaped, str]]:
    """Each model, what it becomes, and the family that has that ("" where none has).

    Raises SwapRefused, and UsageError for an unknown swap.
    """
    from ..architectures import expressed
    from ..surgery.shapes import steps_from, swapped

    steps = steps_from(swaps or [], recipe)
    for each in models:
        found = swapped(each.spec, steps, each.family or None, each.name, files=each.folder, offline=offline)
        yield each, found, expressed(found.spec)[0] or ""
