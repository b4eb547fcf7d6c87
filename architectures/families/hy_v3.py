"""Hunyuan 3 (Tencent 2025): qwen3's attention, and mixtures with a sigmoid router, a router bias that affects only the
choice of experts, a factor for the experts' weights, and shared experts. The first layer is dense.

transformers adds the outputs of routed and shared experts in fp32 and rounds the sum once. This gives the same bits as
an addition in the model's dtype, so the tree needs no field for it.

Source: transformers models/hy_v3/{configuration,modeling}_hy_v3.py.
"""

from ..base import DRAFT_LAYER, Stacked
from ..decoder import DecoderFamily, Mixtures
from ..fields import ATTENTION_BIAS, MLP_BIAS, SIGMOID_ROUTER, Field, llama_fields
from ..places import by_type
from ..rope import RotaryKind
from ..usual import STACKED, B, T, mixed_leaves, shared_expert

_MODULES = {
    T + "mlp.router.gate": B + "feed_forward.router",
    **{
        f"{T}mlp.experts.{{expert}}.{name}": f"{B}feed_forward.experts.{{expert}}.{name}"
        for name in ("down_proj", "gate_proj", "up_proj")
    },
    **shared_expert("shared_mlp"),
}
_DECODER = DecoderFamily(
    {
        **llama_fields(
            vocab=120832, intermediate=13312, layers=80, heads=64, kv_heads=8, head_dim=128, context=131072, eps=1e-5
        ),
        "attention_bias": ATTENTION_BIAS,
        "mlp_bias": MLP_BIAS,
        "moe_intermediate_size": Field("expert_size", 1536),
        "num_shared_experts": Field("shared_experts", 1),
        "num_experts": Field("mixture.experts", 192),
        "num_experts_per_tok": Field("mixture.top_k", 8),
        "router_scaling_factor": Field("mixture.multiplier", 2.826),
    },
    head_norms="same",
    fixed=SIGMOID_ROUTER,
    rotary=RotaryKind(11_158_840.0),
    mixtures=Mixtures(by_type(1), expert={"fused": True, "up_bias": False, "down_bias": False}),
)

_RENAMED = (
    Stacked(T + "mlp.gate.weight", (T + "mlp.router.gate.weight",)),
    Stacked(T + "mlp.e_score_correction_bias", (T + "mlp.expert_bias",)),
    *(
        Stacked(f"{T}mlp.shared_experts.{name}", (f"{T}mlp.shared_mlp.{name}",))
        for name in (f"{part}_proj.{kind}" for part in ("down", "gate", "up") for kind in ("weight", "bias"))
    ),
)
"""The parameters that have other names in transformers' modules than in files."""

_HY_V3 = _DECODER.architecture(
    "hy_v3",
    "HYV3ForCausalLM",
    mixed_leaves(_MODULES, choice=T + "mlp.expert_bias"),
    released="2026-03",
    config_aliases={"num_experts": ("num_local_experts",)},
    stacked=(*STACKED, *_RENAMED),
    carried=DRAFT_LAYER,
    irrelevant={"enable_moe_fp32_combine": "a sum of two numbers rounds the same either way"},
)
