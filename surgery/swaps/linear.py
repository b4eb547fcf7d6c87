"""Replace softmax attention by linear attention, so that the state for earlier tokens has a fixed size.

Queries, keys, values and the output projection stay (as in 2408.15237 and 2410.10254). Instead of exp, the attention
weights use the first terms of its series (2402.18668). The forgetting rates of heads, and the projections after
attention, are fitted on a text. With --approximate, all heads have the same rate. With or without a fit, the model has
to be trained: `gptkit heal`.
"""

from typing import Any

from msgspec.structs import replace

from ...components import Attention, Block, LinearAttention, ModelSpec, recast
from ...errors import ConfigError, SwapRefused
from ..base import Filled, Moved, Swapped, Tensor
from ..fits.scratch import Scratch
from ..layerwise import with_blocks
from ..registry import Asked, Swap

_FITTED = ("q_proj", "gate_proj", "o_proj.weight")
"""The parameters of a layer that are fitted on a text."""


def _recurrent(spec: ModelSpec, layer: int) -> Block:
    """Return a layer's block with linear attention instead of softmax attention.

    Raises SwapRefused if the layer has no softmax attention, or if linear attention does not support its details.
    """
    block = spec.blocks[layer]
    attention = block.mixer("attention")
    if not isinstance(attention, Attention):
        raise SwapRefused(f"layer {layer} has no softmax attention to replace: it has {block.slots}")
    try:
        mixer = recast(attention, LinearAttention)
        sublayers = (
            replace(sublayer, mixer=mixer) if sublayer.mixer is attention else sublayer for sublayer in block.sublayers
        )
        return replace(block, sublayers=tuple(sublayers))
    except ConfigError as error:
        raise SwapRefused(f"layer {layer}: {error.message}") from error


def _to_linear(spec: ModelSpec, asked: Asked) -> Swapped:
    """Replace attention by linear attention.

    Old tensors get new names, new tensors (the gates) start as in training, and some tensors are fitted on a text.
    """
    changed = {layer: _recurrent(spec, layer) for layer in asked.chosen(spec)}
    new, before = with_blocks(spec, changed), {parameter.name for parameter in spec.parameters()}
    tensors: dict[str, Tensor] = {}
    fitted = [f"blocks.{layer}.feed_forward.down_proj.weight" for layer in changed]
    fitted = [name for name in fitted if name in before]
    for parameter in new.parameters():
        name, old = parameter.name, parameter.name.replace(".recurrence", ".attention", 1)
        if name in before:
            continue
        like, start = f"blocks.{parameter.layer}.attention.q_proj.weight", parameter.initial
        if old in before:
            tensors[name] = Moved(old)
        else:  # the gates start as in training
            assert isinstance(start, float)
            tensors[name] = Filled(parameter.shape, start, like)
        fitted += [name] * any(f".recurrence.{ending}" in name for ending in _FITTED)
    summary: dict[str, Any] = {"layers": sorted(changed), "by": "weights alone" if asked.approximate else "regression"}
    if not asked.approximate:
        fit = Scratch.by("linear_fit.fitted_layers", changed, asked.text("fitting linear attention"))
        tensors |= fit.waiting(fitted)
    return Swapped(new, "retrained", tensors, summary)


def _possible(spec: ModelSpec) -> tuple[str, ...]:
    """Return the value that `gptkit swaps` tries on a model, if its first layer can have linear attention."""
    try:
        _recurrent(spec, 0)
    except SwapRefused:
        return ()
    return ("linear",)


ORDER = 92
SWAPS = (
    Swap(
        option="attention",
        form="linear",
        takes="softmax attention",
        gives="linear attention, with a state of constant size instead of a KV cache",
        guarantee="retrained",
        needs="Needs attention without a window and without position biases such as ALiBi, and a calibration text",
        source="Arora et al. 2402.18668, Zhang et al. 2410.10254; the fit is derived for gptkit",
        reshape=_to_linear,
        examples=_possible,
        by_layer=True,
        calibrated=True,
    ),
)
