"""Mixtral (Jiang et al. 2401.04088): mistral with a mixture of experts for a feed-forward.

Source: transformers models/mixtral/{configuration,modeling}_mixtral.py. Checkpoints have a tensor for every expert's
w1 (gate), w2 (down) and w3 (up), as transformers 4 had modules; since 5.0 its modules hold all experts' gate and up in
one parameter, and the same files are written (conversion_mapping.py). An absent `sliding_window` means none here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ...components import GatedFeedForward, MixtureOfExperts, ModelSpec
from ..base import Architecture, Leaf, Stacked
from ..config import ConfigReader
from ..decoder import Decoder, with_defaults
from ..obstacles import of_kind
from ..rope import RotaryKind
from . import mistral
from .llama import LLAMA_DROPPED, B, T

MOST_EXPERTS = 1024
"""As many as a tree may have."""


def mixtures(config: ConfigReader, layers: int, dense: GatedFeedForward) -> Sequence[MixtureOfExperts]:
    """Of every layer."""
    experts = config.integer("num_local_experts", 8, most=MOST_EXPERTS)
    top_k = config.integer("num_experts_per_tok", 2)
    if top_k > experts:
        raise config.fail("num_experts_per_tok", top_k, f"at most num_local_experts ({experts})")
    expert = msgspec.structs.replace(dense, fused=True)
    return (MixtureOfExperts(hidden_size=dense.hidden_size, experts=experts, top_k=top_k, expert=expert),) * layers


def routing(spec: ModelSpec) -> dict[str, Any]:
    """The config fields of the mixture."""
    mixture = of_kind(spec.blocks[0].feed_forward, MixtureOfExperts)
    return {"num_local_experts": mixture.experts, "num_experts_per_tok": mixture.top_k}


DECODER = Decoder(
    with_defaults(mistral.FIELDS, rms_norm_eps=1e-5, sliding_window=None),
    rotary=RotaryKind(1e6),
    feed_forwards=mixtures,
    written=routing,
)
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
    released="2023-12",
    model_types=("mixtral",),
    hf_class="MixtralForCausalLM",
    hf_config="MixtralConfig",
    kinds=DECODER.kinds | {MixtureOfExperts},
    token_ids={"bos_token_id": 1, "eos_token_id": 2},
    read=DECODER.read,
    write=DECODER.write,
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
