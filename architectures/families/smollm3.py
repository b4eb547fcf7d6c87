"""SmolLM 3 (Hugging Face 2025): llama, without positions in every fourth layer.

Source: transformers models/smollm3/{configuration,modeling}_smollm3.py.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ...components import Attention, ModelSpec
from ..config import ConfigReader
from ..decoder import DecoderFamily
from ..draws import Config, Random, Sizes, kind_by_layer, sometimes
from ..fields import ATTENTION_BIAS, MLP_BIAS, llama_fields
from ..lenses import Lens, draw_windows
from ..obstacles import of_kind
from ..rope import RotaryKind
from ..usual import LEAVES


def _layers(config: ConfigReader, values: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return the window of each layer, and which layers have no positions."""
    count = values["layers"]
    every = config.integer("no_rope_layer_interval", 4)
    turned = config.raw("no_rope_layers")
    if turned is None:
        turned = [int((layer + 1) % every != 0) for layer in range(count)]
    if not isinstance(turned, list) or len(turned) != count or any(type(each) is not int for each in turned):
        raise config.fail("no_rope_layers", turned, f"a list of {count} integers, with 0 for layers without RoPE")
    window = config.optional_integer("sliding_window")
    window = window if config.boolean("use_sliding_window", False) else None
    usual = ["full_attention" if each or window is None else "sliding_attention" for each in turned]
    types = config.layer_types(usual)
    if window is None and "sliding_attention" in types:
        raise config.fail("layer_types", list(types), "full_attention for every layer, since no sliding window is set")
    return [
        {"window": window if kind == "sliding_attention" else None, **({} if each else {"position": None})}
        for each, kind in zip(turned, types, strict=True)
    ]


def _written(spec: ModelSpec) -> dict[str, Any]:
    """Return the config fields that `_layers` reads."""
    mixers = [of_kind(block.attention, Attention) for block in spec.blocks]
    window = next((each.window for each in mixers if each.window is not None), None)
    return {
        "no_rope_layers": [int(each.position is not None) for each in mixers],
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "layer_types": ["full_attention" if each.window is None else "sliding_attention" for each in mixers],
    }


def _draw(chosen: Random, sizes: Sizes) -> Config:
    turned = sometimes(chosen, {"no_rope_layers": kind_by_layer(chosen, sizes["layers"], 0, 1)})
    return {**turned, **chosen.choice(({}, {"use_sliding_window": True, **draw_windows(chosen, sizes)}))}


_DECODER = DecoderFamily(
    {
        **llama_fields(vocab=128256, hidden=2048, layers=36, heads=16, kv_heads=4, context=32768, tied=True),
        "attention_bias": ATTENTION_BIAS,
        "mlp_bias": MLP_BIAS,
    },
    rotary=RotaryKind(2e6),
    layers=Lens(_layers, _written, _draw),
)

_SMOLLM3 = _DECODER.architecture(
    "smollm3",
    "SmolLM3ForCausalLM",
    LEAVES,
    released="2025-07",
    token_ids={"bos_token_id": 128000, "eos_token_id": 128001, "pad_token_id": 128004},
)
