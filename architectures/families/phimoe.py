"""Phi-3.5-MoE (Microsoft 2024, 2404.14219): mixtral with LayerNorms with biases, LongRoPE, and separate softmaxes for
the weights of the two experts (SparseMixer).

transformers always uses two experts per token. It uses LongRoPE's short factors for all texts, while the model's own
code uses the long factors for texts longer than the original context. gptkit follows transformers: in a tree, the long
factors equal the short ones.

Source: transformers models/phimoe/{configuration,modeling}_phimoe.py.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ...components import Attention, LayerNorm, LongRopeScaling, ModelSpec, Rotary
from ..base import Leaf, Stacked, by_name
from ..config import ConfigReader
from ..decoder import DecoderFamily, Mixtures
from ..draws import Config, Random, sometimes
from ..fields import ATTENTION_BIAS, Field, constant, llama_fields, without
from ..lenses import Lens
from ..obstacles import of_kind
from ..rope import ORIGINAL, RotaryKind, read_rotary
from ..usual import B, T
from . import mixtral
from .mixtral import MOE

_ROTARY = RotaryKind(1e6, entire=True, renewed=True, types={"default": "default", "longrope": "longrope"})
_FACTORS = ("short_mscale", "long_mscale")


def _layers(config: ConfigReader, values: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return RoPE, which is the same in all layers. If it is LongRoPE, the config states the factor of cos and sin."""
    count, head_dim = values["layers"], values["head_dim"]
    context = _DECODER.fields["max_position_embeddings"].value(config, "max_position_embeddings")
    rotary = read_rotary(config, head_dim, context, _ROTARY)
    which = "rope_scaling" if config.inner("rope_scaling").data else "rope_parameters"
    rope = config.inner(which)
    if isinstance(rotary.scaling, LongRopeScaling):
        short, long = (rope.number(name) for name in _FACTORS)
        if short != long:
            raise rope.fail(
                _FACTORS[1], long, f"the value of {_FACTORS[0]} ({short:g}): gptkit supports only equal factors"
            )
        divisors = rotary.scaling.short_factor
        scaling = msgspec.structs.replace(rotary.scaling, long_factor=divisors, attention_factor=short)
        rotary = msgspec.structs.replace(rotary, scaling=scaling)
    return [{"position": rotary}] * count


_DECODER = DecoderFamily(
    {
        **llama_fields(vocab=32064, intermediate=6400, kv_heads=8, context=131072, eps=1e-5),
        "attention_bias": ATTENTION_BIAS,
        "lm_head_bias": Field("head.bias", False),
        "sliding_window": Field("attention.window", None, ConfigReader.optional_integer),
        "num_local_experts": Field("mixture.experts", 16),
        "num_experts_per_tok": constant("mixture.top_k", 2, "transformers ignores this field and uses two experts"),
        "router_jitter_noise": Field("mixture.jitter", 0.01),
    },
    norm=LayerNorm,
    fixed={"mixture.normalise": False, "mixture.scored_in": "input"},
    rotary=_ROTARY,
    layers=Lens(_layers),
    mixtures=Mixtures(),
)


def _write(spec: ModelSpec) -> dict[str, Any]:
    """Return the config fields that describe a model."""
    fields = _DECODER.write(spec)
    scaling = of_kind(of_kind(spec.blocks[0].attention, Attention).position, Rotary).scaling
    if not isinstance(scaling, LongRopeScaling):
        return fields
    more = dict.fromkeys(_FACTORS, scaling.attention_factor)
    return {**fields, "rope_scaling": {**fields["rope_scaling"], **more}}


def _draw(chosen: Random) -> Config:
    """Return a random config whose LongRoPE has the same factor of cos and sin for short and for long texts."""
    config = _DECODER.draw(chosen, {}, **{"mixture.experts": chosen.choice((2, 3, 5))})
    scale = chosen.choice((1.0, 1.2))
    factors = [chosen.uniform(0.5, 2) for _ in range(config["head_dim"] // 2)]
    long = {"rope_type": "longrope", "short_factor": factors, "long_factor": factors, "factor": 4.0, ORIGINAL: 8}
    config = without(config, "rope_scaling", "rope_parameters", "rope_theta")
    return {**config, **sometimes(chosen, {"rope_parameters": {**long, **dict.fromkeys(_FACTORS, scale)}})}


_PROJECTIONS = (f"self_attn.{name}_proj.bias" for name in "qkvo")
_BIASES = {
    **{T + name: B + name.replace("self_attn", "attention") for name in _PROJECTIONS},
    T + "input_layernorm.bias": B + "attention_norm.bias",
    T + "post_attention_layernorm.bias": B + "feed_forward_norm.bias",
    "model.norm.bias": "final_norm.bias",
    "lm_head.bias": "head.bias",
}
_HELD = (Stacked(T + "mlp.router.weight", (MOE + "gate.weight",)), *mixtral.STACKED[1:])

_PHIMOE = _DECODER.architecture(
    "phimoe",
    "PhimoeForCausalLM",
    by_name((*mixtral.LEAVES, *(Leaf(theirs, ours) for theirs, ours in _BIASES.items())), _HELD),
    write=_write,
    draw=_draw,
    released="2024-08",
    token_ids={"bos_token_id": 1, "eos_token_id": 2},
    stacked=_HELD,
    irrelevant={"input_jitter_noise": "training only"},
)
