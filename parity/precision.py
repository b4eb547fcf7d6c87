"""Find a component that gptkit computes less precisely than transformers, in bf16 or fp16.

The error of the logits does not show it. If gptkit rounded the weights of one router to bf16, and transformers did not,
a few tokens would go to other experts. Their logits would differ by whole units, but a bf16 model has errors of this
size anyway. So the components are compared one by one: the components before the first one that differs gave the same
bits in both models, so it has the same input in both. The difference of its outputs may then be as large as the
rounding of transformers' output, and no larger.
"""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

import torch

from ..analysis.activations import Kernel
from .bisect import KeptStates, TappedRun, taps
from .probe import ProbeBatch
from .sides import Sides

_ROUNDINGS = {"narrow": 8, "float32": 64}
"""The difference that rounding explains, in units of the dtype's epsilon and relative to the largest value. A component
may round several intermediate results to bf16. In fp32, a product of 16,384 terms in another order differs by less than
20 units."""


@dataclass(frozen=True)
class Imprecise:
    """A component that gptkit computes less precisely than transformers."""

    name: str
    relative: float  # the largest difference from transformers' output on the same input, relative to the largest value
    allowed: float  # the largest relative difference that rounding explains


def imprecise_component(
    both: Sides, batches: Sequence[ProbeBatch], dtype: torch.dtype, path: Kernel
) -> Imprecise | None:
    """Return the first component whose bits differ, if rounding does not explain how much; otherwise None.

    Both models must have the same weights and the same tree, and `dtype` must be narrower than fp32.
    """
    architecture = both.source.architecture
    assert architecture is not None
    run = TappedRun(both, path, taps(architecture, both.source.spec))
    gaps: dict[int, float] = {}
    largest: dict[int, float] = {}
    wide: set[int] = set()
    with closing(KeptStates()) as theirs:
        run(batches, dtype, False, theirs.__setitem__)

        def compare(key: tuple[int, int], rows: torch.Tensor) -> None:
            index = key[1]
            if key not in theirs or rows.shape != (reference := theirs[key]).shape or not rows.numel():
                return
            gaps[index] = max(gaps.get(index, 0.0), (reference - rows).abs().max().item())
            largest[index] = max(largest.get(index, 0.0), reference.abs().max().item())
            if not torch.equal(reference.to(dtype).double(), reference):
                wide.add(index)

        run(batches, dtype, True, compare)
    first = next((index for index in sorted(gaps) if gaps[index]), None)
    if first is None:
        return None
    kind, width = ("float32", torch.float32) if first in wide else ("narrow", dtype)
    relative, allowed = gaps[first] / (largest[first] or 1.0), _ROUNDINGS[kind] * torch.finfo(width).eps
    place = run.places[first].part(relative, allowed)
    return None if relative <= allowed else Imprecise(place.name, relative, allowed)
