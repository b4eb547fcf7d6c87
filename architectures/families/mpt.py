"""MPT (MosaicML 2023): GPT-2 with ordinary linear layers, ALiBi instead of learned positions, and no biases, also in
LayerNorms. Some models have clipped queries, keys and values.

transformers has no sdpa path for this family. ALiBi's positions count back from the last key. ALiBi's slopes are those
of the paper: transformers always uses a maximum bias of 8, whatever the config states.

Source: transformers models/mpt/{configuration,modeling}_mpt.py.
"""

from typing import Any

from ...components import ALiBi, FeedForward, LayerNorm
from ..base import Leaf, leaves_of, only_eager, qkv
from ..decoder import DecoderFamily
from ..draws import among
from ..fields import Field, read_nonzero
from ..layout import Layout
from ..lenses import stated_scale

_FUSED = Layout("(part heads head_dim) hidden", split="part", parts=("1", "1", "1"))
_ONLY = "transformers ignores this field, and computes something else"
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "attn_config.alibi": ((True, None), _ONLY),
    "attn_config.alibi_bias_max": ((8, None), _ONLY),
    "attn_config.attn_type": (("multihead_attention",), _ONLY),
    "attn_config.prefix_lm": ((False, None), _ONLY),
    "attn_config.qk_ln": ((False, None), _ONLY),
    "expansion_ratio": ((4, None), _ONLY),
    "logit_scale": ((None,), _ONLY),
    "no_bias": ((True, None), _ONLY),
}

_DECODER = DecoderFamily(
    {
        "d_model": Field("hidden", 2048),
        "n_heads": Field("heads", 16),
        "n_layers": Field("layers", 24),
        "max_seq_len": Field("context", 2048),
        "vocab_size": Field("vocab", 50368),
        "layer_norm_epsilon": Field("eps", 1e-5),
        "tie_word_embeddings": Field("tied", True),
        "attn_config.clip_qkv": Field("attention.clip", None, read_nonzero, draw=among(None, 0.5)),
        "attn_config.softmax_scale": Field("attention.scale", of=stated_scale, draw=among(None, 0.3)),
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
        "attn_uses_sequence_id": "training only",
        "embedding_fraction": "training only",
        "init_config": "training only",
        "init_device": "where weights are created",
        "learned_pos_emb": "not read by transformers",
        "norm_type": "transformers supports only LayerNorm",
        "tokenizer_name": "tokenizer",
        "verbose": "output format",
    },
    refused=_REFUSED,
    bounded=True,
    **only_eager(),
)
