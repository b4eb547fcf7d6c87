"""AFM (Arcee 2025): llama with a plain feed-forward with squared ReLU.

Source: transformers models/arcee/{configuration,modeling}_arcee.py.
"""

from ...components import FeedForward
from ..decoder import USUAL, Decoder, Field, with_defaults
from .llama import BIAS, LEAVES, LLAMA_DROPPED

_DECODER = Decoder(
    {
        **with_defaults(
            USUAL,
            hidden_size=2560,
            intermediate_size=18432,
            hidden_act="relu2",
            max_position_embeddings=4096,
            rms_norm_eps=1e-5,
        ),
        "attention_bias": BIAS,
        "mlp_bias": Field("feed_forward.up_bias feed_forward.down_bias", False),
    },
    inner=FeedForward,
    whole_heads=True,
)

_ARCEE = _DECODER.architecture(
    "arcee",
    "ArceeForCausalLM",
    LEAVES,
    released="2025-06",
    token_ids={"bos_token_id": 128000, "eos_token_id": 128001},
    dropped=LLAMA_DROPPED,
)
