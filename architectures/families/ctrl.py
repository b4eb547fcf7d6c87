"""CTRL (Keskar et al. 1909.05858): GPT-2 with ordinary linear layers, sinusoidal positions, a scaled embedding, ReLU,
and a bias in the tied head.

The eps in a config is only that of the last norm.

Source: transformers models/ctrl/{configuration,modeling}_ctrl.py.
"""

import math

from ...components import FeedForward, LayerNorm, SinusoidalPositions
from ..base import leaves_of
from ..config import GPT2_ALIASES, OF_GPT2
from ..decoder import DecoderFamily
from ..fields import BIASED, Field

_DECODER = DecoderFamily(
    {
        "vocab_size": Field("vocab", 246534),
        "n_positions": Field("context", 256),
        "n_embd": Field("hidden", 1280),
        "dff": Field("intermediate", 8192),
        "n_layer": Field("layers", 48),
        "n_head": Field("heads", 16),
        "tie_word_embeddings": Field("tied", True),
        "layer_norm_epsilon": Field("final_norm.eps", 1e-6),
    },
    norm=LayerNorm,
    inner=FeedForward,
    fixed={
        **BIASED,
        "eps": 1e-6,
        "activation": "relu",
        "embedding.multiplier": lambda values: math.sqrt(values["hidden"]),
        "attention.softmax": "input",
        "head.bias": True,
    },
    rotary=None,
    learned=True,
    table=SinusoidalPositions,
)

_B, _T = "blocks.{layer}.", "transformer.h.{layer}."
_MODULES = {
    "transformer.w": "embedding",
    **{f"{_T}multi_head_attention.W{name}": f"{_B}attention.{name}_proj" for name in ("q", "k", "v")},
    _T + "multi_head_attention.dense": _B + "attention.o_proj",
    _T + "ffn.0": _B + "feed_forward.up_proj",
    _T + "ffn.2": _B + "feed_forward.down_proj",
    _T + "layernorm1": _B + "attention_norm",
    _T + "layernorm2": _B + "feed_forward_norm",
    "transformer.layernorm": "final_norm",
    "lm_head": "head",
}

_CTRL = _DECODER.architecture(
    "ctrl",
    "CTRLLMHeadModel",
    leaves_of(_MODULES),
    released="2019-09",
    config_aliases=GPT2_ALIASES,
    prefix="transformer.",
    dropped=("transformer.pos_encoding",),
    irrelevant={**OF_GPT2, "from_tf": "where the file came from", "torchscript": "output format"},
)
