"""What a swap is: from a tree with weights to a tree with weights, and for each new tensor how it is made of old ones.

Nothing is computed before the result is written, one tensor at a time. A tensor that is *computed* is computed in fp64
and rounded once, when it is stored; one whose values are only *moved* (copied, repeated, padded with zeros) keeps its
dtype and every bit. A tree after a swap is again a tree with weights, so swaps chain without a file between them.

A swap declares what it guarantees:

exact        the same function; what is left is rounding, and is measured from the files that were written
approximate  the best closed form there is; the damage is measured and reported
retrained    useless before training
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Protocol, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from ..components import ModelSpec
from ..converter.checkpoint import Checkpoint
from ..converter.dtypes import Array, cast, from_float64, to_float64, widest
from ..converter.tree import Origin
from ..converter.weights import Tree
from ..errors import GptkitError, InvalidInput

Guarantee = Literal["exact", "approximate", "retrained"]
ORDER: tuple[Guarantee, ...] = get_args(Guarantee)  # the best first
Wide = NDArray[np.float64]
_KEPT_BYTES = 64 * 2**20
"""Computed tensors that a step in the middle of a chain remembers: the next one reads most of them more than once."""


_T = TypeVar("_T")


def weakest(guarantees: Iterable[Guarantee]) -> Guarantee:
    """What a chain of swaps guarantees."""
    return max(guarantees, key=ORDER.index, default="exact")


# --- a tree with weights ----------------------------------------------------------------------------------------------


class Model(Tree, Protocol):
    """A tree whose tensors swaps are made of. reference: what messages call it."""

    reference: str

    def dtype(self, name: str) -> str:
        """The dtype that a tensor is stored in, or would be."""
        ...

    def wide(self, name: str) -> Wide:
        """In fp64, before any rounding for storage. Raises InvalidInput where it holds NaN or infinity."""
        ...


class Stored:
    """The tensors of an opened checkpoint."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint, self.spec, self.reference = checkpoint, checkpoint.spec, checkpoint.reference
        self._dtypes = checkpoint.shared_dtypes()

    def dtype(self, name: str) -> str:
        return self._dtypes[name]

    def tensor(self, name: str) -> tuple[Array, str]:
        return self.checkpoint.tensor(name)

    def release(self) -> None:
        self.checkpoint.release()

    def wide(self, name: str) -> Wide:
        values = to_float64(*self.tensor(name))
        bad = int((~np.isfinite(values)).sum())
        if bad:
            raise InvalidInput(f"{self.reference}: {name} has {bad:,} values that are not finite")
        return values


class Read:
    """The facts about a tree whose weights are at hand: `facts.Weights`, by reading them."""

    def __init__(self, model: Model) -> None:
        self.model = model

    @cached_property
    def _names(self) -> set[str]:
        return {parameter.name for parameter in self.model.spec.parameters()}

    def filled(self, value: float, *names: str) -> bool:
        there = [name for name in names if name in self._names]
        return self.ask(lambda model: all(bool((model.wide(name) == value).all()) for name in there), False, True)

    def same(self, one: str, other: str) -> bool:
        return self.ask(lambda model: not any(differing(model, one, other)), False, True)

    def zero(self, *names: str) -> bool:
        return self.filled(0.0, *names)

    def ask(self, question: Callable[[Model], _T], trained: _T, zeros: _T) -> _T:  # noqa: ARG002
        try:
            return question(self.model)
        finally:
            self.model.release()

    def run(self, question: Callable[[Model], _T]) -> _T:
        return question(self.model)


_ROWS = 4096  # rows of two tensors that are compared at once


def differing(model: Model, one: str, other: str) -> Iterator[int]:
    """In how many rows two tensors differ in value, some rows after the other; by their stored bits where both are
    stored alike. What an earlier step computes is compared before it is rounded for storage.
    """
    computed = isinstance(model, SwappedModel) and (model.computed(one) or model.computed(other))
    stored = model.dtype(one) == model.dtype(other) and not computed
    a, b = (model.tensor(name)[0] if stored else model.wide(name) for name in (one, other))
    if a.shape != b.shape:
        yield max(len(a), len(b))
        return
    for rows in (slice(start, start + _ROWS) for start in range(0, len(a), _ROWS)):
        yield int((a[rows] != b[rows]).reshape(len(a[rows]), -1).any(axis=1).sum())


def origin_of(model: Model) -> tuple[Origin, bool]:
    """Where a tree came from, and whether the files beside it are its own (those beside a GGUF may be anybody's)."""
    while isinstance(model, SwappedModel):
        model = model.before
    if not isinstance(model, Stored):
        return Origin(), True
    return model.checkpoint.origin, model.checkpoint.format in ("hf", "local", "dcp")


# --- what a swap says -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Computed:
    """A tensor that is computed in fp64 from the tensors of the old tree."""

    make: Callable[[Model], Wide]


@dataclass(frozen=True)
class Moved:
    """A tensor whose values are those of old ones, moved: `move` gets their arrays in a common carrier dtype, in which
    a zero is 0, and gives the new one. Without `move` it is the old tensor under another name.
    """

    sources: tuple[str, ...] | str
    move: Callable[..., Array] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return (self.sources,) if isinstance(self.sources, str) else self.sources


@dataclass(frozen=True)
class Filled:
    """A new tensor of values that every floating point dtype has (0, 1, -1, ½), stored as the tensor `like` is.

    `value` is one number, or a function that makes all of them.
    """

    shape: tuple[int, ...]
    value: float | Callable[[], Wide]
    like: str

    def wide(self) -> Wide:
        """The values."""
        return self.value() if callable(self.value) else np.full(self.shape, self.value)


Tensor = Computed | Moved | Filled


@dataclass(frozen=True)
class Promise:
    """What of the logits a swap says something about, where that is not all of them.

    tokens: (ids in the old vocabulary, the same tokens' ids in the new one), where not all are kept as they were.
    length: only sequences of up to this many tokens.
    """

    tokens: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    length: int | None = None

    def then(self, later: Promise) -> Promise:
        """The promise of one swap and another after it."""
        lengths = [length for length in (self.length, later.length) if length is not None]
        tokens = self.tokens or later.tokens
        if self.tokens is not None and later.tokens is not None:
            renamed = dict(zip(*later.tokens, strict=True))
            kept = [(old, renamed[new]) for old, new in zip(*self.tokens, strict=True) if new in renamed]
            tokens = (tuple(old for old, _ in kept), tuple(new for _, new in kept))
        return Promise(tokens, min(lengths, default=None))


@dataclass(frozen=True)
class Swapped:
    """A tree and how its tensors are made; names that `tensors` does not have are copied under their own.

    summary: what was done, for the record that the output carries, JSON values. notes: what a person should know.
    texts: files of the tokenizer that change with it, by name; None removes one. against: of the tree before, the tree
    that the new one equals, where that is another (a base model with its adapter, say).
    """

    spec: ModelSpec
    guarantee: Guarantee
    tensors: Mapping[str, Tensor]
    summary: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    promise: Promise = Promise()
    texts: Mapping[str, bytes | None] = field(default_factory=dict)
    against: Callable[[Model], Model] | None = None


class SwappedModel:
    """The tree after a swap, its tensors made of the tree's before when they are asked for.

    `stored` is the dtype that computed tensors are stored in.
    """

    def __init__(self, before: Model, swapped: Swapped, stored: str = "F64") -> None:
        self.before, self.swapped, self.spec, self.stored = before, swapped, swapped.spec, stored
        self.reference, self.release = before.reference, before.release
        self._made: OrderedDict[str, Wide] = OrderedDict()
        known = {parameter.name for parameter in before.spec.parameters()}
        lost = [p.name for p in self.spec.parameters() if p.name not in swapped.tensors and p.name not in known]
        if lost:
            raise AssertionError(f"nothing says how these are made: {lost[:4]}")
        self._shapes = {parameter.name: parameter.shape for parameter in self.spec.parameters()}

    def _how(self, name: str) -> Tensor:
        return self.swapped.tensors.get(name) or Moved(name)

    def computed(self, name: str) -> bool:
        """Whether this swap, or one before it, computes the tensor rather than moves it."""
        how = self._how(name)
        if isinstance(how, Moved):
            return isinstance(self.before, SwappedModel) and any(self.before.computed(each) for each in how.names)
        return isinstance(how, Computed)

    def dtype(self, name: str) -> str:
        how = self._how(name)
        if isinstance(how, Computed):
            return self.stored
        names = how.names if isinstance(how, Moved) else (how.like,)
        return widest([self.before.dtype(each) for each in names])

    def tensor(self, name: str) -> tuple[Array, str]:
        how, dtype = self._how(name), self.dtype(name)
        if isinstance(how, Computed):
            return from_float64(self.wide(name), dtype), dtype
        if isinstance(how, Filled):
            return from_float64(how.wide(), dtype), dtype
        arrays = [cast(*self.before.tensor(each), dtype) for each in how.names]
        return self._checked(name, arrays[0] if how.move is None else how.move(*arrays)), dtype

    def wide(self, name: str) -> Wide:
        if name in self._made:
            self._made.move_to_end(name)
            return self._made[name]
        how = self._how(name)
        if isinstance(how, Moved):
            arrays = [self.before.wide(each) for each in how.names]
            return self._checked(name, arrays[0] if how.move is None else how.move(*arrays))
        if isinstance(how, Filled):
            return how.wide()
        values = np.ascontiguousarray(self._checked(name, how.make(self.before)), dtype=np.float64)
        bad = int((~np.isfinite(values)).sum())
        if bad:
            raise InvalidInput(
                f"{self.reference}: after the swap, {name} would have {bad:,} values that are not finite"
            )
        values.flags.writeable = False
        self._made[name] = values
        while len(self._made) > 1 and sum(each.nbytes for each in self._made.values()) > _KEPT_BYTES:
            self._made.popitem(last=False)
        return values

    def _checked(self, name: str, array: Array) -> Array:
        if array.shape != self._shapes[name]:
            raise GptkitError(
                f"the swap gives {name} the shape {array.shape}, but the new model needs {self._shapes[name]}"
            )
        return array


class Exactly:
    """A tree whose computed tensors are read as they were computed, in fp64, before any rounding for storage."""

    def __init__(self, model: Model) -> None:
        self.model, self.spec, self.release = model, model.spec, model.release

    def tensor(self, name: str) -> tuple[Array, str]:
        return np.array(self.model.wide(name)), "F64"


# --- entries of tensors along an axis ---------------------------------------------------------------------------------


Index = NDArray[np.int64]  # for each new entry the old one that it takes, or -1 for zero


def gather(array: Array, index: Index, axis: int) -> Array:
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
    """The entries of heads of `size` side by side: for each new head the old one, and `within` it (-1: zero)."""
    index = heads[:, None] * size + within[None, :]
    return np.where((heads[:, None] < 0) | (within[None, :] < 0), -1, index).reshape(-1)
