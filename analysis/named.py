"""A model of a family that gptkit does not know, as what it is: tensors of some names and shapes. No torch.

The names come from the headers of its weight files, or where there is a config.json alone from transformers' class of
that name, which a process of its own makes without weights. What they tell is counted; nothing is guessed of what the
tensors compute, so that no other figure is told.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from typing import Any, ClassVar

from ..architectures.config import MAX_LAYERS
from ..components import Parameter, Shape
from ..converter.confinement import Confined, libraries
from ..display import Record
from ..errors import UnknownFamily, UsageError, shown
from .costs import CacheSize
from .parameters import LayerCount, TensorCount
from .tensors import TensorGroup, braces

LAYER = re.compile(r"(?P<stack>(?:[^.]+\.)*?[^.]+)\.(?P<index>[0-9]+)\.(?P<inside>.+)")
"""A name within a numbered layer: `model.layers.3.mlp.up_proj.weight`, by the first number in it."""


@dataclass(frozen=True)
class Named(Record):
    """A model by the names and shapes of its tensors. model_type: config.json's, "" without one. source: where the
    names come from, in words. parameters: by their own names, each in a component and layer that its name tells:
    layers are numbered through, stack by stack. config: its config.json; cache: what that says of the key-value cache
    (`kept`), at the contexts that were asked for.
    """

    JSON = (
        "by_names=source model_type total=count.total active=unknown embedding_positions_head=unknown"
        " non_embedding=unknown tied=unknown layers=count.number_of_layers components=count.by_component"
        " by_layer=count.numbered_layers"
    )

    model_type: str
    source: str
    parameters: tuple[Parameter, ...]
    config: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    cache: tuple[CacheSize, ...] = ()

    unknown: ClassVar[None] = None
    """What names do not tell."""

    @cached_property
    def count(self) -> TensorCount:
        by_component: Counter[str] = Counter()
        places: dict[int | None, Counter[str]] = {}
        for each in self.parameters:
            by_component[each.component] += each.count
            places.setdefault(each.layer, Counter())[each.component] += each.count
        outside = dict(places.pop(None, {}))
        layers = [LayerCount(dict(places[layer])) for layer in sorted(places, key=lambda layer: layer or 0)]
        return TensorCount(by_component.total(), dict(by_component), layers, outside)

    def refusal(self, model: str) -> UsageError:
        """The error for what needs to know what the tensors compute, to be raised by the caller."""
        kind = f" {shown(self.model_type)}" if self.model_type else ""
        message = f"gptkit does not support the model family{kind} of {model}, so it can only count tensors by name"
        return UsageError(message, f"To draft a definition of the family: gptkit draft {model} --out definition.py")

    def groups(self) -> list[TensorGroup]:
        """Its tensors, those that differ by numbers in their names alone folded."""
        found: dict[tuple[str, Shape, str], list[list[int]]] = {}
        for each in self.parameters:
            parts = each.name.split(".")
            numbers = [int(part) for part in parts if part.isdecimal()]
            pattern = ".".join("*" if part.isdecimal() else part for part in parts)
            found.setdefault((pattern, each.shape, each.component), []).append(numbers)
        groups = []
        for (pattern, shape, component), places in found.items():
            words = iter([braces(sorted(set(numbers))) for numbers in zip(*places, strict=True)])
            name = ".".join(next(words) if part == "*" else part for part in pattern.split("."))
            groups.append(TensorGroup(name, shape, component, len(places)))
        return groups


def by_names(shapes: Iterable[tuple[str, Shape]]) -> tuple[Parameter, ...]:
    """Tensors in components and layers that follow from their names.

    A layer is what has a first number in common, `decoder.layers.3`; its number here is its place among all of the
    model's. The component is the name's first part within it that is no number and numbers nothing itself (`mlp` of
    `mlp.experts.7.up_proj.weight`); outside of layers the first part behind what all stacks begin with.
    """
    listed = list(shapes)
    places = [LAYER.fullmatch(name) for name, _ in listed]
    stacks = list(dict.fromkeys(place["stack"] for place in places if place))
    numbers: dict[str, set[int]] = {stack: set() for stack in stacks}
    for place in places:
        if place:
            numbers[place["stack"]].add(int(place["index"]))
    layers = {(stack, index): None for stack in stacks for index in sorted(numbers[stack])}
    at = {layer: number for number, layer in enumerate(layers)}
    paths = [stack.split(".")[:-1] for stack in stacks]
    alike = takewhile(lambda level: len(set(level)) == 1, zip(*paths, strict=False))
    root = [level[0] for level in alike]  # what all stacks lie in
    found = []
    for (name, shape), place in zip(listed, places, strict=True):
        if place:
            layer, parts = at[place["stack"], int(place["index"])], place["inside"].split(".")
        else:
            layer, parts = None, name.split(".")
            parts = (parts[len(root) :] if parts[: len(root)] == root else None) or parts
        following = [*parts[1:], ""]
        pairs = zip(parts, following, strict=True)
        words = [one for one, after in pairs if not one.isdecimal() and not after.isdecimal()]
        found.append(Parameter(name, shape, (words or parts)[0], layer))
    return tuple(found)


def by_class(config: Mapping[str, object], unknown: UnknownFamily) -> tuple[str, tuple[Parameter, ...]]:
    """What transformers' class makes of a config.json: the class' name, and its parameters, a shared one once.

    Raises:
        UnknownFamily: transformers makes no model of it either, or takes too long.
    """
    for name, value in config.items():
        if "layers" in name and type(value) is int and value > MAX_LAYERS:
            raise UnknownFamily(
                f"{unknown.message}, and {name} is {value:,}, more than the maximum of {MAX_LAYERS:,}", unknown.hint
            )
    answer = Confined("transformers_process").ask({"config": dict(config), "libraries": libraries()})
    if answer is None or "error" in answer:
        why = "this took too much time or memory" if answer is None else answer["error"]
        words = "".join(sign if sign.isprintable() else " " for sign in why)
        raise UnknownFamily(
            f"{unknown.message}, and transformers could not build the model: {words:.300}", unknown.hint
        )
    found = answer["answer"]
    return found["class"], by_names((name, tuple(shape)) for name, shape in found["parameters"])
