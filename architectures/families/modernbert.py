"""ModernBERT (Warner et al. 2412.13663): an encoder with RoPE, gated feed-forwards and pre-norm, except before the
first attention. Two of three layers have a window in both directions and a separate RoPE base.

Source: transformers models/modernbert/{configuration,modeling}_modernbert.py.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import structs

from ...components import GatedFeedForward, ModelSpec
from ..base import Leaf, leaves_of, qkv
from ..config import ConfigReader
from ..draws import Config, Random, Sizes, sometimes
from ..encoder import BOTH_WAYS, Encoder
from ..fields import ACTIVATIONS, ATTENTION_BIAS, MLP_BIAS, PRE, Field, Fields, activation_named, name_of, without
from ..layout import Layout
from ..lenses import Lens, rope_by_kind, write_windows
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
    "tie_word_embeddings": Field("tied", True),
}
KINDS = {
    "full_attention": RotaryKind(160_000.0, "global_rope_theta", rounding="tables"),
    "sliding_attention": RotaryKind(10_000.0, "local_rope_theta", rounding="tables"),
}


def _windows(config: ConfigReader, values: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return the window of every layer: the token itself, and half of `local_attention` tokens on either side."""
    layers = values["layers"]
    every = config.integer("global_attn_every_n_layers", 3)
    types = config.layer_types(["sliding_attention" if layer % every else "full_attention" for layer in range(layers)])
    window = config.integer("local_attention", 128) // 2 + 1
    return [{"window": window if kind == "sliding_attention" else None} for kind in types]


def _write_windows(spec: ModelSpec) -> dict[str, Any]:
    """Return the config fields that `_windows` reads."""
    fields = write_windows(spec)
    sides = 2 * (fields.pop("sliding_window") - 1)
    return fields | ({"local_attention": max(sides, 1)} if "sliding_attention" in fields["layer_types"] else {})


def read_transform(config: ConfigReader) -> dict[str, Any]:
    """Return the activation and the bias of the transform before the head."""
    bias = config.boolean("classifier_bias", False)
    return {"activation": activation_named(config, "classifier_activation", "gelu"), "bias": bias}


def write_transform(spec: ModelSpec) -> dict[str, Any]:
    """Return the config fields that `read_transform` reads."""
    transform = None if spec.head is None else spec.head.transform
    if transform is None:
        return {}
    return {"classifier_bias": transform.bias, "classifier_activation": name_of(transform.activation)}


def draw_transform(chosen: Random) -> Config:
    """Return random values for the config fields that `read_transform` reads. Some fields may be absent."""
    return sometimes(chosen, {"classifier_bias": True, "classifier_activation": chosen.choice([*ACTIVATIONS])})


def _draw_windows(chosen: Random, _: Sizes) -> Config:
    every, around = chosen.choice((1, 2)), chosen.choice((2, 5, 17, 32))
    return sometimes(chosen, {"global_attn_every_n_layers": every, "local_attention": around})


def _draw(chosen: Random) -> Config:
    """Return a random config with a transform before the head, and with RoPE parameters of the two supported types."""
    config = without(_ENCODER.draw(chosen, {}), "rope_scaling", "rope_parameters")
    kinds = {kind: chosen.choice(({}, {"rope_type": "linear", "factor": 4.5})) for kind in KINDS}
    own = {"rope_parameters": {kind: {**fields, "rope_theta": 37.5} for kind, fields in kinds.items()}}
    return {**config, **sometimes(chosen, own), **draw_transform(chosen)}


_ENCODER = Encoder(
    FIELDS,
    masked=("ModernBertForMaskedLM",),
    inner=GatedFeedForward,
    norms=PRE,
    fixed={
        **{role: value for role, value in BOTH_WAYS.items() if role not in ("attention.softmax", "head.bias")},
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
    layers=rope_by_kind(Lens(_windows, _write_windows, _draw_windows), KINDS),
    written=write_transform,
    transform=read_transform,
)


def without_first_norm(spec: ModelSpec) -> ModelSpec:
    """Return the tree without the norm before the first attention, as in ModernBERT.

    The first attention reads the output of the embedding's norm.
    """
    return structs.replace(spec, blocks=(spec.blocks[0].replaced(attention_norm=None), *spec.blocks[1:]))


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
    read=lambda config: without_first_norm(_ENCODER.read(config)),
    draw=_draw,
    token_ids={"bos_token_id": 50281, "eos_token_id": 50282, "pad_token_id": 50283},
    carried={"tasks": ("head.", "decoder.", "classifier.")},
    irrelevant={**IRRELEVANT, "architectures": None},
)
