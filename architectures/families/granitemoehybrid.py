"""Granite 4 (IBM 2025): granite with Mamba-2 instead of attention in most layers. Attention usually has no position
encoding. Feed-forwards are mixtures with a shared expert, or consist of this expert only.

Source: transformers models/granitemoehybrid/{configuration,modeling}_granitemoehybrid.py.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ...components import Attention, ModelSpec
from ...components.mixture import MOST_EXPERTS
from ..base import by_name, leaves_of
from ..config import ConfigReader
from ..decoder import DecoderFamily, Mixtures
from ..draws import Config, Random, Sizes, sometimes
from ..fields import Field, none_or_more
from ..lenses import Lens, by_layer_types, sparse_layers
from ..obstacles import of_kind
from ..recurrences import LINEAR, MAMBA2, mamba2_leaves, without_attention
from ..usual import B, T
from .granitemoe import FIELDS, FIXED, LEAVES, SHARED_MLP, STACKED


def _some(config: ConfigReader, name: str, default: int) -> int | None:
    """Read a number of experts, where 0 means None."""
    number = none_or_more(config, name, default)
    if number > MOST_EXPERTS:
        raise config.fail(name, number, f"at most {MOST_EXPERTS:,}")
    return number or None


def _sparse(config: ConfigReader, values: Mapping[str, Any]) -> Sequence[bool]:
    layers = values["layers"]
    return [_some(config, "num_local_experts", 8) is not None] * layers


def _positions(config: ConfigReader, values: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return fields of `Attention` for every layer. They remove RoPE unless the config states it."""
    layers = values["layers"]
    kind = config.raw("position_embedding_type")
    if kind not in (None, "nope", "rope"):
        raise config.fail("position_embedding_type", kind, "rope, nope or null")
    return [{} if kind == "rope" else {"position": None}] * layers


def _write_positions(spec: ModelSpec) -> dict[str, Any]:
    mixers = [block.mixer("attention") for block in spec.blocks]
    position = next((of_kind(mixer, Attention).position for mixer in mixers if mixer is not None), None)
    return {"position_embedding_type": None if position is None else "rope"}


def _written_sparse(spec: ModelSpec) -> dict[str, Any]:
    return {} if any(sparse_layers(spec)) else {"num_local_experts": 0}


def _draw_sparse(chosen: Random, _: Sizes) -> Config:
    """Return, at random, either the config fields of a model without experts or no fields."""
    return chosen.choice(({}, {"num_local_experts": 0, "num_experts_per_tok": 0}))


_DECODER = DecoderFamily(
    {
        **FIELDS,
        "num_local_experts": Field("mixture.experts", 8, _some),
        "num_experts_per_tok": Field("mixture.top_k", 2, _some),
        "intermediate_size": Field("expert_size", 11008),
        "shared_intermediate_size": Field("intermediate shared_size", 1024),
    },
    fixed={**FIXED, "feed_forward.fused": True},
    layers=Lens(_positions, _write_positions, lambda chosen, _: sometimes(chosen, {"position_embedding_type": "rope"})),
    recurrent=without_attention(by_layer_types(LINEAR, lambda _, layers: [False] * layers), MAMBA2),
    mixtures=Mixtures(Lens(_sparse, _written_sparse, _draw_sparse)),
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
    stacked=STACKED,
    released="2025-05",
    token_ids={"bos_token_id": 1, "eos_token_id": 2},
    stated={"layer_types": ["linear_attention", "full_attention"] * 16},
    config_aliases={"layer_types": ("layers_block_type",)},
)
