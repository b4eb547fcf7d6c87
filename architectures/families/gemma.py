"""Gemma (2403.08295): llama with norms by 1 + weight in fp32, and a table that is multiplied by √hidden.

Source: transformers models/gemma/{configuration,modeling}_gemma.py. A `hidden_act` of gelu is read there as its tanh
approximation, which the first releases meant.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...components import ModelSpec
from ...errors import CannotExpress
from ..base import Architecture
from ..config import ConfigReader
from .gpt2 import ACTIVATIONS
from .llama import LEAVES, LLAMA_DROPPED, LLAMA_KINDS, read_llama_like, write_llama_like

GEMMA_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 256000,
    "hidden_size": 3072,
    "intermediate_size": 24576,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "hidden_act": "gelu_pytorch_tanh",
}
GEMMA_IDS = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
BIDIRECTIONAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "use_bidirectional_attention": ((None, False), "attention to tokens that come later has no component here")
}


def read_gemma_like(config: ConfigReader, defaults: Mapping[str, Any], **parts: Any) -> ModelSpec:
    """The tree of a Gemma of any generation; `parts` as of `read_llama_like`."""
    bias = config.boolean("attention_bias", False)
    return read_llama_like(
        config,
        defaults=defaults,
        head_dim=config.integer("head_dim", 256),
        qkv_bias=bias,
        output_bias=bias,
        norms={"gain": "1 + weight", "cast": "after_weight"},
        embedding={"multiplier": config.integer("hidden_size", defaults["hidden_size"]) ** 0.5, "scaling": "rounded"},
        **parts,
    )


def require_whole_heads(spec: ModelSpec, family: str) -> None:
    """Raise CannotExpress where transformers' config class refuses the number of heads, needless beside head_dim."""
    if spec.hidden_size % spec.blocks[0].attention.heads:
        heads = spec.blocks[0].attention.heads
        raise CannotExpress(f"transformers' {family} refuses {spec.hidden_size} wide with {heads} heads")


def read(config: ConfigReader) -> ModelSpec:
    """config.json -> tree."""
    return read_gemma_like(config, GEMMA_DEFAULTS, activations={**ACTIVATIONS, "gelu": "gelu_tanh"})


def write(spec: ModelSpec) -> dict[str, Any]:
    """Tree -> the config.json fields that describe it."""
    return {**write_llama_like(spec), "attention_bias": spec.blocks[0].attention.qkv_bias}


GEMMA = Architecture(
    name="gemma",
    model_types=("gemma",),
    hf_class="GemmaForCausalLM",
    hf_config="GemmaConfig",
    kinds=LLAMA_KINDS,
    token_ids=GEMMA_IDS,
    read=read,
    write=write,
    leaves=LEAVES,
    prefix="model.",
    dropped=LLAMA_DROPPED,
    irrelevant={"hidden_activation": "transformers goes by hidden_act"},
    refused=BIDIRECTIONAL,
)
