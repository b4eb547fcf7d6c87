"""Jamba (AI21 2403.19887): llama with Mamba instead of attention in most layers, and with a mixture of experts in every
second layer. Mamba has norms, and attention has no position encoding.

Source: transformers models/jamba/{configuration,modeling}_jamba.py.
"""

from ..base import Stacked, by_name, leaves_of
from ..config import ConfigReader
from ..decoder import DecoderFamily, Mixtures
from ..fields import Field, llama_fields
from ..places import by_one_in, by_period
from ..recurrences import LINEAR, MAMBA, mamba_leaves, without_attention
from ..usual import ATTENTION, EMBEDDING, PROJECTIONS, B, T
from .bamba import ENDS, FEED_FORWARD, NORMS

_DECODER = DecoderFamily(
    {
        **llama_fields(vocab=65536, intermediate=14336, context=262144),
        "num_key_value_heads": Field("kv_heads", 8, ConfigReader.optional_integer),
        "num_experts": Field("mixture.experts", 16),
        "num_experts_per_tok": Field("mixture.top_k", 2),
    },
    fixed={"attention.position": None, "mixture.normalise": False, "mixture.rounded": True},
    rotary=None,
    recurrent=without_attention(by_period("attn", 8, 4, LINEAR), MAMBA),
    mixtures=Mixtures(by_one_in("expert", 2, 1), none=1),
)

_F = T + "feed_forward."
_EXPERT = _F + "experts.{expert}."
_STACKED = (
    Stacked(_F + "experts.gate_up_proj", tuple(f"{_EXPERT}{name}.weight" for name in PROJECTIONS[1:])),
    Stacked(_F + "experts.down_proj", (_EXPERT + "down_proj.weight",)),
)

_JAMBA = _DECODER.architecture(
    "jamba",
    "JambaForCausalLM",
    by_name(
        (
            *leaves_of({**EMBEDDING, **FEED_FORWARD, **NORMS}),
            *leaves_of({_F + "router": B + "feed_forward.router"}),
            *leaves_of({_EXPERT + name: f"{B}feed_forward.experts.{{expert}}.{name}" for name in PROJECTIONS}),
            *leaves_of({T + "input_layernorm": B + "recurrence_norm"}),
            *mamba_leaves(T + "mamba."),
            *leaves_of({f"{T}mamba.{name}_layernorm": f"{B}recurrence.{name}_norm" for name in ("dt", "b", "c")}),
            *leaves_of({**ATTENTION, **ENDS}),
        ),
        _STACKED,
    ),
    released="2024-03",
    stacked=_STACKED,
    token_ids={"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    config_aliases={"num_experts": ("num_local_experts",)},
    stated={"attn_layer_period": 2, "attn_layer_offset": 1},
    irrelevant={
        **dict.fromkeys(("use_mamba_kernels", "use_mambapy", "use_associative_scan"), "which kernels compute it"),
        **dict.fromkeys(("layers_block_type", "layers_num_experts"), "computed from periods and offsets"),
    },
    refused={
        "mamba_inner_layernorms": ((True, None), "transformers ignores this field and always normalises dt, B and C")
    },
)
