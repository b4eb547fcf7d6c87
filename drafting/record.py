"""A family as far as it is guessed, and what is open of it. No torch, no weights."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from msgspec import structs

from ..architectures import Architecture, Leaf
from ..architectures.base import leaves_of
from ..architectures.decoder import Decoder
from ..architectures.fields import Field
from ..components import ModelSpec
from ..errors import GptkitError
from .vocabulary import CUT, Donor

ABSENT = object()
"""In a patch: the argument is left out."""

Patch = Mapping[str, Any]

BIASES = {
    "attention.qkv_bias": "blocks.{layer}.attention.q_proj.bias",
    "attention.output_bias": "blocks.{layer}.attention.o_proj.bias",
    "feed_forward.up_bias": "blocks.{layer}.feed_forward.up_proj.bias",
    "feed_forward.down_bias": "blocks.{layer}.feed_forward.down_proj.bias",
    "head.bias": "head.bias",
}
"""The roles that say whether there are biases, and a shared name that there is with them."""

_NUMBERED = re.compile(r"(?P<of>^blocks|experts)\.[0-9]+\.")


class Known(NamedTuple):
    """What transformers has of a model type: the classes' names, the config class' values where nothing is stated, its
    fields, and its other names of fields.
    """

    hf_class: str
    hf_config: str
    defaults: Mapping[str, Any]
    fields: tuple[str, ...]
    aliases: Mapping[str, str]


class Doubt(NamedTuple):
    """What cannot be seen, and the values that it may have beside the one that stands: words and a patch of each."""

    what: str
    options: tuple[tuple[str, Patch], ...]


@dataclass(frozen=True)
class Draft:
    """A family as far as it is guessed.

    skeleton: the family that arguments are taken from where nothing says otherwise. arguments: of `Decoder`. fields,
    leaves, more: of it and of `Decoder.architecture`. why: the reason of each, by "fields.NAME", "leaves.TEMPLATE" and
    so on. todo: what is not known or cannot be right yet, by the same places, or by a word of its own.
    """

    model_type: str
    known: Known | None
    skeleton: Donor
    arguments: Mapping[str, Any]
    fields: Mapping[str, Field]
    leaves: Mapping[str, Leaf]
    more: Mapping[str, Any]
    why: Mapping[str, str] = field(default_factory=dict)
    todo: Mapping[str, str] = field(default_factory=dict)
    doubts: tuple[Doubt, ...] = ()

    def modules(self) -> tuple[dict[str, tuple[str, str]], dict[str, Leaf]]:
        """The modules that checkpoints have as they are, by name: the shared name, a template; and the other leaves."""
        found: dict[str, tuple[str, str]] = {}
        others = {}
        for template, leaf in self.leaves.items():
            (theirs, _, end), (ours, _, own_end) = template.rpartition("."), leaf.names[0].rpartition(".")
            plain = leaf == Leaf(template, leaf.names) or leaf == Leaf(template, leaf.names[0])
            plain = plain and len(leaf.names) == 1 and end == own_end and end in ("weight", "bias")
            if plain and found.get(theirs, (ours,))[0] == ours:
                found.setdefault(theirs, (ours, template))
            else:
                others[template] = leaf
        return found, others

    def family(self) -> Architecture:
        """The family itself, not registered."""
        modules, others = self.modules()
        leaves = (*leaves_of({name: shared for name, (shared, _) in modules.items()}), *others.values())
        more = {name: each for name, each in self.more.items() if name not in ("hf_class", "eager")}
        return Decoder(self.fields, **self.arguments).architecture(
            self.model_type, self.more["hf_class"], leaves, **more
        )

    def patched(self, patch: Patch) -> "Draft":
        """The draft with other values: of "arguments.NAME", "fixed.ROLE", "rotary.NAME", "fields.NAME" or
        "leaves.TEMPLATE".
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
    """The tree, None where the draft does not read the config."""
    try:
        return draft.family().read(draft.family().reader(config))
    except (GptkitError, ValueError, TypeError, KeyError, AttributeError):
        return None


def lacking(spec: ModelSpec, draft: Draft) -> set[str]:
    """The tensors of a tree that no name is known of."""
    return {_NUMBERED.sub(_templated, each.name) for each in cut(spec).parameters()} - shared_names(draft.leaves)


def _templated(found: re.Match[str]) -> str:
    return f"{found['of']}.{{{'layer' if found['of'] == 'blocks' else 'expert'}}}."


def cut(spec: ModelSpec) -> ModelSpec:
    """A tree with its first layers alone, which is enough to compare names and shapes."""
    return structs.replace(spec, blocks=spec.blocks[:CUT])


def shared_names(leaves: Mapping[str, Leaf]) -> set[str]:
    """The shared names that leaves hold."""
    return {name for leaf in leaves.values() for name in leaf.names}
