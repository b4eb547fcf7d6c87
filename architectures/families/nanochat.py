"""nanochat (Karpathy 2025): norms without weights, also on the embedding and on query and key heads, squared ReLU,
capped logits, and RoPE that rotates in the opposite direction.

Source: transformers models/nanochat/{configuration,modeling}_nanochat.py.
"""

from ...components import FeedForward
from ..base import leaves_of
from ..config import ConfigReader
from ..decoder import Decoder
from ..fields import ATTENTION_BIAS, USUAL, Field, with_defaults
from ..rope import RotaryKind
from ..usual import ATTENTION, EMBEDDING, B, T

_DECODER = Decoder(
    {
        **with_defaults(
            USUAL,
            vocab_size=50304,
            hidden_size=768,
            intermediate_size=8192,
            num_hidden_layers=12,
            num_attention_heads=6,
            hidden_act="relu2",
        ),
        "final_logit_softcapping": Field("head.cap", 15.0, ConfigReader.optional_number),
        "attention_bias": ATTENTION_BIAS,
    },
    inner=FeedForward,
    head_norms="same",
    embedding_norm=True,
    fixed={
        "norm.gain": "none",
        "attention.norm_order": "after",
        "feed_forward.up_bias": False,
        "feed_forward.down_bias": False,
    },
    rotary=RotaryKind(direction="backward"),
)
_FEED_FORWARD = {T + "mlp.fc1": B + "feed_forward.up_proj", T + "mlp.fc2": B + "feed_forward.down_proj"}

_NANOCHAT = _DECODER.architecture(
    "nanochat",
    "NanoChatForCausalLM",
    leaves_of({**EMBEDDING, **ATTENTION, **_FEED_FORWARD, "lm_head": "head"}),
    released="2025-10",
    token_ids={"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1},
)
