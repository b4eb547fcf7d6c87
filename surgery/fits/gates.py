"""The output projection of a feed-forward whose factor without an activation goes, fitted on a text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from ..base import Model, Wide
from .calibration import Calibration, Layer
from .regression import Moment, ridge

__all__ = ["refits"]

STRENGTH = 1e-3
"""Of the ridge that holds the refitted projection to a multiple of the old one."""


def refits(model: Model, calibration: Calibration, layers: set[int]) -> Iterator[Mapping[str, Wide]]:
    """down' of each layer by its shared name."""
    for layer in calibration.walk(model):
        if layer.index in layers:
            name = f"blocks.{layer.index}.feed_forward.down_proj.weight"
            yield {name: refit_down(layer, torch.from_numpy(model.wide(name).copy()))}


def refit_down(layer: Layer, down: torch.Tensor) -> Wide:
    """argmin E|down·(a · u) - down'·a|² over down', with a = act(gate(x)) and u = up(x); where the text says little it
    is held to down·diag(E[a² u] / E[a²]), the best for each unit alone.
    """
    module = layer.module.feed_forward
    _, seen = layer.run(("feed_forward.gate_proj", "feed_forward.up_proj"))
    gate, up = (seen[f"feed_forward.{name}"][1].flatten(0, 1).to(torch.float64) for name in ("gate_proj", "up_proj"))
    gate = module.activation(gate)
    share = (gate.square() * up).sum(dim=0) / gate.square().sum(dim=0).clamp_min(torch.finfo(gate.dtype).tiny)
    moment = Moment.zeros(gate.shape[1], down.shape[0])
    moment.add(gate, (gate * up) @ down.T)
    result: Wide = ridge(down * share, moment, STRENGTH).numpy()
    return result
