"""Mamba (Gu & Dao 2312.00752): only Mamba mixers, with the residual stream in fp32.

Source: transformers models/mamba/{configuration,modeling}_mamba.py.
"""

from typing import Any

from ...components import Mamba, ModelSpec, RMSNorm
from ..base import Architecture, leaves_of
from ..config import ConfigReader
from ..draws import ODD, VOCAB, Config, Random, among, sometimes
from ..fields import Field, Fields, draw_fields, of_part, read_fields, size, with_defaults, write_tree
from ..obstacles import of_kind
from ..recurrences import ALONE, alone, mamba_leaves, norms_of, step_rank, width_of
from ..usual import B


def _channels(config: ConfigReader, name: str, default: int) -> int:
    """Return the number of channels. `intermediate_size` takes precedence over `expand`, as in transformers' class."""
    if "intermediate_size" not in config.data:
        return width_of(config, name, config.integer("hidden_size", 768))
    config.integer(name, default)  # it has no effect then (falcon-mamba-7b has 16)
    return config.integer("intermediate_size")


FIELDS: Fields = {
    **with_defaults(ALONE, vocab=50280, hidden=768, layers=32),
    "state_size": size("recurrence.state_size", 16),
    "time_step_rank": step_rank(768)._replace(role="recurrence.rank"),
    "conv_kernel": size("recurrence.kernel", 4, 1, 2, 5),
    "hidden_act": Field("recurrence.activation", "silu"),
    "use_bias": Field("recurrence.bias", False),
    "use_conv_bias": Field("recurrence.conv_bias", True),
    "expand": Field("recurrence.inner", 2, _channels, draw=among(1, 2, 3)),
}


def read(config: ConfigReader, fields: Fields = FIELDS) -> ModelSpec:
    """Return the ModelSpec that a config describes.

    If `fields` has the eps of norms, Mamba's step sizes, b and c have norms without weights.
    """
    values = read_fields(fields, config)
    own, eps = of_part(values, "recurrence"), values.get("b_norm.eps")
    norms: dict[str, Any] = {} if eps is None else norms_of(own["rank"], own["state_size"], eps=eps, gain="none")
    return alone(config, values, Mamba(hidden_size=values["hidden"], **own, **norms))


def write(spec: ModelSpec, fields: Fields = FIELDS) -> dict[str, Any]:
    """Return the config fields that `read` reads."""
    inner, hidden = of_kind(spec.blocks[0].mixer("recurrence"), Mamba).inner, spec.hidden_size
    channels = {"expand": max(inner // hidden, 1), **({"intermediate_size": inner} if inner % hidden else {})}
    return {**write_tree(fields, spec), **channels}


def draw(chosen: Random, fields: Fields = FIELDS) -> Config:
    """Return a random legal config."""
    channels = sometimes(chosen, {"intermediate_size": chosen.choice(ODD)})
    return {**draw_fields(fields, chosen, {"vocab": VOCAB}), **channels}


_T = "backbone.layers.{layer}."
IRRELEVANT = {
    **dict.fromkeys(
        (
            *("time_step_scale", "time_step_min", "time_step_max", "time_step_init_scheme", "time_step_floor"),
            "rescale_prenorm_residual",
        ),
        "how training starts",
    ),
    **dict.fromkeys(("use_mambapy", "use_associative_scan"), "which kernels compute it"),
}
FAMILY: dict[str, Any] = {
    "kinds": frozenset({Mamba, RMSNorm}),
    "leaves": (
        *leaves_of({"backbone.embeddings": "embedding"}),
        *leaves_of({_T + "norm": B + "recurrence_norm"}),
        *mamba_leaves(_T + "mixer."),
        *leaves_of({"backbone.norm_f": "final_norm", "lm_head": "head"}),
    ),
    "prefix": "backbone.",
    "token_ids": {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0},
    "reference": lambda _: ("eager",),
    "reference_quirk": "transformers' class has no attention, and therefore only one path",
}

_MAMBA = Architecture(
    name="mamba",
    model_types=("mamba",),
    hf_class="MambaForCausalLM",
    hf_config="MambaConfig",
    read=read,
    write=write,
    draw=draw,
    released="2023-12",
    aliases=(("backbone.embedding.weight", "backbone.embeddings.weight"),),
    irrelevant=IRRELEVANT,
    **FAMILY,
)
