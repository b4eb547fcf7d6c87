"""Mixtral (Jiang et al. 2401.04088): mistral with mixtures of experts as feed-forwards.

Checkpoints have three tensors per expert, w1 (gate), w2 (down) and w3 (up), like the modules of transformers 4. Since
5.0, transformers' modules have one parameter with gate and up of all experts, but the files are the same
(conversion_mapping.py). If `sliding_window` is absent, there is no window.

Source: transformers models/mixtral/{configuration,modeling}_mixtral.py.
"""

from ..base import Leaf, Stacked
from ..decoder import DecoderFamily, Mixtures
from ..fields import WINDOW, Field, llama_fields
from ..rope import RotaryKind
from ..usual import B, T

_DECODER = DecoderFamily(
    {
        **llama_fields(intermediate=14336, kv_heads=8, context=131072, eps=1e-5),
        "sliding_window": WINDOW._replace(default=None),
        "num_local_experts": Field("mixture.experts", 8),
        "num_experts_per_tok": Field("mixture.top_k", 2),
    },
    rotary=RotaryKind(1e6),
    mixtures=Mixtures(),
)
MOE, _EXPERT = T + "block_sparse_moe.", T + "block_sparse_moe.experts.{expert}."

# The leaves are in the order in which transformers writes tensors: sorted by the names of modules, where a parameter of
# all experts becomes several tensors.
LEAVES: tuple[Leaf, ...] = (
    Leaf("lm_head.weight", "head.weight"),
    Leaf("model.embed_tokens.weight", "embedding.weight"),
    Leaf(T + "input_layernorm.weight", B + "attention_norm.weight"),
    Leaf(_EXPERT + "w2.weight", B + "feed_forward.experts.{expert}.down_proj.weight"),
    Leaf(_EXPERT + "w1.weight", B + "feed_forward.experts.{expert}.gate_proj.weight"),
    Leaf(_EXPERT + "w3.weight", B + "feed_forward.experts.{expert}.up_proj.weight"),
    Leaf(MOE + "gate.weight", B + "feed_forward.router.weight"),
    Leaf(T + "post_attention_layernorm.weight", B + "feed_forward_norm.weight"),
    *(
        Leaf(f"{T}self_attn.{projection}.weight", f"{B}attention.{projection}.weight")
        for projection in ("k_proj", "o_proj", "q_proj", "v_proj")
    ),
    Leaf("model.norm.weight", "final_norm.weight"),
)

STACKED = (
    Stacked(T + "mlp.gate.weight", (MOE + "gate.weight",)),
    Stacked(T + "mlp.experts.gate_up_proj", (_EXPERT + "w1.weight", _EXPERT + "w3.weight")),
    Stacked(T + "mlp.experts.down_proj", (_EXPERT + "w2.weight",)),
)

_MIXTRAL = _DECODER.architecture(
    "mixtral",
    "MixtralForCausalLM",
    LEAVES,
    stacked=STACKED,
    released="2023-12",
    token_ids={"bos_token_id": 1, "eos_token_id": 2},
    config_aliases={"num_local_experts": ("num_experts",)},
    irrelevant={"router_jitter_noise": "training only"},
)
