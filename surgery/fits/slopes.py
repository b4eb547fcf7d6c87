"""The slope of an activation that stands in another's place, a layer at a time, on what the layer sees of a text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch

from ...components import Activation, FeedForward, GatedFeedForward
from ...modules.layers import ACTIVATIONS
from ..base import Model, Wide
from .calibration import Calibration, Layer
from .regression import best_slope

__all__ = ["pre_activations", "slopes"]

Dense = FeedForward | GatedFeedForward

SAMPLES = 100_000
"""Pre-activations of a layer that its slope is fitted on."""


def slopes(
    model: Model, calibration: Calibration, layers: Mapping[int, Dense], new: Activation
) -> Iterator[Mapping[str, Wide]]:
    """The best slope of each layer, by its number."""
    for layer in calibration.walk(model):
        if layer.index in layers:
            down = torch.from_numpy(model.wide(f"blocks.{layer.index}.feed_forward.down_proj.weight").copy())
            x = pre_activations(layer, layers[layer.index], down)
            old = ACTIVATIONS[layers[layer.index].activation]
            yield {str(layer.index): np.array([best_slope(old, ACTIVATIONS[new], x)[0]])}


def pre_activations(layer: Layer, dense: Dense, down: torch.Tensor) -> torch.Tensor:
    """What a layer's activation gets on the text, each value as often as its error matters in the layer's output:
    times the square of its other factor, times that of its column of `down`; `SAMPLES` of them.
    """
    gated = isinstance(dense, GatedFeedForward)
    name = f"feed_forward.{'gate_proj' if gated else 'up_proj'}"
    _, seen = layer.run((name, *(("feed_forward.up_proj",) if gated else ())))
    x = seen[name][1].to(torch.float64)
    weight = down.square().sum(dim=0).expand_as(x)
    if gated:
        weight = weight * seen["feed_forward.up_proj"][1].to(torch.float64).square()
    total = weight.flatten().cumsum(0)
    at = (torch.arange(SAMPLES, dtype=torch.float64) + 0.5) / SAMPLES * total[-1]
    return x.flatten()[torch.searchsorted(total, at).clamp_max(len(total) - 1)]
