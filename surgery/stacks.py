"""Run a swap on a model with an encoder and a decoder, as if they were two models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import msgspec

from ..components import ModelSpec
from ..converter.dtypes import Array
from .base import Computed, Model, Moved, Swapped, Tensor, Wide, weakest
from .facts import WeightFacts

_T = TypeVar("_T")
_INSIDE = "encoder."


def of_both(spec: ModelSpec, weights: WeightFacts, change: Callable[[ModelSpec, WeightFacts], Swapped]) -> Swapped:
    """Run a swap on the decoder and on the encoder of a model. Return both results as the result of one swap.

    `change` runs the swap on one of the two, with answers to questions about its weights.
    """
    assert spec.encoder is not None
    decoder, encoder = change(spec, weights), change(spec.encoder, _Facts(weights, spec.encoder))
    assert decoder.spec.encoder == spec.encoder and not (
        decoder.against or encoder.against or decoder.texts or encoder.texts
    )
    return Swapped(
        spec=msgspec.structs.replace(decoder.spec, encoder=encoder.spec),
        guarantee=weakest((decoder.guarantee, encoder.guarantee)),
        tensors={
            **decoder.tensors,
            **{_INSIDE + name: _inside(how, spec.encoder) for name, how in encoder.tensors.items()},
        },
        summary={**decoder.summary, "encoder": dict(encoder.summary)},
        notes=(*decoder.notes, *(f"encoder: {note}" for note in encoder.notes)),
        promise=decoder.promise.then(encoder.promise),
    )


class _Encoder:
    """The encoder of a model as a model of its own. Its tensor names have no prefix "encoder.".

    `whole` is the model with encoder and decoder.
    """

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
class _Facts(WeightFacts):
    """The answers to questions about the encoder's weights."""

    whole: WeightFacts  # the answers for the model with encoder and decoder
    spec: ModelSpec  # the encoder

    def filled(self, value: float, *names: str) -> bool:
        return self.whole.filled(value, *(_INSIDE + name for name in names))

    def same(self, first: str, second: str) -> bool:
        return self.whole.same(_INSIDE + first, _INSIDE + second)

    def ask(self, question: Callable[[Model], _T], trained: _T, zeros: _T) -> _T:
        return self.whole.ask(lambda model: question(_Encoder(model, self.spec)), trained, zeros)

    def run(self, question: Callable[[Model], _T]) -> _T:
        return self.whole.run(lambda model: question(_Encoder(model, self.spec)))


def _inside(how: Tensor, spec: ModelSpec) -> Tensor:
    """Convert instructions for a tensor of the encoder alone to the tensor names of the model with both."""
    if isinstance(how, Computed):
        make = how.make
        return Computed(lambda model: make(_Encoder(model, spec)))
    if isinstance(how, Moved):
        return Moved(tuple(_INSIDE + name for name in how.names), how.move)
    return replace(how, like=_INSIDE + how.like)
