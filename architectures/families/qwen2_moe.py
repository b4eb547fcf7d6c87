"""Qwen1.5-MoE and Qwen2-MoE (2407.10671): qwen2 with mixtures of small experts and a shared expert with its own gate.
Any layer may be dense.

Files have one tensor per expert, and transformers' modules have one for all experts. Most later families with experts
have the same names. The config class gives every other layer below `max_window_layers` a window, but no released
checkpoint has windows.

Source: transformers models/qwen2_moe/{configuration,modeling}_qwen2_moe.py, and conversion_mapping.py.
"""

from ..decoder import DecoderFamily, Mixtures
from ..fields import ROUNDED_ROUTER, Field, with_defaults
from ..lenses import switched
from ..places import alternate_below, by_step
from ..usual import ROUTED, B, T, mixed_leaves, shared_expert
from . import qwen2

FIELDS = with_defaults(qwen2.FIELDS, hidden=2048, intermediate=5632, layers=24, heads=16)

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
    layers=switched(alternate_below("max_window_layers", 28), zero=True),
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
