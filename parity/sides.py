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
from .probe import Batch
from .reference import load_reference, quiet, reference_folder, reference_logits
from .stream import Stream, decoder_logits, stream_candidate, stream_reference

Watch = Callable[[nn.Module], AbstractContextManager[object]]
"""What is open while a model runs: hooks on its modules."""


@dataclass(frozen=True)
class Sides:
    """What computes logits of real tokens, (N, V) a batch. `folder` holds what transformers loads; None streams both
    sides from their files.
    """

    source: Checkpoint
    target: Checkpoint
    folder: Path | None

    def reference(
        self, batches: Sequence[Batch], dtype: torch.dtype, path: str, watch: Watch = nullcontext
    ) -> list[Tensor]:
        """transformers' logits."""
        if self.folder is None:
            stream = stream_reference(self.source, dtype, path)
        else:
            stream = Stream(load_reference(self.folder, dtype, path), reference_logits)
        with quiet(), watch(stream.model):
            return stream.run(batches)

    def candidate(
        self,
        batches: Sequence[Batch],
        dtype: torch.dtype,
        path: Kernel,
        watch: Watch = nullcontext,
        tree: Tree | None = None,
    ) -> list[Tensor]:
        """gptkit's logits: the target's, or those of a tree that is read from it."""
        if self.folder is None:
            stream = stream_candidate(tree or self.target, dtype, path)
        elif tree is None:
            stream = Stream(load_checkpoint(self.target, dtype, path), decoder_logits)
        else:
            model = filled(partial(Decoder, tree.spec, path), partial(tensor_of, tree), dtype)
            stream = Stream(model, decoder_logits)
        with watch(stream.model):
            return stream.run(batches)


@contextmanager
def sides(source: Checkpoint, target: Checkpoint, stream: bool) -> Iterator[Sides]:
    """Both sides while the reference's folder is there. Raises CannotExpress where no transformers class computes the
    reference's tree.
    """
    place: AbstractContextManager[Path | None] = nullcontext() if stream else reference_folder(source)
    with place as folder:
        yield Sides(source, target, folder)
