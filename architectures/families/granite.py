"""Granite 3 (IBM 2024): llama with multipliers on the embedding, the branches, the scores and the logits.

Source: transformers models/granite/{configuration,modeling}_granite.py.
"""

from ..config import FLOAT32_MAX, ConfigReader
from ..decoder import Decoder
from ..fields import ATTENTION_BIAS, MLP_BIAS, USUAL, Field
from ..usual import LEAVES


def _inverse(config: ConfigReader, name: str, default: float) -> float:
    """The factor of the logits, which config.json gives as a divisor."""
    divisor = config.number(name, default)
    if 1 / divisor > FLOAT32_MAX:
        raise config.fail(name, divisor, "a number whose inverse float32 can hold")
    return 1 / divisor


DECODER = Decoder(
    {
        **USUAL,
        "attention_bias": ATTENTION_BIAS,
        "mlp_bias": MLP_BIAS,
        "embedding_multiplier": Field("embedding.multiplier", 1.0),
        "attention_multiplier": Field("attention.scale", 1.0),
        "residual_multiplier": Field("branch.multiplier", 1.0),
        "logits_scaling": Field("head.multiplier", 1.0, _inverse, lambda factor: float(f"{1 / factor:.14g}")),
    },
    fixed={"head.scaling": "divide"},
)

_GRANITE = DECODER.architecture(
    "granite", "GraniteForCausalLM", LEAVES, released="2024-10", token_ids={"bos_token_id": 1, "eos_token_id": 2}
)
