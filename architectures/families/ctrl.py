"""CTRL (Keskar et al. 1909.05858): sines of positions, a scaled embedding, ReLU, and a bias in the tied head.

Source: transformers models/ctrl/{configuration,modeling}_ctrl.py. The eps that a config has is the last norm's alone.
"""

import math
from typing import Any

from msgspec.structs import replace

from ...components import FeedForward, LayerNorm, ModelSpec, SinusoidalPositions
from ..base import Architecture, leaves_of
from ..config import SUMMARIES, ConfigReader
from ..decoder import Decoder, Field

DECODER = Decoder(
    {
        "vocab_size": Field("vocab", 246534),
        "n_positions": Field("context", 256),
        "n_embd": Field("hidden", 1280),
        "dff": Field("intermediate", 8192),
        "n_layer": Field("layers", 48),
        "n_head": Field("heads", 16),
        "tie_word_embeddings": Field("tied", True),
    },
    norm=LayerNorm,
    inner=FeedForward,
    fixed={
        "eps": 1e-6,
        "activation": "relu",
        "embedding.multiplier": lambda values: math.sqrt(values["hidden"]),
        "attention.qkv_bias": True,
        "attention.output_bias": True,
        "attention.softmax": "input",
        "feed_forward.up_bias": True,
        "feed_forward.down_bias": True,
        "head.bias": True,
    },
    rotary=None,
    learned=True,
    table=SinusoidalPositions,
)


def read(config: ConfigReader) -> ModelSpec:
    """config.json -> tree."""
    spec, eps = DECODER.read(config), config.number("layer_norm_epsilon", 1e-6)
    assert spec.final_norm is not None
    return replace(spec, final_norm=replace(spec.final_norm, eps=eps))


def write(spec: ModelSpec) -> dict[str, Any]:
    """Tree -> the config.json fields that describe it."""
    eps = {} if spec.final_norm is None else {"layer_norm_epsilon": spec.final_norm.eps}
    return {**DECODER.write(spec), **eps}


B, T = "blocks.{layer}.", "transformer.h.{layer}."
MODULES = {
    "transformer.w": "embedding",
    **{f"{T}multi_head_attention.W{name}": f"{B}attention.{name}_proj" for name in ("q", "k", "v")},
    T + "multi_head_attention.dense": B + "attention.o_proj",
    T + "ffn.0": B + "feed_forward.up_proj",
    T + "ffn.2": B + "feed_forward.down_proj",
    T + "layernorm1": B + "attention_norm",
    T + "layernorm2": B + "feed_forward_norm",
    "transformer.layernorm": "final_norm",
    "lm_head": "head",
}

CTRL = Architecture(
    name="ctrl",
    released="2019-09",
    model_types=("ctrl",),
    hf_class="CTRLLMHeadModel",
    hf_config="CTRLConfig",
    kinds=DECODER.kinds,
    read=read,
    write=write,
    config_aliases={
        "n_embd": ("hidden_size",),
        "n_head": ("num_attention_heads",),
        "n_layer": ("num_hidden_layers",),
        "n_positions": ("max_position_embeddings",),
    },
    prefix="transformer.",
    leaves=leaves_of(MODULES),
    dropped=("transformer.pos_encoding",),
    irrelevant={
        "attn_pdrop": "training only",
        "embd_pdrop": "training only",
        "from_tf": "where the file came from",
        "n_ctx": "an old copy of n_positions",
        "resid_pdrop": "training only",
        **SUMMARIES,
        "torchscript": "output format",
    },
)
