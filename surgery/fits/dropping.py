"""A greedy search for the layers that a model can do without, measured by the KL divergence on a text.

Every round tries to leave out each of the remaining layers, and drops the one without which the KL is least. All
candidates of a round are computed in one pass through the layers, because their hidden states differ only after the
layer that a candidate leaves out.
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

_CANDIDATES = 12  # the maximum number of layers that a round tries: those with the least block influence
_WORK = 2 * 10**13  # the maximum number of multiplications of all rounds: some minutes on two cores
_LEAST = 512  # the minimum number of tokens to measure on

Layers = tuple[int, ...]


@dataclass
class Dropping:
    """The layers that a search decided to keep, and how they were chosen."""

    layers: Layers  # the layers to keep, in order
    by: str  # the name of the method that chose them
    influence: list[float]  # the block influence of each layer (`regression.block_influence`)
    tried: dict[Layers, float] = field(default_factory=dict)  # the KL in nats per token, by the layers that were kept
    tokens: int = 0  # the number of tokens that the KL was measured on


def drop(model: Model, calibration: Calibration, plain: Layers) -> Dropping:
    """Choose which layers of a model to keep. The number of layers to keep is that of `plain`.

    Three choices are compared: the result of the greedy search, the layers with the most block influence, and `plain`,
    which has all layers except the last ones before the final layer. The choice with the least KL on the text wins.
    """
    layers, size = len(model.spec.blocks), len(plain)
    text = calibration.deciding(_tokens(model, size))
    whole, influence = _whole(model, text)
    judge = _Judge(model, whole)
    by_influence = sorted(range(layers), key=lambda layer: (influence[layer], layer))
    greedy = tuple(range(layers))
    tried: dict[Layers, float] = {}
    while len(greedy) > size:
        candidates = [layer for layer in by_influence if layer in greedy][:_CANDIDATES]
        tried |= judge.without_one(text, greedy, candidates)
        greedy = min((_without(greedy, layer) for layer in candidates), key=lambda stay: (tried[stay], stay))
    candidates_by_method = {
        "greedy search": greedy,
        "block influence": tuple(sorted(by_influence[layers - size :])),
        "the last but one": plain,
    }
    for stay in candidates_by_method.values():
        if stay not in tried:
            dropped = [layer for layer in range(layers) if layer not in stay]
            tried[stay] = judge.kl([layer.output for layer in text.walk(model, without=dropped)][-1])
    by = min(candidates_by_method, key=lambda name: tried[candidates_by_method[name]])
    return Dropping(candidates_by_method[by], by, influence, tried, text.ids.numel())


def _tokens(model: Model, remaining: int) -> int:
    """Return the number of tokens on which candidates are measured, so that the search ends in minutes.

    `remaining` is the number of layers to keep.
    """
    layers = len(model.spec.blocks)
    passes = max(layers - remaining, 1) * min(layers, _CANDIDATES)
    size = sum(parameter.count for parameter in model.spec.parameters())
    return int(max(_LEAST, _WORK // (passes * size)))


def _without(layers: Layers, layer: int) -> Layers:
    return tuple(other for other in layers if other != layer)


def _whole(model: Model, text: Calibration) -> tuple[Tensor, list[float]]:
    """Run the model with all its layers. Return the last layer's output, and the block influence of every layer."""
    influence, output = list[float](), torch.empty(0)
    for layer in text.walk(model):
        influence.append(block_influence(layer.x, layer.output).mean().item())
        output = layer.output
    return output, influence


class _Judge:
    """Measures the KL divergence of a model with fewer layers from the model with all layers, on a text.

    `whole` is the output of the last layer of the model with all layers, (rows, tokens, hidden).
    """

    def __init__(self, model: Model, whole: Tensor) -> None:
        self.model, self.tree = model, Exactly(model)
        self.norm = final_norm(self.tree, torch.float32, whole.device)
        self.whole = self._states(whole)

    def _states(self, output: Tensor) -> Tensor:
        """Apply the final norm to the output of the last layer. Return the input of the head, (tokens, hidden)."""
        with torch.no_grad():
            states: Tensor = self.norm(output)
        return states.flatten(0, 1)

    def kl(self, output: Tensor) -> float:
        """Return the KL in nats per token of a model whose last layer has this output. It is infinite for NaN."""
        kl = compare_heads(self.tree, self.tree, (self.whole, self._states(output))).kl.double().mean().item()
        return kl if math.isfinite(kl) else math.inf

    def without_one(self, text: Calibration, layers: Layers, candidates: Collection[int]) -> dict[Layers, float]:
        """For every candidate layer, return the KL of the model that has `layers` without this candidate.

        All candidates are computed in one pass through the layers. The keys of the result are the remaining layers.
        """
        outputs: dict[int, Tensor] = {}
        dropped = [layer for layer in range(len(self.model.spec.blocks)) if layer not in layers]
        for layer in text.walk(self.model, without=dropped):
            outputs = {candidate: run_block(layer.module, x, layer.context)[0] for candidate, x in outputs.items()}
            if layer.index in candidates:
                outputs[layer.index] = layer.x
        return {_without(layers, candidate): self.kl(output) for candidate, output in outputs.items()}
