"""Jamba (AI21 2403.19887): Mamba with norms in most layers, attention without positions in some, and a mixture of
experts in every second layer.

Source: transformers models/jamba/{configuration,modeling}_jamba.py.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ...components import Mamba, ModelSpec
from ...components.mixture import MOST_EXPERTS
from ..base import Stacked, by_name, leaves_of
from ..config import ConfigReader
from ..decoder import DecoderFamily, Mixtures
from ..draws import Config, Random, Sizes, sometimes
from ..fields import Field, draw_fields, llama_fields, read_fields, size, write_fields
from ..lenses import Lens, sparse_layers
from ..obstacles import of_kind
from ..recurrences import LINEAR, mamba_leaves, multiple_of_hidden, norms_of, step_rank, width_of
from ..usual import ATTENTION, EMBEDDING, PROJECTIONS, B, T
from .bamba import ENDS, FEED_FORWARD, NORMS

_MAMBA = {
    "mamba_d_state": size("state_size", 16),
    "mamba_dt_rank": step_rank(4096),
    "mamba_d_conv": size("kernel", 4, 1, 2, 4, 5),
    "mamba_proj_bias": Field("bias", False),
    "mamba_conv_bias": Field("conv_bias", True),
}


def _every(config: ConfigReader, what: str, period: int, offset: int, layers: int) -> list[bool]:
    """Return for each layer whether it is of a kind: one in every `period` layers is, from layer `offset` on."""
    every, first = config.integer(f"{what}_layer_period", period), config.raw(f"{what}_layer_offset", offset)
    if type(first) is not int or not 0 <= first < every:
        raise config.fail(f"{what}_layer_offset", first, f"a number from 0, below {what}_layer_period ({every})")
    return [layer % every == first for layer in range(layers)]


def _written_every(what: str, there: Sequence[bool]) -> dict[str, int]:
    """Return the config fields that `_every` reads. If no period fits, they are read back as other layers."""
    places = [layer for layer, each in enumerate(there) if each] or [len(there)]
    every = places[1] - places[0] if len(places) > 1 else len(there) + 1
    return {f"{what}_layer_period": max(every, places[0] + 1), f"{what}_layer_offset": places[0]}


def _recurrences(config: ConfigReader, values: Mapping[str, Any]) -> list[Mamba | None]:
    """Return Mamba for each layer without attention, and None for the others."""
    hidden, whole = values["hidden"], _every(config, "attn", 8, 4, values["layers"])
    if not any(whole):
        raise config.fail(
            "attn_layer_offset",
            config.raw("attn_layer_offset", 4),
            "an offset with which at least one layer has attention: without one, transformers' cache fails",
        )
    types = ["full_attention" if each else LINEAR for each in whole]
    if config.kinds_of_layers() not in (None, types):
        raise config.fail(
            "layer_types", config.raw("layer_types"), "the same layers as attn_layer_period and attn_layer_offset"
        )
    own = read_fields(_MAMBA, config)
    own |= norms_of(own["rank"], own["state_size"], eps=values["eps"])
    inner = width_of(config, "mamba_expand", hidden)
    mixer = Mamba(hidden_size=hidden, inner=inner, activation=values["activation"], **own)
    return [None if each else mixer for each in whole]


def _sparse(config: ConfigReader, values: Mapping[str, Any]) -> Sequence[bool]:
    layers = values["layers"]
    several = config.integer("num_experts", 16, most=MOST_EXPERTS) > 1
    return [each and several for each in _every(config, "expert", 2, 1, layers)]


def _written_sparse(spec: ModelSpec) -> Mapping[str, Any]:
    sparse = sparse_layers(spec)
    return {**_written_every("expert", sparse), **({} if any(sparse) else {"num_experts": 1})}


def _written(spec: ModelSpec) -> dict[str, Any]:
    mixers = [block.mixer("recurrence") for block in spec.blocks]
    found: dict[str, Any] = _written_every("attn", [each is None for each in mixers])
    mixer = next((of_kind(each, Mamba) for each in mixers if each is not None), None)
    own = {} if mixer is None else {"mamba_expand": multiple_of_hidden(mixer), **write_fields(_MAMBA, mixer)}
    return {**found, **own}


def _draw(chosen: Random, sizes: Sizes) -> Config:
    every = chosen.randint(1, 3)
    place = {"attn_layer_period": every, "attn_layer_offset": chosen.randrange(min(every, sizes["layers"]))}
    return {**place, **draw_fields(_MAMBA, chosen, {}), **sometimes(chosen, {"mamba_expand": chosen.choice((1, 3))})}


def _draw_sparse(chosen: Random, _: Sizes) -> Config:
    one = {"num_experts": 1, "num_experts_per_tok": 1}
    return {"expert_layer_period": 2, "expert_layer_offset": chosen.choice((0, 1)), **chosen.choice(({}, one))}


_DECODER = DecoderFamily(
    {
        **llama_fields(vocab=65536, intermediate=14336, context=262144),
        "num_key_value_heads": Field("kv_heads", 8, ConfigReader.optional_integer),
        "num_experts": Field("mixture.experts", 16),
        "num_experts_per_tok": Field("mixture.top_k", 2),
    },
    fixed={"attention.position": None, "mixture.normalise": False, "mixture.rounded": True},
    rotary=None,
    recurrent=Lens(_recurrences, _written, _draw),
    mixtures=Mixtures(Lens(_sparse, _written_sparse, _draw_sparse)),
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
    kinds=_DECODER.kinds | {Mamba},
    stacked=_STACKED,
    token_ids={"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    config_aliases={"num_experts": ("num_local_experts",)},
    stated={"attn_layer_period": 2, "attn_layer_offset": 1},
    irrelevant={
        **dict.fromkeys(("use_mamba_kernels", "use_mambapy", "use_associative_scan"), "which kernels compute it"),
        **dict.fromkeys(("layers_block_type", "layers_num_experts"), "made of periods and offsets"),
    },
    refused={
        "mamba_inner_layernorms": ((True, None), "transformers ignores this field and always normalises dt, B and C")
    },
)
