"""Solar Open (Upstage 2025): llama with DeepSeek-V3's mixtures in every layer.

Source: transformers models/solar_open/{configuration,modeling}_solar_open.py.
"""

from ..decoder import DecoderFamily, Mixtures
from ..fields import GROUPED_EXPERTS, SIGMOID_ROUTER, Field, llama_fields
from ..rope import RotaryKind
from .glm4_moe import LEAVES

_FIELDS = llama_fields(vocab=196608, layers=48, heads=64, kv_heads=8, head_dim=128, context=131072, eps=1e-5)

_DECODER = DecoderFamily(
    {
        **{name: field for name, field in _FIELDS.items() if name != "intermediate_size"},
        "attention_bias": Field("attention.qkv_bias", False),
        "moe_intermediate_size": Field("expert_size", 1280),
        "n_shared_experts": Field("shared_experts", 1),
        "n_routed_experts": Field("mixture.experts", 128),
        **GROUPED_EXPERTS,
    },
    fixed=SIGMOID_ROUTER,
    rotary=RotaryKind(1e6, entire=True),
    mixtures=Mixtures(),
)

_SOLAR_OPEN = _DECODER.architecture(
    "solar_open",
    "SolarOpenForCausalLM",
    LEAVES,
    released="2025-12",
    config_aliases={"n_routed_experts": ("num_local_experts",)},
    irrelevant={"intermediate_size": "only for dense layers, and this family has none"},
)
