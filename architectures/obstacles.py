"""What stands in the way of a tree in a target, a family's checkpoints or a format, and what of it costs nothing.

Whether a target holds a tree is never declared: it writes the tree, reads it back, and where the two trees differ the
differences are the obstacles. Two kinds of them cost nothing: how a component rounds, and biases of zeros, which come
and go. The others are cleared by swaps, which say themselves what they clear (`surgery.registry.Clears`). A target
declares the kinds of component that it has, so that `write` is never handed one that it knows nothing of: an
AttributeError in it is a mistake in it.
"""

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, overload

import msgspec

from ..components import Block, Component, Embedding, Head, ModelSpec, SubLayer, differences, without_rounding
from ..errors import CannotExpress, ConfigError, MissingComponent

Kinds = frozenset[type[Component]]
_STRUCTURE: Kinds = frozenset({ModelSpec, Embedding, Block, SubLayer, Head})
"""What every tree has, and no target has to declare."""

OWN_FORMAT = "To write the model in gptkit's own format, which can store any model: gptkit convert MODEL OUT --to local"
_MOST = 12
"""Obstacles that a message lists."""

_REFUSED = (CannotExpress, ConfigError, MissingComponent)
"""What a target says of a tree that it cannot write, or of what it has written. Anything else is a mistake in it."""

_Some = TypeVar("_Some", bound=Component)
_Other = TypeVar("_Other", bound=Component)
Zero = Callable[[str], bool]
_Remedy = Literal["rounding", "zeros"]


class Destination(Protocol):
    """What may hold a tree: a family, or a format.

    kinds: the components that may stand in its trees, beside `_STRUCTURE`. usual: a tree of its own, for what stands
    where.
    """

    @property
    def owner(self) -> str:
        """What messages call it."""
        ...

    @property
    def kinds(self) -> Kinds: ...

    @property
    def usual(self) -> ModelSpec: ...

    def back(self, spec: ModelSpec) -> ModelSpec:
        """The tree that it reads where it has written this one, which has no component but of its `kinds`.

        Raises:
            CannotExpress, ConfigError: it cannot write it, or refuses what it has written.
        """
        ...

    def bind(self, spec: ModelSpec) -> Sequence[Any]:
        """Its tensors for a tree that it holds. Raises CannotExpress: it has no name for one."""
        ...


class Obstacle(NamedTuple):
    """A field in which a target's tree differs: its path, what it is, what the target has there.

    remedy: what clears it and changes nothing: "rounding", the target rounds there in its own way; "zeros", biases of
    zeros that come or go. None where nothing does, or a swap.
    """

    path: str
    ours: Any
    theirs: Any
    remedy: _Remedy | None = None

    @property
    def is_bias(self) -> bool:
        """Whether it is a flag for biases."""
        return self.path.endswith("bias") and isinstance(self.ours, bool) and isinstance(self.theirs, bool)

    def told(self, owner: str) -> str:
        """It in words."""
        if self.theirs is None or (self.is_bias and self.ours):
            return f"{owner} has no {self.path}{'' if self.is_bias else f' ({short(self.ours)})'}"
        ours = "none" if self.ours is None else short(self.ours)
        return f"{self.path}: {ours}, {owner} has {short(self.theirs)}"


@dataclass(frozen=True)
class Expression:
    """A tree in a target's terms.

    found: the target's own tree that computes the same, None where something stands in the way. obstacles: every
    difference of the nearest tree that it has, or the components of kinds that it has not where it has no such tree.
    standing: those of them that are in the way. reason: why it has no tree like it at all.
    """

    target: Destination
    spec: ModelSpec
    found: ModelSpec | None
    obstacles: tuple[Obstacle, ...] = ()
    standing: tuple[Obstacle, ...] = ()
    reason: str = ""

    @property
    def weight(self) -> int:
        """How much is in the way. A component of another kind counts more than a number: it hides what differs in
        it; what cannot be written down at all counts most.
        """
        kinds = [isinstance(each.ours, Component) or isinstance(each.theirs, Component) for each in self.standing]
        return sum(4 if kind else 1 for kind in kinds) + (2**30 if self.reason else 0)

    @property
    def told(self) -> list[str]:
        """What is in the way, in words, what is alike in several layers once."""
        return [each.told(self.target.owner) for each in by_layers(self.standing, len(self.spec.blocks))]

    def refusal(self, hint: str = OWN_FORMAT) -> CannotExpress:
        """The error that lists what is in the way."""
        owner, told = self.target.owner, self.told
        if not told:
            return CannotExpress(f"{owner} cannot express this model: {self.reason}", hint)
        lines = "\n".join(f"  {each}" for each in told[:_MOST])
        return CannotExpress(f"{owner} cannot express {len(told)} components of this model:\n{lines}", hint)


def never(_name: str) -> bool:
    """No bias is known to be zero."""
    return False


def express(
    target: Destination,
    spec: ModelSpec,
    zero: Zero = never,
    clear: tuple[_Remedy, ...] = ("rounding", "zeros"),
    *,
    nearest: bool = True,
) -> Expression:
    """The tree that a target has for this one's function, or what stands in the way of it.

    Args:
        target: a family or a format.
        spec: the tree.
        zero: whether every value of a bias is zero, by its shared name; asked only where nothing but biases is in the
            way, or of those that are.
        clear: what does not stand in the way, because it changes nothing and will be done.
        nearest: whether to say what is in the way of a tree of other kinds too; else no more than that it is.
    """
    reasons: list[str] = []

    def tried(candidate: ModelSpec) -> Expression | None:
        try:
            back = target.back(candidate)
        except _REFUSED as error:
            reasons.append(error.message)
            return None
        found = () if back == spec else tuple(_obstacles(spec, back, zero))
        return Expression(target, spec, back, found, tuple(each for each in found if each.remedy not in clear))

    others = tuple(_others(_STRUCTURE | target.kinds, spec))
    attempts = [] if others else [tried(spec)]
    if attempts and attempts[0] is not None and not attempts[0].obstacles:
        return _bound(attempts[0])
    plain = without_rounding(spec)
    attempts += [] if others else [tried(plain)]
    if "zeros" in clear and any(each is not None and all(o.is_bias for o in each.standing) for each in attempts):
        bare = without_biases(spec, {p.name for p in spec.parameters() if p.name.endswith(".bias") and zero(p.name)})
        if bare != spec:
            attempts = [tried(bare), attempts[0], tried(without_rounding(bare)), attempts[1]]
    for each in attempts:
        if each is not None and not each.standing and _stays(target, each.found):
            return _bound(each)
    if nearest and not any(attempts):  # as much of it as the target has components for
        alike = [_in_kind(plain, target.usual, kinds) for kinds in (target.kinds, frozenset())]
        attempts = [tried(each) for each in dict.fromkeys(alike) if each is not None]
    best = min((each for each in attempts if each is not None), key=lambda each: each.weight, default=None)
    if best is None:
        return Expression(
            target,
            spec,
            None,
            others,
            others,
            reasons[0] if reasons else ("its sizes are not possible in this architecture"),
        )
    return replace(
        best,
        found=None,
        reason="" if best.standing else ("the config.json that gptkit would write describes another model"),
    )


def first_of(
    targets: Iterable[Destination],
    spec: ModelSpec,
    zero: Zero = never,
    clear: tuple[_Remedy, ...] = ("rounding", "zeros"),
    *,
    nearest: bool = True,
) -> tuple[Expression | None, list[Expression]]:
    """How the first of some targets that holds a tree does, None where none does; and why those before it do not. The
    arguments are those of `express`.
    """
    refused: list[Expression] = []
    for target in targets:
        found = express(target, spec, zero, clear, nearest=nearest)
        if found.found is not None:
            return found, refused
        refused.append(found)
    return None, refused


@overload
def of_kind(node: Any, kind: type[_Some]) -> _Some: ...
@overload
def of_kind(node: Any, kind: type[_Some], other: type[_Other]) -> _Some | _Other: ...
def of_kind(node: Any, kind: type[Component], other: type[Component] | None = None) -> Any:
    """The component, which a target's `write` wants to be of this kind, or of one of two.

    Raises:
        CannotExpress: it is another, or there is none.
    """
    kinds = (kind,) if other is None else (kind, other)
    if not isinstance(node, kinds):
        names = " or ".join(each.__name__ for each in kinds)
        raise CannotExpress(
            f"the format needs a component of the kind {names}, but the model has {short(node) if node else 'none'}"
        )
    return node


def _others(kinds: Kinds, node: Any, path: str = "") -> Iterator[Obstacle]:
    """The components of a tree that are of other kinds."""
    if isinstance(node, tuple):
        for index, each in enumerate(node):
            yield from _others(kinds, each, f"{path}.{index}")
    elif isinstance(node, Component):
        if type(node) not in kinds:
            yield Obstacle(path, node, None)
        for name, value in node.entries().items():
            yield from _others(kinds, value, f"{path}.{name}" if path else name)


def _obstacles(spec: ModelSpec, back: ModelSpec, zero: Zero) -> Iterator[Obstacle]:
    """Where a tree and what a target has for it differ, each with what clears it and changes nothing."""
    hard = [Obstacle(*each) for each in differences(without_rounding(spec), without_rounding(back))]
    paths = {each.path for each in hard}
    places: dict[str, list[tuple[str, Component]]] = {}
    if zero is not never and any(each.is_bias and each.ours for each in hard):
        for path, node in spec.nodes():
            expert = path.rpartition(".")[0].removesuffix("s")  # a flag of an expert is that of all
            for place in (path, expert):
                places.setdefault(place, []).append((path, node))
    for each in hard:
        known = each.is_bias and (not each.ours or (bool(places) and all(map(zero, _tensors(places, each)))))
        yield each._replace(remedy="zeros" if known else None)
    for path, ours, theirs in differences(spec, back):
        if path not in paths:
            yield Obstacle(path, ours, theirs, "rounding")


def _tensors(places: Mapping[str, Sequence[tuple[str, Component]]], flag: Obstacle) -> Iterator[str]:
    """The tensors that go with a flag for biases which is on, of the components at each place."""
    place, _, name = flag.path.rpartition(".")
    for path, node in places[place]:
        if name in node.__struct_fields__:
            less = msgspec.structs.replace(node, **{name: False})
            yield from (f"{path}.{tensor}" for tensor in node.shapes().keys() - less.shapes().keys())


def _stays(target: Destination, found: ModelSpec | None) -> bool:
    """Whether a target reads its own tree as what it is."""
    try:
        return found is not None and target.back(found) == found
    except _REFUSED:
        return False


def _bound(expression: Expression) -> Expression:
    """The same, where the target has names for all tensors: a config may say more than its checkpoints do."""
    assert expression.found is not None
    try:
        expression.target.bind(expression.found)
    except CannotExpress as error:
        return Expression(expression.target, expression.spec, None, reason=error.message)
    return expression


def without_biases(spec: ModelSpec, gone: Collection[str]) -> ModelSpec:
    """The tree with every flag for biases off whose tensors are all among `gone` (shared names)."""

    def bare(node: Component, path: str) -> Component:
        for flag in (name for name in node.__struct_fields__ if name.endswith("bias") and getattr(node, name) is True):
            less = msgspec.structs.replace(node, **{flag: False})
            if {f"{path}.{name}" for name in node.shapes().keys() - less.shapes().keys()} <= set(gone):
                node = less
        return node

    found: ModelSpec = spec.mapped(bare)
    return found


# --- the nearest tree -------------------------------------------------------------------------------------------------


def _in_kind(spec: ModelSpec, usual: ModelSpec, kinds: Kinds) -> ModelSpec | None:
    """A tree of a target's components with this one's sizes, as far as they have such; None where they do not fit.

    Components are those of the target's usual tree; of others those of `kinds` stay as they are.
    """
    instead: dict[type[Component], Component] = {}  # what the target has for a kind, where it has no component as usual

    def like(node: Any, usual: Component, sizes: Mapping[str, Any]) -> Any:
        """A component like `usual` with what `node` says of it, or else what `sizes` says."""
        if type(node) is not type(usual) and type(node) in kinds:
            return node
        if isinstance(node, Component):
            instead.setdefault(type(node), usual)
        if not hasattr(usual, "expert"):
            node = getattr(node, "expert", node)
        width = getattr(node, "head_dim", getattr(node, "query_dim", None))
        if hasattr(usual, "heads") and width is not None:
            sizes = {**sizes, "size": width, "dim": width, "head_dim": width, "kv_heads": node.heads}
        fields: dict[str, Any] = {}
        for name in usual.__struct_fields__:
            theirs: Any = getattr(usual, name)
            ours: Any = getattr(node, name, sizes.get(name))
            if name == "blocks":
                fields[name] = tuple(like(block, _nearest(block, theirs), sizes) for block in ours)
            elif name == "sublayers":
                by_slot = {each.mixer.slot: each for each in ours}
                fields[name] = tuple(like(by_slot.get(each.mixer.slot), each, sizes) for each in theirs)
            elif isinstance(theirs, Component):
                inner = node if name == "expert" and not hasattr(node, name) else ours
                fields[name] = like(inner, theirs, sizes)
            elif isinstance(ours, Component) and type(ours) not in kinds:
                fields[name] = like(ours, instead[type(ours)], sizes) if type(ours) in instead else None
            else:
                fields[name] = ours if hasattr(node, name) or name in sizes else theirs
        return type(usual)(**fields)

    if (spec.encoder is None) != (usual.encoder is None):
        return None
    try:
        whole = msgspec.structs.replace(spec, context_length=spec.context_length or usual.context_length)
        sizes = {"size": spec.hidden_size, "hidden_size": spec.hidden_size, "length": whole.context_length}
        found: ModelSpec = like(whole, usual, sizes)
    except ConfigError:
        return None
    return found


def _nearest(block: Block, others: Sequence[Block]) -> Block:
    """The first of the others that has most mixers in the places of this one's."""
    slots = {each.mixer.slot for each in block.sublayers}
    return max(dict.fromkeys(others), key=lambda other: len(slots & {each.mixer.slot for each in other.sublayers}))


# --- in words ---------------------------------------------------------------------------------------------------------


def by_layers(obstacles: Iterable[tuple[Any, ...]], layers: int) -> list[Obstacle]:
    """The same difference in several layers told once: blocks.*.x, or blocks.0-2,5.x where it is not in all."""
    told: dict[tuple[str, str, str], list[int]] = {}
    first: dict[tuple[str, str, str], Obstacle] = {}
    for each in obstacles:
        parts = each[0].split(".")
        inside = parts[0] == "blocks" and len(parts) > 1
        rest = ".".join(parts[2:]) if inside else each[0]
        key = (f"blocks/{rest}" if inside else rest, repr(each[1]), repr(each[2]))
        first.setdefault(key, Obstacle(rest, *each[1:]))
        told.setdefault(key, []).extend([int(parts[1])] if inside else [])
    return [
        each._replace(path=f"blocks.{'*' if len(told[key]) == layers else ranges(told[key])}.{each.path}")
        if told[key]
        else each
        for key, each in first.items()
    ]


def ranges(numbers: Sequence[int]) -> str:
    """0, 1, 2, 5 -> 0-2,5."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def short(value: Any) -> str:
    """A component or field value in a few words."""
    if hasattr(value, "__struct_fields__"):
        return type(value).__name__
    text = json.dumps(value) if isinstance(value, str | int | float | bool) or value is None else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
