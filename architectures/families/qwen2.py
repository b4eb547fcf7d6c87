"""Qwen2 and Qwen2.5 (2407.10671): llama with biases on q, k and v, and optionally a window in the upper layers.

Source: transformers models/qwen2/{configuration,modeling}_qwen2.py.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ...components import ModelSpec
from ..config import ConfigReader
from ..decoder import Decoder
from ..fields import USUAL, with_defaults
from ..lenses import Layers
from ..usual import LEAVES

FIELDS = with_defaults(
    USUAL, vocab_size=151936, intermediate_size=22016, num_key_value_heads=32, max_position_embeddings=32768
)


def windows(config: ConfigReader, layers: int, _head_dim: int) -> Sequence[Mapping[str, Any]]:
    """Each layer's: from `layer_types`, or from `max_window_layers` on where `use_sliding_window` is set."""
    switched_on = config.boolean("use_sliding_window", False)
    stated = config.optional_integer("sliding_window", 4096)
    return _windows(config, layers, stated if switched_on else None, 28, "since use_sliding_window is off")


def windows_from(default: int) -> Layers:
    """As `windows`, where no switch is; `default`: of `max_window_layers`."""
    return lambda config, layers, _: _windows(
        config, layers, config.optional_integer("sliding_window", 4096), default, "since there is no window"
    )


def _windows(
    config: ConfigReader, layers: int, window: int | None, default: int, why: str
) -> Sequence[Mapping[str, Any]]:
    first = config.raw("max_window_layers", default)
    if isinstance(first, bool) or not isinstance(first, int) or first < 0:
        raise config.fail("max_window_layers", first, "an integer from 0")
    usual = ["sliding_attention" if window and layer >= first else "full_attention" for layer in range(layers)]
    types = config.layer_types(usual)
    if window is None and "sliding_attention" in types:
        raise config.fail("layer_types", list(types), f"full_attention everywhere, {why}")
    return [{"window": window if kind == "sliding_attention" else None} for kind in types]


def write_windows(spec: ModelSpec) -> dict[str, Any]:
    """The config fields that say each layer's window."""
    windows = [block.attention.window for block in spec.blocks]
    window = next((w for w in windows if w is not None), None)
    return {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": windows.index(window) if window is not None else len(windows),
        "layer_types": ["full_attention" if w is None else "sliding_attention" for w in windows],
    }


# transformers' Qwen2Config has no head_dim, but its model takes one where config.json brings it along.
_DECODER = Decoder(FIELDS, fixed={"attention.qkv_bias": True}, layers=windows, written=write_windows)

# Qwen2VLTextConfig, and Qwen2_5_VLTextConfig alike
_VISION = {
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_window_layers": 80,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}

_QWEN2 = _DECODER.architecture(
    "qwen2",
    "Qwen2ForCausalLM",
    LEAVES,
    released="2024-01",
    texts=dict.fromkeys(("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"), _VISION),
    irrelevant={"use_mrope": "multimodal positions, off in text models"},
)
