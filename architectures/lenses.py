"""Read and write config fields that differ by layer: windows, position encodings, layer types, and mixtures of experts.

A `Lens` reads such fields for a ModelSpec and writes them back. Families combine the lenses of this file. A family has
a lens of its own only if transformers' config class has rules that no other family has.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal

from msgspec import structs

from ..components import Attention, ModelSpec, Rotary
from .config import ConfigReader
from .draws import WINDOWS, Config, Sizes, kind_by_layer, sometimes
from .obstacles import Kinds, of_kind
from .places import Places, after
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
    or None."""
    put: Callable[[ModelSpec], Mapping[str, Any]] = _nothing
    """`put(spec)` returns the fields with the values that describe a model."""
    draw: Callable[[Random, Sizes], Config] = _none_drawn
    """`draw(chosen, sizes)` returns the fields with random legal values."""
    kinds: Kinds = frozenset()
    """The kinds of components that `get` returns, without those that models of all families may have."""
    rotaries: Mapping[str, RotaryKind] = field(default_factory=dict)
    """How the config class states RoPE, for every type of layer. Empty: it does not differ by type."""


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


# --- scores -----------------------------------------------------------------------------------------------------------


def scaled_by_layer(name: str) -> Lens:
    """Return a `Lens` for the config field that divides the attention scores of the N-th layer by N."""

    def get(config: ConfigReader, values: Values) -> Sequence[Mapping[str, Any]]:
        scale, divided = values["attention.scale"] or values["head_dim"] ** -0.5, config.boolean(name, False)
        return [{"scale": scale / (layer + 1 if divided else 1)} for layer in range(values["layers"])]

    def put(spec: ModelSpec) -> dict[str, Any]:
        mixers = attentions(spec)
        return {name: mixers[-1].scale != mixers[0].scale}

    return Lens(get, put, lambda chosen, _: sometimes(chosen, {name: True}))


# --- windows ----------------------------------------------------------------------------------------------------------


def write_windows(spec: ModelSpec, near: str = "sliding_attention", width: int = 4096) -> dict[str, Any]:
    """Return the config fields `layer_types` and `sliding_window` for a model.

    Args:
        spec: the model.
        near: the type of layers with a window.
        width: the width if no layer has a window.
    """
    windows = [attention.window for attention in attentions(spec)]
    return {
        "sliding_window": next((window for window in windows if window is not None), width),
        "layer_types": ["full_attention" if window is None else near for window in windows],
    }


def sliding(
    every: int,
    window: int | None = 4096,
    pattern: str = "",
    first: int = -1,
    whole: Sequence[int] = (),
    always: bool = False,
    strings: bool = False,
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
        strings: whether the field `pattern` may have any value if the config states `layer_types`.
    """

    def windows(config: ConfigReader, values: Values) -> Sequence[Mapping[str, Any]]:
        layers, width = values["layers"], config.optional_integer("sliding_window", window)
        if strings and isinstance(config.raw("layer_types"), list):
            config.raw(pattern)
            apart = every
        else:
            apart = config.integer(pattern, every) if pattern else every
        full = {*(range(first % apart, layers, apart) if apart else ()), *(layer % layers for layer in whole)}
        if width is None and always:
            wanted = "a number: transformers builds a window mask for every model of this family"
            raise config.fail("sliding_window", width, wanted)
        return in_windows(config, [layer not in full for layer in range(layers)], width)

    def draw(chosen: Random, sizes: Sizes) -> Config:
        by_pattern = {pattern: chosen.choice((1, 2))} if pattern else {}
        return draw_windows(chosen, sizes) | sometimes(chosen, by_pattern)

    return Lens(windows, write_windows, draw)


def in_windows(
    config: ConfigReader, usual: Sequence[bool], width: int | None, off: str = ""
) -> list[Mapping[str, Any]]:
    """Return the window of every layer, as `Lens.get` does, from the config field `layer_types`.

    Args:
        config: the reader of the config.
        usual: for every layer, whether it has a window if `layer_types` is absent.
        width: the width of the windows, or None if the config has none.
        off: words for why the config has no width, if it need not have one.

    Raises:
        ConfigError: `layer_types` is malformed, or a layer has a window and there is no width.
    """
    types = config.layer_types(["sliding_attention" if has_window else "full_attention" for has_window in usual])
    if width is None and "sliding_attention" in types:
        if off:
            raise config.fail("layer_types", list(types), f"full_attention for every layer, since {off}")
        raise config.fail("sliding_window", width, "a number, since some layers have sliding_attention")
    return [{"window": width if kind == "sliding_attention" else None} for kind in types]


def draw_windows(chosen: Random, sizes: Sizes, other: str = "sliding_attention") -> Config:
    """Return random config fields of windows: the width, and sometimes `layer_types`.

    `other` is the type of layers that do not have full attention.
    """
    types = kind_by_layer(chosen, sizes["layers"], "full_attention", other)
    return {**sometimes(chosen, {"layer_types": types}), "sliding_window": chosen.choice(WINDOWS)}


def switched(usual: Places, window: int | None = 4096, switch: bool = True, zero: bool = False) -> Lens:
    """Return a `Lens` for sliding windows that the config field `use_sliding_window` switches on.

    Args:
        usual: chooses the layers with a window if `layer_types` is absent.
        window: the config class's default width of a window.
        switch: whether there is such a field. Otherwise the windows are on if there is a width.
        zero: whether the width may be 0 if the windows are off.
    """

    def windows(config: ConfigReader, values: Values) -> list[Mapping[str, Any]]:
        on = not switch or config.boolean("use_sliding_window", False)
        unset = zero and not on and config.raw("sliding_window") == 0
        width = None if unset else config.optional_integer("sliding_window", window)
        places = usual.get(config, values["layers"])
        off = "no sliding window is set" if on else "use_sliding_window is off"
        width = width if on else None
        return in_windows(config, [width is not None and is_one for is_one in places], width, off)

    def write(spec: ModelSpec) -> dict[str, Any]:
        widths = [attention.window for attention in attentions(spec)]
        width = next((width for width in widths if width is not None), None)
        places, types = usual.put([width is not None for width in widths]), write_windows(spec)["layer_types"]
        return {"use_sliding_window": width is not None, "sliding_window": width, **places, "layer_types": types}

    def draw(chosen: Random, sizes: Sizes) -> Config:
        fields = {**draw_windows(chosen, sizes), **usual.draw(chosen, sizes["layers"])}
        if not switch:
            return fields
        if chosen.random() < 0.3:
            return {"use_sliding_window": False, "sliding_window": 4}
        return {**fields, "use_sliding_window": True}

    return Lens(windows, write, draw)


def halved(causal: bool) -> Lens:
    """Return a `Lens` for ModernBERT's windows, which have half of `local_attention` tokens on either side.

    Args:
        causal: whether a window has tokens on one side only. The config field `sliding_window` then has precedence.
    """
    every, around = "global_attn_every_n_layers", "local_attention"

    def get(config: ConfigReader, values: Values) -> Sequence[Mapping[str, Any]]:
        apart = config.integer(every, 3)
        if causal:
            width = config.optional_integer("sliding_window", (config.optional_integer(around, 128) or 0) // 2 or None)
        else:
            width = config.integer(around, 128) // 2 + 1
        return in_windows(config, [layer % apart != 0 for layer in range(values["layers"])], width)

    def put(spec: ModelSpec) -> dict[str, Any]:
        fields = write_windows(spec)
        width = fields["sliding_window"]
        if causal:
            return {**fields, around: min(2 * width, 2**31 - 1)}
        sides = {around: max(2 * (width - 1), 1)} if "sliding_attention" in fields["layer_types"] else {}
        return {"layer_types": fields["layer_types"], **sides}

    def draw(chosen: Random, sizes: Sizes) -> Config:
        types = kind_by_layer(chosen, sizes["layers"], "full_attention", "sliding_attention")
        own = {"layer_types": types, "sliding_window": chosen.choice((1, 4, 9))} if causal else {}
        return sometimes(chosen, {every: chosen.choice((1, 2)), around: chosen.choice((2, 5, 17, 32)), **own})

    return Lens(get, put, draw)


def windows_above(switch: bool = True, first: int = 28) -> Lens:
    """Return a `Lens` that reads and writes sliding windows as Qwen2 does.

    Layers from the index `max_window_layers` on have a window.

    Args:
        switch: as in `switched`.
        first: the config class's default of `max_window_layers`.
    """
    return switched(after("max_window_layers", first), switch=switch)


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

    return Lens(get, put, draw, rotaries=kinds)


def rope_in(places: Places, windows: Lens) -> Lens:
    """Return a `Lens` for windows in families in which only the layers of `places` have RoPE."""

    def get(config: ConfigReader, values: Values) -> list[Mapping[str, Any]]:
        turning = places.get(config, values["layers"])
        own = windows.get(config, values)
        return [
            fields if has_rope else {**fields, "position": None} for has_rope, fields in zip(turning, own, strict=True)
        ]

    def put(spec: ModelSpec) -> dict[str, Any]:
        turning = [attention.position is not None for attention in attentions(spec)]
        return {**places.put(turning), **windows.put(spec)}

    def draw(chosen: Random, sizes: Sizes) -> Config:
        return {**places.draw(chosen, sizes["layers"]), **windows.draw(chosen, sizes)}

    return Lens(get, put, draw)


def rope_in_windows(windows: Lens, unset: bool = False) -> Lens:
    """Return a `Lens` for windows in families whose layers with full attention have no RoPE (Cohere 2, EXAONE 4).

    Args:
        windows: the lens that reads and writes the windows.
        unset: whether all layers have RoPE if `sliding_window` is null.
    """

    def get(config: ConfigReader, values: Values) -> Sequence[Mapping[str, Any]]:
        null = unset and config.raw("sliding_window", 0) is None
        if null and config.raw("layer_types") is None:
            raise config.fail("layer_types", None, "a list of layer types, since sliding_window is null")
        own = windows.get(config, values)
        if null:
            return own
        return [fields if fields["window"] is not None else {**fields, "position": None} for fields in own]

    def put(spec: ModelSpec) -> dict[str, Any]:
        mixers = attentions(spec)
        whole = all(mixer.window is None for mixer in mixers) and any(mixer.position is not None for mixer in mixers)
        return {**windows.put(spec), **({"sliding_window": None} if unset and whole else {})}

    return Lens(get, put, windows.draw)


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


def rotary_dims(rounding: Literal["input", "result", "keys"]) -> Lens:
    """Return a `Lens` for the config field `rotary_dim`, the number of elements of a head that GPT-J's RoPE rotates.

    `rounding` is the value of `Rotary.rounding`.
    """

    def get(config: ConfigReader, values: Values) -> Sequence[Mapping[str, Any]]:
        dim = config.integer("rotary_dim", 64, most=values["head_dim"])
        if dim % 2:
            raise config.fail("rotary_dim", dim, "an even number")
        rotary = Rotary(dim=dim, base=10_000.0, pairs="adjacent", rounding=rounding, joined=True, lie="by token")
        return [{"position": rotary}] * int(values["layers"])

    return Lens(
        get,
        lambda spec: {"rotary_dim": of_kind(attentions(spec)[0].position, Rotary).dim},
        lambda chosen, sizes: {"rotary_dim": chosen.choice(range(2, sizes["head_dim"] + 1, 2))},
    )
