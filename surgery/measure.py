"""The damage of a swap: both models, read from their files, on the same probe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..modules.decoder import Decoder
from ..parity.compare import kl_divergence
from ..parity.probe import Batch, probe
from ..parity.stream import Tree
from .base import Promise

__all__ = ["Measurement", "measure"]

ALL = Promise()


@dataclass(frozen=True)
class Measurement:
    """Logits after against logits before, by the dtype they were computed in.

    maximum: the largest absolute difference; relative: that over the largest logit; kl: mean KL divergence in nats a
    token and top1 the share of positions with the same most likely token, both in the widest dtype.
    """

    maximum: dict[str, float]
    relative: dict[str, float]
    kl: float
    top1: float
    positions: int

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "maximum": self.maximum,
            "relative": self.relative,
            "kl": self.kl,
            "top1": self.top1,
            "positions": self.positions,
        }


def measure(
    before: Tree, after: Tree, *, promise: Promise = ALL, dtypes: Sequence[str] = ("float32", "float64")
) -> Measurement:
    """Run the probe through both in each dtype, one pair in memory at a time."""
    batches = promised(probe(before.spec, after.spec), promise)
    maximum, relative = {}, {}
    kl = agreed = 0.0
    positions = 0
    for dtype in dtypes:
        old, new = (_build(tree, getattr(torch, dtype)) for tree in (before, after))
        worst = largest = 0.0
        with torch.inference_mode():
            for batch in batches:
                a = batch.valid(old(batch.input_ids, batch.attention_mask))
                b = batch.valid(new(renamed(batch.input_ids, promise), batch.attention_mask))
                if promise.tokens is not None:
                    a, b = (x[:, list(ids)] for x, ids in zip((a, b), promise.tokens, strict=True))
                difference = (a - b).abs().max().item()
                worst = max(worst, difference) if difference == difference else float("nan")
                largest = max(largest, a.abs().max().item())
                if dtype == dtypes[-1]:
                    kl += kl_divergence(a, b).sum().item()
                    agreed += (a.argmax(-1) == b.argmax(-1)).sum().item()
                    positions += a.shape[0]
        maximum[dtype], relative[dtype] = worst, worst / largest if largest else worst
    return Measurement(maximum, relative, kl / positions, agreed / positions, positions)


def _build(tree: Tree, dtype: torch.dtype) -> Decoder:
    model = Decoder(tree.spec).to(dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tree.read(name))
    return model


def promised(batches: Sequence[Batch], promise: Promise) -> list[Batch]:
    """The probe with what the promise leaves out left out: tokens that are not kept, positions beyond its length."""
    found = []
    for batch in batches:
        ids, mask = batch.input_ids[:, : promise.length], batch.attention_mask
        if promise.tokens is not None:
            kept = torch.tensor(promise.tokens[0])
            ids = kept[ids % len(kept)]
        found.append(Batch(batch.name, ids, None if mask is None else mask[:, : promise.length]))
    return found


def renamed(ids: Tensor, promise: Promise) -> Tensor:
    """Token ids of the old vocabulary in the new one."""
    if promise.tokens is None:
        return ids
    table = torch.zeros(max(promise.tokens[0]) + 1, dtype=torch.long)
    table[list(promise.tokens[0])] = torch.tensor(promise.tokens[1])
    return table[ids]
