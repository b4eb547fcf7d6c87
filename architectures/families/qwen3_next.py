"""Qwen3-Next (Qwen 2025): qwen3-moe with gated DeltaNet instead of attention in three of four layers. The other layers
have gated attention with RoPE on a part of each head. Norms multiply by 1 + weight, and mixtures have a shared expert
with a gate.

Conversions keep the tensors of `mtp.`, which draft tokens.

Source: transformers models/qwen3_next/{configuration,modeling}_qwen3_next.py.
"""

from ..decoder import DecoderFamily, Mixtures
from ..fields import ROUNDED_ROUTER, Field, with_defaults
from ..places import by_step
from ..recurrences import DELTA_LEAVES, GATED, GATED_BIAS, GATED_MIXTURE, JOINED_PROJECTIONS, PARTLY, delta_nets
from ..usual import mixed_leaves
from . import qwen2

_DECODER = DecoderFamily(
    {
        **with_defaults(qwen2.FIELDS, hidden=2048, intermediate=5632, layers=48, heads=16, kv_heads=2, head_dim=256),
        "attention_bias": GATED_BIAS,
        "moe_intermediate_size": Field("expert_size", 512),
        "shared_expert_intermediate_size": Field("shared_size", 512),
        "num_experts": Field("mixture.experts", 512),
        "num_experts_per_tok": Field("mixture.top_k", 10),
        "norm_topk_prob": Field("mixture.normalise", True),
    },
    head_norms="same",
    fixed={**GATED, **ROUNDED_ROUTER, "mixture.shared_gate": True},
    rotary=PARTLY,
    recurrent=delta_nets("by head"),
    mixtures=Mixtures(by_step()),
)

_QWEN3_NEXT = _DECODER.architecture(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    mixed_leaves(GATED_MIXTURE, (*DELTA_LEAVES, *JOINED_PROJECTIONS)),
    released="2025-09",
    carried={"mtp": ("mtp.",)},
)
