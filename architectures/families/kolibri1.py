"""Kolibri 1 (Aleph Alpha 2026): EXAONE 4 with norms also before sub-layers, and with mixtures of experts in every
layer. They have a shared expert, and a router bias that affects only the choice of experts.

The router bias and the norms after sub-layers have other names in files than in transformers' modules.

Source: transformers models/kolibri1/{configuration,modeling}_kolibri1.py, and conversion_mapping.py.
"""

from ..base import Stacked, leaves_of
from ..decoder import DecoderFamily, Mixtures
from ..fields import AROUND, USUAL, Field, with_defaults
from ..lenses import rope_in_windows, sliding
from ..usual import ATTENTION, CORRECTION, EMBEDDING, ENDS, NORMS, ROUTED, STACKED, B, T, mixed_leaves, shared_expert

_DECODER = DecoderFamily(
    {
        **with_defaults(
            {name: field for name, field in USUAL.items() if name != "intermediate_size"},
            vocab=128000,
            hidden=2560,
            layers=50,
            heads=48,
            kv_heads=4,
            head_dim=128,
            context=262144,
        ),
        "moe_intermediate_size": Field("expert_size", 512),
        "shared_expert_intermediate_size": Field("shared_size", 512),
        "num_experts": Field("mixture.experts", 384),
        "num_experts_per_tok": Field("mixture.top_k", 6),
        "norm_topk_prob": Field("mixture.normalise", False),
    },
    norms=AROUND,
    head_norms="same",
    fixed={
        "mixture.scores": "sigmoid",
        "mixture.choice_bias": True,
        "mixture.biased": "logits",
        "mixture.routed_in": "float32",
        "mixture.wide_choice": True,
    },
    layers=rope_in_windows(sliding(5, 513, always=True)),
    mixtures=Mixtures(),
)
_BIAS = T + "moe.router.expert_bias"
_BEHIND = {T + "post_attn_norm": B + "attention_output_norm", T + "post_ffn_norm": B + "feed_forward_output_norm"}
_HELD = (
    *STACKED,
    Stacked(CORRECTION, (_BIAS,)),
    Stacked(T + "post_self_attn_layernorm.weight", (T + "post_attn_norm.weight",)),
    Stacked(T + "post_mlp_layernorm.weight", (T + "post_ffn_norm.weight",)),
)

_KOLIBRI1 = _DECODER.architecture(
    "kolibri1",
    "Kolibri1ForCausalLM",
    mixed_leaves(
        {**ROUTED, **shared_expert("shared_experts")},
        leaves_of({**EMBEDDING, **ATTENTION, **NORMS, **_BEHIND, **ENDS}),
        _HELD,
        choice=_BIAS,
    ),
    released="2026",
    config_aliases={"num_experts": ("num_local_experts",)},
    stacked=_HELD,
    irrelevant={"intermediate_size": "only for dense layers, and this model has none"},
)
