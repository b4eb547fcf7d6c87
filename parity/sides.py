"""The two sides of a verification: transformers' logits and gptkit's, in memory or a layer at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from ..converter.checkpoint import Checkpoint
from ..converter.tensors import Tree
from ..modules.attention import Kernel
from ..modules.decoder import Decoder
from ..modules.load import filled, load_checkpoint, tensor_of
from .passes import run_together
from .probe import Batch
from .reference import load_reference, reference_folder, reference_logits
from .stream import stream_candidate, stream_reference

__all__ = ["Sides", "Watch", "sides"]


Watch = Callable[[nn.Module], AbstractContextManager[object]]
"""What is open while a model runs: hooks on its modules."""


def unwatched(_: nn.Module) -> AbstractContextManager[object]:
    """No hooks."""
    return nullcontext()


@dataclass(frozen=True)
class Sides:
    """What computes logits. `folder` holds what transformers loads; None streams both sides from their files."""

    source: Checkpoint
    target: Checkpoint
    folder: Path | None

    def reference(
        self, batches: Sequence[Batch], dtype: torch.dtype, path: str, watch: Watch = unwatched
    ) -> list[Tensor]:
        """transformers' logits of real tokens, (N, V) a batch."""
        if self.folder is None:
            stream = stream_reference(self.source, dtype, path)
            with watch(stream.model):
                return stream.run(batches)
        model = load_reference(self.folder, dtype, path)
        with watch(model):
            return run_together(
                lambda batch: batch.valid(reference_logits(model, batch.input_ids, batch.attention_mask)), batches
            )

    def candidate(
        self,
        batches: Sequence[Batch],
        dtype: torch.dtype,
        path: Kernel,
        watch: Watch = unwatched,
        tree: Tree | None = None,
    ) -> list[Tensor]:
        """gptkit's logits of real tokens, (N, V) a batch: the target's, or those of a tree that is read from it."""
        if self.folder is None:
            stream = stream_candidate(tree or self.target, dtype, path)
            with watch(stream.model):
                return stream.run(batches)
        if tree is None:
            model = load_checkpoint(self.target, dtype, path)
        else:
            model = filled(partial(Decoder, tree.spec, path), partial(tensor_of, tree), dtype)
        with watch(model):
            return run_together(lambda batch: batch.valid(model(batch.input_ids, batch.attention_mask)), batches)


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
