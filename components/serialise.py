"""Trees as plain JSON values, and back. No torch.

A field is written only if it does not have its default value. So equal trees have the same text, and a gptkit that does
not know a new field can read every file that does not use it. A block is written by the names of its parts, such as
"attention_norm" and "attention", in the order of its sub-layers.
"""

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from ..errors import ConfigError, meant, shown
from .base import KINDS, Component, Mixer
from .block import SubLayer
from .model import ModelSpec

__all__ = ["SCHEMA_VERSION", "from_json", "to_json"]

SCHEMA_VERSION = 1


def to_json(spec: ModelSpec) -> Any:
    """Return the tree as plain JSON values, with the schema's version."""
    plain = _plain(spec)
    _with_parts(plain, spec)
    return {"schema_version": SCHEMA_VERSION, **plain}


def _with_parts(plain: dict[str, Any], spec: Any) -> None:
    """Write the blocks of a tree, and those of its encoder, by the names of their parts."""
    if plain.get("encoder") is not None:
        _with_parts(plain["encoder"], spec.encoder)
    for block, node in zip(plain.get("blocks", ()), getattr(spec, "blocks", ()), strict=True):
        for fields, sublayer in zip(block.pop("sublayers"), node.sublayers, strict=True):
            slot = sublayer.mixer.slot
            del fields["type"]
            block |= {slot if name == "mixer" else f"{slot}_{name}": value for name, value in fields.items()}


def _plain(value: Any) -> Any:
    """Return a component as plain values. msgspec omits a field only if its value is the same object as the default."""
    if isinstance(value, Component):
        plain = value.defaults()
        fields = {name: getattr(value, name) for name in value.__struct_fields__}
        said = {name: _plain(each) for name, each in fields.items() if name not in plain or each != plain[name]}
        return {"type": type(value).__name__, **said}
    return [_plain(each) for each in value] if isinstance(value, tuple) else value


def from_json(data: Any) -> ModelSpec:
    """Return the tree for plain JSON values of this or an earlier schema version.

    Raises:
        ConfigError: the schema version is newer; a component or a field is missing, unknown, or of the wrong type or
            range.
    """
    version = data.get("schema_version") if isinstance(data, dict) else None
    if version not in range(1, SCHEMA_VERSION + 1) or isinstance(version, bool):
        raise ConfigError(
            f"schema_version is {shown(version, 40)}, but this gptkit reads only 1 to {SCHEMA_VERSION}",
            "Update gptkit, or convert the original again.",
        )
    plain = _gathered({name: value for name, value in data.items() if name != "schema_version"})
    if isinstance(plain.get("encoder"), dict):
        plain["encoder"] = _gathered(plain["encoder"])
    try:
        found: ModelSpec = _component(ModelSpec, plain)
    except RecursionError:
        raise ConfigError("the model spec is nested too deeply") from None
    except msgspec.ValidationError as error:
        newer = "Update gptkit: a newer one may have the field." if "unknown field" in str(error) else None
        raise ConfigError(f"not a valid model spec: {error}", newer) from error
    if found.embedding.shared:
        raise ConfigError(
            "the embedding of a model cannot have shared: true, which is only for the embedding of an encoder"
        )
    return found


class _Explained(msgspec.ValidationError):
    """An error message that names the wrong component and lists the known ones."""


def explained(error: msgspec.ValidationError, kind: type[msgspec.Struct]) -> str:
    """Return msgspec's message for a value that is not a `kind`. For an unknown field or word, add the nearest known
    one, or all.
    """
    from msgspec import inspect

    told = str(error)
    match = re.match(r"(?:Object contains unknown field `(.*?)`|Invalid enum value '(.*?)')(?: - at `\$(.*?)`)?$", told)
    if match is None:
        return told
    unknown, word, path = match.groups()
    nodes: list[Any] = [inspect.type_info(kind)]
    for name in re.findall(r"\.(\w+)", path or ""):
        fields = [each for node in nodes for each in getattr(node, "fields", ()) if each.encode_name == name]
        parts = [part for each in fields for part in getattr(each.type, "types", [each.type])]
        nodes = [getattr(part, "item_type", part) for part in parts]
    if word is None:
        known = [each.encode_name for node in nodes for each in getattr(node, "fields", ())]
    else:
        known = [str(value) for node in nodes for value in getattr(node, "values", ())]
    return f"{told}; {nearest(unknown if word is None else word, known)}" if known else told


def nearest(name: str, known: Sequence[str]) -> str:
    """Return a question for the name that was probably meant, or the list of known names."""
    near = meant(name, known)
    return f"did you mean {near}?" if near else f"known: {', '.join(known)}"


def _gathered(plain: dict[str, Any]) -> dict[str, Any]:
    """Return the plain values of a tree with the parts of blocks grouped by sub-layer."""
    blocks = plain.get("blocks")
    if not isinstance(blocks, list):
        return plain
    return {**plain, "blocks": [_with_sublayers(block) if isinstance(block, dict) else block for block in blocks]}


def _component(kind: type[Any], value: Any) -> Any:
    """Return the component for plain values where msgspec expects a `kind`, since msgspec does not support open
    unions.
    """
    if not isinstance(value, dict):
        raise msgspec.ValidationError(f"a component (an object with a type) was expected, not {shown(value, 40)}")
    name = value.get("type", kind.__name__)
    if not isinstance(name, str) or name not in KINDS:
        named = (
            f"this version of gptkit has no component {shown(name, 40)}, but a newer version or a plugin may have it"
        )
        likely = [each for each, known in KINDS.items() if issubclass(known, kind)]
        raise _Explained(f"{named}; {nearest(str(name), likely)}")
    try:
        found = msgspec.convert(value, KINDS[name], dec_hook=_component)
    except _Explained:  # it describes an inner component
        raise
    except msgspec.ValidationError as error:
        raise _Explained(f"{name}: {explained(error, KINDS[name])}") from error
    if not isinstance(found, kind):
        raise msgspec.ValidationError(f"a {kind.__name__} was expected, not {name}")
    return found


def _with_sublayers(block: dict[str, Any]) -> dict[str, Any]:
    """Return a block with its parts grouped by sub-layer. Parts that belong to none stay, and are refused as unknown
    fields.
    """
    rest, sublayers = dict(block), []
    for slot, mixer in block.items():
        kind = KINDS.get(str(mixer.get("type"))) if isinstance(mixer, dict) else None
        if kind is not None and issubclass(kind, Mixer) and kind.slot == slot:
            names = {name: name.removeprefix(f"{slot}_") for name in rest if name.startswith(f"{slot}_")}
            parts = {short: rest.pop(name) for name, short in names.items() if short in _PARTS}
            sublayers.append({"type": "SubLayer", "mixer": rest.pop(slot), **parts})
    return {**rest, "sublayers": sublayers}


_PARTS = set(SubLayer.__struct_fields__) - {"mixer"}
