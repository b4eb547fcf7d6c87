"""The heads of an attention: which tensors hold them, which slopes ALiBi gives them, and which stay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..components import ALiBi, Attention, LatentAttention
from .gather import Index

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


def key_heads(attention: Grouped) -> int:
    """Key-value heads; a latent is made into one for every query head."""
    found: int = getattr(attention, "kv_heads", attention.heads)
    return found


def parts(path: str, attention: Grouped) -> tuple[Part, ...]:
    """The tensors of an attention (at `path`) that have heads; o_proj's weight is the last."""
    shared = {"k_proj", "v_proj"}
    found = []
    for name, shape in attention.shapes().items():
        linear = name.partition(".")[0]
        if linear in {"q_proj", "q_up_proj", "k_up_proj", "v_up_proj", *shared}:
            heads = key_heads(attention) if linear in shared else attention.heads
            found.append(Part(f"{path}.{name}", shape[0] // heads, linear in shared))
    width = attention.shapes()["o_proj.weight"][1] // attention.heads
    return (*found, Part(f"{path}.o_proj.weight", width, axis=1))


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
    index, group = np.array(heads), old // keys
    key_index = index if keys == old else np.array(sorted({head // group for head in heads}))
    return Choice(index, key_index, np.zeros(len(index), dtype=bool))


def remaining(
    attention: Grouped,
    units: Sequence[Index],
    new: int,
    new_keys: int,
    costs: Callable[[list[int]], Callable[[Index], float]],
) -> list[int]:
    """The heads that stay when the unit of the least cost goes, until there are `new`: of each group as many as leave
    it as large as it is to be.

    `costs` gets the heads that are left, and gives what it costs to take off a unit of them.
    """
    old, keys, gone = attention.heads, key_heads(attention), set[int]()
    group = old // keys
    while old - len(gone) > new:
        cost = costs([head for head in range(old) if head not in gone])
        allowed = [unit for unit in units if not gone & set(unit.tolist())]
        if keys not in (old, 1) and new_keys == keys:
            lost = [sum(head // group == key for head in gone) for key in range(keys)]
            allowed = [unit for unit in allowed if lost[unit[0] // group] < group - new // keys]
        gone |= set(min(allowed, key=cost).tolist())
    return [head for head in range(old) if head not in gone]
