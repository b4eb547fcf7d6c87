"""Bamba (IBM, Princeton and UIUC 2024): Mamba-2 in most layers, and attention in the layers listed in
`attn_layer_indices`.

Source: transformers models/bamba/{configuration,modeling}_bamba.py.
"""

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

from ...components import Attention, Mamba2, ModelSpec, RMSNorm, Rotary
from ...errors import CannotExpress
from ..base import Leaf, leaves_of
from ..config import ConfigReader
from ..decoder import Decoder
from ..fields import ATTENTION_BIAS, MLP_BIAS, USUAL, with_defaults
from ..layout import Layout
from ..lenses import one_of
from ..obstacles import of_kind
from ..rope import PART, RotaryKind, write_rotaries
from ..usual import ATTENTION, EMBEDDING, B, T

LINEAR = "linear_attention"
_INFINITE = {"__float__": "Infinity"}  # as transformers writes it


def limits(config: ConfigReader) -> dict[str, Any]:
    """Between what steps are kept, `least` and `most` of the component, by `time_step_limit`."""
    found: Any = config.raw("time_step_limit", (0.0, math.inf))
    numbers = [math.inf if each == _INFINITE else each for each in found] if isinstance(found, list | tuple) else []
    fine = all(isinstance(each, int | float) and not isinstance(each, bool) for each in numbers)
    fine = fine and len(numbers) == 2 and 0 <= numbers[0] <= numbers[1] and numbers[0] <= 1e30 and numbers[1] > 0
    if not fine:
        raise config.fail("time_step_limit", found, "two numbers, [smaller, larger], neither below 0")
    least, most = (float(min(each, sys.float_info.max)) for each in numbers)
    return {"least": least, "most": None if numbers[1] == math.inf else most}


def write_limits(mixer: Mamba2) -> dict[str, Any]:
    """The field that `limits` reads, where it says something."""
    if (mixer.least, mixer.most) == (0, None):
        return {}
    return {"time_step_limit": [mixer.least, _INFINITE if mixer.most is None else mixer.most]}


def sizes(config: ConfigReader, values: Mapping[str, Any], *, inner: int | None = None) -> dict[str, Any]:
    """The sizes of Mamba-2 by fields of `mamba_`; `inner`: how wide its heads are together, where they say it not."""
    heads, expand = config.integer("mamba_n_heads", 128), config.integer("mamba_expand", 2)
    inner = values["hidden"] * expand if inner is None else inner
    groups, width = config.integer("mamba_n_groups", 1), config.raw("mamba_d_head", "auto")
    if inner % heads or inner // heads > 2**31 - 1:
        raise config.fail("mamba_n_heads", heads, f"a divisor of all heads' width ({inner})")
    if width not in ("auto", inner // heads) or isinstance(width, bool):
        raise config.fail("mamba_d_head", width, f"{inner // heads}, so that {heads} heads are {inner} wide")
    if heads % groups:
        raise config.fail("mamba_n_groups", groups, f"a divisor of mamba_n_heads ({heads})")
    return {
        "hidden_size": values["hidden"],
        "heads": heads,
        "head_dim": inner // heads,
        "groups": groups,
        "state_size": config.integer("mamba_d_state", 256),
        "kernel": config.integer("mamba_d_conv", 4),
        "activation": values["activation"],
        "conv_bias": config.boolean("mamba_conv_bias", True),
        "chunk": config.integer("mamba_chunk_size", 256),
        **limits(config),
    }


def mamba(config: ConfigReader, values: Mapping[str, Any]) -> Mamba2:
    """Mamba-2 by fields of `mamba_`, with a norm in its groups."""
    found, bias = sizes(config, values), config.boolean("mamba_proj_bias", False)
    norm = RMSNorm(size=found["heads"] * found["head_dim"], eps=values["eps"], groups=found["groups"])
    return Mamba2(**found, norm=norm, bias=bias, output_bias=bias)


def write_mamba(mixer: Mamba2) -> dict[str, Any]:
    """The config fields that `mamba` reads."""
    if mixer.inner % mixer.hidden_size:
        raise CannotExpress(
            f"transformers needs heads whose total width is a multiple of the hidden size {mixer.hidden_size}, "
            f"but it is {mixer.inner}"
        )
    return {
        "mamba_n_heads": mixer.heads,
        "mamba_d_head": mixer.head_dim,
        "mamba_expand": mixer.inner // mixer.hidden_size,
        "mamba_n_groups": mixer.groups,
        "mamba_d_state": mixer.state_size,
        "mamba_d_conv": mixer.kernel,
        "mamba_conv_bias": mixer.conv_bias,
        "mamba_proj_bias": mixer.bias,
        "mamba_chunk_size": mixer.chunk,
        **write_limits(mixer),
    }


def _recurrences(config: ConfigReader, values: Mapping[str, Any]) -> list[Mamba2 | None]:
    """What stands in the layers without attention."""
    count, whole = values["layers"], config.raw("attn_layer_indices")
    if not isinstance(whole, list) or any(type(each) is not int for each in whole) or not {*whole} & {*range(count)}:
        wanted = "a list with one of the layers at least: transformers' cache fails without attention"
        raise config.fail("attn_layer_indices", whole, wanted)
    if config.raw(PART, 0.5) != 0.5:
        raise config.fail(PART, config.raw(PART), "0.5: transformers ignores this field and uses 0.5")
    types = ["full_attention" if layer in whole else LINEAR for layer in range(count)]
    if [*one_of(config, count, types, LINEAR)] != types:
        raise config.fail("layer_types", config.raw("layer_types"), "the same layers as attn_layer_indices")
    mixer = mamba(config, values)
    return [mixer if kind == LINEAR else None for kind in types]


def written_by(types: Callable[[list[bool]], dict[str, Any]]) -> Callable[[ModelSpec], dict[str, Any]]:
    """What writes Mamba-2, and which layers have attention: `types` makes fields of that."""

    def written(spec: ModelSpec) -> dict[str, Any]:
        mixers = [block.mixer("recurrence") for block in spec.blocks]
        first = next((of_kind(each, Mamba2) for each in mixers if each is not None), None)
        # transformers wants heads that divide its width even where no layer has them.
        own = {"mamba_n_heads": 1} if first is None else write_mamba(first)
        return {**own, **types([each is None for each in mixers])}

    return written


def _written(spec: ModelSpec) -> dict[str, Any]:
    """Which part of a head turns is read among the rope parameters alone."""
    mixers = [block.mixer("attention") for block in spec.blocks]
    attention = of_kind(next((each for each in mixers if each is not None), None), Attention)
    found = write_rotaries({"all": of_kind(attention.position, Rotary)}, attention.head_dim)
    own = written_by(lambda whole: {"attn_layer_indices": [n for n, each in enumerate(whole) if each]})
    return {**own(spec), "rope_scaling": None, "rope_parameters": found["rope_parameters"]["all"], PART: 0.5}


_DECODER = Decoder(
    {
        **with_defaults(
            USUAL,
            vocab_size=128000,
            intermediate_size=14336,
            num_key_value_heads=8,
            max_position_embeddings=262144,
            rms_norm_eps=1e-5,
        ),
        "attention_bias": ATTENTION_BIAS,
        "mlp_bias": MLP_BIAS,
    },
    rotary=RotaryKind(part=PART, whole=0.5),
    recurrent=_recurrences,
    written=_written,
)


def mixer_leaves(theirs: str) -> tuple[Leaf, ...]:
    """Mamba-2 of a layer, as the module `theirs`."""
    ours = B + "recurrence."
    read, mixed = ("gate", "x", "b", "c", "dt"), ("x", "b", "c")
    rows: dict[str, Any] = {"split": "part", "parts": ("inner", "inner", "states", "states", "heads")}
    channels: dict[str, Any] = {"split": "part", "parts": ("inner", "states", "states")}
    return (
        *(Leaf(theirs + name, ours + name) for name in ("dt_bias", "A_log", "D")),
        Leaf(
            theirs + "conv1d.weight",
            tuple(f"{ours}{name}_conv.weight" for name in mixed),
            Layout("part one kernel", "part (one kernel)", **channels),
        ),
        Leaf(theirs + "conv1d.bias", tuple(f"{ours}{name}_conv.bias" for name in mixed), Layout("part", **channels)),
        Leaf(theirs + "in_proj.weight", tuple(f"{ours}{n}_proj.weight" for n in read), Layout("part hidden", **rows)),
        Leaf(theirs + "in_proj.bias", tuple(f"{ours}{n}_proj.bias" for n in read), Layout("part", **rows)),
        *leaves_of({theirs + "norm": ours + "norm", theirs + "out_proj": ours + "o_proj"}),
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
        *mixer_leaves(T + "mamba."),
        *leaves_of({**ATTENTION, **ENDS}),
    ),
    released="2024-12",
    kinds=_DECODER.kinds | {Mamba2},
    token_ids={"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    stated={"attn_layer_indices": [9, 18, 27]},
    irrelevant={
        "num_logits_to_keep": "for which tokens of a prompt logits are computed",
        "z_loss_coefficient": "a loss in training",
        "layers_block_type": "made of attn_layer_indices",
    },
)
