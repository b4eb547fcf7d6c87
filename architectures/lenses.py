"""Read and write config fields that differ by layer: windows, position encodings, layer types, and mixtures of experts.

A `Lens` reads such fields for a ModelSpec and writes them back. Families combine the lenses of this file. A family has
a lens of its own only if transformers' config class has rules that no other family has.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from msgspec import structs

from ..components import MOST_EXPERTS, Attention, ModelSpec, Rotary
from .config import ConfigReader
from .draws import WINDOWS, Config, Sizes, kind_by_layer, some_of, sometimes, types_with_attention
from .fields import none_or_more
from .obstacles import Kinds, of_kind
from .rope import RotaryKind, draw_rotaries, read_rotaries, read_rotary, write_rotaries

Values = Mapping[str, Any]
"""The values of a config by role, which says what a value is: `values["layers"]` is the number of layers. See
`fields`."""


def _nothing(_spec: ModelSpec) -> dict[str, Any]:
    return {}


def _none_drawn(_chosen: Random, _sizes: Sizes) -> Config:
    return {}


@dataclass(frozen=True)
class Lens:
    """Reads config fields whose values differ by layer, writes them back, and draws random ones for tests."""

    get: Callable[[ConfigReader, Values], Sequence[Any]]
    """`get(config, values)` reads the fields and returns one value for every layer. For `DecoderFamily.layers`, this
    value is a mapping of `Attention`'s fields. For `DecoderFamily.recurrent`, it is the mixer that replaces attention,
    or None. For `Mixtures.sparse`, it says whether the layer is a mixture."""
    put: Callable[[ModelSpec], Mapping[str, Any]] = _nothing
    """`put(spec)` returns the fields with the values that describe a model."""
    draw: Callable[[Random, Sizes], Config] = _none_drawn
    """`draw(chosen, sizes)` returns the fields with random legal values."""
    kinds: Kinds = frozenset()
    """The kinds of components that `get` returns, without those that models of all families may have."""


def attentions(spec: ModelSpec) -> list[Attention]:
    """Return the attention of every layer. Raises CannotExpress if a layer has none, or one that is no `Attention`."""
    return [of_kind(block.attention, Attention) for block in spec.blocks]


def stated_scale(spec: ModelSpec) -> float | None:
    """Return the factor of the attention scores in the first layer, or None if it is 1 / √head_dim as usual."""
    first = attentions(spec)[0]
    return None if math.isclose(first.scale, first.head_dim**-0.5, rel_tol=1e-12) else first.scale


def is_pre_norm(spec: ModelSpec) -> bool:
    """Return whether the first sub-layer has a norm on its input."""
    return spec.blocks[0].sublayers[0].norm is not None


def sparse_layers(spec: ModelSpec) -> list[bool]:
    """Return for each layer whether its feed-forward is a mixture of experts."""
    return [hasattr(block.feed_forward, "expert") for block in spec.blocks]


# --- windows ----------------------------------------------------------------------------------------------------------


def write_windows(spec: ModelSpec) -> dict[str, Any]:
    """Return the config fields `layer_types` and `sliding_window` for a model."""
    windows = [attention.window for attention in attentions(spec)]
    return {
        "sliding_window": next((window for window in windows if window is not None), 4096),
        "layer_types": ["full_attention" if window is None else "sliding_attention" for window in windows],
    }


def sliding(
    every: int,
    window: int | None = 4096,
    pattern: str = "",
    first: int = -1,
    whole: Sequence[int] = (),
    always: bool = False,
) -> Lens:
    """Return a `Lens` that reads and writes sliding windows as `layer_types` and `sliding_window`.

    Args:
        every: if `layer_types` is absent, every N-th layer has full attention, where N is `every`. If it is 0, no layer
            has full attention.
        window: the config class's default width of a window.
        pattern: the config field that states another N than `every`, or "".
        first: the index of one of the layers with full attention.
        whole: the indices of further layers with full attention. Negative ones count from the last layer.
        always: whether transformers needs a width even if no layer has a window.
    """

    def windows(config: ConfigReader, values: Values) -> list[Mapping[str, Any]]:
        layers, apart = values["layers"], config.integer(pattern, every) if pattern else every
        full = {*(range(first % apart, layers, apart) if apart else ()), *(layer % layers for layer in whole)}
        usual = ["full_attention" if layer in full else "sliding_attention" for layer in range(layers)]
        types = config.layer_types(usual)
        width = config.optional_integer("sliding_window", window)
        if width is None and always:
            wanted = "a number: transformers builds a window mask for every model of this family"
            raise config.fail("sliding_window", width, wanted)
        if width is None and "sliding_attention" in types:
            raise config.fail("sliding_window", width, "a number, since layer_types has sliding_attention")
        return [{"window": width if kind == "sliding_attention" else None} for kind in types]

    def draw(chosen: Random, sizes: Sizes) -> Config:
        by_pattern = {pattern: chosen.choice((1, 2))} if pattern else {}
        return draw_windows(chosen, sizes) | sometimes(chosen, by_pattern)

    return Lens(windows, write_windows, draw)


def draw_windows(chosen: Random, sizes: Sizes, other: str = "sliding_attention") -> Config:
    """Return random config fields of windows: the width, and sometimes `layer_types`.

    `other` is the type of layers that do not have full attention.
    """
    types = kind_by_layer(chosen, sizes["layers"], "full_attention", other)
    return {**sometimes(chosen, {"layer_types": types}), "sliding_window": chosen.choice(WINDOWS)}


def windows_above(switch: bool = True, first: int = 28) -> Lens:
    """Return a `Lens` that reads and writes sliding windows as Qwen2 does.

    Layers from the index `max_window_layers` on have a window.

    Args:
        switch: whether the field `use_sliding_window` switches the windows on. Otherwise they are always on.
        first: the config class's default of `max_window_layers`.
    """
    why = "since use_sliding_window is off" if switch else "since no sliding window is set"

    def windows(config: ConfigReader, values: Values) -> list[Mapping[str, Any]]:
        on = not switch or config.boolean("use_sliding_window", False)
        stated, start = config.optional_integer("sliding_window", 4096), config.raw("max_window_layers", first)
        window = stated if on else None
        if isinstance(start, bool) or not isinstance(start, int) or start < 0:
            raise config.fail("max_window_layers", start, "an integer of at least 0")
        usual = ["sliding_attention" if window and n >= start else "full_attention" for n in range(values["layers"])]
        types = config.layer_types(usual)
        if window is None and "sliding_attention" in types:
            raise config.fail("layer_types", list(types), f"full_attention for every layer, {why}")
        return [{"window": window if kind == "sliding_attention" else None} for kind in types]

    def draw(chosen: Random, sizes: Sizes) -> Config:
        fields = {**draw_windows(chosen, sizes), "max_window_layers": chosen.randint(0, sizes["layers"])}
        if not switch:
            return fields
        if chosen.random() < 0.3:
            return {"use_sliding_window": False, "sliding_window": 4}
        return {**fields, "use_sliding_window": True}

    return Lens(windows, write_windows_above, draw)


def write_windows_above(spec: ModelSpec) -> dict[str, Any]:
    """Return the config fields of sliding windows as Qwen2 has them."""
    windows = [attention.window for attention in attentions(spec)]
    window = next((w for w in windows if w is not None), None)
    return {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": windows.index(window) if window is not None else len(windows),
        "layer_types": ["full_attention" if w is None else "sliding_attention" for w in windows],
    }


# --- positions by layer -----------------------------------------------------------------------------------------------


def rope_by_kind(windows: Lens, kinds: Mapping[str, RotaryKind]) -> Lens:
    """Return a `Lens` for windows, and for RoPE that differs between layers with and without a window.

    The field `rope_parameters` has the objects "full_attention" and "sliding_attention".

    Args:
        windows: the lens that reads and writes the windows.
        kinds: how the config class states RoPE, for both types of layers.
    """

    def get(config: ConfigReader, values: Values) -> list[Mapping[str, Any]]:
        own = windows.get(config, values)
        rotaries = read_rotaries(config, values["head_dim"], values["context"], kinds)
        kinds_of_layers = ("full_attention" if fields["window"] is None else "sliding_attention" for fields in own)
        return [{**fields, "position": rotaries[kind]} for fields, kind in zip(own, kinds_of_layers, strict=True)]

    def put(spec: ModelSpec) -> dict[str, Any]:
        mixers = attentions(spec)
        rotaries = {kind: Rotary(dim=mixers[0].head_dim, base=usual.base) for kind, usual in kinds.items()}
        for mixer in mixers:
            kind = "full_attention" if mixer.window is None else "sliding_attention"
            rotaries[kind] = of_kind(mixer.position, Rotary)
        return {**windows.put(spec), **write_rotaries(rotaries)}

    def draw(chosen: Random, sizes: Sizes) -> Config:
        return {**windows.draw(chosen, sizes), **draw_rotaries(chosen, sizes["head_dim"], kinds)}

    return Lens(get, put, draw)


def rope_in_windows(windows: Lens) -> Lens:
    """Return a `Lens` for windows in families whose layers with full attention have no RoPE (Cohere 2, EXAONE 4).

    `windows` is the lens that reads and writes the windows.
    """

    def get(config: ConfigReader, values: Values) -> list[Mapping[str, Any]]:
        own = windows.get(config, values)
        return [fields if fields["window"] is not None else {**fields, "position": None} for fields in own]

    return Lens(get, windows.put, windows.draw)


_BASES = "layer_rope_theta"


def rope_by_base(windows: Lens) -> Lens:
    """Return a `Lens` for windows and a RoPE base per layer.

    The bases are in the config field `layer_rope_theta`, where 0 means no RoPE. `windows` is the lens that reads and
    writes the windows.
    """

    def get(config: ConfigReader, values: Values) -> Sequence[Mapping[str, Any]]:
        own, bases, count = windows.get(config, values), config.raw(_BASES), values["layers"]
        if bases is None:
            return own
        if not isinstance(bases, list) or len(bases) != count or any(type(base) not in (int, float) for base in bases):
            raise config.fail(_BASES, bases, f"a list of {count} numbers, with 0 for layers without RoPE")
        if not all(0 <= base < math.inf for base in bases):
            raise config.fail(_BASES, bases, "a list of finite numbers of at least 0")
        rotary = read_rotary(config, values["head_dim"], values["context"])
        positions = [structs.replace(rotary, base=float(base)) if base else None for base in bases]
        return [{**fields, "position": position} for fields, position in zip(own, positions, strict=True)]

    def put(spec: ModelSpec) -> dict[str, Any]:
        positions = [attention.position for attention in attentions(spec)]
        bases = [0 if position is None else of_kind(position, Rotary).base for position in positions]
        return {**windows.put(spec), _BASES: bases}

    def draw(chosen: Random, sizes: Sizes) -> Config:
        bases = kind_by_layer(chosen, sizes["layers"], 0, 37.5, 1e4)
        return {**windows.draw(chosen, sizes), **sometimes(chosen, {_BASES: bases})}

    return Lens(get, put, draw)


# --- attention or something else --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Places:
    """Reads and writes the config fields that say which layers have attention. Other layers have another mixer."""

    get: Callable[[ConfigReader, int], Sequence[bool]]
    """`get(config, layers)` reads the fields and returns for every layer whether it has attention."""
    put: Callable[[Sequence[bool]], Config]
    """`put(with_attention)` returns the fields. Its argument is what `get` returns."""
    draw: Callable[[Random, int], Config]
    """`draw(chosen, layers)` returns the fields with random legal values."""


def one_of(config: ConfigReader, layers: int, usual: list[str] | None, other: str) -> Sequence[str]:
    """Return the type of every layer from the field `layer_types`: "full_attention" or `other`.

    Args:
        config: the reader of the config.
        layers: the number of layers.
        usual: the types of all layers if the field is null or absent. None: the field is required.
        other: the name of the second type.

    Raises:
        ConfigError: there is another type or number of layers, or no layer has attention. transformers' cache fails for
            models without attention.
    """
    known = ("full_attention", other)
    types = config.kinds_of_layers()
    types = usual if types is None else types
    if not isinstance(types, list) or len(types) != layers or any(kind not in known for kind in types):
        wanted = f"{layers} values of {' or '.join(known)}, as many as num_hidden_layers"
        raise config.fail("layer_types", types, wanted)
    if "full_attention" not in types:
        raise config.fail(
            "layer_types", types, "at least one full_attention layer: without one, transformers' cache fails"
        )
    return types


def by_layer_types(other: str, usual: Callable[[ConfigReader, int], Sequence[bool] | None]) -> Places:
    """Return the `Places` that read and write which layers have attention as `layer_types`.

    This field is a list of "full_attention" and `other`.

    Args:
        other: the type of layers without attention.
        usual: `usual(config, layers)` returns for every layer whether it has attention if `layer_types` is null or
            absent. It returns None if the field is required.
    """

    def types_of(with_attention: Sequence[bool]) -> list[str]:
        return ["full_attention" if has_attention else other for has_attention in with_attention]

    def get(config: ConfigReader, layers: int) -> Sequence[bool]:
        stated = usual(config, layers)
        return [kind != other for kind in one_of(config, layers, None if stated is None else types_of(stated), other)]

    def draw(chosen: Random, layers: int) -> Config:
        return {"layer_types": types_with_attention(chosen, layers, other)}

    return Places(get, lambda with_attention: {"layer_types": types_of(with_attention)}, draw)


def _require_types(config: ConfigReader, with_attention: Sequence[bool], other: str, by: str) -> None:
    """Raise ConfigError if `layer_types` contradicts the other fields that say which layers have attention.

    Args:
        config: the reader of the config.
        with_attention: for every layer, whether it has attention according to the other fields.
        other: the type of layers without attention.
        by: the names of the other fields.
    """
    types = ["full_attention" if has_attention else other for has_attention in with_attention]
    if config.kinds_of_layers() not in (None, types):
        raise config.fail("layer_types", config.raw("layer_types"), f"the layer types that follow from {by}")


def by_indices(name: str, other: str) -> Places:
    """Return the `Places` that read and write which layers have attention as a list of their indices.

    If the config has `layer_types`, it must agree.

    Args:
        name: the config field with the list.
        other: the type of layers without attention.
    """

    def get(config: ConfigReader, layers: int) -> Sequence[bool]:
        listed = config.raw(name)
        numbers = listed if isinstance(listed, list) and all(type(number) is int for number in listed) else []
        if not {*numbers} & {*range(layers)}:
            wanted = "a list with one of the layers at least: transformers' cache fails without attention"
            raise config.fail(name, listed, wanted)
        with_attention = [layer in numbers for layer in range(layers)]
        _require_types(config, with_attention, other, name)
        return with_attention

    def put(with_attention: Sequence[bool]) -> Config:
        return {name: [layer for layer, has_attention in enumerate(with_attention) if has_attention]}

    return Places(get, put, lambda chosen, layers: {name: some_of(chosen, range(layers)) or [0]})


def by_period(what: str, period: int, offset: int, other: str) -> Places:
    """Return the `Places` that read and write which layers have attention as a period and an offset; see `one_in`.

    Args:
        what: the prefix of the names of the two config fields: "attn" for `attn_layer_period`.
        period: the config class's default of `<what>_layer_period`.
        offset: the config class's default of `<what>_layer_offset`.
        other: the type of layers without attention.
    """

    def get(config: ConfigReader, layers: int) -> Sequence[bool]:
        with_attention = one_in(config, what, period, offset, layers)
        if not any(with_attention):
            raise config.fail(
                f"{what}_layer_offset",
                config.raw(f"{what}_layer_offset", offset),
                "an offset with which at least one layer has attention: without one, transformers' cache fails",
            )
        _require_types(config, with_attention, other, f"{what}_layer_period and {what}_layer_offset")
        return with_attention

    def draw(chosen: Random, layers: int) -> Config:
        every = chosen.randint(1, 3)
        return {f"{what}_layer_period": every, f"{what}_layer_offset": chosen.randrange(min(every, layers))}

    return Places(get, lambda whole: write_one_in(what, whole), draw)


def one_in(config: ConfigReader, what: str, period: int, offset: int, layers: int) -> list[bool]:
    """Return for every layer whether it is chosen by a period and an offset.

    A layer is chosen if its index modulo `<what>_layer_period` is `<what>_layer_offset`.

    Args:
        config: the reader of the config.
        what: the prefix of the names of the two config fields: "attn" for `attn_layer_period`.
        period: the default of the period.
        offset: the default of the offset.
        layers: the number of layers.
    """
    every, first = config.integer(f"{what}_layer_period", period), config.raw(f"{what}_layer_offset", offset)
    if type(first) is not int or not 0 <= first < every:
        raise config.fail(
            f"{what}_layer_offset", first, f"an integer of at least 0 and below {what}_layer_period ({every})"
        )
    return [layer % every == first for layer in range(layers)]


def write_one_in(what: str, places: Sequence[bool]) -> Config:
    """Return the period and the offset that `one_in` reads.

    If the chosen layers are not periodic, the two fields describe other layers. gptkit reads the fields back, finds
    this difference, and refuses the model.

    Args:
        what: the prefix of the names of the two config fields.
        places: for every layer, whether it is one of the chosen layers.
    """
    numbers = [layer for layer, is_one in enumerate(places) if is_one] or [len(places)]
    every = numbers[1] - numbers[0] if len(numbers) > 1 else len(places) + 1
    return {f"{what}_layer_period": max(every, numbers[0] + 1), f"{what}_layer_offset": numbers[0]}


# --- dense or mixture -------------------------------------------------------------------------------------------------


def _all(_config: ConfigReader, values: Values) -> Sequence[bool]:
    return [True] * values["layers"]


ALL_LAYERS = Lens(_all)
"""The `Lens` of families in which every layer is a mixture of experts. They have no config field for this."""


def after(name: str, default: int) -> Lens:
    """Return a `Lens` for a config field with the number of dense layers at the beginning.

    All later layers are mixtures.

    Args:
        name: the config field.
        default: its default in the config class.
    """

    def get(config: ConfigReader, values: Values) -> Sequence[bool]:
        first = none_or_more(config, name, default)
        return [layer >= first for layer in range(values["layers"])]

    def put(spec: ModelSpec) -> dict[str, Any]:
        sparse = sparse_layers(spec)
        return {name: sparse.index(True) if any(sparse) else len(sparse)}

    return Lens(get, put, lambda chosen, sizes: {name: chosen.randint(0, sizes["layers"])})


def by_type(default: int, name: str = "") -> Lens:
    """Return a `Lens` for the config field `mlp_layer_types`, a list with "dense" or "sparse" for every layer.

    Args:
        default: the number of dense layers at the beginning if `mlp_layer_types` is absent.
        name: the config field that states another number than `default`, or "".
    """

    def get(config: ConfigReader, values: Values) -> Sequence[bool]:
        layers, start = values["layers"], none_or_more(config, name, default) if name else default
        types = config.raw("mlp_layer_types")
        if types is None:
            return [layer >= start for layer in range(layers)]
        known = isinstance(types, list) and all(kind in ("dense", "sparse") for kind in types)
        if not known or len(types) != layers:
            raise config.fail("mlp_layer_types", types, f"{layers} values of dense or sparse")
        return [kind == "sparse" for kind in types]

    def put(spec: ModelSpec) -> dict[str, Any]:
        return {"mlp_layer_types": ["sparse" if is_sparse else "dense" for is_sparse in sparse_layers(spec)]}

    def draw(chosen: Random, sizes: Sizes) -> Config:
        first = {name: chosen.randint(1, sizes["layers"])} if name else {}
        types = kind_by_layer(chosen, sizes["layers"], "dense", "sparse")
        return {**first, **sometimes(chosen, {"mlp_layer_types": types})}

    return Lens(get, put, draw)


def by_step(usual: Sequence[int] = ()) -> Lens:
    """Return a `Lens` for the config fields by which Qwen2-MoE states which layers are mixtures of experts.

    Every N-th layer is one, where N is the field `decoder_sparse_step`, except layers in the list `mlp_only_layers`.
    `usual` is this list if the field is absent.
    """

    def get(config: ConfigReader, values: Values) -> Sequence[bool]:
        step, dense = config.integer("decoder_sparse_step", 1), config.raw("mlp_only_layers")
        dense = [*usual] if dense is None else dense
        if not isinstance(dense, list) or any(type(layer) is not int for layer in dense):
            raise config.fail("mlp_only_layers", dense, "a list of layer numbers")
        return [(layer + 1) % step == 0 and layer not in dense for layer in range(values["layers"])]

    def put(spec: ModelSpec) -> dict[str, Any]:
        dense = [layer for layer, is_sparse in enumerate(sparse_layers(spec)) if not is_sparse]
        return {"decoder_sparse_step": 1, "mlp_only_layers": dense}

    def draw(chosen: Random, sizes: Sizes) -> Config:
        dense = some_of(chosen, range(sizes["layers"]))
        return sometimes(chosen, {"decoder_sparse_step": chosen.choice((1, 2)), "mlp_only_layers": dense})

    return Lens(get, put, draw)


def by_one_in(what: str, period: int, offset: int, name: str, experts: int) -> Lens:
    """Return a `Lens` that reads and writes which layers are mixtures of experts as a period and an offset.

    `one_in` explains the two fields.

    Args:
        what: the prefix of the names of the two config fields: "expert" for `expert_layer_period`.
        period: the config class's default of `<what>_layer_period`.
        offset: the config class's default of `<what>_layer_offset`.
        name: the config field of the number of experts. With one expert, no layer is a mixture.
        experts: the config class's default of that field.
    """

    def get(config: ConfigReader, values: Values) -> Sequence[bool]:
        several = config.integer(name, experts, most=MOST_EXPERTS) > 1
        return [is_one and several for is_one in one_in(config, what, period, offset, values["layers"])]

    def put(spec: ModelSpec) -> dict[str, Any]:
        sparse = sparse_layers(spec)
        return {**write_one_in(what, sparse), **({} if any(sparse) else {name: 1})}

    def draw(chosen: Random, _: Sizes) -> Config:
        one = {name: 1, "num_experts_per_tok": 1}
        places = {f"{what}_layer_period": 2, f"{what}_layer_offset": chosen.choice((0, 1))}
        return {**places, **chosen.choice(({}, one))}

    return Lens(get, put, draw)
