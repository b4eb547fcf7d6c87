"""Granite 4 (IBM 2025): granite with Mamba-2 instead of attention in most layers. Attention usually has no position
encoding. Feed-forwards are mixtures with a shared expert, or consist of this expert only.

Source: transformers models/granitemoehybrid/{configuration,modeling}_granitemoehybrid.py.
"""

from functools import partial

from ...components import MOST_EXPERTS
from ..base import by_name, leaves_of
from ..decoder import DecoderFamily, Mixtures
from ..fields import Field, choice, none_or_more
from ..places import ALL_LAYERS, by_layer_types, others
from ..recurrences import LINEAR, MAMBA2, UNGROUPED, mamba2_leaves, without_attention
from ..usual import B, T
from .granitemoe import FIELDS, FIXED, LEAVES, SHARED_MLP, STACKED

_DECODER = DecoderFamily(
    {
        **FIELDS,
        "num_local_experts": Field("mixture.experts", 8, partial(none_or_more, most=MOST_EXPERTS)),
        "num_experts_per_tok": Field("mixture.top_k", 2, none_or_more),
        "position_embedding_type": choice("rope", None, {None: False, "nope": False, "rope": True}),
        "intermediate_size": Field("expert_size", 11008),
        "shared_intermediate_size": Field("intermediate shared_size", 1024),
    },
    fixed={**FIXED, "feed_forward.fused": True},
    recurrent=without_attention(by_layer_types(LINEAR, others(ALL_LAYERS).get), MAMBA2),
    mixtures=Mixtures(none=0),
)

_GRANITEMOEHYBRID = _DECODER.architecture(
    "granitemoehybrid",
    "GraniteMoeHybridForCausalLM",
    by_name(
        (
            *LEAVES,
            *SHARED_MLP["feed_forward.shared"],
            *SHARED_MLP["feed_forward"],
            *leaves_of({T + "input_layernorm": B + "recurrence_norm"}),
            *mamba2_leaves(T + "mamba."),
        ),
        STACKED,
    ),
    former_values={"layer_types": {"linear_attention": "mamba", "full_attention": "attention"}},
    stacked=STACKED,
    mended=UNGROUPED,
    released="2025-05",
    token_ids={"bos_token_id": 1, "eos_token_id": 2},
    stated={"layer_types": ["linear_attention", "full_attention"] * 16},
    config_aliases={"layer_types": ("layers_block_type",)},
)
