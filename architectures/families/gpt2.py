"""GPT-2 (Radford et al. 2019). Source: transformers models/gpt2/{configuration,modeling}_gpt2.py.

Linears are Conv1D: weights lie [in, out], and c_attn holds q, k and v side by side along the output. GPT-3's sizes
in the presets use this architecture with its dense attention.
"""

from __future__ import annotations

import math
from typing import Any, get_args

from ...components import (
    Activation,
    Attention,
    Block,
    Embedding,
    FeedForward,
    Head,
    LayerNorm,
    LearnedPositions,
    ModelSpec,
)
from ...errors import CannotExpress
from ..base import Architecture, Leaf, layer, qkv, usual_layer
from ..config import ConfigReader
from ..layout import Layout

ACTIVATIONS: dict[str, Activation] = {
    **{name: name for name in get_args(Activation) if name not in ("gelu_tanh", "gelu_bloom")},
    "gelu_accurate": "gelu_new",
    "gelu_python_tanh": "gelu_new",
    "gelu_pytorch_tanh": "gelu_tanh",
    "swish": "silu",
}
"""transformers' names in ACT2FN -> ours; the first spelling of a value is the one written. Missing are those that have
parameters of their own: prelu and xielu."""

ACTIVATION_NAMES = {ours: name for name, ours in reversed(ACTIVATIONS.items())}

FUSED_WEIGHT = Layout("hidden (part heads head_dim)", "(part heads head_dim) hidden", "part", ("1", "1", "1"))
FUSED_BIAS = Layout("(part heads head_dim)", split="part", parts=("1", "1", "1"))


def name_of(activation: Activation) -> str:
    """transformers' name of an activation. Raises CannotExpress: it has none."""
    if activation not in ACTIVATION_NAMES:
        raise CannotExpress(f"transformers has no name for the activation {activation!r}")
    return ACTIVATION_NAMES[activation]


def conv1d(outputs: str, inputs: str) -> Layout:
    """A linear [out, in] that lies [in, out]."""
    return Layout(f"({inputs}) ({outputs})", f"({outputs}) ({inputs})")


def read(config: ConfigReader) -> ModelSpec:
    """config.json -> tree."""
    hidden = config.integer("n_embd", 768)
    heads = config.integer("n_head", 12)
    layers = config.layers("n_layer", 12)
    vocab = config.integer("vocab_size", 50257)
    context = config.integer("n_positions", 1024)
    eps = config.number("layer_norm_epsilon", 1e-5)
    inner = config.optional_integer("n_inner") or 4 * hidden
    if hidden % heads:
        raise config.fail("n_embd", hidden, f"a multiple of n_head ({heads})")
    scale = (hidden // heads) ** -0.5 if config.boolean("scale_attn_weights", True) else 1.0
    by_layer = config.boolean("scale_attn_by_inverse_layer_idx", False)
    upcast = config.boolean("reorder_and_upcast_attn", False)
    norm = LayerNorm(size=hidden, eps=eps)
    feed_forward = FeedForward(
        hidden_size=hidden,
        intermediate_size=inner,
        activation=config.choice("activation_function", "gelu_new", ACTIVATIONS),
        up_bias=True,
        down_bias=True,
        arithmetic="conv1d",
    )

    def block(index: int) -> Block:
        return layer(
            norm,
            Attention(
                hidden_size=hidden,
                heads=heads,
                kv_heads=heads,
                head_dim=hidden // heads,
                scale=scale / float(index + 1) if by_layer else scale,
                qkv_bias=True,
                output_bias=True,
                arithmetic="conv1d",
                fused=True,
                softmax="input",
                scores="float32" if upcast else "input",
            ),
            norm,
            feed_forward,
        )

    return ModelSpec(
        embedding=Embedding(vocab_size=vocab, hidden_size=hidden),
        positions=LearnedPositions(length=context, size=hidden),
        blocks=tuple(block(index) for index in range(layers)),
        final_norm=norm,
        head=Head(vocab_size=vocab, hidden_size=hidden, tied=config.boolean("tie_word_embeddings", True)),
        context_length=context,
    )


def write(spec: ModelSpec) -> dict[str, Any]:
    """Tree -> the config.json fields that describe it."""
    first, attention, feed_forward = usual_layer(spec)
    plain = attention.head_dim**-0.5
    return {
        "vocab_size": spec.vocab_size,
        "n_positions": spec.context_length,
        "n_embd": spec.hidden_size,
        "n_layer": len(spec.blocks),
        "n_head": attention.heads,
        "n_inner": feed_forward.intermediate_size,
        "activation_function": name_of(feed_forward.activation),
        "layer_norm_epsilon": first.attention_norm.eps,
        "scale_attn_weights": math.isclose(attention.scale, plain, rel_tol=1e-12),  # `without_rounding` rounds it
        "reorder_and_upcast_attn": attention.scores == "float32",
        "scale_attn_by_inverse_layer_idx": spec.blocks[-1].attention.scale != attention.scale,
        "tie_word_embeddings": spec.head.tied,
    }


B, T = "blocks.{layer}.", "transformer.h.{layer}."

GPT2 = Architecture(
    name="gpt2",
    model_types=("gpt2",),
    hf_class="GPT2LMHeadModel",
    hf_config="GPT2Config",
    kinds=frozenset({LayerNorm, LearnedPositions, Attention, FeedForward}),
    token_ids={"bos_token_id": 50256, "eos_token_id": 50256},
    read=read,
    write=write,
    config_aliases={
        "n_embd": ("hidden_size",),
        "n_head": ("num_attention_heads",),
        "n_layer": ("num_hidden_layers",),
        "n_positions": ("max_position_embeddings",),
    },
    prefix="transformer.",
    leaves=(
        Leaf("transformer.wte.weight", "embedding.weight"),
        Leaf("transformer.wpe.weight", "positions.weight"),
        Leaf(T + "ln_1.weight", B + "attention_norm.weight"),
        Leaf(T + "ln_1.bias", B + "attention_norm.bias"),
        Leaf(T + "attn.c_attn.weight", qkv("weight"), FUSED_WEIGHT),
        Leaf(T + "attn.c_attn.bias", qkv("bias"), FUSED_BIAS),
        Leaf(T + "attn.c_proj.weight", B + "attention.o_proj.weight", conv1d("hidden", "heads head_dim")),
        Leaf(T + "attn.c_proj.bias", B + "attention.o_proj.bias"),
        Leaf(T + "ln_2.weight", B + "feed_forward_norm.weight"),
        Leaf(T + "ln_2.bias", B + "feed_forward_norm.bias"),
        Leaf(T + "mlp.c_fc.weight", B + "feed_forward.up_proj.weight", conv1d("intermediate", "hidden")),
        Leaf(T + "mlp.c_fc.bias", B + "feed_forward.up_proj.bias"),
        Leaf(T + "mlp.c_proj.weight", B + "feed_forward.down_proj.weight", conv1d("hidden", "intermediate")),
        Leaf(T + "mlp.c_proj.bias", B + "feed_forward.down_proj.bias"),
        Leaf("transformer.ln_f.weight", "final_norm.weight"),
        Leaf("transformer.ln_f.bias", "final_norm.bias"),
        Leaf("lm_head.weight", "head.weight"),
    ),
    aliases=tuple(
        (f"{norm}.{old}", f"{norm}.{new}")
        for norm in (T + "ln_1", T + "ln_2", "transformer.ln_f")
        for old, new in (("gamma", "weight"), ("beta", "bias"))
    ),
    dropped=(T + "attn.bias", T + "attn.masked_bias"),
    irrelevant={
        "attn_pdrop": "training only",
        "embd_pdrop": "training only",
        "n_ctx": "an old copy of n_positions",
        "resid_pdrop": "training only",
        "summary_activation": "heads other than the language model's",
        "summary_first_dropout": "heads other than the language model's",
        "summary_last_dropout": "heads other than the language model's",
        "summary_proj_to_labels": "heads other than the language model's",
        "summary_type": "heads other than the language model's",
        "summary_use_proj": "heads other than the language model's",
        "task_specific_params": "generation",
    },
)
