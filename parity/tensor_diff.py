"""Compare two tensors A and B of one shape, some rows at a time, in fp64.

Bytes are compared first, and nothing is computed as long as they are equal. Otherwise one pass computes the sums for
all figures. A matrix gets a second pass to compute the rank of its change (`low_rank`).
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ..converter.dtypes import FLOATS, Array, to_float64
from ..converter.transfer import contiguous
from .low_rank import EPS, LIMIT, Floor, Projection, Rank, Sketch, rank_of

_Order = Literal["rows", "columns"]

CHUNK = 1 << 18  # elements that are looked at at a time: 2 MB as fp64
_SCALED = 1e-7
"""The relative distance, beyond rounding, up to which two tensors count as multiples of each other. It is the
resolution of fp64 sums of squares.
"""
_TINY = 1e-270  # smaller sums of squares mean nothing, because the squares may underflow in fp64


@dataclass
class TensorFigures:
    """The comparison of two tensors A and B of one shape. Sums and extremes only include values that are finite in
    both.
    """

    elements: int  # the number of values
    changed: int = 0  # the number of values that differ
    same_bytes: bool = False  # whether dtype and bytes are the same; without it, `changed` 0 still means equal values
    rows: tuple[tuple[int, int], ...] = ()  # runs of changed rows (first, last)
    rows_changed: int = 0  # the number of changed rows
    rows_all: int = 0  # the number of rows
    square_a: float = 0.0  # Σa²
    square_b: float = 0.0  # Σb²
    square: float = 0.0  # Σ(b - a)²
    product: float = 0.0  # Σab
    largest: float = 0.0  # max |b - a|
    not_finite: tuple[int, int] = (0, 0)  # the number of NaN or infinite values in A and in B
    rounded: tuple[str, Literal["a", "b"]] | None = None  # (dtype, side): this side is the other one rounded to dtype
    rank: Rank | None = None  # the rank of a matrix's change
    order: _Order | None = None  # the axis along which B is a permutation of A
    grids: tuple[str, str] = ("F64", "F64")  # the narrowest dtypes that can represent the values of A and of B

    @property
    def relative(self) -> float | None:
        """Return the Frobenius norm of B - A divided by that of A.

        Return None if A is zero and B is not, or if fp64 cannot represent the result.
        """
        if self.square == 0:
            return 0.0
        if 0 < self.square_a < _TINY or self.square < _TINY:
            return None
        ratio = math.sqrt(self.square / self.square_a) if self.square_a > 0 else math.inf
        return ratio if math.isfinite(ratio) else None

    @property
    def cosine(self) -> float | None:
        """Return the cosine of the angle between A and B, from -1 to 1; None if one of them is zero."""
        norms = math.sqrt(self.square_a) * math.sqrt(self.square_b)
        if 0 < min(self.square_a, self.square_b) < _TINY:
            return None
        if not (norms > 0 and math.isfinite(norms) and math.isfinite(self.product)):
            return None
        return min(1.0, max(-1.0, self.product / norms))

    @property
    def scale(self) -> float | None:
        """Return the factor s if B is s times A, up to rounding; None if there is no such factor, or if it is 1."""
        if not (self.square_a > 0 and self.square_b > 0 and math.isfinite(self.square_a + self.square_b)):
            return None
        factor = self.product / self.square_a
        residual = max(self.square_b - factor * self.product, 0.0)
        rounding = max(EPS[grid] for grid in self.grids)
        few = self.elements < 3  # one or two numbers are multiples of others by chance
        if few or any(self.not_finite) or residual > max(rounding / 2, _SCALED) ** 2 * self.square_b:
            return None
        return factor if abs(factor - 1) > rounding else None


def compare_tensors(
    a: Array,
    dtype_a: str,
    b: Array,
    dtype_b: str,
    *,
    rank: bool = True,
    device: Any = None,
    pause: Callable[[int], None] = lambda _: None,
) -> TensorFigures:
    """Compare two arrays A and B of one shape.

    numpy has no bf16 and fp8, so arrays of these dtypes have integers with the same bits.

    Args:
        a: A, which may be memory-mapped.
        dtype_a: the name of its dtype, such as "BF16".
        b: B.
        dtype_b: the name of its dtype.
        rank: also compute the rank of the change.
        device: the torch device that multiplies matrices for the rank. With None, numpy does.
        pause: called after each chunk with the number of bytes read. It may raise an exception to stop.
    """
    pair = _Pair(a, dtype_a, b, dtype_b, pause)
    if pair.same():
        return TensorFigures(elements=a.size, same_bytes=dtype_a == dtype_b, rows_all=pair.rows_all)
    sums = _Sums(pair, rank, device)
    for rows, x, y, equal in pair.walk():
        sums.add(rows, x, y, equal)
    return sums.finished()


def same_bytes(x: Array, y: Array) -> bool:
    """Return whether two contiguous arrays of one dtype and shape have the same bytes."""
    flat, other_flat = x.reshape(-1), y.reshape(-1)
    whole = flat.nbytes // 8 * 8 // max(flat.itemsize, 1)
    words = flat[:whole].view(np.uint64), other_flat[:whole].view(np.uint64)
    return bool((words[0] == words[1]).all()) and flat[whole:].tobytes() == other_flat[whole:].tobytes()


class _Pair:
    """Two tensors A and B of one shape, as matrices that are read some rows at a time.

    If both are stored transposed, the matrices are transposed, so that the files are read forwards.
    """

    def __init__(self, a: Array, dtype_a: str, b: Array, dtype_b: str, pause: Callable[[int], None]) -> None:
        assert a.shape == b.shape, f"{a.shape} and {b.shape}"
        self.dtypes, self.pause = (dtype_a, dtype_b), pause
        self.matrix, self.rows_all = a.ndim == 2, a.shape[0] if a.ndim else 1
        if not self.matrix:
            shape = self.rows_all, a.size // self.rows_all if self.rows_all else 0
            a, b = a.reshape(shape), b.reshape(shape)
        # If both matrices are stored transposed (GPT-2), they are compared in that order.
        self.turned = self.matrix and all(x.strides[0] < x.strides[1] for x in (a, b)) and min(a.shape) > 1
        self.a, self.b = (a.T, b.T) if self.turned else (a, b)
        self.shape = self.a.shape

    def chunks(self) -> Iterator[tuple[slice, Array, Array]]:
        """Yield some rows of both matrices at a time: the slice of rows, and two contiguous arrays in the stored
        dtypes.
        """
        rows, columns = self.shape
        if not rows or not columns:
            return
        step = max(1, CHUNK // columns)
        for start in range(0, rows, step):
            part = slice(start, min(start + step, rows))
            x, y = contiguous(self.a[part]), contiguous(self.b[part])
            yield part, x, y
            self.pause(x.nbytes + y.nbytes)

    def walk(self) -> Iterator[tuple[slice, Array, Array, bool]]:
        """Yield some rows of both matrices at a time: the slice of rows, A and B in fp64, and whether their bytes are
        equal.

        If the bytes are equal, the two arrays are the same object.
        """
        for part, x, y in self.chunks():
            equal = self.dtypes[0] == self.dtypes[1] and same_bytes(x, y)
            wide = to_float64(x, self.dtypes[0])
            yield part, wide, wide if equal else to_float64(y, self.dtypes[1]), equal

    def same(self) -> bool:
        """Return whether A and B are equal, by bytes or, if their dtypes differ, by value. Stops at the first
        difference.
        """
        first, second = self.dtypes
        if first == second:
            return all(same_bytes(x, y) for _, x, y in self.chunks())
        return all(np.array_equal(to_float64(x, first), to_float64(y, second)) for _, x, y in self.chunks())


class _Sums:
    """The running state of a pass over two tensors A and B: sums, changed rows, and the sketch for
    the rank of B - A.
    """

    def __init__(self, pair: _Pair, rank: bool, device: Any) -> None:
        rows, columns = pair.shape
        self.pair, self.figures = pair, TensorFigures(int(pair.a.size), rows_all=pair.rows_all)
        self.marks = np.zeros(pair.rows_all, bool)
        self.row_sums, self.column_sums = np.zeros(rows), np.zeros(columns)
        floats = [dtype if dtype in EPS else "F64" for dtype in pair.dtypes]  # fp64 can represent the integers
        self.grids = tuple([*(g for g in FLOATS if EPS[g] > EPS[stored]), stored] for stored in floats)
        sides: tuple[Literal["a", "b"], ...] = ("a", "b")
        self.roundings = [(grid, side) for grid in FLOATS[:-1] for side in sides]
        # fp32 has enough bits for a change between values with 8 or 11 bits.
        self.dtype = "float64" if {"F32", "F64"} & set(floats) else "float32"
        wanted = rank and pair.matrix and min(pair.shape) > 1
        self.sketch = Sketch(rows, columns, self.dtype, device) if wanted else None

    def add(self, rows: slice, x: Array, y: Array, equal: bool) -> None:
        """Add some rows of A and B.

        Args:
            rows: the slice of rows.
            x: these rows of A in fp64.
            y: these rows of B in fp64.
            equal: whether their stored bytes are equal.
        """
        with np.errstate(invalid="ignore", over="ignore"):
            if not equal:
                self._look(x, y)
            x, y = self._finite(rows, x, y)
            figures, square = self.figures, _dot(x, x)
            figures.square_a += square
            figures.square_b += square if equal else _dot(y, y)
            figures.product += square if equal else _dot(x, y)
            if equal:
                return
            change = y - x
            figures.square += _dot(change, change)
            figures.largest = max(figures.largest, float(change.max(initial=0.0)), -float(change.min(initial=0.0)))
            both = x * x
            both += y * y
            self.row_sums[rows] = both.sum(1)
            self.column_sums += both.sum(0)
        figures.changed += int(np.count_nonzero(change))
        self._mark(rows, change != 0)
        if self.sketch is not None:
            self.sketch.add(change)

    def _look(self, x: Array, y: Array) -> None:
        """Update which dtypes can represent the values exactly, and whether A or B can be the other
        one after rounding.
        """
        for values, grids in zip((x, y), self.grids, strict=True):
            while len(grids) > 1 and not _rounds(values, grids[0], values):
                grids.pop(0)
        pairs = {"a": (y, x), "b": (x, y)}
        self.roundings = [
            (grid, side) for grid, side in self.roundings if _rounds(pairs[side][0], grid, pairs[side][1])
        ]

    def _finite(self, rows: slice, x: Array, y: Array) -> tuple[Array, Array]:
        """Return these rows of A and B, with 0 in both wherever one of them is NaN or infinite.

        The replaced values are counted in the figures, and also how many of them changed.
        """
        if math.isfinite(float(x.sum()) + float(y.sum())):
            return x, y
        finite_x, finite_y, known = np.isfinite(x), np.isfinite(y), self.figures.not_finite
        counts = (int(np.count_nonzero(~finite)) for finite in (finite_x, finite_y))
        self.figures.not_finite = known[0] + next(counts), known[1] + next(counts)
        both = finite_x & finite_y
        changed = ~both & (x != y) & ~(np.isnan(x) & np.isnan(y))
        self.figures.changed += int(np.count_nonzero(changed))
        self._mark(rows, changed)
        return np.where(both, x, 0.0), np.where(both, y, 0.0)

    def _mark(self, rows: slice, changed: Array) -> None:
        """Note which rows have changed values. `changed` has a boolean for every value of these rows."""
        here = slice(None) if self.pair.turned else rows
        self.marks[here] |= changed.any(axis=0 if self.pair.turned else 1)

    def finished(self) -> TensorFigures:
        """Return the comparison. Call this after all rows were added."""
        figures, self.figures.grids = self.figures, (self.grids[0][0], self.grids[1][0])
        if figures.square == 0 and figures.largest > 0:
            figures.square = math.nan  # the square of the change underflows in fp64
        figures.rows, figures.rows_changed = runs(self.marks), int(self.marks.sum())
        if figures.changed and self.roundings and not any(figures.not_finite):
            # The finest dtype that explains it: where bf16 explains values that fp16 can represent, fp16 does too.
            figures.rounded = max(self.roundings, key=lambda rounding: FLOATS.index(rounding[0]))
        figures.order = self._order()
        if figures.rounded is None and figures.order is None:
            figures.rank = self._rank()
        return figures

    def _rank(self) -> Rank | None:
        """Return the rank of the change B - A; None if it was not asked for. This may read the
        tensors a second time.
        """
        square, grids = self.figures.square, self.figures.grids
        if self.sketch is None or not square >= _TINY or not math.isfinite(square):
            return None
        least = min(self.pair.shape)
        limit = min(LIMIT, least)
        if np.count_nonzero(self.marks) == 1:  # a change of a single row has rank 1
            return Rank(1, least, limit, 1.0, 1)
        self.sketch.finish()
        floor = Floor(self.row_sums, self.column_sums)
        if self.sketch.surely_more(floor, min(grids, key=FLOATS.index)):
            return Rank(limit, least, limit, None, None, more=True)
        spectrum = self.sketch.spectrum
        if spectrum is None:
            projection = Projection(np.linalg.qr(self.sketch.total)[0], self.dtype, self.sketch.device)
            for _, x, y, equal in self.pair.walk():
                if not equal:
                    change = y - x
                    projection.add(change if np.isfinite(change).all() else np.nan_to_num(change, False, 0.0, 0.0, 0.0))
            projection.finish()
            spectrum = projection.values()
        return rank_of(spectrum, square, floor, grids)

    def _order(self) -> _Order | None:
        """Return "rows" or "columns" if B is A with these permuted, else None.

        This reads the tensors once more, but only if the sums of squares of A and B are equal.
        """
        square_a, square_b, square = self.figures.square_a, self.figures.square_b, self.figures.square
        if any(self.figures.not_finite) or not square >= _TINY:
            return None
        if square <= 1e-6 * square_a or abs(square_a - square_b) > 1e-11 * square_a:
            return None
        rows, columns = self.pair.shape
        keys, turned = (
            np.random.default_rng(seed).integers(1, 2**63, size, np.uint64) | np.uint64(1)
            for seed, size in ((1, columns), (2, rows))
        )
        by_row, by_column = np.zeros((2, rows), np.uint64), np.zeros((2, columns), np.uint64)
        for part, x, y, _ in self.pair.walk():
            for side, values in enumerate((x, y)):
                bits = (values + 0.0).view(np.uint64)
                bits = bits ^ (bits >> np.uint64(32))
                by_row[side, part] = (bits * keys).sum(1, np.uint64)
                by_column[side] += (bits * turned[part, None]).sum(0, np.uint64)
        names: tuple[_Order, _Order] = ("columns", "rows") if self.pair.turned else ("rows", "columns")
        same = (np.array_equal(*np.sort(sums)) and sums.shape[1] > 1 for sums in (by_row, by_column))
        return next((name for name, equal in zip(names, same, strict=True) if equal), None)


def _dot(x: Array, y: Array) -> float:
    """Return the sum of products of two matrices. It avoids BLAS, whose threads would compete with gptkit's threads."""
    return float(np.einsum("ij,ij->i", x, y).sum())


def _on(values: Array, grid: str) -> Array:
    """Return fp64 values rounded to nearest even in the dtype `grid`, as fp64. Values beyond its
    range become infinite.
    """
    if grid == "F64":
        return values
    if grid == "F16":
        return values.astype(np.float16).astype(np.float64)
    narrow = values.astype(np.float32)
    if grid == "F32":
        return narrow.astype(np.float64)
    # Casts to bf16 go through fp32, so fp64 values are rounded twice.
    bits = narrow.view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(narrow), narrow, rounded.view(np.float32)).astype(np.float64)


def _rounds(values: Array, grid: str, rounded: Array) -> bool:
    """Return whether `rounded` is `values` rounded to the dtype `grid` (NaN equals NaN).

    Some values are compared first, because this decides most cases.
    """
    pairs = ((values[:1, :64], rounded[:1, :64]), (values, rounded))
    return all(np.array_equal(_on(x, grid), y, equal_nan=True) for x, y in pairs)


def runs(marks: Array) -> tuple[tuple[int, int], ...]:
    """Return the first and last index of each run of consecutive true values."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], marks, [False])).astype(np.int8)))
    return tuple((int(first), int(last) - 1) for first, last in edges.reshape(-1, 2))
