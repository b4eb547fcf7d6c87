"""Refit output projections and down projections on a text, after a swap that changes attention.

The original and the model after the swap run together, as in `kv_fit`. In each layer, the output projection is fitted
to the original's attention output, plus the difference between the hidden states of the two models before the layer.
Then the feed-forward's down projection is fitted to the original's hidden states after the layer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import Tensor

from ..base import Model, Swapped, SwappedModel, Wide
from .calibration import Calibration, block_of, run_block
from .kv_fit import DOWN, added, refit, refit_down, sublayer_of

OUTPUT = "attention.o_proj"


def refitted_layers(
    model: Model, swapped: Swapped, layers: Collection[int], calibration: Calibration
) -> Iterator[dict[str, Wide]]:
    """Refit o_proj and down_proj in some layers on a text. Yield their new weights for each of these layers, in order.

    `swapped` is the result of the swap on `model`.
    """
    after, calibration = SwappedModel(model, swapped), calibration.within(swapped.spec)
    student, context = calibration.start(after)
    for layer in calibration.walk(model, range(max(layers) + 1)):
        new, context.layer = block_of(after, layer.index, calibration.device), layer.index
        if layer.index not in layers:
            student = run_block(new, student, context)[0]
            continue
        output = layer.run("attention")[1]["attention"][1]
        inner = run_block(new, student, context, OUTPUT)[1][OUTPUT][0]
        sublayer, linear = sublayer_of(new.spec, "attention"), new.attention.o_proj
        with torch.no_grad():
            missing: Tensor | int = (layer.x - student) / sublayer.multiplier if added(sublayer) else 0
            bias: Tensor | int = 0 if linear.bias is None else linear.bias
            wanted, stream = output - bias + missing, layer.x + sublayer.multiplier * output
            fitted = refit(linear.weight.double(), inner, wanted, stream)
            linear.weight.copy_(fitted)
            student, down = refit_down(new, student, layer.output, context)
        tensors = {f"blocks.{layer.index}.{OUTPUT}.weight": fitted}
        if down is not None:
            tensors[f"blocks.{layer.index}.{DOWN}.weight"] = down
        yield {name: value.cpu().numpy() for name, value in tensors.items()}
