"""Fits of feed-forwards on a text, one layer at a time.

There are three fits: the slope for a new activation function, the output projection of a gated feed-forward that
becomes plain, and the average weight that a router gives each expert.
"""

from collections.abc import Iterator, Mapping

import numpy as np
import torch

from ...components import Activation
from ...modules.feed_forward import MixtureOfExpertsModule
from ...modules.layers import ACTIVATIONS
from ..base import Model, Wide
from ..layerwise import Dense
from .calibration import Calibration, CalibrationLayer
from .regression import best_slope, ridge_by_held_out

_GATE, UP = "feed_forward.gate_proj", "feed_forward.up_proj"
SAMPLES = 100_000  # the number of pre-activations on which the slope of a layer is fitted
_STRENGTH = 1e-3  # the first strength of the ridge that pulls the projection towards a multiple of the old one


def slopes(
    model: Model, calibration: Calibration, layers: Mapping[int, Dense], new: Activation
) -> Iterator[Mapping[str, Wide]]:
    """Fit the slope s for a new activation function, so that new(s·x)/s is nearest to the old function on the text.

    Yield for each layer its slope, by the layer's number. `layers` has the old feed-forwards.
    """
    for layer in calibration.walk(model, layers):
        dense = layers[layer.index]
        down = torch.tensor(model.wide(f"blocks.{layer.index}.feed_forward.down_proj.weight"), device=layer.x.device)
        x = pre_activations(layer, dense, down)
        yield {str(layer.index): np.array([best_slope(ACTIVATIONS[dense.activation], ACTIVATIONS[new], x)[0]])}


def pre_activations(layer: CalibrationLayer, dense: Dense, down: torch.Tensor) -> torch.Tensor:
    """Sample `SAMPLES` inputs of a layer's activation function on the text. Return them as a vector.

    Inputs whose error affects the layer's output more are sampled more often. The weight of an input is the squared
    norm of the column of down_proj that multiplies its activation. In a gated feed-forward, it is also multiplied by
    the square of up_proj's output.

    Args:
        layer: The layer with its input.
        dense: The component of its feed-forward.
        down: The weight of its down_proj, (hidden, n).
    """
    gated = "gate_proj.weight" in dense.shapes()
    _, seen = layer.run(*((_GATE, UP) if gated else (UP,)))
    x = seen[_GATE if gated else UP][1].to(torch.float64)
    weight = down.square().sum(dim=0).expand_as(x)
    if gated:
        weight = weight * seen[UP][1].to(torch.float64).square()
    total = weight.flatten().cumsum(0)
    quantiles = (torch.arange(SAMPLES, dtype=torch.float64, device=x.device) + 0.5) / SAMPLES * total[-1]
    return x.flatten()[torch.searchsorted(total, quantiles).clamp_max(len(total) - 1)]


def downs(model: Model, calibration: Calibration, layers: set[int]) -> Iterator[Mapping[str, Wide]]:
    """Fit down_proj of gated feed-forwards that become plain, which drops the factor up(x). Yield it for each layer.

    With a = act(gate(x)) and u = up(x), the new projection is argmin E|down·(a · u) - down'·a|² over down'. The ridge
    penalty pulls down' towards down·diag(E[a² u] / E[a²]), the best choice if every intermediate element is fitted
    alone.
    """
    for layer in calibration.walk(model, layers):
        name = f"blocks.{layer.index}.feed_forward.down_proj.weight"
        down = torch.tensor(model.wide(name), device=layer.x.device)
        _, seen = layer.run(_GATE, UP)
        gate, up = (seen[part][1].flatten(0, 1).to(torch.float64) for part in (_GATE, UP))
        gate = layer.module.feed_forward.activation(gate)
        power = gate.square().sum(dim=0).clamp_min(torch.finfo(gate.dtype).tiny)
        share = (gate.square() * up).sum(dim=0) / power
        fitted = ridge_by_held_out(down * share, gate, (gate * up) @ down.T, first=_STRENGTH)
        yield {name: fitted.cpu().numpy()}


def shares(model: Model, calibration: Calibration, layers: set[int]) -> Iterator[Mapping[str, Wide]]:
    """Yield for each layer the share of every expert in the router's weights on the text, (experts,).

    The shares of a layer sum to 1. The key is the layer's number.
    """
    for layer in calibration.walk(model, layers):
        module = layer.module.feed_forward
        assert isinstance(module, MixtureOfExpertsModule)
        x = layer.run("feed_forward")[1]["feed_forward"][0].flatten(0, 1)
        with torch.no_grad():
            weights, chosen = module.route(x)
        total = torch.zeros(module.spec.experts, dtype=torch.float64, device=x.device)
        total.scatter_add_(0, chosen.flatten(), weights.flatten().to(torch.float64))
        yield {str(layer.index): (total / total.sum()).cpu().numpy()}
