"""What is fitted on a text in a feed-forward, a layer at a time: the slope of an activation that stands in another's
place, the output projection whose gate's other factor goes, and how much of its weight a router gives to each expert.
"""

from collections.abc import Iterator, Mapping

import numpy as np
import torch

from ...components import Activation
from ...modules.feed_forward import MixtureOfExpertsModule
from ...modules.layers import ACTIVATIONS
from ..base import Model, Wide
from ..layerwise import Dense
from .calibration import Calibration, Layer
from .regression import best_slope, ridge_by_held_out

_GATE, UP = "feed_forward.gate_proj", "feed_forward.up_proj"
SAMPLES = 100_000  # pre-activations of a layer that its slope is fitted on
_STRENGTH = 1e-3  # of the ridge that holds the refitted projection to a multiple of the old one, to start from


def slopes(
    model: Model, calibration: Calibration, layers: Mapping[int, Dense], new: Activation
) -> Iterator[Mapping[str, Wide]]:
    """The best slope of each layer, by its number."""
    for layer in calibration.walk(model, layers):
        dense = layers[layer.index]
        down = torch.from_numpy(model.wide(f"blocks.{layer.index}.feed_forward.down_proj.weight").copy())
        x = pre_activations(layer, dense, down)
        yield {str(layer.index): np.array([best_slope(ACTIVATIONS[dense.activation], ACTIVATIONS[new], x)[0]])}


def pre_activations(layer: Layer, dense: Dense, down: torch.Tensor) -> torch.Tensor:
    """What a layer's activation gets on the text, each value as often as its error matters in the layer's output:
    times the square of its other factor, times that of its column of `down`; `SAMPLES` of them.
    """
    gated = "gate_proj.weight" in dense.shapes()
    _, seen = layer.run(*((_GATE, UP) if gated else (UP,)))
    x = seen[_GATE if gated else UP][1].to(torch.float64)
    weight = down.square().sum(dim=0).expand_as(x)
    if gated:
        weight = weight * seen[UP][1].to(torch.float64).square()
    total = weight.flatten().cumsum(0)
    at = (torch.arange(SAMPLES, dtype=torch.float64) + 0.5) / SAMPLES * total[-1]
    return x.flatten()[torch.searchsorted(total, at).clamp_max(len(total) - 1)]


def downs(model: Model, calibration: Calibration, layers: set[int]) -> Iterator[Mapping[str, Wide]]:
    """down' of each layer by its shared name: argmin E|down·(a · u) - down'·a|² over down', with a = act(gate(x)) and
    u = up(x); where the text says little it is held to down·diag(E[a² u] / E[a²]), the best for each unit alone.
    """
    for layer in calibration.walk(model, layers):
        name = f"blocks.{layer.index}.feed_forward.down_proj.weight"
        down = torch.from_numpy(model.wide(name).copy())
        _, seen = layer.run(_GATE, UP)
        gate, up = (seen[part][1].flatten(0, 1).to(torch.float64) for part in (_GATE, UP))
        gate = layer.module.feed_forward.activation(gate)
        power = gate.square().sum(dim=0).clamp_min(torch.finfo(gate.dtype).tiny)
        share = (gate.square() * up).sum(dim=0) / power
        yield {name: ridge_by_held_out(down * share, gate, (gate * up) @ down.T, first=_STRENGTH).numpy()}


def shares(model: Model, calibration: Calibration, layers: set[int]) -> Iterator[Mapping[str, Wide]]:
    """What each layer's router gives to each of its experts, (experts,), which sum to 1, by the layer's number."""
    for layer in calibration.walk(model, layers):
        module = layer.module.feed_forward
        assert isinstance(module, MixtureOfExpertsModule)
        x = layer.run("feed_forward")[1]["feed_forward"][0].flatten(0, 1)
        with torch.no_grad():
            weights, chosen = module.route(x)
        total = torch.zeros(module.spec.experts, dtype=torch.float64)
        total.scatter_add_(0, chosen.flatten(), weights.flatten().to(torch.float64))
        yield {str(layer.index): (total / total.sum()).numpy()}
