"""Gemma 3 (2503.19786), its text model: Gemma 2 with norms on query and key heads in the place of caps on scores, a
window in five layers of six, and rotary positions of their own in either kind of layer.

Source: transformers models/gemma3/{configuration,modeling}_gemma3.py. Of a checkpoint with a vision tower the language
model is read; what stands beside it is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...components import Attention, ModelSpec, Rotary
from ..base import Architecture
from ..config import ConfigReader
from ..obstacles import of_kind
from ..rope import RotaryKind, read_rotaries, write_rotaries
from .gemma import BIDIRECTIONAL, GEMMA_IDS
from .gemma2 import DEFAULTS as GEMMA2_DEFAULTS
from .gemma2 import SANDWICH_LEAVES, read_sandwich, write_sandwich
from .llama import LLAMA_DROPPED, LLAMA_KINDS

DEFAULTS: Mapping[str, Any] = {**GEMMA2_DEFAULTS, "vocab_size": 262208, "max_position_embeddings": 131072}
KINDS = {"full_attention": RotaryKind(1e6), "sliding_attention": RotaryKind(1e4, "rope_local_base_freq", scaled=False)}


def read(config: ConfigReader) -> ModelSpec:
    """config.json -> tree."""
    context = config.integer("max_position_embeddings", DEFAULTS["max_position_embeddings"])
    rotaries = read_rotaries(config, config.integer("head_dim", 256), context, KINDS)
    pattern = config.integer("sliding_window_pattern", 6)
    return read_sandwich(config, DEFAULTS, pattern, None, rotaries, qk_norm=True)


def write(spec: ModelSpec) -> dict[str, Any]:
    """Tree -> the config.json fields that describe it."""
    fields = write_sandwich(spec, "gemma3")
    del fields["rope_theta"], fields["rope_scaling"]
    size = of_kind(spec.blocks[0].attention, Attention).head_dim
    found = {kind: Rotary(dim=size, base=usual.base) for kind, usual in KINDS.items()}
    for block, kind in zip(spec.blocks, fields["layer_types"], strict=True):
        found[kind] = of_kind(of_kind(block.attention, Attention).position, Rotary)
    return {**fields, **write_rotaries(found)}


GEMMA3 = Architecture(
    name="gemma3_text",
    model_types=("gemma3_text", "gemma3"),
    hf_class="Gemma3ForCausalLM",
    hf_config="Gemma3TextConfig",
    kinds=LLAMA_KINDS,
    token_ids=GEMMA_IDS,
    read=read,
    write=write,
    leaves=SANDWICH_LEAVES,
    prefix="model.",
    part="text_config",
    renamed=(
        ("language_model.model.", "model."),
        ("model.language_model.", "model."),
        ("language_model.lm_head.", "lm_head."),
    ),
    outside=("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."),
    dropped=LLAMA_DROPPED,
    irrelevant={
        "cache_implementation": "generation",
        "hidden_act": "transformers goes by hidden_activation",
        "_sliding_window_pattern": "transformers' note; it goes by layer_types",
        **dict.fromkeys(
            (
                "vision_config",
                "mm_tokens_per_image",
                "boi_token_index",
                "eoi_token_index",
                "image_token_id",
                "image_token_index",
            ),
            "about images, which the language model does not read",
        ),
    },
    refused={
        **BIDIRECTIONAL,
        "attn_logit_softcapping": ((None,), "transformers' gemma3 reads a cap on scores and does not apply it"),
    },
)
