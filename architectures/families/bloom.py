"""BLOOM (Le Scao et al. 2211.05100): GPT-2 with ordinary linear layers, ALiBi instead of learned positions, a norm on
the embeddings, and q, k and v fused head by head.

transformers has only an eager path for this family. Its baddbmm rounds differently from any sdpa kernel.

Source: transformers models/bloom/{configuration,modeling}_bloom.py.
"""

import math

from ...components import ALiBi, FeedForward, LayerNorm
from ..base import Leaf, leaves_of, only_eager, qkv
from ..decoder import DecoderFamily
from ..fields import BIASED, Field, flag
from ..usual import GROUPED_BIAS, GROUPED_WEIGHT

_DECODER = DecoderFamily(
    fields={
        "vocab_size": Field("vocab", 250880),
        "hidden_size": Field("hidden", 64),
        "n_layer": Field("layers", 2),
        "n_head": Field("heads", 8),
        "layer_norm_epsilon": Field("eps", 1e-5),
        "apply_residual_connection_post_layernorm": flag("block.residual", False, "normed", "stream"),
        "tie_word_embeddings": Field("tied", True),
        "seq_length": Field("context"),
    },
    norm=LayerNorm,
    inner=FeedForward,
    embedding_norm=True,
    fixed={
        **BIASED,
        "attention.scale": lambda values: 1.0 / math.sqrt(values["head_dim"]),
        "attention.position": ALiBi(),
        "attention.fused": True,
        "activation": "gelu_bloom",
    },
    rotary=None,
)

_B, _T = "blocks.{layer}.", "transformer.h.{layer}."

_BLOOM = _DECODER.architecture(
    "bloom",
    "BloomForCausalLM",
    (
        *leaves_of(
            {
                "transformer.word_embeddings": "embedding",
                "transformer.word_embeddings_layernorm": "embedding.norm",
                _T + "input_layernorm": _B + "attention_norm",
            }
        ),
        Leaf(_T + "self_attention.query_key_value.weight", qkv("weight"), GROUPED_WEIGHT),
        Leaf(_T + "self_attention.query_key_value.bias", qkv("bias"), GROUPED_BIAS),
        *leaves_of(
            {
                _T + "self_attention.dense": _B + "attention.o_proj",
                _T + "post_attention_layernorm": _B + "feed_forward_norm",
                _T + "mlp.dense_h_to_4h": _B + "feed_forward.up_proj",
                _T + "mlp.dense_4h_to_h": _B + "feed_forward.down_proj",
                "transformer.ln_f": "final_norm",
                "lm_head": "head",
            }
        ),
    ),
    released="2022-07",
    kinds=_DECODER.kinds | {ALiBi},
    token_ids={"bos_token_id": 1, "eos_token_id": 2},
    config_aliases={"n_head": ("num_attention_heads",), "n_layer": ("num_hidden_layers",), "hidden_size": ("n_embed",)},
    prefix="transformer.",
    dropped=(_T + "self_attention.bias", _T + "self_attention.masked_bias"),
    irrelevant={
        "attention_softmax_in_fp32": "transformers ignores this field and always does it",
        "bias_dropout_fusion": "training only",
        "masked_softmax_fusion": "training only",
        "offset_alibi": "not read by transformers",
        "pretraining_tp": "matrix products in slices, only together with slow_but_exact",
        "skip_bias_add": "training only",
        "skip_bias_add_qkv": "training only",
        "unk_token_id": "tokenizer",
    },
    refused={"slow_but_exact": ((False, None), "gptkit does not support sums of matrix products in slices")},
    **only_eager(),
)
