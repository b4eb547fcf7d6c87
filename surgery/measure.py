"""The damage of a swap: both models, opened from their files, on the same probe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..converter.checkpoint import Checkpoint
from ..modules.decoder import Decoder
from ..modules.load import load_checkpoint
from ..parity.compare import kl_divergence
from ..parity.probe import probe

__all__ = ["Measurement", "measure", "relative_error"]


@dataclass(frozen=True)
class Measurement:
    """Logits after against logits before, by the dtype they were computed in.

    maximum: the largest absolute difference; relative: that over the largest logit; kl: mean KL divergence in nats a
    token and top1 the share of positions with the same most likely token, both in fp64.
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


def measure(before: Checkpoint, after: Checkpoint) -> Measurement:
    """Run the probe through both, in fp32 and in fp64, one pair in memory at a time."""
    batches = probe(before.spec)
    maximum, relative = {}, {}
    kl = agreed = 0.0
    positions = 0
    for dtype in ("float32", "float64"):
        old, new = load_checkpoint(before, dtype), load_checkpoint(after, dtype)
        worst = largest = 0.0
        with torch.inference_mode():
            for batch in batches:
                a = batch.valid(old(batch.input_ids, batch.attention_mask))
                b = batch.valid(new(batch.input_ids, batch.attention_mask))
                difference = (a - b).abs().max().item()
                worst = max(worst, difference) if difference == difference else float("nan")
                largest = max(largest, a.abs().max().item())
                if dtype == "float64":
                    kl += kl_divergence(a, b).sum().item()
                    agreed += (a.argmax(-1) == b.argmax(-1)).sum().item()
                    positions += a.shape[0]
        maximum[dtype], relative[dtype] = worst, worst / largest if largest else worst
    return Measurement(maximum, relative, kl / positions, agreed / positions, positions)


def relative_error(before: Decoder, after: Decoder) -> float:
    """The largest difference of logits on the probe, over the largest logit."""
    worst, largest = [], []
    with torch.inference_mode():
        for batch in probe(before.spec):
            a = batch.valid(before(batch.input_ids, batch.attention_mask))
            worst.append((a - batch.valid(after(batch.input_ids, batch.attention_mask))).abs().max())
            largest.append(a.abs().max())
    # Not Python's max, which loses a NaN that does not come first.
    return float(torch.stack(worst).max() / torch.stack(largest).max())
