"""OLMo 1 (2402.00838): llama with LayerNorms without weight and bias, and clipped queries, keys and values.

Source: transformers models/olmo/{configuration,modeling}_olmo.py.
"""

from ...components import LayerNorm
from ..config import ConfigReader
from ..decoder import DecoderFamily
from ..fields import ATTENTION_BIAS, Field, llama_fields
from ..rope import RotaryKind
from ..usual import LEAVES

FIELDS = {**llama_fields(vocab=50304), "attention_bias": ATTENTION_BIAS}

_DECODER = DecoderFamily(
    {
        **{name: field for name, field in FIELDS.items() if name != "rms_norm_eps"},
        "clip_qkv": Field("attention.clip", None, ConfigReader.optional_number),
    },
    norm=LayerNorm,
    fixed={"eps": 1e-5, "norm.gain": "none", "norm.bias": False, "norm.cast": "float32 kernel"},
    rotary=RotaryKind(rounding="result"),
)

_OLMO = _DECODER.architecture(
    "olmo", "OlmoForCausalLM", LEAVES, released="2024-02", token_ids={"eos_token_id": 50279, "pad_token_id": 1}
)
