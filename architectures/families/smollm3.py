"""SmolLM 3 (Hugging Face 2025): llama, without a position encoding in every fourth layer.

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
    """Return the window of each layer, and which layers have no position encoding."""
    count = values["layers"]
    every = config.integer("no_rope_layer_interval", 4)
    rope_flags = config.raw("no_rope_layers")
    if rope_flags is None:
        rope_flags = [int((layer + 1) % every != 0) for layer in range(count)]
    if (
        not isinstance(rope_flags, list)
        or len(rope_flags) != count
        or any(type(switch) is not int for switch in rope_flags)
    ):
        raise config.fail("no_rope_layers", rope_flags, f"a list of {count} integers, with 0 for layers without RoPE")
    window = config.optional_integer("sliding_window")
    window = window if config.boolean("use_sliding_window", False) else None
    usual = ["full_attention" if has_rope or window is None else "sliding_attention" for has_rope in rope_flags]
    types = config.layer_types(usual)
    if window is None and "sliding_attention" in types:
        raise config.fail("layer_types", list(types), "full_attention for every layer, since no sliding window is set")
    return [
        {"window": window if kind == "sliding_attention" else None, **({} if has_rope else {"position": None})}
        for has_rope, kind in zip(rope_flags, types, strict=True)
    ]


def _written(spec: ModelSpec) -> dict[str, Any]:
    """Return the config fields that `_layers` reads."""
    mixers = [of_kind(block.attention, Attention) for block in spec.blocks]
    window = next((mixer.window for mixer in mixers if mixer.window is not None), None)
    return {
        "no_rope_layers": [int(mixer.position is not None) for mixer in mixers],
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "layer_types": ["full_attention" if mixer.window is None else "sliding_attention" for mixer in mixers],
    }


def _draw(chosen: Random, sizes: Sizes) -> Config:
    flags = sometimes(chosen, {"no_rope_layers": kind_by_layer(chosen, sizes["layers"], 0, 1)})
    return {**flags, **chosen.choice(({}, {"use_sliding_window": True, **draw_windows(chosen, sizes)}))}


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
