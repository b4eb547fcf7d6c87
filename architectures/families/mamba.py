"""Mamba (Gu & Dao 2312.00752): only Mamba mixers, with the residual stream in fp32.

Source: transformers models/mamba/{configuration,modeling}_mamba.py.
"""

import math
from typing import Any

from ...components import Block, Embedding, Head, Mamba, Mamba2, ModelSpec, RMSNorm, SubLayer
from ...errors import CannotExpress
from ..base import Architecture, Leaf, leaves_of
from ..config import ConfigReader
from ..fields import activation_named, name_of
from ..layout import Layout
from ..obstacles import of_kind
from ..usual import B
from .bamba import LINEAR


def steps_of_rank(config: ConfigReader, name: str, hidden: int) -> int:
    """How many numbers steps are made of, where "auto" stands for a sixteenth of the stream's."""
    return math.ceil(hidden / 16) if config.raw(name, "auto") == "auto" else config.integer(name)


def width_of(config: ConfigReader, name: str, hidden: int) -> int:
    """How many channels there are, by how many times as many as the stream has."""
    times = config.integer(name, 2)
    if times * hidden >= 2**31:
        raise config.fail(name, times, f"less than 2^31 / hidden_size ({hidden})")
    return times * hidden


def _inner(config: ConfigReader, hidden: int) -> int:
    """Return the number of channels: transformers' class prefers `intermediate_size` to `expand`."""
    if "intermediate_size" not in config.data:
        return width_of(config, "expand", hidden)
    config.integer("expand", 2)  # which says nothing then (falcon-mamba-7b has 16 there)
    return config.integer("intermediate_size")


def channels_of(mixer: Mamba) -> int:
    """The value that `width_of` reads."""
    if mixer.inner % mixer.hidden_size:
        raise CannotExpress(
            f"transformers needs a multiple of the hidden size {mixer.hidden_size} as number of channels, but "
            f"it is {mixer.inner}"
        )
    return mixer.inner // mixer.hidden_size


def norms_of(rank: int, states: int, **fields: Any) -> dict[str, RMSNorm]:
    """Norms of what each token chooses."""
    return {f"{name}_norm": RMSNorm(size=n, **fields) for name, n in {"dt": rank, "b": states, "c": states}.items()}


def alone(config: ConfigReader, mixer: Mamba | Mamba2, norm: RMSNorm, vocab: int, count: int, tied: bool) -> ModelSpec:
    """The tree of so many layers that are a mixer and nothing else; `tied`: whether the head is where nobody says."""
    config.refuse({"layer_types": ((None, [LINEAR] * count), f"every layer is {type(mixer).__name__}")})
    block = Block(sublayers=(SubLayer(mixer=mixer, norm=norm),), wide=config.boolean("residual_in_fp32", True))
    hidden = mixer.hidden_size
    return ModelSpec(
        embedding=Embedding(vocab_size=vocab, hidden_size=hidden),
        blocks=(block,) * count,
        final_norm=norm,
        head=Head(vocab_size=vocab, hidden_size=hidden, tied=config.boolean("tie_word_embeddings", tied)),
    )


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


def mixer_leaves(theirs: str) -> tuple[Leaf, ...]:
    """Mamba of a layer, as the module `theirs`."""
    ours = B + "recurrence."
    halves: dict[str, Any] = {"split": "part", "parts": ("inner", "inner")}
    chosen = Layout("part inner", split="part", parts=("rank", "state", "state"))
    return (
        *(Leaf(theirs + name, ours + name) for name in ("A_log", "D")),
        Leaf(theirs + "conv1d.weight", ours + "x_conv.weight", Layout("inner one kernel", "inner (one kernel)")),
        Leaf(theirs + "conv1d.bias", ours + "x_conv.bias"),
        Leaf(
            theirs + "in_proj.weight",
            (ours + "x_proj.weight", ours + "gate_proj.weight"),
            Layout("part hidden", **halves),
        ),
        Leaf(theirs + "in_proj.bias", (ours + "x_proj.bias", ours + "gate_proj.bias"), Layout("part", **halves)),
        Leaf(theirs + "x_proj.weight", tuple(f"{ours}{name}_proj.weight" for name in ("dt_in", "b", "c")), chosen),
        *leaves_of({theirs + "dt_proj": ours + "dt_proj", theirs + "out_proj": ours + "o_proj"}),
    )


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
        *mixer_leaves(_T + "mixer."),
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
    released="2023-12",
    aliases=(("backbone.embedding.weight", "backbone.embeddings.weight"),),
    irrelevant=IRRELEVANT,
    **FAMILY,
)
