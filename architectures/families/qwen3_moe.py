"""Qwen3-MoE (2505.09388): qwen3 with mixtures of small experts, without a shared one.

Source: transformers models/qwen3_moe/{configuration,modeling}_qwen3_moe.py.
"""

from ..decoder import DecoderFamily, Mixtures
from ..fields import ATTENTION_BIAS, ROUNDED_ROUTER, WINDOW, Field, with_defaults
from ..places import by_step
from ..usual import ROUTED, mixed_leaves
from . import qwen2

DECODER = DecoderFamily(
    {
        **with_defaults(qwen2.FIELDS, hidden=2048, intermediate=6144, layers=24, kv_heads=4),
        "attention_bias": ATTENTION_BIAS,
        "use_sliding_window": Field("own.windows", False, of=lambda spec: spec.blocks[0].attention.window is not None),
        "sliding_window": WINDOW,
        "moe_intermediate_size": Field("expert_size", 768),
        "num_experts": Field("mixture.experts", 128),
        "num_experts_per_tok": Field("mixture.top_k", 8),
        "norm_topk_prob": Field("mixture.normalise", False),
    },
    head_norms="same",
    fixed={
        **ROUNDED_ROUTER,
        "attention.window": lambda values: values["attention.window"] if values["own.windows"] else None,
    },
    mixtures=Mixtures(by_step()),
)

_QWEN3_MOE = DECODER.architecture(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    mixed_leaves(ROUTED),
    released="2025-04",
    config_aliases={"num_experts": ("num_local_experts",)},
    irrelevant={"max_window_layers": "not read by transformers: all layers have the window, or none"},
)
