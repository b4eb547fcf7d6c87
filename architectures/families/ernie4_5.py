"""ERNIE 4.5 (Baidu 2025), dense: llama with RoPE on adjacent pairs, and one switch for all biases.

Source: transformers models/ernie4_5/{configuration,modeling}_ernie4_5.py.
"""

from ..decoder import Decoder
from ..fields import USUAL, Field, with_defaults
from ..rope import RotaryKind
from ..usual import LEAVES

DECODER = Decoder(
    {
        **with_defaults(
            USUAL,
            vocab_size=103424,
            hidden_size=1024,
            intermediate_size=3072,
            num_hidden_layers=18,
            num_attention_heads=16,
            num_key_value_heads=2,
            head_dim=128,
            max_position_embeddings=131072,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
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
