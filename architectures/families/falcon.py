"""Falcon in its forms: 7b (MQA, parallel, one norm), 40b (grouped heads, parallel, two norms), 11b (one norm), rw
(ALiBi, serial). Old checkpoints say RefinedWeb (40b) or RefinedWebModel (7b, rw).

Source: transformers models/falcon/{configuration,modeling}_falcon.py. One layout serves all fused q-k-v tensors.
Linears multiply and then add the bias, rounding twice; scores are divided by sqrt(head_dim); ALiBi is rounded to
bfloat16 even in fp32. transformers' eager path adds ALiBi twice (transformers issues 29067 and 29946), so ALiBi
models are verified against sdpa alone.
"""

from __future__ import annotations

from typing import Any

from ...components import ALiBi, Attention, Biasing, Block, Embedding, FeedForward, Head, LayerNorm, ModelSpec, Rotary
from ..base import Architecture, Leaf, layer, qkv, usual_layer
from ..config import ConfigReader
from ..obstacles import of_kind
from ..rope import ROTARY, read_rotary, write_rotary
from .bloom import GROUPED_BIAS, GROUPED_WEIGHT
from .gpt2 import ACTIVATIONS, name_of


def read(config: ConfigReader) -> ModelSpec:
    """config.json -> tree."""
    hidden = config.integer("hidden_size", 4544)
    heads = config.integer("num_attention_heads", 71)
    layers = config.layers("num_hidden_layers", 32)
    vocab = config.integer("vocab_size", 65024)
    context = config.integer("max_position_embeddings", 2048)
    if hidden % heads:
        raise config.fail("hidden_size", hidden, f"a multiple of num_attention_heads ({heads})")
    head_dim = hidden // heads
    if config.optional_integer("head_dim") not in (None, head_dim):
        raise config.fail("head_dim", config.raw("head_dim"), f"{head_dim}, hidden_size by num_attention_heads")
    # transformers ignores the two flags below in the new architecture for heads, but reads parallel_attn for norms.
    grouped = config.boolean("new_decoder_architecture", config.data.get("model_type") == "RefinedWeb")
    multi_query = config.boolean("multi_query", True)
    parallel = config.boolean("parallel_attn", True)
    stated = config.optional_integer("num_kv_heads")
    kv_heads = (stated or heads) if grouped else (1 if multi_query else heads)
    if not grouped and not multi_query and stated not in (None, heads):
        raise config.fail("num_kv_heads", stated, f"{heads} (num_attention_heads) without the new decoder architecture")
    if grouped and not parallel:
        raise config.fail("parallel_attn", parallel, "true with the new decoder architecture")
    norms = config.raw("num_ln_in_parallel_attn")
    if norms not in (None, 1, 2):
        raise config.fail("num_ln_in_parallel_attn", norms, "1, 2 or null")
    two_norms = grouped and norms != 1
    if norms == 2 and not grouped and parallel:
        raise config.fail("num_ln_in_parallel_attn", norms, "1 or null without the new decoder architecture")
    bias = config.boolean("bias", False)
    alibi = config.boolean("alibi", False)
    # With ALiBi these fields say nothing, and heads may be odd.
    rotary = read_rotary(config, head_dim + head_dim % 2 if alibi else head_dim, context)
    norm = LayerNorm(size=hidden, eps=config.number("layer_norm_epsilon", 1e-5))
    block = layer(
        norm,
        Attention(
            hidden_size=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            position=ALiBi(scaled=True, rounding="bfloat16") if alibi else rotary,
            qkv_bias=bias,
            output_bias=bias,
            arithmetic="matmul_add",
            scaling="divide",
            kv_expansion="projection" if grouped else "broadcast",
            fused=True,
            softmax="input",
        ),
        norm if two_norms or not parallel else None,
        FeedForward(
            hidden_size=hidden,
            intermediate_size=config.optional_integer("ffn_hidden_size") or 4 * hidden,
            activation=config.choice("activation", "gelu", ACTIVATIONS),
            up_bias=bias,
            down_bias=bias,
            arithmetic="matmul_add",
        ),
        parallel=parallel,
    )
    return ModelSpec(
        embedding=Embedding(vocab_size=vocab, hidden_size=hidden),
        blocks=(block,) * layers,
        final_norm=norm,
        head=Head(vocab_size=vocab, hidden_size=hidden, tied=config.boolean("tie_word_embeddings", True)),
        context_length=context,
    )


def write(spec: ModelSpec) -> dict[str, Any]:
    """Tree -> the config.json fields that describe it."""
    first, attention, feed_forward = usual_layer(spec)
    grouped = attention.kv_expansion == "projection" or attention.kv_heads not in (1, attention.heads)
    alibi = isinstance(attention.position, Biasing)
    return {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "num_hidden_layers": len(spec.blocks),
        "num_attention_heads": attention.heads,
        "num_kv_heads": attention.kv_heads,
        "new_decoder_architecture": grouped,
        "multi_query": not grouped and attention.kv_heads == 1,
        "parallel_attn": first.parallel or grouped,
        "num_ln_in_parallel_attn": (2 if first.feed_forward_norm is not None else 1) if grouped else None,
        "alibi": alibi,
        "bias": attention.qkv_bias,
        "ffn_hidden_size": feed_forward.intermediate_size,
        "activation": name_of(feed_forward.activation),
        "layer_norm_epsilon": first.attention_norm.eps,
        "max_position_embeddings": spec.context_length,
        "tie_word_embeddings": spec.head.tied,
        **({} if alibi else write_rotary(of_kind(attention.position, Rotary))),
    }


def two_parallel_norms(block: Block) -> bool:
    """40b: attention and feed-forward side by side, each behind its own norm."""
    return block.parallel and block.feed_forward_norm is not None


def other_norms(block: Block) -> bool:
    """7b and 11b share one norm; rw has two in a row."""
    return not two_parallel_norms(block)


B, T = "blocks.{layer}.", "transformer.h.{layer}."

FALCON = Architecture(
    name="falcon",
    model_types=("falcon", "RefinedWeb", "RefinedWebModel"),
    hf_class="FalconForCausalLM",
    hf_config="FalconConfig",
    kinds=frozenset({LayerNorm, ALiBi, Attention, FeedForward, *ROTARY}),
    token_ids={"bos_token_id": 11, "eos_token_id": 11},
    read=read,
    write=write,
    config_aliases={
        "hidden_size": ("n_embed",),
        "num_hidden_layers": ("n_layer",),
        "num_attention_heads": ("n_head",),
        "num_kv_heads": ("n_head_kv",),
    },
    foreign_fields=("n_layer", "n_head", "n_head_kv"),
    prefix="transformer.",
    leaves=(
        Leaf("transformer.word_embeddings.weight", "embedding.weight"),
        Leaf(T + "self_attention.query_key_value.weight", qkv("weight"), GROUPED_WEIGHT),
        Leaf(T + "self_attention.query_key_value.bias", qkv("bias"), GROUPED_BIAS),
        *(
            Leaf(f"{T}{there}.{suffix}", f"{B}{here}.{suffix}")
            for there, here in (
                ("self_attention.dense", "attention.o_proj"),
                ("mlp.dense_h_to_4h", "feed_forward.up_proj"),
                ("mlp.dense_4h_to_h", "feed_forward.down_proj"),
            )
            for suffix in ("weight", "bias")
        ),
        *(
            Leaf(f"{T}{there}.{suffix}", f"{B}{here}.{suffix}", when=when)
            for there, here, when in (
                # The second norm is the first that transformers makes.
                ("post_attention_layernorm", "feed_forward_norm", other_norms),
                ("input_layernorm", "attention_norm", other_norms),
                ("ln_attn", "attention_norm", two_parallel_norms),
                ("ln_mlp", "feed_forward_norm", two_parallel_norms),
            )
            for suffix in ("weight", "bias")
        ),
        Leaf("transformer.ln_f.weight", "final_norm.weight"),
        Leaf("transformer.ln_f.bias", "final_norm.bias"),
        Leaf("lm_head.weight", "head.weight"),
    ),
    dropped=(T + "self_attention.rotary_emb.inv_freq", T + "self_attention.maybe_rotary.inv_freq"),
    irrelevant={"apply_residual_connection_post_layernorm": "not read by transformers"},
    reference=lambda spec: ("sdpa",) if isinstance(spec.blocks[0].attention.position, Biasing) else ("sdpa", "eager"),
    reference_quirk="transformers' eager falcon adds ALiBi twice (transformers issues 29067 and 29946)",
)
