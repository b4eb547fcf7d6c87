"""The language model of Cohere Compass (Cohere 2026): Command R7B with separate RoPE settings for layers with and
without a sliding window. Either kind may have no RoPE. RoPE rotates halves of heads.

Positions have three axes for images. In a text, the three are equal.

Source: transformers models/cohere_compass/{configuration,modeling}_cohere_compass.py.
"""

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from ...components import LayerNorm, ModelSpec, Rotary
from ..base import leaves_of
from ..config import ConfigReader
from ..decoder import DecoderFamily
from ..draws import WINDOWS, Config, Sizes, kind_by_layer, sometimes
from ..fields import PRE, Field, without
from ..lenses import Lens, attentions, write_windows
from ..obstacles import of_kind
from ..rope import RotaryKind, draw_scaling, read_rotary, write_rotaries
from ..usual import EMBEDDING, ENDS, FEED_FORWARD, B, T
from . import cohere

_TYPES = ("default", "linear", "llama3", "yarn")
_ROTARY = RotaryKind(types={name: name for name in _TYPES})
_ROPE = "rope_parameters"


def _scale(config: ConfigReader, name: str, default: float) -> float:
    """Return the factor of the logits, which is 1 where the field is null."""
    return config.optional_number(name) or default


def _position(parameters_by_kind: ConfigReader, kind: str, values: Mapping[str, Any]) -> Rotary | None:
    """Return the RoPE of the layers of a kind, or None if the config has null for this kind."""
    parameters = parameters_by_kind.raw(kind, "nothing")
    if parameters is None:
        return None
    if not isinstance(parameters, dict) or parameters.get("rope_theta") is None:
        raise parameters_by_kind.fail(
            kind, parameters, "an object with a rope_theta, or null if these layers have no position encoding"
        )
    reader = parameters_by_kind.objects[kind] = ConfigReader({_ROPE: parameters})
    return read_rotary(reader, values["head_dim"], values["context"], _ROTARY)


def _layers(config: ConfigReader, values: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return the window and the position encoding of each layer."""
    types = config.layer_types(["full_attention"] * values["layers"])
    window = config.integer("sliding_window", 4096)  # transformers needs it even if no layer has a window
    parameters_by_kind = config.inner(_ROPE)
    windows = {"full_attention": None, "sliding_attention": window}
    # Released files have the last two fields, and transformers ignores them. It also ignores kinds without layers.
    parameters_by_kind.used |= {f"{parameters_by_kind.place}{name}" for name in (*windows, "rope_theta", "rope_type")}
    positions = {kind: _position(parameters_by_kind, kind, values) for kind in dict.fromkeys(types)}
    return [{"window": windows[kind], "position": positions[kind]} for kind in types]


def _write_layers(spec: ModelSpec) -> dict[str, Any]:
    """Return the config fields that `_layers` reads."""
    fields = write_windows(spec)
    positions = dict(zip(fields["layer_types"], (mixer.position for mixer in attentions(spec)), strict=True))
    rotaries = {kind: of_kind(position, Rotary) for kind, position in positions.items() if position is not None}
    return {**fields, _ROPE: {**dict.fromkeys(positions), **write_rotaries(rotaries)[_ROPE]}}


def _draw_layers(chosen: Random, sizes: Sizes) -> Config:
    def rope() -> Config | None:
        fields = draw_scaling(chosen, sizes["head_dim"])
        fields = fields if fields["rope_type"] in _TYPES else {"rope_type": "default"}
        fields = without(fields, "partial_rotary_factor", "truncate")
        return chosen.choice((None, {**fields, "rope_theta": 37.5}, {**fields, "rope_theta": 1e4}))

    types = kind_by_layer(chosen, sizes["layers"], "full_attention", "sliding_attention")
    windows = sometimes(chosen, {"layer_types": types, "sliding_window": chosen.choice(WINDOWS)})
    return {**windows, _ROPE: {kind: rope() for kind in ("full_attention", "sliding_attention")}}


_DECODER = DecoderFamily(
    {**without(cohere.DECODER.fields, "use_qk_norm"), "logit_scale": Field("head.multiplier", 1.0, _scale)},
    norm=LayerNorm,
    norms=PRE[:1],
    fixed=cohere.FIXED,
    rotary=None,
    layers=Lens(_layers, _write_layers, _draw_layers),
)

COHERE_COMPASS = _DECODER.architecture(
    "cohere_compass_text",
    "CohereCompassForCausalLM",
    leaves_of({**EMBEDDING, **cohere.ATTENTION, **FEED_FORWARD, T + "input_layernorm": B + "attention_norm", **ENDS}),
    released="2026",
    hf_config="CohereCompassTextConfig",
    token_ids={"bos_token_id": 5, "eos_token_id": 255001, "pad_token_id": 0},
    stated={_ROPE: {"full_attention": {"rope_type": "default", "rope_theta": 10_000.0}}},
    irrelevant={"pooling": "classification heads"},
    refused={"rope_scaling": ((None,), "transformers fails for this family if rope_scaling is set")},
)
