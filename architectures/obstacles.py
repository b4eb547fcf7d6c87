"""Find out whether a target (a model family or a file format) can express a model, and which differences prevent it.

A target does not declare which models it can express. Instead, gptkit lets it write a ModelSpec and read it back. The
differences between the two are the *obstacles*. Two kinds of obstacle can be removed without changing the function:
other rounding, and biases that are all zero. Swaps remove the others, and every swap declares which ones
(`surgery.registry.Clears`). A target declares its kinds of component, so `write` never gets an unknown kind, and an
AttributeError in `write` is a bug of the target.
"""

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, overload

import msgspec

from ..components import Block, Component, Embedding, Head, ModelSpec, SubLayer, differences, without_rounding
from ..errors import CannotExpress, ConfigError, MissingComponent

Kinds = frozenset[type[Component]]
_STRUCTURE: Kinds = frozenset({ModelSpec, Embedding, Block, SubLayer, Head})
"""The kinds of component that every model has. A target does not declare them in its `kinds`."""

OWN_FORMAT = "To write the model in gptkit's own format, which can store any model: gptkit convert MODEL OUT --to local"
_MOST = 12
"""The largest number of obstacles that an error message lists."""

_REFUSED = (CannotExpress, ConfigError, MissingComponent)
"""The errors that a target raises if it cannot write or read a model. Any other error is a bug of the target."""

_Some = TypeVar("_Some", bound=Component)
_Other = TypeVar("_Other", bound=Component)
Zero = Callable[[str], bool]
_Remedy = Literal["rounding", "zeros"]


class Destination(Protocol):
    """A target of conversions, which may be able to express a model: a model family or a file format."""

    @property
    def owner(self) -> str:
        """The name of the target in error messages."""
        ...

    @property
    def kinds(self) -> Kinds:
        """The kinds of component that models of the target may have, without those of `_STRUCTURE`."""
        ...

    @property
    def usual(self) -> ModelSpec:
        """An example of a model that the target can express. It shows where components of every kind belong."""
        ...

    def back(self, spec: ModelSpec) -> ModelSpec:
        """Let the target write a model, and return the ModelSpec that it reads from the result.

        All components of the model must be in `kinds`.

        Raises:
            CannotExpress, ConfigError: the target cannot write the model, or refuses to read the result.
        """
        ...

    def bind(self, spec: ModelSpec) -> Sequence[Any]:
        """Return which tensors the target's checkpoint has for a model, and which parameters every tensor contains.

        Raises CannotExpress if the target has no name for a parameter.
        """
        ...


class Obstacle(NamedTuple):
    """A difference between a model and the most similar model that a target can express."""

    path: str
    """The path of the field that differs in the ModelSpec, such as blocks.3.attention.window."""
    ours: Any
    """The field's value in the model."""
    theirs: Any
    """The field's value in the most similar model of the target."""
    remedy: _Remedy | None = None
    """How the obstacle can be removed without changing what the model computes. "rounding": let the target round in its
    own way. "zeros": add or remove biases that are all zero. None: only a swap can remove it, or nothing can."""

    @property
    def is_bias(self) -> bool:
        """Whether the field says that a component has biases."""
        return self.path.endswith("bias") and isinstance(self.ours, bool) and isinstance(self.theirs, bool)

    def sentence(self, owner: str) -> str:
        """Return a sentence that describes the obstacle. `owner` is the target's name."""
        if self.theirs is None or (self.is_bias and self.ours):
            return f"{owner} has no {self.path}{'' if self.is_bias else f' ({short(self.ours)})'}"
        ours = "none" if self.ours is None else short(self.ours)
        return f"{self.path}: {ours}, {owner} has {short(self.theirs)}"


@dataclass(frozen=True)
class Expression:
    """The result of `express`: whether a target can express a model, and which obstacles prevent it."""

    target: Destination
    spec: ModelSpec
    """The model."""
    tree: ModelSpec | None
    """The ModelSpec that the target can write and that computes the same function. None if there is no such
    ModelSpec."""
    obstacles: tuple[Obstacle, ...] = ()
    """All differences from the most similar model of the target. If there is no similar model, these are the components
    whose kinds the target does not have."""
    standing: tuple[Obstacle, ...] = ()
    """The obstacles that prevent the target from expressing the model."""
    reason: str = ""
    """The reason if the target has no similar model at all, or ""."""

    @property
    def weight(self) -> int:
        """How far the model is from those that the target can express, as a number.

        It counts the obstacles in `standing`.

        A component of another kind counts as 4, since it may contain more differences. If the target has no similar
        model at all, the number is at least 2^30.
        """
        kinds = [
            isinstance(obstacle.ours, Component) or isinstance(obstacle.theirs, Component) for obstacle in self.standing
        ]
        return sum(4 if kind else 1 for kind in kinds) + (2**30 if self.reason else 0)

    @property
    def sentences(self) -> list[str]:
        """Sentences that describe the obstacles in `standing`.

        An obstacle that occurs in several layers is described once.
        """
        return [obstacle.sentence(self.target.owner) for obstacle in by_layers(self.standing, len(self.spec.blocks))]

    def refusal(self, hint: str = OWN_FORMAT) -> CannotExpress:
        """Return an error that says why the target cannot express the model. The caller raises it."""
        owner, sentences = self.target.owner, self.sentences
        if not sentences:
            return CannotExpress(f"{owner} cannot express this model: {self.reason}", hint)
        lines = "\n".join(f"  {sentence}" for sentence in sentences[:_MOST])
        return CannotExpress(f"{owner} cannot express {len(sentences)} components of this model:\n{lines}", hint)


def never(_name: str) -> bool:
    """Return False for every bias.

    gptkit uses this function if it has no weights, and so cannot know whether a bias is zero.
    """
    return False


def express(
    target: Destination,
    spec: ModelSpec,
    zero: Zero = never,
    clear: tuple[_Remedy, ...] = ("rounding", "zeros"),
    *,
    nearest: bool = True,
) -> Expression:
    """Find out whether a target can express a model, and which obstacles prevent it.

    Args:
        target: a model family or a file format.
        spec: the model.
        zero: returns whether all values of a bias are zero, given its parameter name. It is only called if biases are
            the only obstacles, and only for these biases.
        clear: the values of `Obstacle.remedy` that the caller will apply. Obstacles with one of these remedies do not
            prevent anything.
        nearest: list all obstacles even if the target lacks kinds of component, by comparing with the most similar
            model of the target. Otherwise only the components of unknown kinds are listed.
    """
    reasons: list[str] = []

    def attempt(candidate: ModelSpec) -> Expression | None:
        """Compare the model with the ModelSpec that the target reads back after it has written `candidate`.

        Return None if the target refuses `candidate`.
        """
        try:
            back = target.back(candidate)
        except _REFUSED as error:
            reasons.append(error.message)
            return None
        obstacles = () if back == spec else tuple(_obstacles(spec, back, zero))
        standing = tuple(obstacle for obstacle in obstacles if obstacle.remedy not in clear)
        return Expression(target, spec, back, obstacles, standing)

    known = _STRUCTURE | target.kinds
    unknown = () if _kinds_in(spec) <= known else tuple(_unknown(known, spec))
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
    """Return the results of `attempt` for the variants of a model that a target may be able to express.

    The variants are the model itself, and the model with default rounding. If biases may be the only obstacles, and
    "zeros" is in `clear`, the list also has both variants without zero biases, each before the same variant with all
    biases.

    Args:
        attempt: lets the target write a variant, and compares what it reads back with the model.
        spec: the model.
        first: the result of `attempt` for the model itself.
        zero: returns whether all values of a bias are zero, given its parameter name.
        clear: the values of `Obstacle.remedy` that the caller will apply.
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
    """Return the result of `express` for the first target that can express a model, and those of earlier targets.

    If no target can express the model, the first value is None, and the second has the results for all targets. The
    arguments except `targets` are those of `express`.
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
    """Return the component `node` if it has the kind `kind` or `other`, and otherwise raise an error.

    Raises:
        CannotExpress: the component has another kind, or is None.
    """
    kinds = (kind,) if other is None else (kind, other)
    if not isinstance(node, kinds):
        names = " or ".join(kind.__name__ for kind in kinds)
        raise CannotExpress(
            f"the format needs a component of the kind {names}, but the model has {short(node) if node else 'none'}"
        )
    return node


@lru_cache(maxsize=64)
def _kinds_in(spec: ModelSpec) -> Kinds:
    """Return the kinds of component in a model, including the model itself."""
    return frozenset({ModelSpec, *map(type, spec.components())})


def _unknown(kinds: Kinds, node: Any, path: str = "") -> Iterator[Obstacle]:
    """Yield an obstacle for every component of a model whose kind is not in `kinds`.

    Args:
        kinds: the kinds of component that the target has.
        node: the ModelSpec, or a part of it.
        path: the path of this part.
    """
    if isinstance(node, tuple):
        for index, inner in enumerate(node):
            yield from _unknown(kinds, inner, f"{path}.{index}")
    elif isinstance(node, Component):
        if type(node) not in kinds:
            yield Obstacle(path, node, None)
        for name, value in node.entries().items():
            yield from _unknown(kinds, value, f"{path}.{name}" if path else name)


def _obstacles(spec: ModelSpec, back: ModelSpec, zero: Zero) -> Iterator[Obstacle]:
    """Yield the differences between two models, and how each could be removed without changing the function.

    Args:
        spec: a model.
        back: the model that a target reads back after it has written `spec`.
        zero: returns whether all values of a bias are zero, given its parameter name.
    """
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
    """Yield the names of the biases that exist because of one boolean field, such as `up_bias`.

    Args:
        places: paths of components -> the components at this path, with their own paths. All experts of a mixture are
            also listed under one common path.
        flag: the obstacle whose path names the field.
    """
    place, _, name = flag.path.rpartition(".")
    for path, node in places[place]:
        if name in node.__struct_fields__:
            less = msgspec.structs.replace(node, **{name: False})
            yield from (f"{path}.{tensor}" for tensor in node.shapes().keys() - less.shapes().keys())


def _stays(target: Destination, tree: ModelSpec | None) -> bool:
    """Return whether the target can write `tree`, a model that it has read, and reads the same model back."""
    try:
        return tree is not None and target.back(tree) == tree
    except _REFUSED:
        return False


def _bound(expression: Expression) -> Expression:
    """Return the result of `express`, or a refusal if the target has no name for a tensor of the model.

    A family's config.json may describe models for which its checkpoints have no tensor names.
    """
    assert expression.tree is not None
    try:
        expression.target.bind(expression.tree)
    except CannotExpress as error:
        return Expression(expression.target, expression.spec, None, reason=error.message)
    return expression


def without_biases(spec: ModelSpec, dropped: Collection[str]) -> ModelSpec:
    """Return the model without some biases. A component loses its biases if all of them are in `dropped`.

    `dropped` are names of parameters.
    """

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
    """Return a copy of the model `spec` in which components that a target lacks are replaced.

    Components of `kinds` stay as they are. Others become components of the target's example `usual`, with the sizes of
    `spec`. The result is None if such a model is impossible.
    """
    instead: dict[type[Component], Component] = {}  # replacements for fields that are None in the usual tree

    def like(node: Any, usual: Component, sizes: Mapping[str, Any]) -> Any:
        """Return a component of the kind of `usual`. Its fields have the values of `node`, or else those of `sizes`."""
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
                made = {block: like(block, _nearest(block, theirs), sizes) for block in dict.fromkeys(ours)}
                fields[name] = tuple(made[block] for block in ours)
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
    """Return the block among `others` that is most similar to `block`: the one with the most mixer slots in common.

    A slot is the place of a mixer in a block, such as "attention".
    """
    slots = {sublayer.mixer.slot for sublayer in block.sublayers}
    return max(
        dict.fromkeys(others), key=lambda other: len(slots & {sublayer.mixer.slot for sublayer in other.sublayers})
    )


# --- in words ---------------------------------------------------------------------------------------------------------


def by_layers(obstacles: Iterable[tuple[Any, ...]], layers: int) -> list[Obstacle]:
    """Merge obstacles that are equal in several layers into one.

    Its path is blocks.*.x for all layers, or blocks.0-2,5.x.

    Args:
        obstacles: obstacles, or tuples of the same values.
        layers: the number of layers of the model.
    """
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
    """Return sorted numbers as text with ranges: 0-2,5 for 0, 1, 2, 5."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def short(value: Any) -> str:
    """Return a short text for a value: the class name of a component, or at most 60 characters of JSON."""
    if hasattr(value, "__struct_fields__"):
        return type(value).__name__
    text = json.dumps(value) if isinstance(value, str | int | float | bool) or value is None else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
