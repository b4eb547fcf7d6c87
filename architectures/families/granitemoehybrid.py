"""Granite 4 (IBM 2025): Mamba-2 in most layers, attention in the others, mostly without positions, and granite's
multipliers. Feed-forwards are mixtures with a shared expert, or only this expert.

Source: transformers models/granitemoehybrid/{configuration,modeling}_granitemoehybrid.py.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ...components import Attention, Mamba2, ModelSpec
from ...components.mixture import MOST_EXPERTS
from ..base import by_name, leaves_of
from ..config import ConfigReader
from ..decoder import DecoderFamily, Mixtures
from ..draws import Config, Random, Sizes, sometimes, types_with_attention
from ..fields import Field, none_or_more
from ..lenses import Lens, one_of, sparse_layers
from ..obstacles import of_kind
from ..recurrences import LINEAR, draw_mamba2, mamba2_leaves, read_mamba2, written_by
from ..usual import B, T
from .granitemoe import FIELDS, FIXED, LEAVES, STACKED, shared_mlp


def _some(config: ConfigReader, name: str, default: int) -> int | None:
    """Read a number of experts, where 0 means None."""
    found = none_or_more(config, name, default)
    if found > MOST_EXPERTS:
        raise config.fail(name, found, f"at most {MOST_EXPERTS:,}")
    return found or None


def _sparse(config: ConfigReader, values: Mapping[str, Any]) -> Sequence[bool]:
    layers = values["layers"]
    return [_some(config, "num_local_experts", 8) is not None] * layers


def _recurrences(config: ConfigReader, values: Mapping[str, Any]) -> list[Mamba2 | None]:
    """Return Mamba-2 for each layer without attention, and None for the others."""
    count = values["layers"]
    mixer = read_mamba2(config, values)
    return [mixer if kind == LINEAR else None for kind in one_of(config, count, [LINEAR] * count, LINEAR)]


def _positions(config: ConfigReader, values: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return no positions for any layer, unless `position_embedding_type` is rope."""
    layers = values["layers"]
    kind = config.raw("position_embedding_type")
    if kind not in (None, "nope", "rope"):
        raise config.fail("position_embedding_type", kind, "rope, nope or null")
    return [{} if kind == "rope" else {"position": None}] * layers


def _written(spec: ModelSpec) -> dict[str, Any]:
    mixers = [block.mixer("attention") for block in spec.blocks]
    position = next((of_kind(each, Attention).position for each in mixers if each is not None), None)
    types = written_by(lambda whole: {"layer_types": ["full_attention" if each else LINEAR for each in whole]})
    return {**types(spec), "position_embedding_type": None if position is None else "rope"}


def _draw(chosen: Random, sizes: Sizes) -> Config:
    types = types_with_attention(chosen, sizes["layers"], LINEAR)
    return {**draw_mamba2(chosen, sizes["hidden"]), "layer_types": types}


def _written_sparse(spec: ModelSpec) -> dict[str, Any]:
    return {} if any(sparse_layers(spec)) else {"num_local_experts": 0}


def _draw_sparse(chosen: Random, _: Sizes) -> Config:
    """Draw a model without experts, or nothing."""
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
    layers=Lens(_positions, draw=lambda chosen, _: sometimes(chosen, {"position_embedding_type": "rope"})),
    recurrent=Lens(_recurrences, _written, _draw),
    mixtures=Mixtures(Lens(_sparse, _written_sparse, _draw_sparse)),
)


_GRANITEMOEHYBRID = _DECODER.architecture(
    "granitemoehybrid",
    "GraniteMoeHybridForCausalLM",
    by_name(
        (
            *LEAVES,
            *shared_mlp(".shared"),
            *shared_mlp(""),
            *leaves_of({T + "input_layernorm": B + "recurrence_norm"}),
            *mamba2_leaves(T + "mamba."),
        ),
        STACKED,
    ),
    stacked=STACKED,
    released="2025-05",
    kinds=_DECODER.kinds | {Mamba2},
    token_ids={"bos_token_id": 1, "eos_token_id": 2},
    stated={"layer_types": ["linear_attention", "full_attention"] * 16},
    config_aliases={"layer_types": ("layers_block_type",)},
)
