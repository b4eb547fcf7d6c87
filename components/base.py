"""What every component has: checked fields, parameters with their roles, the components inside it. No torch."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, Self

import msgspec
from msgspec import Meta

from ..errors import ConfigError, UsageError
from .words import Words, plain_number

__all__ = [
    "KINDS",
    "Arithmetic",
    "Component",
    "Logs",
    "Mixer",
    "Open",
    "Parameter",
    "Positive",
    "Role",
    "Scale",
    "Shape",
    "Size",
    "Sizes",
    "Turns",
    "Weight",
    "divided",
    "recast",
]

Size = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Positive = Annotated[float, Meta(gt=0, le=sys.float_info.max)]
Turns = Annotated[float, Meta(ge=1e-30, le=1e30)]
Scale = Annotated[float, Meta(gt=0, le=3.4028234663852886e38)]
"""A factor of scores, which are multiplied in fp32: no larger than fp32 holds."""
Shape = tuple[int, ...]
Sizes = tuple[int | str, ...]
"""A shape in which B, T, S and U may stand for numbers; see `components.operations`."""

Arithmetic = Literal["linear", "conv1d", "matmul_add", "conv1d_add"]
"""How x·Wᵀ + b is computed: one fused linear; GPT-2's addmm on a weight that lies [in, out] in memory; Falcon's
matmul and then, rounded once more, the bias; the same on a weight that lies [in, out] (gpt-oss)."""

Role = Literal["table", "reads", "writes", "inner", "kernel", "router", "columns", "gain", "bias"]
"""What a parameter does.

- table: a row for each token or position, as wide as the stream
- reads, writes: a matrix whose columns, or whose rows, are the stream
- router: a matrix that reads the stream and chooses
- inner: anything between these, which the stream does not meet
- kernel: a row for each channel, of what earlier tokens count for it
- columns: a number for each column of the stream, by which a mixer multiplies it
- gain, bias: a vector that is multiplied, or added
"""


class Logs(NamedTuple):
    """Values with which training starts: the logarithms of numbers as far apart as can be along the last dimension."""

    least: float
    most: float


class Weight(NamedTuple):
    """A component's own parameter: its shape, its role, and the value with which training starts where it is one for
    all elements, or a row of logarithms (None: they are drawn).
    """

    shape: Shape
    role: Role
    initial: float | Logs | None = None


def bias(size: int) -> Weight:
    """A vector that is added, and starts at 0."""
    return Weight((size,), "bias", 0.0)


Misread = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""Of a component's own parameters as torch's tensors those that are mistaken, both by their names within it."""


KINDS: dict[str, type[Component]] = {}
"""Every kind of component by its name, those of plugins included: what `type` says in a tree's JSON."""


class Component(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True, omit_defaults=True, dict=False
):
    """A node of the tree.

    label: the row of a parameter table under which its parameters are counted; None where it has none.
    rounds: the fields that say how it rounds, and nothing of what function it is.
    notes: the fields that are said of it, and change nothing that it computes.
    forgotten: of each other field that need not be given, the mistake of who leaves it as it is by default, in words.
    rows: the letter of its tables' rows, where it has tables (see `letters`).
    tells: the fields that its `words` tell under another name than their own.
    given: those that need no words of their own, as how wide the stream is.
    by_length: the fields that act by the length of a sequence alone, each with a value that stands for all.
    usual: of fields, in words with a place for the value, values that other models have.
    computed_in: the module that has to be imported for what computes it, by its full name; a plugin's kinds say it.
    """

    label: ClassVar[str | None] = None
    rounds: ClassVar[tuple[str, ...]] = ()
    notes: ClassVar[tuple[str, ...]] = ()
    forgotten: ClassVar[Mapping[str, str]] = {}
    rows: ClassVar[str] = ""
    tells: ClassVar[tuple[str, ...]] = ()
    given: ClassVar[tuple[str, ...]] = ()
    by_length: ClassVar[Mapping[str, Any]] = {}
    usual: ClassVar[Mapping[str, tuple[str, tuple[Any, ...]]]] = {}
    computed_in: ClassVar[str] = ""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        other = KINDS.setdefault(cls.__name__, cls)
        if (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ConfigError(
                f"two modules define a component with the name {cls.__name__}: {other.__module__} and {cls.__module__}"
            )
        KINDS[cls.__name__] = cls

    def weights(self) -> dict[str, Weight]:
        """This node's own parameters (not its children's), by name within the node."""
        return {}

    def shapes(self) -> dict[str, Shape]:
        """The shapes of `weights`."""
        return {name: weight.shape for name, weight in self.weights().items()}

    def entries(self) -> dict[str, Any]:
        """What it is made of, by the names that paths have: its fields, unless a kind says otherwise."""
        return {name: getattr(self, name) for name in self.__struct_fields__}

    def children(self) -> Iterator[tuple[str, Component]]:
        """The components inside it, by name, in the order of computation."""
        for name, value in self.entries().items():
            if isinstance(value, Component):
                yield name, value
            elif isinstance(value, tuple):
                yield from ((f"{name}.{i}", each) for i, each in enumerate(value) if isinstance(each, Component))

    def mapped(self, change: Callable[[Any, str], Any], path: str = "") -> Any:
        """What `change(component, path)` makes of it, and before of every component inside it."""
        return change(
            self._mapped(change, {name: f"{path}.{name}" if path else name for name in self.__struct_fields__}), path
        )

    def _mapped(self, change: Callable[[Any, str], Any], paths: Mapping[str, str]) -> Self:
        fields = {}
        for name, path in paths.items():
            value = getattr(self, name)
            if isinstance(value, Component):
                fields[name] = value.mapped(change, path)
            elif isinstance(value, tuple):
                numbered = enumerate(value)
                fields[name] = tuple(
                    v.mapped(change, f"{path}.{i}") if isinstance(v, Component) else v for i, v in numbered
                )
        return msgspec.structs.replace(self, **fields) if fields else self

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """The fields that need not be given, with their values then."""
        found = zip(reversed(cls.__struct_fields__), reversed(cls.__struct_defaults__), strict=False)
        return {name: value for name, value in found if value is not msgspec.NODEFAULT}

    @classmethod
    def choices(cls) -> dict[str, Any]:
        """The fields that change its function and need not be given, with their values then."""
        return {name: value for name, value in cls.defaults().items() if name not in (*cls.rounds, *cls.notes)}

    def alike(self) -> Self:
        """The component that stands for all which compute its function: the fields that round are as by default."""
        plain = self.defaults()
        return msgspec.structs.replace(self, **{name: plain[name] for name in self.rounds})

    @property
    def aspect(self) -> str:
        """The aspect of a model that it is: "norm", "attention"."""
        return type(self).__name__

    def words(self) -> dict[str, Words]:
        """What it is, by aspect, the one that it is as a whole first; a kind without words of its own is its name."""
        return {self.aspect: _kind(self)}

    def aspects(self) -> dict[str, Words]:
        """Its `words`, with every field that they do not tell appended to the first."""
        return self.whole(self.words())

    def named(self) -> Words:
        """The first of its `aspects`."""
        return next(iter(self.aspects().values()))

    def whole(self, words: dict[str, Words]) -> dict[str, Words]:
        """Words of it with every field appended that they do not tell, so that none is silent: whatever is not as by
        default, changes the function, and is neither in `tells` or `given` nor a name in the data of the first.
        """
        if "words" not in vars(type(self)):  # words that are inherited are those of another kind
            words = {next(iter(words)): _kind(self)}
        first, said = next(iter(words.items()))
        data = said.data if isinstance(said.data, dict) else {}
        return words | {first: said.also({n: v for n, v in self.untold().items() if (n, v[1]) not in data.items()})}

    def untold(self) -> dict[str, tuple[str, Any]]:
        """The fields that neither `tells` nor `given` has, where they are not as by default: in words and as data."""
        own = "words" in vars(type(self))
        names = {*self.rounds, *self.given, *(self.tells if own else ())}
        plain, alike = self.defaults(), self.alike()
        values = {name: getattr(alike, name) for name in self.__struct_fields__ if name not in names}
        return {name: _field(name, v) for name, v in values.items() if name not in plain or v != plain[name]}

    def operations(self, path: str, source: str, shape: Sizes) -> tuple[Any, ...]:
        """What the component does with the result `source`, of that shape, as the module `path`: a program of
        `components.operations`.

        Raises:
            ConfigError: the record declares none.
        """
        raise ConfigError(
            f"the component {type(self).__name__} (at {path}, with the input {source} of shape {shape}) "
            "does not implement operations(), which lists its computations"
        )

    def letters(self, part: str = "") -> dict[str, int]:  # noqa: ARG002 - most have no parts
        """The widths of its parameters, or of those of its part of that name, beside the stream's, by the letters that
        a formula of them has (`analysis.explain`); of two that are equal the first names both.
        """
        return {}

    def share(self, devices: int) -> Self:
        """What each of so many devices computes where they share every layer (Megatron-LM, 1909.08053); what has no
        matrices is on all of them.

        Raises:
            UsageError: what cannot be shared out evenly.
            ConfigError: the record has matrices, and does not say how they are shared out.
        """
        if any(len(shape) > 1 for shape in self.shapes().values()):
            raise ConfigError(
                f"the component {type(self).__name__} does not implement share(), which divides its matrices "
                f"over {devices} GPUs"
            )
        return self._with_parts(lambda part: part.share(devices))

    def small(self, hidden: int) -> Self:
        """A copy for a stream of that width, with few heads, units and experts, which can be mistaken alike."""
        widths = {name: hidden for name in ("hidden_size", "size") if name in self.__struct_fields__}
        return self._with_parts(lambda part: part.small(hidden), **widths)

    def _with_parts(self, change: Callable[[Component], Component], **fields: Any) -> Self:
        """With other fields, and with what `change` makes of the components inside it."""

        def made(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(map(made, value))
            return change(value) if isinstance(value, Component) else value

        return msgspec.structs.replace(self, **{n: made(getattr(self, n)) for n in self.__struct_fields__} | fields)

    def slips(self) -> dict[str, Self]:
        """The component as somebody gets it wrong who ports it, by the mistake's name (see `parity.mutations`); what
        undoes one that does not undo itself goes by ", the other way round".
        """
        return {}

    def disorder(self) -> dict[str, dict[str, list[int]]]:
        """Orders in which somebody who ports it leaves rows of its parameters, by the mistake's name and then by module
        (of a module that writes the stream: its columns).
        """
        return {}

    def misread(self) -> dict[str, Misread]:
        """What somebody who ports it takes for its own parameters, by the mistake's name."""
        return {}


def _kind(node: Component) -> Words:
    return Words(type(node).__name__, {"kind": type(node).__name__})


def _field(name: str, value: Any) -> tuple[str, Any]:
    """A field that nobody wrote words for: in words, and as plain JSON values."""
    data = msgspec.to_builtins(value.mapped(lambda each, _: each.alike()) if isinstance(value, Component) else value)
    told = name.replace("_", " ")
    if isinstance(value, Component):
        return f"{told} {value.named().long}", data
    if value is None or isinstance(value, bool):
        return told if value else f"no {told}", data
    return f"{told} {plain_number(value) if isinstance(value, int | float) else value}", data


def divided(number: int, devices: int, what: str) -> int:
    """What each of so many devices has; raises UsageError where it is no whole number."""
    if number % devices:
        raise UsageError(
            f"--tp {devices}: {number:,} {what} are not divisible by {devices} GPUs", f"Choose a divisor of {number:,}."
        )
    return number // devices


if TYPE_CHECKING:
    Open = Component
else:

    class Open:
        """What a class inherits that stands for an open set of kinds; records inherit it and `Component`.

        For the type checker it is a component. To msgspec it must be no Struct: that is decoded by a hook, which knows
        every kind there is, where a union of Structs would be closed.
        """

        __slots__ = ()

        def __init_subclass__(cls, **options: Any) -> None:
            super().__init_subclass__(**(options if issubclass(cls, Component) else {}))


class Mixer(Open, frozen=True):
    """What stands in a block between the stream and the stream: attention, a feed-forward, a recurrence.

    A record of a kind inherits it beside `Component`. slot: what a block calls it in parameters' names. axes: its
    properties that layouts of checkpoints may name, beside its fields. lends: whether it may compute with the weights
    of another layer's.
    """

    __slots__ = ()
    given = ("hidden_size",)
    slot: ClassVar[str]
    axes: ClassVar[tuple[str, ...]] = ()
    lends: ClassVar[bool] = False
    hidden_size: int

    @property
    def aspect(self) -> str:
        return self.slot.replace("_", "-")

    def biases(self) -> dict[str, Words]:
        """Its linears that may have a bias, by a name in data; the data of each is whether it has."""
        return {}


def recast(node: Component, kind: type[Any], **fields: Any) -> Any:
    """A component of another kind with the fields of `node` that both have, and with `fields`.

    Raises:
        ConfigError: `node` has a field, at a value other than its default, that `kind` lacks and is not in `fields`.
    """
    kept = node.entries()
    lost = [
        name
        for name, value in node.defaults().items()
        if kept[name] != value and name not in node.rounds and name not in {*kind.__struct_fields__, *fields}
    ]
    if lost:
        raise ConfigError(
            f"this {type(node).__name__} uses {' and '.join(lost)}, which {kind.__name__} does not support"
        )
    return kind(**{name: value for name, value in kept.items() if name in kind.__struct_fields__} | fields)


class Parameter(msgspec.Struct, frozen=True):
    """A tensor of a model.

    Attributes:
        name: the shared name.
        shape: the shape.
        component: the component under which its elements are counted.
        layer: the number of the layer; None outside the layers.
        role: what the tensor does, such as a table or a bias.
        initial: the value with which training starts, or the values; None if they are drawn at random.
    """

    name: str
    shape: Shape
    component: str
    layer: int | None
    role: Role = "inner"
    initial: float | Logs | None = None

    @property
    def count(self) -> int:
        return math.prod(self.shape)
