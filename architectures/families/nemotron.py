"""Nemotron 3 and 4, Minitron (NVIDIA 2402.16819, 2407.14679): llama with LayerNorms that multiply by 1 + weight, RoPE
on half of each head, and a plain feed-forward with squared ReLU.

Source: transformers models/nemotron/{configuration,modeling}_nemotron.py.
"""

from ...components import FeedForward, LayerNorm
from ..decoder import DecoderFamily
from ..fields import ATTENTION_BIAS, MLP_BIAS, Field, llama_fields
from ..rope import PART, RotaryKind
from ..usual import LEAVES

_FIELDS = llama_fields(vocab=256000, hidden=6144, intermediate=24576, heads=48, activation="relu2", context=4096)
_DECODER = DecoderFamily(
    {
        **{name: field for name, field in _FIELDS.items() if name != "rms_norm_eps"},
        "norm_eps": Field("eps", 1e-5),
        "attention_bias": ATTENTION_BIAS,
        "mlp_bias": MLP_BIAS,
    },
    norm=LayerNorm,
    inner=FeedForward,
    fixed={"norm.gain": "1 + weight"},
    rotary=RotaryKind(part=PART, whole=0.5),
)

_NEMOTRON = _DECODER.architecture(
    "nemotron", "NemotronForCausalLM", LEAVES, released="2024-06", token_ids={"bos_token_id": 2, "eos_token_id": 3}
)
