"""DeepSeek-V2 and V2-Lite (2405.04434): llama with latent attention, and with mixtures that have a softmax router. RoPE
on adjacent pairs is computed with complex numbers. The large model chooses groups of experts first.

transformers never divides the weights of experts by their sum.

Source: transformers models/deepseek_v2/{configuration,modeling}_deepseek_v2.py.
"""

from ...components import ModelSpec
from ..config import ConfigReader
from ..decoder import Mixtures
from ..draws import EVEN
from ..fields import MLP_BIAS, Field, choice, component, with_defaults
from ..latent import KNOWN, LATENT_LEAVES, LatentDecoder
from ..places import after
from ..releases import since
from ..rope import RotaryKind
from ..usual import OF_DRAFTS, ROUTED, mixed_leaves, shared_expert
from .deepseek_v3 import FIELDS, TRAINING

_GROUPS = ("n_group", "topk_group", "norm_topk_prob")  # fields of DeepSeek-V3 with another meaning here
_METHODS = {"greedy": False, "group_limited_greedy": True}


def _if_grouped(config: ConfigReader, name: str, _: None) -> int:
    """Read a number of groups of experts. It is 1 if `topk_method` is greedy."""
    number = config.optional_integer(name)
    if not config.choice("topk_method", "greedy", _METHODS):
        return 1
    if number is None:
        raise config.fail(name, None, "a number, since topk_method is group_limited_greedy")
    return number


def _of_groups(spec: ModelSpec, name: str) -> int | None:
    """Return a field of the mixtures, or None if their routers do not choose groups of experts first."""
    mixture = component(spec, "mixture")
    return None if mixture is None or mixture.groups == 1 else getattr(mixture, name)


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
        "topk_method": choice("own.grouped", "greedy", _METHODS)._replace(
            of=lambda spec: "greedy" if _of_groups(spec, "groups") is None else "group_limited_greedy"
        ),
        "n_group": Field("mixture.groups", None, _if_grouped, of=lambda spec: _of_groups(spec, "groups")),
        "topk_group": Field("mixture.top_groups", None, _if_grouped, of=lambda spec: _of_groups(spec, "top_groups")),
    },
    fixed={
        "mixture.top_groups": lambda values: 1 if values["mixture.groups"] == 1 else values["mixture.top_groups"],
        "mixture.group_best": lambda values: 2 if values["mixture.groups"] == 1 else 1,
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
    # RoPE rotates pairs of neighbours.
    sized=lambda chosen, _: {"attention.kv_rank": chosen.choice(EVEN), "attention.nope_dim": chosen.choice((0, *EVEN))},
)


_DEEPSEEK_V2 = _DECODER.architecture(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    mixed_leaves({**ROUTED, **shared_expert("shared_experts")}, LATENT_LEAVES),
    released="2024-05",
    token_ids={"bos_token_id": 1, "eos_token_id": 2},
    config_aliases={"n_routed_experts": ("num_experts",)},
    stated={"num_experts_per_tok": 6},
    irrelevant={**KNOWN, **OF_DRAFTS, **TRAINING},
    refused={
        "moe_layer_freq": ((1, None), "transformers uses a mixture of experts in every layer after the dense ones"),
        "norm_topk_prob": ((False, None), "transformers' DeepSeek-V2 does not divide the expert weights by their sum"),
        "scoring_func": (("softmax", None), "transformers' DeepSeek-V2 supports only softmax scores"),
    },
)
