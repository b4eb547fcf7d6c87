"""Guess what the fields of an unknown family's config.json mean, and the other arguments of the family's definition.

The guesses come from the supported families: from the nearest family first, and then from all others. This file needs
neither torch nor weights.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ..architectures import Leaf
from ..architectures.base import TOKEN_IDS
from ..architectures.config import COMMON_IRRELEVANT, COMMON_REFUSED, ConfigReader
from ..architectures.decoder import DecoderFamily
from ..architectures.fields import Field
from ..architectures.layout import IDENTITY
from ..architectures.rope import PART, USUAL_ROTARY, RotaryKind
from ..components import FeedForward, GatedFeedForward, LayerNorm, RMSNorm
from ..errors import CheckpointError, GptkitError, shown
from .record import Known, shared_names
from .vocabulary import Donor, KnownNames, Names

_READS: Mapping[type, Any] = {bool: ConfigReader.boolean, int: ConfigReader.integer, float: ConfigReader.number}
_OPTIONAL: Mapping[type, Any] = {int: ConfigReader.optional_integer, float: ConfigReader.optional_number}
_PLACES = tuple(
    f"{mixer}{place}" for mixer in ("attention", "feed_forward") for place in ("_norm", "_output_norm", "_sum_norm")
)
_CERTAIN = ("layers", "hidden", "vocab")  # a config that disagrees with the tensors on these is refused
_SIZES = (*_CERTAIN, "heads", "intermediate", "eps", "activation", "context", "tied")  # every tree needs them


# --- config fields ---------------------------------------------------------------------------------------------------


def fields_of(
    config: Mapping[str, Any],
    names: Names,
    leaves: Mapping[str, Leaf],
    known: Known | None,
    skeleton: Donor,
    words: KnownNames,
    why: dict[str, str],
) -> tuple[dict[str, Field], dict[str, Any]]:
    """Guess the meanings of config fields. Return them by field name, and arguments of `DecoderFamily.architecture`.

    Args:
        config: The checkpoint's config.json.
        names: The checkpoint's tensor names and shapes.
        leaves: Which parameters the tensors store, by tensor name.
        known: transformers' classes for the model type, if there are any.
        skeleton: The nearest supported family.
        words: The tensor names and config fields of the supported families.
        why: The reasons for the meanings are added to this dictionary.
    """
    table = _FieldTable(config, names, leaves, known, skeleton, words, why)
    table.add_skeleton_fields()
    for name, value in table.stated.items():
        table.add_or_declare(name, value)
    table.add_sizes()
    more: dict[str, Any] = {
        "hf_class": known.hf_class if known else _class_name(config),
        "hf_config": known.hf_config if known else f"{_class_name(config).removesuffix('ForCausalLM')}Config",
        "irrelevant": table.irrelevant,
        "refused": table.refused,
        "prefix": names.prefix,
    }
    if known is not None:
        ids = {name: known.defaults.get(name) for name in TOKEN_IDS}
        more["token_ids"] = {name: value for name, value in ids.items() if value is not None}
        more["config_aliases"] = table.used_aliases()
    head = next((template for template, leaf in leaves.items() if leaf.names == ("head.weight",)), None)
    more |= {"head": head} if head not in (None, "lm_head.weight") else {}
    for name in ("stacked", "dropped"):
        if getattr(skeleton.family, name) and skeleton.family.prefix == names.prefix:
            more[name] = getattr(skeleton.family, name)
    return table.fields, more


class _FieldTable:
    """The meanings of the fields of one config.json, as far as they are known.

    They come from the nearest supported family, then from the other families, and then from the shapes of the tensors.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        names: Names,
        leaves: Mapping[str, Leaf],
        known: Known | None,
        skeleton: Donor,
        words: KnownNames,
        why: dict[str, str],
    ) -> None:
        self.config, self.known, self.skeleton, self.words, self.why = config, known, skeleton, words, why
        self.facts, self.reads = _facts(names, leaves), skeleton.knows(config)
        self.has_experts = any("expert" in name for name in shared_names(leaves))
        self.stated = {**(known.defaults if known else {}), **config}
        self.reader = ConfigReader(self.stated)
        self.aliases = {name: to for name, to in (known.aliases if known else {}).items() if name != to}
        self.fields: dict[str, Field] = {}
        self.irrelevant: dict[str, str] = {}
        self.refused: dict[str, Any] = {}

    def add_skeleton_fields(self) -> None:
        """Add the fields that the nearest family reads, with the meanings that they have in that family."""
        for name in self.stated:
            meaning = self.skeleton.decoder.fields.get(name)
            if meaning is None or self.aliases.get(name) in self.stated:
                continue
            if self._is_readable(name, meaning):
                self._add(name, meaning, f"as {self.skeleton.family.name} reads it")

    def add_or_declare(self, name: str, value: Any) -> None:
        """Add a config field to the table: as a field that is read, as irrelevant, or with values that are refused.

        If the nearest family declares the field irrelevant or refuses values, the declaration is copied. Otherwise the
        field gets the meaning that it has in most families, or if it has none, the declaration that most families have.
        `value` is the field's value in the config. A declaration that refuses this value is not copied.
        """
        if name in self.fields or name in COMMON_IRRELEVANT or name in COMMON_REFUSED or name in self.aliases:
            return
        family, decoder = self.skeleton.family, self.skeleton.decoder
        if name in family.ignored:
            self.irrelevant[name] = family.ignored[name]
        elif name in family.refusals and _is_harmless(family.refusals[name][0], value):
            self.refused[name] = family.refusals[name]
        elif name not in self.reads or not (decoder.layers or decoder.recurrent or decoder.mixtures):
            self._add_common(name, value)  # the nearest family computes no differences between layers from it

    def _add_common(self, name: str, value: Any) -> None:
        options = [option for option in self.words.fields.get(name, []) if self._is_readable(name, option.value)]
        roles = self._roles()
        free = [option for option in options if roles.isdisjoint(option.value.role.split())]
        if free:
            self._add(name, free[0].value, f"{free[0].votes} families read it so, {free[0].donor} among them")
        elif name in self.words.irrelevant and not options:
            self.irrelevant[name] = self.words.irrelevant[name][0].value
        elif name in self.words.refused and _is_harmless(self.words.refused[name][0].value[0], value):
            self.refused[name] = self.words.refused[name][0].value

    def add_sizes(self) -> None:
        """Find config fields for sizes that are still missing, such as the hidden size, by their values.

        If the tensors' shapes show the size, and exactly one unknown config field has this value, that field is added.
        """
        roles = self._roles()
        for role in [role for role in _SIZES if role not in roles and role in self.facts]:
            number, where = self.facts[role]
            free = {name: value for name, value in self.config.items() if name not in self.fields}
            alike = [name for name, value in free.items() if type(value) is int and value == number]
            if len(alike) == 1:
                self._add(alike[0], Field(role, number), f"{number} is {where}")

    def used_aliases(self) -> dict[str, tuple[str, ...]]:
        """Return the other names that transformers has for the config fields that the family reads, by field."""
        by_field: dict[str, tuple[str, ...]] = {}
        for name, to in self.aliases.items():
            by_field[to] = (*by_field.get(to, ()), name)
        return {to: names for to, names in by_field.items() if to in self.fields or to in self.reads}

    def _roles(self) -> set[str]:
        return {role for meaning in self.fields.values() for role in meaning.role.split()}

    def _is_readable(self, name: str, meaning: Field) -> bool:
        try:
            with_default(meaning, name, self.config, self.known).value(self.reader, name)
        except GptkitError:
            return False
        return self.has_experts or not meaning.role.startswith(("mixture.", "expert_size", "shared_"))

    def _add(self, name: str, meaning: Field, reason: str) -> None:
        self.fields[name] = with_default(meaning, name, self.config, self.known)
        role, value = meaning.role.split()[0], self.config.get(name)
        if role in self.facts and isinstance(value, int):
            number, where = self.facts[role]
            if role in _CERTAIN and number != value:
                raise CheckpointError(
                    "config.json and the tensors do not match: "
                    f"config.json says {name} {shown(value)}, but {where} is {number}",
                    "Use the config.json that was saved with the tensors.",
                )
            reason = f"{number} is {where}" if number == value else reason
        self.why[f"fields.{name}"] = reason


def _facts(names: Names, leaves: Mapping[str, Leaf]) -> dict[str, tuple[int, str]]:
    """Return the sizes that tensor names and shapes show: "layers", "vocab", "hidden" and "intermediate".

    Each size comes with a phrase that says where it was found.
    """
    facts = {"layers": (names.layers, "the number of layers in the tensor names")}
    plain = {leaf.names[0]: template for template, leaf in leaves.items() if leaf.layout == IDENTITY}
    table = plain.get("embedding.weight")
    if table is not None and len(names.shape(table)) == 2:
        rows, columns = names.shape(table)
        facts |= {
            "vocab": (rows, f"the number of rows of {table}"),
            "hidden": (columns, f"the number of columns of {table}"),
        }
    down = plain.get("blocks.{layer}.feed_forward.down_proj.weight")
    if down is not None and len(names.shape(down)) == 2:
        facts["intermediate"] = (names.shape(down)[1], f"the number of columns of {down}")
    return facts


def with_default(meaning: Field, name: str, config: Mapping[str, Any], known: Known | None) -> Field:
    """Give the meaning of a config field the default value that the field has in transformers' config class.

    If there is no such class, a number gets no default, so that configs without the field are refused.
    """
    kind, inner = type(meaning.default), name.partition(".")[2]
    if known is None or inner:
        if kind in (int, float) and meaning.read is None and name in config:
            return meaning._replace(default=None, read=_READS[kind])  # a config without this field is refused
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


def _is_harmless(harmless: Sequence[Any], value: Any) -> bool:
    return any(type(option) is type(value) and option == value for option in harmless)


def _class_name(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else "UnknownForCausalLM"


# --- the other arguments ---------------------------------------------------------------------------------------------


def arguments_of(
    config: Mapping[str, Any],
    names: Names,
    leaves: Mapping[str, Leaf],
    fields: Mapping[str, Field],
    known: Known | None,
    skeleton: Donor,
    words: KnownNames,
    why: dict[str, str],
) -> dict[str, Any]:
    """Guess the arguments of `DecoderFamily` other than its config fields. Return them by name.

    Args:
        config: The checkpoint's config.json.
        names: The checkpoint's tensor names and shapes.
        leaves: Which parameters the tensors store, by tensor name.
        fields: The meanings of the config fields, which `fields_of` returned.
        known: transformers' classes for the model type, if there are any.
        skeleton: The nearest supported family.
        words: The tensor names and config fields of the supported families.
        why: The reasons for the arguments are added to this dictionary.
    """
    shared, donor = shared_names(leaves), skeleton.decoder
    templates = {name: template for template, leaf in leaves.items() for name in leaf.names}
    arguments: dict[str, Any] = {}
    for name in ("mixer", "rotary", "table", "layers", "recurrent", "mixtures", "written", "whole_heads", "square"):
        arguments[name] = getattr(donor, name)
        why[f"arguments.{name}"] = f"as {skeleton.family.name} has it"
    arguments |= _norm_arguments(templates, fields, donor, words, why)
    gated = any(name.endswith("gate_proj.weight") and "feed_forward" in name for name in shared)
    arguments["inner"] = GatedFeedForward if gated else FeedForward
    why["arguments.inner"] = "there is a gate_proj" if gated else "there is no gate_proj"
    arguments["head_norms"] = _head_norms(names, templates, _value(config, known, fields, "heads"), why)
    arguments["learned"] = "positions.weight" in shared
    arguments["embedding_norm"] = "embedding.norm.weight" in shared
    rotary = arguments["rotary"]
    has_rope = any(config.get(name) is not None for name in ("rope_theta", "rope_scaling", "rope_parameters"))
    elsewhere = (donor.layers is not None and not has_rope) or "attention.position" in donor.fixed
    if rotary is None and not arguments["learned"] and not elsewhere:
        rotary = USUAL_ROTARY
    arguments["rotary"] = rotary if rotary is None else rotary_of(rotary, config, known, words)
    if not any("expert" in name for name in shared):
        arguments["mixtures"] = None
    roles = {role for meaning in fields.values() for role in meaning.role.split()}
    fixed = {role: value for role, value in donor.fixed.items() if role not in roles and has(arguments, role)}
    why |= {f"fixed.{role}": f"as {skeleton.family.name} has it" for role in fixed}
    if "final_norm.weight" not in shared and fixed.get("norm.gain") != "none":
        fixed["final_norm"] = False
    if "tied" not in roles and "tied" not in fixed:
        fixed["tied"] = not any(
            leaf.names == ("head.weight",) and template in names.shapes for template, leaf in leaves.items()
        )
        why["fixed.tied"] = "no field says so, and " + (
            "the head has no tensor" if fixed["tied"] else "the head has one"
        )
    arguments["fixed"] = fixed
    return arguments


def _norm_arguments(
    templates: Mapping[str, str],
    fields: Mapping[str, Field],
    donor: DecoderFamily,
    words: KnownNames,
    why: dict[str, str],
) -> dict[str, Any]:
    """Guess the places of the norms in a block, and their kind (LayerNorm or RMSNorm), as arguments of `DecoderFamily`.

    `templates` has for gptkit's parameter names the checkpoint's tensor names, with "{layer}" for the layer number.
    `donor` is the nearest family. Reasons are added to `why`.
    """
    blocks = {name.removeprefix("blocks.{layer}.") for name in templates}
    norms = tuple(place for place in _PLACES if f"{place}.weight" in blocks)
    why["arguments.norms"] = (
        ", ".join(templates[f"blocks.{{layer}}.{norm}.weight"] for norm in norms) or "no norm has a weight"
    )
    biased = [name for name in templates if name.endswith("norm.bias")]
    eps = next((name for name, meaning in fields.items() if meaning.role == "eps"), "")
    layer_norms = [one for one in words.donors if one.decoder.norm is LayerNorm and eps in one.decoder.fields]
    rms_norms = [one for one in words.donors if one.decoder.norm is RMSNorm and eps in one.decoder.fields]
    why["arguments.norm"] = (
        f"{templates[biased[0]]} is there"
        if biased
        else f"{eps} is of such norms in most families, and no norm has a bias"
    )
    return {
        "norms": norms or donor.norms,
        "norm": LayerNorm if biased or len(layer_norms) > len(rms_norms) else RMSNorm,
    }


def _head_norms(names: Names, templates: Mapping[str, str], heads: Any, why: dict[str, str]) -> str:
    """Guess the kind of norms of queries and keys, as an argument of `DecoderFamily`.

    "" means that there are none, "own" a weight of its own for every head, "whole" one norm over all heads together,
    and "same" one weight that all heads share. `heads` is the number of heads.
    """
    query = templates.get("blocks.{layer}.attention.q_norm.weight")
    if query is None:
        return ""
    shape, output = names.shape(query), templates.get("blocks.{layer}.attention.o_proj.weight")
    width = 0 if output is None else names.shape(output)[-1]
    why["arguments.head_norms"] = f"{query} is {shape}, and all heads are {width} wide"
    return "own" if len(shape) == 2 else "whole" if shape[0] == width and heads != 1 else "same"


def _value(config: Mapping[str, Any], known: Known | None, fields: Mapping[str, Field], role: str) -> Any:
    """Return the value of a property, such as "heads", in the config, or else transformers' default.

    `fields` says which config field gives which property.
    """
    name = next((name for name, meaning in fields.items() if role in meaning.role.split()), "")
    return config.get(name, known.defaults.get(name) if known else None)


def has(arguments: Mapping[str, Any], role: str) -> bool:
    """Return whether the components of a draft have the field `role`, such as "attention.window" (kind and field).

    `arguments` are the draft's arguments of `DecoderFamily`, which determine the classes of its components.
    """
    part, _, name = role.partition(".")
    kinds = {"norm": arguments["norm"], "feed_forward": arguments["inner"], "attention": arguments["mixer"]}
    if part == "mixture":
        return arguments.get("mixtures") is not None
    return part not in kinds or name in kinds[part].__struct_fields__


def rotary_of(kind: RotaryKind, config: Mapping[str, Any], known: Known | None, words: KnownNames) -> RotaryKind:
    """Adapt a family's RoPE arguments (`kind`) to a model type, and return them.

    The base and the rotated share of a head get the defaults of transformers' config class. If the config has a field
    for this share, its name is added.
    """
    stated = {**(known.defaults if known else {}), **config}
    inner = stated.get("rope_parameters") or {}
    usual = (known.defaults.get("rope_parameters") if known else None) or {}
    usual = usual if isinstance(usual, dict) else {}
    base = usual.get("rope_theta", known.defaults.get(kind.theta, kind.base) if known else kind.base)
    names = {donor.decoder.rotary.part for donor in words.donors if donor.decoder.rotary} - {""}
    part = next((name for name in (kind.part, *sorted(names)) if name and (name in stated or name in inner)), "")
    part = part or (PART if isinstance(inner, dict) and PART in inner else "")
    whole = usual.get(PART, known.defaults.get(part, kind.whole) if known else kind.whole) if part else 1.0
    numbers: dict[str, Any] = {
        name: float(value) for name, value in (("base", base), ("whole", whole)) if type(value) in (int, float)
    }
    return kind._replace(part=part, **numbers)
