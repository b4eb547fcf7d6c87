"""VaultGemma (2510.15001): Gemma 2 without the norms after its sub-layers.

Source: transformers models/vaultgemma/{configuration,modeling}_vaultgemma.py.
"""

from ..base import leaves_of, only_eager
from ..config import ConfigReader
from ..decoder import DecoderFamily
from ..fields import PRE, Field
from ..lenses import sliding
from ..usual import ATTENTION, EMBEDDING, ENDS, FEED_FORWARD, B, T
from .gemma import FIXED, GEMMA_IDS, LATER_FIELDS

_DECODER = DecoderFamily(
    {**LATER_FIELDS, "attn_logit_softcapping": Field("attention.cap", 50.0, ConfigReader.optional_number)},
    norms=PRE,
    fixed=FIXED,
    layers=sliding(2),
    whole_heads=True,
)
_NORMS = {T + "input_layernorm": B + "attention_norm", T + "pre_feedforward_layernorm": B + "feed_forward_norm"}

VAULTGEMMA = _DECODER.architecture(
    "vaultgemma",
    "VaultGemmaForCausalLM",
    leaves_of({**EMBEDDING, **ATTENTION, **FEED_FORWARD, **_NORMS, **ENDS}),
    released="2025-09",
    token_ids=GEMMA_IDS,
    irrelevant={"cache_implementation": "generation", "hidden_act": "transformers reads hidden_activation instead"},
    **only_eager("no fused attention kernel caps scores, and transformers has no sdpa path for vaultgemma"),
)
