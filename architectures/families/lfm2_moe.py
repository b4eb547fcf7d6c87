"""LFM2-MoE (Liquid AI 2511.23404): lfm2 with mixtures of experts after the first layers. The router has sigmoid scores,
and a bias that affects only the choice of experts. The scores of the chosen experts are divided by their sum plus 1e-6.

Source: transformers models/lfm2_moe/{configuration,modeling}_lfm2_moe.py, and conversion_mapping.py.
"""

from ..base import Leaf, Stacked, by_name, leaves_of
from ..decoder import DecoderFamily, Mixtures
from ..fields import USUAL, Field, with_defaults
from ..places import after, by_layer_types
from ..recurrences import CONVOLUTION, without_attention
from ..usual import EMBEDDING, B, T
from . import lfm2

_DECODER = DecoderFamily(
    {
        **with_defaults(lfm2.FIELDS, hidden=2048),
        "intermediate_size": Field("intermediate", 7168),
        "head_dim": USUAL["head_dim"],
        "moe_intermediate_size": Field("expert_size", 1792),
        "num_experts": Field("mixture.experts", 32),
        "num_experts_per_tok": Field("mixture.top_k", 4),
        "norm_topk_prob": Field("mixture.normalise", True),
        "routed_scaling_factor": Field("mixture.multiplier", 1.0),
        "use_expert_bias": Field("mixture.choice_bias", True),
    },
    head_norms="same",
    fixed={
        "activation": "silu",
        "mixture.scores": "sigmoid",
        "mixture.scored_in": "input",
        "mixture.wide_choice": lambda values: values["mixture.choice_bias"],
        "mixture.added": lambda values: 1e-6 if values["mixture.normalise"] else 0.0,
    },
    rotary=lfm2.ROPE,
    recurrent=without_attention(by_layer_types(lfm2.CONV, lambda _config, _layers: None), CONVOLUTION),
    mixtures=Mixtures(after("num_dense_layers", 2)),
)

_EXPERTS = {
    f"{T}feed_forward.experts.{{expert}}.{name}": f"{B}feed_forward.experts.{{expert}}.{ours}_proj"
    for name, ours in (("w1", "gate"), ("w3", "up"), ("w2", "down"))
}
_ROUTED = {T + "feed_forward.gate": B + "feed_forward.router", **_EXPERTS}
_E = T + "feed_forward.experts."

_STACKED = (
    Stacked(_E + "gate_up_proj", tuple(f"{_E}{{expert}}.{name}.weight" for name in ("w1", "w3"))),
    Stacked(_E + "down_proj", (_E + "{expert}.w2.weight",)),
)

_LFM2_MOE = _DECODER.architecture(
    "lfm2_moe",
    "Lfm2MoeForCausalLM",
    by_name(
        (
            *leaves_of(EMBEDDING),
            *lfm2.MIXERS,
            *leaves_of(lfm2.FEED_FORWARD),
            *leaves_of(_ROUTED),
            Leaf(T + "feed_forward.expert_bias", B + "feed_forward.choice.bias", buffer=True),
            *lfm2.NORMS,
            *lfm2.ENDS,
        ),
        _STACKED,
    ),
    released="2025-10",
    token_ids={"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    config_aliases={"tie_word_embeddings": ("tie_embedding",)},
    stacked=_STACKED,
    stated={"layer_types": ["conv", "full_attention"] * 16},
    irrelevant={"full_attn_idxs": "transformers reads layer_types instead"},
)
