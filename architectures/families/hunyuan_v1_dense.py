"""Hunyuan dense (Tencent 2025): llama with norms on query and key heads after RoPE.

Source: transformers models/hunyuan_v1_dense/{configuration,modeling}_hunyuan_v1_dense.py.
"""

from ..base import leaves_of
from ..decoder import DecoderFamily
from ..fields import ATTENTION_BIAS, llama_fields
from ..rope import RotaryKind
from ..usual import ATTENTION, EMBEDDING, ENDS, FEED_FORWARD, NORMS, B, T

FIELDS = {**llama_fields(vocab=290943, eps=1e-5), "attention_bias": ATTENTION_BIAS}
ROTARY = RotaryKind(alpha=True)
FIXED = {"attention.norm_order": "after"}
_DECODER = DecoderFamily(FIELDS, head_norms="same", fixed=FIXED, rotary=ROTARY)

_HEADS = {
    **{name: ours for name, ours in ATTENTION.items() if not name.endswith("_norm")},
    T + "self_attn.query_layernorm": B + "attention.q_norm",
    T + "self_attn.key_layernorm": B + "attention.k_norm",
}
LEAVES = leaves_of({**EMBEDDING, **_HEADS, **FEED_FORWARD, **NORMS, **ENDS})

_HUNYUAN_V1_DENSE = _DECODER.architecture(
    "hunyuan_v1_dense",
    "HunYuanDenseV1ForCausalLM",
    LEAVES,
    released="2025-07",
    token_ids={"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    irrelevant={"eod_token_id": "generation"},
)
