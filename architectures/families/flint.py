"""Flint (Recursive 2026): qwen3-moe with attention sinks, a sigmoid router, a shared expert and windows in most layers.

Source: transformers models/flint/{configuration,modeling}_flint.py. Only layers with a window have RoPE. Routers, sinks
and scores stay in fp32 whatever the dtype of the model.
"""

from ..base import Leaf, Stacked, only_eager
from ..decoder import DecoderFamily, Mixtures
from ..fields import ATTENTION_BIAS, Field, with_defaults
from ..lenses import rope_in_windows, sliding
from ..places import by_step
from ..usual import LEAVES, ROUTED, STACKED, B, T, mixed_leaves, shared_expert
from . import qwen2

_SINKS = T + "self_attn.softmax_offset"  # the name in files
_FIELDS = {
    **with_defaults(
        qwen2.FIELDS, vocab=150144, hidden=2048, intermediate=6144, layers=49, kv_heads=4, head_dim=128, context=262144
    ),
    "attention_bias": ATTENTION_BIAS,
    "moe_intermediate_size": Field("expert_size", 512),
    "num_experts": Field("mixture.experts", 256),
    "num_experts_per_tok": Field("mixture.top_k", 6),
    "norm_topk_prob": Field("mixture.normalise", True),
    "shared_expert_intermediate_size": Field("shared_size", 1024),
}
_DECODER = DecoderFamily(
    _FIELDS,
    head_norms="same",
    fixed={
        "norm.cast": "after_weight",
        "attention.sinks": True,
        "attention.sunk": "in float32",
        "attention.scores": "float32, then scaled",
        "mixture.scores": "sigmoid",
        "mixture.routed_in": "float32",
        "mixture.wide_router": True,
    },
    layers=rope_in_windows(sliding(4, 513, first=1, whole=(0, 1, -1))),
    mixtures=Mixtures(by_step(usual=(0, 1))),
)

FLINT = _DECODER.architecture(
    "flint",
    "FlintForCausalLM",
    mixed_leaves({**ROUTED, **shared_expert("shared_expert")}, (*LEAVES, Leaf(_SINKS, B + "attention.sinks"))),
    released="2026",
    config_aliases={"num_experts": ("num_local_experts",)},
    stacked=(*STACKED, Stacked(T + "self_attn.sinks", (_SINKS,))),
    **only_eager("no fused attention kernel supports sinks, and transformers has no sdpa path for flint"),
)
