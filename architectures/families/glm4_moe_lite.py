"""GLM-4.7-Flash (Z.ai 2026): DeepSeek-V3's latent attention and mixtures, with a dense first layer.

transformers also ignores the extra layer after the last one, which drafts tokens (`layers.47`).

Source: transformers models/glm4_moe_lite/{configuration,modeling}_glm4_moe_lite.py.
"""

from ..base import DRAFT_LAYER
from ..decoder import Mixtures
from ..fields import SIGMOID_ROUTER, with_defaults
from ..latent import COMPUTED, LatentDecoder
from ..places import by_type
from ..rope import RotaryKind
from ..usual import OF_DRAFTS
from .deepseek_v3 import FIELDS, LEAVES

_DECODER = LatentDecoder(
    with_defaults(
        FIELDS,
        vocab=154880,
        hidden=2048,
        intermediate=10240,
        layers=47,
        heads=20,
        context=202752,
        eps=1e-5,
        q_lora_rank=768,
        qk_nope_head_dim=192,
        v_head_dim=256,
        moe_intermediate_size=1536,
        n_routed_experts=64,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=4,
        routed_scaling_factor=1.8,
    ),
    fixed=SIGMOID_ROUTER,
    kv_heads=20,
    key_rotary=RotaryKind(entire=True),
    mixtures=Mixtures(by_type(1)),
)

_GLM4_MOE_LITE = _DECODER.architecture(
    "glm4_moe_lite",
    "Glm4MoeLiteForCausalLM",
    LEAVES,
    released="2026-01",
    token_ids={"bos_token_id": 0, "eos_token_id": 1},
    config_aliases={"n_routed_experts": ("num_local_experts",), "qk_rope_head_dim": ("head_dim",)},
    carried=DRAFT_LAYER,
    irrelevant={**COMPUTED, **OF_DRAFTS},
    refused={"first_k_dense_replace": ((1,), "transformers ignores this field: only the first layer is dense")},
)
