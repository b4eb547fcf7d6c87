"""What differs by layer in config.json: windows, positions, layer types, and which layers are mixtures of experts."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec import structs

from ..components import Attention, ModelSpec, Rotary
from .config import ConfigReader
from .fields import Field, none_or_more
from .obstacles import of_kind
from .rope import RotaryKind, read_rotaries, read_rotary, write_rotaries

Layers = Callable[[ConfigReader, int, int], Sequence[Mapping[str, Any]]]
"""Of a config, the number of layers and the width of a head: the fields of each layer's attention that are its own."""


def sliding(every: int, window: int | None = 4096, pattern: str = "", first: int = -1) -> Layers:
    """The windows of families that have `layer_types` and `sliding_window`.

    Args:
        every: one layer of so many sees all tokens, and with 0 none does, where `layer_types` does not say which.
        window: of the config class.
        pattern: the field that says another `every`.
        first: a layer that sees all tokens.
    """

    def windows(config: ConfigReader, layers: int, _head_dim: int) -> list[Mapping[str, Any]]:
        apart = config.integer(pattern, every) if pattern else every
        whole = set(range(first % apart, layers, apart)) if apart else ()
        usual = ["full_attention" if layer in whole else "sliding_attention" for layer in range(layers)]
        types = config.layer_types(usual)
        width = config.optional_integer("sliding_window", window)
        if width is None and "sliding_attention" in types:
            raise config.fail("sliding_window", width, "a number, since layer_types has sliding_attention")
        return [{"window": width if kind == "sliding_attention" else None} for kind in types]

    return windows


def turned_by_kind(windows: Layers, kinds: Mapping[str, RotaryKind], context: Field) -> Layers:
    """The windows, and for layers with one and without rotary positions of their own, by `rope_parameters` of their
    kinds, "full_attention" and "sliding_attention".
    """

    def layers(config: ConfigReader, count: int, head_dim: int) -> list[Mapping[str, Any]]:
        own = windows(config, count, head_dim)
        length = context.value(config, "max_position_embeddings")
        rotaries = read_rotaries(config, head_dim, length, kinds)
        names = ("full_attention" if each["window"] is None else "sliding_attention" for each in own)
        return [{**each, "position": rotaries[name]} for each, name in zip(own, names, strict=True)]

    return layers


def write_by_kind(kinds: Mapping[str, RotaryKind]) -> Callable[[ModelSpec], dict[str, Any]]:
    """What writes the config fields that `turned_by_kind` reads."""

    def written(spec: ModelSpec) -> dict[str, Any]:
        fields, first = write_sliding(spec), of_kind(spec.blocks[0].attention, Attention)
        rotaries = {kind: Rotary(dim=first.head_dim, base=usual.base) for kind, usual in kinds.items()}
        for block, kind in zip(spec.blocks, fields["layer_types"], strict=True):
            rotaries[kind] = of_kind(of_kind(block.attention, Attention).position, Rotary)
        return {**fields, **write_rotaries(rotaries)}

    return written


def turned_in_windows(windows: Layers) -> Layers:
    """The windows, and no positions in layers that see all tokens (Cohere 2, EXAONE 4)."""

    def layers(config: ConfigReader, count: int, head_dim: int) -> list[Mapping[str, Any]]:
        return [
            each if each["window"] is not None else {**each, "position": None}
            for each in windows(config, count, head_dim)
        ]

    return layers


def write_sliding(spec: ModelSpec) -> dict[str, Any]:
    """The config fields of each layer's window, for what `sliding` reads."""
    windows = [of_kind(block.attention, Attention).window for block in spec.blocks]
    return {
        "sliding_window": next((window for window in windows if window is not None), 4096),
        "layer_types": ["full_attention" if window is None else "sliding_attention" for window in windows],
    }


def one_of(config: ConfigReader, layers: int, usual: list[str] | None, other: str) -> Sequence[str]:
    """The kind of each layer by `layer_types`, full attention or the `other`; `usual` where it is null or absent, None
    where it may not be.

    Raises:
        ConfigError: another kind or number of layers, or no attention at all, with which transformers' cache fails.
    """
    known = ("full_attention", other)
    types = config.kinds_of_layers()
    types = usual if types is None else types
    if not isinstance(types, list) or len(types) != layers or any(each not in known for each in types):
        wanted = f"{layers} values of {' or '.join(known)}, as many as num_hidden_layers"
        raise config.fail("layer_types", types, wanted)
    if "full_attention" not in types:
        raise config.fail(
            "layer_types", types, "at least one full_attention layer: without one, transformers' cache fails"
        )
    return types


def all_layers(_config: ConfigReader, layers: int) -> Sequence[bool]:
    """All layers have one."""
    return (True,) * layers


def after(name: str, default: int) -> dict[str, Any]:
    """`sparse` and `written` where the first layers are dense, as many as a field says."""

    def sparse(config: ConfigReader, layers: int) -> Sequence[bool]:
        first = none_or_more(config, name, default)
        return [layer >= first for layer in range(layers)]

    def written(sparse: Sequence[bool]) -> Mapping[str, Any]:
        return {name: next((layer for layer, each in enumerate(sparse) if each), len(sparse))}

    return {"sparse": sparse, "written": written}


def by_type(first: Callable[[ConfigReader], int]) -> dict[str, Any]:
    """`sparse` and `written` where `mlp_layer_types` says "dense" or "sparse" of each layer.

    Args:
        first: the first layer that has a mixture where it does not say.
    """

    def sparse(config: ConfigReader, layers: int) -> Sequence[bool]:
        start, types = first(config), config.raw("mlp_layer_types")
        if types is None:
            return [layer >= start for layer in range(layers)]
        if (
            not isinstance(types, list)
            or len(types) != layers
            or any(each not in ("dense", "sparse") for each in types)
        ):
            raise config.fail("mlp_layer_types", types, f"{layers} values of dense or sparse")
        return [each == "sparse" for each in types]

    def written(sparse: Sequence[bool]) -> Mapping[str, Any]:
        return {"mlp_layer_types": ["sparse" if each else "dense" for each in sparse]}

    return {"sparse": sparse, "written": written}


def sparse_by_step(config: ConfigReader, layers: int, usual: Sequence[int] = ()) -> Sequence[bool]:
    """All layers but those of `mlp_only_layers`, or the `usual` ones, whose number, from 1, `decoder_sparse_step`
    divides.
    """
    step, dense = config.integer("decoder_sparse_step", 1), config.raw("mlp_only_layers")
    dense = [*usual] if dense is None else dense
    if not isinstance(dense, list) or any(type(each) is not int for each in dense):
        raise config.fail("mlp_only_layers", dense, "a list of layers")
    return [(layer + 1) % step == 0 and layer not in dense for layer in range(layers)]


def write_by_step(sparse: Sequence[bool]) -> Mapping[str, Any]:
    """The config fields that `sparse_by_step` reads."""
    return {"decoder_sparse_step": 1, "mlp_only_layers": [layer for layer, each in enumerate(sparse) if not each]}


_BASES = "layer_rope_theta"


def windows_above(config: ConfigReader, layers: int, _head_dim: int) -> Sequence[Mapping[str, Any]]:
    """Each layer's: from `layer_types`, or from `max_window_layers` on where `use_sliding_window` is set."""
    switched_on = config.boolean("use_sliding_window", False)
    stated = config.optional_integer("sliding_window", 4096)
    return _windows_above(config, layers, stated if switched_on else None, 28, "since use_sliding_window is off")


def windows_from(default: int) -> Layers:
    """As `windows_above`, where no switch is; `default`: of `max_window_layers`."""
    return lambda config, layers, _: _windows_above(
        config, layers, config.optional_integer("sliding_window", 4096), default, "since there is no window"
    )


def _windows_above(
    config: ConfigReader, layers: int, window: int | None, default: int, why: str
) -> Sequence[Mapping[str, Any]]:
    first = config.raw("max_window_layers", default)
    if isinstance(first, bool) or not isinstance(first, int) or first < 0:
        raise config.fail("max_window_layers", first, "an integer from 0")
    usual = ["sliding_attention" if window and layer >= first else "full_attention" for layer in range(layers)]
    types = config.layer_types(usual)
    if window is None and "sliding_attention" in types:
        raise config.fail("layer_types", list(types), f"full_attention everywhere, {why}")
    return [{"window": window if kind == "sliding_attention" else None} for kind in types]


def write_windows_above(spec: ModelSpec) -> dict[str, Any]:
    """The config fields that say each layer's window."""
    windows = [block.attention.window for block in spec.blocks]
    window = next((w for w in windows if w is not None), None)
    return {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": windows.index(window) if window is not None else len(windows),
        "layer_types": ["full_attention" if w is None else "sliding_attention" for w in windows],
    }


def turned_by_base(context: int) -> Layers:
    """Each layer's window, and its positions by its base, none where that is 0; `context` is the config class's."""

    def found(config: ConfigReader, count: int, head_dim: int) -> Sequence[Mapping[str, Any]]:
        windows, bases = sliding(4, 128, first=0)(config, count, head_dim), config.raw(_BASES)
        if bases is None:
            return windows
        if not isinstance(bases, list) or len(bases) != count or any(type(each) not in (int, float) for each in bases):
            raise config.fail(_BASES, bases, f"{count} numbers, 0 where a layer has no positions")
        if not all(0 <= each < math.inf for each in bases):
            raise config.fail(_BASES, bases, "finite numbers from 0")
        rotary = read_rotary(config, head_dim, config.integer("max_position_embeddings", context))
        turned = [structs.replace(rotary, base=float(base)) if base else None for base in bases]
        return [{**each, "position": position} for each, position in zip(windows, turned, strict=True)]

    return found


def write_by_base(spec: ModelSpec) -> dict[str, Any]:
    """The config fields of each layer's window and base."""
    positions = [of_kind(block.attention, Attention).position for block in spec.blocks]
    return {**write_sliding(spec), _BASES: [0 if each is None else of_kind(each, Rotary).base for each in positions]}
