"""What every component has: checked fields, parameters with their roles, and the components inside it. No torch."""

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
"""A factor of scores. Scores are multiplied in fp32, so it is not larger than the largest fp32 number."""
Shape = tuple[int, ...]
Sizes = tuple[int | str, ...]
"""A shape in which the letters B, T, S and U stand for numbers; see `components.operations`."""

Arithmetic = Literal["linear", "conv1d", "matmul_add", "conv1d_add"]
"""How x·Wᵀ + b is computed. "linear": as one fused operation. "conv1d": as GPT-2's addmm, on a weight that is [in, out]
in memory. "matmul_add": as a product that is rounded before the bias is added (Falcon). "conv1d_add": the same on a
weight that is [in, out] in memory (gpt-oss)."""

Role = Literal["table", "reads", "writes", "inner", "kernel", "router", "columns", "gain", "bias"]
"""What a parameter does.

- table: a row per token or position, as wide as the residual stream
- reads, writes: a matrix whose columns, or whose rows, belong to the stream
- router: a matrix that reads the stream and chooses experts
- inner: any other parameter inside a mixer
- kernel: a row of weights of earlier tokens, per channel
- columns: a number per column of the stream, which a mixer multiplies it by
- gain, bias: a vector that is multiplied, or added
"""


class Logs(NamedTuple):
    """Initial values: the logarithms of numbers that are spread as evenly as possible along the last dimension, from
    `least` to `most`.
    """

    least: float
    most: float


class Weight(NamedTuple):
    """A parameter of a component: its shape, its role, and its initial value. The value is one number for all elements,
    or a row of logarithms; None means that it is drawn at random.
    """

    shape: Shape
    role: Role
    initial: float | Logs | None = None


def bias(size: int) -> Weight:
    """Return the weight of a vector that is added, with the initial value 0."""
    return Weight((size,), "bias", 0.0)


Misread = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""A function from a component's own parameters, as torch tensors by name, to those that a mistake changes."""


KINDS: dict[str, type[Component]] = {}
"""All kinds of components by name, including those of plugins. The name is the `type` in the JSON of a tree."""


class Component(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True, omit_defaults=True, dict=False
):
    """A node of the tree."""

    label: ClassVar[str | None] = None
    """The row of a parameter table under which the parameters are counted; None for a component without parameters."""
    rounds: ClassVar[tuple[str, ...]] = ()
    """The fields that change only the rounding."""
    notes: ClassVar[tuple[str, ...]] = ()
    """The fields that describe the component and change nothing that it computes."""
    forgotten: ClassVar[Mapping[str, str]] = {}
    """For every other optional field, the mistake of a port that ignores it, in words."""
    rows: ClassVar[str] = ""
    """The letter of the number of rows of a table, if the component has one (see `letters`)."""
    tells: ClassVar[tuple[str, ...]] = ()
    """The fields that `words` describes under another name."""
    given: ClassVar[tuple[str, ...]] = ()
    """The fields that need no words, such as the width of the stream."""
    by_length: ClassVar[Mapping[str, Any]] = {}
    """The fields whose effect depends only on the length of a sequence, each with the value that compares as equal to
    all others."""
    usual: ClassVar[Mapping[str, tuple[str, tuple[Any, ...]]]] = {}
    """Values that other models have, by field, each with a description that has a place for the value."""
    computed_in: ClassVar[str] = ""
    """The full name of the module that computes the component, which must be imported; components of plugins set it."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        other = KINDS.setdefault(cls.__name__, cls)
        if (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ConfigError(
                f"two modules define a component with the name {cls.__name__}: {other.__module__} and {cls.__module__}"
            )
        KINDS[cls.__name__] = cls

    def weights(self) -> dict[str, Weight]:
        """Return the component's own parameters by name, without those of the components inside it."""
        return {}

    def shapes(self) -> dict[str, Shape]:
        """Return the shapes of `weights`."""
        return {name: weight.shape for name, weight in self.weights().items()}

    def entries(self) -> dict[str, Any]:
        """Return the component's parts by the names that paths use: its fields, unless a subclass differs."""
        return {name: getattr(self, name) for name in self.__struct_fields__}

    def children(self) -> Iterator[tuple[str, Component]]:
        """Yield the name and the component of every component inside this one, in the order of computation."""
        for name, value in self.entries().items():
            if isinstance(value, Component):
                yield name, value
            elif isinstance(value, tuple):
                yield from ((f"{name}.{i}", each) for i, each in enumerate(value) if isinstance(each, Component))

    def mapped(self, change: Callable[[Any, str], Any], path: str = "") -> Any:
        """Return the result of `change(component, path)`, which is first applied to every component inside this one."""
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
        """Return the optional fields with their default values."""
        found = zip(reversed(cls.__struct_fields__), reversed(cls.__struct_defaults__), strict=False)
        return {name: value for name, value in found if value is not msgspec.NODEFAULT}

    @classmethod
    def choices(cls) -> dict[str, Any]:
        """Return the optional fields that change the function, with their default values."""
        return {name: value for name, value in cls.defaults().items() if name not in (*cls.rounds, *cls.notes)}

    def alike(self) -> Self:
        """Return the component with default values for the fields that change only the rounding."""
        plain = self.defaults()
        return msgspec.structs.replace(self, **{name: plain[name] for name in self.rounds})

    @property
    def aspect(self) -> str:
        """The aspect of a model that the component describes, such as "norm" or "attention"."""
        return type(self).__name__

    def words(self) -> dict[str, Words]:
        """Return the descriptions by aspect, that of the whole component first; by default the component's name."""
        return {self.aspect: _kind(self)}

    def aspects(self) -> dict[str, Words]:
        """Return `words`, with every field that they do not mention appended to the first."""
        return self.whole(self.words())

    def named(self) -> Words:
        """Return the first of the `aspects`."""
        return next(iter(self.aspects().values()))

    def whole(self, words: dict[str, Words]) -> dict[str, Words]:
        """Return the words with every field appended that they do not mention, so that no field is left out.

        These are fields that change the function, do not have their default value, are not in `tells` or `given`, and
        are not in the data of the first words.
        """
        if "words" not in vars(type(self)):  # inherited words describe another kind
            words = {next(iter(words)): _kind(self)}
        first, said = next(iter(words.items()))
        data = said.data if isinstance(said.data, dict) else {}
        return words | {first: said.also({n: v for n, v in self.untold().items() if (n, v[1]) not in data.items()})}

    def untold(self) -> dict[str, tuple[str, Any]]:
        """Return the fields that are not in `tells` or `given` and do not have their default value, in words and as
        data.
        """
        own = "words" in vars(type(self))
        names = {*self.rounds, *self.given, *(self.tells if own else ())}
        plain, alike = self.defaults(), self.alike()
        values = {name: getattr(alike, name) for name in self.__struct_fields__ if name not in names}
        return {name: _field(name, v) for name, v in values.items() if name not in plain or v != plain[name]}

    def operations(self, path: str, source: str, shape: Sizes) -> tuple[Any, ...]:
        """Return the program of the component (see `components.operations`): what it computes from the result `source`,
        which has this shape, as the module `path`.

        Raises:
            ConfigError: the component does not implement it.
        """
        raise ConfigError(
            f"the component {type(self).__name__} (at {path}, with the input {source} of shape {shape}) "
            "does not implement operations(), which lists its computations"
        )

    def letters(self, part: str = "") -> dict[str, int]:  # noqa: ARG002 - most have no parts
        """Return the widths of the parameters of the component, or of its part of this name, by the letters of a
        formula.

        The formulas are those of `analysis.explain`. The width of the stream is not included. Of two equal widths, the
        first one names both.
        """
        return {}

    def share(self, devices: int) -> Self:
        """Return the component that each of several GPUs computes under tensor parallelism (Megatron-LM, 1909.08053).

        A component without matrices is on all GPUs.

        Raises:
            UsageError: the component cannot be divided evenly.
            ConfigError: the component has matrices and does not implement it.
        """
        if any(len(shape) > 1 for shape in self.shapes().values()):
            raise ConfigError(
                f"the component {type(self).__name__} does not implement share(), which divides its matrices "
                f"over {devices} GPUs"
            )
        return self._with_parts(lambda part: part.share(devices))

    def small(self, hidden: int) -> Self:
        """Return a small copy with this hidden size and few heads, units and experts, in which the same mistakes are
        possible.
        """
        widths = {name: hidden for name in ("hidden_size", "size") if name in self.__struct_fields__}
        return self._with_parts(lambda part: part.small(hidden), **widths)

    def _with_parts(self, change: Callable[[Component], Component], **fields: Any) -> Self:
        """Return the component with other fields, and with `change` applied to the components inside it."""

        def made(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(map(made, value))
            return change(value) if isinstance(value, Component) else value

        return msgspec.structs.replace(self, **{n: made(getattr(self, n)) for n in self.__struct_fields__} | fields)

    def slips(self) -> dict[str, Self]:
        """Return the component with each of the mistakes of a port, by the name of the mistake (see
        `parity.mutations`).

        If a mistake is not its own inverse, the inverse has the same name with ", the other way round".
        """
        return {}

    def disorder(self) -> dict[str, dict[str, list[int]]]:
        """Return wrong orders of rows of the parameters that a port may have, by the name of the mistake and then by
        module.

        For a module that writes to the stream, it is the order of its columns.
        """
        return {}

    def misread(self) -> dict[str, Misread]:
        """Return functions that make mistakes in the parameters, by the name of the mistake."""
        return {}


def _kind(node: Component) -> Words:
    return Words(type(node).__name__, {"kind": type(node).__name__})


def _field(name: str, value: Any) -> tuple[str, Any]:
    """Return a field that has no words of its own: in words, and as plain JSON values."""
    data = msgspec.to_builtins(value.mapped(lambda each, _: each.alike()) if isinstance(value, Component) else value)
    told = name.replace("_", " ")
    if isinstance(value, Component):
        return f"{told} {value.named().long}", data
    if value is None or isinstance(value, bool):
        return told if value else f"no {told}", data
    return f"{told} {plain_number(value) if isinstance(value, int | float) else value}", data


def divided(number: int, devices: int, what: str) -> int:
    """Return the share of each device; raise UsageError if it is not a whole number."""
    if number % devices:
        raise UsageError(
            f"--tp {devices}: {number:,} {what} are not divisible by {devices} GPUs", f"Choose a divisor of {number:,}."
        )
    return number // devices


if TYPE_CHECKING:
    Open = Component
else:

    class Open:
        """The base class of an open set of kinds. Components inherit it and `Component`.

        For the type checker it is a component. It must not be a Struct, because msgspec would treat a union of Structs
        as closed. A hook decodes it, and knows all kinds.
        """

        __slots__ = ()

        def __init_subclass__(cls, **options: Any) -> None:
            super().__init_subclass__(**(options if issubclass(cls, Component) else {}))


class Mixer(Open, frozen=True):
    """The main part of a sub-layer between reading and writing the stream: attention, a feed-forward, a recurrence."""

    __slots__ = ()
    given = ("hidden_size",)
    slot: ClassVar[str]
    """The name of the mixer in a block and in the names of its parameters."""
    axes: ClassVar[tuple[str, ...]] = ()
    """Properties that layouts of checkpoints may name, in addition to the fields."""
    lends: ClassVar[bool] = False
    """Whether a mixer of another layer may compute with its weights."""
    hidden_size: int

    @property
    def aspect(self) -> str:
        return self.slot.replace("_", "-")

    def biases(self) -> dict[str, Words]:
        """Return the linear layers that may have a bias, by a name; the data of each is whether it has one."""
        return {}


def recast(node: Component, kind: type[Any], **fields: Any) -> Any:
    """Return a component of another kind with the fields that both have, and with `fields`.

    Raises:
        ConfigError: `node` has a field, with a value other than its default, that `kind` lacks and that is not in
            `fields`.
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
