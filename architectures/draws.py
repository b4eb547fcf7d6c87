"""Random legal configs: functions for drawing fields, lenses, kinds of RoPE and families.

A drawn config is small and may be strange or useless, but transformers accepts it and computes with it. Every draw gets
a `random.Random`, so a seed always gives the same config.
"""

from collections.abc import Callable, Mapping, Sequence
from random import Random as Random
from typing import Any

Config = dict[str, Any]
Sizes = Mapping[str, Any]
"""Drawn values by role: `sizes["layers"]` is the number of layers. See `fields`."""

VOCAB = 97
"""The vocabulary of drawn models."""
ODD = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 20, 32, 33)
EVEN = (2, 4, 6, 8, 10, 12, 16, 18, 22, 32, 34)
ROWS = (8, 24, 40, 64)
"""Widths for experts: torch's grouped matrix product needs rows whose size is a multiple of 16 bytes."""
CONTEXTS = (16, 40, 256)
TABLE = 256
"""The context length of models with a table of position embeddings. No text in the tests may be longer."""
WINDOWS = (1, 2, 3, 8, 17, 300)


def sometimes(chosen: Random, fields: Config) -> Config:
    """Return some of the fields. Every field is chosen with a probability of one half."""
    return {name: value for name, value in fields.items() if chosen.random() < 0.5}


def among(*values: Any) -> Callable[[Random, Sizes], Any]:
    """Return the draw of a field that has one of these values."""
    return lambda chosen, _sizes: chosen.choice(values)


def divisor(chosen: Random, number: int, most: int = 12) -> int:
    """Return a random divisor of a number, at most `most`."""
    return chosen.choice([factor for factor in range(1, min(number, most) + 1) if number % factor == 0])


def kind_by_layer(chosen: Random, layers: int, *kinds: Any) -> list[Any]:
    """Return a random kind for every layer."""
    return [chosen.choice(kinds) for _ in range(layers)]


def types_with_attention(chosen: Random, layers: int, other: str) -> list[str]:
    """Return `layer_types` with full attention in at least one layer, without which transformers' cache fails."""
    types = kind_by_layer(chosen, layers, "full_attention", other)
    types[chosen.randrange(layers)] = "full_attention"
    return types


def grouped_heads(chosen: Random) -> tuple[int, int]:
    """Return a random number of query heads, and a random divisor of it as the number of key-value heads."""
    kv_heads, group = chosen.choice((1, 2, 3, 5)), chosen.choice((1, 1, 2, 3))
    return kv_heads * group, kv_heads


def experts(chosen: Random) -> Config:
    """Draw the sizes of a mixture of experts, by role."""
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
    """Return the fields as nested objects: the field "inner.name" becomes the field `name` of the object `inner`."""
    config: Config = {}
    for name, value in fields.items():
        outer, _, inner = name.rpartition(".")
        config |= {outer: {**config.get(outer, {}), inner: value}} if outer else {name: value}
    return config


def some_of(chosen: Random, options: Sequence[int]) -> list[int]:
    """Return a random selection of the numbers, in the same order."""
    return [number for number in options if chosen.random() < 0.5]
