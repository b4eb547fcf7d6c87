"""The record of a draft: the definition of an unknown family, with doubts and open questions.

This file needs neither torch nor weights.
"""

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
"""The value in a patch that removes an entry from the draft."""

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
    """transformers' classes for a model type."""

    hf_class: str  # the name of the model class
    hf_config: str  # the name of the config class
    defaults: Mapping[str, Any]  # the default values of the config class, by field
    fields: tuple[str, ...]  # the names of the fields of the config class
    aliases: Mapping[str, str]  # other names of fields (`attribute_map`), with the field that each stands for


class Doubt(NamedTuple):
    """A property of a draft that is uncertain, with other values to try."""

    what: str  # a description of the property
    options: tuple[tuple[str, Patch], ...]  # the other values; for each a description, and the patch that sets it


@dataclass(frozen=True)
class Draft:
    """A draft: a definition of an unknown family that is not yet certain."""

    model_type: str
    known: Known | None  # transformers' classes for the model type, if there are any
    skeleton: Donor  # the nearest registered family, whose arguments are the defaults
    arguments: Mapping[str, Any]  # the arguments of `DecoderFamily`, without its config fields
    fields: Mapping[str, Field]  # the meanings of the config fields, by field name
    leaves: Mapping[str, Leaf]  # which parameters a tensor stores, by its name with "{layer}" for the layer number
    more: Mapping[str, Any]  # other arguments of `DecoderFamily.architecture`
    why: Mapping[str, str] = field(default_factory=dict)  # the reasons for "fields.NAME", "leaves.NAME" and so on
    todo: Mapping[str, str] = field(default_factory=dict)  # open questions and contradictions, by the same keys
    doubts: tuple[Doubt, ...] = ()

    def modules(self) -> tuple[dict[str, tuple[str, str]], dict[str, Leaf]]:
        """Divide the tensors into those that store one parameter unchanged, and all others. Return both groups.

        The first group is returned by module: the key is the module's name in the checkpoint, and the value has
        gptkit's name of the module and the name of one of its tensors. The other tensors are returned by name, each
        with what it stores (its leaf).
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
        """Return the family that the draft defines. It can read configs, but is not registered."""
        modules, others = self.modules()
        leaves = (*leaves_of({name: shared for name, (shared, _) in modules.items()}), *others.values())
        more = {name: value for name, value in self.more.items() if name not in ("hf_class", "eager")}
        return DecoderFamily(self.fields, **self.arguments).architecture(
            self.model_type, self.more["hf_class"], leaves, **more
        )

    def patched(self, patch: Patch) -> "Draft":
        """Return the draft with some values replaced by those of a patch.

        The keys of a patch name entries of the draft: "arguments.NAME", "fields.NAME", "leaves.TEMPLATE", or
        "fixed.ROLE" and "rotary.NAME" for entries of the arguments `fixed` and `rotary`. The value ABSENT removes an
        entry.
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
    """Return the parameters of a model that no tensor of the checkpoint stores, as far as the draft knows."""
    parameters = cut(spec).parameters()
    return {_NUMBERED.sub(_templated, parameter.name) for parameter in parameters} - shared_names(draft.leaves)


def _templated(match: re.Match[str]) -> str:
    return f"{match['of']}.{{{'layer' if match['of'] == 'blocks' else 'expert'}}}."


def cut(spec: ModelSpec) -> ModelSpec:
    """Return a model with only its first layers. They are enough to compare tensor names and shapes."""
    return structs.replace(spec, blocks=spec.blocks[:CUT])


def shared_names(leaves: Mapping[str, Leaf]) -> set[str]:
    """Return the names of all parameters that the tensors store: gptkit's names for them, not those of the checkpoint.

    `leaves` says what each tensor stores, by its name in the checkpoint.
    """
    return {name for leaf in leaves.values() for name in leaf.names}
