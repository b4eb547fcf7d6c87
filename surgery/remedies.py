"""Search for swaps after which a Hugging Face family can express a model, and measure what they cost.

`architectures.obstacles` lists the obstacles: the differences between a model and a family. Each swap declares the
obstacles that it can remove (`registry.Clears`). A *remedy* is one or more swap steps that together remove an obstacle.
A *way* is a sequence of remedies after which the family can express the model. The search adds remedies one by one, the
cheapest first, as long as they leave fewer obstacles. At the end, it leaves out remedies that turned out to be
unnecessary.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from textwrap import wrap

import numpy as np

from ..analysis.parameters import SMALL
from ..architectures import Architecture
from ..architectures.obstacles import Expression, Obstacle, Zero, by_layers, express
from ..components import ModelSpec
from ..components.ranges import some_of
from ..errors import CannotExpress, InvalidInput, SwapRefused, UsageError
from .base import ORDER, Exactly, Guarantee, Model, Swapped, SwappedModel, weakest
from .registry import Step, all_swaps, apply, options
from .shapes import swapped

_Remedy = tuple[Step, ...]  # steps that clear an obstacle together
_NEAR = 3  # the maximum number of families that a message names
_FEW = 3  # the maximum number of obstacles that a message names for each of several families
_MOST = 10  # the maximum number of remedies in a way
_WIDTH = 76  # the number of characters in a line of a message, which the command line indents
_OWN_FORMAT = "gptkit's own format can hold any model: --as local"


def remedies(obstacle: Obstacle) -> Iterator[_Remedy]:
    """Yield the remedies for an obstacle: sequences of swap steps that may remove this difference to a family."""
    steps = (clears.remedy(swap, obstacle) for swap in all_swaps() for clears in swap.clears)
    return filter(None, steps)


# --- the search for swaps ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _State:
    """A model after some swap steps."""

    spec: ModelSpec
    zero: Zero  # a function of a bias's name, which returns whether the bias is all zeros
    guarantees: tuple[Guarantee, ...] = ()  # the guarantee of each step
    done: tuple[Swapped, ...] = ()  # the results of the steps; empty for a large model, whose weights are not read
    models: tuple[Model, ...] = ()  # the model before the first step, and after each step; empty for a large model

    @property
    def guarantee(self) -> Guarantee:
        return weakest(self.guarantees)


_After = Callable[[_Remedy], _State | None]  # returns the model after steps, None if one is impossible


def ways_from(model: Model, zero: Zero) -> _After:
    """Return a function that runs swap steps on a model. It returns the model after them, or None if one is impossible.

    The weights of models with more than `SMALL` parameters are not read. For these, the function uses only shapes, and
    the guarantees for typical trained weights. `zero` is a function of a bias's name that returns whether the bias is
    all zeros.
    """
    small = sum(parameter.count for parameter in model.spec.parameters()) <= SMALL
    parameters = {parameter.name for parameter in model.spec.parameters()}
    states: dict[str, _State | None] = {"": _State(model.spec, zero, models=(model,))}

    def after(steps: _Remedy) -> _State | None:
        key = " ".join(map(str, steps))
        if key not in states:
            states[key] = then(steps)
        return states[key]

    def then(steps: _Remedy) -> _State | None:
        before = after(steps[:-1])
        if before is None:
            return None
        try:
            if not small:
                reshaped = swapped(before.spec, steps[-1:])
                known: Zero = lambda name: name in parameters and zero(name)  # noqa: E731
                return _State(reshaped.spec, known, (*before.guarantees, reshaped.usual))
            done = apply(before.models[-1], steps[-1])
        except (SwapRefused, UsageError, InvalidInput):
            return None
        changed, guarantees = SwappedModel(before.models[-1], done), (*before.guarantees, done.guarantee)
        zeros = cache(lambda name: not np.any(changed.wide(name)))
        return _State(done.spec, zeros, guarantees, (*before.done, done), (*before.models, changed))

    return after


@dataclass(frozen=True)
class Way:
    """A sequence of remedies (swap steps) that brings a model nearer to what a Hugging Face family can express."""

    start: Expression  # the obstacles before the first step
    remedies: tuple[_Remedy, ...]
    end: _State  # the model after the last step
    remaining: Expression  # the obstacles after the last step; none if the family can express the model

    @property
    def arrived(self) -> bool:
        return self.remaining.tree is not None

    @property
    def steps(self) -> _Remedy:
        return tuple(step for remedy in self.remedies for step in remedy)

    def __str__(self) -> str:
        return " ".join(str(step) for step in self.steps)


def way_to(start: Expression, after: _After) -> Way:
    """Search for swaps after which a Hugging Face family can express a model. Return the best sequence found.

    The search adds one remedy at a time: the one with the best guarantee, and among equal ones the one that leaves the
    fewest obstacles. It stops if no remedy reduces the obstacles. At the end, unnecessary remedies are removed. The
    others are put into the order in which swaps run, if that works.

    Args:
        start: The obstacles that prevent the family from expressing the model before any swap.
        after: The function from `ways_from`, which runs swap steps on the model.
    """

    def way(chosen: tuple[_Remedy, ...]) -> Way | None:
        end = after(tuple(step for remedy in chosen for step in remedy))
        return None if end is None else Way(start, chosen, end, express(start.target, end.spec, end.zero))

    def as_good(chosen: tuple[_Remedy, ...], best: Way) -> Way:
        """Return the way with these remedies if it clears all obstacles with as good a guarantee, else `best`."""
        candidate = way(chosen)
        same = candidate is not None and candidate.arrived and rank(candidate.end.guarantee) <= rank(best.end.guarantee)
        return candidate if same and candidate is not None else best

    rank = ORDER.index
    current = way(())
    assert current is not None
    while current.remaining.standing and len(current.remedies) < _MOST:
        done = len(current.end.guarantees)
        possible = {
            str(remedy): remedy
            for obstacle in by_layers(current.remaining.standing, 0)
            for remedy in remedies(obstacle)
        }
        extended = [longer for remedy in possible.values() if (longer := way((*current.remedies, remedy)))]
        improved = [longer for longer in extended if longer.remaining.weight < current.remaining.weight]
        if not improved:
            break
        costs = [
            (rank(weakest(way.end.guarantees[done:])), way.remaining.weight, len(way.remedies[-1])) for way in improved
        ]
        current = improved[costs.index(min(costs))]
    if current.arrived:
        for remedy in current.remedies:
            current = as_good(tuple(other for other in current.remedies if other != remedy), current)
        order = list(options())
        current = as_good(tuple(sorted(current.remedies, key=lambda remedy: order.index(remedy[0].option))), current)
    return current


# --- messages ---------------------------------------------------------------------------------------------------------


def in_the_way(model: Model, tried: Sequence[Architecture], refused: Sequence[Expression], zero: Zero) -> CannotExpress:
    """Return the error that no Hugging Face family can express a model.

    The message lists the obstacles. The hint names swaps that remove them, with their costs.

    Args:
        model: The model with its weights.
        tried: The families that were tried, the model's original family first.
        refused: The obstacles to each of these families.
        zero: A function of a bias's name that returns whether the bias is all zeros.
    """
    near = sorted(
        (expression for expression in refused if expression.standing), key=lambda expression: expression.weight
    )[:_NEAR]
    after = ways_from(model, zero)
    ways = [way_to(expression, after) for expression in near]
    arriving = [way for way in ways if way.arrived]
    best = min(arriving, key=lambda way: (ORDER.index(way.end.guarantee), len(way.steps)), default=None)
    hint = "\n".join([*_remaining_in_words(ways), _OWN_FORMAT] if best is None else _way_in_words(best))
    if len(tried) == 1:
        return refused[0].refusal(hint)
    lines = []
    for expression in near:
        obstacles = expression.sentences
        lines += [
            *obstacles[:_FEW],
            *([f"and {len(obstacles) - _FEW} more for {expression.target.owner}"] if len(obstacles) > _FEW else []),
        ]
    lines += [] if refused[0].standing else [f"{refused[0].target.owner}: {refused[0].reason}"]
    listed = "\n".join(f"  {line}" for line in lines)
    return CannotExpress(f"no transformers architecture can express this model, because of:\n{listed}", hint)


def _way_in_words(way: Way) -> list[str]:
    """Describe the swap steps of a way in lines of text, with the KL that each costs if that is quick to measure."""
    from .measure import measure

    name, end = way.start.target.owner, way.end
    costs = []
    for number, (step, guarantee) in enumerate(zip(way.steps, end.guarantees, strict=True)):
        cost = "changes nothing" if guarantee == "exact" else "changes logits: run it to see"
        if guarantee != "exact" and end.done:
            before, after = (Exactly(end.models[place]) for place in (number, number + 1))
            kl = measure(before, after, promise=end.done[number].promise, dtypes=("float32",)).kl
            cost = f"costs KL {kl:.2g} on the probe"
        costs.append((str(step), cost + ", and needs training" * (guarantee == "retrained")))
    short_of = f"{name} cannot express {_some(way.start, most=2)}"
    if len(costs) == 1:
        return wrap(f"{short_of}: {' '.join(costs[0])}.", _WIDTH)
    width = max(len(step) for step, _ in costs)
    lines = wrap(f"{short_of}. These swaps would change that:", _WIDTH)
    lines += [f"  {step:{width}}  {cost}" for step, cost in costs]
    # One command can run the steps only if they are in the registry's order and no option appears twice.
    places = [list(options()).index(step.option) for step in way.steps]
    instructions = "all at once" if places == sorted(set(places)) else "one after the other, as the steps of a recipe"
    return [*lines, f"{instructions.capitalize()}, with --as hf:{name}."]


def _remaining_in_words(ways: Sequence[Way]) -> list[str]:
    """Choose the way after which the fewest obstacles remain, and describe these obstacles in lines of text."""
    if not ways:
        return []
    way = min(ways, key=lambda way: way.remaining.weight)
    if not way.remaining.standing:
        return wrap(f"After {way}: {way.remaining.reason}", _WIDTH)
    rest = f"; {way} would change the rest" if way.remedies else ""
    return wrap(f"No swap can change {_some(way.remaining, _FEW)} to match {way.start.target.owner}{rest}.", _WIDTH)


def _some(expression: Expression, most: int) -> str:
    """Return a phrase with the paths of the fields in which a model differs from a family, at most `most` of them.

    If there are more, the phrase ends in their number. `expression` has the differences.
    """
    paths = [obstacle.path for obstacle in by_layers(expression.standing, len(expression.spec.blocks))]
    return some_of(paths, most)
