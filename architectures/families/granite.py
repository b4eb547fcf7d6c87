"""Granite 3 (IBM 2024): llama with multipliers on the embedding, the branches, the scores and the logits.

Source: transformers models/granite/{configuration,modeling}_granite.py.
"""

from ..decoder import DecoderFamily
from ..fields import ATTENTION_BIAS, LOGITS_DIVISOR, MLP_BIAS, USUAL, Field
from ..usual import LEAVES

DECODER = DecoderFamily(
    {
        **USUAL,
        "attention_bias": ATTENTION_BIAS,
        "mlp_bias": MLP_BIAS,
        "embedding_multiplier": Field("embedding.multiplier", 1.0),
        "attention_multiplier": Field("attention.scale", 1.0),
        "residual_multiplier": Field("branch.multiplier", 1.0),
        "logits_scaling": LOGITS_DIVISOR,
    },
    fixed={"head.scaling": "divide"},
)

_GRANITE = DECODER.architecture(
    "granite", "GraniteForCausalLM", LEAVES, released="2024-10", token_ids={"bos_token_id": 1, "eos_token_id": 2}
)
