"""SmolLM 3 (Hugging Face 2025): llama, without a position encoding in every fourth layer.

Source: transformers models/smollm3/{configuration,modeling}_smollm3.py.
"""

from ..decoder import DecoderFamily
from ..fields import ATTENTION_BIAS, MLP_BIAS, llama_fields
from ..lenses import rope_in, switched
from ..places import flagged, nth, others
from ..rope import RotaryKind
from ..usual import LEAVES

_TURNING = flagged("no_rope_layers", others(nth("no_rope_layer_interval", 4)), "layers without RoPE")

_DECODER = DecoderFamily(
    {
        **llama_fields(vocab=128256, hidden=2048, layers=36, heads=16, kv_heads=4, context=32768, tied=True),
        "attention_bias": ATTENTION_BIAS,
        "mlp_bias": MLP_BIAS,
    },
    rotary=RotaryKind(2e6),
    layers=rope_in(_TURNING, switched(others(_TURNING), window=None)),
)

_SMOLLM3 = _DECODER.architecture(
    "smollm3",
    "SmolLM3ForCausalLM",
    LEAVES,
    released="2025-07",
    token_ids={"bos_token_id": 128000, "eos_token_id": 128001, "pad_token_id": 128004},
)
