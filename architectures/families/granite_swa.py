"""Granite with sliding windows (IBM 2026): granite with attention sinks and a window in three of four layers. Every
layer has its own RoPE base, or no RoPE.

Source: transformers models/granite_swa/{configuration,modeling}_granite_swa.py.
"""

from ..base import Leaf, leaves_of, only_eager
from ..decoder import DecoderFamily
from ..fields import with_defaults
from ..lenses import rope_by_base, sliding
from ..usual import ATTENTION, EMBEDDING, ENDS, FEED_FORWARD, NORMS, B, T
from . import granite

SINKS = {"attention.sinks": True, "attention.sunk": "behind it"}
SUNK = (Leaf(T + "self_attn.sinks", B + "attention.sinks"),)

_DECODER = DecoderFamily(
    with_defaults(
        granite.DECODER.fields,
        vocab=100352,
        hidden=2560,
        intermediate=8192,
        layers=24,
        heads=20,
        kv_heads=4,
        context=8192,
        eps=1e-5,
        tied=True,
    ),
    fixed={**granite.DECODER.fixed, **SINKS},
    layers=rope_by_base(sliding(4, 128, first=0)),
)

_GRANITE_SWA = _DECODER.architecture(
    "granite_swa",
    "GraniteSWAForCausalLM",
    (*leaves_of(EMBEDDING), *SUNK, *leaves_of({**ATTENTION, **FEED_FORWARD, **NORMS, **ENDS})),
    released="2026",
    token_ids={"bos_token_id": 100257, "eos_token_id": 100257},
    **only_eager(),
)
