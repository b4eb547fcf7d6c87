"""Mistral (Jiang et al. 2310.06825): llama with one sliding window for all layers.

Source: transformers models/mistral/{configuration,modeling}_mistral.py. An absent `sliding_window` means 4096 there,
null means none.
"""

from __future__ import annotations

from typing import Any

from ...components import ModelSpec
from ..base import Architecture
from ..config import ConfigReader
from .llama import LEAVES, LLAMA_DROPPED, LLAMA_KINDS, read_llama_like, write_llama_like

DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}


def read(config: ConfigReader) -> ModelSpec:
    """config.json -> tree."""
    window = config.optional_integer("sliding_window", 4096)
    return read_llama_like(
        config,
        defaults=DEFAULTS,
        head_dim=config.optional_integer("head_dim"),
        windows=(window,) * config.layers("num_hidden_layers", DEFAULTS["num_hidden_layers"]),
    )


def write(spec: ModelSpec) -> dict[str, Any]:
    """Tree -> the config.json fields that describe it."""
    return {**write_llama_like(spec), "sliding_window": spec.blocks[0].attention.window}


MISTRAL = Architecture(
    name="mistral",
    model_types=("mistral",),
    hf_class="MistralForCausalLM",
    hf_config="MistralConfig",
    kinds=LLAMA_KINDS,
    token_ids={"bos_token_id": 1, "eos_token_id": 2},
    read=read,
    write=write,
    leaves=LEAVES,
    prefix="model.",
    dropped=LLAMA_DROPPED,
    refused={"layer_types": ((None,), "a mistral with layer types is read as a ministral by transformers")},
)
