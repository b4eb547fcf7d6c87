"""OPT (Zhang et al. 2205.01068): ReLU, and a position table that starts at its third row and does not count padding.
OPT-350m has post-norm, no final norm, and an embedding half as wide as the hidden states.

Source: transformers models/opt/{configuration,modeling}_opt.py. Queries are scaled before they meet keys.
"""

from dataclasses import replace
from typing import Any

from ...components import FeedForward, LayerNorm, ModelSpec
from ..base import leaves_of
from ..config import ConfigReader
from ..decoder import Decoder
from ..draws import Config, Random, sometimes
from ..fields import PRE, SUM_NORMS, Field


def _read_width(config: ConfigReader, name: str, default: int | None) -> int | None:
    """How wide the vocabulary is, None where it is as wide as the stream."""
    width = config.optional_integer(name, default)
    return None if width == config.integer("hidden_size", 768) else width


_DECODER = Decoder(
    {
        "vocab_size": Field("vocab", 50272),
        "hidden_size": Field("hidden", 768),
        "num_hidden_layers": Field("layers", 12),
        "ffn_dim": Field("intermediate", 3072),
        "max_position_embeddings": Field("context", 2048),
        "word_embed_proj_dim": Field("embedding.width head.width", None, _read_width),
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
        "eps": 1e-5,
        "norm.gain": lambda values: "weight" if values["norm.bias"] else "none",
        "attention.scaling": "queries",
        "positions.offset": 2,
        "positions.counts": "real tokens",
    },
    rotary=None,
    learned=True,
)


def _read(config: ConfigReader) -> ModelSpec:
    """config.json -> tree."""
    before = config.boolean("do_layer_norm_before", True)
    removed = config.boolean("_remove_final_layer_norm", False)
    return replace(_DECODER, norms=PRE if before else SUM_NORMS).read(config, final_norm=before and not removed)


def _write(spec: ModelSpec) -> dict[str, Any]:
    """Tree -> the config.json fields that describe it."""
    before = spec.blocks[0].sublayers[0].norm is not None
    return {
        **_DECODER.write(spec),
        "do_layer_norm_before": before,
        "_remove_final_layer_norm": before and spec.final_norm is None,
    }


def _draw(chosen: Random) -> Config:
    own = {
        "word_embed_proj_dim": chosen.choice((1, 3, 16, 33)),
        "do_layer_norm_before": False,
        "_remove_final_layer_norm": True,
    }
    return {**_DECODER.draw(chosen, {}), **sometimes(chosen, own)}


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
    read=_read,
    write=_write,
    draw=_draw,
    irrelevant={
        "activation_dropout": "training only",
        "dropout": "training only",
        "init_std": "training only",
        "layerdrop": "training only",
        "prefix": "tokenizer",
    },
)
