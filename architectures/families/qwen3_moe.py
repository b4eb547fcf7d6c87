"""Qwen3-MoE (2505.09388): qwen3 with mixtures of small experts, without a shared one.

Source: transformers models/qwen3_moe/{configuration,modeling}_qwen3_moe.py.
"""

from ..config import ConfigReader
from ..decoder import Decoder, Field, Mixtures, with_defaults
from . import qwen2_moe
from .llama import BIAS, LLAMA_DROPPED
from .qwen2_moe import OF_ROUTERS, ROUTED, ROUTER, STACKED, mixed_leaves, sparse, written


def _window(config: ConfigReader, name: str, default: int) -> int | None:
    """That of all layers, where it is switched on."""
    width = config.optional_integer(name, default)
    return width if config.boolean("use_sliding_window", False) else None


DECODER = Decoder(
    {
        **with_defaults(qwen2_moe.FIELDS, intermediate_size=6144, num_attention_heads=32, num_key_value_heads=4),
        "attention_bias": BIAS,
        "sliding_window": Field("attention.window", 4096, _window),
        "moe_intermediate_size": Field("expert_size", 768),
        "num_experts": Field("mixture.experts", 128),
        "num_experts_per_tok": Field("mixture.top_k", 8),
        "norm_topk_prob": Field("mixture.normalise", False),
    },
    head_norms="same",
    fixed=ROUTER,
    mixtures=Mixtures(sparse, written),
    written=lambda spec: {"use_sliding_window": spec.blocks[0].attention.window is not None},
)

_QWEN3_MOE = DECODER.architecture(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    mixed_leaves(ROUTED),
    released="2025-04",
    config_aliases={"num_experts": ("num_local_experts",)},
    dropped=LLAMA_DROPPED,
    stacked=STACKED,
    irrelevant={**OF_ROUTERS, "max_window_layers": "not read by transformers: all layers have the window, or none"},
)
