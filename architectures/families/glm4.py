"""GLM-4 0414 (Zhipu 2025): GLM-4 9B with norms also after each sub-layer.

Source: transformers models/glm4/{configuration,modeling}_glm4.py.
"""

from ..base import leaves_of
from ..decoder import DecoderFamily
from ..fields import AROUND
from ..usual import ATTENTION, EMBEDDING, ENDS, FUSED_FEED_FORWARD, B, T
from . import glm

_DECODER = DecoderFamily(glm.FIELDS, norms=AROUND, fixed=glm.FIXED, rotary=glm.ROTARY)

_SANDWICH = {
    T + "input_layernorm": B + "attention_norm",
    T + "post_attention_layernorm": B + "feed_forward_norm",
    T + "post_self_attn_layernorm": B + "attention_output_norm",
    T + "post_mlp_layernorm": B + "feed_forward_output_norm",
}
_LEAVES = (*leaves_of({**EMBEDDING, **ATTENTION}), *FUSED_FEED_FORWARD, *leaves_of({**_SANDWICH, **ENDS}))

_GLM4 = _DECODER.architecture(
    "glm4",
    "Glm4ForCausalLM",
    _LEAVES,
    released="2025-04",
    token_ids={"eos_token_id": [151329, 151336, 151338], "pad_token_id": 151329},
)
