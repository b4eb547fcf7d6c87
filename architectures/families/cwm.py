"""Code World Model (Meta 2025): llama 3 with a window in three of four layers.

The config class has Llama 3's RoPE parameters as defaults.

Source: transformers models/cwm/{configuration,modeling}_cwm.py.
"""

from ..decoder import DecoderFamily
from ..fields import MLP_BIAS, llama_fields
from ..lenses import sliding
from ..rope import RotaryKind
from ..usual import LEAVES

_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e6,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

_DECODER = DecoderFamily(
    {
        **llama_fields(
            vocab=128256,
            hidden=6144,
            intermediate=21504,
            layers=64,
            heads=48,
            kv_heads=8,
            head_dim=128,
            context=131072,
            eps=1e-5,
        ),
        "mlp_bias": MLP_BIAS,
    },
    fixed={"attention.output_bias": False},
    rotary=RotaryKind(1e6, usual=_ROPE),
    layers=sliding(4, 8192, first=0),
    whole_heads=True,
)

_CWM = _DECODER.architecture(
    "cwm",
    "CwmForCausalLM",
    LEAVES,
    released="2025-09",
    token_ids={"bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009]},
)
