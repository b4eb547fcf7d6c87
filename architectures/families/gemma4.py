"""Gemma 4's text model (Google 2026): Gemma 3 with heads of another width in layers with full attention, and with
values that are normalised or equal to the keys. The last layers use keys and values of earlier layers, and every layer
has an additional input.

Conversions keep the tensors of towers for images and sound, and the projections of keys and values of the last layers,
which do not use them. `use_bidirectional_attention` "vision" only affects images.

Source: transformers models/gemma4/{configuration,modeling}_gemma4.py.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from ...components import (
    MOST_EXPERTS,
    Attention,
    BlockScale,
    DenseBesideExperts,
    GatedFeedForward,
    LayerEmbedding,
    LayerInput,
    MixtureOfExperts,
    ModelSpec,
    RMSNorm,
    Rotary,
    SubLayer,
)
from ..base import Leaf, leaves_of
from ..config import ConfigReader
from ..decoder import DecoderFamily
from ..draws import EVEN, VOCAB, WINDOWS, Config, Random, Sizes, kind_by_layer, sometimes
from ..fields import AROUND, ATTENTION_BIAS, USUAL, Field, none_or_more, read_fields, with_defaults, write_tree
from ..layout import Layout
from ..lenses import Lens, attentions, write_windows
from ..obstacles import of_kind
from ..rope import ROTARY, RotaryKind, draw_scaling, read_rotaries, write_rotaries
from ..usual import EMBEDDING, FEED_FORWARD, SANDWICH, B, T

FULL, SLIDING = "full_attention", "sliding_attention"
FIELDS = {
    **with_defaults(
        {"hidden_activation" if name == "hidden_act" else name: field for name, field in USUAL.items()},
        vocab=256000,
        hidden=2304,
        intermediate=9216,
        layers=26,
        heads=8,
        kv_heads=4,
        head_dim=256,
        context=8192,
        tied=True,
        activation="gelu_pytorch_tanh",
    ),
    "attention_bias": ATTENTION_BIAS,
    "final_logit_softcapping": Field("head.cap", 30.0, ConfigReader.optional_number),
    "num_kv_shared_layers": Field(
        "own.late", 0, none_or_more, of=lambda spec: [m.kv_from for m in attentions(spec)].count("earlier")
    ),
}
"""The config fields that Gemma 3n and Gemma 4 share. The defaults are those of Gemma 2, some of which the two families
replace."""
_FIELDS = {
    **with_defaults(FIELDS, vocab=262144, layers=30, context=131072, final_logit_softcapping=None),
    "attention_k_eq_v": Field("own.keys_alone", False, of=lambda spec: "keys" in [m.kv_from for m in attentions(spec)]),
    "use_double_wide_mlp": Field("own.wide", False, of=lambda spec: _has_wide_layers(spec)),
}
_INPUTS = {
    "hidden_size_per_layer_input": Field(
        "layer_inputs.width", 256, none_or_more, of=lambda spec: getattr(spec.layer_inputs, "width", 0)
    ),
    "vocab_size_per_layer_input": Field(
        "own.rows", 262144, of=lambda spec: getattr(spec.layer_inputs, "table", spec.embedding).vocab_size
    ),
}
_BESIDE = {
    "enable_moe_block": Field("mixture.expert_scale", False),
    "num_experts": Field("mixture.experts"),
    "top_k_experts": Field("mixture.top_k"),
    "moe_intermediate_size": Field("mixture.intermediate_size"),
}
_KINDS = {
    FULL: RotaryKind(
        1e6, "", usual={"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}, scaled=False
    ),
    SLIDING: RotaryKind(1e4, "", scaled=False),
}
LATE = {"k_norm": None, "v_norm": None, "kv_from": "earlier"}  # layers that use the keys and values of earlier layers
_EVERY = 6  # by default, every sixth layer has full attention
_HEADS = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
"""The fields of heads that may have other values in layers with full attention -> the fields with these other values.
If the config has a `per_layer_config`, it is used instead of the latter fields."""


def _has_wide_layers(spec: ModelSpec) -> bool:
    """Return whether layers that use the keys and values of earlier ones have feed-forwards of twice the width."""
    widths, mixers = [block.feed_forward.intermediate_size for block in spec.blocks], attentions(spec)
    return any(
        mixer.kv_from == "earlier" and width == 2 * widths[0] for mixer, width in zip(mixers, widths, strict=True)
    )


def late_layers(config: ConfigReader, values: Mapping[str, Any], kinds: Sequence[Any]) -> list[bool]:
    """Return for every layer whether it uses the keys and values of an earlier layer of the same kind."""
    count, shared = values["layers"], values["own.late"]
    if shared and (shared >= count or {*kinds[: count - shared]} != {*kinds}):
        raise config.fail(
            "num_kv_shared_layers",
            shared,
            "a smaller number: of each type in layer_types, at least one layer must compute its own keys and values",
        )
    return [layer >= count - shared for layer in range(count)]


def _types(config: ConfigReader, count: int) -> list[str]:
    """Return the layer type of each layer. The last layer always has full attention."""
    usual = [FULL if (layer + 1) % _EVERY == 0 else SLIDING for layer in range(count)]
    return [*config.layer_types(usual)[:-1], FULL]


def _by_kind(config: ConfigReader, types: Sequence[str], keys_alone: bool) -> dict[str, dict[str, int]]:
    """Return the values of the fields in `_HEADS` by layer type.

    A layer type or a field is left out if it has no values of its own. Then the fields of the whole model apply.
    """
    stated = config.raw("per_layer_config")
    if stated is None:
        full = {"head_dim": config.integer("global_head_dim", 512)}
        kv_heads = config.optional_integer("num_global_key_value_heads")
        return {FULL: full | ({"num_key_value_heads": kv_heads} if keys_alone and kv_heads else {})}
    for name in _HEADS.values():
        config.raw(name)  # then transformers reads none of them
    by_layer = _by_layer(config, stated, len(types))
    by_kind = dict(zip(types, by_layer, strict=True))
    if [by_kind[kind] for kind in types] != by_layer:
        raise config.fail("per_layer_config", stated, "the same values for all layers with the same layer type")
    return by_kind


def _by_layer(config: ConfigReader, stated: Any, count: int) -> list[dict[str, int]]:
    """Return the values of the fields in `_HEADS` for every layer, from `per_layer_config`.

    Args:
        config: the reader of the config.
        stated: the value of `per_layer_config`, whose keys are layer numbers.
        count: the number of layers.
    """
    numbers = {int(key): key for key in stated if key.isdecimal() and len(key) < 9} if isinstance(stated, dict) else {}
    if not isinstance(stated, dict) or len(numbers) < len(stated) or not numbers.keys() <= {*range(count)}:
        raise config.fail("per_layer_config", stated, f"an object with layer numbers below {count} as keys")
    if not all(isinstance(own, dict) for own in stated.values()):
        raise config.fail("per_layer_config", stated, "objects")
    usual = {name: _FIELDS[name].value(config, name) for name in _HEADS}
    by_layer = [usual | stated.get(numbers.get(layer, ""), {}) for layer in range(count)]
    for own in by_layer:
        if own.keys() != _HEADS.keys() or any(type(n) is not int or n < 1 for n in own.values()):
            raise config.fail("per_layer_config", own, f"only the keys {' and '.join(_HEADS)}, with positive integers")
    return by_layer


def layers(config: ConfigReader, values: Mapping[str, Any], width: int = 512) -> Sequence[Mapping[str, Any]]:
    """Return, for each layer, the window, the RoPE and the heads, and where keys and values come from.

    `width` is the default width of the window.
    """
    types = _types(config, values["layers"])
    window, own = config.integer("sliding_window", width), _by_kind(config, types, values["own.keys_alone"])
    late, fields = late_layers(config, values, types), {}
    for kind in dict.fromkeys(types):
        width = own.get(kind, {}).get("head_dim", values["head_dim"])
        norm = RMSNorm(size=width, eps=values["eps"], cast="after_weight")
        fields[kind] = {
            "window": None if kind == FULL else window,
            "head_dim": width,
            "kv_heads": own.get(kind, {}).get("num_key_value_heads", values["kv_heads"]),
            "position": read_rotaries(config, width, values["context"], {kind: _KINDS[kind]})[kind],
            "q_norm": norm,
            "k_norm": norm,
            "v_norm": replace(norm, gain="none"),
            "kv_from": "keys" if kind == FULL and values["own.keys_alone"] else "input",
        }
    return [fields[kind] | LATE if is_late else fields[kind] for is_late, kind in zip(late, types, strict=True)]


def written(spec: ModelSpec) -> dict[str, Any]:
    """Return the config fields that `layers` reads."""
    mixers, fields = attentions(spec), write_windows(spec)
    first = dict(reversed([*zip(fields["layer_types"], mixers, strict=True)]))
    full, local = first.get(FULL, mixers[0]), first.get(SLIDING, mixers[0])
    keys_alone = full.kv_from == "keys"
    heads = {"head_dim": local.head_dim, "num_key_value_heads": local.kv_heads}
    heads |= {"global_head_dim": full.head_dim, "num_global_key_value_heads": full.kv_heads if keys_alone else None}
    if full.kv_heads != local.kv_heads and not keys_alone:
        own = {"head_dim": full.head_dim, "num_key_value_heads": full.kv_heads}
        heads["per_layer_config"] = {str(i): own for i, kind in enumerate(fields["layer_types"]) if kind == FULL}
    rotaries = {kind: of_kind(attention.position, Rotary) for kind, attention in first.items()}
    return {**fields, **heads, **write_rotaries(rotaries)}


def draw_layers(chosen: Random, sizes: Sizes) -> Config:
    """Return random config fields of the layer types, and of the heads and the RoPE of both types.

    The last layer always has full attention.
    """
    types, full = [*kind_by_layer(chosen, sizes["layers"] - 1, FULL, SLIDING), FULL], chosen.choice(EVEN)
    keys_alone = chosen.random() < 0.3
    config: Config = {
        "layer_types": types,
        "global_head_dim": full,
        "attention_k_eq_v": keys_alone,
        "sliding_window": chosen.choice(WINDOWS[1:]),
        **(sometimes(chosen, {"num_global_key_value_heads": 1}) if keys_alone else {}),
    }
    if chosen.random() < 0.5:
        return config
    rope = {FULL: draw_scaling(chosen, full), SLIDING: draw_scaling(chosen, sizes["head_dim"])}
    for kind, fields in rope.items():
        fields.pop("truncate", None)
        if fields["rope_type"] == "longrope":  # transformers' config class fails if heads differ in width
            rope[kind] = {"rope_type": "linear", "factor": 4.5}
        rope[kind]["rope_theta"] = chosen.choice((5e4, 37.5))
    return {**config, "rope_parameters": rope}


DECODER = DecoderFamily(
    {**_FIELDS, "num_key_value_heads": Field("kv_heads", 4)},
    norms=AROUND,
    fixed={
        "norm.cast": "after_weight",
        "attention.scale": 1.0,
        "embedding.multiplier": lambda values: values["hidden"] ** 0.5,
        "embedding.scaling": "rounded",
    },
    rotary=None,
    layers=Lens(layers, written, draw_layers),
)


def _read(config: ConfigReader) -> ModelSpec:
    """Return the ModelSpec that a config.json describes."""
    spec = scaled(config, DECODER.read(config))
    hidden, count = spec.hidden_size, len(spec.blocks)
    activation = of_kind(spec.blocks[0].feed_forward, GatedFeedForward).activation
    width, rows = read_fields(_INPUTS, config).values()
    if width and rows < spec.vocab_size:
        raise config.fail("vocab_size_per_layer_input", rows, f"at least vocab_size ({spec.vocab_size})")
    if spec.reused_keys and not width:
        raise config.fail(
            "hidden_size_per_layer_input",
            0,
            "a positive integer: transformers fails with 0 if layers share keys and values",
        )
    mixture, blocks = _mixture(config, spec), []
    for block in spec.blocks:
        inner: Any = block.feed_forward
        if mixture is not None:
            norm: Any = spec.final_norm
            norms = dict.fromkeys(("dense_norm", "dense_output_norm", "mixture_output_norm"), norm)
            block = block.replaced(feed_forward_norm=None)
            inner = DenseBesideExperts(hidden_size=hidden, dense=inner, mixture=mixture, **norms)
        block = block.replaced(feed_forward=inner)
        if width:
            mixer = LayerInput(hidden_size=hidden, width=width, activation=activation)
            block = replace(block, sublayers=(*block.sublayers, SubLayer(mixer=mixer, output_norm=spec.final_norm)))
        blocks.append(block)
    inputs = None
    if width:
        every = {"vocab_size": rows, "hidden_size": count * width, "multiplier": width**0.5}
        inputs = LayerEmbedding(
            table=replace(spec.embedding, **every),
            hidden_size=hidden,
            layers=count,
            width=width,
            norm=replace(of_kind(spec.final_norm, RMSNorm), size=width),
            projected=hidden**-0.5,
            summed=2.0**-0.5,
        )
    return replace(spec, blocks=tuple(blocks), layer_inputs=inputs)


def scaled(config: ConfigReader, spec: ModelSpec) -> ModelSpec:
    """Return the tree with a `BlockScale`, a factor of the hidden states, at the end of every block.

    With `use_double_wide_mlp`, layers that use keys and values of earlier layers have feed-forwards of twice the width.
    """
    wide, blocks = config.boolean("use_double_wide_mlp", False), []
    for block in spec.blocks:
        inner: Any = block.feed_forward
        if wide and of_kind(block.attention, Attention).kv_from == "earlier":
            inner = replace(inner, intermediate_size=2 * inner.intermediate_size)
        blocks.append(replace(block.replaced(feed_forward=inner), scale=BlockScale()))
    return replace(spec, blocks=tuple(blocks))


def _mixture(config: ConfigReader, spec: ModelSpec) -> MixtureOfExperts | None:
    """Return the mixture of experts that every layer has in addition to its feed-forward, or None."""
    if not config.boolean("enable_moe_block", False):
        for name in _BESIDE:
            config.raw(name)  # they have no effect then
        return None
    experts, top_k = config.integer("num_experts", most=MOST_EXPERTS), config.integer("top_k_experts")
    if top_k > experts:
        raise config.fail("top_k_experts", top_k, f"at most num_experts ({experts})")
    dense, norm = of_kind(spec.blocks[0].feed_forward, GatedFeedForward), of_kind(spec.final_norm, RMSNorm)
    return MixtureOfExperts(
        hidden_size=spec.hidden_size,
        experts=experts,
        top_k=top_k,
        expert=replace(dense, intermediate_size=config.integer("moe_intermediate_size"), fused=True),
        router_norm=replace(norm, cast="before_weight"),
        router_multiplier=spec.hidden_size**-0.5,
        expert_norm=norm,
        expert_scale=True,
    )


def _write(spec: ModelSpec) -> dict[str, Any]:
    """Return the config fields that describe a model."""
    inners: list[Any] = [block.mixer("feed_forward") for block in spec.blocks]
    blocks = [
        block.replaced(feed_forward=inner.dense) if isinstance(inner, DenseBesideExperts) else block
        for block, inner in zip(spec.blocks, inners, strict=True)
    ]
    dense = replace(spec, blocks=tuple(blocks))
    return {**DECODER.write(dense), **write_tree({**_INPUTS, **_BESIDE}, spec)}


def _draw(chosen: Random) -> Config:
    """Return a random config with layer inputs (and maybe shared keys), with experts, or with neither."""
    config, width = DECODER.draw(chosen, {}), chosen.choice((0, 1, 3, 8))
    rows = {"hidden_size_per_layer_input": width, "vocab_size_per_layer_input": chosen.choice((VOCAB, VOCAB + 3))}
    earlier = config["layer_types"][:-1]
    shared = {"num_kv_shared_layers": 1} if width and FULL in earlier else {}
    own = {**config, **rows, **shared, **sometimes(chosen, {"use_double_wide_mlp": True})}
    if width or chosen.random() < 0.5:
        return own
    own |= {"enable_moe_block": True, "num_experts": 5, "top_k_experts": chosen.choice((1, 3, 5))}
    own |= {"moe_intermediate_size": chosen.choice((16, 48)), "hidden_size": 8 * config["num_attention_heads"]}
    return own


INPUTS = {
    T + "per_layer_input_gate": B + "layer_input.gate_proj",
    T + "per_layer_projection": B + "layer_input.down_proj",
    T + "post_per_layer_input_norm": B + "layer_input_output_norm",
}
AFTER_LAYERS = {
    "model.norm": "final_norm",
    "model.embed_tokens_per_layer": "layer_inputs.table",
    "model.per_layer_model_projection": "layer_inputs.projection",
    "model.per_layer_projection_norm": "layer_inputs.norm",
    "lm_head": "head",
}
_MIXTURE = B + "feed_forward.mixture."
_EXPERT = _MIXTURE + "experts.{expert}."
_DENSE = {f"{T}mlp.{name}": f"{B}feed_forward.dense.{name}" for name in ("gate_proj", "up_proj", "down_proj")}
_NORMED = [*SANDWICH.items()]
_BEFORE = {T + "pre_feedforward_layernorm": B + "feed_forward.dense_norm"}
"""The norm before the dense feed-forward in layers that also have experts. In files, it has the same name as the norm
before the feed-forward of other layers."""
_EXPERTS = (
    Leaf(T + "router.scale", _MIXTURE + "router_norm.weight"),
    Leaf(T + "router.per_expert_scale", _MIXTURE + "expert_scale.weight"),
    Leaf(T + "router.proj.weight", _MIXTURE + "router.weight"),
    Leaf(
        T + "experts.gate_up_proj",
        (_EXPERT + "gate_proj.weight", _EXPERT + "up_proj.weight"),
        Layout("experts (part intermediate) hidden", split="part", parts=("1", "1"), stack="experts"),
    ),
    Leaf(T + "experts.down_proj", _EXPERT + "down_proj.weight", Layout("experts hidden intermediate", stack="experts")),
    Leaf(T + "post_feedforward_layernorm_1.weight", B + "feed_forward.dense_output_norm.weight"),
    Leaf(T + "post_feedforward_layernorm_2.weight", B + "feed_forward.mixture_output_norm.weight"),
    Leaf(T + "pre_feedforward_layernorm_2.weight", _MIXTURE + "expert_norm.weight"),
)
_MODULES = ("q_proj", "q_norm", "k_norm", "k_proj", "v_proj", "o_proj")  # attention's, in transformers' order
LEAVES = (
    *leaves_of(EMBEDDING),
    Leaf(T + "layer_scalar", B + "scale.weight", buffer=True),
    *leaves_of({f"{T}self_attn.{name}": f"{B}attention.{name}" for name in _MODULES}),
    *leaves_of(FEED_FORWARD),
    *leaves_of({**_DENSE, **dict(_NORMED[:3])}),
    *leaves_of(_BEFORE),
    *leaves_of({**dict(_NORMED[3:]), **INPUTS}),
    *_EXPERTS,
    *leaves_of(AFTER_LAYERS),
)
TOWERS = {
    "vision": ("model.vision_tower.", "model.embed_vision."),
    "audio": ("model.audio_tower.", "model.embed_audio."),
}
OF_TOWERS = dict.fromkeys(
    (
        "vision_config",
        "audio_config",
        "boi_token_id",
        "eoi_token_id",
        "image_token_id",
        "video_token_id",
        "boa_token_id",
        "eoa_token_index",
        "audio_token_id",
    ),
    "about images and sound, which the language model does not read",
)
CAUSAL: dict[str, tuple[tuple[Any, ...], str] | None] = {
    "per_layer_config": None,
    "use_bidirectional_attention": (
        (None, "vision"),
        "gptkit does not support bidirectional attention for this family",
    ),
}
UNUSED = tuple(f"{T}self_attn.{name}.weight" for name in ("k_proj", "v_proj", "k_norm"))

GEMMA4 = DECODER.architecture(
    "gemma4_text",
    "Gemma4ForCausalLM",
    LEAVES,
    released="2026-04",
    model_types=("gemma4_text", "gemma4"),
    hf_config="Gemma4TextConfig",
    kinds=DECODER.kinds | {*ROTARY, BlockScale, DenseBesideExperts, LayerEmbedding, LayerInput, MixtureOfExperts},
    read=_read,
    write=_write,
    draw=_draw,
    token_ids={"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2},
    part="text_config",
    renamed=(("model.language_model.", "model."),),
    carried={**TOWERS, "unused": UNUSED},
    irrelevant=OF_TOWERS,
    refused=CAUSAL,
)
