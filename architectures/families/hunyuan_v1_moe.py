"""Hunyuan A13B (Tencent 2025): hunyuan_v1_dense with a mixture in every layer, a shared expert of the same width, and a
router in fp32.

A config may list numbers of experts by layer. gptkit supports only equal numbers.

Source: transformers models/hunyuan_v1_moe/{configuration,modeling}_hunyuan_v1_moe.py.
"""

from ..decoder import DecoderFamily, Mixtures
from ..fields import Field, same_in_all_layers
from ..usual import PROJECTIONS, B, T, mixed_leaves, shared_expert
from . import hunyuan_v1_dense as dense

_MODULES = {
    T + "mlp.gate.wg": B + "feed_forward.router",
    **{f"{T}mlp.experts.{{expert}}.{name}": f"{B}feed_forward.experts.{{expert}}.{name}" for name in PROJECTIONS},
    **shared_expert("shared_mlp"),
}
_DECODER = DecoderFamily(
    {
        **dense.FIELDS,
        "intermediate_size": Field("intermediate expert_size shared_size", 11008),
        "num_experts": Field("mixture.experts", 1, same_in_all_layers),
        "moe_topk": Field("mixture.top_k", 1, same_in_all_layers),
    },
    head_norms="same",
    fixed={**dense.FIXED, "mixture.routed_in": "float32", "mixture.wide_router": True},
    rotary=dense.ROTARY,
    mixtures=Mixtures(),
)

_HUNYUAN_V1_MOE = _DECODER.architecture(
    "hunyuan_v1_moe",
    "HunYuanMoEV1ForCausalLM",
    mixed_leaves(_MODULES, dense.LEAVES),
    released="2025-06",
    token_ids={"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    config_aliases={"num_experts": ("num_local_experts",), "moe_topk": ("num_experts_per_tok",)},
    irrelevant={"eod_token_id": "generation", "sep_token_id": "generation"},
)
