"""Bamba (IBM, Princeton and UIUC 2024): Mamba-2 in most layers, and attention in the layers listed in
`attn_layer_indices`.

Source: transformers models/bamba/{configuration,modeling}_bamba.py.
"""

from collections.abc import Mapping
from typing import Any

from ...components import Attention, Mamba2, ModelSpec, Rotary
from ..base import leaves_of
from ..config import ConfigReader
from ..decoder import DecoderFamily
from ..draws import Config, Random, Sizes, some_of
from ..fields import ATTENTION_BIAS, MLP_BIAS, llama_fields
from ..lenses import Lens, one_of
from ..obstacles import of_kind
from ..recurrences import LINEAR, draw_mamba2, mamba2_leaves, read_mamba2, written_by
from ..rope import PART, RotaryKind, write_rotaries
from ..usual import ATTENTION, EMBEDDING, B, T


def _recurrences(config: ConfigReader, values: Mapping[str, Any]) -> list[Mamba2 | None]:
    """Return Mamba-2 for each layer without attention, and None for the others."""
    count, whole = values["layers"], config.raw("attn_layer_indices")
    if not isinstance(whole, list) or any(type(each) is not int for each in whole) or not {*whole} & {*range(count)}:
        wanted = "a list with one of the layers at least: transformers' cache fails without attention"
        raise config.fail("attn_layer_indices", whole, wanted)
    if config.raw(PART, 0.5) != 0.5:
        raise config.fail(PART, config.raw(PART), "0.5: transformers ignores this field and uses 0.5")
    types = ["full_attention" if layer in whole else LINEAR for layer in range(count)]
    if [*one_of(config, count, types, LINEAR)] != types:
        raise config.fail(
            "layer_types",
            config.raw("layer_types"),
            "full_attention for exactly the layers that attn_layer_indices lists",
        )
    mixer = read_mamba2(config, values)
    return [mixer if kind == LINEAR else None for kind in types]


def _written(spec: ModelSpec) -> dict[str, Any]:
    """Write the part of a head that turns among the RoPE parameters, where alone transformers reads it."""
    mixers = [block.mixer("attention") for block in spec.blocks]
    attention = of_kind(next((each for each in mixers if each is not None), None), Attention)
    found = write_rotaries({"all": of_kind(attention.position, Rotary)}, attention.head_dim)
    own = written_by(lambda whole: {"attn_layer_indices": [n for n, each in enumerate(whole) if each]})
    return {**own(spec), "rope_scaling": None, "rope_parameters": found["rope_parameters"]["all"], PART: 0.5}


def _draw(chosen: Random, sizes: Sizes) -> Config:
    whole = some_of(chosen, range(sizes["layers"])) or [0]
    return {**draw_mamba2(chosen, sizes["hidden"]), "attn_layer_indices": whole}


_DECODER = DecoderFamily(
    {
        **llama_fields(vocab=128000, intermediate=14336, kv_heads=8, context=262144, eps=1e-5),
        "attention_bias": ATTENTION_BIAS,
        "mlp_bias": MLP_BIAS,
    },
    rotary=RotaryKind(part=PART, whole=0.5),
    recurrent=Lens(_recurrences, _written, _draw),
)


def _draw_config(chosen: Random) -> Config:
    """Draw a config with the part of a head that turns among the RoPE parameters, where alone transformers reads it."""
    config = _DECODER.draw(chosen, {})
    rope = {PART: config.pop(PART), "rope_theta": config.pop("rope_theta", 37.5), "rope_type": "default"}
    return {**config, "rope_parameters": rope}


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
    kinds=_DECODER.kinds | {Mamba2},
    token_ids={"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    stated={"attn_layer_indices": [9, 18, 27]},
    irrelevant={"z_loss_coefficient": "a loss in training", "layers_block_type": "made of attn_layer_indices"},
)
