"""Gemma (2403.08295): llama with norms that multiply by 1 + weight in fp32, and embeddings multiplied by √hidden.

transformers reads a `hidden_act` of gelu as its tanh approximation, which the first releases meant.

Source: transformers models/gemma/{configuration,modeling}_gemma.py.
"""

from typing import Any

from ..config import ConfigReader
from ..decoder import DecoderFamily
from ..draws import among
from ..fields import ACTIVATIONS, ATTENTION_BIAS, Field, choice, llama_fields, with_defaults, without
from ..usual import LEAVES

FIELDS = {
    **llama_fields(
        vocab=256000,
        hidden=3072,
        intermediate=24576,
        layers=28,
        heads=16,
        kv_heads=16,
        head_dim=256,
        context=8192,
        tied=True,
        activation="gelu_pytorch_tanh",
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
        {"hidden_activation" if name == "hidden_act" else name: field for name, field in FIELDS.items()},
        hidden=2304,
        intermediate=9216,
        layers=26,
        heads=8,
        kv_heads=4,
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
"""The config fields of Gemma 2 and later."""
GEMMA_IDS = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
BIDIRECTIONAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "use_bidirectional_attention": ((None, False), "gptkit does not support bidirectional attention for this family")
}

_ACTIVATIONS = {**without(ACTIVATIONS, "gelu"), "gelu": "gelu_tanh"}
_DECODER = DecoderFamily({**FIELDS, "hidden_act": choice("activation", "gelu_pytorch_tanh", _ACTIVATIONS)}, fixed=FIXED)

GEMMA = _DECODER.architecture(
    "gemma",
    "GemmaForCausalLM",
    LEAVES,
    released="2024-02",
    token_ids=GEMMA_IDS,
    irrelevant={"hidden_activation": "transformers reads hidden_act instead"},
    refused=BIDIRECTIONAL,
)
