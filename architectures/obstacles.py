"""Find out whether a target (a family or a file format) can express a tree, and which differences are in the way.

A target does not declare which trees it can express. Instead, gptkit lets it write the tree and read it back. The
differences between the two trees are the *obstacles*. Two kinds of obstacle can be removed without changing the
function: other rounding, and biases that are all zero. Swaps clear the others, and each declares which ones
(`surgery.registry.Clears`). A target does declare its kinds of component, so `write` never gets an unknown kind, and an
AttributeError in `write` is a bug of the target.
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
"""The kinds that every tree has. Targets need not declare them."""

OWN_FORMAT = "To write the model in gptkit's own format, which can store any model: gptkit convert MODEL OUT --to local"
_MOST = 12
"""The number of obstacles that a message lists."""

_REFUSED = (CannotExpress, ConfigError, MissingComponent)
"""Errors by which a target refuses to write or read a tree. Any other error is a bug of the target."""

_Some = TypeVar("_Some", bound=Component)
_Other = TypeVar("_Other", bound=Component)
Zero = Callable[[str], bool]
_Remedy = Literal["rounding", "zeros"]


class Destination(Protocol):
    """A target that may be able to express a tree: a family or a format.

    kinds: the kinds of component in its trees, other than `_STRUCTURE`. usual: an example of its trees, which shows
    where every component belongs.
    """

    @property
    def owner(self) -> str:
        """The name of the target in messages."""
        ...

    @property
    def kinds(self) -> Kinds: ...

    @property
    def usual(self) -> ModelSpec: ...

    def back(self, spec: ModelSpec) -> ModelSpec:
        """Write a tree and return the tree that the target reads from the result. All components must be in `kinds`.

        Raises:
            CannotExpress, ConfigError: the target cannot write the tree, or refuses to read the result.
        """
        ...

    def bind(self, spec: ModelSpec) -> Sequence[Any]:
        """Return the target's tensors for a tree. Raises CannotExpress if it has no name for a tensor."""
        ...


class Obstacle(NamedTuple):
    """A difference between a tree and the nearest tree of a target.

    path: the field that differs. ours: its value in the tree. theirs: its value in the target's tree. remedy: how to
    remove the obstacle without changing the function: "rounding" lets the target round in its own way, "zeros" adds or
    removes biases that are all zero. None if only a swap can remove it, or nothing.
    """

    path: str
    ours: Any
    theirs: Any
    remedy: _Remedy | None = None

    @property
    def is_bias(self) -> bool:
        """Whether the field says that a component has biases."""
        return self.path.endswith("bias") and isinstance(self.ours, bool) and isinstance(self.theirs, bool)

    def told(self, owner: str) -> str:
        """Return a sentence about the obstacle; `owner` is the target's name."""
        if self.theirs is None or (self.is_bias and self.ours):
            return f"{owner} has no {self.path}{'' if self.is_bias else f' ({short(self.ours)})'}"
        ours = "none" if self.ours is None else short(self.ours)
        return f"{self.path}: {ours}, {owner} has {short(self.theirs)}"


@dataclass(frozen=True)
class Expression:
    """The result of `express`: how a target expresses a tree, or why it cannot.

    found: the target's tree that computes the same function, or None. obstacles: all differences from the target's
    nearest tree, or if it has none, the components of kinds that it does not know. standing: the obstacles that prevent
    writing the tree. reason: why the target has no similar tree at all.
    """

    target: Destination
    spec: ModelSpec
    found: ModelSpec | None
    obstacles: tuple[Obstacle, ...] = ()
    standing: tuple[Obstacle, ...] = ()
    reason: str = ""

    @property
    def weight(self) -> int:
        """A number that grows with the obstacles. A component of another kind counts as 4 values, since it may hide
        differences inside. A tree that the target cannot write at all counts most.
        """
        kinds = [isinstance(each.ours, Component) or isinstance(each.theirs, Component) for each in self.standing]
        return sum(4 if kind else 1 for kind in kinds) + (2**30 if self.reason else 0)

    @property
    def told(self) -> list[str]:
        """The obstacles as sentences. One that occurs in several layers is listed once."""
        return [each.told(self.target.owner) for each in by_layers(self.standing, len(self.spec.blocks))]

    def refusal(self, hint: str = OWN_FORMAT) -> CannotExpress:
        """Return an error that lists the obstacles."""
        owner, told = self.target.owner, self.told
        if not told:
            return CannotExpress(f"{owner} cannot express this model: {self.reason}", hint)
        lines = "\n".join(f"  {each}" for each in told[:_MOST])
        return CannotExpress(f"{owner} cannot express {len(told)} components of this model:\n{lines}", hint)


def never(_name: str) -> bool:
    """Return False: without weights, no bias is known to be zero."""
    return False


def express(
    target: Destination,
    spec: ModelSpec,
    zero: Zero = never,
    clear: tuple[_Remedy, ...] = ("rounding", "zeros"),
    *,
    nearest: bool = True,
) -> Expression:
    """Return the target's tree for the same function, or the obstacles.

    Args:
        target: a family or a format.
        spec: the tree.
        zero: returns whether all values of a bias are zero, given its shared name. It is only called if biases are
            the only obstacles, and for biases that are obstacles.
        clear: the remedies that the caller will apply. Obstacles with these remedies are not in the way.
        nearest: list the obstacles even if the target lacks kinds of component, by comparing with its nearest tree.
            Otherwise only the components of unknown kinds are listed.
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
    """Return the expression of the first target that can express a tree, or None, and those of the targets before it.

    The other arguments are those of `express`.
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
    """Return the component if it is of the given kind, or of one of the two given kinds.

    Raises:
        CannotExpress: the component is of another kind, or is None.
    """
    kinds = (kind,) if other is None else (kind, other)
    if not isinstance(node, kinds):
        names = " or ".join(each.__name__ for each in kinds)
        raise CannotExpress(
            f"the format needs a component of the kind {names}, but the model has {short(node) if node else 'none'}"
        )
    return node


def _others(kinds: Kinds, node: Any, path: str = "") -> Iterator[Obstacle]:
    """Yield the components of a tree that are not of these kinds."""
    if isinstance(node, tuple):
        for index, each in enumerate(node):
            yield from _others(kinds, each, f"{path}.{index}")
    elif isinstance(node, Component):
        if type(node) not in kinds:
            yield Obstacle(path, node, None)
        for name, value in node.entries().items():
            yield from _others(kinds, value, f"{path}.{name}" if path else name)


def _obstacles(spec: ModelSpec, back: ModelSpec, zero: Zero) -> Iterator[Obstacle]:
    """Yield the differences between a tree and the target's tree, with their remedies."""
    hard = [Obstacle(*each) for each in differences(without_rounding(spec), without_rounding(back))]
    paths = {each.path for each in hard}
    places: dict[str, list[tuple[str, Component]]] = {}
    if zero is not never and any(each.is_bias and each.ours for each in hard):
        for path, node in spec.nodes():
            expert = path.rpartition(".")[0].removesuffix("s")  # all experts share the flag
            for place in (path, expert):
                places.setdefault(place, []).append((path, node))
    for each in hard:
        known = each.is_bias and (not each.ours or (bool(places) and all(map(zero, _tensors(places, each)))))
        yield each._replace(remedy="zeros" if known else None)
    for path, ours, theirs in differences(spec, back):
        if path not in paths:
            yield Obstacle(path, ours, theirs, "rounding")


def _tensors(places: Mapping[str, Sequence[tuple[str, Component]]], flag: Obstacle) -> Iterator[str]:
    """Yield the names of the bias tensors that exist because the flag is set."""
    place, _, name = flag.path.rpartition(".")
    for path, node in places[place]:
        if name in node.__struct_fields__:
            less = msgspec.structs.replace(node, **{name: False})
            yield from (f"{path}.{tensor}" for tensor in node.shapes().keys() - less.shapes().keys())


def _stays(target: Destination, found: ModelSpec | None) -> bool:
    """Return whether the target reads its own tree back unchanged."""
    try:
        return found is not None and target.back(found) == found
    except _REFUSED:
        return False


def _bound(expression: Expression) -> Expression:
    """Return the expression, or a refusal if the target has no name for a tensor. A config may describe such trees."""
    assert expression.found is not None
    try:
        expression.target.bind(expression.found)
    except CannotExpress as error:
        return Expression(expression.target, expression.spec, None, reason=error.message)
    return expression


def without_biases(spec: ModelSpec, dropped: Collection[str]) -> ModelSpec:
    """Return the tree without the biases whose tensors are all in `dropped` (shared names)."""

    def bare(node: Component, path: str) -> Component:
        for flag in (name for name in node.__struct_fields__ if name.endswith("bias") and getattr(node, name) is True):
            less = msgspec.structs.replace(node, **{flag: False})
            if {f"{path}.{name}" for name in node.shapes().keys() - less.shapes().keys()} <= set(dropped):
                node = less
        return node

    found: ModelSpec = spec.mapped(bare)
    return found


# --- the nearest tree -------------------------------------------------------------------------------------------------


def _in_kind(spec: ModelSpec, usual: ModelSpec, kinds: Kinds) -> ModelSpec | None:
    """Return a tree of the target's components with the sizes of this tree, or None if the sizes are impossible.

    Components of `kinds` stay as they are. Others are replaced by those of the target's usual tree.
    """
    instead: dict[type[Component], Component] = {}  # replacements for fields that are None in the usual tree

    def like(node: Any, usual: Component, sizes: Mapping[str, Any]) -> Any:
        """Return a component like `usual`, with the values of `node`, or else of `sizes`."""
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
    """Return the first of the other blocks that has the most mixer slots in common with this one."""
    slots = {each.mixer.slot for each in block.sublayers}
    return max(dict.fromkeys(others), key=lambda other: len(slots & {each.mixer.slot for each in other.sublayers}))


# --- in words ---------------------------------------------------------------------------------------------------------


def by_layers(obstacles: Iterable[tuple[Any, ...]], layers: int) -> list[Obstacle]:
    """Merge obstacles that are equal in several layers: blocks.*.x for all layers, blocks.0-2,5.x for some."""
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
    """Write sorted numbers as ranges: 0, 1, 2, 5 -> 0-2,5."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def short(value: Any) -> str:
    """Return the class name of a component, or a value as at most 60 characters of JSON."""
    if hasattr(value, "__struct_fields__"):
        return type(value).__name__
    text = json.dumps(value) if isinstance(value, str | int | float | bool) or value is None else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
