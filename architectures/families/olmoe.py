"""OLMoE (2409.02060): OLMo with one norm over all query heads, one over all key heads, and a mixture of experts in
every layer.

Queries, keys and values are clipped after these norms. The norm of the queries is as wide as the hidden states, so all
heads together must be as wide as the hidden states, too.

Source: transformers models/olmoe/{configuration,modeling}_olmoe.py.
"""

from ..config import ConfigReader
from ..decoder import DecoderFamily, Mixtures
from ..fields import ATTENTION_BIAS, ROUNDED_ROUTER, Field, llama_fields
from ..usual import ROUTED, mixed_leaves

_DECODER = DecoderFamily(
    {
        **llama_fields(vocab=50304, hidden=2048, intermediate=2048, layers=16, heads=16, context=4096, eps=1e-5),
        "attention_bias": ATTENTION_BIAS,
        "clip_qkv": Field("attention.clip", None, ConfigReader.optional_number),
        "num_experts": Field("mixture.experts", 64),
        "num_experts_per_tok": Field("mixture.top_k", 8),
        "norm_topk_prob": Field("mixture.normalise", False),
    },
    head_norms="whole",
    fixed={**ROUNDED_ROUTER, "attention.clip_normed": lambda values: values["attention.clip"] is not None},
    mixtures=Mixtures(),
    square=True,
)

_OLMOE = _DECODER.architecture(
    "olmoe",
    "OlmoeForCausalLM",
    mixed_leaves(ROUTED),
    released="2024-09",
    token_ids={"eos_token_id": 50279, "pad_token_id": 1},
    config_aliases={"num_experts": ("num_local_experts",)},
)
