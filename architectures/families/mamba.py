"""Mamba (Gu & Dao 2312.00752): only Mamba mixers, with the residual stream in fp32.

Source: transformers models/mamba/{configuration,modeling}_mamba.py.
"""

from typing import Any

from ...components import Mamba, ModelSpec, RMSNorm
from ..base import Architecture, leaves_of
from ..config import ConfigReader
from ..draws import ODD, VOCAB, Config, Random, sometimes
from ..fields import Field, draw_fields, read_fields, size, with_defaults, write_fields
from ..obstacles import of_kind
from ..recurrences import ALONE, alone, mamba_leaves, norms_of, step_rank, width_of, write_alone
from ..usual import B


def _channels(config: ConfigReader) -> int:
    """Return the number of channels. `intermediate_size` takes precedence over `expand`, as in transformers' class."""
    if "intermediate_size" not in config.data:
        return width_of(config, "expand", config.integer("hidden_size", 768))
    config.integer("expand", 2)  # it has no effect then (falcon-mamba-7b has 16)
    return config.integer("intermediate_size")


_TREE = with_defaults(ALONE, vocab=50280, hidden=768, layers=32)
_MIXER = {
    "state_size": size("state_size", 16),
    "time_step_rank": step_rank(768),
    "conv_kernel": size("kernel", 4, 1, 2, 5),
    "hidden_act": Field("activation", "silu"),
    "use_bias": Field("bias", False),
    "use_conv_bias": Field("conv_bias", True),
}


def read(config: ConfigReader, normed: bool = False) -> ModelSpec:
    """Return the ModelSpec that a config describes.

    With `normed`, Mamba's step sizes, b and c have norms without weights.
    """
    tree, mixer, inner = read_fields(_TREE, config), read_fields(_MIXER, config), _channels(config)
    own = {"eps": config.number("mixer_rms_eps", 1e-6), "gain": "none"} if normed else {}
    norms: dict[str, Any] = norms_of(mixer["rank"], mixer["state_size"], **own) if normed else {}
    return alone(config, tree, Mamba(hidden_size=tree["hidden"], inner=inner, **mixer, **norms))


def write(spec: ModelSpec) -> dict[str, Any]:
    """Return the config fields that `read` reads."""
    mixer = of_kind(spec.blocks[0].mixer("recurrence"), Mamba)
    return {
        **write_alone(spec),
        **write_fields(_MIXER, mixer),
        "expand": max(mixer.inner // mixer.hidden_size, 1),
        **({"intermediate_size": mixer.inner} if mixer.inner % mixer.hidden_size else {}),
        **({} if mixer.b_norm is None else {"mixer_rms_eps": mixer.b_norm.eps}),
    }


def draw(chosen: Random) -> Config:
    """Return a random legal config."""
    channels = {"expand": chosen.choice((1, 2, 3)), **sometimes(chosen, {"intermediate_size": chosen.choice(ODD)})}
    return {**draw_fields(_TREE, chosen, {"vocab": VOCAB}), **draw_fields(_MIXER, chosen, {}), **channels}


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
    "write": write,
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
    draw=draw,
    released="2023-12",
    aliases=(("backbone.embedding.weight", "backbone.embeddings.weight"),),
    irrelevant=IRRELEVANT,
    **FAMILY,
)
