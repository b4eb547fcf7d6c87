"""Youtu-LLM (Tencent 2025): a dense model with DeepSeek-V3's latent attention.

Source: transformers models/youtu/{configuration,modeling}_youtu.py.
"""

from typing import Any

from msgspec.structs import replace

from ...components import ModelSpec
from ..config import ConfigReader
from ..fields import with_defaults
from ..latent import LATENT_FIELDS, LATENT_LEAVES, MADE, LatentDecoder

_DECODER = LatentDecoder(
    with_defaults(LATENT_FIELDS, vocab=128256, hidden=2048, intermediate=6144, heads=16, context=131072, tied=True),
    kv_heads=16,
    tables=True,
)


def _read(config: ConfigReader) -> ModelSpec:
    """Return the tree of a config.json. transformers' class zeroes the padding token's row after loading."""
    spec, padding = _DECODER.read(config), config.raw("pad_token_id")
    if padding is None:
        return spec
    if type(padding) is not int or not 0 <= padding < spec.vocab_size:
        raise config.fail("pad_token_id", padding, f"null or a token from 0 to {spec.vocab_size - 1}")
    return replace(spec, embedding=replace(spec.embedding, blank=padding))


def _write(spec: ModelSpec) -> dict[str, Any]:
    """Return the config fields that `_read` reads."""
    blank = spec.embedding.blank
    return {**_DECODER.write(spec), **({} if blank is None else {"pad_token_id": blank})}


_YOUTU = _DECODER.architecture(
    "youtu",
    "YoutuForCausalLM",
    LATENT_LEAVES,
    released="2025-12",
    read=_read,
    write=_write,
    token_ids={"bos_token_id": 128000, "eos_token_id": 128001},
    irrelevant={**MADE, "pad_token_id": None, "embedding_initializer_range": "training only"},
)
