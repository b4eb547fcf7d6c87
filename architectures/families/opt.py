"""OPT (Zhang et al. 2205.01068): a decoder with ReLU, and a position table that starts at its third row and does not
count padding. OPT-350m has post-norm, no final norm, and an embedding half as wide as the hidden states.

Queries are scaled before they are multiplied by keys.

Source: transformers models/opt/{configuration,modeling}_opt.py.
"""

from ...components import FeedForward, LayerNorm
from ..base import leaves_of
from ..config import ConfigReader
from ..decoder import DecoderFamily
from ..draws import among
from ..fields import PRE, SUM_NORMS, Field
from ..lenses import is_pre_norm

_DECODER = DecoderFamily(
    {
        "vocab_size": Field("vocab", 50272),
        "hidden_size": Field("hidden", 768),
        "num_hidden_layers": Field("layers", 12),
        "ffn_dim": Field("intermediate", 3072),
        "max_position_embeddings": Field("context", 2048),
        "word_embed_proj_dim": Field(
            "own.width",
            None,
            ConfigReader.optional_integer,
            of=lambda spec: spec.embedding.width,
            draw=among(None, 1, 3, 16, 33),
        ),
        "do_layer_norm_before": Field("own.pre_norm", True, of=is_pre_norm),
        "_remove_final_layer_norm": Field(
            "own.unfinished", False, of=lambda spec: is_pre_norm(spec) and spec.final_norm is None
        ),
        "num_attention_heads": Field("heads", 12),
        "activation_function": Field("activation", "relu"),
        "enable_bias": Field(
            "attention.qkv_bias attention.output_bias feed_forward.up_bias feed_forward.down_bias", True
        ),
        "layer_norm_elementwise_affine": Field("norm.bias", True),
        "tie_word_embeddings": Field("tied", True),
    },
    norm=LayerNorm,
    inner=FeedForward,
    fixed={
        **dict.fromkeys(
            ("embedding.width", "head.width"),
            lambda values: None if values["own.width"] == values["hidden"] else values["own.width"],
        ),
        "eps": 1e-5,
        "final_norm": lambda values: values["own.pre_norm"] and not values["own.unfinished"],
        "norm.gain": lambda values: "weight" if values["norm.bias"] else "none",
        "attention.scaling": "queries",
        "positions.offset": 2,
        "positions.counts": "real tokens",
    },
    norms=lambda values: PRE if values["own.pre_norm"] else SUM_NORMS,
    rotary=None,
    learned=True,
)

_B, _T = "blocks.{layer}.", "model.decoder.layers.{layer}."
_HEADS = {f"{_T}self_attn.{name}_proj": f"{_B}attention.{name}_proj" for name in ("k", "v", "q")}
_HEADS |= {_T + "self_attn.out_proj": _B + "attention.o_proj"}
_INNER = {_T + "fc1": _B + "feed_forward.up_proj", _T + "fc2": _B + "feed_forward.down_proj"}

_OPT = _DECODER.architecture(
    "opt",
    "OPTForCausalLM",
    (
        *leaves_of(
            {
                "model.decoder.embed_tokens": "embedding",
                "model.decoder.embed_positions": "positions",
                "model.decoder.project_out": "head.projection",
                "model.decoder.project_in": "embedding.projection",
                "model.decoder.final_layer_norm": "final_norm",
                **_HEADS,
                _T + "self_attn_layer_norm": _B + "attention_norm",
            }
        ),
        *leaves_of(
            {
                _T + "self_attn_layer_norm": _B + "attention_sum_norm",
                **_INNER,
                _T + "final_layer_norm": _B + "feed_forward_norm",
            }
        ),
        *leaves_of({_T + "final_layer_norm": _B + "feed_forward_sum_norm", "lm_head": "head"}),
    ),
    released="2022-05",
    token_ids={"bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1},
    irrelevant={"prefix": "tokenizer"},
)
