"""ERNIE 4.5 (Baidu 2025), dense: llama with RoPE on adjacent pairs, and one config field that switches all biases on.

Source: transformers models/ernie4_5/{configuration,modeling}_ernie4_5.py.
"""

from ..decoder import DecoderFamily
from ..fields import Field, llama_fields
from ..rope import RotaryKind
from ..usual import LEAVES

DECODER = DecoderFamily(
    {
        **llama_fields(
            vocab=103424,
            hidden=1024,
            intermediate=3072,
            layers=18,
            heads=16,
            kv_heads=2,
            head_dim=128,
            context=131072,
            eps=1e-5,
            tied=True,
        ),
        "use_bias": Field(
            "attention.qkv_bias attention.output_bias feed_forward.up_bias feed_forward.down_bias", False
        ),
    },
    rotary=RotaryKind(500_000.0, pairs="adjacent", rounding="result"),
)

_ERNIE4_5 = DECODER.architecture(
    "ernie4_5",
    "Ernie4_5ForCausalLM",
    LEAVES,
    released="2025-06",
    token_ids={"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
)
