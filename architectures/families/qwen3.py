"""Qwen3 (2505.09388), dense: llama with an RMSNorm on every query and key head, and a head_dim that does not depend on
the hidden size.

Source: transformers models/qwen3/{configuration,modeling}_qwen3.py.
"""

from ..decoder import DecoderFamily
from ..fields import ATTENTION_BIAS, with_defaults
from ..lenses import windows_above
from ..usual import LEAVES
from .qwen2 import FIELDS

_DECODER = DecoderFamily(
    {**with_defaults(FIELDS, head_dim=128), "attention_bias": ATTENTION_BIAS}, head_norms="same", layers=windows_above()
)

_QWEN3 = _DECODER.architecture(
    "qwen3",
    "Qwen3ForCausalLM",
    LEAVES,
    released="2025-04",
    texts={
        "qwen3_vl_text": {
            "max_position_embeddings": 128000,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        }
    },
)
