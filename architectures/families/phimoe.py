"""Phi-3.5-MoE (Microsoft 2024, 2404.14219): mixtral with LayerNorms with biases, LongRoPE, and separate softmaxes for
the weights of the two experts (SparseMixer).

transformers always uses two experts per token. It uses LongRoPE's short factors for all texts, while the model's own
code uses the long factors for texts longer than the original context. gptkit follows transformers: in a tree, the long
factors equal the short ones.

Source: transformers models/phimoe/{configuration,modeling}_phimoe.py.
"""

from ...components import LayerNorm
from ..base import Leaf, Stacked, by_name
from ..config import ConfigReader
from ..decoder import DecoderFamily, Mixtures
from ..fields import ATTENTION_BIAS, Field, constant, llama_fields
from ..rope import RotaryKind
from ..usual import B, T
from . import mixtral
from .mixtral import MOE

_DECODER = DecoderFamily(
    {
        **llama_fields(vocab=32064, intermediate=6400, kv_heads=8, context=131072, eps=1e-5),
        "attention_bias": ATTENTION_BIAS,
        "lm_head_bias": Field("head.bias", False),
        "sliding_window": Field("attention.window", None, ConfigReader.optional_integer),
        "num_local_experts": Field("mixture.experts", 16),
        "num_experts_per_tok": constant("mixture.top_k", 2, "transformers ignores this field and uses two experts"),
        "router_jitter_noise": Field("mixture.jitter", 0.01),
    },
    norm=LayerNorm,
    fixed={"mixture.normalise": False, "mixture.scored_in": "input"},
    rotary=RotaryKind(
        1e6, entire=True, renewed=True, short_only=True, types={"default": "default", "longrope": "longrope"}
    ),
    mixtures=Mixtures(),
)


_PROJECTIONS = (f"self_attn.{name}_proj.bias" for name in "qkvo")
_BIASES = {
    **{T + name: B + name.replace("self_attn", "attention") for name in _PROJECTIONS},
    T + "input_layernorm.bias": B + "attention_norm.bias",
    T + "post_attention_layernorm.bias": B + "feed_forward_norm.bias",
    "model.norm.bias": "final_norm.bias",
    "lm_head.bias": "head.bias",
}
_HELD = (Stacked(T + "mlp.router.weight", (MOE + "gate.weight",)), *mixtral.STACKED[1:])

_PHIMOE = _DECODER.architecture(
    "phimoe",
    "PhimoeForCausalLM",
    by_name((*mixtral.LEAVES, *(Leaf(theirs, ours) for theirs, ours in _BIASES.items())), _HELD),
    released="2024-08",
    token_ids={"bos_token_id": 1, "eos_token_id": 2},
    stacked=_HELD,
    irrelevant={"input_jitter_noise": "training only"},
)
