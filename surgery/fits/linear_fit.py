"""Linear attention in place of attention, fitted on a text, layer after layer.

The original and the model that is made run side by side, as in `kv_fit`. In each layer, with queries, keys and values
as they were:

1. how fast each key-value head forgets, and a factor of each query head's scores, by search: those with which what the
   head gives is nearest to what it gave,
2. the output projection by ridge regression to the original's attention output, and to what the streams have drifted
   apart by,
3. the feed-forward's down projection likewise, to the original's stream after the layer.
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
from .calibration import TOKENS, Calibration, run_block
from .kv_fit import DOWN, added, refit, refit_down, sublayer_of

_RATES = tuple(2.0**-power for power in range(11))
_FACTORS = (0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0)  # of scores


def _opened(rate: float) -> float:
    """The bias of a gate that forgets at this rate: softplus of it is that."""
    return math.log(math.expm1(rate))


def fitted_layers(model: Model, blocks: Mapping[int, Block], calibration: Calibration) -> Iterator[dict[str, Wide]]:
    """The new tensors of each of the layers `blocks` (layer -> its new block), in order of the layers."""
    student: Tensor | None = None  # the original's stream, until a layer is fitted
    for layer in calibration.walk(model, range(max(blocks) + 1)):
        old, context, here = layer.module, layer.context, layer.x if student is None else student
        if layer.index not in blocks:
            student = None if student is None else run_block(old, here, context)[0]
            continue
        new = _plain(old, blocks[layer.index])
        mixer: Any = new.recurrence
        with torch.no_grad():
            mixed, made = layer.run("attention.o_proj")[1]["attention.o_proj"]
            x = run_block(new, here, context, "recurrence.v_proj")[1]["recurrence.v_proj"][0]
            _forgetting(mixer, widened(mixer.spec.scale, *mixer.projected(x, context)), mixed)
            inner = run_block(new, here, context, "recurrence.o_proj")[1]["recurrence.o_proj"][0]
            sublayer = sublayer_of(blocks[layer.index], "recurrence")
            missing = (layer.x - here) / sublayer.multiplier if added(sublayer) else 0
            bias = 0 if mixer.o_proj.bias is None else mixer.o_proj.bias
            stream = layer.x + sublayer.multiplier * made
            weight: Tensor = mixer.o_proj.weight
            weight.copy_(refit(weight.double(), inner, made - bias + missing, stream))
        names = [name for name in mixer.state_dict() if name.startswith(("q_proj", "gate_proj", "o_proj.weight"))]
        found = {f"blocks.{layer.index}.recurrence.{name}": mixer.state_dict()[name].double() for name in names}
        student, down = refit_down(new, here, layer.output, context)
        if down is not None:
            found[f"blocks.{layer.index}.{DOWN}.weight"] = down
        yield {name: value.numpy() for name, value in found.items()}


def _plain(old: BlockModule, spec: Block) -> BlockModule:
    """The block with linear attention of the same queries, keys and values, everything else as it was."""
    new = BlockModule(spec).to(torch.float32).eval()
    values = {name.replace("attention", "recurrence", 1): value for name, value in old.state_dict().items()}
    gates: Any = new.recurrence.gate_proj
    values |= {f"recurrence.gate_proj.{name}": torch.zeros_like(each) for name, each in gates.state_dict().items()}
    new.load_state_dict({name: values[name] for name in new.state_dict()})
    return new


def _forgetting(mixer: LinearAttentionModule, inputs: tuple[Tensor, ...], wanted: Tensor) -> None:
    """Set how fast heads forget, and the factor of their scores.

    Both are few numbers, chosen from a grid, for which the first `TOKENS` tokens suffice.

    Args:
        mixer: the new layer.
        inputs: its queries, keys, values and gates, (B, heads, T, …).
        wanted: what its heads are to give, (B, T, H·d).
    """
    rows = max(1, TOKENS // wanted.shape[1])
    (q, k, v, g), wanted, spec = (tensor[:rows] for tensor in inputs), wanted[:rows], mixer.spec
    wanted = torch.unflatten(wanted, -1, (spec.heads, -1)).transpose(1, 2)
    value = v.repeat_interleave(spec.group, dim=1)
    factors = (1.0,) if mixer.q_norm is not None else _FACTORS  # whose gain all heads share

    def errors(rate: float) -> Tensor:
        """Of each factor and head: (factors, H)."""
        off = [mean(pairs(q * factor, k, torch.full_like(g, -rate)) @ value) - wanted for factor in factors]
        return torch.stack([each.square().sum(dim=(0, 2, 3)) for each in off])

    every = torch.stack([errors(rate) for rate in _RATES])  # (rates, factors, H)
    least = torch.unflatten(every.amin(dim=1), -1, (spec.kv_heads, -1)).sum(dim=-1)  # (rates, KV)
    rates = least.argmin(dim=0)
    gates: Any = mixer.gate_proj
    gates.bias.copy_(torch.tensor([_opened(_RATES[each]) for each in rates.tolist()]))
    chosen = every[rates.repeat_interleave(spec.group), :, torch.arange(spec.heads)].argmin(dim=1)  # (H,)
    scale = torch.tensor(factors)[chosen].repeat_interleave(spec.head_dim)
    mixer.q_proj.weight.mul_(scale[:, None])
    if mixer.q_proj.bias is not None:
        mixer.q_proj.bias.mul_(scale)
