"""Youtu-LLM (Tencent 2025): a dense model with DeepSeek-V3's latent attention.

Source: transformers models/youtu/{configuration,modeling}_youtu.py.
"""

from ..config import ConfigReader
from ..draws import among
from ..fields import Field, with_defaults
from ..latent import COMPUTED, LATENT_FIELDS, LATENT_LEAVES, LatentDecoder


def _padding_row(config: ConfigReader, name: str, default: int | None) -> int | None:
    """Return the row of the embedding that transformers' class sets to zeros after loading."""
    row, rows = config.raw(name, default), config.integer("vocab_size", 128256)
    if row is not None and (type(row) is not int or not 0 <= row < rows):
        raise config.fail(name, row, f"null or a token from 0 to {rows - 1}")
    return row


_DECODER = LatentDecoder(
    {
        **with_defaults(
            LATENT_FIELDS, vocab=128256, hidden=2048, intermediate=6144, heads=16, context=131072, tied=True
        ),
        "pad_token_id": Field("embedding.blank", None, _padding_row, draw=among(None, 0, 5)),
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
