"""The tensors of a llama2.c file as arrays, and the check of its rotary tables."""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ...architectures.llama2c import BASE, TABLES, Place, Sizes
from ...errors import CheckpointError

__all__ = ["Llama2cWeights", "check_tables"]

ROWS = 4096
"""Positions of the tables that are checked at a time."""


class Llama2cWeights:
    """The tensors of a file by their names, each a layer's own; quantised ones are fp32 once read, and `blocks` says
    what they are in the file.
    """

    def __init__(self, path: Path, places: Mapping[str, Place]) -> None:
        self._path, self._places = path, places
        self.info = {name: ("F32", place.shape) for name, place in places.items()}
        self.blocks = {
            name: (f"I8 in groups of {place.group}", math.prod(place.shape) // place.group * (place.group + 4))
            for name, place in places.items()
            if place.scales is not None
        }
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"cannot map {path}: {error}") from error

    def read(self, name: str) -> np.ndarray:
        """The tensor: a read-only view of the file where it is stored as fp32. No place begins at a multiple of four
        for sure (groups of bytes come before others), which numpy does not mind.
        """
        place = self._places[name]
        count = int(np.prod(place.shape))
        if place.scales is None:
            flat = np.frombuffer(self._map, "<f4", count, place.start)
        else:
            groups = np.frombuffer(self._map, np.int8, count, place.start).reshape(-1, place.group)
            scales = np.frombuffer(self._map, "<f4", len(groups), place.scales)
            with np.errstate(all="ignore"):  # scales that are infinite or not numbers are told where they matter
                flat = (groups * scales[:, None]).reshape(-1)
        flat.flags.writeable = False
        return flat.reshape(place.shape)

    def span(self, name: str) -> tuple[Path, int] | None:
        """Where a tensor's bytes begin in the file; None for a quantised one."""
        place = self._places[name]
        return (self._path, place.start) if place.scales is None else None

    def release(self) -> None:
        """Give the pages that were read back to the system; views stay valid and read them again."""
        if hasattr(self._map, "madvise"):
            self._map.madvise(mmap.MADV_DONTNEED)


def check_tables(path: Path, weights: Llama2cWeights, sizes: Sizes) -> None:
    """Raise CheckpointError where the rotary tables are not those of the sizes, up to fp32's rounding of an angle."""
    frequencies = BASE ** -(np.arange(0, sizes.head_dim, 2) / sizes.head_dim)
    for name, function in zip(TABLES, (np.cos, np.sin), strict=True):
        table = weights.read(name)
        for start in range(0, sizes.max_seq_len, ROWS):
            rows = table[start : start + ROWS]
            angles = np.outer(np.arange(start, start + len(rows)), frequencies)
            if not np.all(np.abs(rows - function(angles)) <= 1e-6 + 4e-7 * angles):
                raise CheckpointError(
                    f"{path}: {name} is not that of rotary positions of base {BASE:,.0f} on heads of {sizes.head_dim}",
                    "The file is damaged, or of a model that llama2.c's own programs compute otherwise.",
                )
