"""LLaMA (Touvron et al. 2302.13971) and what shares its tree: Mistral, Qwen2, Qwen3 build on `read_llama_like`.

Source: transformers models/llama/{configuration,modeling}_llama.py. Checkpoints are pure renames.
"""

from __future__ import annotations

from typing import Any

from ..components import (
    Attention,
    Block,
    Embedding,
    GatedFeedForward,
    Head,
    ModelSpec,
    RMSNorm,
    Rotary,
    SubLayer,
)
from ..errors import CannotExpress
from .base import Architecture, Leaf, usual_layer
from .config import ConfigReader
from .gpt2 import ACTIVATION_NAMES, ACTIVATIONS
from .rope import DEFAULT_BASE, read_rotary, write_rotary

__all__ = ["LEAVES", "LLAMA", "LLAMA_DROPPED", "read_llama_like", "write_llama_like"]


def read_llama_like(
    config: ConfigReader,
    *,
    defaults: dict[str, int],
    head_dim: int | None = None,
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    windows: tuple[int | None, ...] | None = None,
    eps: float = 1e-6,
    base: float = DEFAULT_BASE,
) -> ModelSpec:
    """The tree of a llama-like config. `defaults`, `eps` and `base` are the config class' own for absent keys;
    `head_dim` None is hidden / heads; `windows` one a layer.
    """
    hidden = config.integer("hidden_size", defaults["hidden_size"])
    heads = config.integer("num_attention_heads", defaults["num_attention_heads"])
    layers = config.layers("num_hidden_layers", defaults["num_hidden_layers"])
    context = config.integer("max_position_embeddings", defaults["max_position_embeddings"])
    vocab = config.integer("vocab_size", defaults["vocab_size"])
    eps = config.number("rms_norm_eps", eps)
    kv_heads = config.optional_integer("num_key_value_heads", defaults.get("num_key_value_heads")) or heads
    if head_dim is None:
        if hidden % heads:
            raise config.fail("hidden_size", hidden, f"a multiple of num_attention_heads ({heads})")
        head_dim = hidden // heads
    rotary = read_rotary(config, head_dim, context, base)
    norm = RMSNorm(size=hidden, eps=eps)
    head_norm = RMSNorm(size=head_dim, eps=eps) if qk_norm else None
    feed_forward = GatedFeedForward(
        hidden_size=hidden,
        intermediate_size=config.integer("intermediate_size", defaults["intermediate_size"]),
        activation=config.choice("hidden_act", "silu", ACTIVATIONS),
        up_bias=mlp_bias,
        down_bias=mlp_bias,
    )

    def block(window: int | None) -> Block:
        return Block(
            sublayers=(
                SubLayer(
                    mixer=Attention(
                        hidden_size=hidden,
                        heads=heads,
                        kv_heads=kv_heads,
                        head_dim=head_dim,
                        scale=head_dim**-0.5,
                        position=rotary,
                        window=window,
                        q_norm=head_norm,
                        k_norm=head_norm,
                        qkv_bias=qkv_bias,
                        output_bias=output_bias,
                    ),
                    norm=norm,
                ),
                SubLayer(mixer=feed_forward, norm=norm),
            ),
        )

    by_window = {window: block(window) for window in set(windows or (None,))}
    return ModelSpec(
        embedding=Embedding(vocab_size=vocab, hidden_size=hidden),
        blocks=tuple(by_window[window] for window in windows or (None,) * layers),
        final_norm=norm,
        head=Head(vocab_size=vocab, hidden_size=hidden, tied=config.boolean("tie_word_embeddings", False)),
        context_length=context,
    )


def write_llama_like(spec: ModelSpec) -> dict[str, Any]:
    """The config fields that every llama-like family shares."""
    first, attention, feed_forward = usual_layer(spec)
    rotary = attention.position
    if not isinstance(rotary, Rotary):
        raise TypeError("its attention has no rotary positions")
    return {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": feed_forward.intermediate_size,
        "num_hidden_layers": len(spec.blocks),
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.kv_heads,
        "head_dim": attention.head_dim,
        "hidden_act": ACTIVATION_NAMES[feed_forward.activation],
        "max_position_embeddings": spec.context_length,
        "rms_norm_eps": first.attention_norm.eps,
        "tie_word_embeddings": spec.head.tied,
        **write_rotary(rotary),
    }


def read(config: ConfigReader) -> ModelSpec:
    """config.json -> tree."""
    bias = config.boolean("attention_bias", False)
    return read_llama_like(
        config,
        defaults=DEFAULTS,
        head_dim=config.optional_integer("head_dim"),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=config.boolean("mlp_bias", False),
    )


def write(spec: ModelSpec) -> dict[str, Any]:
    """Tree -> the config.json fields that describe it."""
    _, attention, feed_forward = usual_layer(spec)
    if spec.hidden_size % attention.heads:
        # Needless beside head_dim, but LlamaConfig.validate_architecture refuses it.
        raise CannotExpress(f"transformers' llama refuses {spec.hidden_size} wide with {attention.heads} heads")
    return {
        **write_llama_like(spec),
        "attention_bias": attention.qkv_bias,
        "mlp_bias": feed_forward.up_bias,
    }


DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}

B, T = "blocks.{layer}.", "model.layers.{layer}."

LEAVES: tuple[Leaf, ...] = (
    Leaf("model.embed_tokens.weight", "embedding.weight"),
    *(
        Leaf(f"{T}self_attn.{projection}.{suffix}", f"{B}attention.{projection}.{suffix}")
        for projection in ("q_proj", "k_proj", "v_proj", "o_proj")
        for suffix in ("weight", "bias")
    ),
    Leaf(T + "self_attn.q_norm.weight", B + "attention.q_norm.weight"),
    Leaf(T + "self_attn.k_norm.weight", B + "attention.k_norm.weight"),
    *(
        Leaf(f"{T}mlp.{projection}.{suffix}", f"{B}feed_forward.{projection}.{suffix}")
        for projection in ("gate_proj", "up_proj", "down_proj")
        for suffix in ("weight", "bias")
    ),
    Leaf(T + "input_layernorm.weight", B + "attention_norm.weight"),
    Leaf(T + "post_attention_layernorm.weight", B + "feed_forward_norm.weight"),
    Leaf("model.norm.weight", "final_norm.weight"),
    Leaf("lm_head.weight", "head.weight"),
)

LLAMA_DROPPED = (T + "self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq")

LLAMA = Architecture(
    name="llama",
    model_types=("llama",),
    hf_class="LlamaForCausalLM",
    hf_config="LlamaConfig",
    token_ids={"bos_token_id": 1, "eos_token_id": 2},
    read=read,
    write=write,
    leaves=LEAVES,
    prefix="model.",
    dropped=LLAMA_DROPPED,
)
