"""Trees that no family of checkpoints has, and any tree with all of its parameters random."""

from collections.abc import Mapping
from typing import Any

import msgspec
import torch
from torch import Tensor

from gptkit.analysis.activations import Kernel
from gptkit.components import (
    ALiBi,
    Attention,
    FeedForward,
    GatedFeedForward,
    LatentAttention,
    LinearAttention,
    MixtureOfExperts,
    ModelSpec,
    RMSNorm,
    Rotary,
)
from gptkit.modules import Decoder
from gptkit.parity.score import random_parameter
from helpers.families import CONFIGS, spec_of

replace = msgspec.structs.replace

HIDDEN = 48
LATENT = LatentAttention(hidden_size=HIDDEN, heads=4, kv_rank=20, nope_dim=8, value_dim=12, scale=0.3)
"""Without positions."""
ROPE = {"position": Rotary(dim=6, base=1e4, pairs="adjacent"), "rope_heads": 1}
ATTENTIONS: dict[str, LatentAttention] = {
    "plain": LATENT,
    "biases": replace(LATENT, qkv_bias=True, output_bias=True),
    "deepseek": replace(LATENT, **ROPE, kv_norm=RMSNorm(size=20, eps=1e-6)),
    "low-queries": replace(
        LATENT, **ROPE, q_rank=18, q_norm=RMSNorm(size=18, eps=1e-5), kv_bias=True, fused=True, gathered=True
    ),
    "biases-rope": replace(LATENT, **ROPE, kv_norm=RMSNorm(size=20, eps=1e-5), qkv_bias=True, output_bias=True),
    "two-keys": replace(LATENT, position=Rotary(dim=8, base=1e4), rope_heads=2, window=11),
    "positions-alone": replace(LATENT, position=Rotary(dim=8, base=1e4), rope_heads=2, nope_dim=0),
    "alibi": replace(LATENT, position=ALiBi(), window=9),
    "alibi-scaled": replace(LATENT, position=ALiBi(scaled=True)),
}
LINEAR = LinearAttention(
    hidden_size=HIDDEN,
    heads=4,
    kv_heads=2,
    head_dim=8,
    scale=0.3,
    position=Rotary(dim=6, base=1e4),
    q_norm=RMSNorm(size=8, eps=1e-5),
    k_norm=RMSNorm(size=8, eps=1e-5),
    qkv_bias=True,
    output_bias=True,
)
GATED = GatedFeedForward(hidden_size=HIDDEN, intermediate_size=40, activation="silu")
PLAIN = FeedForward(hidden_size=HIDDEN, intermediate_size=40, activation="gelu", up_bias=True, down_bias=True)
EXPERTS: dict[str, MixtureOfExperts] = {
    "gated": MixtureOfExperts(hidden_size=HIDDEN, experts=5, top_k=2, expert=GATED),
    "gated-fused": MixtureOfExperts(hidden_size=HIDDEN, experts=5, top_k=2, expert=replace(GATED, fused=True)),
    "gated-biases": MixtureOfExperts(
        hidden_size=HIDDEN, experts=3, top_k=1, expert=replace(GATED, up_bias=True, down_bias=True), normalise=False
    ),
    "plain": MixtureOfExperts(hidden_size=HIDDEN, experts=4, top_k=3, expert=PLAIN, normalise=False),
    "all": MixtureOfExperts(hidden_size=HIDDEN, experts=2, top_k=2, expert=GATED, normalise=False),
    "one": MixtureOfExperts(hidden_size=HIDDEN, experts=1, top_k=1, expert=GATED),
}


def with_blocks(spec: ModelSpec, **changes: Any) -> ModelSpec:
    """The tree with fields of all of its blocks changed."""
    return replace(spec, blocks=tuple(block.replaced(**changes) for block in spec.blocks))


def trees() -> dict[str, ModelSpec]:
    """A tree with every kind of latent attention and of experts, and one with both."""
    llama = replace(spec_of(CONFIGS["llama-2"]), context_length=256)
    found = {f"latent-{name}": with_blocks(llama, attention=each) for name, each in ATTENTIONS.items()}
    found |= {f"experts-{name}": with_blocks(llama, feed_forward=each) for name, each in EXPERTS.items()}
    found["both"] = with_blocks(llama, attention=ATTENTIONS["deepseek"], feed_forward=EXPERTS["gated"])
    first, *others = llama.blocks
    linear = replace(first.sublayers[0], mixer=LINEAR)
    found["linear"] = replace(llama, blocks=(replace(first, sublayers=(linear, first.sublayers[1])), *others))
    found["rotary-adjacent"] = with_blocks(llama, attention=adjacent(llama.blocks[0].attention))
    return found


def adjacent(attention: Attention | LatentAttention) -> Attention:
    """The attention with neighbours for rotary pairs."""
    assert isinstance(attention, Attention)
    assert isinstance(attention.position, Rotary)
    return replace(attention, position=replace(attention.position, pairs="adjacent"))


def of_chosen(spec: ModelSpec) -> ModelSpec:
    """The tree whose experts are given the tokens alone that chose them, which is what is counted of any."""
    tree: ModelSpec = spec.mapped(
        lambda node, _: (
            msgspec.structs.replace(node, summed="by token") if getattr(node, "summed", "") == "over all" else node
        )
    )
    return tree


def random_weights(spec: ModelSpec, seed: int = 0) -> dict[str, Tensor]:
    """All parameters of a tree in fp64, none at what initialisation leaves."""
    generator = torch.Generator().manual_seed(seed)
    empty = {each.name: torch.empty(each.shape, dtype=torch.float64) for each in spec.parameters()}
    return {name: random_parameter(name, tensor, generator) for name, tensor in empty.items()}


def filled(
    spec: ModelSpec, weights: Mapping[str, Tensor], dtype: torch.dtype = torch.float64, attention: Kernel = "sdpa"
) -> Decoder:
    """The tree as a module in eval mode."""
    decoder = Decoder(spec, attention).to(dtype).eval()
    decoder.load_state_dict(dict(weights))
    return decoder


TREES = trees()
