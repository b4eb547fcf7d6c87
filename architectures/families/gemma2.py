"""Gemma 2 (2408.00118): Gemma with norms before and after each sub-layer, capped scores and logits, and a window in
every second layer.

transformers has no sdpa path for this family, since no sdpa kernel caps scores.

Source: transformers models/gemma2/{configuration,modeling}_gemma2.py.
"""

from ..base import only_eager
from ..config import ConfigReader
from ..decoder import DecoderFamily
from ..fields import AROUND, Field
from ..lenses import sliding
from ..usual import SANDWICH_LEAVES
from .gemma import BIDIRECTIONAL, FIXED, GEMMA_IDS, LATER_FIELDS

_DECODER = DecoderFamily(
    {**LATER_FIELDS, "attn_logit_softcapping": Field("attention.cap", 50.0, ConfigReader.optional_number)},
    norms=AROUND,
    fixed=FIXED,
    layers=sliding(2),
    whole_heads=True,
)

GEMMA2 = _DECODER.architecture(
    "gemma2",
    "Gemma2ForCausalLM",
    SANDWICH_LEAVES,
    released="2024-06",
    token_ids=GEMMA_IDS,
    irrelevant={"cache_implementation": "generation", "hidden_act": "transformers reads hidden_activation instead"},
    refused=BIDIRECTIONAL,
    **only_eager("no fused attention kernel caps scores, and transformers has no sdpa path for gemma2"),
)
