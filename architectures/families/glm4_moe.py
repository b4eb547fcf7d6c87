"""GLM-4.5 (2508.06471): llama with RoPE on a part of each head, optional norms on query and key heads, and
DeepSeek-V3's mixtures of experts. They have a sigmoid router with a bias that affects only the choice of experts,
groups of experts, a factor for the experts' weights, and shared experts. The first layers are dense.

transformers also ignores the extra layers after the last one, which draft tokens.

Source: transformers models/glm4_moe/{configuration,modeling}_glm4_moe.py.
"""

from ..base import DRAFT_LAYER
from ..decoder import DecoderFamily, Mixtures
from ..fields import GROUPED_EXPERTS, SIGMOID_ROUTER, Field, llama_fields
from ..places import after
from ..rope import PART, RotaryKind
from ..usual import CORRECTION, OF_DRAFTS, ROUTED, mixed_leaves, shared_expert

_DECODER = DecoderFamily(
    {
        **llama_fields(vocab=151552, intermediate=10944, layers=46, heads=96, kv_heads=8, context=131072, eps=1e-5),
        "attention_bias": Field("attention.qkv_bias", False),
        "use_qk_norm": Field("head_norms", False),
        "moe_intermediate_size": Field("expert_size", 1408),
        "n_shared_experts": Field("shared_experts", 1),
        "n_routed_experts": Field("mixture.experts", 128),
        **GROUPED_EXPERTS,
    },
    head_norms="same",
    fixed=SIGMOID_ROUTER,
    rotary=RotaryKind(part=PART, whole=0.5),
    mixtures=Mixtures(after("first_k_dense_replace", 1)),
)
LEAVES = mixed_leaves({**ROUTED, **shared_expert("shared_experts")}, choice=CORRECTION)

_GLM4_MOE = _DECODER.architecture(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    LEAVES,
    released="2025-07",
    config_aliases={"n_routed_experts": ("num_local_experts",)},
    stated={"head_dim": 128},
    carried=DRAFT_LAYER,
    irrelevant={**OF_DRAFTS},
)
