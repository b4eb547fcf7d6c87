"""Bamba (IBM, Princeton and UIUC 2024): llama with Mamba-2 instead of attention, except in the layers that
`attn_layer_indices` lists.

Source: transformers models/bamba/{configuration,modeling}_bamba.py.
"""

from ..base import leaves_of
from ..decoder import DecoderFamily
from ..fields import ATTENTION_BIAS, MLP_BIAS, constant, llama_fields
from ..places import by_indices
from ..recurrences import LINEAR, MAMBA2, UNGROUPED, mamba2_leaves, without_attention
from ..rope import PART, RotaryKind
from ..usual import ATTENTION, EMBEDDING, B, T

_DECODER = DecoderFamily(
    {
        **llama_fields(vocab=128000, intermediate=14336, kv_heads=8, context=262144, eps=1e-5),
        "attention_bias": ATTENTION_BIAS,
        "mlp_bias": MLP_BIAS,
        PART: constant("own.part", 0.5, "transformers ignores this field and uses 0.5"),
    },
    rotary=RotaryKind(part=PART, whole=0.5, inside=True),
    recurrent=without_attention(by_indices("attn_layer_indices", LINEAR), MAMBA2),
)


FEED_FORWARD = {f"{T}feed_forward.{name}": f"{B}feed_forward.{name}" for name in ("gate_proj", "up_proj", "down_proj")}
NORMS = {T + "input_layernorm": B + "attention_norm", T + "pre_ff_layernorm": B + "feed_forward_norm"}
ENDS = {"model.final_layernorm": "final_norm", "lm_head": "head"}

_BAMBA = _DECODER.architecture(
    "bamba",
    "BambaForCausalLM",
    (
        *leaves_of({**EMBEDDING, **FEED_FORWARD, T + "input_layernorm": B + "recurrence_norm"}),
        *leaves_of(NORMS),
        *mamba2_leaves(T + "mamba."),
        *leaves_of({**ATTENTION, **ENDS}),
    ),
    mended=UNGROUPED,
    released="2024-12",
    token_ids={"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    stated={"attn_layer_indices": [9, 18, 27]},
    irrelevant={"z_loss_coefficient": "a loss in training", "layers_block_type": "computed from attn_layer_indices"},
)
