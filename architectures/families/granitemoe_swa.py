"""Granite with windows and mixtures (IBM 2026): granite_swa's attention, and granite's mixtures with shared experts.

Files have the names of transformers' modules.

Source: transformers models/granitemoe_swa/{configuration,modeling}_granitemoe_swa.py.
"""

from dataclasses import replace

from ..base import Leaf, leaves_of, only_eager
from ..decoder import DecoderFamily, Mixtures
from ..fields import Field, none_or_more
from ..lenses import rope_by_base, sliding
from ..usual import ATTENTION, EMBEDDING, ENDS, NORMS, B, T
from .granitemoe import FIELDS, FIXED, GRANITEMOE, LEAVES, SHARED_MLP, STACKED

_DECODER = DecoderFamily(
    {**FIELDS, "shared_intermediate_size": Field("shared_size", 0, none_or_more)},
    fixed={**FIXED, "attention.sinks": True, "attention.sunk": "behind it"},
    mixtures=Mixtures(shared={"fused": True}),
    layers=rope_by_base(sliding(4, 128, first=0)),
)

_HELD = {parameter.checkpoint[0]: parameter.parameter for parameter in STACKED}
_MIXTURE = tuple(replace(leaf, checkpoint=_HELD[leaf.checkpoint]) for leaf in LEAVES if leaf.checkpoint in _HELD)

_GRANITEMOE_SWA = _DECODER.architecture(
    "granitemoe_swa",
    "GraniteMoeSWAForCausalLM",
    (
        *leaves_of(EMBEDDING),
        Leaf(T + "self_attn.sinks", B + "attention.sinks"),
        *leaves_of({**ATTENTION, **NORMS}),
        *reversed(_MIXTURE),  # in the order of modules: the router first
        *SHARED_MLP["feed_forward.shared"],
        *leaves_of(ENDS),
    ),
    released="2026",
    token_ids=GRANITEMOE.token_ids,
    **only_eager(),
)
