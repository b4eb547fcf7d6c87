"""Granite 3 MoE (IBM 2024): granite with a mixture of experts in every layer.

One tensor contains the gate and up projections of all experts, and another the down projections.

Source: transformers models/granitemoe/{configuration,modeling}_granitemoe.py.
"""

from typing import Any

from ..base import Leaf, Stacked, by_name, leaves_of
from ..decoder import DecoderFamily, Mixtures
from ..fields import ATTENTION_BIAS, LOGITS_DIVISOR, USUAL, Field
from ..layout import Layout
from ..usual import ATTENTION, EMBEDDING, ENDS, NORMS, B, T

FIELDS = {
    **USUAL,
    "attention_bias": ATTENTION_BIAS,
    "embedding_multiplier": Field("embedding.multiplier", 1.0),
    "attention_multiplier": Field("attention.scale", 1.0),
    "residual_multiplier": Field("branch.multiplier", 1.0),
    "logits_scaling": LOGITS_DIVISOR,
    "num_local_experts": Field("mixture.experts", 8),
    "num_experts_per_tok": Field("mixture.top_k", 2),
}
FIXED: dict[str, Any] = {"head.scaling": "divide", "mixture.chosen_by": "logits", "mixture.rounded": True}

_DECODER = DecoderFamily(FIELDS, fixed=FIXED, mixtures=Mixtures())

_MOE, _EXPERT = T + "block_sparse_moe.", B + "feed_forward.experts.{expert}."
_INPUT, _OUTPUT, _ROUTER = _MOE + "input_linear.weight", _MOE + "output_linear.weight", _MOE + "router.layer.weight"
_MIXTURE = (
    Leaf(_OUTPUT, _EXPERT + "down_proj.weight", Layout("experts hidden intermediate", stack="experts")),
    Leaf(
        _INPUT,
        (_EXPERT + "gate_proj.weight", _EXPERT + "up_proj.weight"),
        Layout("experts (part intermediate) hidden", split="part", parts=("1", "1"), stack="experts"),
    ),
    Leaf(_ROUTER, B + "feed_forward.router.weight"),
)
STACKED = (
    Stacked(_MOE + "experts.gate_up_proj", (_INPUT,)),
    Stacked(_MOE + "experts.down_proj", (_OUTPUT,)),
    Stacked(_MOE + "router.weight", (_ROUTER,)),
)
LEAVES = by_name((*leaves_of({**EMBEDDING, **ATTENTION}), *_MIXTURE, *leaves_of({**NORMS, **ENDS})), STACKED)

SHARED_MLP = {
    place: (
        Leaf(
            T + "shared_mlp.input_linear.weight",
            tuple(f"{B}{place}.{name}.weight" for name in ("gate_proj", "up_proj")),
            Layout(f"(part {units}) hidden", split="part", parts=("1", "1")),
        ),
        Leaf(T + "shared_mlp.output_linear.weight", f"{B}{place}.down_proj.weight"),
    )
    for place, units in (("feed_forward.shared", "shared"), ("feed_forward", "intermediate"))
}
"""The leaves of the module shared_mlp: a shared expert, or the only feed-forward of a layer without other experts."""

GRANITEMOE = _DECODER.architecture(
    "granitemoe",
    "GraniteMoeForCausalLM",
    LEAVES,
    stacked=STACKED,
    released="2024-10",
    token_ids={"bos_token_id": 1, "eos_token_id": 2},
)
