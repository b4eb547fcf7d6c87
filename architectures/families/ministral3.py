"""Ministral 3 (Mistral 2025): mistral with YaRN, and queries that are multiplied by a factor that grows with their
position.

The parameter of this factor is among the RoPE parameters.

Source: transformers models/ministral3/{configuration,modeling}_ministral3.py.
"""

from collections.abc import Mapping
from typing import Any

from ...components import Attention, ModelSpec, Temperature
from ..config import ConfigReader
from ..decoder import DecoderFamily
from ..draws import Config, Random
from ..fields import with_defaults
from ..lenses import Lens
from ..obstacles import of_kind
from ..rope import ORIGINAL, RotaryKind
from ..usual import LEAVES
from . import mistral

_GROWTH = "llama_4_scaling_beta"
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
}


def _layers(config: ConfigReader, values: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the factor by which queries are multiplied, which grows with their position.

    It is the same in all layers.
    """
    count = values["layers"]
    ropes = [config.inner(name) for name in ("rope_scaling", "rope_parameters")]
    rope = config.inner("rope_scaling" if ropes[0].data else "rope_parameters")
    rope.raw("max_position_embeddings")
    if not rope.data:
        temperature = Temperature(growth=0.1, original_context=16384)
    else:
        kind = rope.raw("rope_type", rope.raw("type", "default"))
        known = kind in ("yarn", "llama3", "longrope")
        length = config.raw(ORIGINAL, _FIELDS["max_position_embeddings"].value(config, "max_position_embeddings"))
        temperature = Temperature(
            growth=rope.number(_GROWTH), original_context=rope.integer(ORIGINAL, length if known else None)
        )
    return [{"temperature": temperature}] * count


_FIELDS = with_defaults(
    mistral.FIELDS, vocab=131072, layers=34, head_dim=128, context=262144, eps=1e-5, sliding_window=None
)
_DECODER = DecoderFamily(_FIELDS, rotary=RotaryKind(usual=_YARN), layers=Lens(_layers, kinds=frozenset({Temperature})))


def _write(spec: ModelSpec) -> dict[str, Any]:
    """Return the config fields that describe a model."""
    fields = _DECODER.write(spec)
    temperature = of_kind(of_kind(spec.blocks[0].attention, Attention).temperature, Temperature)
    length = {ORIGINAL: temperature.original_context}
    return {**fields, "rope_scaling": {**length, **fields["rope_scaling"], _GROWTH: temperature.growth}}


def _draw(chosen: Random) -> Config:
    """Return a random config without RoPE parameters, or with some that include the growth of the queries' factor."""
    config = _DECODER.draw(chosen, {})
    growth = {ORIGINAL: chosen.choice((8, 32)), _GROWTH: 0.3}
    rope = config.get("rope_parameters")
    return config if rope is None else {**config, "rope_parameters": {**growth, **rope}}


_MINISTRAL3 = _DECODER.architecture(
    "ministral3",
    "Ministral3ForCausalLM",
    LEAVES,
    write=_write,
    draw=_draw,
    released="2025-12",
    token_ids={"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 11},
)
