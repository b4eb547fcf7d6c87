"""What two tensors differ by: the figures against plain formulas, the rank of changes of known rank, what rounding
does, and what lies in another order.
"""

import math
import weakref
from typing import Any

import numpy as np
import pytest
from helpers.covering import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from gptkit.converter.dtypes import FLOATS, cast, from_float64, to_float64
from gptkit.parity.low_rank import Projection, Sketch
from gptkit.parity.tensor_diff import CHUNK, TensorFigures, compare_tensors, runs

NARROW = ("BF16", "F16")


def weight(random: np.random.Generator, rows: int, columns: int, dtype: str) -> np.ndarray:
    return from_float64(random.standard_normal((rows, columns)) * columns**-0.5, dtype)


def added(base: np.ndarray, dtype: str, change: np.ndarray, size: float, to: str | None = None) -> np.ndarray:
    """The base with a change of that relative size, rounded."""
    wide = to_float64(base, dtype)
    return from_float64(wide + change * (size * np.linalg.norm(wide) / np.linalg.norm(change)), to or dtype)


def low(random: np.random.Generator, rows: int, columns: int, rank: int) -> np.ndarray:
    return random.standard_normal((rows, rank)) @ random.standard_normal((rank, columns))


def compared(a: np.ndarray, dtype_a: str, b: np.ndarray, dtype_b: str | None = None, **asked: Any) -> TensorFigures:
    return compare_tensors(a, dtype_a, b, dtype_b or dtype_a, **asked)


# --- figures ----------------------------------------------------------------------------------------------------------


@settings(max_examples=examples(60), deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([(1,), (7,), (1, 1), (3, 5), (40, 9), (5, 300)]),
    st.sampled_from(FLOATS),
    st.sampled_from(FLOATS),
    st.sampled_from([0.0, 1e-3, 1.0]),
    st.floats(0.0, 1.0),
)
def test_figures_are_those_of_the_formulas(
    seed: int, shape: tuple[int, ...], one: str, other: str, size: float, share: float
) -> None:
    random = np.random.default_rng(seed)
    wide = random.standard_normal(shape)
    a = from_float64(wide, one)
    b = from_float64(to_float64(a, one) + size * random.standard_normal(shape) * (random.random(shape) < share), other)
    x, y = to_float64(a, one), to_float64(b, other)
    found = compared(a, one, b, other)
    delta = y - x
    assert found.changed == np.count_nonzero(delta)
    assert found.largest == (np.abs(delta).max() if found.changed else 0)
    assert found.same_bytes == (one == other and a.tobytes() == b.tobytes())
    assert found.relative == pytest.approx(np.linalg.norm(delta) / np.linalg.norm(x), rel=1e-12)
    if found.changed:
        cosine = np.dot(x.ravel(), y.ravel()) / (np.linalg.norm(x) * np.linalg.norm(y))
        assert found.cosine == pytest.approx(cosine, rel=1e-12)
        rows = delta.reshape(shape[0], -1).any(1)
        assert found.rows == runs(rows) and found.rows_changed == rows.sum() and found.rows_all == shape[0]
        back = compared(b, other, a, one)
        assert (back.changed, back.largest, back.rows, back.square) == (
            found.changed,
            found.largest,
            found.rows,
            found.square,
        )
        assert back.cosine == found.cosine
        swapped = {"a": "b", "b": "a"}
        assert (back.rounded is None) == (found.rounded is None)
        assert found.rounded is None or back.rounded == (found.rounded[0], swapped[found.rounded[1]])


def test_a_tensor_of_many_chunks_is_one_tensor() -> None:
    """Chunks that are equal are not computed with, and count all the same."""
    random = np.random.default_rng(0)
    a = random.standard_normal((3 * CHUNK // 512, 512)).astype(np.float32)
    b = a.copy()
    b[-1, -1] += 1
    b[5] = 0
    found = compared(a, "F32", b)
    delta = b.astype(float) - a
    assert found.relative == pytest.approx(np.linalg.norm(delta) / np.linalg.norm(a.astype(float)), rel=1e-12)
    assert found.rows == ((5, 5), (len(a) - 1, len(a) - 1)) and found.changed == 513
    turned = compared(a.T, "F32", b.T)  # as they lie: the rows are the columns
    assert turned.square == pytest.approx(found.square) and turned.rows == ((0, 511),)
    one_turned = compared(np.ascontiguousarray(a.T), "F32", b.T)
    assert one_turned.rows == turned.rows and one_turned.square == pytest.approx(found.square)


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_same_bits_and_the_same_values(dtype: str) -> None:
    a = from_float64(np.array([[0.0, 1.5, -2.0]]), dtype)
    same, zeros = a.copy(), from_float64(np.array([[-0.0, 1.5, -2.0]]), dtype)
    assert compared(a, dtype, same) == TensorFigures(elements=3, same_bytes=True, rows_all=1)
    found = compared(a, dtype, zeros)
    assert found.changed == 0 and not found.same_bytes and found.relative == 0 and found.rounded is None


def test_no_elements_and_zeros() -> None:
    assert compared(np.zeros((0, 4), np.float32), "F32", np.zeros((0, 4), np.float32)).same_bytes
    found = compared(np.zeros((2, 2), np.float32), "F32", np.ones((2, 2), np.float32))
    assert found.relative is None and found.cosine is None and found.scale is None and found.largest == 1


def test_what_is_not_finite_is_told_and_left_out() -> None:
    random = np.random.default_rng(2)
    a = random.standard_normal((300, 300)).astype(np.float32)
    a[0, 0], a[1, 1] = math.nan, math.inf
    b = a.copy()
    b[2, 2], b[1, 1], b[3, 3] = math.nan, -math.inf, a[3, 3] + 1
    found = compared(a, "F32", b)
    assert found.not_finite == (2, 3) and found.changed == 3 and found.rows == ((1, 3),)
    assert found.square == pytest.approx(1) and found.largest == pytest.approx(1)
    assert found.rounded is None and found.rank is not None and found.rank.rank == 1
    figures = (found.relative, found.cosine, found.largest, found.square_a)
    assert all(value is not None and math.isfinite(value) for value in figures)
    assert compared(a, "F32", a.copy()).same_bytes
    assert compared(a, "F32", a.astype(np.float64), "F64").changed == 0  # NaN is NaN in another dtype too


@pytest.mark.parametrize("size", [1e-130, 1e-162, 1e-200, 5e-324])
def test_squares_too_small_for_fp64_tell_nothing(size: float) -> None:
    """Of these fp64 holds the squares of 1e-130 alone."""
    random = np.random.default_rng(3)
    a, b = (random.standard_normal((64, 64)) * size for _ in range(2))
    found = compared(a, "F64", b)
    assert found.changed == 64 * 64 - (a == b).sum() > 0
    if size == 1e-130:
        assert found.relative == pytest.approx(np.linalg.norm(b / size - a / size) / np.linalg.norm(a / size))
    else:
        assert (found.relative, found.cosine, found.rank) == (None, None, None)
    one = a.copy()
    one[3, 5] += size
    assert compared(a, "F64", a).relative == 0.0 and compared(a, "F64", one).relative != 0.0


def test_figures_beyond_fp64_are_none() -> None:
    found = compared(np.full((2, 2), 1e200), "F64", np.full((2, 2), -1e200), "F64")
    assert found.changed == 4 and found.relative is None and found.cosine is None and found.scale is None


# --- rounding ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("wide", "narrow"), [("F32", "BF16"), ("F32", "F16"), ("F64", "F32"), ("F64", "F16")])
@pytest.mark.parametrize("kept", [False, True], ids=["stored narrow", "widened again"])
def test_a_cast_is_told_from_a_change(wide: str, narrow: str, kept: bool) -> None:
    random = np.random.default_rng(0)
    a = weight(random, 60, 40, wide)
    b = cast(a, wide, narrow)
    dtype = narrow
    if kept:
        b, dtype = cast(b, narrow, wide), wide
    assert compared(a, wide, b, dtype).rounded == (narrow, "b")
    assert compared(b, dtype, a, wide).rounded == (narrow, "a")
    off = b.copy()
    off[3, 4] = off[3, 5]
    found = compared(a, wide, off, dtype)
    assert found.rounded is None and found.changed >= 2000  # one value that no rounding explains


def test_widening_changes_nothing() -> None:
    a = weight(np.random.default_rng(0), 30, 20, "BF16")
    found = compared(a, "BF16", cast(a, "BF16", "F32"), "F32")
    assert found.changed == 0 and not found.same_bytes and found.rounded is None


# --- rank -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(320, 400), (1000, 100), (40, 500)])
@pytest.mark.parametrize("rank", [1, 2, 8, 24])
def test_an_update_of_low_rank_is_counted(dtype: str, shape: tuple[int, int], rank: int) -> None:
    random = np.random.default_rng(rank)
    a = weight(random, *shape, dtype)
    found = compared(a, dtype, added(a, dtype, low(random, *shape, rank), 0.03)).rank
    assert found is not None and found.rank == rank and not found.more and found.of == min(shape)
    assert found.share is not None and found.share > (0.99 if dtype in NARROW else 0.999999)
    assert found.most is not None and found.most <= rank


@pytest.mark.parametrize("dtype", FLOATS)
def test_training_is_of_high_rank(dtype: str) -> None:
    random = np.random.default_rng(0)
    a = weight(random, 320, 400, dtype)
    found = compared(a, dtype, added(a, dtype, random.standard_normal(a.shape), 0.03)).rank
    assert found is not None and found.more and found.rank == 128 and found.of == 320
    narrow = a[:, :100]
    found = compared(narrow, dtype, added(narrow, dtype, random.standard_normal(narrow.shape), 0.03)).rank
    assert found is not None and found.full and found.rank == 100


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("size", [1e-4, 1e-3, 1e-2])
def test_rounding_never_adds_to_the_rank(dtype: str, size: float) -> None:
    """An update beside rounding may hide in it: fewer directions are told then, not more."""
    random = np.random.default_rng(3)
    for rank in (1, 2, 6):
        a = weight(random, 320, 400, dtype)
        found = compared(a, dtype, added(a, dtype, low(random, 320, 400, rank), size)).rank
        assert found is None or found.rank <= rank


@pytest.mark.parametrize("seed", range(3))
def test_rounding_that_depends_on_the_update(seed: int) -> None:
    """What is left of a rank-1 update after rounding is not independent of it, and stands above what chance makes."""
    random = np.random.default_rng(seed)
    for size in (0.005, 0.01):
        a = weight(random, 768, 768, "BF16")
        found = compared(a, "BF16", added(a, "BF16", low(random, 768, 768, 1), size)).rank
        assert found is not None and found.rank == 1


def test_rounding_on_one_side_alone() -> None:
    """bf16 weights with an update stored as fp32 are known to 24 bits; fp32 ones with a bf16 result are not."""
    random = np.random.default_rng(0)
    a = weight(random, 320, 400, "BF16")
    exact = compared(a, "BF16", added(a, "BF16", low(random, 320, 400, 5), 1e-4, "F32"), "F32").rank
    assert exact is not None and exact.rank == 5 and exact.share is not None and exact.share > 0.99999
    a = weight(random, 320, 400, "F32")
    coarse = compared(a, "F32", added(a, "F32", low(random, 320, 400, 5), 0.03, "BF16"), "BF16").rank
    assert coarse is not None and coarse.rank == 5
    held = cast(added(a, "F32", low(random, 320, 400, 5), 0.03, "BF16"), "BF16", "F32")  # and stored wide
    coarse = compared(a, "F32", held).rank
    assert coarse is not None and coarse.rank == 5


def test_what_a_sketch_holds_is_freed_with_it() -> None:
    """Megabytes a tensor, which must not wait for the collector of cycles."""
    held = [weakref.ref(each) for each in (Sketch(300, 300, "float32"), Projection(np.eye(300, 20), "float32"))]
    assert [each() for each in held] == [None, None]


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("shape", [(40, 300), (300, 40), (320, 400)])
def test_one_changed_row_is_of_rank_one_however_small(dtype: str, shape: tuple[int, int]) -> None:
    a = weight(np.random.default_rng(0), *shape, dtype)
    for elements, bits in ((1, 1), (3, 1), (shape[1], 1), (shape[1], 4)):
        b = a.copy()
        b.view(np.uint16 if a.dtype.itemsize == 2 else np.uint32)[3, :elements] ^= bits
        found = compared(a, dtype, b)
        assert found.rows == ((3, 3),) and found.rank is not None
        assert (found.rank.rank, found.rank.of, found.rank.share, found.rank.more) == (1, min(shape), 1.0, False)


def test_no_rank_where_none_is_asked_for_or_there_is_no_matrix() -> None:
    random = np.random.default_rng(0)
    a = weight(random, 60, 40, "F32")
    assert compared(a, "F32", a * 2 + 1, rank=False).rank is None
    assert compared(a[0], "F32", a[1]).rank is None
    assert compared(a[:1], "F32", a[1:2]).rank is None


def test_a_transposed_matrix_has_the_same_rank() -> None:
    random = np.random.default_rng(0)
    a = weight(random, 320, 400, "F32")
    b = added(a, "F32", low(random, 320, 400, 7), 0.01)
    for x, y in ((a.T, b.T), (np.ascontiguousarray(a.T), b.T)):
        found = compared(x, "F32", y).rank
        assert found is not None and found.rank == 7


# --- multiples and other orders ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("factor", [-3.0, 0.3, 1.5])
def test_a_multiple(dtype: str, factor: float) -> None:
    a = weight(np.random.default_rng(0), 60, 40, dtype)
    b = from_float64(factor * to_float64(a, dtype), dtype)
    found = compared(a, dtype, b)
    assert found.scale == pytest.approx(factor, rel=1e-3 if dtype in NARROW else 1e-7)
    assert found.cosine == pytest.approx(math.copysign(1, factor), abs=1e-5)
    b[0, 0] = b[0, 1] if b[0, 0] != b[0, 1] else b[0, 2]
    assert compared(a, dtype, b).scale is None


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
@pytest.mark.parametrize("turned", [False, True])
def test_another_order(dtype: str, turned: bool) -> None:
    random = np.random.default_rng(0)
    a = weight(random, 40, 30, dtype)
    rows, columns = a[random.permutation(40)], a[:, random.permutation(30)]
    if turned:
        a, rows, columns = a.T, rows.T, columns.T
    names = ("columns", "rows") if turned else ("rows", "columns")
    assert (compared(a, dtype, rows).order, compared(a, dtype, columns).order) == names
    assert compared(a, dtype, rows).rank is None
    rows = rows.copy()
    rows[0, 0], rows[0, 1] = rows[0, 1], rows[0, 0]  # the same sum of squares
    assert compared(a, dtype, rows).order is None
