"""LFM2 (Liquid AI 2511.23404): llama with gated short convolutions instead of attention in some layers. The other
layers have norms on query and key heads. The final norm has an unusual name.

Source: transformers models/lfm2/{configuration,modeling}_lfm2.py.
"""

from typing import Any

from ..base import Leaf, leaves_of
from ..decoder import DecoderFamily
from ..fields import USUAL, Field, adjusted_width, with_defaults
from ..layout import Layout
from ..places import ALL_LAYERS, by_layer_types, listed
from ..recurrences import CONVOLUTION, without_attention
from ..rope import RotaryKind
from ..usual import ATTENTION, EMBEDDING, B, T

CONV = "conv"


FIELDS = {
    **{name: field for name, field in USUAL.items() if name not in ("hidden_act", "rms_norm_eps", "head_dim")},
    "norm_eps": Field("eps", 1e-5),
}
FIELDS = with_defaults(FIELDS, vocab=65536, hidden=2560, kv_heads=8, context=128_000, tied=True)
ROPE = RotaryKind(1e6)


_DECODER = DecoderFamily(
    {
        **FIELDS,
        **adjusted_width(
            "intermediate_size", 12288, "block_auto_adjust_ff_dim", "block_ffn_dim_multiplier", "block_multiple_of"
        ),
        "head_dim": USUAL["head_dim"],
    },
    head_norms="same",
    fixed={"activation": "silu"},
    rotary=ROPE,
    recurrent=without_attention(by_layer_types(CONV, listed("full_attn_idxs", ALL_LAYERS).get), CONVOLUTION),
)

_ATTENTION = {
    **{name: ours for name, ours in ATTENTION.items() if name.endswith(("q_proj", "k_proj", "v_proj"))},
    T + "self_attn.out_proj": B + "attention.o_proj",
    T + "self_attn.q_layernorm": B + "attention.q_norm",
    T + "self_attn.k_layernorm": B + "attention.k_norm",
}
_PARTS = tuple(f"{B}convolution.{name}_proj" for name in ("before", "behind", "in"))
_THREE: dict[str, Any] = {"split": "part", "parts": ("1", "1", "1")}
MIXERS: tuple[Leaf, ...] = (
    *leaves_of(_ATTENTION),
    Leaf(
        T + "conv.conv.weight",
        B + "convolution.convolved.weight",
        Layout("channels one kernel", "channels (one kernel)"),
    ),
    Leaf(T + "conv.conv.bias", B + "convolution.convolved.bias"),
    Leaf(
        T + "conv.in_proj.weight",
        tuple(f"{part}.weight" for part in _PARTS),
        Layout("(part channels) hidden", **_THREE),
    ),
    Leaf(T + "conv.in_proj.bias", tuple(f"{part}.bias" for part in _PARTS), Layout("(part channels)", **_THREE)),
    *leaves_of({T + "conv.out_proj": B + "convolution.o_proj"}),
)
"""The leaves of attention and of the short convolution."""

NORMS = (
    *leaves_of({T + "operator_norm": B + "attention_norm"}),
    *leaves_of({T + "operator_norm": B + "convolution_norm", T + "ffn_norm": B + "feed_forward_norm"}),
)
ENDS = leaves_of({"model.embedding_norm": "final_norm", "lm_head": "head"})
FEED_FORWARD = {
    f"{T}feed_forward.{name}": f"{B}feed_forward.{ours}_proj"
    for name, ours in (("w1", "gate"), ("w3", "up"), ("w2", "down"))
}

_LFM2 = _DECODER.architecture(
    "lfm2",
    "Lfm2ForCausalLM",
    (*leaves_of(EMBEDDING), *MIXERS, *leaves_of(FEED_FORWARD), *NORMS, *ENDS),
    released="2025-07",
    token_ids={"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    config_aliases={"intermediate_size": ("block_ff_dim",), "tie_word_embeddings": ("tie_embedding",)},
)
