"""FlexOlmo (2507.07024): OLMo 2 with a mixture in every layer, whose experts are trained separately.

Source: transformers models/flex_olmo/{configuration,modeling}_flex_olmo.py.
"""

from ..decoder import DecoderFamily, Mixtures
from ..fields import ATTENTION_BIAS, OUTPUT_NORMS, ROUNDED_ROUTER, Field, llama_fields
from ..rope import RotaryKind
from ..usual import OUTPUT_NORM_LEAVES, ROUTED, mixed_leaves

_DECODER = DecoderFamily(
    {
        **llama_fields(vocab=100352, context=4096),
        "attention_bias": ATTENTION_BIAS,
        "num_experts": Field("mixture.experts", 7),
        "num_experts_per_tok": Field("mixture.top_k", 5),
        "norm_topk_prob": Field("mixture.normalise", False),
    },
    norms=OUTPUT_NORMS,
    head_norms="whole",
    fixed={"norm.cast": "after_weight", **ROUNDED_ROUTER},
    rotary=RotaryKind(500_000.0, rounding="result"),
    mixtures=Mixtures(),
)

_FLEX_OLMO = _DECODER.architecture(
    "flex_olmo",
    "FlexOlmoForCausalLM",
    mixed_leaves(ROUTED, OUTPUT_NORM_LEAVES),
    released="2025-07",
    token_ids={"eos_token_id": 100257, "pad_token_id": 100277},
    config_aliases={"num_experts": ("num_local_experts",)},
)
