"""Mixtral (Jiang et al. 2401.04088): mistral with a mixture of experts for a feed-forward.

Source: transformers models/mixtral/{configuration,modeling}_mixtral.py. Checkpoints have a tensor for every expert's
w1 (gate), w2 (down) and w3 (up), as transformers 4 had modules; since 5.0 its modules hold all experts' gate and up in
one parameter, and the same files are written (conversion_mapping.py). An absent `sliding_window` means none here.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ...components import GatedFeedForward, MixtureOfExperts, ModelSpec
from ..base import Architecture, Leaf, Stacked
from ..config import ConfigReader
from ..obstacles import of_kind
from . import mistral
from .llama import LLAMA_DROPPED, LLAMA_KINDS, B, T, read_llama_like, write_llama_like

DEFAULTS = {**mistral.DEFAULTS, "rms_norm_eps": 1e-5, "rope_theta": 1e6}
MOST_EXPERTS = 1024
"""As many as a tree may have."""


def read(config: ConfigReader) -> ModelSpec:
    """config.json -> tree."""
    window = config.optional_integer("sliding_window")
    experts = config.integer("num_local_experts", 8, most=MOST_EXPERTS)
    top_k = config.integer("num_experts_per_tok", 2)
    if top_k > experts:
        raise config.fail("num_experts_per_tok", top_k, f"at most num_local_experts ({experts})")

    def mixture(dense: GatedFeedForward) -> MixtureOfExperts:
        expert = msgspec.structs.replace(dense, fused=True)
        return MixtureOfExperts(hidden_size=dense.hidden_size, experts=experts, top_k=top_k, expert=expert)

    return read_llama_like(
        config,
        defaults=DEFAULTS,
        head_dim=config.optional_integer("head_dim"),
        windows=(window,) * config.layers("num_hidden_layers", int(DEFAULTS["num_hidden_layers"])),
        mixture=mixture,
    )


def write(spec: ModelSpec) -> dict[str, Any]:
    """Tree -> the config.json fields that describe it."""
    first = spec.blocks[0]
    mixture = of_kind(first.feed_forward, MixtureOfExperts)
    return {
        **write_llama_like(spec, of_kind(mixture.expert, GatedFeedForward)),
        "sliding_window": first.attention.window,
        "num_local_experts": mixture.experts,
        "num_experts_per_tok": mixture.top_k,
    }


MOE, EXPERT = T + "block_sparse_moe.", T + "block_sparse_moe.experts.{expert}."

# In the order in which transformers writes them: its modules' names sorted, each parameter of all experts taken apart.
LEAVES: tuple[Leaf, ...] = (
    Leaf("lm_head.weight", "head.weight"),
    Leaf("model.embed_tokens.weight", "embedding.weight"),
    Leaf(T + "input_layernorm.weight", B + "attention_norm.weight"),
    Leaf(EXPERT + "w2.weight", B + "feed_forward.experts.{expert}.down_proj.weight"),
    Leaf(EXPERT + "w1.weight", B + "feed_forward.experts.{expert}.gate_proj.weight"),
    Leaf(EXPERT + "w3.weight", B + "feed_forward.experts.{expert}.up_proj.weight"),
    Leaf(MOE + "gate.weight", B + "feed_forward.router.weight"),
    Leaf(T + "post_attention_layernorm.weight", B + "feed_forward_norm.weight"),
    *(
        Leaf(f"{T}self_attn.{projection}.weight", f"{B}attention.{projection}.weight")
        for projection in ("k_proj", "o_proj", "q_proj", "v_proj")
    ),
    Leaf("model.norm.weight", "final_norm.weight"),
)

MIXTRAL = Architecture(
    name="mixtral",
    model_types=("mixtral",),
    hf_class="MixtralForCausalLM",
    hf_config="MixtralConfig",
    kinds=LLAMA_KINDS | {MixtureOfExperts},
    token_ids={"bos_token_id": 1, "eos_token_id": 2},
    read=read,
    write=write,
    leaves=LEAVES,
    config_aliases={"num_local_experts": ("num_experts",)},
    prefix="model.",
    dropped=LLAMA_DROPPED,
    stacked=(
        Stacked(T + "mlp.gate.weight", (MOE + "gate.weight",)),
        Stacked(T + "mlp.experts.gate_up_proj", (EXPERT + "w1.weight", EXPERT + "w3.weight")),
        Stacked(T + "mlp.experts.down_proj", (EXPERT + "w2.weight",)),
    ),
    irrelevant={
        "output_router_logits": "output format",
        "router_aux_loss_coef": "training only",
        "router_jitter_noise": "training only",
    },
)
