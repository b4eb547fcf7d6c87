"""Find the mistakes that explain why a user's port of a model gives other logits than the reference.

gptkit makes each mistake in its own copy of the reference, and compares the logits with the port's. If inputs without
padding differ, it uses only those, so that a mistake about padding does not hide other mistakes. If the port gives the
same logits with and without its `attention_mask`, gptkit ignores the mask too. If no single mistake explains the
difference, gptkit tries two at once.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from ..analysis.parameters import SMALL, count
from ..components import ModelSpec
from .compare import largest_gap, mean_gap
from .mutations import Apply, Mutant, Weights, mutated, of_ports
from .probe import ProbeBatch
from .score import run_tree

PADDING = "padding ignored (attention_mask has no effect)"
PLACE, BARE, SAME = "this place", "every probe without padding", "that the mask changes nothing in yours"
"""The part of the difference that a mistake explains, if it does not explain all of it."""
_SHOWN = 3  # the number of reported mistakes that explain only the first component that differs
_REST = 1e-5  # the share of the difference that may remain after a mistake that explains it
_NEAREST = 6
"""The number of mistakes that are combined with every other mistake, in addition to those that explain the first
component that differs. They are those with the smallest mean difference. If two mistakes explain the port together, the
logits with one of them need not be the nearest.
"""


@dataclass(frozen=True)
class PortMistake:
    """A mistake that explains the port's logits or a part of them. gptkit made this mistake in its copy of the
    reference.
    """

    mistake: str  # the mistake in words
    explains: bool  # whether the reference with this mistake gives the port's logits
    left: float  # the largest difference from the port's logits that remains
    also: str = ""  # the mistakes that were made together with it, in words
    part: str = ""  # the part of the logits that it explains, if it does not explain all


@dataclass(frozen=True)
class TriedMistakes:
    """The mistakes that gptkit made in the reference to explain a port."""

    mistakes: tuple[str, ...] = ()  # those that were made one at a time, in words
    pairs: int = 0  # the number of pairs that were made


@dataclass(frozen=True)
class Differing:
    """A user's port that differs from the reference, with the logits of both."""

    spec: ModelSpec  # the reference's component tree
    weights: Weights  # the reference's weights in fp64
    batches: Sequence[ProbeBatch]
    exact: Sequence[Tensor]  # the reference's logits in fp64, (N, V) per batch
    port: Sequence[Tensor]  # the port's logits in fp64, (N, V) per batch
    allowed: float  # the difference of logits that rounding explains
    explained: Callable[[ModelSpec, Weights], bool]  # whether a changed model gives the port's first wrong output
    ignores: bool  # whether the port gives the same logits with and without a mask

    @property
    def enough(self) -> float:
        """Return the largest difference of logits that may remain if a mistake explains the user's port.

        It is not zero, because a port's fp32 rotary tables round differently with the mistake than without it.
        """
        return max(self.allowed, _REST * largest_gap(self.exact, self.port))


def causes(port: Differing, notes: list[str]) -> tuple[list[PortMistake], TriedMistakes]:
    """Return the mistake, or the two mistakes, with which the reference gives the logits of the user's port.

    If there is no such mistake, return those that explain the first component that differs. The second result is what
    was tried. If some mistakes cannot be tried, the reason is added to `notes`.
    """
    bare = [batch.attention_mask is None for batch in port.batches]
    differ = [not largest_gap([a], [logits]) <= port.allowed for a, logits in zip(port.exact, port.port, strict=True)]
    padding = port.ignores and _moved_by_masks(port)
    everything = _CauseJudge(port, range(len(bare)), masked=not padding)
    if padding and everything.explains((port.spec, dict(port.weights))):
        return [PortMistake(PADDING, True, everything.difference(port.spec, port.weights))], TriedMistakes((PADDING,))
    shown = any(is_bare and differs for is_bare, differs in zip(bare, differ, strict=True))
    # The shortest inputs that differ come first: they rule out most of the tried mistakes quickly.
    order = [index for index in range(len(bare)) if bare[index] or not shown]
    order.sort(key=lambda index: (not differ[index], port.batches[index].input_ids.numel()))
    judge = _CauseJudge(port, order, masked=not padding)
    also, at_place = ((PADDING,) if padding else ()), list[_Mistake]()
    tried, pairs = [*also], 0
    for name, apply in of_ports(port.spec):
        mutant = mutated(apply, port.spec, port.weights)
        if mutant is None:
            continue
        tried.append(name)
        if judge.explains(mutant):
            return [everything.record((name, *also), mutant)], TriedMistakes(tuple(tried))
        if len(at_place) < _SHOWN and port.explained(*mutant):
            at_place.append((name, apply))
    if count(port.spec).total <= SMALL:
        for pairs, (names, mutant) in enumerate(_pairs(port, judge, at_place), 1):
            if judge.explains(mutant):
                return [everything.record((*names, *also), mutant)], TriedMistakes(tuple(tried), pairs)
    else:
        notes.append(f"pairs of mistakes were not tried, because the model has more than {SMALL:,} parameters")
    mutants = [(PADDING, (port.spec, dict(port.weights)), SAME)] if padding else []
    mutants += [(name, mutant, PLACE) for name, mutant in _mutants(port, at_place)]
    parts = [PortMistake(name, False, everything.difference(*mutant), part=part) for name, mutant, part in mutants]
    return sorted(parts, key=lambda mistake: (mistake.part == PLACE, mistake.left)), TriedMistakes(tuple(tried), pairs)


_Mistake = tuple[str, Apply]


class _CauseJudge:
    """Judges whether a mistake explains a port (the user's own implementation of a model).

    It compares the logits of the reference with that mistake to those of the port, on some of the test inputs.
    """

    def __init__(self, port: Differing, places: Sequence[int], masked: bool) -> None:
        self.inputs, self.wanted = [port.batches[index] for index in places], [port.port[index] for index in places]
        self.enough, self.masked = port.enough, masked

    def logits(self, spec: ModelSpec, weights: Weights) -> Iterator[Tensor]:
        """Yield the logits of gptkit's copy of the reference with changed components or weights, by batch."""
        return run_tree(spec, weights, self.inputs, self.masked)

    def explains(self, mutant: Mutant) -> bool:
        """Return whether the reference with a mistake gives the logits of the user's port on every input."""
        return largest_gap(self.wanted, self.logits(*mutant), self.enough) <= self.enough

    def difference(self, spec: ModelSpec, weights: Weights) -> float:
        """Return the largest difference between the logits of the user's port and those of the changed reference."""
        return largest_gap(self.wanted, self.logits(spec, weights))

    def record(self, names: Sequence[str], mutant: Mutant) -> PortMistake:
        """Return the record of mistakes, with the difference of logits that remains on the judge's inputs.

        Args:
            names: the names of the mistakes. The first one is the main one.
            mutant: the component tree and weights with these mistakes.
        """
        difference = self.difference(*mutant)
        explains = difference <= self.enough
        return PortMistake(names[0], explains, difference, ", ".join(names[1:]), "" if explains else BARE)


def _moved_by_masks(port: Differing) -> bool:
    """Return whether the reference's logits would change if it ignored the attention mask."""
    padded = [index for index, batch in enumerate(port.batches) if batch.attention_mask is not None]
    inputs = [port.batches[index] for index in padded]
    unmasked = run_tree(port.spec, port.weights, inputs, masked=False)
    return bool(padded) and not largest_gap([port.exact[index] for index in padded], unmasked) <= port.allowed


def _mutants(port: Differing, mistakes: Sequence[_Mistake]) -> Iterator[tuple[str, Mutant]]:
    """Yield the name of each mistake that changes the model, and the changed component tree and weights."""
    for name, apply in mistakes:
        mutant = mutated(apply, port.spec, port.weights)
        if mutant is not None:
            yield name, mutant


def _pairs(
    port: Differing, judge: _CauseJudge, at_place: Sequence[_Mistake]
) -> Iterator[tuple[tuple[str, str], Mutant]]:
    """Yield pairs of mistakes: their names, and the component tree and weights with both.

    The first mistake is one of `at_place`, which explain the first component that differs, or one whose logits are
    nearest to the port's. The second is any other. If it cannot be made after the first, it is made before it.
    """
    mistakes = dict(of_ports(port.spec))
    mutants = _mutants(port, [*mistakes.items()])
    remaining = {name: mean_gap(judge.wanted, list(judge.logits(*mutant))) for name, mutant in mutants}
    nearest = sorted(remaining, key=remaining.__getitem__)[:_NEAREST]
    firsts = list(dict.fromkeys([*(name for name, _ in at_place), *nearest]))
    for place, first in enumerate(firsts):
        mutant = mistakes[first](port.spec, port.weights)
        for second in (name for name in remaining if name not in firsts[: place + 1]):
            second_mutant = mistakes[second](port.spec, port.weights)
            assert mutant is not None and second_mutant is not None
            both = mutated(mistakes[second], *mutant) or mutated(mistakes[first], *second_mutant)
            if both is not None:
                yield (first, second), both
