"""Tensors whose entries are those of an old one along an axis: chosen, permuted, repeated, or zero."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .base import Computed, Moved, Tensor

Index = NDArray[np.int64]
"""For each new entry the old one that it takes, or -1 for zero."""


def gather(array: NDArray[Any], index: Index, axis: int) -> NDArray[Any]:
    """The entries of `array` along `axis` that `index` names, zeros where it is -1."""
    found = np.take(array, np.maximum(index, 0), axis=axis)
    found[(slice(None),) * axis + (index < 0,)] = 0
    return found


def taken(name: str, index: Index, axis: int = 0) -> Moved:
    """A tensor with the entries along one axis that `index` names: every bit of them is kept."""
    return Moved(name, lambda array: gather(array, index, axis))


def scaled(name: str, index: Index, factor: float, axis: int = 0) -> Tensor:
    """The same, multiplied; moved alone where the factor is 1."""
    if factor == 1.0:
        return taken(name, index, axis)
    return Computed(lambda model: gather(model.wide(name), index, axis) * factor)


def padded(old: int, new: int, repeat: bool = False) -> Index:
    """`old` entries and then as many as make `new` of them: zeros, or the old ones again from the first."""
    index = np.arange(new)
    return index % old if repeat else np.where(index < old, index, -1)


def by_head(heads: Index, within: Index, size: int) -> Index:
    """The entries of tensors that hold heads of `size` side by side: for each new head the old one in `heads`, and of
    that the entries `within` (-1 for zero in either).
    """
    index = heads[:, None] * size + within[None, :]
    found: Index = np.where((heads[:, None] < 0) | (within[None, :] < 0), -1, index).reshape(-1)
    return found
