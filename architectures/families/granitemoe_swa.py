"""Granite with windows and mixtures (IBM 2026): granite's mixtures with shared experts behind the attention of
granite_swa.

Source: transformers models/granitemoe_swa/{configuration,modeling}_granitemoe_swa.py. Files have the names of modules.
"""

from dataclasses import replace

from . import granite_swa, granitemoe, granitemoeshared
from .llama import LLAMA_DROPPED
from .qwen2_moe import OF_ROUTERS

_DECODER = replace(
    granitemoeshared.DECODER,
    fixed={**granitemoeshared.DECODER.fixed, **granite_swa.SINKS},
    layers=granite_swa.layers(2048),
    written=granite_swa.written,
)

_LEAVES = granitemoeshared.GRANITEMOESHARED.leaves
_HELD = {each.checkpoint[0]: each.parameter for each in granitemoe.STACKED}

_GRANITEMOE_SWA = _DECODER.architecture(
    "granitemoe_swa",
    "GraniteMoeSWAForCausalLM",
    (*(replace(leaf, checkpoint=_HELD.get(leaf.checkpoint, leaf.checkpoint)) for leaf in _LEAVES), *granite_swa.SUNK),
    released="2026",
    token_ids=granitemoe.GRANITEMOE.token_ids,
    dropped=LLAMA_DROPPED,
    irrelevant=OF_ROUTERS,
    reference=lambda _: ("eager",),
    reference_quirk="transformers' granitemoe_swa has no sdpa path",
)
