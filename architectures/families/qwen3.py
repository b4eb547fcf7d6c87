"""Qwen3 (2505.09388), dense: llama with an RMSNorm on every query and key head, and a head_dim of its own.

Source: transformers models/qwen3/{configuration,modeling}_qwen3.py.
"""

from __future__ import annotations

from ..base import Architecture
from ..decoder import Decoder, with_defaults
from .llama import BIAS, LEAVES, LLAMA_DROPPED
from .qwen2 import FIELDS, windows, write_windows

DECODER = Decoder(
    {**with_defaults(FIELDS, head_dim=128), "attention_bias": BIAS},
    head_norms="same",
    layers=windows,
    written=write_windows,
)

QWEN3 = Architecture(
    name="qwen3",
    model_types=("qwen3",),
    hf_class="Qwen3ForCausalLM",
    hf_config="Qwen3Config",
    kinds=DECODER.kinds,
    read=DECODER.read,
    write=DECODER.write,
    leaves=LEAVES,
    prefix="model.",
    dropped=LLAMA_DROPPED,
)
