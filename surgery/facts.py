"""What a swap may ask of the weights before it says the new tree, and the answers where there are none. No torch, no
numpy.

A swap says its tree from the tree before and from a few facts: is this bias zero, are these heads equal? Where the
weights are at hand `base.Read` looks. Where there are only shapes (`params --swap`) `Assumed` answers as weights after
training would: no value is zero, no two tensors are equal, nothing cancels. What was answered so is noted, for it is an
assumption. Where the answer is certain, because a swap before filled a tensor with one number or copied it from
another, nothing is noted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol, TypeVar

from ..errors import GptkitError

if TYPE_CHECKING:
    from .base import Model

_T = TypeVar("_T")
Value = float | object
"""What is known of a tensor without its weights: the number that every element is, or a token that it shares with the
tensors that it is a copy of."""


class TextWanted(GptkitError):
    """A swap runs the model on a text to see what comes out, and there is none, or no weights."""


class Weights(Protocol):
    """What a swap may ask of the weights. A name that the tree does not have is no obstacle: it counts as zeros."""

    def filled(self, value: float, *names: str) -> bool:
        """Whether every element of these tensors is this number."""
        ...

    def zero(self, *names: str) -> bool:
        """Whether every element of these tensors is zero."""
        return self.filled(0.0, *names)

    def same(self, one: str, other: str) -> bool:
        """Whether two tensors have the same values."""
        ...

    def ask(self, question: Callable[[Model], _T], trained: _T, zeros: _T) -> _T:
        """Any other question, with its answers for weights as training leaves them and for zeros, which allow most."""
        ...

    def run(self, question: Callable[[Model], _T]) -> _T:
        """What a text that runs through the model tells. Raises TextWanted without weights to run it through."""
        ...


class Assumed(Weights):
    """The answers without weights.

    known: what is known of tensors by name. zeros: whether to answer as if all weights were zero, to see what the best
    of weights would allow. made: whether anything was answered that only weights can tell.
    """

    def __init__(self, known: Mapping[str, Value] | None = None, zeros: bool = False) -> None:
        self.known, self.zeros, self.made = known, zeros, False

    def filled(self, value: float, *names: str) -> bool:
        there = [name for name in names if self.known is None or name in self.known]
        found: list[Value] = [name if self.known is None else self.known[name] for name in there]
        if self.zeros:
            found = [0.0] * len(found)
        if any(isinstance(each, float) and each != value for each in found):
            return False
        return all(isinstance(each, float) for each in found) or self.ask(None, False, True)

    def same(self, one: str, other: str) -> bool:
        if self.known is not None and self.known[one] == self.known[other]:
            return True
        return self.ask(None, False, True)

    def ask(self, question: Callable[[Model], _T] | None, trained: _T, zeros: _T) -> _T:  # noqa: ARG002
        self.made = True
        return zeros if self.zeros else trained

    def run(self, question: Callable[[Model], _T]) -> _T:  # noqa: ARG002
        raise TextWanted("this swap runs a text through the model, so it needs the weights of the model")
