"""The questions that a swap asks about the weights before it decides the new model. No torch, no numpy.

A swap decides the new model from the old components and a few facts: is this bias zero, are these heads equal? With
weights, `base.Read` reads the answers. If only shapes are known (`params --swap`), `Assumed` answers for typical
trained weights: no value is zero, no two tensors are equal, nothing cancels. It also records that the answer is an
assumption. If an earlier swap filled or copied a tensor, answers about this tensor are certain.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol, TypeVar

from ..errors import GptkitError

if TYPE_CHECKING:
    from .base import Model

_T = TypeVar("_T")
Value = float | object
"""What is known of the content of a tensor: the number that fills it, or an object that stands for unknown values.

Copies of a tensor have the same object.
"""


class TextWanted(GptkitError):
    """The error that a swap must run the model on a text, but there is no text, or there are no weights."""


class WeightFacts(Protocol):
    """The questions that a swap may ask about weights. Tensors that the model does not have count as zeros."""

    def filled(self, value: float, *names: str) -> bool:
        """Return whether every element of these tensors equals `value`."""
        ...

    def zero(self, *names: str) -> bool:
        """Return whether every element of these tensors is zero."""
        return self.filled(0.0, *names)

    def same(self, first: str, second: str) -> bool:
        """Return whether two tensors have the same values."""
        ...

    def ask(self, question: Callable[[Model], _T], trained: _T, zeros: _T) -> _T:
        """Call `question` with the model, and return its answer.

        Args:
            question: A function that reads weights of the model.
            trained: The answer for typical trained weights. It is returned if the weights are not known.
            zeros: The answer for weights that are all zero. It is returned instead of `trained` by
                `Assumed(zeros=True)`.
        """
        ...

    def run(self, question: Callable[[Model], _T]) -> _T:
        """Call `question`, which runs the model on a text, and return its answer. Raises TextWanted without weights."""
        ...


class Assumed(WeightFacts):
    """The answers for a model whose weights are not known. They hold for typical trained weights.

    Args:
        known: The known contents of tensors, by name.
        zeros: Answer for a model whose weights are all zero instead.

    The attribute `assumed` is True after a question whose answer was an assumption.
    """

    def __init__(self, known: Mapping[str, Value] | None = None, zeros: bool = False) -> None:
        self.known, self.zeros, self.assumed = known, zeros, False

    def filled(self, value: float, *names: str) -> bool:
        present = [name for name in names if self.known is None or name in self.known]
        values: list[Value] = [name if self.known is None else self.known[name] for name in present]
        if self.zeros:
            values = [0.0] * len(values)
        if any(isinstance(content, float) and content != value for content in values):
            return False
        return all(isinstance(content, float) for content in values) or self.ask(None, False, True)

    def same(self, first: str, second: str) -> bool:
        if self.known is not None and self.known[first] == self.known[second]:
            return True
        return self.ask(None, False, True)

    def ask(self, question: Callable[[Model], _T] | None, trained: _T, zeros: _T) -> _T:  # noqa: ARG002
        self.assumed = True
        return zeros if self.zeros else trained

    def run(self, question: Callable[[Model], _T]) -> _T:  # noqa: ARG002
        raise TextWanted("this swap runs a text through the model, so it needs the weights of the model")
