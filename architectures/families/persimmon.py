"""Persimmon (Adept 2023): GPT-NeoX with serial blocks, LayerNorms also on the queries and keys of every head, RoPE on
half of each head, and squared ReLU.

Source: transformers models/persimmon/{configuration,modeling}_persimmon.py.
"""

from ...components import FeedForward, LayerNorm
from ..base import Leaf, leaves_of, qkv
from ..decoder import DecoderFamily
from ..fields import BIASED, LAYER_NORM_EPS, Field, llama_fields, without
from ..rope import PART, RotaryKind
from ..usual import EMBEDDING, GROUPED_BIAS, GROUPED_WEIGHT, NORMS, B, T

_FIELDS = llama_fields(
    LAYER_NORM_EPS, vocab=262144, intermediate=16384, layers=36, heads=64, activation="relu2", context=16384, eps=1e-5
)
_DECODER = DecoderFamily(
    {**without(_FIELDS, "num_key_value_heads", "head_dim"), "qk_layernorm": Field("head_norms", True)},
    norm=LayerNorm,
    inner=FeedForward,
    head_norms="same",
    fixed={**BIASED, "attention.fused": True},
    rotary=RotaryKind(part=PART, whole=0.5, even=True, former_base=25_000.0),
)

_PERSIMMON = _DECODER.architecture(
    "persimmon",
    "PersimmonForCausalLM",
    (
        *leaves_of(EMBEDDING),
        Leaf(T + "self_attn.query_key_value.weight", qkv("weight"), GROUPED_WEIGHT),
        Leaf(T + "self_attn.query_key_value.bias", qkv("bias"), GROUPED_BIAS),
        *leaves_of(
            {
                T + "self_attn.dense": B + "attention.o_proj",
                T + "self_attn.q_layernorm": B + "attention.q_norm",
                T + "self_attn.k_layernorm": B + "attention.k_norm",
                T + "mlp.dense_h_to_4h": B + "feed_forward.up_proj",
                T + "mlp.dense_4h_to_h": B + "feed_forward.down_proj",
                **NORMS,
                "model.final_layernorm": "final_norm",
                "lm_head": "head",
            }
        ),
    ),
    released="2023-09",
    token_ids={"bos_token_id": 1, "eos_token_id": 2},
    refused={"head_dim": ((None,), "transformers' RoPE would have a different width than the heads")},
)
