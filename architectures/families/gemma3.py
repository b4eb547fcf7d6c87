"""Gemma 3 (2503.19786), its text model: Gemma 2 with norms on query and key heads in the place of caps on scores, a
window in five layers of six, and rotary positions of their own in either kind of layer.

Source: transformers models/gemma3/{configuration,modeling}_gemma3.py. Of a checkpoint with a vision tower the language
model is read; what stands beside it is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...components import Attention, ModelSpec, Rotary
from ..base import Architecture
from ..config import ConfigReader
from ..decoder import Decoder, sliding, with_defaults, write_sliding
from ..obstacles import of_kind
from ..rope import RotaryKind, read_rotaries, write_rotaries
from . import gemma2
from .gemma import BIDIRECTIONAL, FIXED, GEMMA_IDS
from .gemma2 import NORMS, SANDWICH_LEAVES
from .llama import LLAMA_DROPPED

FIELDS = with_defaults(gemma2.FIELDS, vocab_size=262208, max_position_embeddings=131072, final_logit_softcapping=None)
KINDS = {"full_attention": RotaryKind(1e6), "sliding_attention": RotaryKind(1e4, "rope_local_base_freq", scaled=False)}


def layers(config: ConfigReader, count: int, head_dim: int) -> Sequence[Mapping[str, Any]]:
    """Each layer's window, and the positions of its kind."""
    windows = sliding(config.integer("sliding_window_pattern", 6))(config, count, head_dim)
    context = FIELDS["max_position_embeddings"].value(config, "max_position_embeddings")
    full, sliced = read_rotaries(config, head_dim, context, KINDS).values()
    return [{**each, "position": full if each["window"] is None else sliced} for each in windows]


def written(spec: ModelSpec) -> dict[str, Any]:
    """The config fields of what differs by layer."""
    fields, first = write_sliding(spec), of_kind(spec.blocks[0].attention, Attention)
    rotaries = {kind: Rotary(dim=first.head_dim, base=usual.base) for kind, usual in KINDS.items()}
    for block, kind in zip(spec.blocks, fields["layer_types"], strict=True):
        rotaries[kind] = of_kind(of_kind(block.attention, Attention).position, Rotary)
    return {**fields, **write_rotaries(rotaries)}


DECODER = Decoder(
    FIELDS, norms=NORMS, fixed=FIXED, rotary=None, head_norms="same", layers=layers, written=written, whole_heads=True
)

GEMMA3 = Architecture(
    name="gemma3_text",
    model_types=("gemma3_text", "gemma3"),
    hf_class="Gemma3ForCausalLM",
    hf_config="Gemma3TextConfig",
    kinds=DECODER.kinds,
    token_ids=GEMMA_IDS,
    read=DECODER.read,
    write=DECODER.write,
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
