"""Mamba-2 (Dao & Gu 2405.21060): only Mamba-2 mixers, with the residual stream in fp32.

Source: transformers models/mamba2/{configuration,modeling}_mamba2.py.
"""

from typing import Any

from ...components import Mamba2, ModelSpec, RMSNorm
from ..base import Architecture, leaves_of, only_eager
from ..config import ConfigReader
from ..draws import ODD, VOCAB, Config, Random, divisor, sometimes
from ..fields import Field, draw_fields, read_fields, size, with_defaults, write_fields
from ..obstacles import of_kind
from ..recurrences import (
    ALONE,
    alone,
    draw_limits,
    limits,
    mamba2_leaves,
    multiple_of_hidden,
    write_alone,
    write_limits,
)
from ..usual import B

_TREE = with_defaults(ALONE, vocab=32768, hidden=4096, layers=64, tied=False)
_MIXER = {
    "num_heads": Field("heads", 128),
    "head_dim": Field("head_dim", 64),
    "n_groups": Field("groups", 8),
    "state_size": size("state_size", 128),
    "conv_kernel": size("kernel", 4, 1, 2, 4, 5),
    "chunk_size": size("chunk", 256, 1, 3, 8, 64),
    "hidden_act": Field("activation", "silu"),
    "use_bias": Field("bias", False),
    "use_conv_bias": Field("conv_bias", True),
}
_STARTS = dict.fromkeys(
    ("time_step_min", "time_step_max", "time_step_floor", "time_step_rank", "rescale_prenorm_residual"),
    "how training starts",
)


def _read(config: ConfigReader) -> ModelSpec:
    """Return the ModelSpec that a config.json describes."""
    tree, mixer, expand = read_fields(_TREE, config), read_fields(_MIXER, config), config.integer("expand", 2)
    heads, width, groups, hidden = mixer["heads"], mixer["head_dim"], mixer["groups"], tree["hidden"]
    if heads * width != hidden * expand:
        raise config.fail("num_heads", heads, f"expand · hidden_size / head_dim ({hidden * expand} / {width})")
    if heads % groups:
        raise config.fail("n_groups", groups, f"a divisor of num_heads ({heads})")
    norm = RMSNorm(size=heads * width, eps=tree["eps"], groups=groups)
    own = {"norm": norm, "output_bias": mixer["bias"], **limits(config)}
    return alone(config, tree, Mamba2(hidden_size=hidden, **mixer, **own))


def _write(spec: ModelSpec) -> dict[str, Any]:
    """Return the config fields that describe a model."""
    mixer = of_kind(spec.blocks[0].mixer("recurrence"), Mamba2)
    own = {"expand": multiple_of_hidden(mixer), **write_fields(_MIXER, mixer), **write_limits(mixer)}
    return {**write_alone(spec), **own}


def _draw(chosen: Random) -> Config:
    """Return a random config.

    The width of all heads together is a multiple of the hidden size, as transformers' class requires.
    """
    expand, width, heads = chosen.choice((1, 2, 3)), chosen.choice(ODD), chosen.choice((1, 2, 4, 6, 9))
    expand = expand if heads * width % expand == 0 else 1
    tree = {**draw_fields(_TREE, chosen, {"vocab": VOCAB}), "hidden_size": heads * width // expand}
    mixer = draw_fields(_MIXER, chosen, {"heads": heads, "head_dim": width, "groups": divisor(chosen, heads)})
    return {**tree, **mixer, "expand": expand, **sometimes(chosen, {"time_step_limit": draw_limits(chosen)})}


_T = "backbone.layers.{layer}."

_MAMBA2 = Architecture(
    name="mamba2",
    model_types=("mamba2",),
    hf_class="Mamba2ForCausalLM",
    hf_config="Mamba2Config",
    kinds=frozenset({Mamba2, RMSNorm}),
    read=_read,
    write=_write,
    draw=_draw,
    leaves=(
        *leaves_of({"backbone.embeddings": "embedding"}),
        *leaves_of({_T + "norm": B + "recurrence_norm"}),
        *mamba2_leaves(_T + "mixer."),
        *leaves_of({"backbone.norm_f": "final_norm", "lm_head": "head"}),
    ),
    released="2024-05",
    prefix="backbone.",
    aliases=(("backbone.embedding.weight", "backbone.embeddings.weight"),),
    token_ids={"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1},
    irrelevant=_STARTS,
    **only_eager("transformers' class has no attention, and therefore only one path"),
)
