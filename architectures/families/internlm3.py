"""InternLM 3 (Shanghai AI Laboratory 2025): llama by another name, with one switch for all biases.

Source: transformers models/internlm3/configuration_internlm3.py; its model is LlamaForCausalLM.
"""

from __future__ import annotations

from ..config import ConfigReader
from ..decoder import USUAL, Decoder, Field, with_defaults
from .llama import LEAVES, LLAMA_DROPPED


def biased(config: ConfigReader, name: str, default: bool) -> bool:
    """The one switch, under either of its names."""
    found = config.boolean(name, default)
    other = config.boolean("mlp_bias" if name == "attention_bias" else "attention_bias", default)
    if other != found:
        raise config.fail(name, found, f"{other}: transformers refuses biases in attention or feed-forward alone")
    return found


DECODER = Decoder(
    {
        **with_defaults(
            USUAL,
            vocab_size=128512,
            intermediate_size=10240,
            num_hidden_layers=48,
            num_key_value_heads=2,
            head_dim=128,
            max_position_embeddings=32768,
            rms_norm_eps=1e-5,
        ),
        "attention_bias": Field("attention.qkv_bias attention.output_bias", False, biased),
        "mlp_bias": Field("feed_forward.up_bias feed_forward.down_bias", False, biased),
    },
    whole_heads=True,
)

INTERNLM3 = DECODER.architecture(
    "internlm3",
    "InternLM3ForCausalLM",
    LEAVES,
    released="2025-01",
    token_ids={"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2},
    dropped=LLAMA_DROPPED,
    config_aliases={"attention_bias": ("qkv_bias",), "mlp_bias": ("bias",)},
)
