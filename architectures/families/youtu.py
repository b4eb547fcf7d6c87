"""Youtu-LLM (Tencent 2025): dense, with the latent attention of DeepSeek-V3.

Source: transformers models/youtu/{configuration,modeling}_youtu.py.
"""

from ..base import leaves_of
from ..decoder import USUAL, with_defaults
from ..latent import LATENT, MADE, LatentDecoder, latent_leaves
from .llama import EMBEDDING, ENDS, FEED_FORWARD, LLAMA_DROPPED, NORMS, B, T

HEADS = ("num_key_value_heads", "head_dim")  # fields that are about heads of keys and values, where there are none
FIELDS = {**{name: field for name, field in USUAL.items() if name not in HEADS}, **LATENT}

_DECODER = LatentDecoder(
    with_defaults(
        FIELDS,
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=6144,
        num_attention_heads=16,
        max_position_embeddings=131072,
        tie_word_embeddings=True,
    ),
    kv_heads=16,
    tables=True,
)

LEAVES = (*leaves_of(EMBEDDING), *latent_leaves(B, T), *leaves_of({**FEED_FORWARD, **NORMS, **ENDS}))

_YOUTU = _DECODER.architecture(
    "youtu",
    "YoutuForCausalLM",
    LEAVES,
    released="2025-12",
    token_ids={"bos_token_id": 128000, "eos_token_id": 128001},
    dropped=LLAMA_DROPPED,
    irrelevant={**MADE, "embedding_initializer_range": "training only"},
)
