"""Collect what names of tensors and config fields mean in the supported families, the most frequent meaning first.

The names come from the families' definitions. This file needs no torch.
"""

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

from ..architectures import ARCHITECTURES, Architecture, Leaf, families, llama2c
from ..architectures.config import COMMON_IRRELEVANT, COMMON_REFUSED, ConfigReader
from ..architectures.decoder import DecoderFamily
from ..architectures.fields import Field
from ..architectures.layout import parse
from ..architectures.stacks import STACKS
from ..components import Shape
from ..errors import GptkitError

CUT = 6
"""The number of first layers whose tensor names and shapes are compared."""

_LAYER = re.compile(r"(?<=\.)[0-9]{1,6}(?=\.)")
_PLACES = re.compile(r"\{\w+\}")
_EXPERT = re.compile(r"(?<=experts\.)[0-9]{1,6}(?=\.)")


@dataclass(frozen=True)
class Donor:
    """A supported family on which a draft can be based, because a table (`DecoderFamily`) defines it."""

    family: Architecture
    decoder: DecoderFamily
    place: str  # the name of the variable with the table: "module.VARIABLE"

    @cached_property
    def keys(self) -> dict[str, Leaf]:
        """Return which parameters the family's tensors store (leaves), by tensor name without the prefix ("model.")."""
        leaves = (leaf for leaf in self.family.leaves if "{head}" not in leaf.checkpoint)  # a draft has no such names
        return {leaf.checkpoint.removeprefix(self.family.prefix): leaf for leaf in leaves}

    def knows(self, config: Mapping[str, Any]) -> set[str]:
        """Return the fields of a config that the family knows: it reads them, ignores them, or refuses some values."""
        reader = ConfigReader(config)
        with suppress(GptkitError, ValueError, TypeError, KeyError):  # fields read before the error count
            self.decoder.read(reader)
        return config.keys() & (reader.used | self.decoder.fields.keys() | self.family.ignored.keys()).union(
            self.family.refusals
        )


class Meaning(NamedTuple):
    """One meaning that the name of a tensor or config field has in the supported families."""

    value: Any  # what the name stands for, such as a `Leaf` or a `Field`
    votes: int  # the number of families with this meaning
    donor: str  # one of these families


@dataclass(frozen=True)
class KnownNames:
    """The names of tensors and config fields that the supported families use."""

    donors: tuple[Donor, ...]  # the families whose table a draft may start from
    others: tuple[Architecture, ...] = ()  # families without such a table; only their tensor names count

    @cached_property
    def leaves(self) -> dict[str, list[Meaning]]:
        """Return which parameters a tensor stores in the supported families, by the tensor's name.

        The names start at the layer number ("{layer}.mlp.up.weight"). For tensors outside of layers, they are complete
        except for a prefix.
        """
        by_name: dict[str, list[tuple[Leaf, str]]] = {}
        for donor in self.donors:
            for key, leaf in donor.keys.items():
                by_name.setdefault(inside(key), []).append((leaf, donor.family.name))
        for family in self.others:
            for leaf in family.leaves:
                if (
                    leaf.when is None
                    and not leaf.requires
                    and not {"{use}", "{head}"} & {*_PLACES.findall(leaf.checkpoint)}
                ):
                    key = inside(leaf.checkpoint.removeprefix(family.prefix))
                    by_name.setdefault(key, []).append((leaf, family.name))
        for name, leaves in (*((stack.name, stack.leaves) for stack in STACKS), ("llama2.c", llama2c.LEAVES)):
            for leaf in leaves:
                by_name.setdefault(inside(leaf.checkpoint), []).append((leaf, name))
        return {key: _voted(pairs, lambda leaf: (leaf.names, leaf.layout)) for key, pairs in by_name.items()}

    @cached_property
    def tails(self) -> dict[str, list[Meaning]]:
        """Return the same as `leaves`, but by the last two parts of tensor names: module and "weight" or "bias"."""
        by_tail: dict[str, list[tuple[Leaf, str]]] = {}
        for key, meanings in self.leaves.items():
            for meaning in meanings:
                by_tail.setdefault(tail(key), []).extend([(meaning.value, meaning.donor)] * meaning.votes)
        return {key: _voted(pairs, lambda leaf: (leaf.names, leaf.layout)) for key, pairs in by_tail.items()}

    def of_tensor(self, key: str) -> list[Meaning]:
        """Return the meanings of a tensor name in the supported families.

        If no family has the name, return the meanings of names with the same last two parts.
        """
        return self.leaves.get(inside(key)) or self.tails.get(tail(key), [])

    @cached_property
    def fields(self) -> dict[str, list[Meaning]]:
        """Return the meanings of config fields in the supported families, by field name."""
        by_name: dict[str, list[tuple[Field, str]]] = {}
        for donor in self.donors:
            for name, field in donor.decoder.fields.items():
                by_name.setdefault(name, []).append((field, donor.family.name))
        return {name: _voted(pairs, lambda field: (field.role, field.read)) for name, pairs in by_name.items()}

    @cached_property
    def irrelevant(self) -> dict[str, list[Meaning]]:
        """Return the config fields that some families ignore, by field name. The meanings are the reasons for that.

        Fields that all families ignore are left out.
        """
        by_name: dict[str, list[tuple[str, str]]] = {}
        for family in (donor.family for donor in self.donors):
            for name, reason in family.ignored.items():
                if name not in COMMON_IRRELEVANT:
                    by_name.setdefault(name, []).append((reason, family.name))
        return {name: _voted(pairs, str) for name, pairs in by_name.items()}

    @cached_property
    def refused(self) -> dict[str, list[Meaning]]:
        """Return the config fields for which some families accept only certain values, by field name.

        The value of a meaning is a pair: the accepted values, and the reason to refuse others.
        """
        by_name: dict[str, list[tuple[Any, str]]] = {}
        for family in (donor.family for donor in self.donors):
            for name, refusal in family.refusals.items():
                if name not in COMMON_REFUSED:
                    by_name.setdefault(name, []).append((refusal, family.name))
        return {name: _voted(pairs, repr) for name, pairs in by_name.items()}

    def fixed(self) -> dict[str, list[Meaning]]:
        """Return the constants that the supported families have for properties that no config field gives, by property.

        An example of such a property is "norm.gain".
        """
        by_role: dict[str, list[tuple[Any, str]]] = {}
        for donor in self.donors:
            for role, value in donor.decoder.fixed.items():
                by_role.setdefault(role, []).append((value, donor.family.name))
        return {role: _voted(pairs, id_or_value) for role, pairs in by_role.items()}


def id_or_value(value: Any) -> Any:
    """Return a key by which values can be compared: the `id` of a function, and the `repr` of other values."""
    return id(value) if callable(value) else repr(value)


def _voted(pairs: Sequence[tuple[Any, str]], by: Callable[[Any], Any]) -> list[Meaning]:
    """Count how many families have each value. Return the different values as meanings, the most frequent first.

    `pairs` are values and family names. Values with the same key `by(value)` count as the same.
    """
    votes = Counter(by(value) for value, _ in pairs)
    first = {by(value): (value, donor) for value, donor in reversed(pairs)}
    return [Meaning(first[key][0], count, first[key][1]) for key, count in votes.most_common()]


def inside(key: str) -> str:
    """Return a tensor name from "{layer}" on. Names without it are returned unchanged."""
    _, layer, rest = key.partition("{layer}.")
    return layer + rest if layer else key


def tail(key: str) -> str:
    """Return the last two parts of a tensor name, with "{layer}." before them if the tensor belongs to a layer."""
    within = inside(key)
    layer, parts = within.startswith("{layer}."), within.removeprefix("{layer}.").split(".")
    return ("{layer}." if layer else "") + ".".join(parts[-2:])


@cache
def known_names(without: tuple[str, ...] = ()) -> KnownNames:
    """Return the names that the supported families use. The families in `without` are left out."""
    known = [family for family in ARCHITECTURES.values() if family.name not in without]  # this imports all families
    places = dict(_places())
    donors = tuple(
        Donor(family, reader, places[id(reader)])
        for family in known
        if type(reader := getattr(family.read, "__self__", None)) is DecoderFamily and id(reader) in places
    )
    names = {donor.family.name for donor in donors}
    return KnownNames(donors, tuple(family for family in known if family.name not in names))


_VECTORS = ("norm.weight", ".bias", ".A_log", ".D", "sinks", ".layer_scalar")
"""The ends of the names of parameters with one dimension."""


def fits(leaf: Leaf, shape: Shape) -> bool:
    """Return whether a tensor of this shape has the right number of dimensions to store the parameters of a leaf."""
    if not leaf.layout.is_identity:
        return len(parse(leaf.layout.checkpoint)) == len(shape)
    return all(name.endswith(_VECTORS) == (len(shape) == 1) for name in leaf.names)


def _places() -> Iterator[tuple[int, str]]:
    """Yield the `id` of every family's table (`DecoderFamily`), and the name of its variable: "module.VARIABLE"."""
    for name, module in list(sys.modules.items()):
        if name.startswith(f"{families.__name__}."):
            for variable, value in vars(module).items():
                if type(value) is DecoderFamily:
                    yield id(value), f"{name}.{variable}"


# --- a checkpoint's own names ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Names:
    """The tensor names of a checkpoint as templates, in which "{layer}" and "{expert}" stand for numbers."""

    prefix: str  # the first part of the names of layers: "model." for "model.layers.{layer}."
    layers: int  # the number of layers
    shapes: Mapping[str, Mapping[int, Shape]]  # the shapes of tensors, by template and layer number
    odd: tuple[str, ...]  # names with unusual characters or of unusual length, for which there is no template

    def key(self, template: str) -> str:
        """Return a template without the checkpoint's prefix, such as "model."."""
        return template.removeprefix(self.prefix)

    def cut(self) -> Iterator[tuple[str, Shape]]:
        """Yield names and shapes of the tensors in the first `CUT` layers and outside of layers.

        Of all experts, only expert 0 is included.
        """
        for template, by_layer in self.shapes.items():
            for layer, shape in by_layer.items():
                if layer < CUT:
                    yield template.format(layer=layer, expert=0), shape

    def shape(self, template: str) -> Shape:
        """Return the shape of the tensor with a template, in the first layer that has such a tensor."""
        return next(iter(self.shapes[template].values()))


def names_of(shapes: Mapping[str, Shape]) -> Names:
    """Convert the tensor names of a checkpoint into templates. `shapes` has the shapes of its tensors by name.

    The first number in a name is taken as the layer, and a number after "experts." as the expert.
    """
    by_template: dict[str, dict[int, Shape]] = {}
    stacks: Counter[str] = Counter()
    odd = []
    for name, shape in shapes.items():
        if not re.fullmatch(r"[\w.\-/]{1,200}", name, re.ASCII):
            odd.append(name)
            continue
        number = _LAYER.search(name)
        template = _LAYER.sub("{layer}", name, count=1)
        if number:
            stacks[name[: number.start()]] += 1
        by_template.setdefault(_EXPERT.sub("{expert}", template, count=1), {}).setdefault(
            int(number[0]) if number else 0, shape
        )
    stack = stacks.most_common(1)[0][0] if stacks else ""
    templates = {name: layers for name, layers in by_template.items() if name.startswith(f"{stack}{{layer}}")}
    last = max((layer for layers in templates.values() for layer in layers), default=-1)
    prefix = stack.removesuffix(".").rpartition(".")[0]
    return Names(f"{prefix}." if prefix else "", 1 + last, by_template, tuple(odd))
