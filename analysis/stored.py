"""What a checkpoint's weight files hold, by their headers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..display import Record

if TYPE_CHECKING:
    from ..converter.index import WeightFiles


@dataclass(frozen=True)
class StoredTensor(Record):
    """A tensor as it lies in its file: its dtype by safetensors' name (a quantised one's by its format's), its shape
    there, its bytes.
    """

    JSON = "name dtype shape bytes=nbytes"

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class Stored(Record):
    """What a checkpoint's weight files hold of the model: the names of the files, and the tensors in their order."""

    JSON = "bytes=nbytes files dtypes tensors"

    files: tuple[str, ...]
    tensors: tuple[StoredTensor, ...]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def by_dtype(self) -> dict[str, tuple[int, int, int]]:
        """For each dtype (tensors, parameters, bytes), the one with most bytes first."""
        found: dict[str, tuple[int, int, int]] = {}
        for each in self.tensors:
            tensors, parameters, nbytes = found.get(each.dtype, (0, 0, 0))
            found[each.dtype] = (tensors + 1, parameters + math.prod(each.shape), nbytes + each.nbytes)
        return dict(sorted(found.items(), key=lambda item: -item[1][2]))

    @property
    def dtypes(self) -> dict[str, dict[str, int]]:
        names = ("tensors", "parameters", "bytes")
        return {dtype: dict(zip(names, sizes, strict=True)) for dtype, sizes in self.by_dtype().items()}


def stored_files(files: WeightFiles) -> Stored:
    """Files whose tensors have names of their own."""
    tensors = (StoredTensor(name, each.dtype, each.shape, each.nbytes) for name, each in files.tensors.items())
    return Stored(tuple(path.name for path in files.files), tuple(tensors))
