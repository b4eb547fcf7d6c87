"""HyperCLOVA X SEED Think (Naver 2025): Granite with norms also after each sub-layer, and multiplied logits.

Source: transformers models/hyperclovax/{configuration,modeling}_hyperclovax.py.
"""

from ..base import leaves_of
from ..config import ConfigReader
from ..decoder import DecoderFamily
from ..fields import AROUND, PRE, Field
from ..usual import ATTENTION, EMBEDDING, ENDS, FEED_FORWARD, B, T
from . import granite

_DECODER = DecoderFamily(
    {
        **granite.DECODER.fields,
        "attention_multiplier": Field("attention.scale", None, ConfigReader.optional_number),
        "logits_scaling": Field("head.multiplier", 1.0),
        "use_post_norm": Field("output_norms", True),
    },
    norms=lambda values: AROUND if values["output_norms"] else PRE,
    whole_heads=True,
)
_SANDWICH = {
    T + "input_layernorm": B + "attention_norm",
    T + "post_attention_layernorm": B + "feed_forward_norm",
    T + "post_norm1": B + "attention_output_norm",
    T + "post_norm2": B + "feed_forward_output_norm",
}

_HYPERCLOVAX = _DECODER.architecture(
    "hyperclovax",
    "HyperCLOVAXForCausalLM",
    leaves_of({**EMBEDDING, **ATTENTION, **FEED_FORWARD, **_SANDWICH, **ENDS}),
    released="2025-07",
    token_ids={"bos_token_id": 1, "eos_token_id": 2},
)
