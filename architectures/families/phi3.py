"""Phi 3 and 4 (Microsoft 2404.14219, 2412.08905): llama with q, k and v in one tensor, gate and up in another, and
LongRoPE. Phi-4-mini rotates only a part of each head.

Older files name LongRoPE "su" or "yarn".

Source: transformers models/phi3/{configuration,modeling}_phi3.py.
"""

from ...components import Attention, GatedFeedForward, LongRopeScaling, RMSNorm, Rotary
from ..base import Leaf, leaves_of, qkv
from ..config import ConfigReader
from ..decoder import DecoderFamily
from ..fields import Field, llama_fields
from ..layout import Layout
from ..rope import PART, RotaryKind
from ..usual import EMBEDDING, ENDS, FUSED_FEED_FORWARD, NORMS, B, T

_QKV = Layout("(slot head_dim) hidden", split="slot", parts=("heads", "kv_heads", "kv_heads"))

_DECODER = DecoderFamily(
    {
        **llama_fields(vocab=32064, hidden=3072, intermediate=8192, context=4096, eps=1e-5),
        "sliding_window": Field("attention.window", None, ConfigReader.optional_integer),
    },
    fixed={"attention.fused": True, "attention.fused_rows": "by part", "feed_forward.fused": True},
    rotary=RotaryKind(
        part=PART,
        original=4096,
        renewed=True,
        types={"default": "default", **dict.fromkeys(("longrope", "su", "yarn"), "longrope")},
        only=("type", "short_factor", "long_factor"),
    ),
    # transformers checks LongRoPE's factors as if the heads divided the hidden size.
    sized=lambda _, sizes: {"hidden": sizes["heads"] * sizes["head_dim"]},
)

_PHI3 = _DECODER.architecture(
    "phi3",
    "Phi3ForCausalLM",
    (
        *leaves_of({**EMBEDDING, T + "self_attn.o_proj": B + "attention.o_proj"}),
        Leaf(T + "self_attn.qkv_proj.weight", qkv("weight"), _QKV),
        *FUSED_FEED_FORWARD,
        *leaves_of({**NORMS, **ENDS}),
    ),
    released="2024-04",
    kinds=frozenset({RMSNorm, Attention, GatedFeedForward, Rotary, LongRopeScaling}),
    token_ids={"bos_token_id": 1, "eos_token_id": 32000, "pad_token_id": 32000},
)
