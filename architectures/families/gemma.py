"""Gemma (2403.08295): llama with norms that multiply by 1 + weight in fp32, and embeddings multiplied by √hidden.

Source: transformers models/gemma/{configuration,modeling}_gemma.py. A `hidden_act` of gelu is read there as its tanh
approximation, which the first releases meant.
"""

from typing import Any

from ..config import ConfigReader
from ..decoder import Decoder
from ..draws import among
from ..fields import ACTIVATIONS, ATTENTION_BIAS, USUAL, Field, choice, with_defaults, without
from ..usual import LEAVES

FIELDS = {
    **with_defaults(
        USUAL,
        vocab_size=256000,
        hidden_size=3072,
        intermediate_size=24576,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=16,
        head_dim=256,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        hidden_act="gelu_pytorch_tanh",
    ),
    "attention_bias": ATTENTION_BIAS,
}
FIXED: dict[str, Any] = {
    "norm.gain": "1 + weight",
    "norm.cast": "after_weight",
    "embedding.multiplier": lambda values: values["hidden"] ** 0.5,
    "embedding.scaling": "rounded",
}


LATER_FIELDS = {
    **with_defaults(
        {"hidden_activation" if name == "hidden_act" else name: each for name, each in FIELDS.items()},
        hidden_size=2304,
        intermediate_size=9216,
        num_hidden_layers=26,
        num_attention_heads=8,
        num_key_value_heads=4,
    ),
    "query_pre_attn_scalar": Field(
        "attention.scale",
        256,
        lambda config, name, default: float(config.integer(name, default) ** -0.5),
        lambda scale: max(round(scale**-2), 1),
        draw=among(1, 16, 24, 144),
    ),
    "final_logit_softcapping": Field("head.cap", 30.0, ConfigReader.optional_number),
}
"""The fields of Gemma 2 and later."""
GEMMA_IDS = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
BIDIRECTIONAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "use_bidirectional_attention": ((None, False), "gptkit does not support bidirectional attention for this family")
}


_ACTIVATIONS = {**without(ACTIVATIONS, "gelu"), "gelu": "gelu_tanh"}
_DECODER = Decoder({**FIELDS, "hidden_act": choice("activation", "gelu_pytorch_tanh", _ACTIVATIONS)}, fixed=FIXED)

GEMMA = _DECODER.architecture(
    "gemma",
    "GemmaForCausalLM",
    LEAVES,
    released="2024-02",
    token_ids=GEMMA_IDS,
    irrelevant={"hidden_activation": "transformers reads hidden_act instead"},
    refused=BIDIRECTIONAL,
)
