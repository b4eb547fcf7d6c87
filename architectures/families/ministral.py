"""Ministral 8B (Mistral 2024): mistral with a window in some layers.

Source: transformers models/ministral/{configuration,modeling}_ministral.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..config import ConfigReader
from ..decoder import Decoder, sliding, write_sliding
from . import mistral
from .llama import LEAVES, LLAMA_DROPPED


def layers(config: ConfigReader, count: int, head_dim: int) -> Sequence[Mapping[str, Any]]:
    """A window in every layer where `layer_types` does not say in which, and in none where there is none."""
    window = config.optional_integer("sliding_window", 4096)
    return sliding(1 if window is None else count + 1, window)(config, count, head_dim)


def written(spec: Any) -> dict[str, Any]:
    """The config fields of each layer's window."""
    fields = write_sliding(spec)
    return fields if "sliding_attention" in fields["layer_types"] else {**fields, "sliding_window": None}


DECODER = Decoder(
    {name: each for name, each in mistral.FIELDS.items() if name != "sliding_window"}, layers=layers, written=written
)

MINISTRAL = DECODER.architecture(
    "ministral",
    "MinistralForCausalLM",
    LEAVES,
    released="2024-10",
    token_ids={"bos_token_id": 1, "eos_token_id": 2},
    dropped=LLAMA_DROPPED,
)
