"""The draft of a family, with its doubts and open questions. This file needs neither torch nor weights."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from msgspec import structs

from ..architectures import Architecture, Leaf
from ..architectures.base import leaves_of
from ..architectures.decoder import DecoderFamily
from ..architectures.fields import Field
from ..components import ModelSpec
from ..errors import GptkitError
from .vocabulary import CUT, Donor

ABSENT = object()
"""A patch with this value for an argument removes the argument from the draft."""

Patch = Mapping[str, Any]

BIASES = {
    "attention.qkv_bias": "blocks.{layer}.attention.q_proj.bias",
    "attention.output_bias": "blocks.{layer}.attention.o_proj.bias",
    "feed_forward.up_bias": "blocks.{layer}.feed_forward.up_proj.bias",
    "feed_forward.down_bias": "blocks.{layer}.feed_forward.down_proj.bias",
    "head.bias": "head.bias",
}
"""The properties that say whether there are biases, and for each the name of one of these biases."""

_NUMBERED = re.compile(r"(?P<of>^blocks|experts)\.[0-9]+\.")


class Known(NamedTuple):
    """The classes that transformers has for a model type."""

    hf_class: str  # the name of the model class
    hf_config: str  # the name of the config class
    defaults: Mapping[str, Any]  # the config class' default values
    fields: tuple[str, ...]  # the config class' fields
    aliases: Mapping[str, str]  # the field that each other name stands for


class Doubt(NamedTuple):
    """A property of a draft that is uncertain."""

    what: str  # the property in words
    options: tuple[tuple[str, Patch], ...]  # its other possible values: each in words, and as a patch of the draft


@dataclass(frozen=True)
class Draft:
    """The draft of a family's definition."""

    model_type: str
    known: Known | None
    skeleton: Donor  # the nearest registered family, whose arguments are the defaults
    arguments: Mapping[str, Any]  # the arguments of `DecoderFamily`, without its config fields
    fields: Mapping[str, Field]  # the meanings of the config fields, by field name
    leaves: Mapping[str, Leaf]  # which parameters a tensor stores, by its name with "{layer}" for the layer number
    more: Mapping[str, Any]  # other arguments of `DecoderFamily.architecture`
    why: Mapping[str, str] = field(default_factory=dict)  # the reasons for "fields.NAME", "leaves.NAME" and so on
    todo: Mapping[str, str] = field(default_factory=dict)  # open questions and contradictions, by the same keys
    doubts: tuple[Doubt, ...] = ()

    def modules(self) -> tuple[dict[str, tuple[str, str]], dict[str, Leaf]]:
        """Return the tensors that store one parameter unchanged, by module, and the leaves of all other tensors.

        The first dictionary has the checkpoint's module names as keys. Its values are gptkit's name of the module, and
        the name template of one tensor of the module.
        """
        plain_modules: dict[str, tuple[str, str]] = {}
        other_leaves = {}
        for template, leaf in self.leaves.items():
            (theirs, _, end), (ours, _, own_end) = template.rpartition("."), leaf.names[0].rpartition(".")
            plain = leaf == Leaf(template, leaf.names) or leaf == Leaf(template, leaf.names[0])
            plain = plain and len(leaf.names) == 1 and end == own_end and end in ("weight", "bias")
            if plain and plain_modules.get(theirs, (ours,))[0] == ours:
                plain_modules.setdefault(theirs, (ours, template))
            else:
                other_leaves[template] = leaf
        return plain_modules, other_leaves

    def family(self) -> Architecture:
        """Return the draft as a family that can read a config. The family is not registered."""
        modules, others = self.modules()
        leaves = (*leaves_of({name: shared for name, (shared, _) in modules.items()}), *others.values())
        more = {name: value for name, value in self.more.items() if name not in ("hf_class", "eager")}
        return DecoderFamily(self.fields, **self.arguments).architecture(
            self.model_type, self.more["hf_class"], leaves, **more
        )

    def patched(self, patch: Patch) -> "Draft":
        """Return the draft with the values of a patch in place of its own.

        The keys of a patch are "arguments.NAME", "fixed.ROLE", "rotary.NAME", "fields.NAME" or "leaves.TEMPLATE".
        """
        parts: dict[str, dict[str, Any]] = {
            "arguments": dict(self.arguments),
            "fixed": dict(self.arguments.get("fixed", {})),
            "fields": dict(self.fields),
            "leaves": dict(self.leaves),
        }
        rotary = {}
        for place, value in patch.items():
            part, _, name = place.partition(".")
            if part == "rotary":
                rotary[name] = value
            elif value is ABSENT:
                parts[part].pop(name, None)
            else:
                parts[part][name] = value
        arguments = parts["arguments"] | {"fixed": parts["fixed"]}
        if rotary and arguments.get("rotary") is not None:
            arguments["rotary"] = arguments["rotary"]._replace(**rotary)
        return replace(self, arguments=arguments, fields=parts["fields"], leaves=parts["leaves"])


def tree_of(draft: Draft, config: Mapping[str, Any]) -> ModelSpec | None:
    """Return the component tree that a draft reads from a config, or None if it cannot read the config."""
    try:
        return draft.family().read(draft.family().reader(config))
    except (GptkitError, ValueError, TypeError, KeyError, AttributeError):
        return None


def missing_parameters(spec: ModelSpec, draft: Draft) -> set[str]:
    """Return the parameters of a model that no tensor of the checkpoint stores, according to the draft."""
    parameters = cut(spec).parameters()
    return {_NUMBERED.sub(_templated, parameter.name) for parameter in parameters} - shared_names(draft.leaves)


def _templated(match: re.Match[str]) -> str:
    return f"{match['of']}.{{{'layer' if match['of'] == 'blocks' else 'expert'}}}."


def cut(spec: ModelSpec) -> ModelSpec:
    """Return a component tree with only its first layers, which are enough to compare names and shapes."""
    return structs.replace(spec, blocks=spec.blocks[:CUT])


def shared_names(leaves: Mapping[str, Leaf]) -> set[str]:
    """Return gptkit's names of all parameters that the leaves store. All families share these names."""
    return {name for leaf in leaves.values() for name in leaf.names}
