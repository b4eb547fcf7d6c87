"""Helium 1 (Kyutai 2025): llama with RoPE on adjacent pairs.

Source: transformers models/helium/{configuration,modeling}_helium.py.
"""

import math

from ..decoder import Decoder
from ..fields import MLP_BIAS, USUAL, Field, with_defaults
from ..rope import RotaryKind
from ..usual import LEAVES

_DECODER = Decoder(
    {
        **with_defaults(
            USUAL,
            vocab_size=48000,
            hidden_size=2560,
            intermediate_size=7040,
            num_hidden_layers=24,
            num_attention_heads=20,
            num_key_value_heads=20,
            head_dim=128,
            max_position_embeddings=4096,
            rms_norm_eps=1e-8,
        ),
        "attention_bias": Field("attention.qkv_bias", False),
        "mlp_bias": MLP_BIAS,
    },
    fixed={"norm.cast": "after_weight", "attention.scale": lambda values: 1 / math.sqrt(values["head_dim"])},
    rotary=RotaryKind(100_000.0, pairs="adjacent"),
    square=True,
)

_HELIUM = _DECODER.architecture(
    "helium",
    "HeliumForCausalLM",
    LEAVES,
    released="2025-01",
    token_ids={"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3},
)
