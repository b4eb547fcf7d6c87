"""Granite with windows (IBM 2026): granite with attention sinks, a window in three of four layers, and a RoPE base per
layer, or no positions.

Source: transformers models/granite_swa/{configuration,modeling}_granite_swa.py.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ...components import Attention, ModelSpec, Rotary
from ..base import Leaf, leaves_of
from ..config import ConfigReader
from ..decoder import Decoder
from ..fields import with_defaults
from ..lenses import Layers, sliding, write_sliding
from ..obstacles import of_kind
from ..rope import read_rotary
from ..usual import ATTENTION, EMBEDDING, ENDS, FEED_FORWARD, NORMS, B, T
from . import granite

_BASES = "layer_rope_theta"
SINKS = {"attention.sinks": True, "attention.sunk": "behind it"}
SUNK = (Leaf(T + "self_attn.sinks", B + "attention.sinks"),)


def layers(context: int) -> Layers:
    """Each layer's window, and its positions by its base, none where that is 0; `context` is the config class's."""

    def found(config: ConfigReader, count: int, head_dim: int) -> Sequence[Mapping[str, Any]]:
        windows, bases = sliding(4, 128, first=0)(config, count, head_dim), config.raw(_BASES)
        if bases is None:
            return windows
        if not isinstance(bases, list) or len(bases) != count or any(type(each) not in (int, float) for each in bases):
            raise config.fail(_BASES, bases, f"{count} numbers, 0 where a layer has no positions")
        if not all(0 <= each < math.inf for each in bases):
            raise config.fail(_BASES, bases, "finite numbers from 0")
        rotary = read_rotary(config, head_dim, config.integer("max_position_embeddings", context))
        turned = [msgspec.structs.replace(rotary, base=float(base)) if base else None for base in bases]
        return [{**each, "position": position} for each, position in zip(windows, turned, strict=True)]

    return found


def written(spec: ModelSpec) -> dict[str, Any]:
    """The config fields of each layer's window and base."""
    positions = [of_kind(block.attention, Attention).position for block in spec.blocks]
    return {**write_sliding(spec), _BASES: [0 if each is None else of_kind(each, Rotary).base for each in positions]}


_DECODER = Decoder(
    with_defaults(
        granite.DECODER.fields,
        vocab_size=100352,
        hidden_size=2560,
        intermediate_size=8192,
        num_hidden_layers=24,
        num_attention_heads=20,
        num_key_value_heads=4,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    ),
    fixed={**granite.DECODER.fixed, **SINKS},
    layers=layers(8192),
    written=written,
)

_GRANITE_SWA = _DECODER.architecture(
    "granite_swa",
    "GraniteSWAForCausalLM",
    (*leaves_of(EMBEDDING), *SUNK, *leaves_of({**ATTENTION, **FEED_FORWARD, **NORMS, **ENDS})),
    released="2026",
    token_ids={"bos_token_id": 100257, "eos_token_id": 100257},
    reference=lambda _: ("eager",),
    reference_quirk="transformers' granite_swa has no sdpa path",
)
