"""AFM (Arcee 2025): llama with a plain feed-forward with squared ReLU.

Source: transformers models/arcee/{configuration,modeling}_arcee.py.
"""

from ...components import FeedForward
from ..decoder import Decoder
from ..fields import ATTENTION_BIAS, MLP_BIAS, USUAL, with_defaults
from ..usual import LEAVES

_DECODER = Decoder(
    {
        **with_defaults(
            USUAL,
            hidden_size=2560,
            intermediate_size=18432,
            hidden_act="relu2",
            max_position_embeddings=4096,
            rms_norm_eps=1e-5,
        ),
        "attention_bias": ATTENTION_BIAS,
        "mlp_bias": MLP_BIAS,
    },
    inner=FeedForward,
    whole_heads=True,
)

_ARCEE = _DECODER.architecture(
    "arcee", "ArceeForCausalLM", LEAVES, released="2025-06", token_ids={"bos_token_id": 128000, "eos_token_id": 128001}
)
