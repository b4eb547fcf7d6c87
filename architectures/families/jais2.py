"""Jais 2 (Inception 2025): llama with LayerNorms, biases everywhere, and a plain feed-forward with squared ReLU.

Source: transformers models/jais2/{configuration,modeling}_jais2.py.
"""

from ...components import FeedForward, LayerNorm
from ..decoder import DecoderFamily
from ..fields import Field, llama_fields
from ..usual import LEAVES

_FIELDS = llama_fields(vocab=150272, hidden=3328, intermediate=26624, heads=26, activation="relu2", context=8192)
_DECODER = DecoderFamily(
    {
        **{"layer_norm_eps" if name == "rms_norm_eps" else name: field for name, field in _FIELDS.items()},
        "layer_norm_eps": Field("eps", 1e-5),
        "attention_bias": Field("attention.qkv_bias attention.output_bias", True),
        "mlp_bias": Field("feed_forward.up_bias feed_forward.down_bias", True),
    },
    norm=LayerNorm,
    inner=FeedForward,
    whole_heads=True,
)

_JAIS2 = _DECODER.architecture(
    "jais2", "Jais2ForCausalLM", LEAVES, released="2025-12", token_ids={"bos_token_id": 0, "eos_token_id": 150024}
)
