"""A model of an unknown family, as a list of tensor names and shapes. This file needs no torch.

The names come from the headers of its weight files. If there is only a config.json, a separate process builds
transformers' class without weights. gptkit counts these tensors, but reports no figure that depends on their use.
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
"""A name within a layer, whose number is the first in the name: `model.layers.3.mlp.up_proj.weight`."""


@dataclass(frozen=True)
class Named(Record):
    """A model of an unknown family. gptkit only knows the names and shapes of its tensors."""

    JSON = (
        "by_names=source model_type total=count.total active=unknown embedding_positions_head=unknown"
        " non_embedding=unknown tied=unknown layers=count.number_of_layers components=count.by_component"
        " by_layer=count.numbered_layers"
    )

    model_type: str  # the field of config.json, or "" without one
    source: str  # where the names come from, in words
    parameters: tuple[Parameter, ...]  # the tensors, with the component and the layer that `by_names` infers
    config: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)  # the content of config.json
    cache: tuple[CacheSize, ...] = ()  # the KV cache at the wanted contexts, from config.json (`config_cache`)

    unknown: ClassVar[None] = None
    """The value of all figures that names and shapes do not determine."""

    @cached_property
    def count(self) -> TensorCount:
        by_component: Counter[str] = Counter()
        places: dict[int | None, Counter[str]] = {}
        for parameter in self.parameters:
            by_component[parameter.component] += parameter.count
            places.setdefault(parameter.layer, Counter())[parameter.component] += parameter.count
        outside = dict(places.pop(None, {}))
        layers = [LayerCount(dict(places[layer])) for layer in sorted(places, key=lambda layer: layer or 0)]
        return TensorCount(by_component.total(), dict(by_component), layers, outside)

    def refusal(self, model: str) -> UsageError:
        """Return the error for a request that names and shapes cannot answer. The caller raises it."""
        kind = f" {shown(self.model_type)}" if self.model_type else ""
        message = f"gptkit does not support the model family{kind} of {model}, so it can only count tensors by name"
        return UsageError(message, f"To draft a definition of the family: gptkit draft {model} --out definition.py")

    def groups(self) -> list[TensorGroup]:
        """Return the tensors in groups. Names in a group differ only in numbers, such as those of layers."""
        numbers_of: dict[tuple[str, Shape, str], list[list[int]]] = {}
        for parameter in self.parameters:
            parts = parameter.name.split(".")
            numbers = [int(part) for part in parts if part.isdecimal()]
            pattern = ".".join("*" if part.isdecimal() else part for part in parts)
            numbers_of.setdefault((pattern, parameter.shape, parameter.component), []).append(numbers)
        groups = []
        for (pattern, shape, component), places in numbers_of.items():
            words = iter([braces(sorted(set(numbers))) for numbers in zip(*places, strict=True)])
            name = ".".join(next(words) if part == "*" else part for part in pattern.split("."))
            groups.append(TensorGroup(name, shape, component, len(places)))
        return groups


def by_names(shapes: Iterable[tuple[str, Shape]]) -> tuple[Parameter, ...]:
    """Return tensors, with the component and the layer that follow from their names.

    Tensors whose names start with the same prefix and number, such as `decoder.layers.3`, form a layer. If a model has
    several stacks of layers (encoder and decoder), the layers of the second are numbered after those of the first.

    The component of a tensor in a layer is a word of the rest of its name: `mlp` for `mlp.experts.7.up_proj.weight`. It
    is the first word that is no number and is not followed by a number. Outside of layers, the component is the first
    such word after the common prefix of all stacks.
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
    root = [level[0] for level in alike]  # the common prefix of all stacks
    parameters = []
    for (name, shape), place in zip(listed, places, strict=True):
        if place:
            layer, parts = at[place["stack"], int(place["index"])], place["inside"].split(".")
        else:
            layer, parts = None, name.split(".")
            parts = (parts[len(root) :] if parts[: len(root)] == root else None) or parts
        following = [*parts[1:], ""]
        pairs = zip(parts, following, strict=True)
        words = [one for one, after in pairs if not one.isdecimal() and not after.isdecimal()]
        parameters.append(Parameter(name, shape, (words or parts)[0], layer))
    return tuple(parameters)


def by_class(config: Mapping[str, object], unknown: UnknownFamily) -> tuple[str, tuple[Parameter, ...]]:
    """Return the name and the parameters of transformers' class for a config.json. Tied parameters are listed once.

    Raises:
        UnknownFamily: transformers cannot build the model either, or takes too long. Its message starts with that of
            `unknown`, the error that gptkit already has for the model.
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
    model = answer["answer"]
    return model["class"], by_names((name, tuple(shape)) for name, shape in model["parameters"])
