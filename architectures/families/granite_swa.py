"""Granite with windows (IBM 2026): granite with attention sinks, a window in three of four layers, and a RoPE base per
layer, or no positions.

Source: transformers models/granite_swa/{configuration,modeling}_granite_swa.py.
"""

from ..base import Leaf, leaves_of
from ..decoder import Decoder
from ..fields import with_defaults
from ..lenses import sliding, turned_by_base
from ..usual import ATTENTION, EMBEDDING, ENDS, FEED_FORWARD, NORMS, B, T
from . import granite

SINKS = {"attention.sinks": True, "attention.sunk": "behind it"}
SUNK = (Leaf(T + "self_attn.sinks", B + "attention.sinks"),)


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
    layers=turned_by_base(sliding(4, 128, first=0)),
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
