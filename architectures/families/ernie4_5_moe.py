"""ERNIE 4.5 (Baidu 2025) with mixtures of experts: a softmax router in fp32 with a bias that affects only the choice of
experts, and shared experts.

One config field adds biases to all linear layers, including the head, but not to experts and routers. transformers also
ignores layers that draft tokens.

Source: transformers models/ernie4_5_moe/{configuration,modeling}_ernie4_5_moe.py.
"""

from ..base import Stacked, by_name
from ..decoder import DecoderFamily, Mixtures
from ..fields import Field, none_or_more, with_defaults
from ..layout import Layout
from ..places import after, all_of, nth, up_to
from ..usual import ROUTED, STACKED, T, mixed_leaves, shared_expert
from . import ernie4_5

_SPARSE = all_of(after("moe_layer_start_index", 1), up_to("moe_layer_end_index"), nth("moe_layer_interval", 1))
_BIAS = ernie4_5.DECODER.fields["use_bias"]

_DECODER = DecoderFamily(
    {
        **with_defaults(
            ernie4_5.DECODER.fields, hidden=2560, intermediate=12288, layers=28, heads=20, kv_heads=4, head_dim=None
        ),
        "use_bias": _BIAS._replace(role=f"{_BIAS.role} head.bias"),
        "moe_intermediate_size": Field("expert_size", 1536),
        "moe_num_shared_experts": Field("shared_experts", 2, none_or_more),
        "moe_num_experts": Field("mixture.experts", 64),
        "moe_k": Field("mixture.top_k", 6),
    },
    fixed={
        "mixture.choice_bias": True,
        "mixture.routed_in": "float32",
        "mixture.rounded": True,
        "mixture.wide_router": True,
        "mixture.wide_choice": True,
    },
    rotary=ernie4_5.DECODER.rotary,
    mixtures=Mixtures(_SPARSE, expert={"fused": True, "up_bias": False, "down_bias": False}),
)

_CORRECTION = T + "mlp.moe_statics.e_score_correction_bias"
_HELD = (*STACKED, Stacked(T + "mlp.gate.moe_statics.e_score_correction_bias", (_CORRECTION,)))

_ERNIE4_5_MOE = _DECODER.architecture(
    "ernie4_5_moe",
    "Ernie4_5_MoeForCausalLM",
    by_name(
        mixed_leaves(
            {**ROUTED, **shared_expert("shared_experts")},
            choice=_CORRECTION,
            layout=Layout("one experts", "(one experts)"),
            buffer=False,
        ),
        _HELD,
    ),
    released="2025-06",
    token_ids={"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    config_aliases={"moe_num_experts": ("num_experts",), "moe_k": ("num_experts_per_tok",)},
    stacked=_HELD,
    carried={"mtp": ("model.mtp_",)},
    refused={"moe_norm_min": ((1e-12, None), "gptkit supports only 1e-12 as the least divisor of the expert weights")},
)
