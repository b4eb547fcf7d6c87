"""Falcon-H1 (TII 2507.22448): Mamba-2 and attention in parallel in every layer, with one norm for both, and multipliers
at every step.

Source: transformers models/falcon_h1/{configuration,modeling}_falcon_h1.py.
"""

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from ...components import GatedFeedForward, Mamba2, ModelSpec, RMSNorm, SubLayer
from ..base import leaves_of
from ..config import ConfigReader
from ..decoder import DecoderFamily
from ..draws import Config, Random, Sizes, divisor
from ..fields import (
    ATTENTION_BIAS,
    MLP_BIAS,
    Field,
    Fields,
    component,
    draw_fields,
    flag,
    llama_fields,
    of_part,
    read_fields,
    write_tree,
)
from ..obstacles import of_kind
from ..recurrences import draw_mamba2, mamba2_leaves, mamba2_sizes, write_mamba2
from ..usual import ATTENTION, EMBEDDING, ROTARY_BUFFERS, T
from .bamba import ENDS, FEED_FORWARD, NORMS


def _factors(config: ConfigReader, name: str, default: tuple[float, ...]) -> tuple[float, ...]:
    """Read a list of factors above 0, as many as the default has."""
    given = config.raw(name)
    given = [*default] if given is None else given
    numbers = isinstance(given, list) and all(type(number) in (int, float) and 0 < number < 1e30 for number in given)
    if not numbers or len(given) != len(default):
        raise config.fail(name, given, f"a list of {len(default)} numbers above 0")
    return tuple(map(float, given))


def _draw_factors(count: int) -> Callable[[Random, Sizes], list[float]]:
    return lambda chosen, _: [chosen.uniform(0.1, 2) for _ in range(count)]


_MIXER: Fields = {
    "ssm_in_multiplier": Field("recurrence_branch.input_multiplier", 1.0),
    "ssm_out_multiplier": Field("recurrence_branch.multiplier", 1.0),
    "ssm_multipliers": Field("recurrence.multipliers", (1.0,) * 5, _factors, list, draw=_draw_factors(5)),
    "mamba_d_ssm": Field("recurrence.inner", 1024, ConfigReader.optional_integer),
    "mamba_rms_norm": Field("recurrence.norm", False, write=lambda norm: norm is not None),
    "mamba_norm_before_gate": flag("recurrence.gated", True, "behind norm", "before norm"),
    "mamba_proj_bias": Field("recurrence.bias", False),
    "projectors_bias": Field("recurrence.output_bias", False),
}


def _read(config: ConfigReader) -> ModelSpec:
    """Read the tree of a config.json."""
    spec, values = _DECODER.read(config), read_fields(_MIXER, config)
    alike = [[kind] * len(spec.blocks) for kind in ("full_attention", "hybrid")]
    config.refuse({"layer_types": ((None, *alike), "every layer is Mamba-2 beside attention")})
    own, first, final = of_part(values, "recurrence"), spec.blocks[0], of_kind(spec.final_norm, RMSNorm)
    plain = {"hidden": spec.hidden_size, "activation": of_kind(first.feed_forward, GatedFeedForward).activation}
    sizes = mamba2_sizes(config, plain, inner=own.pop("inner"))
    width = sizes["heads"] * sizes["head_dim"]
    norm = RMSNorm(size=width, eps=final.eps, groups=sizes["groups"], cast="after_weight") if own["norm"] else None
    own |= {"norm": norm, "gated": "before norm" if norm is None else own["gated"]}
    branch = SubLayer(mixer=Mamba2(**sizes, **own), beside=True, **of_part(values, "recurrence_branch"))
    attention, feed_forward = first.sublayers
    return replace(spec, blocks=(replace(first, sublayers=(attention, branch, feed_forward)),) * len(spec.blocks))


def _written(spec: ModelSpec) -> dict[str, Any]:
    """Return the sizes of Mamba-2. Its width does not depend on the hidden size."""
    mixer = of_kind(component(spec, "recurrence"), Mamba2)
    return {**write_mamba2(replace(mixer, hidden_size=mixer.inner)), **write_tree(_MIXER, spec)}


_DECODER = DecoderFamily(
    {
        **llama_fields(vocab=128000, intermediate=14336, context=8192, eps=1e-5),
        "num_key_value_heads": Field("kv_heads", 8, ConfigReader.optional_integer),
        "attention_bias": ATTENTION_BIAS,
        "mlp_bias": MLP_BIAS,
        "embedding_multiplier": Field("embedding.multiplier", 1.0),
        "lm_head_multiplier": Field("head.multiplier", 1.0),
        "key_multiplier": Field("attention.key_multiplier", 1.0),
        "attention_in_multiplier": Field("attention_branch.input_multiplier", 1.0),
        "attention_out_multiplier": Field("attention_branch.multiplier", 1.0),
        "mlp_multipliers": Field(
            "own.factors",
            (1.0, 1.0),
            _factors,
            of=lambda spec: [
                component(spec, "feed_forward").gate_multiplier,
                component(spec, "feed_forward_branch").multiplier,
            ],
            draw=_draw_factors(2),
        ),
    },
    fixed={
        "feed_forward.gate_multiplier": lambda values: values["own.factors"][0],
        "feed_forward_branch.multiplier": lambda values: values["own.factors"][1],
    },
    written=_written,
)


def _draw(chosen: Random) -> Config:
    """Return a random config. The width of Mamba-2 does not depend on the hidden size."""
    config, width = _DECODER.draw(chosen, {}), chosen.choice((8, 12, 30, 40))
    heads = divisor(chosen, width)
    sizes = {
        "mamba_d_ssm": width,
        "mamba_d_head": width // heads,
        "mamba_n_heads": heads,
        "mamba_n_groups": divisor(chosen, heads),
    }
    return {**config, **draw_mamba2(chosen, config["hidden_size"]), **draw_fields(_MIXER, chosen, {}), **sizes}


_FALCON_H1 = _DECODER.architecture(
    "falcon_h1",
    "FalconH1ForCausalLM",
    (
        *leaves_of({**EMBEDDING, **FEED_FORWARD}),
        *mamba2_leaves(T + "mamba."),
        *leaves_of({**ATTENTION, **NORMS, **ENDS}),
    ),
    released="2025-05",
    kinds=_DECODER.kinds | {Mamba2},
    read=_read,
    draw=_draw,
    token_ids={"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    dropped=(*ROTARY_BUFFERS, T + "mamba.mup_vector"),
)
