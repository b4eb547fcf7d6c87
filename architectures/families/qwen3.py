"""Qwen3 (2505.09388), dense: llama with an RMSNorm on every query and key head, and a head_dim of its own.

Source: transformers models/qwen3/{configuration,modeling}_qwen3.py.
"""

from __future__ import annotations

from typing import Any

from ...components import ModelSpec
from ..base import Architecture
from ..config import ConfigReader
from .llama import LEAVES, LLAMA_DROPPED, LLAMA_KINDS, read_llama_like, write_llama_like
from .qwen2 import DEFAULTS, read_windows, write_windows


def read(config: ConfigReader) -> ModelSpec:
    """config.json -> tree."""
    bias = config.boolean("attention_bias", False)
    return read_llama_like(
        config,
        defaults=DEFAULTS,
        head_dim=config.integer("head_dim", 128),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        windows=read_windows(config),
    )


def write(spec: ModelSpec) -> dict[str, Any]:
    """Tree -> the config.json fields that describe it."""
    return {**write_llama_like(spec), **write_windows(spec), "attention_bias": spec.blocks[0].attention.qkv_bias}


QWEN3 = Architecture(
    name="qwen3",
    model_types=("qwen3",),
    hf_class="Qwen3ForCausalLM",
    hf_config="Qwen3Config",
    kinds=LLAMA_KINDS,
    read=read,
    write=write,
    leaves=LEAVES,
    prefix="model.",
    dropped=LLAMA_DROPPED,
)
