"""BitNet b1.58 2B4T (Microsoft 2504.12285) with its weights in floating point: llama with squared ReLU as the gate's
activation, and norms before the output projections of attention and feed-forward.

gptkit refuses files with ternary weights as quantised.

Source: transformers models/bitnet/{configuration,modular}_bitnet.py.
"""

from ...components import RMSNorm
from ..base import leaves_of
from ..config import ConfigReader
from ..decoder import DecoderFamily
from ..fields import ATTENTION_BIAS, Field, llama_fields
from ..rope import RotaryKind
from ..usual import ATTENTION, EMBEDDING, ENDS, FEED_FORWARD, NORMS, B, T

_DECODER = DecoderFamily(
    {
        **llama_fields(vocab=128256, hidden=2560, intermediate=6912, layers=30, heads=20, activation="relu2", eps=1e-5),
        "num_key_value_heads": Field("kv_heads", 5, ConfigReader.optional_integer),  # null means the number of heads
        "attention_bias": ATTENTION_BIAS,
    },
    fixed={
        "attention.mixed_norm": lambda values: RMSNorm(size=values["hidden"], eps=values["eps"]),
        "feed_forward.inner_norm": lambda values: RMSNorm(size=values["intermediate"], eps=values["eps"]),
    },
    rotary=RotaryKind(500_000.0),
    square=True,
)

_BITNET = _DECODER.architecture(
    "bitnet",
    "BitNetForCausalLM",
    leaves_of(
        {
            **EMBEDDING,
            **ATTENTION,
            T + "self_attn.attn_sub_norm": B + "attention.mixed_norm",
            **FEED_FORWARD,
            T + "mlp.ffn_sub_norm": B + "feed_forward.inner_norm",
            **NORMS,
            **ENDS,
        }
    ),
    released="2025-04",
    token_ids={"bos_token_id": 128000, "eos_token_id": 128001},
)
