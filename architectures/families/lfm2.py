"""LFM2 (Liquid AI 2511.23404): llama with gated short convolutions instead of attention in some layers. The other
layers have norms on query and key heads. The final norm has an unusual name.

Source: transformers models/lfm2/{configuration,modeling}_lfm2.py.
"""

from collections.abc import Sequence
from typing import Any

from ..base import Leaf, leaves_of
from ..config import ConfigReader
from ..decoder import DecoderFamily
from ..draws import Config, Random, sometimes
from ..fields import USUAL, Field, with_defaults
from ..layout import Layout
from ..lenses import by_layer_types
from ..recurrences import CONVOLUTION, without_attention
from ..rope import RotaryKind
from ..usual import ATTENTION, EMBEDDING, B, T

CONV = "conv"


def _attends(config: ConfigReader, layers: int) -> Sequence[bool]:
    """Return which layers have attention if `layer_types` is absent: those in `full_attn_idxs`, by default all."""
    full = config.raw("full_attn_idxs")
    if full is not None and (not isinstance(full, list) or any(type(layer) is not int for layer in full)):
        raise config.fail("full_attn_idxs", full, "a list of layer numbers")
    return [full is None or layer in full for layer in range(layers)]


def _units(config: ConfigReader, name: str, default: int) -> int:
    """Return the width of the feed-forward.

    With `block_auto_adjust_ff_dim`, it is two thirds of the stated width, times `block_ffn_dim_multiplier`, rounded up
    to a multiple of `block_multiple_of`.
    """
    stated = config.integer(name, default)
    of, factor = config.integer("block_multiple_of", 256), config.optional_number("block_ffn_dim_multiplier", 1.0)
    if not config.boolean("block_auto_adjust_ff_dim", True):
        return stated
    units = int(2 * stated / 3)
    units = units if factor is None else of * -(-int(factor * units) // of)
    if not 1 <= units < 2**31:
        raise config.fail(
            name, stated, f"another value: block_auto_adjust_ff_dim changes this one to {units}, not a valid width"
        )
    return units


FIELDS = {
    **{name: field for name, field in USUAL.items() if name not in ("hidden_act", "rms_norm_eps", "head_dim")},
    "norm_eps": Field("eps", 1e-5),
}
FIELDS = with_defaults(FIELDS, vocab=65536, hidden=2560, kv_heads=8, context=128_000, tied=True)
ROPE = RotaryKind(1e6)


def _draw(chosen: Random) -> Config:
    """Return a random config, with or without `block_auto_adjust_ff_dim`; see `_units`."""
    adjusted = {"block_auto_adjust_ff_dim": False, "block_ffn_dim_multiplier": chosen.choice((0.5, 1.3))}
    units = {"intermediate_size": chosen.choice((7, 33, 64)), "block_multiple_of": chosen.choice((1, 8, 24))}
    return {**_DECODER.draw(chosen, {}), **units, **sometimes(chosen, adjusted)}


_DECODER = DecoderFamily(
    {**FIELDS, "intermediate_size": Field("intermediate", 12288, _units), "head_dim": USUAL["head_dim"]},
    head_norms="same",
    fixed={"activation": "silu"},
    rotary=ROPE,
    recurrent=without_attention(by_layer_types(CONV, _attends), CONVOLUTION),
    written=lambda _: {"block_auto_adjust_ff_dim": False},
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
    draw=_draw,
    config_aliases={"intermediate_size": ("block_ff_dim",), "tie_word_embeddings": ("tie_embedding",)},
)
