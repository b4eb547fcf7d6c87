"""A tree as plain JSON values and back.

Fields with their default values are not written. So equal trees have equal JSON, files are short, and an old gptkit can
read files that do not use newer fields. A block is written as its parts, such as "attention_norm" and "attention", in
the order of its sub-layers.
"""

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from ..errors import ConfigError, meant, shown
from .base import KINDS, Component, Mixer
from .model import ModelSpec
from .sublayer import SubLayer

__all__ = ["SCHEMA_VERSION", "from_json", "to_json"]

SCHEMA_VERSION = 1


def to_json(spec: ModelSpec) -> Any:
    """Return the tree as plain JSON values, with the version of the schema."""
    plain = _plain(spec)
    _with_parts(plain, spec)
    return {"schema_version": SCHEMA_VERSION, **plain}


def _with_parts(plain: dict[str, Any], spec: Any) -> None:
    """Replace the list of sub-layers by their named parts, in the JSON of all blocks of a tree and of its encoder.

    `plain` is the JSON of the tree `spec`, and is changed.
    """
    if plain.get("encoder") is not None:
        _with_parts(plain["encoder"], spec.encoder)
    for block, node in zip(plain.get("blocks", ()), getattr(spec, "blocks", ()), strict=True):
        for fields, sublayer in zip(block.pop("sublayers"), node.sublayers, strict=True):
            slot = sublayer.mixer.slot
            del fields["type"]
            block |= {slot if name == "mixer" else f"{slot}_{name}": value for name, value in fields.items()}


def _plain(value: Any) -> Any:
    """Return a component as JSON values, without fields that equal their defaults.

    msgspec itself leaves out only fields whose value is the same object as the default.
    """
    if isinstance(value, Component):
        plain = value.defaults()
        fields = {name: getattr(value, name) for name in value.__struct_fields__}
        changed = {name: _plain(item) for name, item in fields.items() if name not in plain or item != plain[name]}
        return {"type": type(value).__name__, **changed}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def from_json(data: Any) -> ModelSpec:
    """Return the tree from plain JSON values of this schema version or an older one.

    Raises:
        ConfigError: The schema version is newer, or a component or field is missing, unknown, out of range, or of the
            wrong type.
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
        spec: ModelSpec = _component(ModelSpec, plain)
    except RecursionError:
        raise ConfigError("the model spec is nested too deeply") from None
    except msgspec.ValidationError as error:
        newer = "Update gptkit: a newer one may have the field." if "unknown field" in str(error) else None
        raise ConfigError(f"not a valid model spec: {error}", newer) from error
    if spec.embedding.shared:
        raise ConfigError(
            "the embedding of a model cannot have shared: true, which is only for the embedding of an encoder"
        )
    return spec


class _Explained(msgspec.ValidationError):
    """A validation error whose message is already complete, so that `explained` need not add known names to it."""


def explained(error: msgspec.ValidationError, kind: type[msgspec.Struct]) -> str:
    """Return msgspec's error message for an invalid value of `kind`.

    If a field or value is unknown, the message also suggests a similar name, or lists all known names.
    """
    from msgspec import inspect

    message = str(error)
    match = re.match(
        r"(?:Object contains unknown field `(.*?)`|Invalid enum value '(.*?)')(?: - at `\$(.*?)`)?$", message
    )
    if match is None:
        return message
    unknown, word, path = match.groups()
    nodes: list[Any] = [inspect.type_info(kind)]
    for name in re.findall(r"\.(\w+)", path or ""):
        fields = [field for node in nodes for field in getattr(node, "fields", ()) if field.encode_name == name]
        parts = [part for field in fields for part in getattr(field.type, "types", [field.type])]
        nodes = [getattr(part, "item_type", part) for part in parts]
    if word is None:
        known = [field.encode_name for node in nodes for field in getattr(node, "fields", ())]
    else:
        known = [str(value) for node in nodes for value in getattr(node, "values", ())]
    return f"{message}; {nearest(unknown if word is None else word, known)}" if known else message


def nearest(name: str, known: Sequence[str]) -> str:
    """Return "did you mean …?" with a name similar to `name`, or a list of all known names."""
    near = meant(name, known)
    return f"did you mean {near}?" if near else f"known: {', '.join(known)}"


def _gathered(plain: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON of a tree with the parts of every block grouped into sub-layers. This reverses `_with_parts`."""
    blocks = plain.get("blocks")
    if not isinstance(blocks, list):
        return plain
    return {**plain, "blocks": [_with_sublayers(block) if isinstance(block, dict) else block for block in blocks]}


def _component(kind: type[Any], value: Any) -> Any:
    """Decode a component of `kind`, or of a subclass of it, from JSON values.

    This is a hook for msgspec, which has no unions to which plugins may add kinds.
    """
    if not isinstance(value, dict):
        raise msgspec.ValidationError(f"a component (an object with a type) was expected, not {shown(value, 40)}")
    name = value.get("type", kind.__name__)
    if not isinstance(name, str) or name not in KINDS:
        named = (
            f"this version of gptkit has no component {shown(name, 40)}, but a newer version or a plugin may have it"
        )
        likely = [known for known, subclass in KINDS.items() if issubclass(subclass, kind)]
        raise _Explained(f"{named}; {nearest(str(name), likely)}")
    try:
        node = msgspec.convert(value, KINDS[name], dec_hook=_component)
    except _Explained:  # the error of a component inside this one
        raise
    except msgspec.ValidationError as error:
        raise _Explained(f"{name}: {explained(error, KINDS[name])}") from error
    if not isinstance(node, kind):
        raise msgspec.ValidationError(f"a {kind.__name__} was expected, not {name}")
    return node


def _with_sublayers(block: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON of a block with its parts grouped into sub-layers. Fields that are no parts stay as they are."""
    rest, sublayers = dict(block), []
    for slot, mixer in block.items():
        kind = KINDS.get(str(mixer.get("type"))) if isinstance(mixer, dict) else None
        if kind is not None and issubclass(kind, Mixer) and kind.slot == slot:
            names = {name: name.removeprefix(f"{slot}_") for name in rest if name.startswith(f"{slot}_")}
            parts = {short: rest.pop(name) for name, short in names.items() if short in _PARTS}
            sublayers.append({"type": "SubLayer", "mixer": rest.pop(slot), **parts})
    return {**rest, "sublayers": sublayers}


_PARTS = set(SubLayer.__struct_fields__) - {"mixer"}
