"""What lies in a pickled file: its tensors' places; and of one that is no checkpoint as it is, the way to one."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..architectures.namings import whose
from ..errors import CheckpointError
from .weights import Stored

SHOWN = 3
"""Tensors named, and twice as many other entries."""
DEPTH = 3
OTHERS = {"litgpt": "`litgpt convert_from_litgpt` writes the family's own."}
"""The way on from names that no family has."""


@dataclass(frozen=True, slots=True)
class Unplain:
    """Something in a file that is neither plain data nor a plain tensor."""

    name: str


def not_as_it_is(path: Path, content: Any) -> CheckpointError:
    """The error for a file that holds something else than tensors by name alone, to be raised by the caller."""
    none: tuple[tuple[str, ...], dict[str, Any]] = ((), {})
    where, state = max(_dictionaries(content, ()), key=lambda found: len(_tensors(found[1])), default=none)
    tensors = _tensors(state)
    beside = _entries(content, (*tensors, *where[:1]) if where else tensors)
    if not tensors:
        return CheckpointError(
            f"{path} holds a {_kind(content)}, not a dictionary of tensors{beside and ': ' + beside}"
        )
    some = ", ".join(f"{_shown(name)} {list(each.shape)}" for name, each in list(tensors.items())[:SHOWN])
    keys = "".join(f"[{_shown(key)!r}]" for key in where)
    count = f"{len(tensors)} tensor{'s' if len(tensors) > 1 else ''}"
    told = f"{path} holds {count}{keys and ' in ' + keys}: {some}{', …' if len(tensors) > SHOWN else ''}"
    told += beside and f"; beside them {beside}"
    found = whose(list(tensors))
    if found is None:
        return CheckpointError(told, "Their names are those of no family that gptkit knows.")
    owner, prefix = found
    only = len(tensors) < len(state)
    return CheckpointError(f"{told}; {_names_of(owner, prefix)}", OTHERS.get(owner) or _way_on(keys, prefix, only))


def renamed(names: Sequence[str]) -> str | None:
    """Whose names these are and the way on, of tensors that have no place in a model; None where nobody's."""
    found = whose(names)
    if found is None:
        return None
    owner, prefix = found
    behind = f" Save the tensors without {prefix!r} before their names." if prefix else ""
    return f"T{_names_of(owner, prefix)[1:]}.{f' {OTHERS[owner]}' if owner in OTHERS else behind}"


def _names_of(owner: str, prefix: str) -> str:
    return f"the names are those of {owner}" + (f", behind {prefix!r}" if prefix else "")


def _way_on(keys: str, prefix: str, only: bool) -> str:
    """How a file is made that holds the tensors alone, under the family's names."""
    state = f"torch.load(FILE){keys}"
    if prefix or only:
        name = f"k.removeprefix({prefix!r})" if prefix else "k"
        state = f"{{{name}: v for k, v in {state}.items(){' if torch.is_tensor(v)' if only else ''}}}"
    if state == "torch.load(FILE)":
        return "Put the model's config.json beside it, and name the folder."
    return f"Save them alone, beside the model's config.json: torch.save({state}, 'pytorch_model.bin')"


def _dictionaries(value: Any, where: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], dict[Any, Any]]]:
    """A dictionary and those within it, with the keys that lead to each."""
    if not isinstance(value, dict) or len(where) > DEPTH:
        return
    yield where, value
    for key, each in value.items():
        if isinstance(key, str):
            yield from _dictionaries(each, (*where, key))


def _tensors(state: Mapping[Any, Any]) -> dict[str, Stored]:
    return {key: each for key, each in state.items() if isinstance(key, str) and isinstance(each, Stored)}


def _entries(content: Any, without: Collection[str]) -> str:
    """A dictionary's keys but for some, with what stands there."""
    if not isinstance(content, Mapping):
        return ""
    kinds = [(key, each) for key, each in content.items() if key not in without]
    told = [
        f"{_shown(key.name if isinstance(key, Unplain) else str(key))} ({_kind(each)})"
        for key, each in kinds[: 2 * SHOWN]
    ]
    return ", ".join(told + (["…"] if len(kinds) > 2 * SHOWN else []))


def _kind(value: Any) -> str:
    if isinstance(value, Stored):
        return f"Tensor of {list(value.shape)}"
    if isinstance(value, Unplain):
        return _shown(value.name)
    if isinstance(value, dict | list):
        return f"{type(value).__name__} of {len(value)}"
    return "None" if value is None else type(value).__name__


def _shown(text: str) -> str:
    """Somebody else's text on a terminal: its control characters are escaped, and it is short."""
    short = text if len(text) <= 60 else text[:59] + "…"
    return short if short.isprintable() else ascii(short)[1:-1]
