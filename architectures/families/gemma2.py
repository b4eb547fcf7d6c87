"""Gemma 2 (2408.00118): Gemma with norms before and after each sub-layer, capped scores and logits, and a window in
every second layer.

Source: transformers models/gemma2/{configuration,modeling}_gemma2.py, which has no sdpa path: none caps scores.
"""

from ..config import ConfigReader
from ..decoder import Decoder
from ..fields import AROUND, Field, with_defaults
from ..lenses import sliding, write_sliding
from ..usual import SANDWICH_LEAVES
from . import gemma
from .gemma import BIDIRECTIONAL, FIXED, GEMMA_IDS


def _read_scale(config: ConfigReader, name: str, default: int) -> float:
    """The factor of scores of what it is the inverse root of."""
    return float(config.integer(name, default) ** -0.5)


FIELDS = {
    **with_defaults(
        {"hidden_activation" if name == "hidden_act" else name: each for name, each in gemma.FIELDS.items()},
        hidden_size=2304,
        intermediate_size=9216,
        num_hidden_layers=26,
        num_attention_heads=8,
        num_key_value_heads=4,
    ),
    "query_pre_attn_scalar": Field("attention.scale", 256, _read_scale, lambda scale: max(round(scale**-2), 1)),
    "final_logit_softcapping": Field("head.cap", 30.0, ConfigReader.optional_number),
}

DECODER = Decoder(
    {**FIELDS, "attn_logit_softcapping": Field("attention.cap", 50.0, ConfigReader.optional_number)},
    norms=AROUND,
    fixed=FIXED,
    layers=sliding(2),
    written=write_sliding,
    whole_heads=True,
)


GEMMA2 = DECODER.architecture(
    "gemma2",
    "Gemma2ForCausalLM",
    SANDWICH_LEAVES,
    released="2024-06",
    token_ids=GEMMA_IDS,
    irrelevant={"cache_implementation": "generation", "hidden_act": "transformers reads hidden_activation instead"},
    refused=BIDIRECTIONAL,
    reference=lambda _: ("eager",),
    reference_quirk="no fused kernel caps scores, and transformers has none for gemma2",
)
