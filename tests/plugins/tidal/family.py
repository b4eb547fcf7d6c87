"""The family: config.json to tree and back, and what its checkpoints call the tensors."""

from __future__ import annotations

from typing import Any

from gptkit.architectures import Architecture, Leaf
from gptkit.architectures.config import ConfigReader
from gptkit.architectures.obstacles import of_kind
from gptkit.components import Attention, Block, Embedding, GatedFeedForward, Head, ModelSpec, Rotary, SubLayer

from .components import GatedRecurrence, ScaleNorm

__all__ = ["TIDAL"]


def read(config: ConfigReader) -> ModelSpec:
    """config.json -> tree."""
    hidden, heads = config.integer("hidden_size", 64), config.integer("num_attention_heads", 4)
    vocab, width = config.integer("vocab_size", 97), config.integer("recurrence_size", 96)
    if hidden % heads:
        raise config.fail("hidden_size", hidden, f"a multiple of num_attention_heads ({heads})")
    head_dim = hidden // heads
    norm = ScaleNorm(size=hidden, eps=config.number("norm_eps", 1e-5))
    rotary = Rotary(dim=head_dim, base=config.number("rope_theta", 10000.0))
    attention = Attention(
        hidden_size=hidden, heads=heads, kv_heads=heads, head_dim=head_dim, scale=head_dim**-0.5, position=rotary
    )
    recurrence = GatedRecurrence(hidden_size=hidden, width=width)
    inner = config.integer("intermediate_size", 128)
    feed_forward = GatedFeedForward(hidden_size=hidden, intermediate_size=inner, activation="silu")

    def block(mixer: Attention | GatedRecurrence) -> Block:
        return Block(sublayers=(SubLayer(mixer=mixer, norm=norm), SubLayer(mixer=feed_forward, norm=norm)))

    layers = config.layers("num_hidden_layers", 4)
    return ModelSpec(
        embedding=Embedding(vocab_size=vocab, hidden_size=hidden),
        blocks=tuple(block(recurrence if layer % 2 else attention) for layer in range(layers)),
        final_norm=norm,
        head=Head(vocab_size=vocab, hidden_size=hidden, tied=config.boolean("tie_word_embeddings", False)),
        context_length=config.integer("max_position_embeddings", 256),
    )


def write(spec: ModelSpec) -> dict[str, Any]:
    """Tree -> the config.json fields that describe it."""
    first, second = spec.blocks[0], spec.blocks[min(1, len(spec.blocks) - 1)]
    attention, recurrence = of_kind(first.mixer("attention"), Attention), second.mixer("recurrence")
    return {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": of_kind(first.feed_forward, GatedFeedForward).intermediate_size,
        "num_hidden_layers": len(spec.blocks),
        "num_attention_heads": attention.heads,
        "recurrence_size": 96 if recurrence is None else of_kind(recurrence, GatedRecurrence).width,
        "norm_eps": of_kind(spec.final_norm, ScaleNorm).eps,
        "rope_theta": of_kind(attention.position, Rotary).base,
        "max_position_embeddings": spec.context_length,
        "tie_word_embeddings": spec.head.tied,
    }


LAYER, BLOCK = "layers.{layer}.", "blocks.{layer}."

LEAVES = (
    Leaf("embed.weight", "embedding.weight"),
    Leaf(LAYER + "mixer_norm.g", BLOCK + "attention_norm.weight"),
    *(Leaf(f"{LAYER}attention.{name}.weight", f"{BLOCK}attention.{name}_proj.weight") for name in "qkvo"),
    Leaf(LAYER + "mixer_norm.g", BLOCK + "recurrence_norm.weight"),
    Leaf(LAYER + "recurrence.gate.weight", BLOCK + "recurrence.gate_proj.weight"),
    Leaf(LAYER + "recurrence.value.weight", BLOCK + "recurrence.in_proj.weight"),
    Leaf(LAYER + "recurrence.out.weight", BLOCK + "recurrence.out_proj.weight"),
    Leaf(LAYER + "mlp_norm.g", BLOCK + "feed_forward_norm.weight"),
    *(Leaf(f"{LAYER}mlp.{name}.weight", f"{BLOCK}feed_forward.{name}_proj.weight") for name in ("gate", "up", "down")),
    Leaf("norm.g", "final_norm.weight"),
    Leaf("lm_head.weight", "head.weight"),
)

TIDAL = Architecture(
    name="tidal",
    model_types=("tidal",),
    hf_class="TidalForCausalLM",
    hf_config="TidalConfig",
    kinds=frozenset({ScaleNorm, GatedRecurrence, Attention, Rotary, GatedFeedForward}),
    read=read,
    write=write,
    leaves=LEAVES,
    model="tidal.reference:build",
    reference=lambda spec: ("eager",),
)
