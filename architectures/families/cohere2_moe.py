"""Cohere 2 with mixtures (Cohere 2026): Command R7B with mixtures of experts after the first dense layers, and with
LayerNorms or RMSNorms.

The weights of a softmax router always sum to 1, since the softmax is over the chosen experts only.

Source: transformers models/cohere2_moe/{configuration,modeling}_cohere2_moe.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...components import Attention, LayerNorm, ModelSpec, RMSNorm
from ..base import leaves_of
from ..config import ConfigReader
from ..decoder import DecoderFamily, Mixtures
from ..draws import Config, Random, Sizes, sometimes
from ..fields import PRE, Field, choice, none_or_more, without
from ..lenses import Lens, draw_windows, in_windows, write_windows
from ..obstacles import of_kind
from ..places import by_type
from ..rope import read_rotary
from ..usual import EMBEDDING, ENDS, FEED_FORWARD, ROUTED, B, T, mixed_leaves, shared_expert
from . import cohere

_ROTARY = cohere.ROTARY._replace(base=1e4, scaled=False)
_MIXED = by_type(0, "first_k_dense_replace")
_FIELDS = without(cohere.DECODER.fields, "use_qk_norm")
_PATTERN = "prefix_dense_sliding_window_pattern"


def _layers(config: ConfigReader, values: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return the window and the position encoding of every layer.

    Layers without a window have no position encoding, except dense layers if `prefix_dense_sliding_window_pattern` is
    1.
    """
    count, head_dim = values["layers"], values["head_dim"]
    first, sparse = none_or_more(config, "first_k_dense_replace", 0), _MIXED.get(config, count)
    if first > count:
        raise config.fail("first_k_dense_replace", first, f"at most {count}, the number of layers")
    before, after = config.integer(_PATTERN, 1), config.integer("sliding_window_pattern", 4)
    places = [(layer + 1, before) for layer in range(first)] + [(layer + 1, after) for layer in range(count - first)]
    usual, width = [place % every != 0 for place, every in places], config.optional_integer("sliding_window", 4096)
    windows = in_windows(config, usual, width)
    context = _FIELDS["max_position_embeddings"].value(config, "max_position_embeddings")
    if (scaling := config.raw("rope_scaling")) is not None:
        raise config.fail("rope_scaling", scaling, "null: for this family, transformers reads only rope_parameters")
    rotary = read_rotary(config, head_dim, context, _ROTARY)
    return [
        {**fields, "position": rotary if fields["window"] is not None or (before == 1 and not mixed) else None}
        for fields, mixed in zip(windows, sparse, strict=True)
    ]


def _written(spec: ModelSpec) -> dict[str, Any]:
    """Return the config fields that `_layers` reads."""
    mixers = [(of_kind(block.attention, Attention), hasattr(block.feed_forward, "experts")) for block in spec.blocks]
    bare = any(mixer.window is None and mixer.position is None and not mixed for mixer, mixed in mixers)
    return {**write_windows(spec), _PATTERN: 2 if bare else 1}


def _dense_size(config: ConfigReader, name: str, _default: None) -> int:
    """Return the width of the feed-forward in dense layers. The default is the width of an expert."""
    return config.optional_integer(name) or config.integer("intermediate_size", 22528)


def _draw_layers(chosen: Random, sizes: Sizes) -> Config:
    patterns = {_PATTERN: chosen.choice((1, 2)), "sliding_window_pattern": chosen.choice((1, 2))}
    return {**draw_windows(chosen, sizes), **sometimes(chosen, patterns)}


_DECODER = DecoderFamily(
    {
        **_FIELDS,
        "head_dim": Field("head_dim", 128),
        "intermediate_size": Field("expert_size", 22528),
        "prefix_dense_intermediate_size": Field("intermediate", None, _dense_size),
        "num_shared_experts": Field("shared_experts", 0, none_or_more),
        "shared_expert_combination_strategy": choice("mixture.averaged", "average", {"average": True, "sum": False}),
        "num_experts": Field("mixture.experts", 8),
        "num_experts_per_tok": Field("mixture.top_k", 2),
        "expert_selection_fn": choice("mixture.scores", "softmax", {"softmax": "softmax", "sigmoid": "sigmoid"}),
        "norm_topk_prob": Field("mixture.normalise", True),
    },
    norm=LayerNorm,
    norms=PRE[:1],
    fixed={
        **cohere.FIXED,
        "mixture.normalise": lambda values: values["mixture.normalise"] or values["mixture.scores"] == "softmax",
        "mixture.averaged": lambda values: values["mixture.averaged"] and values["shared_experts"] > 0,
        "mixture.scored_in": lambda values: "float32" if values["mixture.scores"] == "softmax" else "input",
        "mixture.chosen_by": "logits",
        "mixture.rounded": True,
    },
    rotary=_ROTARY,
    layers=Lens(_layers, _written, _draw_layers),
    mixtures=Mixtures(_MIXED),
)
_RMS = replace(
    _DECODER,
    fields={
        **{name: field for name, field in _DECODER.fields.items() if name != "layer_norm_eps"},
        "rms_norm_eps": Field("eps"),
    },
    norm=RMSNorm,
    fixed={role: value for role, value in _DECODER.fixed.items() if not role.startswith("norm.")},
)


def _read(config: ConfigReader) -> ModelSpec:
    """Return the ModelSpec that a config.json describes.

    The norms are RMSNorms if the config has `rms_norm_eps`, and LayerNorms otherwise.
    """
    if config.raw("rms_norm_eps") is None:
        return _DECODER.read(config)
    config.raw("layer_norm_eps")
    return _RMS.read(config)


def _write(spec: ModelSpec) -> dict[str, Any]:
    """Return the config fields that describe a model."""
    fields = (_RMS if isinstance(spec.final_norm, RMSNorm) else _DECODER).write(spec)
    scaling = fields.pop("rope_scaling")
    return {**fields, **({"rope_parameters": scaling} if scaling else {})}


def _draw(chosen: Random) -> Config:
    """Return a random config with either kind of norm, and with RoPE parameters as transformers 5 writes them."""
    config = chosen.choice((_DECODER, _RMS)).draw(chosen, {})
    theta, scaling = config.pop("rope_theta", 1e4), config.pop("rope_scaling", None)
    return {**config, **({} if scaling is None else {"rope_parameters": {**scaling, "rope_theta": theta}})}


_COHERE2_MOE = _DECODER.architecture(
    "cohere2_moe",
    "Cohere2MoeForCausalLM",
    mixed_leaves(
        {**ROUTED, **shared_expert("shared_experts")},
        leaves_of(
            {**EMBEDDING, **cohere.ATTENTION, **FEED_FORWARD, T + "input_layernorm": B + "attention_norm", **ENDS}
        ),
    ),
    released="2026",
    kinds=_DECODER.kinds | _RMS.kinds,
    read=_read,
    write=_write,
    draw=_draw,
    token_ids={"bos_token_id": 5, "eos_token_id": 255001, "pad_token_id": 0},
)
