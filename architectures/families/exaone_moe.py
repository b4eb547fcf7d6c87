"""K-EXAONE (LG 2025): EXAONE 4's attention with pre-norm, and DeepSeek-V3's mixtures of experts. The first layers are
dense.

transformers also ignores layers that draft tokens.

Source: transformers models/exaone_moe/{configuration,modeling}_exaone_moe.py.
"""

from dataclasses import replace

from ..base import Stacked
from ..decoder import DecoderFamily, Mixtures
from ..fields import GROUPED_EXPERTS, SIGMOID_ROUTER, Field, llama_fields, with_defaults
from ..places import by_type
from ..usual import CORRECTION, ROUTED, STACKED, T, mixed_leaves, shared_expert
from .exaone4 import EXAONE_WINDOWS

_STORED = T + "mlp.e_score_correction_bias"
_LEAVES = tuple(  # with transformers' own name
    replace(leaf, checkpoint=_STORED) if leaf.checkpoint == CORRECTION else leaf
    for leaf in mixed_leaves({**ROUTED, **shared_expert("shared_experts")}, choice=CORRECTION)
)

_DECODER = DecoderFamily(
    {
        **llama_fields(vocab=102400, intermediate=16384, kv_heads=32, eps=1e-5),
        "moe_intermediate_size": Field("expert_size", 1024),
        "num_shared_experts": Field("shared_experts", 1),
        "num_experts": Field("mixture.experts", 64),
        **with_defaults(GROUPED_EXPERTS, routed_scaling_factor=2.5),
    },
    head_norms="same",
    fixed=SIGMOID_ROUTER,
    layers=EXAONE_WINDOWS,
    mixtures=Mixtures(by_type(1, "first_k_dense_replace")),
)

_EXAONE_MOE = _DECODER.architecture(
    "exaone_moe",
    "ExaoneMoeForCausalLM",
    _LEAVES,
    released="2025-12",
    token_ids={"bos_token_id": 1, "eos_token_id": 53, "pad_token_id": 0},
    stacked=(*STACKED, Stacked(CORRECTION, (_STORED,))),
    carried={"mtp": ("mtp.",)},
)
