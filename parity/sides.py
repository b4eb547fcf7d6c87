"""The two sides of a verification: transformers' logits and gptkit's, in memory or a layer at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..converter.checkpoint import Checkpoint
from ..modules.attention import Kernel
from ..modules.load import load_checkpoint
from .probe import Batch
from .reference import load_reference, reference_folder, reference_logits
from .stream import stream_candidate, stream_reference

__all__ = ["Sides", "reference_run", "sides"]


@dataclass(frozen=True)
class Sides:
    """What computes logits. `folder` holds what transformers loads; None streams both sides from their files."""

    source: Checkpoint
    target: Checkpoint
    folder: Path | None

    def reference(self, batches: Sequence[Batch], dtype: torch.dtype, path: str) -> list[Tensor]:
        """transformers' logits of real tokens, (N, V) a batch."""
        if self.folder is None:
            return stream_reference(self.source, dtype, path).run(batches)
        return reference_run(load_reference(self.folder, dtype, path), batches)

    def candidate(self, batches: Sequence[Batch], dtype: torch.dtype, path: Kernel) -> list[Tensor]:
        """gptkit's logits of real tokens, (N, V) a batch."""
        if self.folder is None:
            return stream_candidate(self.target, dtype, path).run(batches)
        model = load_checkpoint(self.target, dtype, path)
        with torch.inference_mode():
            return [batch.valid(model(batch.input_ids, batch.attention_mask)) for batch in batches]


@contextmanager
def sides(source: Checkpoint, target: Checkpoint, stream: bool) -> Iterator[Sides]:
    """Both sides while the reference's folder is there.

    Raises:
        CannotExpress: no transformers class computes the reference's tree.

    """
    if stream:
        yield Sides(source, target, None)
        return
    with reference_folder(source) as folder:
        yield Sides(source, target, folder)


def reference_run(model: Any, batches: Sequence[Batch]) -> list[Tensor]:
    """The logits of real tokens, (N, V) a batch, of transformers' model."""
    with torch.inference_mode():
        return [batch.valid(reference_logits(model, batch.input_ids, batch.attention_mask)) for batch in batches]
