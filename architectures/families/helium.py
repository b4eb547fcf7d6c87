"""Helium 1 (Kyutai 2025): llama with RoPE on adjacent pairs.

Source: transformers models/helium/{configuration,modeling}_helium.py.
"""

import math

from ..decoder import DecoderFamily
from ..fields import MLP_BIAS, Field, llama_fields
from ..rope import RotaryKind
from ..usual import LEAVES

_DECODER = DecoderFamily(
    {
        **llama_fields(
            vocab=48000,
            hidden=2560,
            intermediate=7040,
            layers=24,
            heads=20,
            kv_heads=20,
            head_dim=128,
            context=4096,
            eps=1e-8,
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
