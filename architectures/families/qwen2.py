"""Qwen2 and Qwen2.5 (2407.10671): llama with biases on q, k and v, and optionally a window in the upper layers.

Source: transformers models/qwen2/{configuration,modeling}_qwen2.py.
"""

from ..decoder import DecoderFamily
from ..fields import llama_fields
from ..lenses import windows_above
from ..usual import LEAVES

FIELDS = llama_fields(vocab=151936, intermediate=22016, kv_heads=32, context=32768)


# transformers' Qwen2Config has no head_dim, but its model uses one if config.json has it.
_DECODER = DecoderFamily(FIELDS, fixed={"attention.qkv_bias": True}, layers=windows_above())

# the same in Qwen2VLTextConfig and Qwen2_5_VLTextConfig
_VISION = {
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_window_layers": 80,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}

_QWEN2 = _DECODER.architecture(
    "qwen2",
    "Qwen2ForCausalLM",
    LEAVES,
    released="2024-01",
    texts=dict.fromkeys(("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"), _VISION),
    irrelevant={"use_mrope": "multimodal positions, off in text models"},
)
