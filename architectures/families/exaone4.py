"""EXAONE 4 (LG 2025, 2507.11407): llama with norms after each sub-layer and on query and key heads. If some layers have
a sliding window, the layers without one have no position encoding.

Source: transformers models/exaone4/{configuration,modeling}_exaone4.py.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ...components import ModelSpec
from ..config import ConfigReader
from ..decoder import DecoderFamily
from ..fields import OUTPUT_NORMS, llama_fields
from ..lenses import Lens, draw_windows, rope_in_windows, sliding, write_windows
from ..usual import OUTPUT_NORM_LEAVES

_WINDOW = 4096


def _layers(config: ConfigReader, values: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return the window of each layer, and which layers have no position encoding."""
    # transformers makes no layer types from patterns that are strings ("LLLG").
    stated = isinstance(config.raw("layer_types"), list)
    config.raw("sliding_window_pattern")
    every = 1 if stated else config.integer("sliding_window_pattern", 4)
    if config.optional_integer("sliding_window", _WINDOW) is None:
        if not stated:
            raise config.fail("layer_types", None, "a list of layer types, since sliding_window is null")
        return sliding(1, None).get(config, values)
    return rope_in_windows(sliding(every, _WINDOW)).get(config, values)


def _written(spec: ModelSpec) -> dict[str, Any]:
    """Return the config fields of the windows.

    The field of the width is null if no layer has a window and the layers have RoPE.
    """
    fields = write_windows(spec)
    any_rope = any(getattr(block.attention, "position", None) is not None for block in spec.blocks)
    return (
        {**fields, "sliding_window": None} if any_rope and "sliding_attention" not in fields["layer_types"] else fields
    )


EXAONE_WINDOWS = Lens(_layers, _written, draw_windows)

_DECODER = DecoderFamily(
    llama_fields(vocab=102400, intermediate=16384, kv_heads=32, eps=1e-5),
    norms=OUTPUT_NORMS,
    head_norms="same",
    layers=EXAONE_WINDOWS,
)

_EXAONE4 = _DECODER.architecture(
    "exaone4",
    "Exaone4ForCausalLM",
    OUTPUT_NORM_LEAVES,
    released="2025-07",
    token_ids={"bos_token_id": 0, "eos_token_id": 2},
)
