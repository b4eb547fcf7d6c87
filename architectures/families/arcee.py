"""AFM (Arcee 2025): llama with a plain feed-forward with squared ReLU.

Source: transformers models/arcee/{configuration,modeling}_arcee.py.
"""

from ...components import FeedForward
from ..decoder import DecoderFamily
from ..fields import ATTENTION_BIAS, MLP_BIAS, llama_fields
from ..usual import LEAVES

_DECODER = DecoderFamily(
    {
        **llama_fields(hidden=2560, intermediate=18432, activation="relu2", context=4096, eps=1e-5),
        "attention_bias": ATTENTION_BIAS,
        "mlp_bias": MLP_BIAS,
    },
    inner=FeedForward,
    whole_heads=True,
)

_ARCEE = _DECODER.architecture(
    "arcee", "ArceeForCausalLM", LEAVES, released="2025-06", token_ids={"bos_token_id": 128000, "eos_token_id": 128001}
)
