"""Find out whether a target (a family or a file format) can express a tree, and which differences are in the way.

A target does not declare which trees it can express. Instead, gptkit lets it write the tree and read it back. The
differences between the two trees are the *obstacles*. Two kinds of obstacle can be removed without changing the
function: other rounding, and biases that are all zero. Swaps remove the others, and every swap declares which ones
(`surgery.registry.Clears`). A target declares its kinds of component, so `write` never gets an unknown kind, and an
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
"""The kinds of component that every tree has. Targets need not declare them."""

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
    """A target that may be able to express a tree: a family or a format."""

    @property
    def owner(self) -> str:
        """The name of the target in messages."""
        ...

    @property
    def kinds(self) -> Kinds:
        """The kinds of component in the target's trees, without those of `_STRUCTURE`."""
        ...

    @property
    def usual(self) -> ModelSpec:
        """An example of the target's trees, which shows where every component belongs."""
        ...

    def back(self, spec: ModelSpec) -> ModelSpec:
        """Write a tree and return the tree that the target reads from the result. All components must be in `kinds`.

        Raises:
            CannotExpress, ConfigError: the target cannot write the tree, or refuses to read the result.
        """
        ...

    def bind(self, spec: ModelSpec) -> Sequence[Any]:
        """Return the target's weight map for a tree. Raises CannotExpress if the target has no name for a tensor."""
        ...


class Obstacle(NamedTuple):
    """A difference between a tree and the nearest tree of a target."""

    path: str
    """The path of the field that differs, such as blocks.3.attention.window."""
    ours: Any
    """The field's value in the tree."""
    theirs: Any
    """The field's value in the target's tree."""
    remedy: _Remedy | None = None
    """How to remove the obstacle without changing the function: "rounding" lets the target round in its own way, and
    "zeros" adds or removes biases that are all zero. None if only a swap can remove it, or nothing."""

    @property
    def is_bias(self) -> bool:
        """Whether the field that differs says that a component has biases."""
        return self.path.endswith("bias") and isinstance(self.ours, bool) and isinstance(self.theirs, bool)

    def sentence(self, owner: str) -> str:
        """Return a sentence about the obstacle; `owner` is the target's name."""
        if self.theirs is None or (self.is_bias and self.ours):
            return f"{owner} has no {self.path}{'' if self.is_bias else f' ({short(self.ours)})'}"
        ours = "none" if self.ours is None else short(self.ours)
        return f"{self.path}: {ours}, {owner} has {short(self.theirs)}"


@dataclass(frozen=True)
class Expression:
    """The result of `express`: the target's tree, or the obstacles."""

    target: Destination
    spec: ModelSpec
    """The model's tree."""
    tree: ModelSpec | None
    """The target's tree that computes the same function, or None."""
    obstacles: tuple[Obstacle, ...] = ()
    """All differences from the target's nearest tree. If there is no such tree, the components of kinds that the target
    does not know."""
    standing: tuple[Obstacle, ...] = ()
    """The obstacles that prevent writing the tree."""
    reason: str = ""
    """Why the target has no similar tree at all."""

    @property
    def weight(self) -> int:
        """A number that says how far the tree is from the target's trees. It counts the obstacles in `standing`.

        A component of another kind counts as 4 values, since it may contain more differences. A tree that the target
        cannot write at all counts most.
        """
        kinds = [
            isinstance(obstacle.ours, Component) or isinstance(obstacle.theirs, Component) for obstacle in self.standing
        ]
        return sum(4 if kind else 1 for kind in kinds) + (2**30 if self.reason else 0)

    @property
    def sentences(self) -> list[str]:
        """The obstacles as sentences. One that occurs in several layers is listed once."""
        return [obstacle.sentence(self.target.owner) for obstacle in by_layers(self.standing, len(self.spec.blocks))]

    def refusal(self, hint: str = OWN_FORMAT) -> CannotExpress:
        """Return an error that lists the obstacles."""
        owner, sentences = self.target.owner, self.sentences
        if not sentences:
            return CannotExpress(f"{owner} cannot express this model: {self.reason}", hint)
        lines = "\n".join(f"  {sentence}" for sentence in sentences[:_MOST])
        return CannotExpress(f"{owner} cannot express {len(sentences)} components of this model:\n{lines}", hint)


def never(_name: str) -> bool:
    """Return False. Without the weights, gptkit does not know whether a bias is zero."""
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
        zero: returns whether all values of a bias are zero, given its shared name. It is only called if biases are the
            only obstacles, and only for these biases.
        clear: the remedies that the caller will apply. Obstacles with these remedies are not in the way.
        nearest: list all obstacles even if the target lacks kinds of component, by comparing with its nearest tree.
            Otherwise only the components of unknown kinds are listed.
    """
    reasons: list[str] = []

    def attempt(candidate: ModelSpec) -> Expression | None:
        """Compare the tree with the one that the target reads back for the candidate.

        Return None if the target refuses it.
        """
        try:
            back = target.back(candidate)
        except _REFUSED as error:
            reasons.append(error.message)
            return None
        obstacles = () if back == spec else tuple(_obstacles(spec, back, zero))
        standing = tuple(obstacle for obstacle in obstacles if obstacle.remedy not in clear)
        return Expression(target, spec, back, obstacles, standing)

    unknown = tuple(_unknown(_STRUCTURE | target.kinds, spec))
    attempts: list[Expression | None] = []
    if not unknown:
        first = attempt(spec)
        if first is not None and not first.obstacles:
            return _bound(first)
        attempts = _with_remedies(attempt, spec, first, zero, clear)
    for result in attempts:
        if result is not None and not result.standing and _stays(target, result.tree):
            return _bound(result)
    if nearest and not any(attempts):
        # Compare with a tree in which components that the target does not know are replaced by those that it knows.
        plain = without_rounding(spec)
        alike = [_in_kind(plain, target.usual, kinds) for kinds in (target.kinds, frozenset())]
        attempts = [attempt(tree) for tree in dict.fromkeys(alike) if tree is not None]
    best = min((result for result in attempts if result is not None), key=lambda result: result.weight, default=None)
    if best is None:
        reason = reasons[0] if reasons else "its sizes are not possible in this architecture"
        return Expression(target, spec, None, unknown, unknown, reason)
    reason = "" if best.standing else "the config.json that gptkit would write describes another model"
    return replace(best, tree=None, reason=reason)


def _with_remedies(
    attempt: Callable[[ModelSpec], Expression | None],
    spec: ModelSpec,
    first: Expression | None,
    zero: Zero,
    clear: tuple[_Remedy, ...],
) -> list[Expression | None]:
    """Return what `attempt` gives for the tree, for the tree without its rounding, and for both without zero biases.

    The attempts without zero biases come first. They are only made if biases may be the only obstacles.

    Args:
        attempt: compares the tree with what the target makes of a candidate.
        spec: the tree.
        first: the result of `attempt` for the tree itself.
        zero: see `express`.
        clear: see `express`.
    """
    attempts = [first, attempt(without_rounding(spec))]
    only_biases = any(
        result is not None and all(obstacle.is_bias for obstacle in result.standing) for result in attempts
    )
    if "zeros" not in clear or not only_biases:
        return attempts
    bare = without_biases(spec, {p.name for p in spec.parameters() if p.name.endswith(".bias") and zero(p.name)})
    if bare == spec:
        return attempts
    return [attempt(bare), attempts[0], attempt(without_rounding(bare)), attempts[1]]


def first_of(
    targets: Iterable[Destination],
    spec: ModelSpec,
    zero: Zero = never,
    clear: tuple[_Remedy, ...] = ("rounding", "zeros"),
    *,
    nearest: bool = True,
) -> tuple[Expression | None, list[Expression]]:
    """Return the expression of the first target that can express a tree, or None.

    Also return those of the earlier targets. The other arguments are those of `express`.
    """
    refused: list[Expression] = []
    for target in targets:
        expression = express(target, spec, zero, clear, nearest=nearest)
        if expression.tree is not None:
            return expression, refused
        refused.append(expression)
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
        names = " or ".join(kind.__name__ for kind in kinds)
        raise CannotExpress(
            f"the format needs a component of the kind {names}, but the model has {short(node) if node else 'none'}"
        )
    return node


def _unknown(kinds: Kinds, node: Any, path: str = "") -> Iterator[Obstacle]:
    """Yield the components of a tree whose kinds are not among these."""
    if isinstance(node, tuple):
        for index, inner in enumerate(node):
            yield from _unknown(kinds, inner, f"{path}.{index}")
    elif isinstance(node, Component):
        if type(node) not in kinds:
            yield Obstacle(path, node, None)
        for name, value in node.entries().items():
            yield from _unknown(kinds, value, f"{path}.{name}" if path else name)


def _obstacles(spec: ModelSpec, back: ModelSpec, zero: Zero) -> Iterator[Obstacle]:
    """Yield the differences between a tree and the target's tree, with their remedies."""
    hard = [Obstacle(*difference) for difference in differences(without_rounding(spec), without_rounding(back))]
    paths = {obstacle.path for obstacle in hard}
    places: dict[str, list[tuple[str, Component]]] = {}
    if zero is not never and any(obstacle.is_bias and obstacle.ours for obstacle in hard):
        for path, node in spec.nodes():
            expert = path.rpartition(".")[0].removesuffix("s")  # all experts share the flag
            for place in (path, expert):
                places.setdefault(place, []).append((path, node))
    for obstacle in hard:
        known = obstacle.is_bias and (
            not obstacle.ours or (bool(places) and all(map(zero, _tensors(places, obstacle))))
        )
        yield obstacle._replace(remedy="zeros" if known else None)
    for path, ours, theirs in differences(spec, back):
        if path not in paths:
            yield Obstacle(path, ours, theirs, "rounding")


def _tensors(places: Mapping[str, Sequence[tuple[str, Component]]], flag: Obstacle) -> Iterator[str]:
    """Yield the names of the bias tensors that would not exist if the field `flag` were false.

    Args:
        places: the components of the tree, with their paths, by the path that an obstacle may have.
        flag: the obstacle whose field says that there are biases.
    """
    place, _, name = flag.path.rpartition(".")
    for path, node in places[place]:
        if name in node.__struct_fields__:
            less = msgspec.structs.replace(node, **{name: False})
            yield from (f"{path}.{tensor}" for tensor in node.shapes().keys() - less.shapes().keys())


def _stays(target: Destination, tree: ModelSpec | None) -> bool:
    """Return whether the target, given one of its own trees, writes it and reads the same tree back."""
    try:
        return tree is not None and target.back(tree) == tree
    except _REFUSED:
        return False


def _bound(expression: Expression) -> Expression:
    """Return the expression. If the target has no name for a tensor, return a refusal instead.

    A family's config.json may describe trees for which its checkpoints have no tensor names.
    """
    assert expression.tree is not None
    try:
        expression.target.bind(expression.tree)
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

    tree: ModelSpec = spec.mapped(bare)
    return tree


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
                by_slot = {sublayer.mixer.slot: sublayer for sublayer in ours}
                fields[name] = tuple(like(by_slot.get(sublayer.mixer.slot), sublayer, sizes) for sublayer in theirs)
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
        tree: ModelSpec = like(whole, usual, sizes)
    except ConfigError:
        return None
    return tree


def _nearest(block: Block, others: Sequence[Block]) -> Block:
    """Return the first of the other blocks that has the most mixer slots in common with this one."""
    slots = {sublayer.mixer.slot for sublayer in block.sublayers}
    return max(
        dict.fromkeys(others), key=lambda other: len(slots & {sublayer.mixer.slot for sublayer in other.sublayers})
    )


# --- in words ---------------------------------------------------------------------------------------------------------


def by_layers(obstacles: Iterable[tuple[Any, ...]], layers: int) -> list[Obstacle]:
    """Merge obstacles that are equal in several layers: blocks.*.x for all layers, blocks.0-2,5.x for some."""
    numbers: dict[tuple[str, str, str], list[int]] = {}
    first: dict[tuple[str, str, str], Obstacle] = {}
    for obstacle in obstacles:
        parts = obstacle[0].split(".")
        inside = parts[0] == "blocks" and len(parts) > 1
        rest = ".".join(parts[2:]) if inside else obstacle[0]
        key = (f"blocks/{rest}" if inside else rest, repr(obstacle[1]), repr(obstacle[2]))
        first.setdefault(key, Obstacle(rest, *obstacle[1:]))
        numbers.setdefault(key, []).extend([int(parts[1])] if inside else [])
    return [
        obstacle._replace(path=f"blocks.{'*' if len(which) == layers else ranges(which)}.{obstacle.path}")
        if which
        else obstacle
        for obstacle, which in zip(first.values(), numbers.values(), strict=True)
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
