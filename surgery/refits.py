"""Refit output projections and down projections on a text, after a swap changed attention (`fits.repair`)."""

import dataclasses
from collections.abc import Collection

from .base import Swapped
from .fits.scratch import Scratch
from .registry import Asked

_FITTED = ("attention.o_proj", "feed_forward.down_proj")


def with_refits(swapped: Swapped, asked: Asked, layers: Collection[int]) -> Swapped:
    """Return the result of a swap that changed attention, with o_proj and down_proj of these layers refitted on a text.

    The result is unchanged if it is exact, if there is no text, and with --approximate.
    """
    if swapped.guarantee == "exact" or asked.approximate or asked.calibration is None or not asked.has_text():
        return swapped
    names = {f"blocks.{layer}.{name}.weight" for layer in layers for name in _FITTED}
    present = [parameter.name for parameter in swapped.spec.parameters() if parameter.name in names]
    scratch = Scratch.by("repair.refitted_layers", swapped, tuple(layers), asked.calibration())
    summary = {**swapped.summary, "refitted": sorted(layers)}
    return dataclasses.replace(swapped, tensors={**swapped.tensors, **scratch.waiting(present)}, summary=summary)
