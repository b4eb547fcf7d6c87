"""GLM-4.5 (2508.06471): RoPE on a part of each head, optional norms on query and key heads, and DeepSeek-V3's mixtures:
a sigmoid router with a bias for the choice, groups of experts, a scale, shared experts, and dense first layers.

Source: transformers models/glm4_moe/{configuration,modeling}_glm4_moe.py. Layers behind the last, which draft tokens,
are left out there too.
"""

from typing import Any

from ..base import BEHIND
from ..decoder import USUAL, Decoder, Field, Fields, Mixtures, after, with_defaults
from ..rope import PART, RotaryKind
from .llama import LLAMA_DROPPED, T
from .qwen2_moe import OF_ROUTERS, ROUTED, STACKED, mixed_leaves, shared

GROUPED: Fields = {
    "n_group": Field("mixture.groups", 1),
    "topk_group": Field("mixture.top_groups", 1),
    "norm_topk_prob": Field("mixture.normalise", True),
    "routed_scaling_factor": Field("mixture.multiplier", 1.0),
    "num_experts_per_tok": Field("mixture.top_k", 8),
}
ROUTER: dict[str, Any] = {
    "mixture.scores": "sigmoid",
    "mixture.choice_bias": True,
    "mixture.routed_in": "float32",
    "mixture.in_order": False,
    "mixture.wide_choice": True,
}
"""How DeepSeek-V3 and its followers choose experts."""
CORRECTION = T + "mlp.gate.e_score_correction_bias"

_DECODER = Decoder(
    {
        **with_defaults(
            USUAL,
            vocab_size=151552,
            intermediate_size=10944,
            num_hidden_layers=46,
            num_attention_heads=96,
            num_key_value_heads=8,
            max_position_embeddings=131072,
            rms_norm_eps=1e-5,
        ),
        "attention_bias": Field("attention.qkv_bias", False),
        "use_qk_norm": Field("head_norms", False),
        "moe_intermediate_size": Field("expert_size", 1408),
        "n_shared_experts": Field("shared_experts", 1),
        "n_routed_experts": Field("mixture.experts", 128),
        **GROUPED,
    },
    head_norms="same",
    fixed=ROUTER,
    rotary=RotaryKind(part=PART, whole=0.5),
    mixtures=Mixtures(**after("first_k_dense_replace", 1)),
)
LEAVES = mixed_leaves({**ROUTED, **shared("shared_experts")}, choice=CORRECTION)

DRAFTS = dict.fromkeys(
    ("num_nextn_predict_layers", "num_mtp_layers"),
    "extra layers after the last one that draft tokens (multi-token prediction)",
)

_GLM4_MOE = _DECODER.architecture(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    LEAVES,
    released="2025-07",
    config_aliases={"n_routed_experts": ("num_local_experts",)},
    stated={"head_dim": 128},
    dropped=LLAMA_DROPPED,
    stacked=STACKED,
    carried=BEHIND,
    irrelevant={**OF_ROUTERS, **DRAFTS},
)
