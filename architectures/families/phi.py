"""Phi 1, 1.5 and 2 (2306.11644, 2309.05463): parallel blocks with one LayerNorm, RoPE on a part of each head, and
biases everywhere, including the head.

Source: transformers models/phi/{configuration,modeling}_phi.py.
"""

from ...components import FeedForward, LayerNorm
from ..base import leaves_of
from ..decoder import DecoderFamily
from ..fields import BIASED, PRE, Field
from ..rope import PART, RotaryKind
from ..usual import EMBEDDING, B, T

_DECODER = DecoderFamily(
    {
        "vocab_size": Field("vocab", 51200),
        "hidden_size": Field("hidden", 2048),
        "intermediate_size": Field("intermediate", 8192),
        "num_hidden_layers": Field("layers", 24),
        "num_attention_heads": Field("heads", 32),
        "num_key_value_heads": Field("kv_heads"),
        "head_dim": Field("head_dim"),
        "hidden_act": Field("activation", "gelu_new"),
        "max_position_embeddings": Field("context", 2048),
        "layer_norm_eps": Field("eps", 1e-5),
        "qk_layernorm": Field("head_norms", False),
        "tie_word_embeddings": Field("tied", False),
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
