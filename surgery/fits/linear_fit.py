"""Linear attention in place of softmax attention, fitted on a text, layer after layer.

The original and the new model run together, as in `kv_fit`. In each layer, queries, keys and values stay the same.
Three things are fitted:

1. the forgetting rate of each key-value head and a factor of each query head's scores, by a search for the values with
   which the output of the head is nearest to the original's,
2. the output projection, by ridge regression to the original's attention output plus the difference between the hidden
   states of the two models before the layer,
3. the feed-forward's down projection, by ridge regression to the original's hidden states after the layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ...components import Block
from ...modules.decoder import BlockModule
from ...modules.linear_attention import LinearAttentionModule, mean, pairs, widened
from ..base import Model, Wide
from .calibration import Calibration, run_block
from .kv_fit import DOWN, added, refit, refit_down, sublayer_of
from .text import TOKENS

_RATES = tuple(2.0**-power for power in range(11))
_FACTORS = (0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0)  # the factors of scores that are tried


def _opened(rate: float) -> float:
    """Return the bias of a gate that gives a constant forgetting rate: the inverse of softplus."""
    return math.log(math.expm1(rate))


def fitted_layers(model: Model, blocks: Mapping[int, Block], calibration: Calibration) -> Iterator[dict[str, Wide]]:
    """Fit linear attention in some layers on a text. Yield the new tensors of each of these layers, in order.

    `blocks` has the new block of each layer, by the layer's number.
    """
    student: Tensor | None = None  # the new model's hidden states; None while it equals the original's
    for layer in calibration.walk(model, range(max(blocks) + 1)):
        old, context, inputs = layer.module, layer.context, layer.x if student is None else student
        if layer.index not in blocks:
            student = None if student is None else run_block(old, inputs, context)[0]
            continue
        new = _plain(old, blocks[layer.index])
        mixer: Any = new.recurrence
        with torch.no_grad():
            mixed, output = layer.run("attention.o_proj")[1]["attention.o_proj"]
            x = run_block(new, inputs, context, "recurrence.v_proj")[1]["recurrence.v_proj"][0]
            _forgetting(mixer, widened(mixer.spec.scale, *mixer.projected(x, context)), mixed)
            inner = run_block(new, inputs, context, "recurrence.o_proj")[1]["recurrence.o_proj"][0]
            sublayer = sublayer_of(blocks[layer.index], "recurrence")
            missing = (layer.x - inputs) / sublayer.multiplier if added(sublayer) else 0
            bias = 0 if mixer.o_proj.bias is None else mixer.o_proj.bias
            stream = layer.x + sublayer.multiplier * output
            weight: Tensor = mixer.o_proj.weight
            weight.copy_(refit(weight.double(), inner, output - bias + missing, stream))
        names = [name for name in mixer.state_dict() if name.startswith(("q_proj", "gate_proj", "o_proj.weight"))]
        tensors = {f"blocks.{layer.index}.recurrence.{name}": mixer.state_dict()[name].double() for name in names}
        student, down = refit_down(new, inputs, layer.output, context)
        if down is not None:
            tensors[f"blocks.{layer.index}.{DOWN}.weight"] = down
        yield {name: value.cpu().numpy() for name, value in tensors.items()}


def _plain(old: BlockModule, spec: Block) -> BlockModule:
    """Return a block with linear attention that has the weights of the old block. The weights of its gates are zero."""
    new = BlockModule(spec).to(device=next(old.parameters()).device, dtype=torch.float32).eval()
    values = {name.replace("attention", "recurrence", 1): value for name, value in old.state_dict().items()}
    gates: Any = new.recurrence.gate_proj
    values |= {f"recurrence.gate_proj.{name}": torch.zeros_like(gate) for name, gate in gates.state_dict().items()}
    new.load_state_dict({name: values[name] for name in new.state_dict()})
    return new


def _forgetting(mixer: LinearAttentionModule, inputs: tuple[Tensor, ...], wanted: Tensor) -> None:
    """Set the forgetting rate of each key-value head, and a factor of each query head's scores, to the best values.

    Only a few values are tried, so the first `TOKENS` tokens of the text suffice.

    Args:
        mixer: The linear attention, whose weights are changed.
        inputs: Its queries, keys, values and gates on the text, (B, heads, T, …).
        wanted: The outputs of the original attention's heads, (B, T, H·d).
    """
    rows = max(1, TOKENS // wanted.shape[1])
    (q, k, v, g), wanted, spec = (tensor[:rows] for tensor in inputs), wanted[:rows], mixer.spec
    wanted = torch.unflatten(wanted, -1, (spec.heads, -1)).transpose(1, 2)
    value = v.repeat_interleave(spec.group, dim=1)
    factors = (1.0,) if mixer.q_norm is not None else _FACTORS  # a norm's gain is the same for all heads

    def errors(rate: float) -> Tensor:
        """Return the squared error of the outputs at a forgetting rate, by factor and query head, (factors, H)."""
        differences = [mean(pairs(q * factor, k, torch.full_like(g, -rate)) @ value) - wanted for factor in factors]
        return torch.stack([difference.square().sum(dim=(0, 2, 3)) for difference in differences])

    all_errors = torch.stack([errors(rate) for rate in _RATES])  # (rates, factors, H)
    least = torch.unflatten(all_errors.amin(dim=1), -1, (spec.kv_heads, -1)).sum(dim=-1)  # (rates, KV)
    rates = least.argmin(dim=0)
    gates: Any = mixer.gate_proj
    gates.bias.copy_(torch.tensor([_opened(_RATES[index]) for index in rates.tolist()]))
    heads = torch.arange(spec.heads, device=rates.device)
    chosen = all_errors[rates.repeat_interleave(spec.group), :, heads].argmin(dim=1)  # (H,)
    scale = torch.tensor(factors, device=rates.device)[chosen].repeat_interleave(spec.head_dim)
    mixer.q_proj.weight.mul_(scale[:, None])
    if mixer.q_proj.bias is not None:
        mixer.q_proj.bias.mul_(scale)
