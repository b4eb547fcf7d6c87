"""nanochat (Karpathy 2025): llama with plain feed-forwards with squared ReLU, capped logits, and RoPE that rotates in
the opposite direction. Norms have no weights. There are norms on the embedding and on query and key heads, too.

Source: transformers models/nanochat/{configuration,modeling}_nanochat.py.
"""

from ...components import FeedForward
from ..base import leaves_of
from ..config import ConfigReader
from ..decoder import DecoderFamily
from ..fields import ATTENTION_BIAS, Field, llama_fields
from ..rope import RotaryKind
from ..usual import ATTENTION, EMBEDDING, B, T

_DECODER = DecoderFamily(
    {
        **llama_fields(vocab=50304, hidden=768, intermediate=8192, layers=12, heads=6, activation="relu2"),
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
