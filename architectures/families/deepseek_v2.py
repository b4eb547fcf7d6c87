"""DeepSeek-V2 and V2-Lite (2405.04434): llama with latent attention, and with mixtures that have a softmax router. RoPE
on adjacent pairs is computed with complex numbers. The large model chooses groups of experts first.

transformers never divides the weights of experts by their sum.

Source: transformers models/deepseek_v2/{configuration,modeling}_deepseek_v2.py.
"""

from collections.abc import Mapping
from typing import Any

from ...components import MixtureOfExperts, ModelSpec
from ..config import ConfigReader
from ..decoder import Mixtures
from ..draws import EVEN, Config, Random
from ..fields import MLP_BIAS, with_defaults
from ..latent import KNOWN, LATENT_LEAVES, LatentDecoder
from ..lenses import after
from ..releases import since
from ..rope import RotaryKind
from ..usual import OF_DRAFTS, ROUTED, mixed_leaves, shared_expert
from .deepseek_v3 import FIELDS, TRAINING

_GROUPS = ("n_group", "topk_group", "norm_topk_prob")  # fields of DeepSeek-V3 with another meaning here
_METHODS = {"greedy": False, "group_limited_greedy": True}


def _read(config: ConfigReader) -> ModelSpec:
    """Return the ModelSpec that a config.json describes.

    Routers choose groups of experts first if `topk_method` is group_limited_greedy.
    """
    grouped = config.choice("topk_method", "greedy", _METHODS)
    names = {"n_group": "mixture__groups", "topk_group": "mixture__top_groups"}
    groups = {role: config.optional_integer(name) for name, role in names.items()}
    for name, role in names.items():
        if grouped and groups[role] is None:
            raise config.fail(name, None, "a number, since topk_method is group_limited_greedy")
    several = grouped and groups["mixture__groups"] != 1
    return _DECODER.read(config, **({**groups, "mixture__group_best": 1} if several else {}))


def _written(spec: ModelSpec) -> Mapping[str, Any]:
    """Return the config fields for the choice of groups of experts."""
    inner = (block.feed_forward for block in spec.blocks)
    mixture = next((feed_forward for feed_forward in inner if isinstance(feed_forward, MixtureOfExperts)), None)
    if mixture is None or mixture.groups == 1:
        return {"topk_method": "greedy", "n_group": None, "topk_group": None}
    return {"topk_method": "group_limited_greedy", "n_group": mixture.groups, "topk_group": mixture.top_groups}


_DECODER = LatentDecoder(
    {
        **with_defaults(
            {name: field for name, field in FIELDS.items() if name not in _GROUPS},
            vocab=102400,
            n_routed_experts=64,
            n_shared_experts=2,
            moe_intermediate_size=1407,
            routed_scaling_factor=1.0,
            num_experts_per_tok=None,
        ),
        "mlp_bias": MLP_BIAS,
    },
    fixed={
        "mixture.normalise": False,
        "mixture.routed_in": "float32",
        "mixture.in_order": False,
        "mixture.wide_router": since("5.24"),
    },
    key_rotary=RotaryKind(rounding="complex"),
    interleaved=True,
    gathered=False,
    whole_heads=True,
    mixtures=Mixtures(after("first_k_dense_replace", 0), expert={"fused": True, "up_bias": False, "down_bias": False}),
    written=_written,
)


def _draw(chosen: Random) -> Config:
    """Return a random config with or without groups, and with even widths, since RoPE rotates pairs of neighbours."""
    even = {"attention.kv_rank": chosen.choice(EVEN), "attention.nope_dim": chosen.choice((0, *EVEN))}
    config, grouped = _DECODER.draw(chosen, {}, **even), chosen.random() < 0.5
    if not grouped:
        return {**config, "topk_method": "greedy", "n_group": None, "topk_group": None}
    groups, size = chosen.choice((1, 2, 4)), chosen.choice((2, 3))
    best = chosen.randint(1, groups)
    own = {"n_group": groups, "topk_group": best, "n_routed_experts": groups * size}
    config |= {**own, "topk_method": "group_limited_greedy"}
    return {**config, "num_experts_per_tok": chosen.randint(1, best * size)}


_DEEPSEEK_V2 = _DECODER.architecture(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    mixed_leaves({**ROUTED, **shared_expert("shared_experts")}, LATENT_LEAVES),
    released="2024-05",
    token_ids={"bos_token_id": 1, "eos_token_id": 2},
    read=_read,
    draw=_draw,
    config_aliases={"n_routed_experts": ("num_experts",)},
    stated={"num_experts_per_tok": 6},
    irrelevant={**KNOWN, **OF_DRAFTS, **TRAINING},
    refused={
        "moe_layer_freq": ((1, None), "transformers uses a mixture of experts in every layer after the dense ones"),
        "norm_topk_prob": ((False, None), "transformers' DeepSeek-V2 does not divide the expert weights by their sum"),
        "scoring_func": (("softmax", None), "transformers' DeepSeek-V2 supports only softmax scores"),
    },
)
