"""Gemma 2 (2408.00118): Gemma with a norm behind each sub-layer too, caps on scores and logits, and a window in every
second layer.

Source: transformers models/gemma2/{configuration,modeling}_gemma2.py, which has no sdpa path: none caps scores.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...components import Attention, GatedFeedForward, ModelSpec, Rotary
from ..base import Architecture, Leaf
from ..config import ConfigReader
from ..obstacles import of_kind
from .gemma import BIDIRECTIONAL, GEMMA_DEFAULTS, GEMMA_IDS, read_gemma_like, require_whole_heads
from .gpt2 import name_of
from .llama import LEAVES, LLAMA_DROPPED, LLAMA_KINDS, B, T, write_llama_like

DEFAULTS: Mapping[str, Any] = {
    **GEMMA_DEFAULTS,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
}


def read_sandwich(
    config: ConfigReader,
    defaults: Mapping[str, Any],
    pattern: int,
    logit_cap: float | None,
    rotaries: Mapping[str, Rotary] | None = None,
    **parts: Any,
) -> ModelSpec:
    """The tree of what Gemma 2 and its followers share.

    Args:
        config: what is read.
        defaults: the config class' own for absent keys.
        pattern: every so many layers one sees all tokens, where `layer_types` does not say which.
        logit_cap: of the config class, where none is given.
        rotaries: the positions of each kind of layer, where they are not all alike.
        parts: as of `read_gemma_like`.
    """
    layers = config.layers("num_hidden_layers", defaults["num_hidden_layers"])
    usual = ["full_attention" if (layer + 1) % pattern == 0 else "sliding_attention" for layer in range(layers)]
    types = config.layer_types(usual)
    window = config.optional_integer("sliding_window", 4096)
    if window is None and "sliding_attention" in types:
        raise config.fail("sliding_window", window, "a number, since layer_types has sliding_attention")
    return read_gemma_like(
        config,
        defaults,
        scale=config.integer("query_pre_attn_scalar", 256) ** -0.5,
        windows=tuple(window if kind == "sliding_attention" else None for kind in types),
        activation="hidden_activation",
        output_norms=True,
        logit_cap=config.optional_number("final_logit_softcapping", logit_cap),
        rotary=None if rotaries is None else [rotaries[kind] for kind in types],
        **parts,
    )


def write_sandwich(spec: ModelSpec, family: str) -> dict[str, Any]:
    """The config fields that Gemma 2 and its followers share."""
    require_whole_heads(spec, family)
    attention = of_kind(spec.blocks[0].attention, Attention)
    windows = [block.attention.window for block in spec.blocks]
    shared = write_llama_like(spec)
    del shared["hidden_act"]
    return {
        **shared,
        "hidden_activation": name_of(of_kind(spec.blocks[0].feed_forward, GatedFeedForward).activation),
        "attention_bias": attention.qkv_bias,
        "query_pre_attn_scalar": max(round(attention.scale**-2), 1),
        "sliding_window": next((window for window in windows if window is not None), 4096),
        "layer_types": ["full_attention" if window is None else "sliding_attention" for window in windows],
        "final_logit_softcapping": spec.head.cap,
    }


def read(config: ConfigReader) -> ModelSpec:
    """config.json -> tree."""
    return read_sandwich(config, DEFAULTS, 2, 30.0, cap=config.optional_number("attn_logit_softcapping", 50.0))


def write(spec: ModelSpec) -> dict[str, Any]:
    """Tree -> the config.json fields that describe it."""
    cap = of_kind(spec.blocks[0].attention, Attention).cap
    return {**write_sandwich(spec, "gemma2"), "attn_logit_softcapping": cap}


SANDWICH_LEAVES: tuple[Leaf, ...] = (
    *LEAVES[:-3],
    Leaf(T + "post_attention_layernorm.weight", B + "attention_output_norm.weight"),
    Leaf(T + "pre_feedforward_layernorm.weight", B + "feed_forward_norm.weight"),
    Leaf(T + "post_feedforward_layernorm.weight", B + "feed_forward_output_norm.weight"),
    *LEAVES[-2:],
)

GEMMA2 = Architecture(
    name="gemma2",
    model_types=("gemma2",),
    hf_class="Gemma2ForCausalLM",
    hf_config="Gemma2Config",
    kinds=LLAMA_KINDS,
    token_ids=GEMMA_IDS,
    read=read,
    write=write,
    leaves=SANDWICH_LEAVES,
    prefix="model.",
    dropped=LLAMA_DROPPED,
    irrelevant={"cache_implementation": "generation", "hidden_act": "transformers goes by hidden_activation"},
    refused=BIDIRECTIONAL,
    reference=lambda _: ("eager",),
    reference_quirk="no fused kernel caps scores, and transformers has none for gemma2",
)
