"""Gemma 4's text model without experts and without the additional layer inputs, as in the 12B (Google 2026). This model
has no towers for images and sound, which are direct inputs.

gptkit reads the language model of checkpoints with embeddings of images and sound. `use_bidirectional_attention`
"vision" only affects images.

Source: transformers models/gemma4_unified/{configuration,modeling}_gemma4_unified.py.
"""

from dataclasses import replace
from functools import partial

from ...components import BlockScale
from ..fields import with_defaults
from ..lenses import Lens
from ..rope import ROTARY
from . import gemma4
from .gemma4 import CAUSAL, LEAVES, OF_TOWERS, UNUSED

_DECODER = replace(
    gemma4.DECODER,
    fields=with_defaults(gemma4.DECODER.fields, context=262144),
    layers=Lens(partial(gemma4.layers, width=1024), gemma4.written, gemma4.draw_layers),
)

GEMMA4_UNIFIED = _DECODER.architecture(
    "gemma4_unified_text",
    "Gemma4UnifiedForCausalLM",
    LEAVES,
    released="2026-04",
    model_types=("gemma4_unified_text", "gemma4_unified"),
    hf_config="Gemma4UnifiedTextConfig",
    kinds=_DECODER.kinds | {*ROTARY, BlockScale},
    read=lambda config: gemma4.scaled(config, _DECODER.read(config)),
    token_ids=gemma4.GEMMA4.token_ids,
    part="text_config",
    renamed=(("model.language_model.", "model."),),
    carried={
        "vision": ("model.embed_vision.", "model.vision_embedder."),
        "audio": ("model.embed_audio.",),
        "unused": UNUSED,
    },
    irrelevant=OF_TOWERS,
    refused=CAUSAL,
)
