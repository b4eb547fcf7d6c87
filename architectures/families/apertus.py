"""Apertus (Swiss AI 2025, 2509.14233): llama with norms on query and key heads, and a plain feed-forward with the
activation xIELU (2411.13010), which has parameters.

Source: transformers models/apertus/{configuration,modeling}_apertus.py, activations.py.
"""

from ...components import FeedForward
from ..base import Leaf, leaves_of
from ..decoder import DecoderFamily
from ..fields import ACTIVATIONS, ATTENTION_BIAS, choice, llama_fields
from ..layout import NUMBER
from ..rope import RotaryKind
from ..usual import ATTENTION, EMBEDDING, ENDS, B, T

_DECODER = DecoderFamily(
    {
        **llama_fields(vocab=131072, intermediate=14336, context=65536, eps=1e-5),
        "hidden_act": choice("activation", "xielu", {"xielu": "xielu", **ACTIVATIONS}),
        "attention_bias": ATTENTION_BIAS,
    },
    inner=FeedForward,
    head_norms="same",
    rotary=RotaryKind(
        12_000_000.0,
        usual={
            "rope_type": "llama3",
            "rope_theta": 12_000_000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
    ),
)
_VARIANTS = ("mlp_bias", "post_norm")
_MLP, _OURS = T + "mlp.", B + "feed_forward."
_FEED_FORWARD = {f"{_MLP}{name}": f"{_OURS}{name}" for name in ("up_proj", "down_proj")}
_NORMS = {T + "attention_layernorm": B + "attention_norm", T + "feedforward_layernorm": B + "feed_forward_norm"}

_APERTUS = _DECODER.architecture(
    "apertus",
    "ApertusForCausalLM",
    (
        *leaves_of({**EMBEDDING, **ATTENTION, **_FEED_FORWARD}),
        *(Leaf(f"{_MLP}act_fn.{name}", f"{_OURS}activation.{name}") for name in ("alpha_p", "alpha_n")),
        *(Leaf(f"{_MLP}act_fn.{name}", f"{_OURS}activation.{name}", NUMBER, buffer=True) for name in ("beta", "eps")),
        *leaves_of({**_NORMS, **ENDS}),
    ),
    restated=lambda _: dict.fromkeys(_VARIANTS, False) | {"qk_norm": True},  # mlx-lm 0.32.2, models/apertus.py
    irrelevant=dict.fromkeys((*_VARIANTS, "qk_norm"), "not read by transformers"),
    released="2025-09",
    token_ids={"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3},
)
