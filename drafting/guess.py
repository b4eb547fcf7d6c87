"""What a config.json and a checkpoint's names and shapes say of a family that is not known. No torch, no weights.

The nearest registered family gives the arguments; what names, shapes and config fields say otherwise replaces them.
What nobody can see in them stays open (`Draft.doubts`), with the values that other families have.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from msgspec import structs

from ..architectures import Architecture, Leaf
from ..architectures.base import TOKEN_IDS, bind, leaves_of
from ..architectures.config import COMMON_IRRELEVANT, COMMON_REFUSED, ConfigReader, shown
from ..architectures.decoder import Decoder, Field
from ..architectures.layout import IDENTITY
from ..architectures.rope import PART, USUAL_ROTARY, RotaryKind
from ..components import FeedForward, GatedFeedForward, LayerNorm, ModelSpec, RMSNorm, Shape, without_rounding
from ..errors import CannotExpress, CheckpointError, GptkitError
from .vocabulary import CUT, Donor, Meaning, Names, Vocabulary, id_or_value, names_of

ABSENT = object()
"""In a patch: the argument is left out."""

_PLAIN = Decoder({})
"""Every argument as it is where nobody says otherwise."""

Patch = Mapping[str, Any]

BY_LAYER = "what differs by layer"
"""The doubt of what reads fields that differ by layer."""

UNTOLD = "what no name tells"
"""The doubt of all arguments that neither names nor fields tell, as other families have them together."""

_READS: Mapping[type, Any] = {bool: ConfigReader.boolean, int: ConfigReader.integer, float: ConfigReader.number}
_OPTIONAL: Mapping[type, Any] = {int: ConfigReader.optional_integer, float: ConfigReader.optional_number}
_BIASES = {
    "attention.qkv_bias": "blocks.{layer}.attention.q_proj.bias",
    "attention.output_bias": "blocks.{layer}.attention.o_proj.bias",
    "feed_forward.up_bias": "blocks.{layer}.feed_forward.up_proj.bias",
    "feed_forward.down_bias": "blocks.{layer}.feed_forward.down_proj.bias",
    "head.bias": "head.bias",
}
"""The roles that say whether there are biases, and a shared name that there is with them."""

_PLACES = tuple(
    f"{mixer}{place}" for mixer in ("attention", "feed_forward") for place in ("_norm", "_output_norm", "_sum_norm")
)
_CERTAIN = ("layers", "hidden", "vocab")  # roles that say what the tensors must be
_SIZES = (*_CERTAIN, "heads", "intermediate", "eps", "activation", "context", "tied")  # without which there is no tree
_ACCOUNTS = ("refused.", "tensor ", "names ", "config")  # how the places begin of what `accounted` tells
_NOBODY = "TODO: nothing here reads {}"
_LOOKED_AT = 12  # families whose own tree is made of the config
_READINGS = 8  # of a tensor whose name nobody has


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


def guess(config: Mapping[str, Any], shapes: Mapping[str, Shape], known: Known | None, words: Vocabulary) -> Draft:
    """The draft of a checkpoint's family.

    Raises:
        CheckpointError: there are no layers, or the tensors are not those of this config.
    """
    names = names_of(shapes)
    if not names.layers:
        raise CheckpointError(
            f"none of the {len(shapes)} tensors is of a numbered layer", "A draft is made of a decoder's checkpoint."
        )
    donors = _ranked(config, names, words)
    skeleton = donors[0]
    leaves, why = _leaves(names, skeleton, words)
    if "head.weight" not in _shared(leaves):
        head = skeleton.family.head
        leaves[head] = Leaf(head, "head.weight")
        why[f"leaves.{head}"] = f"the head of a model that is not tied, as {skeleton.family.name} calls it"
    fields, more = _fields(config, names, leaves, known, skeleton, words, why)
    draft = Draft(
        model_type=config["model_type"],
        known=known,
        skeleton=skeleton,
        arguments=_arguments(config, names, leaves, fields, known, skeleton, words, why),
        fields=fields,
        leaves=leaves,
        more=more,
        why=why,
    )
    draft = _as_named(draft, config, names)
    draft = replace(
        draft, doubts=tuple(each for each in _doubts(draft, config, names, donors[1:], words) if each.options)
    )
    return accounted(_fitted(draft, config, names), config, shapes)


_NUMBERED = re.compile(r"(?P<of>^blocks|experts)\.[0-9]+\.")


def _lacking(spec: ModelSpec, draft: Draft) -> set[str]:
    """The tensors of a tree that no name is known of."""
    return {_NUMBERED.sub(_templated, each.name) for each in _cut(spec).parameters()} - _shared(draft.leaves)


def _templated(found: re.Match[str]) -> str:
    return f"{found['of']}.{{{'layer' if found['of'] == 'blocks' else 'expert'}}}."


def _fitted(draft: Draft, config: Mapping[str, Any], names: Names) -> Draft:
    """With those of the open values that names, shapes and the config's fields speak for, taken one after another."""
    best = _strangeness(draft, config, names)
    for doubt in [each for each in draft.doubts if each.what != UNTOLD] * 2:
        for words, patch in doubt.options if best else ():
            tried = draft.patched(patch)
            strange = _strangeness(tried, config, names)
            if strange < best:
                why = f"{words}: more names, shapes and fields agree with it"
                draft, best = replace(tried, why={**tried.why, **dict.fromkeys(patch, why)}), strange
    return draft


def _strangeness(draft: Draft, config: Mapping[str, Any], names: Names) -> float:
    """How much of the names, shapes and config fields the draft leaves unexplained."""
    left = _unread(draft, config)
    spec = None if left is None else _spec(draft, config)
    if left is None or spec is None or len(spec.blocks) != names.layers:
        return 1000.0
    try:
        ours = {each.checkpoint: each.shape for each in draft.family().bind(_cut(spec))}
    except CannotExpress:
        return 200.0 + len(_lacking(spec, draft))
    except (AssertionError, ValueError, TypeError, KeyError):
        return 500.0
    theirs = dict(names.cut())
    head = draft.family().head
    if spec.tied:
        theirs.pop(head, None)
    return 100 * (1 - _agreement(ours, theirs)) + len(left)


def _ranked(config: Mapping[str, Any], names: Names, words: Vocabulary) -> list[Donor]:
    """The families, those nearest by names, then by config fields, first; of equals the oldest."""
    own = {names.key(each) for each in names.shapes}
    fields = config.keys() - COMMON_IRRELEVANT.keys() - COMMON_REFUSED.keys()

    def nearness(donor: Donor) -> float:
        theirs = {key for key in donor.keys if key in own or not key.endswith("bias")}
        alike = len(own & theirs) / len(own | theirs)
        return alike + 0.5 * len(donor.knows(config) & fields) / max(len(fields), 1)

    near = {each.family.name: nearness(each) for each in words.donors}
    first = sorted(words.donors, key=lambda each: near[each.family.name], reverse=True)
    for each in first[:_LOOKED_AT]:
        near[each.family.name] += _fit(each, config, names)
    return sorted(first, key=lambda each: near[each.family.name], reverse=True)


def _fit(donor: Donor, config: Mapping[str, Any], names: Names) -> float:
    """How many of the names and shapes the family would have itself for this config, from 0 to 1."""
    try:
        spec = donor.decoder.read(donor.family.reader(config))
        if len(spec.blocks) != names.layers:
            return 0.0
        theirs = {
            each.checkpoint.removeprefix(donor.family.prefix): each.shape
            for each in bind(donor.family.name, donor.family.leaves, _cut(spec))
        }
    except (GptkitError, AssertionError, ValueError, TypeError, KeyError, AttributeError):
        return 0.0
    return _agreement(theirs, {names.key(each): shape for each, shape in names.cut()})


def _agreement(ours: Mapping[str, Shape], theirs: Mapping[str, Shape]) -> float:
    """The part of all names that two have with one shape."""
    return len(ours.items() & theirs.items()) / max(len(ours.keys() | theirs.keys()), 1)


def _cut(spec: ModelSpec) -> ModelSpec:
    """A tree with its first layers alone, which is enough to compare names and shapes."""
    return structs.replace(spec, blocks=spec.blocks[:CUT])


# --- tensors ---------------------------------------------------------------------------------------------------------


def _leaves(names: Names, skeleton: Donor, words: Vocabulary) -> tuple[dict[str, Leaf], dict[str, str]]:
    """What each tensor holds, by its template, the skeleton's order first; and why that is believed."""
    found, why, taken = dict[str, Leaf](), dict[str, str](), set[str]()
    meanings = {each: words.of_tensor(names.key(each)) for each in names.shapes}
    for template in sorted(names.shapes, key=lambda each: len(meanings[each]) or 99):
        own = skeleton.keys.get(names.key(template))
        options = [*([Meaning(own, 0, skeleton.family.name)] if own is not None else []), *meanings[template]]
        for each in options:
            leaf = replace(each.value, checkpoint=template)
            if taken.isdisjoint(leaf.names) and ("{layer}" in template) == ("{layer}" in leaf.names[0]):
                taken.update(leaf.names)
                found[template] = leaf
                shape = names.shape(template)
                others = f"{each.votes} families have the name so" if each.votes else f"as {each.donor} has it"
                why[f"leaves.{template}"] = f"{shape}; {others}"
                break
    order = {key: number for number, key in enumerate(skeleton.keys)}
    ranked = sorted(found, key=lambda each: (order.get(names.key(each), len(order)), each))
    return {each: found[each] for each in ranked}, why


def _shared(leaves: Mapping[str, Leaf]) -> set[str]:
    return {name for leaf in leaves.values() for name in leaf.names}


def _facts(names: Names, leaves: Mapping[str, Leaf]) -> dict[str, tuple[int, str]]:
    """Sizes that shapes say, by roles, and where."""
    found = {"layers": (names.layers, "the layers that names count")}
    plain = {leaf.names[0]: each for each, leaf in leaves.items() if leaf.layout == IDENTITY}
    table = plain.get("embedding.weight")
    if table is not None and len(names.shape(table)) == 2:
        rows, columns = names.shape(table)
        found |= {"vocab": (rows, f"the rows of {table}"), "hidden": (columns, f"the columns of {table}")}
    down = plain.get("blocks.{layer}.feed_forward.down_proj.weight")
    if down is not None and len(names.shape(down)) == 2:
        found["intermediate"] = (names.shape(down)[1], f"the columns of {down}")
    return found


# --- config fields ---------------------------------------------------------------------------------------------------


def _fields(
    config: Mapping[str, Any],
    names: Names,
    leaves: Mapping[str, Leaf],
    known: Known | None,
    skeleton: Donor,
    words: Vocabulary,
    why: dict[str, str],
) -> tuple[dict[str, Field], dict[str, Any]]:
    """The table of config fields, and what the family declares of others."""
    facts, reads = _facts(names, leaves), skeleton.knows(config)
    mixed = any("expert" in each for each in _shared(leaves))
    stated = {**(known.defaults if known else {}), **config}
    reader = ConfigReader(stated)
    aliases = {name: to for name, to in (known.aliases if known else {}).items() if name != to}
    fields: dict[str, Field] = {}
    irrelevant: dict[str, str] = {}
    refused: dict[str, Any] = {}

    def taken() -> set[str]:
        return {role for each in fields.values() for role in each.role.split()}

    def readable(name: str, meaning: Field) -> bool:
        try:
            _with_default(meaning, name, config, known).value(reader, name)
        except GptkitError:
            return False
        return mixed or not _of_mixture(meaning)

    def add(name: str, meaning: Field, reason: str) -> None:
        fields[name] = _with_default(meaning, name, config, known)
        role = meaning.role.split()[0]
        if role in facts and isinstance(config.get(name), int):
            number, where = facts[role]
            if role in _CERTAIN and number != config[name]:
                told = f"config.json says {name} {shown(config[name])}, and {where} are {number}"
                raise CheckpointError(
                    f"the tensors are of another model than config.json: {told}",
                    "Take the config.json that was saved with them.",
                )
            reason = f"{number} is {where}" if number == config[name] else reason
        why[f"fields.{name}"] = reason

    for name in stated:
        if name in aliases and aliases[name] in stated:
            continue
        if name in skeleton.decoder.fields and readable(name, skeleton.decoder.fields[name]):
            add(name, skeleton.decoder.fields[name], f"as {skeleton.family.name} reads it")
    for name, value in stated.items():
        if name in fields or name in COMMON_IRRELEVANT or name in COMMON_REFUSED or name in aliases:
            continue
        if name in skeleton.family.ignored:
            irrelevant[name] = skeleton.family.ignored[name]
        elif name in skeleton.family.refusals and _harmless(skeleton.family.refusals[name][0], value):
            refused[name] = skeleton.family.refusals[name]
        elif name in reads and (skeleton.decoder.layers or skeleton.decoder.recurrent or skeleton.decoder.mixtures):
            continue  # what differs by layer is read from it
        else:
            options = [each for each in words.fields.get(name, []) if readable(name, each.value)]
            free = [each for each in options if taken().isdisjoint(each.value.role.split())]
            if free:
                add(name, free[0].value, f"{free[0].votes} families read it so, {free[0].donor} among them")
            elif name in words.irrelevant and not options:
                irrelevant[name] = words.irrelevant[name][0].value
            elif name in words.refused and _harmless(words.refused[name][0].value[0], value):
                refused[name] = words.refused[name][0].value
    for role in [each for each in _SIZES if each not in taken() and each in facts]:
        number, where = facts[role]
        alike = [name for name in config if name not in fields and type(config[name]) is int and config[name] == number]
        if len(alike) == 1:
            add(alike[0], Field(role, number), f"{number} is {where}")
    more: dict[str, Any] = {
        "hf_class": known.hf_class if known else _class_said(config),
        "hf_config": known.hf_config if known else f"{_class_said(config).removesuffix('ForCausalLM')}Config",
        "irrelevant": irrelevant,
        "refused": refused,
        "prefix": names.prefix,
    }
    if known is not None:
        ids = {name: known.defaults.get(name) for name in TOKEN_IDS}
        more["token_ids"] = {name: value for name, value in ids.items() if value is not None}
        back: dict[str, tuple[str, ...]] = {}
        for name, to in aliases.items():
            back[to] = (*back.get(to, ()), name)
        more["config_aliases"] = {to: each for to, each in back.items() if to in fields or to in reads}
    head = next((each for each, leaf in leaves.items() if leaf.names == ("head.weight",)), None)
    more |= {"head": head} if head not in (None, "lm_head.weight") else {}
    for name in ("stacked", "dropped"):
        if getattr(skeleton.family, name) and skeleton.family.prefix == names.prefix:
            more[name] = getattr(skeleton.family, name)
    return fields, more


def _with_default(meaning: Field, name: str, config: Mapping[str, Any], known: Known | None) -> Field:
    """A field as another family reads it, with the default of the config class, or none where there is no class."""
    kind, inner = type(meaning.default), name.partition(".")[2]
    if known is None or inner:
        if kind in (int, float) and meaning.read is None and name in config:
            return meaning._replace(default=None, read=_READS[kind])  # stated, or refused
        return meaning
    default = known.defaults.get(name, meaning.default)
    if default is None and meaning.read is None and kind in _OPTIONAL:
        return meaning._replace(default=None, read=_OPTIONAL[kind])
    if default is None and kind is bool:
        return meaning._replace(default=False, read=ConfigReader.boolean)
    if kind is float and type(default) is int:
        default = float(default)
    if type(default) not in (bool, int, float, str, type(None)):
        default = meaning.default
    return meaning._replace(default=default)


def _of_mixture(each: Field) -> bool:
    return each.role.startswith(("mixture.", "expert_size", "shared_"))


def _harmless(values: Sequence[Any], value: Any) -> bool:
    return any(type(each) is type(value) and each == value for each in values)


def _class_said(config: Mapping[str, Any]) -> str:
    said = config.get("architectures")
    return said[0] if isinstance(said, list) and said and isinstance(said[0], str) else "UnknownForCausalLM"


# --- the other arguments ---------------------------------------------------------------------------------------------


def _arguments(
    config: Mapping[str, Any],
    names: Names,
    leaves: Mapping[str, Leaf],
    fields: Mapping[str, Field],
    known: Known | None,
    skeleton: Donor,
    words: Vocabulary,
    why: dict[str, str],
) -> dict[str, Any]:
    """Those of `Decoder` beside the fields."""
    own, shared, theirs = {}, _shared(leaves), skeleton.decoder
    by = {name: each for each, leaf in leaves.items() for name in leaf.names}
    for name in ("mixer", "rotary", "table", "layers", "recurrent", "mixtures", "written", "whole_heads", "square"):
        own[name] = getattr(theirs, name)
        why[f"arguments.{name}"] = f"as {skeleton.family.name} has it"
    blocks = {name.removeprefix("blocks.{layer}.") for name in shared}
    norms = tuple(each for each in _PLACES if f"{each}.weight" in blocks)
    own["norms"] = norms or theirs.norms
    why["arguments.norms"] = (
        ", ".join(by[f"blocks.{{layer}}.{each}.weight"] for each in norms) or "no norm has a weight"
    )
    biased = [name for name in shared if name.endswith("norm.bias")]
    eps = next((name for name, each in fields.items() if each.role == "eps"), "")
    layer_norms = [each for each in words.donors if each.decoder.norm is LayerNorm and eps in each.decoder.fields]
    rms_norms = [each for each in words.donors if each.decoder.norm is RMSNorm and eps in each.decoder.fields]
    own["norm"] = LayerNorm if biased or len(layer_norms) > len(rms_norms) else RMSNorm
    why["arguments.norm"] = (
        f"{by[biased[0]]} is there" if biased else f"{eps} is of such norms in most families, and no norm has a bias"
    )
    gated = any(name.endswith("gate_proj.weight") and "feed_forward" in name for name in shared)
    own["inner"] = GatedFeedForward if gated else FeedForward
    why["arguments.inner"] = "there is a gate_proj" if gated else "there is no gate_proj"
    query = by.get("blocks.{layer}.attention.q_norm.weight")
    own["head_norms"] = ""
    if query is not None:
        shape, heads = names.shape(query), _value(config, known, fields, "heads")
        width = (
            names.shape(by["blocks.{layer}.attention.o_proj.weight"])[-1]
            if "blocks.{layer}.attention.o_proj.weight" in by
            else 0
        )
        own["head_norms"] = "own" if len(shape) == 2 else "whole" if shape[0] == width and heads != 1 else "same"
        why["arguments.head_norms"] = f"{query} is {shape}, and all heads are {width} wide"
    own["learned"] = "positions.weight" in shared
    own["embedding_norm"] = "embedding.norm.weight" in shared
    rotary = own["rotary"]
    if rotary is None and not own["learned"] and theirs.layers is None and "attention.position" not in theirs.fixed:
        rotary = USUAL_ROTARY
    own["rotary"] = rotary if rotary is None else _rotary(rotary, config, known, words)
    if not any("expert" in each for each in shared):
        own["mixtures"] = None
    said = {role for each in fields.values() for role in each.role.split()}
    fixed = {role: each for role, each in theirs.fixed.items() if role not in said and _has(own, role)}
    why |= {f"fixed.{role}": f"as {skeleton.family.name} has it" for role in fixed}
    if "final_norm.weight" not in shared and fixed.get("norm.gain") != "none":
        fixed["final_norm"] = False
    if "tied" not in said and "tied" not in fixed:
        fixed["tied"] = not any(
            leaf.names == ("head.weight",) and each in names.shapes for each, leaf in leaves.items()
        )
        why["fixed.tied"] = "no field says so, and " + (
            "the head has no tensor" if fixed["tied"] else "the head has one"
        )
    own["fixed"] = fixed
    return own


def _value(config: Mapping[str, Any], known: Known | None, fields: Mapping[str, Field], role: str) -> Any:
    """What the config says of a role."""
    name = next((name for name, each in fields.items() if role in each.role.split()), "")
    return config.get(name, known.defaults.get(name) if known else None)


def _has(arguments: Mapping[str, Any], role: str) -> bool:
    """Whether a component that the arguments name has the field of a dotted role."""
    part, _, name = role.partition(".")
    kinds = {"norm": arguments["norm"], "feed_forward": arguments["inner"], "attention": arguments["mixer"]}
    if part == "mixture":
        return arguments.get("mixtures") is not None
    return part not in kinds or name in kinds[part].__struct_fields__


def _rotary(kind: RotaryKind, config: Mapping[str, Any], known: Known | None, words: Vocabulary) -> RotaryKind:
    """The skeleton's, with the base and the part of the config class, and the field that says which part."""
    stated = {**(known.defaults if known else {}), **config}
    inner = stated.get("rope_parameters") or {}
    usual = (known.defaults.get("rope_parameters") if known else None) or {}
    usual = usual if isinstance(usual, dict) else {}
    base = usual.get("rope_theta", known.defaults.get(kind.theta, kind.base) if known else kind.base)
    names = {each.decoder.rotary.part for each in words.donors if each.decoder.rotary} - {""}
    part = next((each for each in (kind.part, *sorted(names)) if each and (each in stated or each in inner)), "")
    part = part or (PART if isinstance(inner, dict) and PART in inner else "")
    whole = usual.get(PART, known.defaults.get(part, kind.whole) if known else kind.whole) if part else 1.0
    said = {name: each for name, each in (("base", base), ("whole", whole)) if type(each) in (int, float)}
    numbers: dict[str, Any] = {name: float(each) for name, each in said.items()}
    return kind._replace(part=part, **numbers)


def _layers_of(donor: Donor, rotary: RotaryKind) -> dict[str, Any]:
    """The patch that takes what differs by layer from a family."""
    patch: dict[str, Any] = {f"arguments.{name}": getattr(donor.decoder, name) for name in ("layers", "written")}
    return patch | {"arguments.rotary": None if donor.decoder.rotary is None else rotary}


def _unread(draft: Draft, config: Mapping[str, Any]) -> list[str] | None:
    """The fields of a config that the draft neither reads nor declares; None where it cannot read the config."""
    family = draft.family()
    reader = family.reader(config)
    try:
        family.read(reader)
    except (GptkitError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return [
        name
        for name in config
        if name not in reader.used and name not in family.ignored and name not in family.refusals
    ]


def _as_named(draft: Draft, config: Mapping[str, Any], names: Names) -> Draft:
    """With biases and a tied head as names have them, whatever the config's fields are taken to say."""
    shared, todo, why = _shared(draft.leaves), dict(draft.todo), dict(draft.why)
    spec = _spec(draft, config)
    if spec is None:
        return draft
    there = {parameter.name for parameter in spec.parameters()}
    patch: dict[str, Any] = {}
    fields = dict(draft.fields)
    for role, name in _BIASES.items():
        if name.startswith("blocks.{layer}.attention") and spec.blocks[0].mixer("attention") is None:
            continue
        has = name in shared
        if has == (name.format(layer=0) in there) or (role.startswith("feed_forward") and draft.arguments["mixtures"]):
            continue
        for field_name, each in list(fields.items()):
            if role in each.role.split():
                rest = " ".join(one for one in each.role.split() if one != role)
                value, there_is = shown(config.get(field_name, each.default)), "one" if has else "none"
                usually = "without" if has else "with"
                todo[f"fields.{field_name}"] = (
                    f"{field_name} is {value}, by which other families are {usually} {role}, and there is {there_is}"
                )
                if rest:
                    fields[field_name] = each._replace(role=rest)
                else:
                    del fields[field_name]
        patch[f"fixed.{role}"] = has
        why[f"fixed.{role}"] = f"{'there is' if has else 'there is no'} such tensor, and no field says so"
    norm_bias = any(name.endswith("norm.bias") for name in shared)
    if draft.arguments["norm"] is LayerNorm and not norm_bias:
        patch["fixed.norm.bias"] = False
        why["fixed.norm.bias"] = "no norm has a bias"
    elif draft.arguments["norm"] is LayerNorm:
        patch["fixed.norm.bias"] = ABSENT
    head = draft.family().head in names.shapes
    if head == spec.tied and not any("tied" in each.role.split() for each in fields.values()):
        patch["fixed.tied"] = not head
        why["fixed.tied"] = "the head's tensor is there" if head else "the head has no tensor"
    return replace(replace(draft, fields=fields).patched(patch), todo=todo, why=why)


def _spec(draft: Draft, config: Mapping[str, Any]) -> ModelSpec | None:
    """The tree, None where the draft does not read the config."""
    try:
        return draft.family().read(draft.family().reader(config))
    except (GptkitError, ValueError, TypeError, KeyError, AttributeError):
        return None


def accounted(draft: Draft, config: Mapping[str, Any], shapes: Mapping[str, Shape]) -> Draft:
    """With every field that nothing reads refused at other values, and all that does not fit told, as of now."""
    todo = {place: each for place, each in draft.todo.items() if not place.startswith(_ACCOUNTS)}
    known, names, before = draft.known, names_of(shapes), draft.more["refused"]
    more = {**draft.more, "refused": {name: each for name, each in before.items() if each[1] != _NOBODY.format(name)}}
    draft = replace(draft, more=more)
    stated = {**(known.defaults if known else {}), **config}
    family = draft.family()
    reader = family.reader(stated)
    try:
        family.read(reader)
    except (GptkitError, ValueError, TypeError, KeyError, AttributeError) as error:
        lacking = isinstance(error, KeyError)
        reason = f"no field says the model's {error}" if lacking else str(error).partition("\n")[0]
        todo["config"] = f"config.json is not read: {reason:.200}"
    aliases = {name for names in more.get("config_aliases", {}).values() for name in names}
    left = dict.fromkeys([*stated, *(known.fields if known else ()), *(known.aliases if known else ())])
    refused, irrelevant = dict(more["refused"]), dict(more["irrelevant"])
    for name in left:
        if name in reader.used or name in family.ignored or name in family.refusals or name in aliases:
            continue
        if known is not None and name in known.aliases and known.aliases[name] != name:
            irrelevant[name] = f"another name of {known.aliases[name]}"
            continue
        value = stated.get(name)
        refused[name] = ((value,), _NOBODY.format(name))
        todo[f"refused.{name}"] = (
            f"nothing reads {name}, which is {shown(value)}: say what it does, or why it does nothing"
        )
    irrelevant = {name: reason for name, reason in irrelevant.items() if name not in reader.used}
    refused = {name: each for name, each in refused.items() if name not in reader.used}
    draft = replace(draft, more={**more, "refused": refused, "irrelevant": irrelevant})
    for template in names.shapes:
        if template not in draft.leaves:
            todo[f"tensor {template}"] = f"nothing is known of {template} {names.shape(template)}"
    for name in names.odd:
        todo[f"tensor {name!r:.60}"] = "its name cannot stand in a template"
    todo |= {f"names {number}": each for number, each in enumerate(_misfits(draft, config, shapes))}
    return replace(draft, todo=todo)


def _misfits(draft: Draft, config: Mapping[str, Any], shapes: Mapping[str, Shape]) -> Iterator[str]:
    """How the tensors of the tree and those of the checkpoint differ."""
    spec = _spec(draft, config)
    if spec is None:
        return
    try:
        ours = {leaf.checkpoint: leaf.shape for leaf in draft.family().bind(spec)}
    except (GptkitError, AssertionError, ValueError, TypeError, KeyError) as error:
        yield f"the tree has no place in these names: {str(error).splitlines()[0]:.200}"
        return
    head = draft.family().head
    for name, shape in ours.items():
        if name not in shapes:
            yield f"the tree has {name} {shape}, and the checkpoint has not"
            return
        if shapes[name] != shape:
            yield f"{name} is {shapes[name]}, and the tree has {shape}"
            return
    spare = [
        name
        for name in shapes
        if name not in ours and name != head and draft.family().canonical_name(name, ours, len(spec.blocks)) is not None
    ]
    if spare:
        yield f"{len(spare)} tensors have no place in the tree, {spare[0]:.100} among them"


# --- what cannot be seen ---------------------------------------------------------------------------------------------


def _doubts(
    draft: Draft, config: Mapping[str, Any], names: Names, rivals: Sequence[Donor], words: Vocabulary
) -> Iterator[Doubt]:
    """What names and shapes do not tell, the likeliest first."""
    said = {role for each in draft.fields.values() for role in each.role.split()}
    fixed = draft.arguments["fixed"]
    spec = _spec(draft, config)
    lacking = set() if spec is None else _lacking(spec, draft)
    for template in [each for each in names.shapes if each not in draft.leaves]:
        yield Doubt(f"what {template} holds", tuple(_readings(template, lacking, draft, words)))
    fitting = [each for each in rivals if each.decoder.norm is draft.arguments["norm"]]
    whole = []
    for donor in fitting:
        patch: dict[str, Any] = {f"fixed.{role}": ABSENT for role in fixed if role not in _BIASES}
        patch |= {
            f"fixed.{role}": value
            for role, value in donor.decoder.fixed.items()
            if role not in said
            and role not in _BIASES
            and role not in ("norm.bias", "tied")
            and _has(draft.arguments, role)
        }
        if donor.decoder.rotary is not None and draft.arguments["rotary"] is not None:
            patch |= {f"rotary.{name}": getattr(donor.decoder.rotary, name) for name in ("pairs", "rounding", "joined")}
        if draft.arguments["mixtures"] is not None and donor.decoder.mixtures is not None:
            patch["arguments.mixtures"] = donor.decoder.mixtures
        whole.append((f"all as {donor.family.name}", patch))
    yield Doubt(UNTOLD, tuple(whole))
    if draft.arguments["rotary"] is not None:
        rotaries = [each.decoder.rotary for each in words.donors if each.decoder.rotary is not None]
        for name in ("pairs", "rounding", "direction"):
            values = dict.fromkeys(getattr(each, name) for each in rotaries)
            others = [each for each in values if each != getattr(draft.arguments["rotary"], name)]
            yield Doubt(f"rotary {name}", tuple((repr(each), {f"rotary.{name}": each}) for each in others))
    for name, each in draft.fields.items():
        options = [
            one for one in words.fields.get(name, []) if (one.value.role, one.value.read) != (each.role, each.read)
        ]
        free = said - set(each.role.split())
        patches = [
            (one.value.role, {f"fields.{name}": _with_default(one.value, name, config, draft.known)})
            for one in options
            if free.isdisjoint(one.value.role.split())
        ]
        yield Doubt(f"what {name} says", tuple(patches))
    others = [
        each for each in (draft.skeleton, *rivals) if each.decoder.layers not in (None, draft.arguments["layers"])
    ]
    same = {
        "arguments.layers": None,
        "arguments.written": _PLAIN.written,
        "arguments.rotary": draft.arguments["rotary"],
    }
    rotary = draft.arguments["rotary"] or _rotary(USUAL_ROTARY, config, draft.known, words)
    none = [("nothing differs by layer", {**same, "arguments.rotary": rotary})] if draft.arguments["layers"] else []
    differing = [(f"as {each.family.name}", _layers_of(each, rotary)) for each in others if not each.decoder.recurrent]
    yield Doubt(BY_LAYER, (*none, *differing))
    for role, meanings in sorted(words.fixed().items(), key=lambda each: -sum(one.votes for one in each[1])):
        if role in said or role in _BIASES or role in ("norm.bias", "tied", "eps", "final_norm", "attention.causal"):
            continue
        if (
            not _has(draft.arguments, role)
            or ("position" in role)
            or (role.startswith("mixture") and draft.arguments["mixtures"] is None)
        ):
            continue
        now = id_or_value(fixed[role]) if role in fixed else None
        other: list[tuple[str, Patch]] = [
            (f"{role} as in {one.donor}", {f"fixed.{role}": one.value})
            for one in meanings
            if id_or_value(one.value) != now
        ]
        yield Doubt(role, (*other, (f"no {role}", {f"fixed.{role}": ABSENT})))


def undecided(draft: Draft, config: Mapping[str, Any]) -> Draft:
    """With a word on each open value that would be another function, for want of anything that decides it."""
    todo, now = dict(draft.todo), _spec(draft, config)
    for doubt in draft.doubts:
        if now is None or doubt.what in (UNTOLD, BY_LAYER):
            continue
        trees = [(words, _spec(draft.patched(patch), config)) for words, patch in doubt.options]
        others = [words for words, tree in trees if tree is not None and _another(tree, now)]
        if others:
            said = " or ".join(each.removeprefix(f"{doubt.what} ") for each in others[:4])
            todo[f"doubt {doubt.what}"] = f"neither names nor shapes tell {doubt.what}: it may be {said}"
    return replace(draft, todo=todo)


def _another(tree: ModelSpec, now: ModelSpec) -> bool:
    """Whether a tree is another function of the same tensors."""
    ours, theirs = ({each.name: each.shape for each in _cut(one).parameters()} for one in (tree, now))
    return ours == theirs and without_rounding(tree) != without_rounding(now)


def _readings(template: str, lacking: set[str], draft: Draft, words: Vocabulary) -> Iterator[tuple[str, Patch]]:
    """What a tensor of an unknown name may hold: several in one first, then what has no name yet."""
    ends, taken = template.rpartition(".")[2], _shared(draft.leaves)
    found: dict[Any, tuple[Leaf, int, str]] = {}
    for meanings in words.leaves.values():
        for each in meanings:
            leaf, votes, donor = each
            same = all(name.rpartition(".")[2] == ends for name in leaf.names)
            free = lacking.issuperset(leaf.names) if lacking else taken.isdisjoint(leaf.names)
            if same and free and leaf.when is None and ("{layer}" in template) == ("{layer}" in leaf.names[0]):
                key = (leaf.names, leaf.layout)
                found[key] = (leaf, votes + found.get(key, (leaf, 0, donor))[1], donor)
    ranked = sorted(found.values(), key=lambda each: (len(each[0].names) < 2, -each[1]))
    for leaf, _, donor in ranked[:_READINGS]:
        held = ", ".join(name.rpartition("}.")[2] for name in leaf.names)
        yield f"{held} lie in {template} as in {donor}", {f"leaves.{template}": replace(leaf, checkpoint=template)}
