"""Gemma 3's text model (2503.19786): Gemma 2 with norms on query and key heads instead of capped scores. Five of six
layers have a window. The two kinds of layer have separate RoPE settings.

Conversions keep the tensors of a vision tower.

Source: transformers models/gemma3/{configuration,modeling}_gemma3.py.
"""

from ..decoder import DecoderFamily
from ..fields import AROUND, with_defaults
from ..lenses import rope_by_kind, sliding
from ..rope import RotaryKind
from ..usual import SANDWICH_LEAVES
from .gemma import BIDIRECTIONAL, FIXED, GEMMA_IDS, LATER_FIELDS

_FIELDS = with_defaults(LATER_FIELDS, vocab=262208, context=131072, final_logit_softcapping=None)
KINDS = {"full_attention": RotaryKind(1e6), "sliding_attention": RotaryKind(1e4, "rope_local_base_freq", scaled=False)}

_DECODER = DecoderFamily(
    _FIELDS,
    norms=AROUND,
    fixed=FIXED,
    rotary=None,
    head_norms="same",
    layers=rope_by_kind(sliding(6, pattern="sliding_window_pattern"), KINDS),
    whole_heads=True,
)

GEMMA3 = _DECODER.architecture(
    "gemma3_text",
    "Gemma3ForCausalLM",
    SANDWICH_LEAVES,
    released="2025-03",
    model_types=("gemma3_text", "gemma3"),
    hf_config="Gemma3TextConfig",
    token_ids=GEMMA_IDS,
    part="text_config",
    renamed=(
        ("language_model.model.", "model."),
        ("model.language_model.", "model."),
        ("language_model.lm_head.", "lm_head."),
    ),
    carried={
        "vision": ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
    },
    irrelevant={
        "cache_implementation": "generation",
        "hidden_act": "transformers reads hidden_activation instead",
        "_sliding_window_pattern": "transformers writes this field but reads layer_types instead",
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
