"""Granite 3 MoE with shared experts (IBM 2025), released only as research checkpoints.

Source: transformers models/granitemoeshared/{configuration,modeling}_granitemoeshared.py.
"""

from ..base import Leaf, by_name
from ..decoder import Decoder, Mixtures
from ..fields import Field, none_or_more
from ..layout import Layout
from ..usual import B, T
from . import granitemoe
from .granitemoe import FIELDS, FIXED, LEAVES, STACKED

DECODER = Decoder(
    {**FIELDS, "shared_intermediate_size": Field("shared_size", 0, none_or_more)},
    fixed=FIXED,
    mixtures=Mixtures(shared={"fused": True}),
)
_SHARED = B + "feed_forward.shared."

GRANITEMOESHARED = DECODER.architecture(
    "granitemoeshared",
    "GraniteMoeSharedForCausalLM",
    by_name(
        (
            *LEAVES,
            Leaf(
                T + "shared_mlp.input_linear.weight",
                (_SHARED + "gate_proj.weight", _SHARED + "up_proj.weight"),
                Layout("(part shared) hidden", split="part", parts=("1", "1")),
            ),
            Leaf(T + "shared_mlp.output_linear.weight", _SHARED + "down_proj.weight"),
        ),
        STACKED,
    ),
    stacked=STACKED,
    released="2025-02",
    token_ids=granitemoe.GRANITEMOE.token_ids,
)
