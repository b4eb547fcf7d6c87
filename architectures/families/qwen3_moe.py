"""Qwen3-MoE (2505.09388): qwen3 with mixtures of small experts, without a shared one.

Source: transformers models/qwen3_moe/{configuration,modeling}_qwen3_moe.py.
"""

from ..config import ConfigReader
from ..decoder import Decoder, Mixtures
from ..fields import ATTENTION_BIAS, ROUNDED_ROUTER, Field, with_defaults
from ..lenses import by_step
from ..usual import ROUTED, mixed_leaves
from . import qwen2


def _window(config: ConfigReader, name: str, default: int) -> int | None:
    """That of all layers, where it is switched on."""
    width = config.optional_integer(name, default)
    return width if config.boolean("use_sliding_window", False) else None


DECODER = Decoder(
    {
        **with_defaults(
            qwen2.FIELDS, hidden_size=2048, intermediate_size=6144, num_hidden_layers=24, num_key_value_heads=4
        ),
        "attention_bias": ATTENTION_BIAS,
        "sliding_window": Field("attention.window", 4096, _window),
        "moe_intermediate_size": Field("expert_size", 768),
        "num_experts": Field("mixture.experts", 128),
        "num_experts_per_tok": Field("mixture.top_k", 8),
        "norm_topk_prob": Field("mixture.normalise", False),
    },
    head_norms="same",
    fixed=ROUNDED_ROUTER,
    mixtures=Mixtures(by_step()),
    written=lambda spec: {"use_sliding_window": spec.blocks[0].attention.window is not None},
)

_QWEN3_MOE = DECODER.architecture(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    mixed_leaves(ROUTED),
    released="2025-04",
    config_aliases={"num_experts": ("num_local_experts",)},
    irrelevant={"max_window_layers": "not read by transformers: all layers have the window, or none"},
)
