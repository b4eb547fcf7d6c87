"""Falcon-H1 (TII 2507.22448): Mamba-2 and attention in parallel in every layer, with one norm for both, and multipliers
at every step.

Source: transformers models/falcon_h1/{configuration,modeling}_falcon_h1.py.
"""

from typing import Any

from msgspec.structs import replace

from ...components import Attention, GatedFeedForward, Mamba2, ModelSpec, RMSNorm, SubLayer
from ..base import leaves_of
from ..config import ConfigReader
from ..decoder import DecoderFamily
from ..draws import Config, Random, divisor, sometimes
from ..fields import ATTENTION_BIAS, MLP_BIAS, Field, llama_fields
from ..obstacles import of_kind
from ..recurrences import draw_mamba2, mamba2_leaves, mamba2_sizes, write_mamba2
from ..usual import ATTENTION, EMBEDDING, ROTARY_BUFFERS, T
from .bamba import ENDS, FEED_FORWARD, NORMS

_BRANCHES = {  # the multipliers of the input and of the output of every mixer
    "recurrence": ("ssm_in_multiplier", "ssm_out_multiplier"),
    "attention": ("attention_in_multiplier", "attention_out_multiplier"),
}


def _multipliers(config: ConfigReader, name: str, count: int) -> list[float]:
    """Return a list of `count` factors above 0. If the field is null, all factors are 1."""
    given = config.raw(name)
    given = [1.0] * count if given is None else given
    numbers = isinstance(given, list) and all(type(number) in (int, float) and 0 < number < 1e30 for number in given)
    if not numbers or len(given) != count:
        raise config.fail(name, given, f"a list of {count} numbers above 0")
    return [float(number) for number in given]


def _mamba(config: ConfigReader, hidden: int, activation: Any, eps: float) -> Mamba2:
    inner = config.optional_integer("mamba_d_ssm", 1024)
    sizes = mamba2_sizes(config, {"hidden": hidden, "activation": activation}, inner=inner)
    first, normed = config.boolean("mamba_norm_before_gate", True), config.boolean("mamba_rms_norm", False)
    norm = RMSNorm(size=sizes["heads"] * sizes["head_dim"], eps=eps, groups=sizes["groups"], cast="after_weight")
    return Mamba2(
        **sizes,
        norm=norm if normed else None,
        gated="behind norm" if normed and first else "before norm",
        bias=config.boolean("mamba_proj_bias", False),
        output_bias=config.boolean("projectors_bias", False),
        multipliers=tuple(_multipliers(config, "ssm_multipliers", 5)),  # type: ignore[arg-type]
    )


def _read(config: ConfigReader) -> ModelSpec:
    spec = _DECODER.read(config)
    alike = [[kind] * len(spec.blocks) for kind in ("full_attention", "hybrid")]
    config.refuse({"layer_types": ((None, *alike), "every layer is Mamba-2 beside attention")})
    attention, feed_forward = spec.blocks[0].sublayers
    inner = of_kind(feed_forward.mixer, GatedFeedForward)
    norm = of_kind(attention.norm, RMSNorm)
    gate, down = _multipliers(config, "mlp_multipliers", 2)
    scaled: dict[str, dict[str, Any]] = {
        slot: {"input_multiplier": config.number(read, 1.0), "multiplier": config.number(output, 1.0)}
        for slot, (read, output) in _BRANCHES.items()
    }
    mamba = _mamba(config, spec.hidden_size, inner.activation, norm.eps)
    sublayers = (
        replace(attention, **scaled["attention"]),
        SubLayer(mixer=mamba, beside=True, **scaled["recurrence"]),
        replace(feed_forward, mixer=replace(inner, gate_multiplier=gate), multiplier=down),
    )
    return replace(spec, blocks=(replace(spec.blocks[0], sublayers=sublayers),) * len(spec.blocks))


def _written(spec: ModelSpec) -> dict[str, Any]:
    first = spec.blocks[0]
    mamba, inner = of_kind(first.mixer("recurrence"), Mamba2), of_kind(first.feed_forward, GatedFeedForward)
    of_kind(first.mixer("attention"), Attention)
    by_slot = {sublayer.mixer.slot: sublayer for sublayer in first.sublayers}
    multipliers: dict[str, Any] = {}
    for slot, (read, output) in _BRANCHES.items():
        multipliers |= {read: by_slot[slot].input_multiplier, output: by_slot[slot].multiplier}
    return {
        **write_mamba2(replace(mamba, hidden_size=mamba.inner)),
        "mamba_d_ssm": mamba.inner,
        "mamba_proj_bias": mamba.bias,
        "projectors_bias": mamba.output_bias,
        "mamba_rms_norm": mamba.norm is not None,
        "mamba_norm_before_gate": mamba.gated == "behind norm",
        "ssm_multipliers": list(mamba.multipliers),
        "mlp_multipliers": [inner.gate_multiplier, by_slot["feed_forward"].multiplier],
        **multipliers,
    }


_DECODER = DecoderFamily(
    {
        **llama_fields(vocab=128000, intermediate=14336, context=8192, eps=1e-5),
        "num_key_value_heads": Field("kv_heads", 8, ConfigReader.optional_integer),
        "attention_bias": ATTENTION_BIAS,
        "mlp_bias": MLP_BIAS,
        "embedding_multiplier": Field("embedding.multiplier", 1.0),
        "lm_head_multiplier": Field("head.multiplier", 1.0),
        "key_multiplier": Field("attention.key_multiplier", 1.0),
    },
    written=_written,
)


def _draw(chosen: Random) -> Config:
    """Return a random config with multipliers. The width of Mamba-2 does not depend on the hidden size."""
    config, width = _DECODER.draw(chosen, {}), chosen.choice((8, 12, 30, 40))
    heads = divisor(chosen, width)
    numbers = {name: chosen.uniform(0.1, 2) for names in _BRANCHES.values() for name in names}
    flags = {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "projectors_bias": True}
    lists = {
        name: [chosen.uniform(0.1, 2) for _ in range(n)] for name, n in (("ssm_multipliers", 5), ("mlp_multipliers", 2))
    }
    return {
        **config,
        **draw_mamba2(chosen, config["hidden_size"]),
        "mamba_d_ssm": width,
        "mamba_d_head": width // heads,
        "mamba_n_heads": heads,
        "mamba_n_groups": divisor(chosen, heads),
        **sometimes(chosen, {**numbers, **flags, **lists}),
    }


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
