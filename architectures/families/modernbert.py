"""ModernBERT (Warner et al. 2412.13663): an encoder with RoPE, gated feed-forwards and pre-norm, except before the
first attention. Two of three layers have a window in both directions and a separate RoPE base.

Source: transformers models/modernbert/{configuration,modeling}_modernbert.py.
"""

from ...components import GatedFeedForward
from ..base import Leaf, leaves_of, qkv
from ..encoder import Encoder
from ..fields import ATTENTION_BIAS, MLP_BIAS, PRE, Field, Fields
from ..layout import Layout
from ..lenses import halved, rope_by_kind
from ..rope import ROTARY, RotaryKind

FIELDS: Fields = {
    "vocab_size": Field("vocab", 50368),
    "hidden_size": Field("hidden", 768),
    "intermediate_size": Field("intermediate", 1152),
    "num_hidden_layers": Field("layers", 22),
    "num_attention_heads": Field("heads", 12),
    "head_dim": Field("head_dim"),
    "hidden_activation": Field("activation", "gelu"),
    "max_position_embeddings": Field("context", 8192),
    "norm_eps": Field("eps", 1e-5),
    "norm_bias": Field("norm.bias", False),
    "attention_bias": ATTENTION_BIAS,
    "mlp_bias": MLP_BIAS,
    "decoder_bias": Field("head.bias", True),
    "classifier_activation": Field("transform.activation", "gelu"),
    "classifier_bias": Field("transform.bias", False),
    "tie_word_embeddings": Field("tied", True),
}
KINDS = {
    "full_attention": RotaryKind(160_000.0, "global_rope_theta", rounding="tables"),
    "sliding_attention": RotaryKind(10_000.0, "local_rope_theta", rounding="tables"),
}


_ENCODER = Encoder(
    FIELDS,
    masked=("ModernBertForMaskedLM",),
    inner=GatedFeedForward,
    norms=PRE,
    fixed={
        "attention.causal": False,
        "attention.lie": "as projected",
        "attention.fused": True,
        "attention.fused_rows": "by part",
        "feed_forward.fused": True,
        "final_norm": True,
    },
    square=True,
    learned=False,
    embedding_norm=True,
    first_norm=False,
    types=None,
    first_bare=True,
    layers=rope_by_kind(halved(causal=False), KINDS),
)


_B, _T = "blocks.{layer}.", "model.layers.{layer}."
_PARTS = ("1", "1", "1")
_GATED = (_B + "feed_forward.gate_proj", _B + "feed_forward.up_proj")
EMBEDDING = {
    "model.embeddings.tok_embeddings": "embedding",
    "model.embeddings.norm": "embedding.norm",
    _T + "attn_norm": _B + "attention_norm",
}
FEED_FORWARD = (
    *leaves_of({_T + "mlp_norm": _B + "feed_forward_norm"}),
    Leaf(
        _T + "mlp.Wi.weight",
        (f"{_GATED[0]}.weight", f"{_GATED[1]}.weight"),
        Layout("(part intermediate) hidden", split="part", parts=("1", "1")),
    ),
    Leaf(
        _T + "mlp.Wi.bias",
        (f"{_GATED[0]}.bias", f"{_GATED[1]}.bias"),
        Layout("(part intermediate)", split="part", parts=("1", "1")),
    ),
    *leaves_of({_T + "mlp.Wo": _B + "feed_forward.down_proj", "model.final_norm": "final_norm"}),
)

IRRELEVANT = {
    **dict.fromkeys(("initializer_cutoff_factor", "sparse_pred_ignore_index"), "training only"),
    **dict.fromkeys(("cls_token_id", "sep_token_id"), "tokenizer"),
    "classifier_pooling": "classification heads",
    "deterministic_flash_attn": "which kernel computes gradients",
    "layer_norm_eps": "an older spelling that transformers does not read",
    "position_embedding_type": "not read by transformers",
    "reference_compile": "whether transformers compiled it",
    "repad_logits_with_grad": "training only",
    "sparse_prediction": "training only",
}

MODERNBERT = _ENCODER.architecture(
    "modernbert",
    "ModernBertForMaskedLM",
    (
        *leaves_of(EMBEDDING),
        Leaf(
            _T + "attn.Wqkv.weight", qkv("weight"), Layout("(part heads head_dim) hidden", split="part", parts=_PARTS)
        ),
        Leaf(_T + "attn.Wqkv.bias", qkv("bias"), Layout("(part heads head_dim)", split="part", parts=_PARTS)),
        *leaves_of({_T + "attn.Wo": _B + "attention.o_proj"}),
        *FEED_FORWARD,
        *leaves_of({"head.dense": "head.transform.dense", "head.norm": "head.transform.norm", "decoder": "head"}),
    ),
    released="2024-12",
    head="decoder.weight",
    kinds=_ENCODER.kinds | ROTARY,
    token_ids={"bos_token_id": 50281, "eos_token_id": 50282, "pad_token_id": 50283},
    carried={"tasks": ("head.", "decoder.", "classifier.")},
    irrelevant={**IRRELEVANT, "architectures": None},
)
