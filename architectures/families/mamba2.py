"""Mamba-2 (Dao & Gu 2405.21060): only Mamba-2 mixers, with the residual stream in fp32.

Source: transformers models/mamba2/{configuration,modeling}_mamba2.py.
"""

from typing import Any

from ...components import Mamba2, ModelSpec, RMSNorm
from ...errors import CannotExpress
from ..base import Architecture, leaves_of
from ..config import ConfigReader
from ..draws import ODD, Config, Random, divisor, sometimes
from ..fields import ACTIVATIONS, activation_named, name_of
from ..obstacles import of_kind
from ..recurrences import alone, draw_limits, limits, mamba2_leaves, write_limits
from ..usual import B

_SIZES = {"state_size": ("state_size", 128), "conv_kernel": ("kernel", 4), "chunk_size": ("chunk", 256)}
_STARTS = dict.fromkeys(
    ("time_step_min", "time_step_max", "time_step_floor", "time_step_rank", "rescale_prenorm_residual"),
    "how training starts",
)


def _read(config: ConfigReader) -> ModelSpec:
    hidden, vocab = config.integer("hidden_size", 4096), config.integer("vocab_size", 32768)
    heads, width = config.integer("num_heads", 128), config.integer("head_dim", 64)
    groups, expand = config.integer("n_groups", 8), config.integer("expand", 2)
    if heads * width != hidden * expand:
        raise config.fail("num_heads", heads, f"expand · hidden_size / head_dim ({hidden * expand} / {width})")
    if heads % groups:
        raise config.fail("n_groups", groups, f"a divisor of num_heads ({heads})")
    bias, eps = config.boolean("use_bias", False), config.number("layer_norm_epsilon", 1e-5)
    sizes: dict[str, Any] = {role: config.integer(name, default) for name, (role, default) in _SIZES.items()}
    mixer = Mamba2(
        hidden_size=hidden,
        heads=heads,
        head_dim=width,
        groups=groups,
        activation=activation_named(config, "hidden_act", "silu"),
        norm=RMSNorm(size=heads * width, eps=eps, groups=groups),
        bias=bias,
        output_bias=bias,
        conv_bias=config.boolean("use_conv_bias", True),
        **sizes,
        **limits(config),
    )
    return alone(config, mixer, RMSNorm(size=hidden, eps=eps), vocab, config.layers("num_hidden_layers", 64), False)


def _write(spec: ModelSpec) -> dict[str, Any]:
    mixer, norm = of_kind(spec.blocks[0].mixer("recurrence"), Mamba2), of_kind(spec.final_norm, RMSNorm)
    if mixer.inner % mixer.hidden_size:
        raise CannotExpress(
            f"transformers needs heads whose total width is a multiple of the hidden size {mixer.hidden_size}, "
            f"but it is {mixer.inner}"
        )
    return {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "num_hidden_layers": len(spec.blocks),
        "num_heads": mixer.heads,
        "head_dim": mixer.head_dim,
        "n_groups": mixer.groups,
        "expand": mixer.inner // mixer.hidden_size,
        **{name: getattr(mixer, role) for name, (role, _) in _SIZES.items()},
        "hidden_act": name_of(mixer.activation),
        "use_bias": mixer.bias,
        "use_conv_bias": mixer.conv_bias,
        "layer_norm_epsilon": norm.eps,
        "residual_in_fp32": spec.blocks[0].wide,
        "tie_word_embeddings": spec.tied,
        **write_limits(mixer),
    }


def _draw(chosen: Random) -> Config:
    expand, width, heads = chosen.choice((1, 2, 3)), chosen.choice(ODD), chosen.choice((1, 2, 4, 6, 9))
    while heads * width % expand:
        expand -= 1
    own = {
        "use_bias": True,
        "use_conv_bias": False,
        "residual_in_fp32": False,
        "tie_word_embeddings": True,
        "hidden_act": chosen.choice([*ACTIVATIONS]),
        "layer_norm_epsilon": 1e-3,
        "time_step_limit": draw_limits(chosen),
    }
    return {
        "hidden_size": heads * width // expand,
        "expand": expand,
        "num_heads": heads,
        "head_dim": width,
        "n_groups": divisor(chosen, heads),
        "num_hidden_layers": chosen.choice((1, 2, 3)),
        "state_size": chosen.choice(ODD),
        "conv_kernel": chosen.choice((1, 2, 4, 5)),
        "chunk_size": chosen.choice((1, 3, 8, 64)),
        **sometimes(chosen, own),
    }


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
    reference=lambda spec: ("eager",),
    reference_quirk="transformers' class has no attention, and knows no other path",
)
