"""DeepSeek-V3 and R1 (2412.19437), Kimi K2, Moonlight: DeepSeek-V2's latent attention, and mixtures of experts with a
sigmoid router. The router chooses groups of experts first, and has a bias that affects only the choice. The first
layers are dense.

Conversions keep the extra layer after the last one, which drafts tokens (`layers.61`). transformers ignores it.

Source: transformers models/deepseek_v3/{configuration,modeling}_deepseek_v3.py.
"""

from ..base import DRAFT_LAYER
from ..decoder import Mixtures
from ..fields import GROUPED_EXPERTS, SIGMOID_ROUTER, Field, with_defaults
from ..latent import COMPUTED, LATENT_FIELDS, LATENT_LEAVES, LatentDecoder
from ..places import after
from ..usual import CORRECTION, OF_DRAFTS, ROUTED, mixed_leaves, shared_expert

FIELDS = {
    **LATENT_FIELDS,
    "moe_intermediate_size": Field("expert_size", 2048),
    "n_shared_experts": Field("shared_experts", 1),
    "n_routed_experts": Field("mixture.experts", 256),
    **with_defaults(GROUPED_EXPERTS, n_group=8, topk_group=4, routed_scaling_factor=2.5),
}

DECODER = LatentDecoder(
    with_defaults(FIELDS, vocab=129280, hidden=7168, intermediate=18432, layers=61, heads=128, context=4096),
    fixed=SIGMOID_ROUTER,
    kv_heads=128,
    tables=True,
    mixtures=Mixtures(after("first_k_dense_replace", 3)),
)
LEAVES = mixed_leaves({**ROUTED, **shared_expert("shared_experts")}, LATENT_LEAVES, choice=CORRECTION)

TRAINING = {
    "aux_loss_alpha": "training only",
    "ep_size": "how a server distributes the experts",
    "seq_aux": "training only",
}
"""Further fields of released config.json files, which transformers does not read."""

DEEPSEEK_V3 = DECODER.architecture(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    LEAVES,
    model_types=("deepseek_v3", "kimi_k2"),
    released="2024-12",
    token_ids={"bos_token_id": 0, "eos_token_id": 1},
    config_aliases={"n_routed_experts": ("num_local_experts",)},
    carried=DRAFT_LAYER,
    irrelevant={**COMPUTED, **OF_DRAFTS, **TRAINING},
    refused={
        "moe_layer_freq": ((1, None), "transformers uses a mixture of experts in every layer after the dense ones"),
        "scoring_func": (("sigmoid", None), "transformers' DeepSeek-V3 supports only sigmoid scores"),
        "topk_method": (("noaux_tc", None), "transformers' DeepSeek-V3 always chooses experts by groups, with a bias"),
    },
)
