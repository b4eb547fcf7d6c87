"""Phi 1, 1.5 and 2 (2306.11644, 2309.05463): a decoder like GPT-J, with parallel blocks with one LayerNorm, RoPE on a
part of each head, and biases everywhere, including the head.

Source: transformers models/phi/{configuration,modeling}_phi.py.
"""

from ...components import FeedForward, LayerNorm
from ..base import leaves_of
from ..decoder import DecoderFamily
from ..fields import BIASED, LAYER_NORM_EPS, PRE, Field, llama_fields
from ..rope import PART, RotaryKind
from ..usual import EMBEDDING, B, T

_DECODER = DecoderFamily(
    {
        **llama_fields(
            LAYER_NORM_EPS, vocab=51200, hidden=2048, intermediate=8192, layers=24, activation="gelu_new", eps=1e-5
        ),
        "qk_layernorm": Field("head_norms", False),
    },
    norm=LayerNorm,
    inner=FeedForward,
    norms=PRE[:1],
    head_norms="same",
    fixed={**BIASED, "block.parallel": True, "head.bias": True},
    rotary=RotaryKind(part=PART, whole=0.5, even=True),
    square=True,
)

_MODULES = {
    **EMBEDDING,
    **{f"{T}self_attn.{name}_proj": f"{B}attention.{name}_proj" for name in ("q", "k", "v")},
    T + "self_attn.dense": B + "attention.o_proj",
    T + "self_attn.q_layernorm": B + "attention.q_norm",
    T + "self_attn.k_layernorm": B + "attention.k_norm",
    T + "mlp.fc1": B + "feed_forward.up_proj",
    T + "mlp.fc2": B + "feed_forward.down_proj",
    T + "input_layernorm": B + "attention_norm",
    "model.final_layernorm": "final_norm",
    "lm_head": "head",
}

_PHI = _DECODER.architecture(
    "phi", "PhiForCausalLM", leaves_of(_MODULES), released="2023-06", token_ids={"bos_token_id": 1, "eos_token_id": 2}
)
