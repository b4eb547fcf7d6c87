"""Two sets of logits side by side."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["Difference", "compare", "kl_divergence"]


@dataclass(frozen=True)
class Difference:
    """One prompt's comparison over `positions` real tokens.

    maximum, mean: absolute difference of logits; kl: mean KL divergence in nats a token; top1: the share of positions
    with the same most likely token. NaN on one side only makes all of them NaN.
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
    p, q = F.log_softmax(reference.double(), -1), F.log_softmax(candidate.double(), -1)
    return F.kl_div(q, p, reduction="none", log_target=True).sum(-1).clamp_min(0)


def compare(name: str, reference: Tensor, candidate: Tensor) -> Difference:
    """Logits (N, V) of the same positions."""
    difference = (reference.double() - candidate.double()).abs()
    return Difference(
        name=name,
        positions=reference.shape[0],
        maximum=difference.max().item(),
        mean=difference.mean().item(),
        kl=kl_divergence(reference, candidate).mean().item(),
        top1=(reference.argmax(-1) == candidate.argmax(-1)).double().mean().item(),
    )


def largest_gap(a: list[Tensor], b: list[Tensor]) -> float:
    """The largest absolute difference over several sets of logits."""
    return max(torch.max((x.double() - y.double()).abs()).item() for x, y in zip(a, b, strict=True))
