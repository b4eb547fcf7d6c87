"""What the registered families know, by name: which role a tensor or a config field of that name has in them. No torch.

Nothing is typed by hand here. A name's meanings are those that it has in the families, the most usual first.
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
from ..architectures.decoder import Decoder
from ..architectures.fields import Field
from ..architectures.layout import parse
from ..architectures.stacks import STACKS
from ..components import Shape
from ..errors import GptkitError

CUT = 6
"""Layers whose names and shapes are compared."""

_LAYER = re.compile(r"(?<=\.)[0-9]{1,6}(?=\.)")
_PLACES = re.compile(r"\{\w+\}")
_EXPERT = re.compile(r"(?<=experts\.)[0-9]{1,6}(?=\.)")


@dataclass(frozen=True)
class Donor:
    """A family whose config.json is read from a table, which a draft takes arguments from.

    place: where the table stands, "module.VARIABLE".
    """

    family: Architecture
    decoder: Decoder
    place: str

    @cached_property
    def keys(self) -> dict[str, Leaf]:
        """Its leaves by their names without the prefix of the family."""
        leaves = (each for each in self.family.leaves if "{head}" not in each.checkpoint)  # a draft has no such names
        return {each.checkpoint.removeprefix(self.family.prefix): each for each in leaves}

    def knows(self, config: Mapping[str, Any]) -> set[str]:
        """The fields of a config that it reads or declares."""
        reader = ConfigReader(config)
        with suppress(GptkitError, ValueError, TypeError, KeyError):  # as far as it goes
            self.decoder.read(reader)
        return config.keys() & (reader.used | self.decoder.fields.keys() | self.family.ignored.keys()).union(
            self.family.refusals
        )


class Meaning(NamedTuple):
    """What a name means in some families: the value, how many have it so, and one of them."""

    value: Any
    votes: int
    donor: str


@dataclass(frozen=True)
class KnownNames:
    """The families without those of some names.

    donors: those whose table a draft may start from. others: the other families, whose names of tensors count too.
    """

    donors: tuple[Donor, ...]
    others: tuple[Architecture, ...] = ()

    @cached_property
    def leaves(self) -> dict[str, list[Meaning]]:
        """Names of tensors within a layer, or outside of layers without a prefix: the leaves that have them."""
        found: dict[str, list[tuple[Leaf, str]]] = {}
        for each in self.donors:
            for key, leaf in each.keys.items():
                found.setdefault(inside(key), []).append((leaf, each.family.name))
        for family in self.others:
            for leaf in family.leaves:
                if (
                    leaf.when is None
                    and not leaf.beside
                    and not {"{use}", "{head}"} & {*_PLACES.findall(leaf.checkpoint)}
                ):
                    key = inside(leaf.checkpoint.removeprefix(family.prefix))
                    found.setdefault(key, []).append((leaf, family.name))
        for name, leaves in (*((stack.name, stack.leaves) for stack in STACKS), ("llama2.c", llama2c.LEAVES)):
            for leaf in leaves:
                found.setdefault(inside(leaf.checkpoint), []).append((leaf, name))
        return {key: _voted(pairs, lambda leaf: (leaf.names, leaf.layout)) for key, pairs in found.items()}

    @cached_property
    def tails(self) -> dict[str, list[Meaning]]:
        """The same by the last parts of names: the module's own and "weight" or "bias"."""
        found: dict[str, list[tuple[Leaf, str]]] = {}
        for key, meanings in self.leaves.items():
            for each in meanings:
                found.setdefault(tail(key), []).extend([(each.value, each.donor)] * each.votes)
        return {key: _voted(pairs, lambda leaf: (leaf.names, leaf.layout)) for key, pairs in found.items()}

    def of_tensor(self, key: str) -> list[Meaning]:
        """What a name without a prefix may be."""
        return self.leaves.get(inside(key)) or self.tails.get(tail(key), [])

    @cached_property
    def fields(self) -> dict[str, list[Meaning]]:
        """Names of config fields: what they say."""
        found: dict[str, list[tuple[Field, str]]] = {}
        for each in self.donors:
            for name, field in each.decoder.fields.items():
                found.setdefault(name, []).append((field, each.family.name))
        return {name: _voted(pairs, lambda field: (field.role, field.read)) for name, pairs in found.items()}

    @cached_property
    def irrelevant(self) -> dict[str, list[Meaning]]:
        """Names of config fields that change nothing: the reasons. Those that every family ignores are left out."""
        found: dict[str, list[tuple[str, str]]] = {}
        for family in (each.family for each in self.donors):
            for name, reason in family.ignored.items():
                if name not in COMMON_IRRELEVANT:
                    found.setdefault(name, []).append((reason, family.name))
        return {name: _voted(pairs, str) for name, pairs in found.items()}

    @cached_property
    def refused(self) -> dict[str, list[Meaning]]:
        """Names of config fields that are refused but for some values: these, and the reason."""
        found: dict[str, list[tuple[Any, str]]] = {}
        for family in (each.family for each in self.donors):
            for name, refusal in family.refusals.items():
                if name not in COMMON_REFUSED:
                    found.setdefault(name, []).append((refusal, family.name))
        return {name: _voted(pairs, repr) for name, pairs in found.items()}

    def fixed(self) -> dict[str, list[Meaning]]:
        """Roles whose values no config field says: the values that families have."""
        found: dict[str, list[tuple[Any, str]]] = {}
        for each in self.donors:
            for role, value in each.decoder.fixed.items():
                found.setdefault(role, []).append((value, each.family.name))
        return {role: _voted(pairs, id_or_value) for role, pairs in found.items()}


def id_or_value(value: Any) -> Any:
    """What makes two values one: functions are themselves."""
    return id(value) if callable(value) else repr(value)


def _voted(pairs: Sequence[tuple[Any, str]], by: Callable[[Any], Any]) -> list[Meaning]:
    """The different values, the most usual first, of equally usual ones the first."""
    votes = Counter(by(value) for value, _ in pairs)
    first = {by(value): (value, donor) for value, donor in reversed(pairs)}
    return [Meaning(first[key][0], count, first[key][1]) for key, count in votes.most_common()]


def inside(key: str) -> str:
    """A name template from its layer's number on; as it is where it is of none."""
    _, layer, rest = key.partition("{layer}.")
    return layer + rest if layer else key


def tail(key: str) -> str:
    """The last two parts of a name template, behind "{layer}." where it is of one."""
    within = inside(key)
    layer, parts = within.startswith("{layer}."), within.removeprefix("{layer}.").split(".")
    return ("{layer}." if layer else "") + ".".join(parts[-2:])


@cache
def known_names(without: tuple[str, ...] = ()) -> KnownNames:
    """What the registered families know, but for those of some names."""
    known = [each for each in ARCHITECTURES.values() if each.name not in without]  # which imports all families
    places = dict(_places())
    donors = tuple(
        Donor(family, reader, places[id(reader)])
        for family in known
        if type(reader := getattr(family.read, "__self__", None)) is Decoder and id(reader) in places
    )
    own = {each.family.name for each in donors}
    return KnownNames(donors, tuple(each for each in known if each.name not in own))


_VECTORS = ("norm.weight", ".bias", ".A_log", ".D", "sinks", ".layer_scalar")
"""How shared names of tensors with one dimension end."""


def fits(leaf: Leaf, shape: Shape) -> bool:
    """Return whether a tensor of this shape has as many dimensions as the leaf."""
    if not leaf.layout.is_identity:
        return len(parse(leaf.layout.checkpoint)) == len(shape)
    return all(name.endswith(_VECTORS) == (len(shape) == 1) for name in leaf.names)


def _places() -> Iterator[tuple[int, str]]:
    """Each table that a module of ours holds, by its identity, and where it stands."""
    for name, module in list(sys.modules.items()):
        if name.startswith(f"{families.__name__}."):
            for variable, value in vars(module).items():
                if type(value) is Decoder:
                    yield id(value), f"{name}.{variable}"


# --- a checkpoint's own names ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Names:
    """The tensors of a checkpoint by name templates.

    prefix: what the names of layers begin with, "model." of "model.layers.{layer}.". layers: how many there are.
    shapes: of each template the shapes by layer. odd: names that no template can be made of.
    """

    prefix: str
    layers: int
    shapes: Mapping[str, Mapping[int, Shape]]
    odd: tuple[str, ...]

    def key(self, template: str) -> str:
        """A template without the prefix."""
        return template.removeprefix(self.prefix)

    def cut(self) -> Iterator[tuple[str, Shape]]:
        """The tensors outside of layers and of the first layers, with their shapes; of experts the first."""
        for template, by_layer in self.shapes.items():
            for layer, shape in by_layer.items():
                if layer < CUT:
                    yield template.format(layer=layer, expert=0), shape

    def shape(self, template: str) -> Shape:
        """The shape in the first layer that has it."""
        return next(iter(self.shapes[template].values()))


def names_of(shapes: Mapping[str, Shape]) -> Names:
    """The templates of a checkpoint's names: the first number in a name is a layer's, the second an expert's."""
    found: dict[str, dict[int, Shape]] = {}
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
        found.setdefault(_EXPERT.sub("{expert}", template, count=1), {}).setdefault(
            int(number[0]) if number else 0, shape
        )
    stack = stacks.most_common(1)[0][0] if stacks else ""
    own = [layer for each, layers in found.items() if each.startswith(f"{stack}{{layer}}") for layer in layers]
    prefix = stack.removesuffix(".").rpartition(".")[0]
    return Names(f"{prefix}." if prefix else "", 1 + max(own, default=-1), found, tuple(odd))
