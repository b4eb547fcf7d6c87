"""Mamba (Gu & Dao 2312.00752): only Mamba mixers, with the residual stream in fp32.

Source: transformers models/mamba/{configuration,modeling}_mamba.py.
"""

from typing import Any

from ...components import Mamba, ModelSpec, RMSNorm
from ..base import Architecture, leaves_of
from ..config import ConfigReader
from ..draws import ODD, Config, Random, sometimes
from ..fields import ACTIVATIONS, activation_named, name_of
from ..obstacles import of_kind
from ..recurrences import alone, mamba_leaves, norms_of, steps_of_rank, width_of
from ..usual import B


def _inner(config: ConfigReader, hidden: int) -> int:
    """Return the number of channels: transformers' class prefers `intermediate_size` to `expand`."""
    if "intermediate_size" not in config.data:
        return width_of(config, "expand", hidden)
    config.integer("expand", 2)  # which says nothing then (falcon-mamba-7b has 16 there)
    return config.integer("intermediate_size")


def read(config: ConfigReader, normed: bool = False) -> ModelSpec:
    """The tree; `normed`: what each token chooses is normed, without weights."""
    hidden, vocab = config.integer("hidden_size", 768), config.integer("vocab_size", 50280)
    states, inner = config.integer("state_size", 16), _inner(config, hidden)
    rank, eps = steps_of_rank(config, "time_step_rank", hidden), config.number("layer_norm_epsilon", 1e-5)
    own = {"eps": config.number("mixer_rms_eps", 1e-6), "gain": "none"} if normed else {}
    mixer = Mamba(
        hidden_size=hidden,
        inner=inner,
        state_size=states,
        rank=rank,
        kernel=config.integer("conv_kernel", 4),
        activation=activation_named(config, "hidden_act", "silu"),
        bias=config.boolean("use_bias", False),
        conv_bias=config.boolean("use_conv_bias", True),
        **(norms_of(rank, states, **own) if normed else {}),
    )
    return alone(config, mixer, RMSNorm(size=hidden, eps=eps), vocab, config.layers("num_hidden_layers", 32), True)


def write(spec: ModelSpec) -> dict[str, Any]:
    """The config fields that `read` reads."""
    mixer, norm = of_kind(spec.blocks[0].mixer("recurrence"), Mamba), of_kind(spec.final_norm, RMSNorm)
    return {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "num_hidden_layers": len(spec.blocks),
        "state_size": mixer.state_size,
        "expand": max(mixer.inner // mixer.hidden_size, 1),
        **({"intermediate_size": mixer.inner} if mixer.inner % mixer.hidden_size else {}),
        "conv_kernel": mixer.kernel,
        "time_step_rank": mixer.rank,
        "hidden_act": name_of(mixer.activation),
        "use_bias": mixer.bias,
        "use_conv_bias": mixer.conv_bias,
        "layer_norm_epsilon": norm.eps,
        "residual_in_fp32": spec.blocks[0].wide,
        "tie_word_embeddings": spec.tied,
        **({} if mixer.b_norm is None else {"mixer_rms_eps": mixer.b_norm.eps}),
    }


def draw(chosen: Random) -> Config:
    """Return a random legal config."""
    own = {
        "intermediate_size": chosen.choice(ODD),
        "time_step_rank": chosen.choice(ODD),
        "conv_kernel": chosen.choice((1, 2, 5)),
        "use_bias": True,
        "use_conv_bias": False,
        "residual_in_fp32": False,
        "tie_word_embeddings": False,
        "hidden_act": chosen.choice([*ACTIVATIONS]),
        "layer_norm_epsilon": 1e-3,
    }
    return {
        "hidden_size": chosen.choice(ODD),
        "num_hidden_layers": chosen.choice((1, 2, 3)),
        "state_size": chosen.choice(ODD),
        "expand": chosen.choice((1, 2, 3)),
        **sometimes(chosen, own),
    }


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
    "reference_quirk": "transformers' class has no attention, and knows no other path",
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
