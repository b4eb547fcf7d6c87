"""Find the field of config.json that contradicts the tensors, and the value with which all tensors fit."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ...analysis.named import LAYER
from ...architectures import architecture_of
from ...architectures.config import COMMON_IRRELEVANT
from ...converter.matching import Match, match
from ...errors import CannotExpress, GptkitError, InvalidInput, shown
from .subject import Subject

LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
"""The fields for the number of layers."""
ABSENT = object()
"""The value of a field that a config does not have."""
_MOST = 40
"""The number of fields that are tried one by one. With more differences the two are not one model with a few changes.
"""
_REPEATED = re.compile("layer|expert|block|depth")
"""The names of fields that count components: a tree with as many components as a vocabulary has rows takes minutes."""
_SEARCHED = 5000  # the number of tensors up to which all divisors of a number of heads are tried
_INCOMPLETE = frozenset({"broken-file", "broken-index", "dangling-index"})
"""The rules that report tensors which the audit cannot see."""


@dataclass(frozen=True)
class FittingField:
    """A field of config.json that contradicts the tensors."""

    path: str  # the field, as a dotted path
    value: int  # its value in config.json
    fits: int  # the value with which all tensors fit


def fitting_fields(subject: Subject) -> list[FittingField]:
    """Return the fields of config.json of which one other value makes all shapes agree.

    Two fields that would each do so are alternatives. No field is returned if no single change suffices.
    """
    config, pairs = subject.files.config, subject.match
    if config is None or not _plain(subject) or (pairs is None and not isinstance(subject.spec, GptkitError)):
        return []
    if any(finding.rule in _INCOMPLETE for finding in subject.findings):
        return []
    old = pairs if isinstance(pairs, Match) else None
    if old is not None and not (old.shaped or old.missing or old.extra):
        return []
    fields = []
    for path, value in _integers(config):
        for other in sorted(_candidates(subject, old, path, value)):
            new = _matched(subject, with_field(config, path, other))
            if new is not None and _better(old, new):
                fields.append(FittingField(path, value, other))
    return fields


def restored_field(subject: Subject) -> tuple[str, Any] | None:
    """Return the field of config.json with which all tensors fit if it has the source's value, and that value.

    Return None if the tensors fit already, if no field does this, or if several fields would. The value is `ABSENT` if
    the source does not have the field.
    """
    config = subject.files.config
    if config is None or subject.source is None or not _plain(subject) or _fits(subject.match):
        return None
    fields = changed_fields(subject.source.config, config).items()
    changed = {path: old for path, (old, _) in fields if not _is_irrelevant(path)}
    edited = ((path, _matched(subject, with_field(config, path, old))) for path, old in changed.items())
    paths = [path for path, pairs in edited if _fits(pairs)]
    return (paths[0], changed[paths[0]]) if len(paths) == 1 else None


def changed_fields(old: Mapping[str, Any] | None, new: Mapping[str, Any] | None) -> dict[str, tuple[Any, Any]]:
    """Return the fields that differ between two config.json files, by dotted path: (old value, new value).

    Return nothing if the files have different values of model_type, or more than `_MOST` fields differ.
    """
    if old is None or new is None or old.get("model_type") != new.get("model_type"):
        return {}
    changed = dict(_flat_changes(old, new))
    return changed if len(changed) <= _MOST else {}


def with_field(config: Mapping[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Return a config with another value of the field at a dotted path. The value `ABSENT` removes the field."""
    edited = dict(config)
    inside, parts = edited, _parts(edited, path)
    for key in parts[:-1]:
        inside[key] = dict(inside[key])
        inside = inside[key]
    if value is ABSENT:
        inside.pop(parts[-1], None)
    else:
        inside[parts[-1]] = value
    return edited


def value_at(config: Mapping[str, Any] | None, path: str) -> Any:
    """Return the value of the field at a dotted path, or `ABSENT`."""
    inside: Any = config or {}
    for key in _parts(inside, path):
        inside = inside.get(key, ABSENT)
    return inside


def value_words(value: Any) -> str:
    """Return a field's value in words."""
    return "absent" if value is ABSENT else shown(value, 60)


def _flat_changes(
    old: Mapping[str, Any], new: Mapping[str, Any], place: str = "", depth: int = 4
) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Yield the dotted path of each field that differs, also in nested objects, with its old and new value.

    Args:
        old: the old object of the JSON file.
        new: the new object at the same place.
        place: the path of these objects in the file, with a dot at the end; "" for the whole file.
        depth: compare objects field by field down to this level, and deeper ones as a whole.
    """
    for key in dict.fromkeys((*old, *new)):
        x, y = old.get(key, ABSENT), new.get(key, ABSENT)
        if isinstance(x, dict) and isinstance(y, dict) and depth and key:
            yield from _flat_changes(x, y, f"{place}{key}.", depth - 1)
        elif x is not y and (x != y or type(x) is not type(y)):
            yield f"{place}{key}", (x, y)


def _parts(config: Mapping[str, Any], path: str) -> list[str]:
    """Split a dotted path into the keys of `config` that it consists of. A key may contain dots itself."""
    for key, value in config.items():
        if isinstance(value, dict) and path.startswith(f"{key}."):
            return [key, *_parts(value, path.removeprefix(f"{key}."))]
    return [path]


def _integers(config: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, int]]:
    """Yield the dotted path and the value of all positive integers in a config, apart from token ids."""
    for key, value in config.items():
        if isinstance(value, dict) and not place:
            yield from _integers(value, f"{key}.")
        elif type(value) is int and value > 0 and not _is_irrelevant(key):
            yield f"{place}{key}", value


def _is_irrelevant(path: str) -> bool:
    """Return whether a field changes no shape in any family."""
    key = path.rpartition(".")[2]
    return key in COMMON_IRRELEVANT or key.endswith("_token_id")


def _candidates(subject: Subject, old: Match | None, path: str, value: int) -> set[int]:
    """Return the values of a field that may fit: those of which a wrong size may be a multiple, divisors of a number
    of heads, and the number of layers in the files.

    `old` is how the tensors fit config.json as it is. Without it, gptkit refuses this config.
    """
    key, candidates = path.rpartition(".")[2], set[int]()
    if key in LAYERS:
        names = subject.files.tensors if old is None else (*old.matched.values(), *old.extra)
        count = 1 + max((int(index["index"]) for name in names if (index := LAYER.fullmatch(name))), default=-1)
        source = None if subject.source is None else subject.source.config
        is_lost = count < value and value_at(source, path) == value  # tensors were lost, and the config is right
        return set() if is_lost or not 0 < count <= len(subject.files.tensors) else {count} - {value}
    attention = old is None
    misshapen = () if old is None else [(old.declared[name], old.matched[name]) for name in old.shaped]
    for leaf, name in misshapen:
        shape = subject.files.tensors[name].shape
        attention = attention or any(".attention." in shared for shared in leaf.shared)
        for expected, actual in zip(leaf.shape, shape, strict=False):
            if value <= expected != actual and expected % value == 0 and actual % (expected // value) == 0:
                candidates.add(actual // (expected // value))
            elif 0 < expected - value <= 2:  # position tables with rows before the first position (OPT)
                candidates.add(actual - (expected - value))
    if attention and "head" in key and len(subject.files.tensors) <= _SEARCHED:
        heads = [number for name, number in _integers(subject.files.config or {}) if "head" in name and number <= 1024]
        candidates |= {divisor for number in heads for divisor in range(1, number + 1) if number % divisor == 0}
    most = max(len(subject.files.tensors), 1024) if _REPEATED.search(key) else 2**31
    return {number for number in candidates if 0 < number <= most} - {value}


def _plain(subject: Subject) -> bool:
    """Return whether config.json describes the tensors as they are stored."""
    files = subject.files
    return files.opened is None and files.format != "gguf" and not files.resolved.is_own and not subject.quantised


def _matched(subject: Subject, config: Mapping[str, Any]) -> Match | None:
    """Return how the tensors fit the model of another config. Return None if gptkit refuses this config."""
    weights = subject.files.raw
    try:
        family = architecture_of(config)
        spec = family.spec(config)
        if len(spec.blocks) > len(weights.info):
            return None
        spec = family.in_files(spec, weights.info)
        return match(spec, family.bind_files(spec, weights.info), weights, family, family)
    except (CannotExpress, InvalidInput):
        return None


def _fits(pairs: object) -> bool:
    """Return whether the tensors are exactly those of the model."""
    return isinstance(pairs, Match) and pairs.sound and not pairs.missing and not pairs.extra


def _better(old: Match | None, new: Match) -> bool:
    """Return whether a change of config.json makes all shapes agree, and no other tensor missing or superfluous."""
    if old is None:
        return _fits(new)
    if new.shaped or not {*new.missing} <= {*old.missing} or not {*new.extra} <= {*old.extra}:
        return False
    return bool(old.shaped) or len(new.missing) + len(new.extra) < len(old.missing) + len(old.extra)
