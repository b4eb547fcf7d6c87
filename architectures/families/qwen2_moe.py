"""Qwen1.5-MoE and Qwen2-MoE (2407.10671): qwen2 with mixtures of small experts and a shared expert with its own gate.
Any layer may be dense.

Source: transformers models/qwen2_moe/{configuration,modeling}_qwen2_moe.py, and conversion_mapping.py, by which most
families of experts name their tensors since: one an expert in files, one of all experts in modules. Of the windows that
the config class gives every other layer below `max_window_layers`, no released checkpoint has one.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ...components import ModelSpec
from ..base import Leaf, Stacked, by_name, leaves_of
from ..config import ConfigReader
from ..decoder import Decoder, Field, Mixtures, with_defaults
from ..layout import IDENTITY, Layout
from . import qwen2
from .llama import LEAVES, LLAMA_DROPPED, B, T

FIELDS = with_defaults(
    qwen2.FIELDS, hidden_size=2048, intermediate_size=5632, num_hidden_layers=24, num_attention_heads=16
)
NAMES = ("down_proj", "gate_proj", "up_proj")
ROUTED: dict[str, str] = {
    T + "mlp.gate": B + "feed_forward.router",
    **{f"{T}mlp.experts.{{expert}}.{name}": f"{B}feed_forward.experts.{{expert}}.{name}" for name in NAMES},
}
"""The modules of a mixture, by the names that most families have."""
STACKED = (
    Stacked(T + "mlp.experts.gate_up_proj", tuple(f"{T}mlp.experts.{{expert}}.{name}.weight" for name in NAMES[1:])),
    Stacked(T + "mlp.experts.down_proj", (T + "mlp.experts.{expert}.down_proj.weight",)),
)
OF_ROUTERS = {"output_router_logits": "output format", "router_aux_loss_coef": "training only"}
"""Config fields about routers that change nothing that is computed."""


def shared(name: str) -> dict[str, str]:
    """The modules of a shared expert of that name."""
    return {f"{T}mlp.{name}.{each}": f"{B}feed_forward.shared.{each}" for each in NAMES}


def mixed_leaves(
    modules: Mapping[str, str],
    leaves: Sequence[Leaf] = LEAVES,
    stacked: Sequence[Stacked] = (),
    *,
    choice: str = "",
    layout: Layout = IDENTITY,
    buffer: bool = True,
) -> tuple[Leaf, ...]:
    """The leaves of a family that has those of dense layers, and such modules in the others; `choice` is the name of
    what the choice of experts is biased with, `layout` how it lies, and `buffer` whether transformers' module has it as
    a buffer. Where transformers' modules have other names than the files, `stacked` has them, since they decide the
    order.
    """
    biased = (Leaf(choice, B + "feed_forward.choice.bias", layout, buffer=buffer),) if choice else ()
    return by_name((*leaves, *leaves_of(modules), *biased), stacked)


def sparse(config: ConfigReader, layers: int, usual: Sequence[int] = ()) -> Sequence[bool]:
    """All layers but those of `mlp_only_layers`, or the `usual` ones, whose number, from 1, `decoder_sparse_step`
    divides.
    """
    step, dense = config.integer("decoder_sparse_step", 1), config.raw("mlp_only_layers")
    dense = [*usual] if dense is None else dense
    if not isinstance(dense, list) or any(type(each) is not int for each in dense):
        raise config.fail("mlp_only_layers", dense, "a list of layers")
    return [(layer + 1) % step == 0 and layer not in dense for layer in range(layers)]


def written(sparse: Sequence[bool]) -> Mapping[str, Any]:
    """The config fields that `sparse` reads."""
    return {"decoder_sparse_step": 1, "mlp_only_layers": [layer for layer, each in enumerate(sparse) if not each]}


def _windows(config: ConfigReader, layers: int, _head_dim: int) -> Sequence[Mapping[str, Any]]:
    """Each layer's: from `layer_types`, or of every other layer below `max_window_layers`, where switched on."""
    on, below = config.boolean("use_sliding_window", False), config.raw("max_window_layers", 28)
    off = not on and config.raw("sliding_window") == 0  # as transformers writes it
    stated = None if off else config.optional_integer("sliding_window", 4096)
    window = stated if on else None
    if type(below) is not int or below < 0:
        raise config.fail("max_window_layers", below, "an integer from 0")
    sliding = [window is not None and (layer + 1) % 2 == 1 and layer < below for layer in range(layers)]
    types = config.layer_types(["sliding_attention" if each else "full_attention" for each in sliding])
    if window is None and "sliding_attention" in types:
        raise config.fail("layer_types", list(types), "full_attention everywhere, since there is no window")
    return [{"window": window if kind == "sliding_attention" else None} for kind in types]


def _write_windows(spec: ModelSpec) -> dict[str, Any]:
    """The config fields that `windows` reads."""
    return {**qwen2.write_windows(spec), "max_window_layers": len(spec.blocks)}


ROUTER: dict[str, Any] = {"mixture.rounded": True}

_DECODER = Decoder(
    {
        **with_defaults(FIELDS, num_key_value_heads=16),
        "qkv_bias": Field("attention.qkv_bias", True),
        "moe_intermediate_size": Field("expert_size", 1408),
        "shared_expert_intermediate_size": Field("shared_size", 5632),
        "num_experts": Field("mixture.experts", 60),
        "num_experts_per_tok": Field("mixture.top_k", 4),
        "norm_topk_prob": Field("mixture.normalise", False),
    },
    fixed={**ROUTER, "mixture.shared_gate": True},
    layers=_windows,
    mixtures=Mixtures(sparse, written),
    written=_write_windows,
)

_QWEN2_MOE = _DECODER.architecture(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    mixed_leaves({**ROUTED, **shared("shared_expert"), T + "mlp.shared_expert_gate": B + "feed_forward.shared_gate"}),
    released="2024-03",
    dropped=LLAMA_DROPPED,
    stacked=STACKED,
    irrelevant=OF_ROUTERS,
)
