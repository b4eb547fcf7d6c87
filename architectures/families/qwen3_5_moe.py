"""Qwen3.5 with mixtures (Qwen 2026), its text model: Qwen3.5 with Qwen3-Next's mixtures in every layer.

Source: transformers models/qwen3_5_moe/{configuration,modeling}_qwen3_5_moe.py.
"""

from ..decoder import DecoderFamily, Mixtures
from ..fields import ROUNDED_ROUTER, Field, with_defaults
from ..recurrences import DELTA_LEAVES, GATED, GATED_MIXTURE, PARTLY, SPLIT_PROJECTIONS, delta_nets
from ..usual import mixed_leaves
from . import qwen3_5
from .qwen3_5 import COMPOSITE, UNREAD

_FIELDS = {name: field for name, field in qwen3_5.FIELDS.items() if name != "intermediate_size"}

_DECODER = DecoderFamily(
    {
        **with_defaults(_FIELDS, hidden=2048, layers=40, kv_heads=2),
        "moe_intermediate_size": Field("expert_size", 512),
        "shared_expert_intermediate_size": Field("shared_size", 512),
        "num_experts": Field("mixture.experts", 256),
        "num_experts_per_tok": Field("mixture.top_k", 8),
    },
    head_norms="same",
    fixed={**GATED, **ROUNDED_ROUTER, "mixture.shared_gate": True, "mixture.normalise": True},
    rotary=PARTLY,
    recurrent=delta_nets("by part"),
    mixtures=Mixtures(),
)

_QWEN3_5_MOE = _DECODER.architecture(
    "qwen3_5_moe_text",
    "Qwen3_5MoeForCausalLM",
    mixed_leaves(GATED_MIXTURE, (*DELTA_LEAVES, *SPLIT_PROJECTIONS)),
    released="2026-02",
    model_types=("qwen3_5_moe_text", "qwen3_5_moe"),
    hf_config="Qwen3_5MoeTextConfig",
    irrelevant={**UNREAD},
    **COMPOSITE,
)
