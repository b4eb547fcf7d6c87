"""MPT (MosaicML 2023): ALiBi, LayerNorms without bias, no biases, and clipped queries, keys and values in some models.

Source: transformers models/mpt/{configuration,modeling}_mpt.py, which has no sdpa path. ALiBi counts back from the last
key; its slopes are the paper's, with 8 for a maximum whatever the config says.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ...components import ALiBi, Attention, FeedForward, LayerNorm, ModelSpec
from ..base import Leaf, leaves_of, qkv
from ..config import COMMON_REFUSED, ConfigReader
from ..decoder import Decoder
from ..draws import Config, Random, Sizes, sometimes
from ..fields import Field
from ..layout import Layout
from ..lenses import Lens
from ..obstacles import of_kind

_FUSED = Layout("(part heads head_dim) hidden", split="part", parts=("1", "1", "1"))
_ONLY = "transformers computes what this says otherwise"
_INNER_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "alibi": ((True, None), _ONLY),
    "alibi_bias_max": ((8, None), _ONLY),
    "attn_type": (("multihead_attention",), _ONLY),
    "prefix_lm": ((False, None), _ONLY),
    "qk_ln": ((False, None), _ONLY),
}


def _layers(config: ConfigReader, values: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """What `attn_config` says of all layers."""
    count, head_dim = values["layers"], values["head_dim"]
    inner = config.inner("attn_config")
    inner.refuse({**COMMON_REFUSED, **_INNER_REFUSED})
    scale = inner.optional_number("softmax_scale")
    clip = inner.optional_number("clip_qkv") if inner.raw("clip_qkv") else None
    return [{"scale": 1 / math.sqrt(head_dim) if scale is None else scale, "clip": clip}] * count


def _written(spec: ModelSpec) -> dict[str, Any]:
    """`attn_config`."""
    first = of_kind(spec.blocks[0].attention, Attention)
    usual = math.isclose(first.scale, first.head_dim**-0.5, rel_tol=1e-12)
    return {"attn_config": {"clip_qkv": first.clip, "softmax_scale": None if usual else first.scale}}


def _draw(chosen: Random, _: Sizes) -> Config:
    return sometimes(chosen, {"attn_config": sometimes(chosen, {"clip_qkv": 0.5, "softmax_scale": 0.3})})


_DECODER = Decoder(
    {
        "d_model": Field("hidden", 2048),
        "n_heads": Field("heads", 16),
        "n_layers": Field("layers", 24),
        "max_seq_len": Field("context", 2048),
        "vocab_size": Field("vocab", 50368),
        "layer_norm_epsilon": Field("eps", 1e-5),
        "tie_word_embeddings": Field("tied", True),
    },
    norm=LayerNorm,
    inner=FeedForward,
    fixed={
        "norm.bias": False,
        "activation": "gelu",
        "attention.position": ALiBi(rounding="apart"),
        "attention.fused": True,
        "attention.lie": "as projected",
        "attention.fused_rows": "by part",
    },
    rotary=None,
    layers=Lens(_layers, _written, _draw),
)

_B, _T = "blocks.{layer}.", "transformer.blocks.{layer}."

_MPT = _DECODER.architecture(
    "mpt",
    "MptForCausalLM",
    (
        *leaves_of({"transformer.wte": "embedding", _T + "norm_1": _B + "attention_norm"}),
        Leaf(_T + "attn.Wqkv.weight", qkv("weight"), _FUSED),
        *leaves_of(
            {
                _T + "attn.out_proj": _B + "attention.o_proj",
                _T + "norm_2": _B + "feed_forward_norm",
                _T + "ffn.up_proj": _B + "feed_forward.up_proj",
                _T + "ffn.down_proj": _B + "feed_forward.down_proj",
                "transformer.norm_f": "final_norm",
                "lm_head": "head",
            }
        ),
    ),
    released="2023-05",
    kinds=_DECODER.kinds | {ALiBi},
    config_aliases={
        "d_model": ("hidden_size",),
        "n_heads": ("num_attention_heads",),
        "n_layers": ("num_hidden_layers",),
    },
    prefix="transformer.",
    irrelevant={
        "attn_impl": "which kernel MosaicML's own code takes",
        "attn_pdrop": "training only",
        "attn_uses_sequence_id": "training only",
        "emb_pdrop": "training only",
        "embedding_fraction": "training only",
        "init_config": "training only",
        "init_device": "where weights are made",
        "learned_pos_emb": "not read by transformers",
        "norm_type": "transformers supports only LayerNorm",
        "resid_pdrop": "training only",
        "tokenizer_name": "tokenizer",
        "verbose": "output format",
    },
    refused={"expansion_ratio": ((4, None), _ONLY), "logit_scale": ((None,), _ONLY), "no_bias": ((True, None), _ONLY)},
    bounded=True,
    reference=lambda _: ("eager",),
    reference_quirk="transformers has no sdpa path for mpt",
)
