"""What the fields of a config.json say, and the other arguments of a family, as the nearest family and all others have
them. No torch, no weights.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ..architectures import Leaf
from ..architectures.base import TOKEN_IDS
from ..architectures.config import COMMON_IRRELEVANT, COMMON_REFUSED, ConfigReader
from ..architectures.fields import Field
from ..architectures.layout import IDENTITY
from ..architectures.rope import PART, USUAL_ROTARY, RotaryKind
from ..components import FeedForward, GatedFeedForward, LayerNorm, RMSNorm
from ..errors import CheckpointError, GptkitError, shown
from .record import Known, shared_names
from .vocabulary import Donor, Names, Vocabulary

_READS: Mapping[type, Any] = {bool: ConfigReader.boolean, int: ConfigReader.integer, float: ConfigReader.number}
_OPTIONAL: Mapping[type, Any] = {int: ConfigReader.optional_integer, float: ConfigReader.optional_number}
_PLACES = tuple(
    f"{mixer}{place}" for mixer in ("attention", "feed_forward") for place in ("_norm", "_output_norm", "_sum_norm")
)
_CERTAIN = ("layers", "hidden", "vocab")  # roles that say what the tensors must be
_SIZES = (*_CERTAIN, "heads", "intermediate", "eps", "activation", "context", "tied")  # without which there is no tree


# --- config fields ---------------------------------------------------------------------------------------------------


def fields_of(
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
    mixed = any("expert" in each for each in shared_names(leaves))
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
            with_default(meaning, name, config, known).value(reader, name)
        except GptkitError:
            return False
        return mixed or not _of_mixture(meaning)

    def add(name: str, meaning: Field, reason: str) -> None:
        fields[name] = with_default(meaning, name, config, known)
        role = meaning.role.split()[0]
        if role in facts and isinstance(config.get(name), int):
            number, where = facts[role]
            if role in _CERTAIN and number != config[name]:
                told = f"config.json says {name} {shown(config[name])}, and {where} are {number}"
                raise CheckpointError(
                    f"config.json and the tensors do not match: {told}",
                    "Use the config.json that was saved with the tensors.",
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


def with_default(meaning: Field, name: str, config: Mapping[str, Any], known: Known | None) -> Field:
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


def arguments_of(
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
    own, shared, theirs = {}, shared_names(leaves), skeleton.decoder
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
    has_rope = any(config.get(name) is not None for name in ("rope_theta", "rope_scaling", "rope_parameters"))
    elsewhere = (theirs.layers is not None and not has_rope) or "attention.position" in theirs.fixed
    if rotary is None and not own["learned"] and not elsewhere:
        rotary = USUAL_ROTARY
    own["rotary"] = rotary if rotary is None else rotary_of(rotary, config, known, words)
    if not any("expert" in each for each in shared):
        own["mixtures"] = None
    said = {role for each in fields.values() for role in each.role.split()}
    fixed = {role: each for role, each in theirs.fixed.items() if role not in said and has(own, role)}
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


def has(arguments: Mapping[str, Any], role: str) -> bool:
    """Whether a component that the arguments name has the field of a dotted role."""
    part, _, name = role.partition(".")
    kinds = {"norm": arguments["norm"], "feed_forward": arguments["inner"], "attention": arguments["mixer"]}
    if part == "mixture":
        return arguments.get("mixtures") is not None
    return part not in kinds or name in kinds[part].__struct_fields__


def rotary_of(kind: RotaryKind, config: Mapping[str, Any], known: Known | None, words: Vocabulary) -> RotaryKind:
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
