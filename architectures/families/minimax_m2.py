"""MiniMax-M2 (MiniMax 2025): mixtral with one norm over all query heads and one over all key heads, and with RoPE on a
part of each head. The router has sigmoid scores, and a bias that affects only the choice of experts.

Tensors have mixtral's names.

Source: transformers models/minimax_m2/{configuration,modeling}_minimax_m2.py.
"""

from ..base import Leaf, Stacked, by_name, leaves_of
from ..decoder import DecoderFamily, Mixtures
from ..fields import Field, llama_fields
from ..rope import PART, RotaryKind
from ..usual import ATTENTION, B, T
from . import mixtral
from .mixtral import MOE

_DECODER = DecoderFamily(
    {
        **llama_fields(
            vocab=200064, hidden=3072, intermediate=1536, layers=62, heads=48, kv_heads=8, head_dim=128, context=196608
        ),
        "num_local_experts": Field("mixture.experts", 256),
        "num_experts_per_tok": Field("mixture.top_k", 8),
    },
    head_norms="whole",
    fixed={"mixture.scores": "sigmoid", "mixture.choice_bias": True, "mixture.in_order": False},
    rotary=RotaryKind(5e6, part=PART, dims="rotary_dim"),
    mixtures=Mixtures(),
)
_CORRECTION = MOE + "e_score_correction_bias"
_HELD = (*mixtral.STACKED, Stacked(T + "mlp.e_score_correction_bias", (_CORRECTION,)))
_NORMS = {name: ours for name, ours in ATTENTION.items() if "_norm" in name}

_MINIMAX_M2 = _DECODER.architecture(
    "minimax_m2",
    "MiniMaxM2ForCausalLM",
    by_name(
        (*mixtral.LEAVES, *leaves_of(_NORMS), Leaf(_CORRECTION, B + "feed_forward.choice.bias", buffer=True)), _HELD
    ),
    released="2025-10",
    token_ids={"bos_token_id": 200034, "eos_token_id": 200020},
    config_aliases={"num_local_experts": ("num_experts",)},
    stacked=_HELD,
    irrelevant={
        "router_jitter_noise": "training only",
        "use_mtp": "extra layers after the last one that draft tokens (multi-token prediction)",
        "num_mtp_modules": "extra layers after the last one that draft tokens (multi-token prediction)",
        "mtp_transformer_layers": "extra layers after the last one that draft tokens (multi-token prediction)",
    },
)
