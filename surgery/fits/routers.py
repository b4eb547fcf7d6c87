"""How much of its weight a router gives to each expert on a text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from ...modules.feed_forward import MixtureOfExpertsModule
from ..base import Model, Wide
from .calibration import Calibration

__all__ = ["shares_of"]


def shares_of(model: Model, calibration: Calibration, layers: set[int]) -> Iterator[Mapping[str, Wide]]:
    """Each layer's shares (experts,), which sum to 1, by its number."""
    for layer in calibration.walk(model):
        module = layer.module.feed_forward
        if layer.index in layers and isinstance(module, MixtureOfExpertsModule):
            _, seen = layer.run(("feed_forward",))
            x = seen["feed_forward"][0].flatten(0, 1)
            with torch.no_grad():
                weights, chosen = module.route(x)
            total = torch.zeros(module.spec.experts, dtype=torch.float64)
            total.scatter_add_(0, chosen.flatten(), weights.flatten().to(torch.float64))
            yield {str(layer.index): (total / total.sum()).numpy()}
