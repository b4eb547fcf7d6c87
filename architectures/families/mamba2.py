"""Mamba-2 (Dao & Gu 2405.21060): only Mamba-2 mixers, with the residual stream in fp32.

Source: transformers models/mamba2/{configuration,modeling}_mamba2.py.
"""

from typing import Any

from ...components import Mamba2, ModelSpec, RMSNorm
from ..base import Architecture, leaves_of, only_eager
from ..config import ConfigReader
from ..draws import ODD, VOCAB, Config, Random, divisor, sometimes
from ..fields import Field, draw_fields, of_part, read_fields, size, times_hidden, with_defaults, write_tree
from ..obstacles import of_kind
from ..recurrences import ALONE, UNGROUPED, alone, draw_limits, limits, mamba2_leaves, write_limits
from ..usual import B

_FIELDS = {
    **with_defaults(ALONE, vocab=32768, hidden=4096, layers=64, tied=False),
    "num_heads": Field("recurrence.heads", 128),
    "head_dim": Field("recurrence.head_dim", 64),
    "n_groups": Field("recurrence.groups", 8),
    "state_size": size("recurrence.state_size", 128),
    "conv_kernel": size("recurrence.kernel", 4, 1, 2, 4, 5),
    "chunk_size": size("recurrence.chunk", 256, 1, 3, 8, 64),
    "hidden_act": Field("recurrence.activation", "silu"),
    "use_bias": Field("recurrence.bias recurrence.output_bias", False),
    "use_conv_bias": Field("recurrence.conv_bias", True),
    "expand": times_hidden("own.inner", 2, "recurrence.inner", "hidden_size", 4096),
}
_STARTS = dict.fromkeys(
    ("time_step_min", "time_step_max", "time_step_floor", "time_step_rank", "rescale_prenorm_residual"),
    "how training starts",
)


def _read(config: ConfigReader) -> ModelSpec:
    """Return the ModelSpec that a config.json describes."""
    values = read_fields(_FIELDS, config)
    mixer, inner, hidden = of_part(values, "recurrence"), values["own.inner"], values["hidden"]
    heads, width, groups = mixer["heads"], mixer["head_dim"], mixer["groups"]
    if heads * width != inner:
        raise config.fail("num_heads", heads, f"expand · hidden_size / head_dim ({inner} / {width})")
    if heads % groups:
        raise config.fail("n_groups", groups, f"a divisor of num_heads ({heads})")
    norm = RMSNorm(size=inner, eps=values["final_norm.eps"], groups=groups)
    return alone(config, values, Mamba2(hidden_size=hidden, norm=norm, **mixer, **limits(config)))


def _write(spec: ModelSpec) -> dict[str, Any]:
    """Return the config fields that describe a model."""
    return {**write_tree(_FIELDS, spec), **write_limits(of_kind(spec.blocks[0].mixer("recurrence"), Mamba2))}


def _draw(chosen: Random) -> Config:
    """Return a random config.

    The width of all heads together is a multiple of the hidden size, as transformers' class requires.
    """
    expand, width, heads = chosen.choice((1, 2, 3)), chosen.choice(ODD), chosen.choice((1, 2, 4, 6, 9))
    expand = expand if heads * width % expand == 0 else 1
    mixer = {"heads": heads, "head_dim": width, "groups": divisor(chosen, heads)}
    sizes = {"vocab": VOCAB, **{f"recurrence.{name}": value for name, value in mixer.items()}}
    own = {"hidden_size": heads * width // expand, "expand": expand}
    limited = sometimes(chosen, {"time_step_limit": draw_limits(chosen)})
    return {**draw_fields(_FIELDS, chosen, sizes), **own, **limited}


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
    mended=UNGROUPED,
    **only_eager("transformers' class has no attention, and therefore only one path"),
)
