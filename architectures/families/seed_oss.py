"""Seed-OSS (ByteDance 2025): llama with biases on q, k and v, and a separate switch for the output's bias.

Source: transformers models/seed_oss/{configuration,modeling}_seed_oss.py.
"""

from ..decoder import Decoder
from ..fields import MLP_BIAS, USUAL, Field, with_defaults
from ..usual import LEAVES

_DECODER = Decoder(
    {
        **with_defaults(
            USUAL,
            vocab_size=155136,
            intermediate_size=27648,
            num_hidden_layers=64,
            num_attention_heads=80,
            num_key_value_heads=8,
            head_dim=128,
            max_position_embeddings=524288,
        ),
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
    irrelevant={"residual_dropout": "training only"},
)
