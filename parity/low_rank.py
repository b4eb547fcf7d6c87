"""Compute the rank of a change Δ = B - A between two matrices that are read a few rows at a time.

This is a randomised range finder (Halko, Martinsson, Tropp 0909.4061, §4.1) over rows. The first pass computes the
sketch Y = ΔᵀΨ, for a random Ψ with few columns. Q is an orthonormal basis of Y. The second pass computes ΔQ, whose
largest singular values are those of Δ. For a narrow matrix, one pass sums ΔᵀΔ instead. The memory used is always
smaller than the matrix.

Rounding errors have full rank: a rank-8 update of bf16 weights has 8 large singular values and many small ones. So only
singular values above a bound, the floor, are counted. Stored values have errors of up to half an ulp. The floor is the
largest singular value of a matrix with independent entries of variance ulp²/12. It is about the largest row norm plus
the largest column norm (Bandeira, van Handel 1408.6185).
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..converter.dtypes import Array

LIMIT = 128  # larger ranks are not counted; adapters rarely have them
_OVERSAMPLING = 8
_NARROW = 272
"""The number of columns up to which ΔᵀΔ is cheaper than two passes over a sketch."""
_BUFFER = 1 << 20  # elements that are multiplied at once
_SEED = 0x6770746B
_RESOLUTION = 1e-7
"""Singular values below this share of the largest one are numerical noise, because they are computed from squares in
fp64."""
_MARGIN = 1.1  # a factor on the floor, because its estimate is a mean
NEAR, GAP = 4.0, 8.0
"""A singular value below NEAR times the floor that is also GAP times smaller than the previous one comes from rounding
a strong change."""
_MOST = 0.99  # the share of the change that a few directions must explain

EPS = {"BF16": 2.0**-7, "F16": 2.0**-10, "F32": 2.0**-23, "F64": 2.0**-52}  # an ulp of the values in [1, 2)
_SUBNORMAL = {"BF16": 0.0, "F16": 2.0**-24, "F32": 0.0, "F64": 0.0}  # the smallest ulp, where weights come near it
_MEAN_SQUARE = 3 / (8 * math.log(2))
"""The mean of (ulp(x) / (EPS·x))² for mantissas with the usual distribution of numbers (Benford)."""


@dataclass(frozen=True)
class Rank:
    """The rank of the change between two matrices, computed from its singular values."""

    rank: int  # the number of singular values above rounding; `limit` if there are more
    of: int  # the largest possible rank
    limit: int  # the largest rank that can be counted
    share: float | None  # the share of these values in the squared Frobenius norm; None if `more`
    most: int | None  # the least number of values with 99 % of the squared norm; None if above `limit`
    more: bool = False  # whether the rank is above `limit`

    @property
    def full(self) -> bool:
        """Return whether the change has the largest rank that a matrix of this shape can have."""
        return not self.more and self.rank == self.of


@dataclass(frozen=True)
class Floor:
    """How much rounding alone may contribute to the difference of two matrices A and B."""

    rows: Array  # the sum of a² + b² over every row
    columns: Array  # the sum of a² + b² over every column

    def of(self, dtype: str) -> float:
        """Return the largest singular value of B - A that rounding A and B to `dtype` may cause."""
        factor, least = self._variance(dtype), _SUBNORMAL[dtype] / math.sqrt(12)
        spread = math.sqrt(self.rows.max(initial=0.0)) + math.sqrt(self.columns.max(initial=0.0))
        corner = math.sqrt(len(self.rows)) + math.sqrt(len(self.columns))
        return _MARGIN * (math.sqrt(factor) * spread + least * corner)

    def energy(self, dtype: str) -> float:
        """Return the expected squared Frobenius norm of the rounding errors of one of the two matrices."""
        return self._variance(dtype) * float(self.rows.sum()) / 2

    def sketched(self, dtype: str, width: int) -> float:
        """Return the largest singular value that rounding may cause in the sketch ΔᵀΨ, if Ψ has `width` columns."""
        norm, least = math.sqrt(self._variance(dtype)), _SUBNORMAL[dtype] / math.sqrt(12)
        whole = norm * math.sqrt(self.rows.sum()) + least * math.sqrt(len(self.rows) * len(self.columns))
        return _MARGIN * (whole + self.of(dtype) * math.sqrt(width))

    @staticmethod
    def _variance(dtype: str) -> float:
        """Return the variance of the rounding error of a value x, divided by x²."""
        return _MEAN_SQUARE * EPS[dtype] ** 2 / 12


def product(a: Array, b: Array, device: Any = None) -> Array:
    """Return the product of the matrices a and b.

    `device` is the torch device that computes it. With None, numpy does.
    """
    if device is None:
        result: Array = a @ b
        return result
    import torch

    x, y = (torch.from_numpy(matrix).to(device) for matrix in (a, b))
    return np.asarray((x @ y).cpu().numpy())


class _Products:
    """One pass over the rows of a change, which adds up a product of matrices, such as ΔᵀΔ, in `total`.

    Rows are collected in a buffer. Whenever it is full, its product is computed and added. Rows of zeros do not change
    the sum and may be left out.
    """

    total: Array

    def __init__(self, columns: int, dtype: str, device: Any) -> None:
        self.device = device
        self._buffer = np.empty((max(1, _BUFFER // max(columns, 1)), columns), dtype)
        self._filled = 0

    def add(self, rows: Array) -> None:
        at = 0
        while at < len(rows):
            count = min(len(rows) - at, len(self._buffer) - self._filled)
            self._buffer[self._filled : self._filled + count] = rows[at : at + count]
            self._filled, at = self._filled + count, at + count
            if self._filled == len(self._buffer):
                self.finish()

    def finish(self) -> None:
        """Add the product of the rows that are still in the buffer."""
        if self._filled:
            self._multiply(self._buffer[: self._filled])
        self._filled = 0

    def _multiply(self, change: Array) -> None:
        raise NotImplementedError

    def values(self) -> Array:
        """Return the singular values of the change in descending order: the square roots of the
        eigenvalues of `total`.
        """
        values: Array = np.sqrt(np.clip(np.linalg.eigvalsh(self.total)[::-1], 0.0, None))
        return values


class Sketch(_Products):
    """The first pass over a change Δ. It computes the sketch ΔᵀΨ with a random Ψ, or ΔᵀΔ if Δ has few columns."""

    def __init__(self, rows: int, columns: int, dtype: str, device: Any = None) -> None:
        """Create the sketch of a matrix with this number of rows and columns.

        Args:
            rows: the number of rows.
            columns: the number of columns.
            dtype: the dtype to compute in: "float64", or "float32" at twice the speed if A and B are bf16 or fp16.
            device: as in `product`.
        """
        self.direct = columns <= _NARROW
        super().__init__(columns, "float64" if self.direct else dtype, device)
        self.rows, self.columns, self.width = rows, columns, min(LIMIT + _OVERSAMPLING, rows, columns)
        self.total = np.zeros((columns, columns if self.direct else self.width))
        self._random = np.random.default_rng(_SEED)

    def _multiply(self, change: Array) -> None:
        if self.direct:
            self.total += product(change.T, change, self.device)
        else:
            random = self._random.standard_normal((len(change), self.width), np.dtype(change.dtype))
            self.total += product(change.T, random, self.device)

    @property
    def spectrum(self) -> Array | None:
        """Return the singular values of a matrix with few columns, in descending order; None if a second pass is
        needed.
        """
        return self.values()[: min(self.rows, self.columns)] if self.direct else None

    def surely_more(self, floor: Floor, dtype: str) -> bool:
        """Return whether the rank is certainly above LIMIT, so that no second pass is needed.

        This requires more than LIMIT singular values above the effect of rounding. The smaller half of the values must
        also have a considerable part of the squared norm.
        """
        if self.direct or self.width <= LIMIT:
            return False
        values = np.linalg.svd(self.total, compute_uv=False)
        energy = float((values**2).sum())
        spread = float((values[self.width // 2 :] ** 2).sum()) > 2 * (1 - _MOST) * energy
        return spread and float(values[LIMIT]) > 2 * floor.sketched(dtype, self.width)


class Projection(_Products):
    """The second pass over a change Δ. It computes QᵀΔᵀΔQ for an orthonormal basis Q of the sketch,
    (columns, width).
    """

    def __init__(self, basis: Array, dtype: str, device: Any = None) -> None:
        super().__init__(len(basis), dtype, device)
        self._basis = basis.astype(dtype)
        self.total = np.zeros((basis.shape[1], basis.shape[1]))

    def _multiply(self, change: Array) -> None:
        part = product(change, self._basis, self.device).astype(np.float64)
        self.total += part.T @ part


def rank_of(spectrum: Array, energy: float, floor: Floor, grids: tuple[str, str]) -> Rank:
    """Return the rank of a change, without the effect of rounding.

    Args:
        spectrum: the largest singular values of the change, in descending order.
        energy: the squared Frobenius norm of the change.
        floor: the effect of rounding.
        grids: the narrowest dtype that can represent the values of A, and that of B. If they differ, there are two
            explanations: one matrix was rounded to the coarser dtype, or both had this dtype before one of them was
            changed. The second one is assumed if the uncounted singular values are too small for such a rounding.
    """
    of = min(len(floor.rows), len(floor.columns))
    limit = min(LIMIT, of)
    coarse, fine = sorted(grids, key=lambda dtype: -EPS[dtype])
    count = _count(spectrum, floor.of(coarse))
    if coarse != fine and energy - float((spectrum[:count] ** 2).sum()) < floor.energy(coarse) / 4:
        count = _count(spectrum, floor.of(fine))
    cumulative = np.cumsum(spectrum**2) / energy if energy > 0 else np.ones(1)
    needed = int(np.searchsorted(cumulative, _MOST)) + 1
    most = needed if cumulative[-1] >= _MOST and needed <= limit else None
    if count > limit:
        return Rank(limit, of, limit, None, most, more=True)
    share = float(min(cumulative[count - 1], 1.0)) if count else 0.0
    return Rank(count, of, limit, share, most)


def _count(spectrum: Array, floor: float) -> int:
    """Return the number of singular values above the floor that do not come from rounding.

    The rounding errors of a strong change of rank 1 or 2 are correlated, and may add a few values of up to twice the
    floor. These values follow a large gap, and are not counted.
    """
    count = int((spectrum > max(floor, _RESOLUTION * float(spectrum.max(initial=0.0)))).sum())
    for at in range(1, count):
        if spectrum[at] < min(NEAR * floor, spectrum[at - 1] / GAP):
            return at
    return count
