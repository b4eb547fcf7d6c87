"""What stands between a tree and the Hugging Face families that come nearest to it, and the swaps that would clear it.

An obstacle is a field of the tree in which the family's own tree differs; biases of zeros and how components round are
none. For each there are swaps that bring such a field about (`remedies`). `way_to` takes one after the other, those
that cost nothing first, as long as fewer obstacles are left after it, and gives up what turned out needless.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from textwrap import wrap
from typing import Any, cast

import numpy as np

from ..architectures import Architecture
from ..architectures.base import collapse, short
from ..components import (
    ALiBi,
    Attention,
    FeedForward,
    GatedFeedForward,
    LatentAttention,
    LayerNorm,
    LearnedPositions,
    MixtureOfExperts,
    ModelSpec,
    RMSNorm,
    Rotary,
)
from ..converter.adapt import between, is_bias
from ..errors import CannotExpress, InvalidInput, SwapRefused, UsageError
from .base import Array, Exactly, Guarantee, Model, Swapped, SwappedModel, Wide, weakest
from .fitting import fitting, zero_biases
from .measure import measure
from .registry import Step, apply, options

__all__ = ["Way", "in_the_way", "nearest", "remedies", "standing", "way_to"]

Obstacle = tuple[str, Any, Any]
"""A field of the tree: its path, what it is, what the family has."""

NEAR = 3
"""Families that are told of."""
SHOWN = 12
"""Obstacles of each: all of them where one family is asked for, else a few."""
FEW = 3
MOST = 10
"""Remedies one after the other."""
WIDTH = 76
"""Of a sentence, which the command line indents."""
READ, READ_ONCE = 5 * 10**8, 10**8
"""Values that may be read to find a way, and to try one swap: some seconds. What would need more is not proposed."""
SMALL = 50_000_000
"""Parameters of a model whose damage is measured only to tell of it."""


# --- what is in the way -----------------------------------------------------------------------------------------------


def standing(architecture: Architecture, model: Model) -> list[Obstacle] | None:
    """The obstacles on a tree's way into a family, layer by layer; None where the family has no config for anything
    like it.
    """
    found = between(architecture, model.spec)
    return None if found is None else [each for each in found if not is_bias(*each) or _real(model, each)]


def _real(model: Model, obstacle: Obstacle) -> bool:
    """Whether a bias that the family has not is more than zeros. One that it has and the tree has not always is zero.

    Weights that are too much to read count as more than zeros.
    """
    among = _under(model.spec, obstacle) if obstacle[1] else []
    try:
        return len(zero_biases(model, among)) < len(among)
    except (SwapRefused, InvalidInput):
        return True


def _under(spec: ModelSpec, obstacle: Obstacle) -> list[str]:
    """The tensors of a flag for biases."""
    place, _, flag = obstacle[0].rpartition(".")
    inside = [parameter.name for parameter in spec.parameters() if parameter.name.startswith(f"{place}.")]
    return [name for name in inside if name.endswith(BIASES[flag])]


BIASES: dict[str, tuple[str, ...]] = {
    "bias": (".bias",),
    "qkv_bias": (".q_proj.bias", ".k_proj.bias", ".v_proj.bias", ".kv_down_proj.bias", ".k_rope_proj.bias"),
    "output_bias": (".o_proj.bias",),
    "up_bias": (".up_proj.bias", ".gate_proj.bias"),
    "down_bias": (".down_proj.bias",),
}
"""The tensors under the flags of a component."""


def weight(obstacles: Sequence[Obstacle]) -> int:
    """How much is in the way. A component of another kind counts more than a number: it hides what differs in it."""
    return sum(4 if hasattr(a, "__struct_fields__") or hasattr(b, "__struct_fields__") else 1 for _, a, b in obstacles)


def nearest(model: Model, tried: Sequence[Architecture]) -> list[tuple[Architecture, list[Obstacle]]]:
    """Families that have a config for something like the tree, the one with the least in the way first."""
    found = [(architecture, standing(architecture, model)) for architecture in tried]
    there = [(architecture, each) for architecture, each in found if each is not None]
    return sorted(there, key=lambda pair: weight(collapse(pair[1])))


def by_layers(obstacles: Sequence[Obstacle], layers: int) -> list[Obstacle]:
    """The same obstacle in several layers told once: blocks.*.x, or blocks.0-2,5.x where it is not in all."""
    told: dict[tuple[str, str, str], list[int]] = {}
    kept: dict[tuple[str, str, str], Obstacle] = {}
    for path, a, b in obstacles:
        parts = path.split(".")
        inside = parts[0] == "blocks" and len(parts) > 1
        rest = ".".join(parts[2:]) if inside else path
        key = (f"blocks/{rest}" if inside else path, repr(a), repr(b))
        kept.setdefault(key, (rest, a, b))
        told.setdefault(key, []).extend([int(parts[1])] if inside else [])
    found = []
    for key, (rest, a, b) in kept.items():
        if told[key]:
            rest = f"blocks.{'*' if len(told[key]) == layers else ranges(told[key])}.{rest}"
        found.append((rest, a, b))
    return found


def ranges(numbers: Sequence[int]) -> str:
    """0, 1, 2, 5 -> 0-2,5."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def told(obstacle: Obstacle, family: str) -> str:
    """An obstacle in words."""
    path, ours, theirs = obstacle
    if theirs is None or is_bias(path, ours, theirs):
        what = f" ({short(ours)})" if not isinstance(ours, bool) else ""
        return f"{path}{what}: {family} has none"
    return f"{path}: {'none' if ours is None else short(ours)}, {family} has {short(theirs)}"


# --- what would clear it ----------------------------------------------------------------------------------------------

Remedy = tuple[Step, ...]
"""Steps that only together clear something."""


def remedies(obstacle: Obstacle) -> Iterator[Remedy]:
    """Swaps that may make a field what the family has; whether they do is found out by trying them."""
    path, ours, theirs = obstacle
    field = path.rpartition(".")[2]
    for values in (_by_kind(field, ours, theirs), _by_value(field, theirs), _of_bias(path)):
        for option, value in values:
            yield (Step(option, value),)
    if field == "qkv_bias":
        less = (Step("drop", "key.bias"), Step("drop", "query.bias"))
        yield (*less, Step("fold", "value-bias"))
        yield (*less, Step("drop", "value.bias"))


def _by_kind(field: str, ours: Any, theirs: Any) -> Iterator[tuple[str, str]]:
    """(option, value) for a component in another's place."""
    if field.endswith("norm"):
        if isinstance(theirs, RMSNorm) or (field == "norm" and theirs is None):
            yield "norm", "rmsnorm"
        if isinstance(theirs, LayerNorm):
            yield "norm", "layernorm"
        if field == "feed_forward_norm":
            yield "block", "serial" if ours is None else "parallel:shared"
    if field in ("position", "positions"):
        if isinstance(theirs, Rotary) or field == "positions":
            yield "position", "rope"
            yield "position", "rope:neutral"
        if isinstance(theirs, ALiBi) or field == "positions":
            yield "position", "alibi"
        if isinstance(theirs, LearnedPositions) or isinstance(ours, Rotary | ALiBi):
            yield "position", "learned"
        if theirs is None:
            yield "position", "none"
    if isinstance(ours, LatentAttention) and isinstance(theirs, Attention):
        yield "attention", "mha"
    if isinstance(theirs, GatedFeedForward | FeedForward):
        if isinstance(ours, MixtureOfExperts):
            yield "mlp", "dense"
        yield "mlp", "gated" if isinstance(theirs, GatedFeedForward) else "plain"
    if isinstance(theirs, MixtureOfExperts):
        yield "mlp", f"moe:{theirs.experts}x{theirs.top_k}"


def _by_value(field: str, theirs: Any) -> Iterator[tuple[str, str]]:
    """(option, value) for a number or a word that the family has otherwise."""
    direct = {"heads", "head_dim", "activation"}
    renamed = {"intermediate_size": "intermediate", "context_length": "context", "length": "context"}
    if field in direct or field in renamed:
        yield renamed.get(field, field), str(theirs)
    elif field == "kv_heads":
        yield "attention", "mha"
        yield "attention", f"gqa:{theirs}"
    elif field == "scaling" and theirs is None:
        yield "rope_scaling", "none"
    elif field == "pairs":
        yield "rope_pairs", str(theirs)
    elif field == "dim":
        yield "rotary_dim", str(theirs)
    elif field == "parallel":
        yield "block", "parallel" if theirs else "serial"
    elif field == "tied":
        yield ("tie" if theirs else "untie"), ""
    elif field == "scale":
        yield "fold", "scale:head"
        yield "fold", "scale"


def _of_bias(path: str) -> Iterator[tuple[str, str]]:
    """(option, value) for a bias that the family has not."""
    place, _, flag = path.rpartition(".")
    names = {"output_bias": "output.bias", "up_bias": "up.bias", "down_bias": "down.bias"}
    if flag in names:
        yield "drop", names[flag]
    elif flag == "bias" and place == "head":
        yield "drop", "head.bias"
    elif flag == "bias" and place.endswith("norm"):
        yield "fold", "norm"
        yield "drop", "norm.bias"


class TooMuch(SwapRefused):
    """More would have to be read than may be, only to try a swap."""


class Bounded:
    """A tree of which no more than so many values are read: more raises TooMuch.

    `skipped` has the remedies that were given up for it.
    """

    def __init__(self, model: Model) -> None:
        self.model, self.spec = model, model.spec
        self.left, self.once = READ, READ_ONCE
        self.skipped: dict[str, Remedy] = {}
        self._sizes = {parameter.name: parameter.count for parameter in model.spec.parameters()}

    def lift(self) -> None:
        """Let everything be read: to measure what a way costs."""
        self.left = self.once = sys.maxsize

    @property
    def reference(self) -> str:
        return self.model.reference

    def dtype(self, name: str) -> str:
        return self.model.dtype(name)

    def _spend(self, name: str) -> None:
        if self._sizes[name] > min(self.left, self.once):
            raise TooMuch("too much would have to be read to try this swap")
        self.left -= self._sizes[name]
        self.once -= self._sizes[name]

    def raw(self, name: str) -> tuple[Array, str]:
        self._spend(name)
        return self.model.raw(name)

    def wide(self, name: str) -> Wide:
        self._spend(name)
        return self.model.wide(name)

    def read(self, name: str) -> Any:
        return self.model.read(name)

    def release(self) -> None:
        self.model.release()


class Unread:
    """A tree of whose biases none is read: each counts as ones."""

    def __init__(self, model: Model) -> None:
        self.model, self.spec = model, model.spec
        self._shapes = {parameter.name: parameter.shape for parameter in model.spec.parameters()}

    def wide(self, name: str) -> Wide:
        return np.ones(self._shapes[name])

    def release(self) -> None:
        """Nothing is held."""


@dataclass(frozen=True)
class Link:
    """A remedy that was taken: its steps, what they did, and the tree after each of them."""

    remedy: Remedy
    swapped: tuple[Swapped, ...]
    models: tuple[Model, ...]

    @property
    def model(self) -> Model:
        return self.models[-1]

    @property
    def guarantee(self) -> Guarantee:
        return weakest(each.guarantee for each in self.swapped)


@dataclass(frozen=True)
class Way:
    """Swaps towards a family: what is in the way of a tree, one link after the other, and what is left at their end."""

    architecture: Architecture
    start: Bounded
    obstacles: tuple[Obstacle, ...]
    links: tuple[Link, ...]
    left: tuple[Obstacle, ...]
    arrived: bool

    @property
    def guarantee(self) -> Guarantee:
        return weakest(each.guarantee for each in self.links)

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        return tuple(step for link in self.links for step in link.remedy)

    @property
    def one_command(self) -> bool:
        """Whether one command line does it: it carries out options in the registry's order, each once."""
        order = list(options())
        places = [order.index(step.option) for step in self.steps]
        return places == sorted(set(places))

    def __str__(self) -> str:
        return " ".join(str(step) for step in self.steps)


ORDER: tuple[Guarantee, ...] = ("exact", "approximate", "retrained")


def way_to(architecture: Architecture, model: Bounded) -> Way:
    """The way of a tree into a family, as far as there is one.

    At each point the remedy is taken that promises most, and among those the one that leaves least in the way; it must
    leave less than before. In the end what turned out needless is given up, and the rest put into the order of the
    registry where it can be.
    """
    links: list[Link] = []
    first = left = standing(architecture, model) or []
    here: Model = model
    while left and len(links) < MOST:
        candidates = []
        every = {str(remedy): remedy for each in collapse(left) for remedy in remedies(each)}
        for remedy in every.values():
            link = _tried(model, here, remedy)
            after = None if link is None else standing(architecture, link.model)
            if link is not None and after is not None and weight(after) < weight(left):
                candidates.append((ORDER.index(link.guarantee), weight(after), len(remedy), link, after))
        if not candidates:
            break
        *_, link, left = min(candidates, key=lambda found: found[:3])
        links.append(link)
        here = link.model
    way = Way(architecture, model, tuple(first), tuple(links), tuple(left), arrived=_arrived(architecture, here))
    return _tidied(way) if way.arrived else way


def _tried(start: Bounded, model: Model, remedy: Remedy) -> Link | None:
    """The trees after a remedy; None where one of its steps is not possible, or does nothing."""
    if str(remedy) in start.skipped:
        return None
    start.once = READ_ONCE
    swapped, models = [], []
    for step in remedy:
        try:
            done = _applied(model, step)
        except TooMuch:
            start.skipped[str(remedy)] = remedy
            return None
        except (SwapRefused, UsageError, InvalidInput):
            return None
        model = SwappedModel(model, done)
        swapped.append(done)
        models.append(model)
    return Link(remedy, tuple(swapped), tuple(models))


def _applied(model: Model, step: Step) -> Swapped:
    """A swap that is tried. Biases that are too much to compute count as more than zeros when they are dropped."""
    try:
        return apply(model, step)
    except TooMuch:
        if step.option != "drop":
            raise
        return apply(cast("Model", Unread(model)), step)


def _arrived(architecture: Architecture, model: Model) -> bool:
    """Whether the family holds the tree."""
    if standing(architecture, model) != []:
        return False
    zero = [name for each in between(architecture, model.spec) or [] if each[1] for name in _under(model.spec, each)]
    return fitting(architecture, model.spec, zero) is not None


def _again(way: Way, remedies: Sequence[Remedy]) -> Way | None:
    """The same way by these remedies; None where it does not arrive, or promises less."""
    links: list[Link] = []
    for remedy in remedies:
        link = _tried(way.start, links[-1].model if links else way.start, remedy)
        if link is None:
            return None
        links.append(link)
    found = replace(way, links=tuple(links))
    worse = ORDER.index(found.guarantee) > ORDER.index(way.guarantee)
    return None if worse or not links or not _arrived(way.architecture, links[-1].model) else found


def _tidied(way: Way) -> Way:
    """Without needless remedies, and in the registry's order where that does as well."""
    for link in way.links:
        way = _again(way, [each.remedy for each in way.links if each.remedy != link.remedy]) or way
    order = list(options())
    by_order = sorted((link.remedy for link in way.links), key=lambda remedy: order.index(remedy[0].option))
    return _again(way, by_order) or way


# --- in words ---------------------------------------------------------------------------------------------------------


def in_the_way(model: Model, tried: Sequence[Architecture]) -> CannotExpress:
    """What stands between a tree and the families that come nearest to it, and what would clear it at what cost.

    Args:
        model: a tree that none of the families holds.
        tried: the families, the one that it came from first.

    """
    bounded = Bounded(model)
    near = nearest(bounded, tried)[:NEAR]
    lines = []
    for architecture, obstacles in near:
        lines += _told_of(architecture, obstacles, model.spec, SHOWN if len(tried) == 1 else FEW)
    if tried[0] not in [architecture for architecture, _ in near] and len(near) < len(tried):
        reason = refusal(tried[0], model.spec)
        lines += [] if reason is None else [f"  {tried[0].name}: {reason}"]
    which = "no transformers architecture can" if len(tried) > 1 else f"{tried[0].name} cannot"
    message = f"{which} hold this tree. In the way:\n" + "\n".join(lines)
    ways = [way_to(architecture, bounded) for architecture, _ in near]
    arriving = [way for way in ways if way.arrived and way.links]
    if arriving:
        best = min(arriving, key=lambda way: (ORDER.index(way.guarantee), len(way.steps)))
        return CannotExpress(message, "\n".join(_told_way(best, model)))
    return CannotExpress(message, "\n".join(_told_left(ways, model.spec)))


def _told_of(architecture: Architecture, obstacles: Sequence[Obstacle], spec: ModelSpec, most: int) -> list[str]:
    """A family and what is in the way to it, a line each."""
    name = architecture.name
    found = [told(each, name) for each in by_layers(obstacles, len(spec.blocks))]
    if not found:
        return [f"  {name}: {refusal(architecture, spec) or 'its checkpoints have no names for some tensors'}"]
    more = [f"  and {len(found) - most} more for {name}"] if len(found) > most else []
    return [f"  {each}" for each in found[:most]] + more


def refusal(architecture: Architecture, spec: ModelSpec) -> str | None:
    """Why a family has no config at all for anything like a tree."""
    try:
        architecture.config_for(spec)
        architecture.bind(spec)
    except CannotExpress as error:
        if ":\n" in error.message:
            return None
        return error.message.partition(": ")[2] or error.message
    return None


def _told_way(way: Way, model: Model) -> list[str]:
    """The steps of a way and what each costs, where that is quickly measured."""
    name, small = way.architecture.name, sum(each.count for each in model.spec.parameters()) <= SMALL
    costs = []
    before: Model = way.start
    way.start.lift()
    for link in way.links:
        for each, swapped, after in zip(link.remedy, link.swapped, link.models, strict=True):
            costs.append((str(each), swapped.guarantee, _kl(before, swapped, after) if small else None))
            before = after
    short_of = f"It falls short of {name} by {_some(way.obstacles, model.spec, most=2)}"
    if len(costs) == 1:
        step, guarantee, kl = costs[0]
        return wrap(f"{short_of}: {step} {_price(guarantee, kl)}.", WIDTH)
    width = max(len(step) for step, *_ in costs)
    lines = wrap(f"{short_of}. What would clear the way:", WIDTH)
    lines += [f"  {step:{width}}  {_price(guarantee, kl)}" for step, guarantee, kl in costs]
    how = "all at once" if way.one_command else "one after the other, as the steps of a recipe"
    return [*lines, f"{how.capitalize()}, with --as hf:{name}."]


def _price(guarantee: Guarantee, kl: float | None) -> str:
    """What a step costs, in words."""
    if guarantee == "exact":
        return "changes nothing"
    cost = "costs something: swap it and see" if kl is None else f"costs KL {kl:.2g} on the probe"
    return cost if guarantee == "approximate" else f"{cost}, and is to be trained"


def _kl(before: Model, swapped: Swapped, after: Model) -> float | None:
    """KL divergence of a step that is not exact, in nats per token on the probe."""
    if swapped.guarantee == "exact":
        return None
    return measure(Exactly(before), Exactly(after), promise=swapped.promise, dtypes=("float32",)).kl


def _told_left(ways: Sequence[Way], spec: ModelSpec) -> list[str]:
    """What no swap clears, on the way that comes nearest."""
    own = "gptkit's own format holds any tree: --as local"
    found = [way for way in ways if way.left]
    if not found:
        return [own]
    way = min(found, key=lambda way: weight(collapse(list(way.left))))
    some = _some(way.left, spec, FEW)
    said = [f"No swap clears {some} on the way to {way.architecture.name}"]
    said += [f"{way} would clear the rest"] if way.links else []
    skipped = {str(step): None for step in (step for remedy in way.start.skipped.values() for step in remedy)}
    said += [f"not tried, for too much would have to be read: {', '.join(skipped)}"] if skipped else []
    return [*wrap("; ".join(said) + ".", WIDTH), own]


def _some(obstacles: Sequence[Obstacle], spec: ModelSpec, most: int) -> str:
    """The paths of obstacles, or the first of them and how many more there are."""
    paths = [path for path, *_ in by_layers(obstacles, len(spec.blocks))]
    more = f" and {len(paths) - most} more" if len(paths) > most else ""
    return ", ".join(paths[:most]) + more
