"""The swaps that would clear the way of a tree into a family, and what each of them costs.

What stands in the way `architectures.obstacles` says, and which swap clears which of it the swaps say themselves
(`registry.Clears`). A way is made of these remedies: one after the other, those that cost nothing first, as long as
less is left in the way after it; what turned out needless is given up.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from textwrap import wrap

import numpy as np

from ..architectures import Architecture
from ..architectures.obstacles import Expression, Obstacle, Zero, by_layers, express
from ..components import ModelSpec
from ..components.ranges import some_of
from ..errors import CannotExpress, InvalidInput, SwapRefused, UsageError
from ..parity.probe import SMALL
from .base import ORDER, Exactly, Guarantee, Model, Swapped, SwappedModel, weakest
from .measure import measure
from .registry import Step, all_swaps, apply, options
from .shapes import swapped

_Remedy = tuple[Step, ...]  # steps that only together clear something
_NEAR = 3  # families that are told of
_FEW = 3  # obstacles of each, where more than one family is asked for
_MOST = 10  # remedies one after the other
_WIDTH = 76  # of a sentence, which the command line indents
_OWN_FORMAT = "gptkit's own format can hold any model: --as local"


def remedies(obstacle: Obstacle) -> Iterator[_Remedy]:
    """The swaps that may make a field what a family has, in the registry's order."""
    found = (each.remedy(swap, obstacle) for swap in all_swaps() for each in swap.clears)
    return filter(None, found)


# --- a way ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _State:
    """A tree after some steps: its biases that are zero, what each step gives, and the models, where looked at."""

    spec: ModelSpec
    zero: Zero
    guarantees: tuple[Guarantee, ...] = ()
    done: tuple[Swapped, ...] = ()
    models: tuple[Model, ...] = ()

    @property
    def guarantee(self) -> Guarantee:
        return weakest(self.guarantees)


_After = Callable[[_Remedy], _State | None]  # the tree after some steps; None where one of them is not possible


def ways_from(model: Model, zero: Zero) -> _After:
    """What becomes of a tree by steps; of more than `SMALL` parameters shapes alone are looked at, with guarantees
    such as trained weights have. `zero` tells its biases that are zero.
    """
    small = sum(parameter.count for parameter in model.spec.parameters()) <= SMALL
    names = {parameter.name for parameter in model.spec.parameters()}
    made: dict[str, _State | None] = {"": _State(model.spec, zero, models=(model,))}

    def after(steps: _Remedy) -> _State | None:
        key = " ".join(map(str, steps))
        if key not in made:
            made[key] = then(steps)
        return made[key]

    def then(steps: _Remedy) -> _State | None:
        before = after(steps[:-1])
        if before is None:
            return None
        try:
            if not small:
                found = swapped(before.spec, steps[-1:])
                known: Zero = lambda name: name in names and zero(name)  # noqa: E731
                return _State(found.spec, known, (*before.guarantees, found.usual))
            done = apply(before.models[-1], steps[-1])
        except (SwapRefused, UsageError, InvalidInput):
            return None
        here, promised = SwappedModel(before.models[-1], done), (*before.guarantees, done.guarantee)
        zeros = cache(lambda name: not np.any(here.wide(name)))
        return _State(done.spec, zeros, promised, (*before.done, done), (*before.models, here))

    return after


@dataclass(frozen=True)
class Way:
    """Swaps towards a family: what is in the way of a tree, the remedies in order, and what is left at their end."""

    start: Expression
    remedies: tuple[_Remedy, ...]
    end: _State
    left: Expression

    @property
    def arrived(self) -> bool:
        return self.left.found is not None

    @property
    def steps(self) -> _Remedy:
        return tuple(step for remedy in self.remedies for step in remedy)

    def __str__(self) -> str:
        return " ".join(str(step) for step in self.steps)


def way_to(start: Expression, after: _After) -> Way:
    """The way of a tree into a family, as far as there is one.

    At each point the remedy is taken that promises most, and among those the one that leaves least in the way; it must
    leave less than before. In the end what turned out needless is given up, and the rest put into the order of the
    registry where it can be.
    """

    def way(taken: tuple[_Remedy, ...]) -> Way | None:
        end = after(tuple(step for remedy in taken for step in remedy))
        return None if end is None else Way(start, taken, end, express(start.target, end.spec, end.zero))

    def as_good(taken: tuple[_Remedy, ...], than: Way) -> Way:
        """The way by these remedies, where it arrives too and promises no less."""
        other = way(taken)
        same = other is not None and other.arrived and rank(other.end.guarantee) <= rank(than.end.guarantee)
        return other if same and other is not None else than

    rank = ORDER.index
    here = way(())
    assert here is not None
    while here.left.standing and len(here.remedies) < _MOST:
        known = len(here.end.guarantees)
        every = {str(remedy): remedy for each in by_layers(here.left.standing, 0) for remedy in remedies(each)}
        further = [each for remedy in every.values() if (each := way((*here.remedies, remedy)))]
        nearer = [each for each in further if each.left.weight < here.left.weight]
        if not nearer:
            break
        costs = [(rank(weakest(way.end.guarantees[known:])), way.left.weight, len(way.remedies[-1])) for way in nearer]
        here = nearer[costs.index(min(costs))]
    if here.arrived:
        for remedy in here.remedies:
            here = as_good(tuple(each for each in here.remedies if each != remedy), here)
        order = list(options())
        here = as_good(tuple(sorted(here.remedies, key=lambda each: order.index(each[0].option))), here)
    return here


# --- in words ---------------------------------------------------------------------------------------------------------


def in_the_way(model: Model, tried: Sequence[Architecture], refused: Sequence[Expression], zero: Zero) -> CannotExpress:
    """What stands between a tree that no family holds and those that come nearest to it, and what would clear it at
    what cost. `tried` are the families, the one that it came from first, and `refused` says what stands in the way to
    each; `zero` tells whether every value of a bias is zero.
    """
    near = sorted((each for each in refused if each.standing), key=lambda each: each.weight)[:_NEAR]
    after = ways_from(model, zero)
    ways = [way_to(each, after) for each in near]
    arriving = [way for way in ways if way.arrived]
    best = min(arriving, key=lambda way: (ORDER.index(way.end.guarantee), len(way.steps)), default=None)
    hint = "\n".join([*_told_left(ways), _OWN_FORMAT] if best is None else _told_way(best))
    if len(tried) == 1:
        return refused[0].refusal(hint)
    lines = []
    for each in near:  # of each the first few
        told = each.told
        lines += [*told[:_FEW], *([f"and {len(told) - _FEW} more for {each.target.owner}"] if len(told) > _FEW else [])]
    lines += [] if refused[0].standing else [f"{refused[0].target.owner}: {refused[0].reason}"]
    listed = "\n".join(f"  {line}" for line in lines)
    return CannotExpress(f"no transformers architecture can express this model, because of:\n{listed}", hint)


def _told_way(way: Way) -> list[str]:
    """The steps of a way and what each costs, where that is quickly measured."""
    name, end = way.start.target.owner, way.end
    costs = []
    for number, (step, guarantee) in enumerate(zip(way.steps, end.guarantees, strict=True)):
        price = "changes nothing" if guarantee == "exact" else "changes logits: run it to see"
        if guarantee != "exact" and end.done:
            before, after = (Exactly(end.models[place]) for place in (number, number + 1))
            kl = measure(before, after, promise=end.done[number].promise, dtypes=("float32",)).kl
            price = f"costs KL {kl:.2g} on the probe"
        costs.append((str(step), price + ", and needs training" * (guarantee == "retrained")))
    short_of = f"{name} cannot express {_some(way.start, most=2)}"
    if len(costs) == 1:
        return wrap(f"{short_of}: {' '.join(costs[0])}.", _WIDTH)
    width = max(len(step) for step, _ in costs)
    lines = wrap(f"{short_of}. These swaps would change that:", _WIDTH)
    lines += [f"  {step:{width}}  {price}" for step, price in costs]
    # One command line carries out options in the registry's order, each once.
    places = [list(options()).index(step.option) for step in way.steps]
    how = "all at once" if places == sorted(set(places)) else "one after the other, as the steps of a recipe"
    return [*lines, f"{how.capitalize()}, with --as hf:{name}."]


def _told_left(ways: Sequence[Way]) -> list[str]:
    """What no swap clears, on the way that comes nearest."""
    if not ways:
        return []
    way = min(ways, key=lambda way: way.left.weight)
    if not way.left.standing:
        return wrap(f"After {way}: {way.left.reason}", _WIDTH)
    rest = f"; {way} would change the rest" if way.remedies else ""
    return wrap(f"No swap can change {_some(way.left, _FEW)} to match {way.start.target.owner}{rest}.", _WIDTH)


def _some(expression: Expression, most: int) -> str:
    """The paths of what is in the way, or the first of them and how many more there are."""
    paths = [each.path for each in by_layers(expression.standing, len(expression.spec.blocks))]
    return some_of(paths, most)
