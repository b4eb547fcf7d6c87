"""Which layers a model can best do without: measured by the KL divergence from the whole model on a text, greedily.

In every round each layer that is left is left out by itself, and the one without which the KL is least goes. The
candidates of a round share a walk through the layers: their streams part where the first of them leaves a layer out.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...parity.compare import compare_heads
from ...parity.rows import final_norm
from ..base import Exactly, Model
from .calibration import Calibration, run_block
from .regression import block_influence

_CANDIDATES = 12
"""Layers that are tried in a round: those of the least block influence. All are tried in models of as many layers."""
_WORK = 2 * 10**13  # multiplications that all rounds may take: some minutes on two cores
_LEAST = 512  # tokens that are measured on, however large the model

Kept = tuple[int, ...]


@dataclass
class Dropping:
    """The layers that stay, and how they were found.

    kept: in order. by: what found them. influence: the block influence of each layer. tried: the KL in nats per token
    of every set of layers that was measured, in the order in which they were. tokens: the number measured on.
    """

    kept: Kept
    by: str
    influence: list[float]
    tried: dict[Kept, float] = field(default_factory=dict)
    tokens: int = 0


def drop(model: Model, calibration: Calibration, plain: Kept) -> Dropping:
    """Return the layers that stay, as many as are in `plain`: what the greedy search finds, or what block influence
    would keep, or `plain` (all but the last ones before the last), whichever has the least KL on the text.
    """
    layers, wanted = len(model.spec.blocks), len(plain)
    text = calibration.deciding(_tokens(model, wanted))
    whole, influence = _whole(model, text)
    judge = _Judge(model, whole)
    by_influence = sorted(range(layers), key=lambda layer: (influence[layer], layer))
    greedy = tuple(range(layers))
    tried: dict[Kept, float] = {}
    while len(greedy) > wanted:
        candidates = [layer for layer in by_influence if layer in greedy][:_CANDIDATES]
        tried |= judge.without_one(text, greedy, candidates)
        greedy = min((_without(greedy, layer) for layer in candidates), key=lambda kept: (tried[kept], kept))
    found = {
        "greedy search": greedy,
        "block influence": tuple(sorted(by_influence[layers - wanted :])),
        "the last but one": plain,
    }
    for kept in found.values():
        if kept not in tried:
            gone = [layer for layer in range(layers) if layer not in kept]
            tried[kept] = judge.kl([layer.output for layer in text.walk(model, without=gone)][-1])
    by = min(found, key=lambda name: tried[found[name]])
    return Dropping(found[by], by, influence, tried, text.ids.numel())


def _tokens(model: Model, wanted: int) -> int:
    """How many tokens the search can afford."""
    layers = len(model.spec.blocks)
    passes = max(layers - wanted, 1) * min(layers, _CANDIDATES)
    size = sum(each.count for each in model.spec.parameters())
    return int(max(_LEAST, _WORK // (passes * size)))


def _without(kept: Kept, layer: int) -> Kept:
    """Layers without one of them."""
    return tuple(each for each in kept if each != layer)


def _whole(model: Model, text: Calibration) -> tuple[Tensor, list[float]]:
    """What leaves the last layer, and the block influence of every layer."""
    influence, output = list[float](), torch.empty(0)
    for layer in text.walk(model):
        influence.append(block_influence(layer.x, layer.output).mean().item())
        output = layer.output
    return output, influence


class _Judge:
    """Measures streams that leave the last layer against that of the whole model, `whole` (rows, tokens, hidden)."""

    def __init__(self, model: Model, whole: Tensor) -> None:
        self.model, self.tree = model, Exactly(model)
        self.norm = final_norm(self.tree, torch.float32)
        self.whole = self._states(whole)

    def _states(self, stream: Tensor) -> Tensor:
        """What the head takes of a stream, (tokens, hidden)."""
        with torch.no_grad():
            states: Tensor = self.norm(stream)
        return states.flatten(0, 1)

    def kl(self, stream: Tensor) -> float:
        """In nats per token; infinite where it is no number."""
        found = compare_heads(self.tree, self.tree, (self.whole, self._states(stream))).kl.double().mean().item()
        return found if math.isfinite(found) else math.inf

    def without_one(self, text: Calibration, kept: Kept, candidates: Collection[int]) -> dict[Kept, float]:
        """The KL without one more layer, for each of these, in one walk through the layers that are kept."""
        streams: dict[int, Tensor] = {}
        gone = [layer for layer in range(len(self.model.spec.blocks)) if layer not in kept]
        for layer in text.walk(self.model, without=gone):
            streams = {left: run_block(layer.module, x, layer.context)[0] for left, x in streams.items()}
            if layer.index in candidates:
                streams[layer.index] = layer.x
        return {_without(kept, left): self.kl(stream) for left, stream in streams.items()}
