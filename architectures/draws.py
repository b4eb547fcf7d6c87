"""Random legal configs for tests. The functions return random config fields or sizes.

A random config is small and may be strange or useless, but transformers accepts it and computes with it. Every function
gets a `random.Random`, so a seed always gives the same config.
"""

from collections.abc import Callable, Mapping, Sequence
from random import Random as Random
from typing import Any

Config = dict[str, Any]
Sizes = Mapping[str, Any]
"""Random sizes by role: `sizes["layers"]` is the number of layers. A role says what a config field is in a model."""

VOCAB = 97
"""The vocabulary size of random models."""
ODD = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 20, 32, 33)
EVEN = (2, 4, 6, 8, 10, 12, 16, 18, 22, 32, 34)
ROWS = (8, 24, 40, 64)
"""Random widths of experts. torch's grouped matrix product needs rows whose size is a multiple of 16 bytes."""
CONTEXTS = (16, 40, 256)
TABLE = 256
"""The context length of random models with a table of position embeddings. Texts in tests must not exceed this
length."""
WINDOWS = (1, 2, 3, 8, 17, 300)


def sometimes(chosen: Random, fields: Config) -> Config:
    """Return a random selection of the config fields. Every field is selected with a probability of one half.

    `chosen` is the random number generator.
    """
    return {name: value for name, value in fields.items() if chosen.random() < 0.5}


def among(*values: Any) -> Callable[[Random, Sizes], Any]:
    """Return a function for `Field.draw`, which returns one of `values` at random whenever it is called."""
    return lambda chosen, _sizes: chosen.choice(values)


def divisor(chosen: Random, number: int, most: int = 12) -> int:
    """Return a random divisor of a number, at most `most`."""
    return chosen.choice([factor for factor in range(1, min(number, most) + 1) if number % factor == 0])


def kind_by_layer(chosen: Random, layers: int, *kinds: Any) -> list[Any]:
    """Return a list with one of `kinds` for every layer, chosen at random."""
    return [chosen.choice(kinds) for _ in range(layers)]


def types_with_attention(chosen: Random, layers: int, other: str) -> list[str]:
    """Return a random value of `layer_types`, with the types "full_attention" and `other`.

    At least one layer has full attention, because transformers' cache fails without one.
    """
    types = kind_by_layer(chosen, layers, "full_attention", other)
    types[chosen.randrange(layers)] = "full_attention"
    return types


def grouped_heads(chosen: Random) -> tuple[int, int]:
    """Return a random number of query heads, and a random divisor of it as the number of key-value heads."""
    kv_heads, group = chosen.choice((1, 2, 3, 5)), chosen.choice((1, 1, 2, 3))
    return kv_heads * group, kv_heads


def experts(chosen: Random) -> Config:
    """Return random sizes of a mixture of experts that are legal together, as role -> size."""
    groups, width = chosen.choice((1, 1, 2)), chosen.choice(ROWS[:3])
    count, top_groups = groups * chosen.choice((2, 3)), chosen.randint(1, groups)
    return {
        "hidden": chosen.choice(ROWS),
        "intermediate": width,
        "expert_size": width,
        "shared_size": chosen.choice((8, 24)),
        "shared_experts": chosen.choice((1, 2)),
        "mixture.experts": count,
        "mixture.top_k": chosen.randint(1, count // groups * top_groups),
        "mixture.groups": groups,
        "mixture.top_groups": top_groups,
    }


def placed(fields: Config) -> Config:
    """Return the fields as nested objects: `{"inner.name": 1}` becomes `{"inner": {"name": 1}}`."""
    config: Config = {}
    for path, value in fields.items():
        *outer, name = path.split(".")
        into = config
        for place in outer:
            into[place] = {**into.get(place, {})}
            into = into[place]
        into[name] = value
    return config


def some_of(chosen: Random, options: Sequence[int]) -> list[int]:
    """Return a random selection of the numbers in `options`, in the same order.

    Every number is selected with a probability of one half. `chosen` is the random number generator.
    """
    return [number for number in options if chosen.random() < 0.5]
