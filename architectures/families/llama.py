"""LLaMA (Touvron et al. 2302.13971) and what shares its tree: Mistral, Qwen2, Qwen3 build on `read_llama_like`.

Source: transformers models/llama/{configuration,modeling}_llama.py. Checkpoints are pure renames.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from ...components import (
    Activation,
    Attention,
    Block,
    Embedding,
    GatedFeedForward,
    Head,
    MixtureOfExperts,
    ModelSpec,
    RMSNorm,
    Rotary,
)
from ...errors import CannotExpress
from ..base import Architecture, Leaf, layer, usual_layer
from ..config import ConfigReader
from ..obstacles import Kinds, of_kind
from ..rope import DEFAULT_BASE, ROTARY, read_rotary, write_rotary
from .gpt2 import ACTIVATIONS, name_of

USUAL: Mapping[str, Any] = {
    "num_key_value_heads": None,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": DEFAULT_BASE,
    "tie_word_embeddings": False,
}
"""What most config classes take for absent keys."""


def read_llama_like(
    config: ConfigReader,
    *,
    defaults: Mapping[str, Any],
    head_dim: int | None = None,
    scale: float | None = None,
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    windows: Sequence[int | None] | None = None,
    rotary: Sequence[Rotary] | None = None,
    activation: str = "hidden_act",
    activations: Mapping[str, Activation] = ACTIVATIONS,
    mixture: Callable[[GatedFeedForward], MixtureOfExperts] | None = None,
    norms: Mapping[str, Any] | None = None,
    output_norms: bool = False,
    cap: float | None = None,
    embedding: Mapping[str, Any] | None = None,
    logit_cap: float | None = None,
) -> ModelSpec:
    """The tree of a llama-like config.

    Args:
        config: what is read.
        defaults: the config class' own for absent keys, where they are not `USUAL`.
        head_dim: the width of a head; None is hidden / heads.
        scale: the factor of scores; None is 1/√head_dim.
        qkv_bias: whether q, k and v have biases.
        output_bias: whether the output of attention has one.
        mlp_bias: whether the feed-forward has biases.
        qk_norm: whether every query and key head has a norm.
        windows: each layer's; None for none at all.
        rotary: each layer's positions; None reads those of a family whose layers all turn alike.
        activation: the field that names the activation.
        activations: what its names mean.
        mixture: makes experts of the feed-forward that the fields say.
        norms: fields of every norm beside its size and eps.
        output_norms: whether what a sub-layer gives is normed too.
        cap: of the scores.
        embedding: fields of the embedding beside its sizes.
        logit_cap: of the logits.
    """
    usual = {**USUAL, activation: USUAL["hidden_act"], **defaults}
    hidden, heads, context, vocab = (
        config.integer(name, usual[name])
        for name in ("hidden_size", "num_attention_heads", "max_position_embeddings", "vocab_size")
    )
    layers = config.layers("num_hidden_layers", usual["num_hidden_layers"])
    eps = config.number("rms_norm_eps", usual["rms_norm_eps"])
    kv_heads = config.optional_integer("num_key_value_heads", usual["num_key_value_heads"]) or heads
    if head_dim is None:
        if hidden % heads:
            raise config.fail("hidden_size", hidden, f"a multiple of num_attention_heads ({heads})")
        head_dim = hidden // heads
    positions = rotary or (read_rotary(config, head_dim, context, usual["rope_theta"]),) * layers
    norm = RMSNorm(size=hidden, eps=eps, **(norms or {}))
    head_norm = RMSNorm(size=head_dim, eps=eps, **(norms or {})) if qk_norm else None
    dense = GatedFeedForward(
        hidden_size=hidden,
        intermediate_size=config.integer("intermediate_size", usual["intermediate_size"]),
        activation=config.choice(activation, usual[activation], activations),
        up_bias=mlp_bias,
        down_bias=mlp_bias,
    )
    feed_forward = dense if mixture is None else mixture(dense)
    tied = config.boolean("tie_word_embeddings", usual["tie_word_embeddings"])
    if config.outer is not None:  # of a composite model it is the whole that says so
        tied = config.outer.boolean("tie_word_embeddings", tied)

    @cache
    def block(window: int | None, position: Rotary) -> Block:
        attention = Attention(
            hidden_size=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5 if scale is None else scale,
            position=position,
            window=window,
            q_norm=head_norm,
            k_norm=head_norm,
            qkv_bias=qkv_bias,
            output_bias=output_bias,
            cap=cap,
        )
        found = layer(norm, attention, norm, feed_forward)
        return found.replaced(attention_output_norm=norm, feed_forward_output_norm=norm) if output_norms else found

    return ModelSpec(
        embedding=Embedding(vocab_size=vocab, hidden_size=hidden, **(embedding or {})),
        blocks=tuple(map(block, windows or (None,) * layers, positions)),
        final_norm=norm,
        head=Head(vocab_size=vocab, hidden_size=hidden, tied=tied, cap=logit_cap),
        context_length=context,
    )


def write_llama_like(spec: ModelSpec, feed_forward: GatedFeedForward | None = None) -> dict[str, Any]:
    """The config fields that every llama-like family shares. `feed_forward`: an expert, where there are such."""
    first = spec.blocks[0]
    attention = of_kind(first.attention, Attention)
    inner = feed_forward or of_kind(first.feed_forward, GatedFeedForward)
    return {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": inner.intermediate_size,
        "num_hidden_layers": len(spec.blocks),
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.kv_heads,
        "head_dim": attention.head_dim,
        "hidden_act": name_of(inner.activation),
        "max_position_embeddings": spec.context_length,
        "rms_norm_eps": first.attention_norm.eps,
        "tie_word_embeddings": spec.head.tied,
        **write_rotary(of_kind(attention.position, Rotary)),
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
    return {**write_llama_like(spec), "attention_bias": attention.qkv_bias, "mlp_bias": feed_forward.up_bias}


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

LLAMA_KINDS: Kinds = frozenset({RMSNorm, Attention, GatedFeedForward, *ROTARY})
LLAMA_DROPPED = (T + "self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq")

LLAMA = Architecture(
    name="llama",
    model_types=("llama",),
    hf_class="LlamaForCausalLM",
    hf_config="LlamaConfig",
    kinds=LLAMA_KINDS,
    token_ids={"bos_token_id": 1, "eos_token_id": 2},
    read=read,
    write=write,
    leaves=LEAVES,
    prefix="model.",
    dropped=LLAMA_DROPPED,
)
