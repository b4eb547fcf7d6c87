"""gpt-oss (OpenAI, 2508.10925): attention with sinks and biases, a sliding window in every second layer, YaRN, and
mixtures of experts in every layer. The experts have biases. They limit the outputs of the gate and up projections, and
add 1 to that of the up projection.

One tensor contains all experts, stored as [in, out], in which columns of gate and up alternate. The released files have
experts in MXFP4, which `converter.quantised` converts to floating point.

Source: transformers models/gpt_oss/{configuration,modeling}_gpt_oss.py.
"""

from typing import Any

from ..base import Leaf, leaves_of, only_eager
from ..decoder import DecoderFamily, Mixtures
from ..fields import ATTENTION_BIAS, Field, llama_fields
from ..layout import Layout
from ..lenses import sliding
from ..rope import RotaryKind
from ..usual import ATTENTION, EMBEDDING, ENDS, NORMS, B, T

_FIELDS = llama_fields(
    vocab=201088, hidden=2880, intermediate=2880, layers=36, heads=64, kv_heads=8, head_dim=64, context=131072, eps=1e-5
)
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}

_DECODER = DecoderFamily(
    {
        **{name: field for name, field in _FIELDS.items() if name != "hidden_act"},
        "attention_bias": ATTENTION_BIAS._replace(default=True),
        "swiglu_limit": Field("feed_forward.limit", 7.0),
        "num_local_experts": Field("mixture.experts", 128),
        "num_experts_per_tok": Field("mixture.top_k", 4),
    },
    fixed={
        "activation": "quick_gelu",
        "norm.cast": "after_weight",
        "attention.sinks": True,
        "attention.softmax": "input",
        "feed_forward.up_shift": 1.0,
        "feed_forward.up_bias": True,
        "feed_forward.down_bias": True,
        "feed_forward.arithmetic": "conv1d_add",
        "mixture.router_bias": True,
        "mixture.chosen_by": "logits",
        "mixture.scored_in": "input",
    },
    rotary=RotaryKind(150_000.0, usual=_YARN, joined=True),
    layers=sliding(2, 128),
    mixtures=Mixtures(),
)

MLP, EXPERT = T + "mlp.experts.", B + "feed_forward.experts.{expert}."

BOTH = {suffix: (f"{EXPERT}gate_proj.{suffix}", f"{EXPERT}up_proj.{suffix}") for suffix in ("weight", "bias")}
"""The shared names of an expert's gate and up projections, by "weight" or "bias"."""

_TURNS: dict[str, Any] = {"split": "part", "parts": ("1", "1"), "stack": "experts"}
_LEAVES = (
    *leaves_of(EMBEDDING),
    Leaf(T + "self_attn.sinks", B + "attention.sinks"),
    *leaves_of({**ATTENTION, T + "mlp.router": B + "feed_forward.router"}),
    Leaf(
        MLP + "gate_up_proj",
        BOTH["weight"],
        Layout("experts hidden (intermediate part)", "(intermediate part) hidden", **_TURNS),
    ),
    Leaf(MLP + "gate_up_proj_bias", BOTH["bias"], Layout("experts (intermediate part)", **_TURNS)),
    Leaf(
        MLP + "down_proj",
        EXPERT + "down_proj.weight",
        Layout("experts intermediate hidden", "hidden intermediate", stack="experts"),
    ),
    Leaf(MLP + "down_proj_bias", EXPERT + "down_proj.bias", Layout("experts hidden", stack="experts")),
    *leaves_of({**NORMS, **ENDS}),
)

_GPT_OSS = _DECODER.architecture(
    "gpt_oss",
    "GptOssForCausalLM",
    _LEAVES,
    released="2025-08",
    config_aliases={"num_local_experts": ("num_experts",)},
    irrelevant={
        "hidden_act": "transformers ignores this field and computes gate · σ(1.702 · gate)",
        "experts_per_token": "a copy of num_experts_per_tok, which transformers reads",
        "initial_context_length": "a copy of what rope_scaling says",
    },
    refused={"swiglu_alpha": ((1.702, None), "gptkit supports this activation only with the factor 1.702")},
    **only_eager(),
)
