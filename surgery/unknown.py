"""Arrays of which the shape is known and the values are not, for swaps on trees without weights.

A swap asks of weights whether something is zero, equal or small, to see what it can promise. An `Unknown` answers as
weights after training would: no value is zero, no two are equal, nothing cancels. What was answered so is noted, for
it is an assumption (`Assumptions`). Where the answer is certain, because a tensor was filled with one number or is
another's very values, nothing is noted.

It is a duck array (NEP 13, NEP 18): numpy's functions, called with one, come here. A result that is small, an element
a unit or a head, is a plain array of such generic numbers; a large one stays unknown, so that a tree of any size costs
no memory. A function that is not listed here asks for more than a shape can tell: `NeedsWeights`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin
from numpy.typing import NDArray

from ..errors import SwapRefused

__all__ = ["Assumptions", "NeedsWeights", "Unknown"]

SMALL = 2**18
"""Elements of a result that is made as a plain array; a vector of any model's width has fewer."""


class NeedsWeights(SwapRefused):
    """What a swap asks of the weights cannot be told from their shapes."""


@dataclass
class Assumptions:
    """Whether anything was answered that only weights can tell."""

    made: bool = False

    def note(self) -> None:
        self.made = True


def generic(shape: Sequence[int]) -> NDArray[np.float64]:
    """Numbers of which none is zero and no two are equal."""
    size = math.prod(shape)
    return (1.0 + np.arange(size, dtype=np.float64) / max(size, 1)).reshape(shape)


@dataclass(eq=False)
class Unknown(NDArrayOperatorsMixin):
    """An array of a shape.

    assumptions: where it is noted that an answer hangs on values. constant: the number that every element is, None
    where values differ; of truth values, True or False. tag: two arrays of one tag have the same values.
    """

    shape: tuple[int, ...]
    assumptions: Assumptions
    constant: float | bool | None = None
    tag: Hashable = field(default_factory=object)

    # --- what an array has ---

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(np.bool_ if isinstance(self.constant, bool) else np.float64)

    @property
    def T(self) -> Unknown:  # noqa: N802 (numpy's name)
        return self._like(self.shape[::-1], "T")

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        raise NeedsWeights("this swap computes with the weights before it says what comes out")

    def __bool__(self) -> bool:
        if self.size != 1:
            raise ValueError("the truth of an array of several elements is ambiguous")
        return bool(self.any())

    def _like(self, shape: Sequence[int], *how: Hashable) -> Unknown:
        """These values in another shape, or some of them: `how` tells which."""
        return Unknown(tuple(shape), self.assumptions, self.constant, (self.tag, *how))

    def _fresh(self, shape: Sequence[int]) -> Any:
        """Generic numbers: a plain array where it is small."""
        if math.prod(shape) <= SMALL:
            self.assumptions.note()
            return generic(shape) if len(shape) else np.float64(1.0)
        return Unknown(tuple(shape), self.assumptions)

    def _filled(self, shape: Sequence[int], value: float | bool) -> Any:
        if math.prod(shape) <= SMALL:
            return np.full(tuple(shape), value)[()]
        return Unknown(tuple(shape), self.assumptions, value, ("constant", value))

    # --- elements ---

    def __getitem__(self, key: Any) -> Unknown:
        # The shape is that of an array without memory: numpy's own rules of indexing.
        found = _shaped(self.shape)[key] if _is_view(key) else None
        shape = found.shape if found is not None else _indexed(self.shape, key)
        return self._like(shape, "item", repr(key)) if found is not None else self._like(shape, object())

    def __setitem__(self, key: Any, value: Any) -> None:
        alike = isinstance(self.constant, float) and np.ndim(value) == 0 and float(value) == self.constant
        if not alike:
            self.constant, self.tag = None, object()

    def reshape(self, *shape: Any) -> Unknown:
        wanted = shape[0] if len(shape) == 1 and not isinstance(shape[0], int | np.integer) else shape
        known = math.prod(int(each) for each in wanted if each != -1)
        full = tuple(self.size // known if each == -1 else int(each) for each in wanted)
        if math.prod(full) != self.size:
            raise ValueError(f"{self.shape} cannot be {full}")
        return self._like(full, "reshape", full)

    def repeat(self, count: int, axis: int) -> Unknown:
        shape = [size * count if place == axis % self.ndim else size for place, size in enumerate(self.shape)]
        return self._like(shape, "repeat", count, axis)

    def copy(self) -> Unknown:
        return self._like(self.shape)

    # --- what becomes of many elements ---

    def _reduced(self, axis: Any, keepdims: bool) -> tuple[int, ...]:
        axes = range(self.ndim) if axis is None else [axis] if isinstance(axis, int) else axis
        gone = {each % self.ndim for each in axes}
        return tuple(1 if i in gone else n for i, n in enumerate(self.shape) if keepdims or i not in gone)

    def any(self, axis: Any = None, keepdims: bool = False) -> Any:
        return self._truth(axis, keepdims)

    def all(self, axis: Any = None, keepdims: bool = False) -> Any:
        return self._truth(axis, keepdims)

    def _truth(self, axis: Any, keepdims: bool) -> Any:
        if self.constant is None:
            self.assumptions.note()
        value = True if self.constant is None else bool(self.constant)
        return self._filled(self._reduced(axis, keepdims), value)

    def sum(self, axis: Any = None, keepdims: bool = False) -> Any:
        shape = self._reduced(axis, keepdims)
        number = self.size // max(math.prod(shape), 1)
        return self._of_many(shape, None if self.constant is None else float(self.constant) * number, keepdims)

    def mean(self, axis: Any = None, keepdims: bool = False) -> Any:
        return self._of_many(self._reduced(axis, keepdims), self.constant, keepdims)

    def max(self, axis: Any = None, keepdims: bool = False) -> Any:
        return self._of_many(self._reduced(axis, keepdims), self.constant, keepdims)

    def min(self, axis: Any = None, keepdims: bool = False) -> Any:
        return self._of_many(self._reduced(axis, keepdims), self.constant, keepdims)

    def _of_many(self, shape: Sequence[int], constant: float | bool | None, keepdims: bool) -> Any:
        if keepdims:  # to be spread over an array as large as this
            tag = object() if constant is None else ("constant", constant)
            return Unknown(tuple(shape), self.assumptions, constant, tag)
        return self._fresh(shape) if constant is None else self._filled(shape, constant)

    # --- numpy's functions ---

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **given: Any) -> Any:
        if method != "__call__":
            raise NeedsWeights(f"this swap computes {ufunc.__name__}.{method} of the weights")
        if ufunc is np.matmul:
            return self._fresh(_product(np.shape(inputs[0]), np.shape(inputs[1])))
        constants = [_constant(each) for each in inputs]
        shape = np.broadcast_shapes(*map(np.shape, inputs))
        if all(each is not None for each in constants):
            with np.errstate(all="ignore"):
                return self._filled(shape, ufunc(*constants).item())
        if ufunc in (np.equal, np.not_equal):
            same = len(inputs) == 2 and _tag(inputs[0]) == _tag(inputs[1]) is not None
            if not same:
                self.assumptions.note()
            return self._filled(shape, same is (ufunc is np.equal))
        if ufunc is np.multiply and 0.0 in constants:
            return self._filled(shape, 0.0)
        if ufunc in ARITHMETIC:
            return Unknown(shape, self.assumptions) if math.prod(shape) > SMALL else self._fresh(shape)
        raise NeedsWeights(f"this swap computes {ufunc.__name__} of the weights")

    def __array_function__(self, function: Callable[..., Any], _types: Any, args: Any, given: Any) -> Any:
        if function not in FUNCTIONS:
            raise NeedsWeights(f"this swap computes {function.__name__} of the weights")
        return FUNCTIONS[function](*args, **given)


ARITHMETIC = {
    *(np.add, np.subtract, np.multiply, np.divide, np.power, np.square, np.sqrt, np.absolute, np.negative),
    *(np.maximum, np.minimum),
}
"""Elementwise functions of which generic numbers are generic numbers."""


def _shaped(shape: Sequence[int]) -> NDArray[np.bool_]:
    """An array of a shape and no memory."""
    return np.broadcast_to(np.zeros((), np.bool_), tuple(shape))


def _is_view(key: Any) -> bool:
    """Whether a key names a part that numpy would not copy."""
    parts = key if isinstance(key, tuple) else (key,)
    return all(each is None or each is Ellipsis or isinstance(each, int | np.integer | slice) for each in parts)


def _indexed(shape: Sequence[int], key: Any) -> tuple[int, ...]:
    """The shape of a part that lists of indices name, without the elements: along axes without a list one is enough."""
    parts = key if isinstance(key, tuple) else (key,)
    if sum(not _is_view(each) for each in parts) != 1 or any(each is None or each is Ellipsis for each in parts):
        raise NeedsWeights("this swap picks single elements of the weights")
    (place,) = (i for i, each in enumerate(parts) if not _is_view(each))
    index = np.asarray(parts[place])
    if index.ndim != 1 or any(isinstance(each, int | np.integer) for each in parts):
        raise NeedsWeights("this swap picks single elements of the weights")
    count = int(index.sum()) if index.dtype == np.bool_ else len(index)
    sliced = [len(range(n)[each]) if isinstance(each, slice) else n for n, each in zip(shape, parts, strict=False)]
    sliced[place] = count
    return (*sliced, *shape[len(parts) :])


def _product(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...]:
    """The shape of a matrix product of vectors and matrices."""
    if len(a) > 2 or len(b) > 2 or not a or not b or a[-1] != b[0]:
        raise NeedsWeights("this swap multiplies the weights before it says what comes out")
    return (*a[:-1], *b[1:])


def _constant(value: Any) -> float | bool | None:
    """The number that every element of something is."""
    if isinstance(value, Unknown):
        return value.constant
    array = np.asarray(value)
    if array.ndim and (array.size < 2 or not (array == array.flat[0]).all()):
        return None
    found: float | bool = array.flat[0].item()
    return found


def _tag(value: Any) -> Hashable | None:
    return value.tag if isinstance(value, Unknown) else None


def _assumed(*values: Any) -> Assumptions:
    return next(each.assumptions for each in values if isinstance(each, Unknown))


def _array_equal(a: Any, b: Any, **_: Any) -> bool:
    if np.shape(a) != np.shape(b):
        return False
    return bool((a == b).all())


def _concatenate(arrays: Sequence[Any], axis: int = 0, **_: Any) -> Any:
    shape = list(np.shape(arrays[0]))
    shape[axis] = sum(np.shape(each)[axis] for each in arrays)
    constants = {_constant(each) for each in arrays}
    (constant,) = constants if len(constants) == 1 else (None,)
    return Unknown(tuple(shape), _assumed(*arrays), constant)


def _moveaxis(a: Unknown, source: int, destination: int) -> Unknown:
    shape = np.moveaxis(_shaped(a.shape), source, destination).shape
    return a._like(shape, "moveaxis", source, destination)


def _take(a: Any, indices: Any, axis: int | None = None, **_: Any) -> Unknown:
    if not isinstance(a, Unknown) or axis is None:
        raise NeedsWeights("this swap picks single elements of the weights")
    shape = list(a.shape)
    shape[axis] = len(indices)
    return a._like(shape, object())


def _repeat(a: Unknown, repeats: int, axis: int) -> Unknown:
    return a.repeat(repeats, axis)


def _norm(x: Unknown, axis: int | None = None, **_: Any) -> Any:
    return abs(x).sum(axis=axis)


def _einsum(pattern: str, *operands: Any, **_: Any) -> Unknown:
    inputs, _arrow, output = pattern.partition("->")
    sizes = {
        letter: size
        for names, operand in zip(inputs.split(","), operands, strict=True)
        for letter, size in zip(names, np.shape(operand), strict=True)
    }
    return Unknown(tuple(sizes[letter] for letter in output), _assumed(*operands))


FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    np.any: Unknown.any,
    np.all: Unknown.all,
    np.sum: Unknown.sum,
    np.mean: Unknown.mean,
    np.max: Unknown.max,
    np.min: Unknown.min,
    np.ptp: lambda a: a.max() if a.constant is None else 0.0,
    np.shape: lambda a: a.shape,
    np.ndim: lambda a: a.ndim,
    np.array_equal: _array_equal,
    np.concatenate: _concatenate,
    np.moveaxis: _moveaxis,
    np.take: _take,
    np.repeat: _repeat,
    np.linalg.norm: _norm,
    np.einsum: _einsum,
}
