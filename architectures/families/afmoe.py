"""AFMoE (Arcee 2025, Trinity): llama with gated attention, norms on query and key heads, and four norms per layer. Only
layers with a sliding window have RoPE. The first layers are dense. The others are mixtures of experts with a sigmoid
router, a router bias that affects only the choice of experts, and shared experts.

Source: transformers models/afmoe/{configuration,modeling}_afmoe.py.
"""

from ..base import leaves_of
from ..config import ConfigReader
from ..decoder import DecoderFamily, Mixtures
from ..fields import AROUND, ATTENTION_BIAS, Field, llama_fields
from ..lenses import rope_in_windows, sliding
from ..places import after
from ..usual import ATTENTION, EMBEDDING, ENDS, FEED_FORWARD, ROUTED, B, T, mixed_leaves, shared_expert

_DECODER = DecoderFamily(
    {
        **llama_fields(vocab=200192, hidden=2048, intermediate=6144, heads=16, head_dim=128, context=16384, eps=1e-5),
        "attention_bias": ATTENTION_BIAS,
        "mup_enabled": Field("embedding.multiplier", False, ConfigReader.boolean, lambda factor: factor != 1),
        "moe_intermediate_size": Field("expert_size", 1408),
        "num_shared_experts": Field("shared_experts", 2),
        "num_experts": Field("mixture.experts", 64),
        "num_experts_per_tok": Field("mixture.top_k", 6),
        "route_scale": Field("mixture.multiplier", 1.0),
    },
    norms=AROUND,
    head_norms="same",
    fixed={
        "norm.cast": "after_weight",
        "attention.gated": True,
        "embedding.multiplier": lambda values: values["hidden"] ** 0.5 if values["embedding.multiplier"] else 1.0,
        "mixture.scores": "sigmoid",
        "mixture.choice_bias": True,
    },
    layers=rope_in_windows(sliding(4, 1024, pattern="global_attn_every_n_layers")),
    mixtures=Mixtures(after("num_dense_layers", 1)),
)

_MODULES = {
    **{name: ours for name, ours in ROUTED.items() if "experts" in name},
    T + "mlp.router.gate": B + "feed_forward.router",
    **shared_expert("shared_experts"),
}
_PLACES = {
    T + "self_attn.gate_proj": B + "attention.gate_proj",
    T + "input_layernorm": B + "attention_norm",
    T + "post_attention_layernorm": B + "attention_output_norm",
    T + "pre_mlp_layernorm": B + "feed_forward_norm",
    T + "post_mlp_layernorm": B + "feed_forward_output_norm",
}

_AFMOE = _DECODER.architecture(
    "afmoe",
    "AfmoeForCausalLM",
    mixed_leaves(
        _MODULES,
        leaves_of({**EMBEDDING, **ATTENTION, **FEED_FORWARD, **_PLACES, **ENDS}),
        choice=T + "mlp.expert_bias",
        buffer=False,
    ),
    released="2025-12",
    config_aliases={"num_experts": ("num_local_experts",)},
)
