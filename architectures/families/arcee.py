"""AFM (Arcee 2025): llama with a plain feed-forward of squared ReLU.

Source: transformers models/arcee/{configuration,modeling}_arcee.py.
"""

from __future__ import annotations

from ...components import FeedForward
from ..base import Architecture
from ..decoder import USUAL, Decoder, Field, with_defaults
from .llama import BIAS, LEAVES, LLAMA_DROPPED

DECODER = Decoder(
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

ARCEE = Architecture(
    name="arcee",
    model_types=("arcee",),
    hf_class="ArceeForCausalLM",
    hf_config="ArceeConfig",
    kinds=DECODER.kinds,
    token_ids={"bos_token_id": 128000, "eos_token_id": 128001},
    read=DECODER.read,
    write=DECODER.write,
    leaves=LEAVES,
    prefix="model.",
    dropped=LLAMA_DROPPED,
)
