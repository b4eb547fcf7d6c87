"""Why a port computes something else: the mistakes that, made in gptkit's own tree, give the port's logits.

A mistake is judged on the inputs that can show it. Inputs without padding come first, so that a fault of padding hides
no other one. Whether a port ignores its `attention_mask` is asked of the port itself; all other mistakes are then made
with padding treated as the port treats it. Where no single mistake explains the difference, two are made at once.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from ..analysis.parameters import count
from ..components import ModelSpec
from .compare import largest_gap, mean_gap
from .mutations import Apply, Mutant, Weights, mutated, of_ports
from .probe import SMALL, ProbeBatch
from .score import run_tree

PADDING = "padding ignored (attention_mask has no effect)"
PLACE, BARE, SAME = "this place", "every probe without padding", "that the mask changes nothing in yours"
"""What a mistake may explain where it does not explain all."""
_SHOWN = 3  # mistakes that explain the place and not all of the rest
_REST = 1e-5  # of the difference, what a mistake that explains it may leave
_NEAREST = 6
"""Mistakes with which another one is tried, beside those that explain the place: those that leave the smallest mean
difference. A right one of two need not be the nearest, since the other one changes what it does."""


@dataclass(frozen=True)
class Made:
    """A mistake that was made in the reference and explains what the port computes.

    mistake: the mistake in words.
    explains: whether the reference with it gives the port's logits.
    left: the difference of logits that remains.
    also: the mistakes that were made together with it, in words.
    part: what it explains where it does not explain all logits, and more is wrong.
    """

    mistake: str
    explains: bool
    left: float
    also: str = ""
    part: str = ""


@dataclass(frozen=True)
class Differing:
    """A port that differs from the reference.

    spec, weights: gptkit's tree of the reference, and its weights in fp64.
    batches: the inputs; exact and port: the logits of the reference and of the port in fp64, (N, V) a batch.
    allowed: the difference of logits that rounding explains.
    explained: returns whether the port computes what a changed tree does at the place where they part.
    ignores: whether the port gives the same logits with and without a mask.
    """

    spec: ModelSpec
    weights: Weights
    batches: Sequence[ProbeBatch]
    exact: Sequence[Tensor]
    port: Sequence[Tensor]
    allowed: float
    explained: Callable[[ModelSpec, Weights], bool]
    ignores: bool

    @property
    def enough(self) -> float:
        """The difference that a mistake may leave: a port's fp32 rotary tables turn otherwise with it than without."""
        return max(self.allowed, _REST * largest_gap(self.exact, self.port))


def causes(found: Differing, notes: list[str]) -> list[Made]:
    """Return the mistake, or the two, that make the reference compute what the port does; where there are none, those
    that explain the place where they part. What was not tried goes to `notes`.
    """
    bare = [batch.attention_mask is None for batch in found.batches]
    differ = [not largest_gap([a], [b]) <= found.allowed for a, b in zip(found.exact, found.port, strict=True)]
    padding = found.ignores and _moved_by_masks(found)
    everything = _CauseJudge(found, range(len(bare)), masked=not padding)
    if padding and everything.explains((found.spec, dict(found.weights))):
        return [Made(PADDING, True, everything.left(found.spec, found.weights))]
    shown = any(one and other for one, other in zip(bare, differ, strict=True))
    # First the shortest of those that differ: most mistakes are not the port's, and show it there.
    order = [index for index in range(len(bare)) if bare[index] or not shown]
    order.sort(key=lambda index: (not differ[index], found.batches[index].input_ids.numel()))
    judge = _CauseJudge(found, order, masked=not padding)
    also, at_place = ((PADDING,) if padding else ()), list[_Mistake]()
    for name, apply in of_ports(found.spec):
        mutant = mutated(apply, found.spec, found.weights)
        if mutant is not None and judge.explains(mutant):
            return [everything.told((name, *also), mutant)]
        if mutant is not None and len(at_place) < _SHOWN and found.explained(*mutant):
            at_place.append((name, apply))
    if count(found.spec).total <= SMALL:
        for names, mutant in _pairs(found, judge, at_place):
            if judge.explains(mutant):
                return [everything.told((*names, *also), mutant)]
    else:
        notes.append(f"pairs of mistakes were not tried, because the model has more than {SMALL:,} parameters")
    mutants = [(PADDING, (found.spec, dict(found.weights)), SAME)] if padding else []
    mutants += [(name, made, PLACE) for name, made in _mutants(found, at_place)]
    parts = [Made(name, False, everything.left(*mutant), part=part) for name, mutant, part in mutants]
    return sorted(parts, key=lambda each: (each.part == PLACE, each.left))


_Mistake = tuple[str, Apply]


class _CauseJudge:
    """Compares what changed trees compute on some of the inputs with what the port does there."""

    def __init__(self, found: Differing, places: Sequence[int], masked: bool) -> None:
        self.inputs, self.wanted = [found.batches[i] for i in places], [found.port[i] for i in places]
        self.enough, self.masked = found.enough, masked

    def logits(self, spec: ModelSpec, weights: Weights) -> Iterator[Tensor]:
        return run_tree(spec, weights, self.inputs, self.masked)

    def explains(self, mutant: Mutant) -> bool:
        """Whether no more remains than a mistake may leave, on any input."""
        return largest_gap(self.wanted, self.logits(*mutant), self.enough) <= self.enough

    def left(self, spec: ModelSpec, weights: Weights) -> float:
        """The largest difference that remains."""
        return largest_gap(self.wanted, self.logits(spec, weights))

    def told(self, names: Sequence[str], mutant: Mutant) -> Made:
        """Say what mistakes explain that leave nothing on the inputs that can show them."""
        left = self.left(*mutant)
        explains = left <= self.enough
        return Made(names[0], explains, left, ", ".join(names[1:]), "" if explains else BARE)


def _moved_by_masks(found: Differing) -> bool:
    """Whether the reference computes something else where it attends to padding."""
    padded = [i for i, batch in enumerate(found.batches) if batch.attention_mask is not None]
    inputs = [found.batches[i] for i in padded]
    unmasked = run_tree(found.spec, found.weights, inputs, masked=False)
    return bool(padded) and not largest_gap([found.exact[i] for i in padded], unmasked) <= found.allowed


def _mutants(found: Differing, mistakes: Sequence[_Mistake]) -> Iterator[tuple[str, Mutant]]:
    """The mutants of those mistakes that change something, by name."""
    for name, apply in mistakes:
        mutant = mutated(apply, found.spec, found.weights)
        if mutant is not None:
            yield name, mutant


def _pairs(
    found: Differing, judge: _CauseJudge, at_place: Sequence[_Mistake]
) -> Iterator[tuple[tuple[str, str], Mutant]]:
    """Two mistakes at once: one that explains the place or comes near, and any other. Where a mistake has no object
    behind another one, they are made in the other order.
    """
    tried = dict(of_ports(found.spec))
    left = {name: mean_gap(judge.wanted, list(judge.logits(*made))) for name, made in _mutants(found, [*tried.items()])}
    firsts = list(dict.fromkeys([*(name for name, _ in at_place), *sorted(left, key=left.__getitem__)[:_NEAREST]]))
    for place, first in enumerate(firsts):
        mutant = tried[first](found.spec, found.weights)
        for second in (name for name in left if name not in firsts[: place + 1]):
            other = tried[second](found.spec, found.weights)
            assert mutant is not None and other is not None
            both = mutated(tried[second], *mutant) or mutated(tried[first], *other)
            if both is not None:
                yield (first, second), both
