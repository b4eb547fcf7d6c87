"""A swap of a model of two stacks: carried out on the encoder and on the decoder, each as if it were alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import msgspec

from ..components import ModelSpec
from ..converter.dtypes import Array
from .base import Computed, Model, Moved, Swapped, Tensor, Wide, weakest
from .facts import Weights

_T = TypeVar("_T")
_INSIDE = "encoder."


def of_both(spec: ModelSpec, weights: Weights, change: Callable[[ModelSpec, Weights], Swapped]) -> Swapped:
    """What `change` makes of the decoder, and of the encoder, whose tensors have names of their own. Raises what it
    raises of either.
    """
    assert spec.encoder is not None
    own, inner = change(spec, weights), change(spec.encoder, _Facts(weights, spec.encoder))
    assert own.spec.encoder == spec.encoder and not (own.against or inner.against or own.texts or inner.texts)
    return Swapped(
        spec=msgspec.structs.replace(own.spec, encoder=inner.spec),
        guarantee=weakest((own.guarantee, inner.guarantee)),
        tensors={**own.tensors, **{_INSIDE + name: _inside(how, spec.encoder) for name, how in inner.tensors.items()}},
        summary={**own.summary, "encoder": dict(inner.summary)},
        notes=(*own.notes, *(f"encoder: {note}" for note in inner.notes)),
        promise=own.promise.then(inner.promise),
    )


class _Encoder:
    """The encoder of a model as a model by itself."""

    def __init__(self, whole: Model, spec: ModelSpec) -> None:
        self.whole, self.spec = whole, spec
        self.reference, self.release = whole.reference, whole.release

    def dtype(self, name: str) -> str:
        return self.whole.dtype(_INSIDE + name)

    def tensor(self, name: str) -> tuple[Array, str]:
        return self.whole.tensor(_INSIDE + name)

    def wide(self, name: str) -> Wide:
        return self.whole.wide(_INSIDE + name)


@dataclass(frozen=True)
class _Facts(Weights):
    """What a swap may ask of the encoder's weights."""

    whole: Weights
    spec: ModelSpec

    def filled(self, value: float, *names: str) -> bool:
        return self.whole.filled(value, *(_INSIDE + name for name in names))

    def same(self, one: str, other: str) -> bool:
        return self.whole.same(_INSIDE + one, _INSIDE + other)

    def ask(self, question: Callable[[Model], _T], trained: _T, zeros: _T) -> _T:
        return self.whole.ask(lambda model: question(_Encoder(model, self.spec)), trained, zeros)

    def run(self, question: Callable[[Model], _T]) -> _T:
        return self.whole.run(lambda model: question(_Encoder(model, self.spec)))


def _inside(how: Tensor, spec: ModelSpec) -> Tensor:
    """How a tensor of the encoder is made, of the whole model's."""
    if isinstance(how, Computed):
        make = how.make
        return Computed(lambda model: make(_Encoder(model, spec)))
    if isinstance(how, Moved):
        return Moved(tuple(_INSIDE + name for name in how.names), how.move)
    return replace(how, like=_INSIDE + how.like)
