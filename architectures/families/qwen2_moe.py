"""Qwen1.5-MoE and Qwen2-MoE (2407.10671): qwen2 with mixtures of small experts and a shared expert with its own gate.
Any layer may be dense.

Files have one tensor per expert, and transformers' modules have one for all experts. Most later families with experts
have the same names. The config class gives every other layer below `max_window_layers` a window, but no released
checkpoint has windows.

Source: transformers models/qwen2_moe/{configuration,modeling}_qwen2_moe.py, and conversion_mapping.py.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ...components import ModelSpec
from ..config import ConfigReader
from ..decoder import DecoderFamily, Mixtures
from ..draws import Config, Random, Sizes
from ..fields import ROUNDED_ROUTER, Field, with_defaults
from ..lenses import Lens, by_step, draw_windows, write_windows_above
from ..usual import ROUTED, B, T, mixed_leaves, shared_expert
from . import qwen2

FIELDS = with_defaults(qwen2.FIELDS, hidden=2048, intermediate=5632, layers=24, heads=16)


def _windows(config: ConfigReader, values: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return the window of every layer, from `layer_types`.

    By default, every other layer below `max_window_layers` has one.
    """
    layers = values["layers"]
    on, below = config.boolean("use_sliding_window", False), config.raw("max_window_layers", 28)
    off = not on and config.raw("sliding_window") == 0  # transformers writes this
    stated = None if off else config.optional_integer("sliding_window", 4096)
    window = stated if on else None
    if type(below) is not int or below < 0:
        raise config.fail("max_window_layers", below, "an integer of at least 0")
    sliding = [window is not None and (layer + 1) % 2 == 1 and layer < below for layer in range(layers)]
    types = config.layer_types(["sliding_attention" if has_window else "full_attention" for has_window in sliding])
    if window is None and "sliding_attention" in types:
        raise config.fail("layer_types", list(types), "full_attention for every layer, since no sliding window is set")
    return [{"window": window if kind == "sliding_attention" else None} for kind in types]


def _write_windows(spec: ModelSpec) -> dict[str, Any]:
    """Return the config fields that `_windows` reads."""
    return {**write_windows_above(spec), "max_window_layers": len(spec.blocks)}


def _draw(chosen: Random, sizes: Sizes) -> Config:
    below = {"max_window_layers": chosen.randint(0, sizes["layers"])}
    return chosen.choice(({}, {"use_sliding_window": True, **draw_windows(chosen, sizes), **below}))


_DECODER = DecoderFamily(
    {
        **with_defaults(FIELDS, kv_heads=16),
        "qkv_bias": Field("attention.qkv_bias", True),
        "moe_intermediate_size": Field("expert_size", 1408),
        "shared_expert_intermediate_size": Field("shared_size", 5632),
        "num_experts": Field("mixture.experts", 60),
        "num_experts_per_tok": Field("mixture.top_k", 4),
        "norm_topk_prob": Field("mixture.normalise", False),
    },
    fixed={**ROUNDED_ROUTER, "mixture.shared_gate": True},
    layers=Lens(_windows, _write_windows, _draw),
    mixtures=Mixtures(by_step()),
)

_QWEN2_MOE = _DECODER.architecture(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    mixed_leaves(
        {**ROUTED, **shared_expert("shared_expert"), T + "mlp.shared_expert_gate": B + "feed_forward.shared_gate"}
    ),
    released="2024-03",
)
