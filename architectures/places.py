"""Read and write config fields that say which layers have something: attention, a window, RoPE, or experts.

A `Places` reads such fields and writes them back. Families combine those of this file.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from .config import ConfigReader
from .draws import Config, kind_by_layer, some_of, sometimes, types_with_attention
from .fields import none_or_more


@dataclass(frozen=True)
class Places:
    """Reads and writes the config fields that say which layers have something, and draws random ones for tests.

    Depending on the family, it is attention, a window, RoPE, or a mixture of experts.
    """

    get: Callable[[ConfigReader, int], Sequence[bool]]
    """`get(config, layers)` reads the fields and returns for every layer whether it has it."""
    put: Callable[[Sequence[bool]], Config] = lambda _: {}
    """`put(places)` returns the fields. Its argument is what `get` returns."""
    draw: Callable[[Random, int], Config] = lambda *_: {}
    """`draw(chosen, layers)` returns the fields with random legal values."""


ALL_LAYERS = Places(lambda _config, layers: [True] * layers)
"""The `Places` of families in which every layer is meant. They have no config field for this."""


def nth(name: str, default: int) -> Places:
    """Return a `Places` for every N-th layer. N is the config field `name`, by default `default`."""

    def get(config: ConfigReader, layers: int) -> Sequence[bool]:
        every = config.integer(name, default)
        return [(layer + 1) % every == 0 for layer in range(layers)]

    def put(places: Sequence[bool]) -> Config:
        numbers = _numbers(places)
        return {name: numbers[1] - numbers[0] if len(numbers) > 1 else 1}

    return Places(get, put, lambda chosen, _: {name: chosen.choice((1, 2))})


def after(name: str, default: int) -> Places:
    """Return a `Places` for all layers but the first N. N is the config field `name`, by default `default`."""

    def get(config: ConfigReader, layers: int) -> Sequence[bool]:
        first = none_or_more(config, name, default)
        return [layer >= first for layer in range(layers)]

    def put(places: Sequence[bool]) -> Config:
        return {name: next(iter(_numbers(places)), len(places))}

    return Places(get, put, lambda chosen, layers: {name: chosen.randint(0, layers)})


def up_to(name: str) -> Places:
    """Return a `Places` for the layers up to the index in the config field `name`. By default it is -1: all layers."""

    def get(config: ConfigReader, layers: int) -> Sequence[bool]:
        last = config.raw(name, -1)
        if type(last) is not int or last < -1:
            raise config.fail(name, last, "a layer number, or -1 for the last layer")
        return [last in (-1, layer) or layer < last for layer in range(layers)]

    def put(places: Sequence[bool]) -> Config:
        return {name: max(_numbers(places), default=len(places))}

    return Places(get, put, lambda chosen, layers: {name: chosen.randint(-1, layers)})


def alternate_below(name: str, default: int) -> Places:
    """Return a `Places` for every second of the first N layers. N is the config field `name`, by default `default`."""

    def get(config: ConfigReader, layers: int) -> Sequence[bool]:
        count = none_or_more(config, name, default)
        return [layer < count and layer % 2 == 0 for layer in range(layers)]

    return Places(get, lambda places: {name: len(places)}, lambda chosen, layers: {name: chosen.randint(0, layers)})


def all_of(*parts: Places) -> Places:
    """Return a `Places` for the layers that all of the `parts` choose."""

    def get(config: ConfigReader, layers: int) -> Sequence[bool]:
        return [all(own) for own in zip(*(part.get(config, layers) for part in parts), strict=True)]

    def put(places: Sequence[bool]) -> Config:
        return {name: value for part in parts for name, value in part.put(places).items()}

    def draw(chosen: Random, layers: int) -> Config:
        return sometimes(chosen, {name: value for part in parts for name, value in part.draw(chosen, layers).items()})

    return Places(get, put, draw)


def others(places: Places) -> Places:
    """Return a `Places` for the layers that `places` does not choose. It writes no config fields."""
    return Places(lambda config, layers: [not is_one for is_one in places.get(config, layers)])


def listed(name: str, usual: Places) -> Places:
    """Return a `Places` for the layers with the indices in the config field `name`, by default those of `usual`."""

    def get(config: ConfigReader, layers: int) -> Sequence[bool]:
        numbers = _layer_numbers(config, name, _numbers(usual.get(config, layers)))
        return [layer in numbers for layer in range(layers)]

    def draw(chosen: Random, layers: int) -> Config:
        return sometimes(chosen, {name: some_of(chosen, range(layers))})

    return Places(get, lambda places: {name: _numbers(places)}, draw)


def flagged(name: str, usual: Places, no: str, empty: bool = False) -> Places:
    """Return a `Places` for families that list an integer for every layer, which is 0 for the other layers.

    Args:
        name: the config field with the list.
        usual: chooses the layers if the list is null or absent.
        no: words for the layers with 0, for the error message.
        empty: whether an empty list has the same meaning as null.
    """

    def get(config: ConfigReader, layers: int) -> Sequence[bool]:
        places, flags = usual.get(config, layers), config.raw(name)
        if flags is None or (empty and not flags):
            return places
        if not isinstance(flags, list) or len(flags) != layers or any(type(flag) is not int for flag in flags):
            raise config.fail(name, flags, f"a list of {layers} integers, with 0 for {no}")
        return [flag != 0 for flag in flags]

    def draw(chosen: Random, layers: int) -> Config:
        return sometimes(chosen, {name: kind_by_layer(chosen, layers, 0, 1)})

    return Places(get, lambda places: {name: [*map(int, places)]}, draw)


def _numbers(places: Sequence[bool]) -> list[int]:
    """Return the indices of the chosen layers."""
    return [layer for layer, is_one in enumerate(places) if is_one]


def _layer_numbers(config: ConfigReader, name: str, default: Sequence[int]) -> Sequence[int]:
    """Return the list of layer numbers in a config field, or `default` if it is null or absent."""
    numbers = config.raw(name)
    numbers = default if numbers is None else numbers
    if not isinstance(numbers, list | tuple) or any(type(number) is not int for number in numbers):
        raise config.fail(name, numbers, "a list of layer numbers")
    return numbers


# --- attention or something else --------------------------------------------------------------------------------------


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
    numbers = _numbers(places) or [len(places)]
    every = numbers[1] - numbers[0] if len(numbers) > 1 else len(places) + 1
    return {f"{what}_layer_period": max(every, numbers[0] + 1), f"{what}_layer_offset": numbers[0]}


# --- dense or mixture -------------------------------------------------------------------------------------------------


def by_type(default: int, name: str = "") -> Places:
    """Return a `Places` for the config field `mlp_layer_types`, a list with "dense" or "sparse" for every layer.

    Args:
        default: the number of dense layers at the beginning if `mlp_layer_types` is absent.
        name: the config field that states another number than `default`, or "".
    """

    def get(config: ConfigReader, layers: int) -> Sequence[bool]:
        start = none_or_more(config, name, default) if name else default
        types = config.raw("mlp_layer_types")
        if types is None:
            return [layer >= start for layer in range(layers)]
        known = isinstance(types, list) and all(kind in ("dense", "sparse") for kind in types)
        if not known or len(types) != layers:
            raise config.fail("mlp_layer_types", types, f"{layers} values of dense or sparse")
        return [kind == "sparse" for kind in types]

    def put(places: Sequence[bool]) -> Config:
        return {"mlp_layer_types": ["sparse" if is_sparse else "dense" for is_sparse in places]}

    def draw(chosen: Random, layers: int) -> Config:
        first = {name: chosen.randint(1, layers)} if name else {}
        return {**first, **sometimes(chosen, {"mlp_layer_types": kind_by_layer(chosen, layers, "dense", "sparse")})}

    return Places(get, put, draw)


def by_step(usual: Sequence[int] = ()) -> Places:
    """Return a `Places` for the config fields by which Qwen2-MoE states which layers are mixtures of experts.

    Every N-th layer is one, where N is the field `decoder_sparse_step`, except layers in the list `mlp_only_layers`.
    `usual` is this list if the field is absent.
    """
    step = nth("decoder_sparse_step", 1)

    def get(config: ConfigReader, layers: int) -> Sequence[bool]:
        steps, dense = step.get(config, layers), _layer_numbers(config, "mlp_only_layers", usual)
        return [is_step and layer not in dense for layer, is_step in enumerate(steps)]

    def put(places: Sequence[bool]) -> Config:
        return {"decoder_sparse_step": 1, "mlp_only_layers": _numbers([not is_sparse for is_sparse in places])}

    def draw(chosen: Random, layers: int) -> Config:
        dense = some_of(chosen, range(layers))
        return sometimes(chosen, {**step.draw(chosen, layers), "mlp_only_layers": dense})

    return Places(get, put, draw)


def by_one_in(what: str, period: int, offset: int) -> Places:
    """Return a `Places` that reads and writes which layers are mixtures of experts as a period and an offset.

    `one_in` explains the two fields.

    Args:
        what: the prefix of the names of the two config fields: "expert" for `expert_layer_period`.
        period: the config class's default of `<what>_layer_period`.
        offset: the config class's default of `<what>_layer_offset`.
    """
    return Places(
        lambda config, layers: one_in(config, what, period, offset, layers),
        lambda places: write_one_in(what, places),
        lambda chosen, _: {f"{what}_layer_period": 2, f"{what}_layer_offset": chosen.choice((0, 1))},
    )
