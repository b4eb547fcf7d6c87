"""Seed-OSS (ByteDance 2025): llama with biases on q, k and v, and a separate config field for the output projection's
bias.

Source: transformers models/seed_oss/{configuration,modeling}_seed_oss.py.
"""

from ..decoder import DecoderFamily
from ..fields import MLP_BIAS, Field, llama_fields
from ..usual import LEAVES

_DECODER = DecoderFamily(
    {
        **llama_fields(vocab=155136, intermediate=27648, layers=64, heads=80, kv_heads=8, head_dim=128, context=524288),
        "attention_bias": Field("attention.qkv_bias", True),
        "attention_out_bias": Field("attention.output_bias", False),
        "mlp_bias": MLP_BIAS,
    }
)

_SEED_OSS = _DECODER.architecture(
    "seed_oss",
    "SeedOssForCausalLM",
    LEAVES,
    released="2025-08",
    token_ids={"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1},
)
