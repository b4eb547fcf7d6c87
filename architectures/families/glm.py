"""GLM-4 9B (2406.12793): llama with RoPE on adjacent pairs in half of each head, biases on q, k and v, and gate and up
in one matrix.

Source: transformers models/glm/{configuration,modeling}_glm.py.
"""

from ..base import leaves_of
from ..decoder import DecoderFamily
from ..fields import Field, llama_fields
from ..rope import PART, RotaryKind
from ..usual import ATTENTION, EMBEDDING, ENDS, FUSED_FEED_FORWARD, NORMS

FIELDS = {
    **llama_fields(
        vocab=151552, intermediate=13696, layers=40, kv_heads=2, head_dim=128, context=131072, eps=1.5625e-7
    ),
    "attention_bias": Field("attention.qkv_bias", True),
}
FIXED = {"feed_forward.fused": True}
ROTARY = RotaryKind(part=PART, whole=0.5, pairs="adjacent")

_DECODER = DecoderFamily(FIELDS, fixed=FIXED, rotary=ROTARY)

_LEAVES = (*leaves_of({**EMBEDDING, **ATTENTION}), *FUSED_FEED_FORWARD, *leaves_of({**NORMS, **ENDS}))

_GLM = _DECODER.architecture(
    "glm",
    "GlmForCausalLM",
    _LEAVES,
    released="2024-06",
    token_ids={"eos_token_id": [151329, 151336, 151338], "pad_token_id": 151329},
)
