"""Mellum 2 (JetBrains 2026): qwen3-moe with a sliding window in some layers, and separate RoPE settings for layers with
and without a window.

transformers also ignores the tensors of `mtp.`, which draft tokens.

Source: transformers models/mellum/{configuration,modeling}_mellum.py.
"""

from ..decoder import DecoderFamily, Mixtures
from ..fields import ATTENTION_BIAS, ROUNDED_ROUTER, Field, llama_fields
from ..lenses import rope_by_kind, sliding
from ..places import by_type
from ..rope import RotaryKind
from ..usual import ROUTED, mixed_leaves

_FIELDS = {
    **llama_fields(vocab=98304, hidden=2304, intermediate=7168, layers=28, kv_heads=4, head_dim=128, context=131072),
    "attention_bias": ATTENTION_BIAS,
    "moe_intermediate_size": Field("expert_size", 896),
    "num_experts": Field("mixture.experts", 64),
    "num_experts_per_tok": Field("mixture.top_k", 8),
    "norm_topk_prob": Field("mixture.normalise", True),
}
_KINDS = {
    "full_attention": RotaryKind(theta="", scaled=False, usual={"rope_theta": 500_000.0}),
    "sliding_attention": RotaryKind(theta="", scaled=False),
}
_DECODER = DecoderFamily(
    _FIELDS,
    head_norms="same",
    fixed=ROUNDED_ROUTER,
    rotary=None,
    layers=rope_by_kind(sliding(1, 1024), _KINDS),
    mixtures=Mixtures(by_type(0)),
)

_MELLUM = _DECODER.architecture(
    "mellum",
    "MellumForCausalLM",
    mixed_leaves(ROUTED),
    released="2026",
    config_aliases={"num_experts": ("num_local_experts",)},
    carried={"mtp": ("mtp.",)},
    irrelevant={
        **dict.fromkeys(
            ("num_nextn_predict_layers", "num_mtp_layers", "mtp_layer_types", "mtp_mlp_layer_types"),
            "extra layers after the last one that draft tokens (multi-token prediction)",
        )
    },
)
