"""Bamba (IBM, Princeton and UIUC 2024): llama with Mamba-2 instead of attention, except in the layers that
`attn_layer_indices` lists.

Source: transformers models/bamba/{configuration,modeling}_bamba.py.
"""

from typing import Any

from ...components import Attention, ModelSpec, Rotary
from ..base import leaves_of
from ..decoder import DecoderFamily
from ..draws import Config, Random
from ..fields import ATTENTION_BIAS, MLP_BIAS, constant, llama_fields
from ..lenses import by_indices
from ..obstacles import of_kind
from ..recurrences import LINEAR, MAMBA2, mamba2_leaves, without_attention
from ..rope import PART, RotaryKind, write_rotaries
from ..usual import ATTENTION, EMBEDDING, B, T


def _written(spec: ModelSpec) -> dict[str, Any]:
    """Return the RoPE fields, including the fraction of a head that is rotated.

    transformers ignores the fraction at the top level of the config, so it is also written into `rope_parameters`.
    """
    attention = of_kind(next(block.attention for block in spec.blocks if block.mixer("attention")), Attention)
    rope = write_rotaries({"all": of_kind(attention.position, Rotary)}, attention.head_dim)["rope_parameters"]["all"]
    return {"rope_scaling": None, "rope_parameters": rope, PART: 0.5}


_DECODER = DecoderFamily(
    {
        **llama_fields(vocab=128000, intermediate=14336, kv_heads=8, context=262144, eps=1e-5),
        "attention_bias": ATTENTION_BIAS,
        "mlp_bias": MLP_BIAS,
        PART: constant("own.part", 0.5, "transformers ignores this field and uses 0.5"),
    },
    rotary=RotaryKind(part=PART, whole=0.5),
    recurrent=without_attention(by_indices("attn_layer_indices", LINEAR), MAMBA2),
    written=_written,
)


def _draw_config(chosen: Random) -> Config:
    """Return a random config whose RoPE parameters include the fraction of a head that is rotated, as in `_written`."""
    config = _DECODER.draw(chosen, {})
    rope = {PART: config.pop(PART), "rope_theta": config.pop("rope_theta", 37.5), "rope_type": "default"}
    return {**config, "rope_parameters": rope, PART: 0.5}


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
    released="2024-12",
    draw=_draw_config,
    token_ids={"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    stated={"attn_layer_indices": [9, 18, 27]},
    irrelevant={"z_loss_coefficient": "a loss in training", "layers_block_type": "computed from attn_layer_indices"},
)
