"""Granite with windows and mixtures (IBM 2026): granite_swa's attention, and granite's mixtures with shared experts.

Source: transformers models/granitemoe_swa/{configuration,modeling}_granitemoe_swa.py. Files have the names of modules.
"""

from dataclasses import replace

from ..base import leaves_of
from ..usual import ATTENTION, EMBEDDING, ENDS, NORMS
from . import granite_swa, granitemoe, granitemoeshared

_DECODER = replace(
    granitemoeshared.DECODER,
    fixed={**granitemoeshared.DECODER.fixed, **granite_swa.SINKS},
    layers=granite_swa.layers(2048),
    written=granite_swa.written,
)

_LEAVES = granitemoeshared.GRANITEMOESHARED.leaves
_HELD = {each.checkpoint[0]: each.parameter for each in granitemoe.STACKED}
_MIXTURE = tuple(replace(leaf, checkpoint=_HELD[leaf.checkpoint]) for leaf in _LEAVES if leaf.checkpoint in _HELD)

_GRANITEMOE_SWA = _DECODER.architecture(
    "granitemoe_swa",
    "GraniteMoeSWAForCausalLM",
    (
        *leaves_of(EMBEDDING),
        *granite_swa.SUNK,
        *leaves_of({**ATTENTION, **NORMS}),
        *reversed(_MIXTURE),  # as modules have them: the router first
        *(leaf for leaf in _LEAVES if ".shared_mlp." in leaf.checkpoint),
        *leaves_of(ENDS),
    ),
    released="2026",
    token_ids=granitemoe.GRANITEMOE.token_ids,
    reference=lambda _: ("eager",),
    reference_quirk="transformers' granitemoe_swa has no sdpa path",
)
