"""GPT-2 (Radford et al. 2019): a decoder with LayerNorms, learned positions, biases everywhere and a tied head.

Its linear layers are transformers' Conv1D: weights are stored as [in, out], and c_attn contains q, k and v, one after
the other along the output dimension. The presets of GPT-3 have this architecture, with dense attention. GPT-SW3
(2305.12987) is GPT-2 under another name.

Source: transformers models/gpt2/{configuration,modeling}_gpt2.py.
"""

from ...components import FeedForward, LayerNorm
from ..base import Leaf, leaves_of, qkv
from ..config import GPT2_ALIASES, OF_GPT2
from ..decoder import DecoderFamily
from ..fields import BIASED, Field, flag
from ..layout import Layout
from ..lenses import scaled_by_layer, stated_scale

_FUSED_WEIGHT = Layout("hidden (part heads head_dim)", "(part heads head_dim) hidden", "part", ("1", "1", "1"))
FUSED_BIAS = Layout("(part heads head_dim)", split="part", parts=("1", "1", "1"))


FIELDS = {
    "vocab_size": Field("vocab", 50257),
    "n_positions": Field("context", 1024),
    "n_embd": Field("hidden", 768),
    "n_layer": Field("layers", 12),
    "n_head": Field("heads", 12),
    "n_inner": Field("intermediate"),
    "activation_function": Field("activation", "gelu_new"),
    "layer_norm_epsilon": Field("eps", 1e-5),
    "reorder_and_upcast_attn": flag("attention.scores", False, "float32", "input"),
    "tie_word_embeddings": Field("tied", True),
}
_DECODER = DecoderFamily(
    {
        **FIELDS,
        "scale_attn_weights": flag("attention.scale", True, None, 1.0)._replace(of=lambda s: stated_scale(s) is None),
    },
    norm=LayerNorm,
    inner=FeedForward,
    fixed={
        **BIASED,
        "attention.arithmetic": "conv1d",
        "attention.fused": True,
        "attention.softmax": "input",
        "feed_forward.arithmetic": "conv1d",
    },
    rotary=None,
    learned=True,
    layers=scaled_by_layer("scale_attn_by_inverse_layer_idx"),
)

_B, _T = "blocks.{layer}.", "transformer.h.{layer}."
ATTENTION = (
    Leaf(_T + "attn.c_attn.weight", qkv("weight"), _FUSED_WEIGHT),
    Leaf(_T + "attn.c_attn.bias", qkv("bias"), FUSED_BIAS),
    Leaf(
        _T + "attn.c_proj.weight",
        _B + "attention.o_proj.weight",
        Layout("(heads head_dim) hidden", "hidden (heads head_dim)"),
    ),
    Leaf(_T + "attn.c_proj.bias", _B + "attention.o_proj.bias"),
)
FEED_FORWARD = (
    Leaf(
        _T + "mlp.c_fc.weight", _B + "feed_forward.up_proj.weight", Layout("hidden intermediate", "intermediate hidden")
    ),
    Leaf(_T + "mlp.c_fc.bias", _B + "feed_forward.up_proj.bias"),
    Leaf(
        _T + "mlp.c_proj.weight",
        _B + "feed_forward.down_proj.weight",
        Layout("intermediate hidden", "hidden intermediate"),
    ),
    Leaf(_T + "mlp.c_proj.bias", _B + "feed_forward.down_proj.bias"),
)

GPT2 = _DECODER.architecture(
    "gpt2",
    "GPT2LMHeadModel",
    (
        *leaves_of(
            {"transformer.wte": "embedding", "transformer.wpe": "positions", _T + "ln_1": _B + "attention_norm"}
        ),
        *ATTENTION,
        *leaves_of({_T + "ln_2": _B + "feed_forward_norm"}),
        *FEED_FORWARD,
        *leaves_of({"transformer.ln_f": "final_norm", "lm_head": "head"}),
    ),
    restated=lambda spec: {"n_ctx": spec.context_length},  # mlx-lm 0.32.2, models/gpt2.py
    released="2019-02",
    model_types=("gpt2", "gpt-sw3"),
    token_ids={"bos_token_id": 50256, "eos_token_id": 50256},
    config_aliases=GPT2_ALIASES,
    prefix="transformer.",
    aliases=tuple(
        (f"{norm}.{old}", f"{norm}.{new}")
        for norm in (_T + "ln_1", _T + "ln_2", "transformer.ln_f")
        for old, new in (("gamma", "weight"), ("beta", "bias"))
    ),
    dropped=(_T + "attn.bias", _T + "attn.masked_bias"),
    irrelevant={**OF_GPT2},
)
