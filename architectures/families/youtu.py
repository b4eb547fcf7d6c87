"""Youtu-LLM (Tencent 2025): a dense model with DeepSeek-V3's latent attention.

Source: transformers models/youtu/{configuration,modeling}_youtu.py.
"""

from ..fields import below, with_defaults
from ..latent import COMPUTED, LATENT_FIELDS, LATENT_LEAVES, LatentDecoder

_DECODER = LatentDecoder(
    {
        **with_defaults(
            LATENT_FIELDS, vocab=128256, hidden=2048, intermediate=6144, heads=16, context=131072, tied=True
        ),
        "pad_token_id": below("embedding.blank", None, "vocab_size", 128256, None, 0, 5),
    },
    kv_heads=16,
    tables=True,
)

_YOUTU = _DECODER.architecture(
    "youtu",
    "YoutuForCausalLM",
    LATENT_LEAVES,
    released="2025-12",
    token_ids={"bos_token_id": 128000, "eos_token_id": 128001},
    irrelevant={**COMPUTED, "pad_token_id": None, "embedding_initializer_range": "training only"},
)
