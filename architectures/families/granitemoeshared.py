"""Granite 3 MoE with shared experts (IBM 2025), released only as research checkpoints.

Source: transformers models/granitemoeshared/{configuration,modeling}_granitemoeshared.py.
"""

from ..base import by_name
from ..decoder import DecoderFamily, Mixtures
from ..fields import Field, none_or_more
from . import granitemoe
from .granitemoe import FIELDS, FIXED, LEAVES, SHARED_MLP, STACKED

_DECODER = DecoderFamily(
    {**FIELDS, "shared_intermediate_size": Field("shared_size", 0, none_or_more)},
    fixed=FIXED,
    mixtures=Mixtures(shared={"fused": True}),
)

_GRANITEMOESHARED = _DECODER.architecture(
    "granitemoeshared",
    "GraniteMoeSharedForCausalLM",
    by_name((*LEAVES, *SHARED_MLP["feed_forward.shared"]), STACKED),
    stacked=STACKED,
    released="2025-02",
    token_ids=granitemoe.GRANITEMOE.token_ids,
)
