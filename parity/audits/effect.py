"""Measure how much the logits of two models differ on a few random tokens.

This is the only file of this folder that needs torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...components import ModelSpec
from ...converter.weights import Tree
from ...errors import GptkitError
from ...modules.devices import Device, device_of, in_float32, reported_memory
from ..compare import PositionComparison, compare_heads
from ..probe import ProbeBatch, Scope
from ..rows import states

_WORK = 2 * 10**11
"""The multiplications that a model may use for the batches after the first one: a few seconds on one core."""
_ORDER = ("random tokens", "past", "long")
"""The batches of the probe that are computed, in this order, as far as they are affordable."""


@dataclass
class Reweighed:
    """A model with a changed config and the weights of another model, whose tensors have the same names and shapes."""

    spec: ModelSpec
    tensors: Tree

    def tensor(self, name: str) -> tuple[np.ndarray, str]:
        """Read one tensor. Return its values (bf16 and fp8 as integers with the same bits) and the
        name of its dtype.
        """
        return self.tensors.tensor(name)

    def release(self) -> None:
        """Release the memory-mapped pages that were read."""
        self.tensors.release()


@in_float32()
@reported_memory()
def effect(source: Tree, tree: Tree, device: Device = "cpu") -> str:
    """Return, in words, how much the logits of two models differ on random tokens.

    If the vocabularies differ in size, only the tokens of both are compared.

    Args:
        source: the original model, with its weights.
        tree: the changed model, with its weights.
        device: the device to compute on.

    Raises:
        GptkitError: the logits are NaN or infinite, or the memory of the GPU is full.
    """
    common = min(source.spec.vocab_size, tree.spec.vocab_size)
    same = source.spec.vocab_size == tree.spec.vocab_size
    scope = Scope(source.spec, tree.spec, None if same else (range(common), range(common)))
    place = device_of(device, "audit")
    batches = [batch.to(place) for batch in _affordable(scope.probe(), source.spec)]
    with torch.inference_mode():
        sides = [states(tree_, batches, torch.float32) for tree_ in (source, tree)]
    valid = [torch.cat([batch.valid(x) for batch, x in zip(batches, side, strict=True)]) for side in sides]
    if not all(bool(torch.isfinite(values).all()) for values in valid):
        raise GptkitError("the logits of the source or of the changed model are NaN or infinite")
    return _words(compare_heads(source, tree, (valid[0], valid[1]), tokens=scope.tokens))


def _affordable(batches: Sequence[ProbeBatch], spec: ModelSpec) -> list[ProbeBatch]:
    """Choose from the test inputs (the probe): the batch of random tokens, and then longer ones.

    Longer batches are included as long as a model of this size needs less than `_WORK` multiplications for all of them.
    """
    size = sum(parameter.count for parameter in spec.parameters())
    chosen = [batch for begin in _ORDER for batch in batches if batch.name.startswith(begin)]
    budget, affordable = _WORK, chosen[:1]
    for batch in chosen[1:]:
        budget -= size * batch.input_ids.numel()
        affordable += [batch] if budget > 0 else []
    return affordable


def _words(compared: PositionComparison) -> str:
    """Return the comparison of the logits in words."""
    gap, largest = compared.gap.max().item(), compared.largest.max().item()
    count = f"{len(compared.kl):,} random tokens"
    if gap == 0:
        return f"the same logits on {count}"
    share = f"{gap / largest:.2g} of the largest" if largest else f"{gap:.2g}"
    agree = compared.agree.double().mean().item()
    kl = compared.kl.mean().item()
    return f"logits differ by up to {share}, KL {kl:.2g} nats per token, top-1 agreement {agree:.0%}, on {count}"
