"""The heads of an attention: which tensors hold them, which slopes ALiBi gives them, and which stay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..components import ALiBi, Attention, LatentAttention
from .gather import Index
from .layerwise import unknown

__all__ = ["Choice", "Grouped", "Part", "kept", "key_heads", "parts", "remaining", "slopes"]

Grouped = Attention | LatentAttention


@dataclass(frozen=True)
class Part:
    """A tensor that holds heads side by side along an axis: query heads, or key-value heads."""

    name: str
    size: int
    keys: bool = False
    axis: int = 0


@dataclass(frozen=True)
class Choice:
    """The old query head and the old key-value head that each new one is, and which query heads are to be silent."""

    heads: Index
    keys: Index
    silent: np.ndarray


def parts(path: str, attention: Grouped) -> tuple[Part, ...]:
    """The tensors of an attention (at `path`) that have heads; o_proj's weight is the last."""
    match attention:
        case LatentAttention():
            own, width = {"q_proj": attention.query_dim, "k_up_proj": attention.nope_dim}, attention.value_dim
            own["v_up_proj"] = width
            shared: tuple[str, ...] = ()
        case Attention():
            shared, width = ("k_proj", "v_proj"), attention.head_dim
            own = dict.fromkeys(("q_proj", *shared), width)
        case _:
            raise unknown(path, attention, "attention")
    linears = ((name, name.partition(".")[0]) for name in attention.shapes())
    found = [Part(f"{path}.{name}", own[linear], linear in shared) for name, linear in linears if linear in own]
    return (*found, Part(f"{path}.o_proj.weight", width, axis=1))


def key_heads(attention: Grouped) -> int:
    """Key-value heads; a latent is made into one for every query head."""
    match attention:
        case Attention():
            return attention.kv_heads
        case LatentAttention():
            return attention.heads
        case _:
            raise unknown("a layer", attention, "attention")


def slopes(attention: Grouped, heads: int) -> list[float] | None:
    """The slope of each of so many heads, as it enters the scores, or None without ALiBi."""
    if not isinstance(attention.position, ALiBi):
        return None
    import torch

    from ..modules.positions import alibi_slopes

    found = alibi_slopes(heads)
    if attention.position.rounding == "bfloat16":
        found = found.bfloat16()
    return [float(each) for each in found.to(torch.float64)]


def kept(attention: Grouped, heads: Sequence[int]) -> Choice:
    """The choice of some old heads, in the order that their slopes want."""
    old, keys = attention.heads, key_heads(attention)
    before, after = slopes(attention, old), slopes(attention, len(heads))
    if before is not None and after is not None:
        heads = [before.index(slope) for slope in after]
    index = np.array(heads)
    group = old // keys
    key_index = index if keys == old else np.array(sorted({head // group for head in heads}))
    return Choice(index, key_index, np.zeros(len(index), dtype=bool))


def allowed(attention: Grouped, gone: set[int], units: Sequence[Index], new: int, new_keys: int) -> list[Index]:
    """The units that may go next: of each group as many as leave it as large as it is to be."""
    left = [unit for unit in units if not gone & set(unit.tolist())]
    keys = key_heads(attention)
    if keys in (attention.heads, 1) or new_keys != keys:
        return left
    group = attention.heads // keys
    lost = [sum(head // group == key for head in gone) for key in range(keys)]
    return [unit for unit in left if lost[unit[0] // group] < group - new // keys]


def remaining(
    attention: Grouped,
    units: Sequence[Index],
    new: int,
    new_keys: int,
    costs: Callable[[list[int]], Callable[[Index], float]],
) -> list[int]:
    """The heads that stay when the unit of the least cost goes, until there are `new`.

    `costs` gets the heads that are left, and gives what it costs to take off a unit of them.
    """
    old, gone = attention.heads, set[int]()
    while old - len(gone) > new:
        cost = costs([head for head in range(old) if head not in gone])
        unit = min(allowed(attention, gone, units, new, new_keys), key=cost)
        gone |= set(unit.tolist())
    return [head for head in range(old) if head not in gone]
