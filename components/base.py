"""The base classes of components: validated fields, parameters with their roles, child components."""

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
"""A factor by which attention scores are multiplied. It is applied in fp32, so it must be finite in fp32."""
Shape = tuple[int, ...]
Sizes = tuple[int | str, ...]
"""A shape in which the letters B, T, S and U may stand for sizes; see `components.operations`."""

Arithmetic = Literal["linear", "conv1d", "matmul_add", "conv1d_add"]
"""How x·Wᵀ + b is computed. The values differ only in rounding.

- linear: one fused linear layer
- conv1d: one addmm, with a weight that is stored as [in, out] (GPT-2)
- matmul_add: a product, and then the addition of the bias to its rounded result (Falcon)
- conv1d_add: the same, with a weight that is stored as [in, out] (gpt-oss)
"""

Role = Literal["table", "reads", "writes", "inner", "kernel", "router", "columns", "gain", "bias"]
"""The role of a parameter. "Stream" means the residual stream.

- table: a matrix with a row per token or position, as wide as the stream
- reads: a matrix whose columns belong to the stream, so that its input is the stream
- writes: a matrix whose rows belong to the stream, so that its output is added to the stream
- router: a matrix that reads the stream and chooses experts
- inner: a parameter inside a mixer, neither of whose axes belongs to the stream
- kernel: the kernel of a causal convolution, with a row per channel
- columns: a vector with a number per column of the stream, by which a mixer multiplies its input
- gain: a vector by which something is multiplied
- bias: a vector that is added"""


class Logs(NamedTuple):
    """The initial values of a parameter: the logarithms of evenly spaced numbers along the last dimension."""

    least: float
    """The smallest of the numbers, not its logarithm."""
    most: float
    """The largest of the numbers, not its logarithm."""


class Weight(NamedTuple):
    """A parameter of a component."""

    shape: Shape
    role: Role
    initial: float | Logs | None = None
    """The value of all elements at the start of training, or `Logs` for a row of logarithms. None means that the
    elements are random."""


def bias(size: int) -> Weight:
    """Return the parameter of a bias vector with `size` elements, which are 0 at the start of training."""
    return Weight((size,), "bias", 0.0)


Misread = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""A function that returns the component's parameters as a faulty conversion would read them. It maps torch tensors by
name to torch tensors by the same names."""


KINDS: dict[str, type[Component]] = {}
"""Every kind of component by its name, including those of plugins. The name is the `type` in a tree's JSON."""


class Component(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True, omit_defaults=True, dict=False
):
    """A node of the tree: an immutable record with validated fields.

    Its class attributes and methods describe the kind of component. Other code uses them and does not check the kind.
    """

    label: ClassVar[str | None] = None
    """The row of a parameter table in which the component's parameters are counted. None means that it has no
    parameters."""
    rounds: ClassVar[tuple[str, ...]] = ()
    """The fields that change only the rounding, not the function."""
    notes: ClassVar[tuple[str, ...]] = ()
    """The fields that are only information, such as `context_length`. They change nothing that is computed."""
    forgotten: ClassVar[Mapping[str, str]] = {}
    """Field -> name of the mistake of ignoring this field, so that it has its default. Implementations of a model often
    make this mistake. Fields that are not listed have a general name for it."""
    rows: ClassVar[str] = ""
    """The letter for the number of rows of the component's tables in formulas, such as "V" (see `letters`). It is empty
    if the component has no tables."""
    described: ClassVar[tuple[str, ...]] = ()
    """The fields that the texts of `words` already mention in other words, such as "eps"."""
    given: ClassVar[tuple[str, ...]] = ()
    """The fields that descriptions leave out because they say nothing new, such as the width of the stream."""
    by_length: ClassVar[Mapping[str, Any]] = {}
    """The fields that matter only for some sequence lengths, such as `window`, and a neutral value for each of them.
    A comparison that ignores these fields sets them to the neutral values in both trees."""
    usual: ClassVar[Mapping[str, tuple[str, tuple[Any, ...]]]] = {}
    """Field -> (name of the mistake, wrong values). Other implementations of the model often use these values, because
    similar models have them. {} in the name is replaced by the wrong value."""
    computed_in: ClassVar[str] = ""
    """The Python module with the torch code of this kind: a full name, or a name in `modules` that begins with a dot.
    Only kinds that plugins define must set it."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        other = KINDS.setdefault(cls.__name__, cls)
        if (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ConfigError(
                f"two modules define a component with the name {cls.__name__}: {other.__module__} and {cls.__module__}"
            )
        KINDS[cls.__name__] = cls

    def weights(self) -> dict[str, Weight]:
        """Return the parameters of this node, without those of its children, by their names within the node."""
        return {}

    def shapes(self) -> dict[str, Shape]:
        """Return the names and shapes of this node's own parameters."""
        return {name: weight.shape for name, weight in self.weights().items()}

    def entries(self) -> dict[str, Any]:
        """Return the fields and child components of the node, by their names in paths such as "blocks.3.attention".

        By default, the names are those of the fields.
        """
        return {name: getattr(self, name) for name in self.__struct_fields__}

    def children(self) -> Iterator[tuple[str, Component]]:
        """Yield the child components with their names, in the order of computation."""
        for name, value in self.entries().items():
            if isinstance(value, Component):
                yield name, value
            elif isinstance(value, tuple):
                yield from ((f"{name}.{i}", part) for i, part in enumerate(value) if isinstance(part, Component))

    def mapped(self, change: Callable[[Any, str], Any], path: str = "") -> Any:
        """Return a copy in which every component x is replaced by `change(x, path of x)`, inner components first.

        `path` is the path of this node in the tree.
        """
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
        """Return the default of every field that has one, by field name."""
        pairs = zip(reversed(cls.__struct_fields__), reversed(cls.__struct_defaults__), strict=False)
        return {name: value for name, value in pairs if value is not msgspec.NODEFAULT}

    @classmethod
    def choices(cls) -> dict[str, Any]:
        """Return the defaults of the fields that change the computed function, by field name.

        Rounding fields (`rounds`) and fields that are only information (`notes`) are left out.
        """
        return {name: value for name, value in cls.defaults().items() if name not in (*cls.rounds, *cls.notes)}

    def alike(self) -> Self:
        """Return the component with all rounding fields (`rounds`) set to their defaults.

        Components that differ only in rounding therefore give equal results.
        """
        plain = self.defaults()
        return msgspec.structs.replace(self, **{name: plain[name] for name in self.rounds})

    @property
    def aspect(self) -> str:
        """The row of a table of models in which the component is described, such as "norm" or "attention"."""
        return type(self).__name__

    def words(self) -> dict[str, Words]:
        """Return descriptions of the component by `aspect`, such as {"attention": …, "window": …, "position": …}.

        The first one describes the component in general. By default, it is the name of the component's class.
        """
        return {self.aspect: _kind(self)}

    def aspects(self) -> dict[str, Words]:
        """Return the descriptions of `words`, with all other fields appended to the first description."""
        return self.whole(self.words())

    def named(self) -> Words:
        """Return the first description of `aspects`, which describes the component in general."""
        return next(iter(self.aspects().values()))

    def whole(self, words: dict[str, Words]) -> dict[str, Words]:
        """Return the descriptions `words`, with the fields of `undescribed` appended to the first description.

        A field is not appended if the `data` of the first description already contains it.
        """
        if "words" not in vars(type(self)):  # inherited words describe another kind
            words = {next(iter(words)): _kind(self)}
        aspect, first = next(iter(words.items()))
        data = first.data if isinstance(first.data, dict) else {}
        missing = {name: (text, v) for name, (text, v) in self.undescribed().items() if (name, v) not in data.items()}
        return words | {aspect: first.also(missing)}

    def undescribed(self) -> dict[str, tuple[str, Any]]:
        """Return the fields that differ from their defaults, by name, as (description in words, value as JSON).

        Fields in `described`, `given` or `rounds` are left out.
        """
        own = "words" in vars(type(self))
        names = {*self.rounds, *self.given, *(self.described if own else ())}
        plain, alike = self.defaults(), self.alike()
        values = {name: getattr(alike, name) for name in self.__struct_fields__ if name not in names}
        return {name: _field(name, v) for name, v in values.items() if name not in plain or v != plain[name]}

    def operations(self, path: str, source: str, shape: Sizes) -> tuple[Any, ...]:
        """Return the program of the component: the operations (`components.operations`) that it computes.

        Args:
            path: The name of the component's module in the block. The ids of operations begin with it.
            source: The id of the operation whose result is the component's input.
            shape: The shape of this input, usually (B, T, hidden).

        Raises:
            ConfigError: The kind does not define its operations.
        """
        raise ConfigError(
            f"the component {type(self).__name__} (at {path}, with the input {source} of shape {shape}) "
            "does not implement operations(), which lists its computations"
        )

    def letters(self, part: str = "") -> dict[str, int]:  # noqa: ARG002 - most have no parts
        """Return the component's sizes by the letter that stands for them in formulas of parameter counts.

        The letter of the residual stream's width is always d. If two sizes are equal, formulas use the first letter for
        both (see `analysis.explain`).

        Args:
            part: The name of a child component. If it is not empty, the result has the sizes of this child instead.
        """
        return {}

    def share(self, devices: int) -> Self:
        """Return the part of the component that one GPU computes under tensor parallelism over `devices` GPUs.

        Matrices are divided as in Megatron-LM (1909.08053). Every GPU computes components without matrices completely.

        Raises:
            UsageError: The component cannot be divided evenly.
            ConfigError: The kind has matrices, and does not define how they are divided.
        """
        if any(len(shape) > 1 for shape in self.shapes().values()):
            raise ConfigError(
                f"the component {type(self).__name__} does not implement share(), which divides its matrices "
                f"over {devices} GPUs"
            )
        return self._with_parts(lambda part: part.share(devices))

    def small(self, hidden: int) -> Self:
        """Return a small copy for a residual stream of width `hidden`, with few heads, hidden units and experts.

        The mistakes of `slips`, `disorder` and `misread` are possible in the copy too, so tests need no large model.
        """
        widths = {name: hidden for name in ("hidden_size", "size") if name in self.__struct_fields__}
        return self._with_parts(lambda part: part.small(hidden), **widths)

    def _with_parts(self, change: Callable[[Component], Component], **fields: Any) -> Self:
        """Return a copy with `change` applied to all child components, and with the field values in `fields`."""

        def changed(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(map(changed, value))
            return change(value) if isinstance(value, Component) else value

        return msgspec.structs.replace(self, **{n: changed(getattr(self, n)) for n in self.__struct_fields__} | fields)

    def slips(self) -> dict[str, Self]:
        """Return copies with one wrong field, as in a faulty implementation of the model, by the name of the mistake.

        Some mistakes have an opposite, such as a RoPE base that is too large or too small. The name of the opposite
        ends in ", the other way round". See `parity.mutations`.
        """
        return {}

    def disorder(self) -> dict[str, dict[str, list[int]]]:
        """Return typical wrong orders of weight rows, as mistake -> name of the linear layer -> row numbers.

        For layers that write to the residual stream, the numbers are those of columns.
        """
        return {}

    def misread(self) -> dict[str, Misread]:
        """Return typical mistakes in reading the parameters from a checkpoint, as name of the mistake -> function.

        The function gets all parameters of the component by name. It returns those that the mistake affects, as a
        faulty conversion would read them.
        """
        return {}


def _kind(node: Component) -> Words:
    return Words(type(node).__name__, {"kind": type(node).__name__})


def _field(name: str, value: Any) -> tuple[str, Any]:
    """Return a field in words, such as "head dim 64", and its value as JSON."""
    data = msgspec.to_builtins(value.mapped(lambda node, _: node.alike()) if isinstance(value, Component) else value)
    words = name.replace("_", " ")
    if isinstance(value, Component):
        return f"{words} {value.named().long}", data
    if value is None or isinstance(value, bool):
        return words if value else f"no {words}", data
    return f"{words} {plain_number(value) if isinstance(value, int | float) else value}", data


def divided(number: int, devices: int, what: str) -> int:
    """Return `number` divided by `devices`. Raises UsageError if the result is not an integer.

    `what` names the divided things in the message.
    """
    if number % devices:
        raise UsageError(
            f"--tp {devices}: {number:,} {what} are not divisible by {devices} GPUs", f"Choose a divisor of {number:,}."
        )
    return number // devices


if TYPE_CHECKING:
    Open = Component
else:

    class Open:
        """The base of classes to which plugins may add kinds, such as `Norm`. Records also inherit from `Component`.

        For the type checker, it is `Component`. At run time, it must not be a msgspec Struct, because msgspec decodes
        only closed unions of Structs. Other classes are decoded by a hook (`serialise`), which knows all kinds.
        """

        __slots__ = ()

        def __init_subclass__(cls, **options: Any) -> None:
            super().__init_subclass__(**(options if issubclass(cls, Component) else {}))


class Mixer(Open, frozen=True):
    """The base class of what a sub-layer computes from the residual stream: attention, a feed-forward, a recurrence.

    A class such as `Attention` inherits from both `Mixer` and `Component`.
    """

    __slots__ = ()
    given = ("hidden_size",)
    slot: ClassVar[str]
    """The mixer's name in a block, and in the names of its parameters."""
    axes: ClassVar[tuple[str, ...]] = ()
    """The names of properties that a family may use, like fields, as sizes of the axes of checkpoint tensors."""
    borrows_weights: ClassVar[bool] = False
    """Whether the mixer may use weights that another layer stores."""
    hidden_size: int
    """The width of the residual stream."""

    @property
    def aspect(self) -> str:
        return self.slot.replace("_", "-")

    def biases(self) -> dict[str, Words]:
        """Return a description of every linear layer that may have a bias, by the layer's name.

        The `data` of a description is true if the layer has a bias.
        """
        return {}


def recast(node: Component, kind: type[Any], **fields: Any) -> Any:
    """Convert a component to another kind. Fields that both kinds have keep their values, unless `fields` sets them.

    Raises:
        ConfigError: A field of `node` differs from its default, but is neither a field of `kind` nor in `fields`.
    """
    entries = node.entries()
    lost = [
        name
        for name, value in node.defaults().items()
        if entries[name] != value and name not in node.rounds and name not in {*kind.__struct_fields__, *fields}
    ]
    if lost:
        raise ConfigError(
            f"the component {type(node).__name__} uses {' and '.join(lost)}, which {kind.__name__} does not support"
        )
    return kind(**{name: value for name, value in entries.items() if name in kind.__struct_fields__} | fields)


class Parameter(msgspec.Struct, frozen=True):
    """One parameter tensor of a model."""

    name: str
    """The shared name, such as blocks.3.attention.q_proj.weight."""
    shape: Shape
    component: str
    """The label of the component in tables of parameters."""
    layer: int | None
    """The number of the layer, or None for a parameter outside of the layers."""
    role: Role = "inner"
    initial: float | Logs | None = None
    """The value at the start of training; see `Weight`."""

    @property
    def count(self) -> int:
        return math.prod(self.shape)
