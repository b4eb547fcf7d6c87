"""The definition of a swap: a change from one model to another, with instructions for computing every new tensor.

A swap computes no tensor itself. The tensors are computed one at a time when the output is written. A *computed* tensor
is computed in fp64 and rounded once, when it is stored. A *moved* tensor has only copied, repeated or zero-padded
values, and keeps its dtype and every bit. The model after a swap is again a model with weights, so several swaps run
without a file between them.

A swap declares its guarantee:

- exact: the new model computes the same function up to rounding; this is measured from the written files
- approximate: the new model computes nearly the same function; the difference is measured and reported
- retrained: the new model is useless until it is trained
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
ORDER: tuple[Guarantee, ...] = get_args(Guarantee)  # the strongest first
Wide = NDArray[np.float64]
_CACHED_BYTES = 64 * 2**20
"""The size in bytes of a step's cache of computed tensors. The next step reads most of these more than once."""


_T = TypeVar("_T")


def weakest(guarantees: Iterable[Guarantee]) -> Guarantee:
    """Return the weakest of several guarantees. This is the guarantee of the swaps run one after the other."""
    return max(guarantees, key=ORDER.index, default="exact")


# --- a model with weights ---------------------------------------------------------------------------------------------


class Model(Tree, Protocol):
    """A component tree with weights, which a swap can read. `reference` is the model's name in messages."""

    reference: str

    def dtype(self, name: str) -> str:
        """Return the dtype in which a tensor is stored, or will be stored if it is still to be written."""
        ...

    def wide(self, name: str) -> Wide:
        """Return a tensor in fp64, before any rounding for storage. Raises InvalidInput for NaN or infinity."""
        ...


class StoredModel:
    """A model whose tensors come from an opened checkpoint."""

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
            raise InvalidInput(f"{self.reference}: {name} has {bad:,} values that are NaN or infinite")
        return values


class Read:
    """The answers to the questions of `facts.WeightFacts`, found by reading the weights of a model."""

    def __init__(self, model: Model) -> None:
        self.model = model

    @cached_property
    def _names(self) -> set[str]:
        return {parameter.name for parameter in self.model.spec.parameters()}

    def filled(self, value: float, *names: str) -> bool:
        present = [name for name in names if name in self._names]
        return self.ask(lambda model: all(bool((model.wide(name) == value).all()) for name in present), False, True)

    def same(self, first: str, second: str) -> bool:
        return self.ask(lambda model: not any(differing(model, first, second)), False, True)

    def zero(self, *names: str) -> bool:
        return self.filled(0.0, *names)

    def ask(self, question: Callable[[Model], _T], trained: _T, zeros: _T) -> _T:  # noqa: ARG002
        try:
            return question(self.model)
        finally:
            self.model.release()

    def run(self, question: Callable[[Model], _T]) -> _T:
        return question(self.model)


_ROWS = 4096  # the number of rows of two tensors that are compared at once


def differing(model: Model, first: str, second: str) -> Iterator[int]:
    """Compare two tensors in blocks of rows. Yield for every block the number of rows that differ.

    Tensors of the same dtype are compared as they are stored. Computed tensors are compared in fp64, before rounding.
    """
    computed = isinstance(model, SwappedModel) and (model.computed(first) or model.computed(second))
    stored = model.dtype(first) == model.dtype(second) and not computed
    a, b = (model.tensor(name)[0] if stored else model.wide(name) for name in (first, second))
    if a.shape != b.shape:
        yield max(len(a), len(b))
        return
    for rows in (slice(start, start + _ROWS) for start in range(0, len(a), _ROWS)):
        yield int((a[rows] != b[rows]).reshape(len(a[rows]), -1).any(axis=1).sum())


def origin_of(model: Model) -> tuple[Origin, bool]:
    """Return the origin of the checkpoint that a model comes from, and whether the checkpoint has a folder of its own.

    Files in the same folder as a GGUF file, such as a tokenizer, may belong to another model. The second value is then
    False.
    """
    while isinstance(model, SwappedModel):
        model = model.before
    if not isinstance(model, StoredModel):
        return Origin(), True
    return model.checkpoint.origin, model.checkpoint.format in ("hf", "local", "dcp")


# --- the result of a swap ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Computed:
    """A tensor of the new model that the function `make` computes in fp64 from the old model."""

    make: Callable[[Model], Wide]


@dataclass(frozen=True)
class Moved:
    """A tensor of the new model whose values are copied from tensors of the old model."""

    sources: tuple[str, ...] | str  # the names of the old tensors
    move: Callable[..., Array] | None = None
    """A function that gets the arrays of the old tensors, converted to one dtype, and returns the new array.

    With None, the tensor only gets another name.
    """

    @property
    def names(self) -> tuple[str, ...]:
        return (self.sources,) if isinstance(self.sources, str) else self.sources


@dataclass(frozen=True)
class Filled:
    """A new tensor whose values are exact in every floating point dtype, such as 0, 1, -1 or ½."""

    shape: tuple[int, ...]
    value: float | Callable[[], Wide]  # the number that fills the tensor, or a function that returns the array
    like: str  # the name of the old tensor whose dtype the new tensor gets

    def wide(self) -> Wide:
        """Return the tensor in fp64."""
        return self.value() if callable(self.value) else np.full(self.shape, self.value)


Tensor = Computed | Moved | Filled


@dataclass(frozen=True)
class Promise:
    """The tokens and sequence lengths for which the guarantee of a swap holds. By default, it holds for all."""

    tokens: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # old and new ids of the kept tokens; None: all
    length: int | None = None  # the largest length of a sequence in tokens; None: any

    def then(self, later: Promise) -> Promise:
        """Return the tokens and sequence lengths for which the guarantee holds after this swap and a later one."""
        lengths = [length for length in (self.length, later.length) if length is not None]
        tokens = self.tokens or later.tokens
        if self.tokens is not None and later.tokens is not None:
            renamed = dict(zip(*later.tokens, strict=True))
            pairs = [(old, renamed[new]) for old, new in zip(*self.tokens, strict=True) if new in renamed]
            tokens = (tuple(old for old, _ in pairs), tuple(new for _, new in pairs))
        return Promise(tokens, min(lengths, default=None))


@dataclass(frozen=True)
class Swapped:
    """The result of a swap: the new model's components, and instructions for computing its tensors.

    A tensor that is not in `tensors` is copied from the tensor of the same name in the old model.
    """

    spec: ModelSpec
    guarantee: Guarantee
    tensors: Mapping[str, Tensor]
    summary: Mapping[str, Any] = field(default_factory=dict)  # what the output's manifest.json says about the swap
    notes: tuple[str, ...] = ()  # messages for the user
    promise: Promise = Promise()
    texts: Mapping[str, bytes | None] = field(default_factory=dict)  # changed tokenizer files by name; None removes one
    against: Callable[[Model], Model] | None = None
    """A function of the old model that returns the model with which the new model is compared. None: the old model.

    If a LoRA adapter was merged, for example, the function returns the base model with the adapter not merged.
    """


class SwappedModel:
    """The model after a swap. Each of its tensors is computed from the old model when it is requested.

    `stored` is the dtype in which computed tensors are stored.
    """

    def __init__(self, before: Model, swapped: Swapped, stored: str = "F64") -> None:
        self.before, self.swapped, self.spec, self.stored = before, swapped, swapped.spec, stored
        self.reference, self.release = before.reference, before.release
        self._cache: OrderedDict[str, Wide] = OrderedDict()
        known = {parameter.name for parameter in before.spec.parameters()}
        missing = [p.name for p in self.spec.parameters() if p.name not in swapped.tensors and p.name not in known]
        if missing:
            raise AssertionError(f"nothing says how these are made: {missing[:4]}")
        self._shapes = {parameter.name: parameter.shape for parameter in self.spec.parameters()}

    def _how(self, name: str) -> Tensor:
        return self.swapped.tensors.get(name) or Moved(name)

    def computed(self, name: str) -> bool:
        """Return whether this swap or an earlier one computes the tensor. Otherwise its values are only copied."""
        how = self._how(name)
        if isinstance(how, Moved):
            return isinstance(self.before, SwappedModel) and any(self.before.computed(source) for source in how.names)
        return isinstance(how, Computed)

    def dtype(self, name: str) -> str:
        how = self._how(name)
        if isinstance(how, Computed):
            return self.stored
        names = how.names if isinstance(how, Moved) else (how.like,)
        return widest([self.before.dtype(source) for source in names])

    def tensor(self, name: str) -> tuple[Array, str]:
        how, dtype = self._how(name), self.dtype(name)
        if isinstance(how, Computed):
            return from_float64(self.wide(name), dtype), dtype
        if isinstance(how, Filled):
            return from_float64(how.wide(), dtype), dtype
        arrays = [cast(*self.before.tensor(source), dtype) for source in how.names]
        return self._checked(name, arrays[0] if how.move is None else how.move(*arrays)), dtype

    def wide(self, name: str) -> Wide:
        if name in self._cache:
            self._cache.move_to_end(name)
            return self._cache[name]
        how = self._how(name)
        if isinstance(how, Moved):
            arrays = [self.before.wide(source) for source in how.names]
            return self._checked(name, arrays[0] if how.move is None else how.move(*arrays))
        if isinstance(how, Filled):
            return how.wide()
        values = np.ascontiguousarray(self._checked(name, how.make(self.before)), dtype=np.float64)
        bad = int((~np.isfinite(values)).sum())
        if bad:
            raise InvalidInput(
                f"{self.reference}: after the swap, {name} would have {bad:,} values that are NaN or infinite"
            )
        values.flags.writeable = False
        self._cache[name] = values
        while len(self._cache) > 1 and sum(array.nbytes for array in self._cache.values()) > _CACHED_BYTES:
            self._cache.popitem(last=False)
        return values

    def _checked(self, name: str, array: Array) -> Array:
        if array.shape != self._shapes[name]:
            raise GptkitError(
                f"the swap gives {name} the shape {array.shape}, but the new model needs {self._shapes[name]}"
            )
        return array


class Exactly:
    """A view of a model that returns all tensors in fp64. Computed tensors are not rounded to their stored dtype."""

    def __init__(self, model: Model) -> None:
        self.model, self.spec, self.release = model, model.spec, model.release

    def tensor(self, name: str) -> tuple[Array, str]:
        return np.array(self.model.wide(name)), "F64"


# --- entries of tensors along an axis ---------------------------------------------------------------------------------


Index = NDArray[np.int64]  # the old entries in the order of the new ones, or -1 for zero


def gather(array: Array, index: Index, axis: int) -> Array:
    """Return the entries of an array at the indices `index` along an axis, with zeros where the index is -1."""
    entries = np.take(array, np.maximum(index, 0), axis=axis)
    entries[(slice(None),) * axis + (index < 0,)] = 0
    return entries


def taken(name: str, index: Index, axis: int = 0) -> Moved:
    """Return a tensor with the entries of the tensor `name` at the indices `index` along an axis. -1 gives zeros."""
    return Moved(name, lambda array: gather(array, index, axis))


def scaled(name: str, index: Index, factor: float, axis: int = 0) -> Tensor:
    """Return a tensor that has the entries of the tensor `name` at the indices `index`, multiplied by a factor.

    If the factor is 1, the values are only copied, and keep every bit.
    """
    if factor == 1.0:
        return taken(name, index, axis)
    return Computed(lambda model: gather(model.wide(name), index, axis) * factor)


def padded(old: int, new: int, repeat: bool = False) -> Index:
    """Return the indices that extend an axis from `old` to `new` entries.

    The additional entries are zeros (-1). With `repeat`, they repeat the old entries from the first one on.
    """
    index = np.arange(new)
    return index % old if repeat else np.where(index < old, index, -1)


def by_head(heads: Index, within: Index, size: int) -> Index:
    """Return the indices (for `gather`) that rearrange an axis on which heads are stored one after the other.

    Args:
        heads: For each new head, the number of the old head from which it is copied, or -1 for zeros.
        within: For each element of a new head, the number of the old element from which it is copied, or -1 for zeros.
        size: The number of elements of an old head.
    """
    index = heads[:, None] * size + within[None, :]
    return np.where((heads[:, None] < 0) | (within[None, :] < 0), -1, index).reshape(-1)


@dataclass(frozen=True)
class Measurement:
    """A comparison of the logits after a swap with the logits before it.

    `maximum` and `relative` have a figure for every dtype in which both models were run. `kl` and `top1` come from the
    widest dtype, and the figures on the text from fp32.
    """

    maximum: dict[str, float]  # the largest absolute difference of two logits, by dtype
    relative: dict[str, float]  # this difference divided by the largest logit, by dtype
    kl: float  # the mean KL divergence in nats per token
    top1: float  # the share of positions with the same most likely token
    positions: int  # the number of positions compared
    perplexity: tuple[float, float] | None = None  # on the text, before and after
    kl_text: float | None = None  # as `kl`, on the text
    top1_text: float | None = None  # as `top1`, on the text
    text_positions: int = 0  # the number of positions compared on the text
    notes: tuple[str, ...] = ()  # test inputs that were not measured, and why

    def as_json(self) -> dict[str, Any]:
        figures: dict[str, Any] = {
            name: getattr(self, name) for name in ("maximum", "relative", "kl", "top1", "positions")
        }
        if self.perplexity is not None:
            perplexity = dict(zip(("before", "after"), self.perplexity, strict=True))
            rest = {"kl": self.kl_text, "top1": self.top1_text, "positions": self.text_positions}
            figures["text"] = {"perplexity": perplexity, **rest}
        return figures | ({"notes": list(self.notes)} if self.notes else {})
