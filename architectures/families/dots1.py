"""dots.llm1 (2506.05767): qwen3's attention, and DeepSeek-V3's mixtures.

The config class has no default for the number of experts, so every file states it.

Source: transformers models/dots1/{configuration,modeling}_dots1.py.
"""

from ..decoder import DecoderFamily, Mixtures
from ..fields import ATTENTION_BIAS, GROUPED_EXPERTS, SIGMOID_ROUTER, Field, llama_fields, with_defaults
from ..lenses import windows_above
from ..places import after
from .glm4_moe import LEAVES

_DECODER = DecoderFamily(
    {
        **llama_fields(vocab=152064, hidden=4608, intermediate=10944, layers=62),
        "attention_bias": ATTENTION_BIAS,
        "moe_intermediate_size": Field("expert_size", 1408),
        "n_shared_experts": Field("shared_experts", None),
        "n_routed_experts": Field("mixture.experts", None),
        **with_defaults(GROUPED_EXPERTS, norm_topk_prob=False, num_experts_per_tok=None),
    },
    head_norms="same",
    fixed=SIGMOID_ROUTER,
    layers=windows_above(switch=False, first=62),
    mixtures=Mixtures(after("first_k_dense_replace", 0)),
)

_DOTS1 = _DECODER.architecture(
    "dots1",
    "Dots1ForCausalLM",
    LEAVES,
    released="2025-06",
    config_aliases={"n_routed_experts": ("num_local_experts",)},
    stated={"n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 2},
)
