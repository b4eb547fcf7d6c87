"""Two sets of logits side by side."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import GptkitError

ROWS = 128
"""Positions that are widened to fp64 at once: a vocabulary is large."""


@dataclass(frozen=True)
class Difference:
    """One prompt's comparison over `positions` real tokens. maximum, mean: absolute difference of logits; kl: mean KL
    divergence in nats per token; top1: the share of positions with the same most likely token. NaN on one side only
    makes all of them NaN.
    """

    name: str
    positions: int
    maximum: float
    mean: float
    kl: float
    top1: float

    @property
    def identical(self) -> bool:
        """Whether not one bit of a logit differs."""
        return self.maximum == 0


def kl_divergence(reference: Tensor, candidate: Tensor) -> Tensor:
    """KL(reference ‖ candidate) a position, (N,), in fp64, from logits (N, V)."""
    found = []
    for a, b in zip(torch.split(reference, ROWS), torch.split(candidate, ROWS), strict=True):
        p, q = F.log_softmax(a.double(), -1), F.log_softmax(b.double(), -1)
        found.append(F.kl_div(q, p, reduction="none", log_target=True).sum(-1).clamp_min(0))
    return torch.cat(found)


def compare(name: str, reference: Tensor, candidate: Tensor) -> Difference:
    """Logits (N, V) of the same positions. Raises GptkitError where there are none, or of other shapes."""
    if reference.shape != candidate.shape:
        raise GptkitError(f"{name}: logits of shapes {tuple(reference.shape)} and {tuple(candidate.shape)}")
    if reference.numel() == 0:
        raise GptkitError(f"{name}: there is nothing to compare")
    return Difference(
        name=name,
        positions=reference.shape[0],
        maximum=largest_gap([reference], [candidate]),
        mean=mean_gap([reference], [candidate]),
        kl=kl_divergence(reference, candidate).mean().item(),
        top1=(reference.argmax(-1) == candidate.argmax(-1)).double().mean().item(),
    )


def largest_gap(a: Iterable[Tensor], b: Iterable[Tensor], enough: float = math.inf) -> float:
    """The largest absolute difference over several sets of logits, up to the first further off than `enough`: what is
    wrong mostly shows on a few tokens. NaN where there is one.
    """
    largest = 0.0
    for pair in zip(a, b, strict=True):
        here = torch.stack([part.max() for part in gaps([pair[0]], [pair[1]])]).max().item()
        largest = here if not here <= largest else largest
        if not largest <= enough:
            break
    return largest


def mean_gap(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """The mean absolute difference over several sets of logits."""
    return torch.stack([gap.sum() for gap in gaps(a, b)]).sum().item() / sum(each.numel() for each in a)


def gaps(a: Sequence[Tensor], b: Sequence[Tensor]) -> Iterator[Tensor]:
    """Absolute differences in fp64, some rows at a time."""
    for x, y in zip(a, b, strict=True):
        for part, other in zip(torch.split(x, ROWS), torch.split(y, ROWS), strict=True):
            yield (part.double() - other.double()).abs()
