"""BLOOM (Le Scao et al. 2211.05100): ALiBi, a norm on the embeddings, q, k and v fused head by head.

Source: transformers models/bloom/{configuration,modeling}_bloom.py. transformers has only an eager path for it, whose
baddbmm rounds differently from any sdpa kernel.
"""

from __future__ import annotations

import math
from typing import Any

from ...components import ALiBi, Attention, Embedding, FeedForward, Head, LayerNorm, ModelSpec
from ..base import Architecture, Leaf, layer, qkv, usual_layer
from ..config import ConfigReader
from ..layout import Layout

GROUPED_WEIGHT = Layout("(kv_heads slot head_dim) hidden", split="slot", parts=("group", "1", "1"))
"""Every key-value head's queries, then its key, then its value. With a group of one this is BLOOM's [heads, 3,
head_dim]; with one key-value head it is MQA's q … q, k, v."""

GROUPED_BIAS = Layout("(kv_heads slot head_dim)", split="slot", parts=("group", "1", "1"))


def read(config: ConfigReader) -> ModelSpec:
    """config.json -> tree."""
    hidden = config.integer("hidden_size", 64)
    heads = config.integer("n_head", 8)
    layers = config.layers("n_layer", 2)
    vocab = config.integer("vocab_size", 250880)
    norm = LayerNorm(size=hidden, eps=config.number("layer_norm_epsilon", 1e-5))
    if hidden % heads:
        raise config.fail("hidden_size", hidden, f"a multiple of n_head ({heads})")
    block = layer(
        norm,
        Attention(
            hidden_size=hidden,
            heads=heads,
            kv_heads=heads,
            head_dim=hidden // heads,
            scale=1.0 / math.sqrt(hidden // heads),
            position=ALiBi(),
            qkv_bias=True,
            output_bias=True,
            fused=True,
        ),
        norm,
        FeedForward(
            hidden_size=hidden, intermediate_size=4 * hidden, activation="gelu_bloom", up_bias=True, down_bias=True
        ),
        residual="normed" if config.boolean("apply_residual_connection_post_layernorm", False) else "stream",
    )
    return ModelSpec(
        embedding=Embedding(vocab_size=vocab, hidden_size=hidden, norm=norm),
        blocks=(block,) * layers,
        final_norm=norm,
        head=Head(vocab_size=vocab, hidden_size=hidden, tied=config.boolean("tie_word_embeddings", True)),
        context_length=config.optional_integer("seq_length"),
    )


def write(spec: ModelSpec) -> dict[str, Any]:
    """Tree -> the config.json fields that describe it."""
    first, attention, _ = usual_layer(spec)
    return {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "n_layer": len(spec.blocks),
        "n_head": attention.heads,
        "layer_norm_epsilon": first.attention_norm.eps,
        "apply_residual_connection_post_layernorm": first.residual == "normed",
        "tie_word_embeddings": spec.head.tied,
        **({} if spec.context_length is None else {"seq_length": spec.context_length}),
    }


B, T = "blocks.{layer}.", "transformer.h.{layer}."

BLOOM = Architecture(
    name="bloom",
    model_types=("bloom",),
    hf_class="BloomForCausalLM",
    hf_config="BloomConfig",
    kinds=frozenset({LayerNorm, ALiBi, Attention, FeedForward}),
    token_ids={"bos_token_id": 1, "eos_token_id": 2},
    read=read,
    write=write,
    config_aliases={"n_head": ("num_attention_heads",), "n_layer": ("num_hidden_layers",), "hidden_size": ("n_embed",)},
    prefix="transformer.",
    leaves=(
        Leaf("transformer.word_embeddings.weight", "embedding.weight"),
        Leaf("transformer.word_embeddings_layernorm.weight", "embedding.norm.weight"),
        Leaf("transformer.word_embeddings_layernorm.bias", "embedding.norm.bias"),
        Leaf(T + "input_layernorm.weight", B + "attention_norm.weight"),
        Leaf(T + "input_layernorm.bias", B + "attention_norm.bias"),
        Leaf(T + "self_attention.query_key_value.weight", qkv("weight"), GROUPED_WEIGHT),
        Leaf(T + "self_attention.query_key_value.bias", qkv("bias"), GROUPED_BIAS),
        Leaf(T + "self_attention.dense.weight", B + "attention.o_proj.weight"),
        Leaf(T + "self_attention.dense.bias", B + "attention.o_proj.bias"),
        Leaf(T + "post_attention_layernorm.weight", B + "feed_forward_norm.weight"),
        Leaf(T + "post_attention_layernorm.bias", B + "feed_forward_norm.bias"),
        Leaf(T + "mlp.dense_h_to_4h.weight", B + "feed_forward.up_proj.weight"),
        Leaf(T + "mlp.dense_h_to_4h.bias", B + "feed_forward.up_proj.bias"),
        Leaf(T + "mlp.dense_4h_to_h.weight", B + "feed_forward.down_proj.weight"),
        Leaf(T + "mlp.dense_4h_to_h.bias", B + "feed_forward.down_proj.bias"),
        Leaf("transformer.ln_f.weight", "final_norm.weight"),
        Leaf("transformer.ln_f.bias", "final_norm.bias"),
        Leaf("lm_head.weight", "head.weight"),
    ),
    dropped=(T + "self_attention.bias", T + "self_attention.masked_bias"),
    irrelevant={
        "attention_softmax_in_fp32": "transformers always does",
        "bias_dropout_fusion": "training only",
        "masked_softmax_fusion": "training only",
        "offset_alibi": "not read by transformers",
        "pretraining_tp": "matrix products in slices, only together with slow_but_exact",
        "skip_bias_add": "training only",
        "skip_bias_add_qkv": "training only",
        "unk_token_id": "tokenizer",
    },
    refused={"slow_but_exact": ((False, None), "sums matrix products in slices, which nothing here reproduces")},
    reference=lambda spec: ("eager",),
    reference_quirk="transformers has no sdpa path for bloom",
)
