"""The families gptkit knows, each a file of `families/`; nothing else asks for a family's name."""

import difflib
import functools
import importlib.util
import pkgutil
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

from ..components import ModelSpec
from ..errors import ConfigError, UnknownFamily, shown
from . import families
from .base import Architecture, BoundLeaf, Leaf
from .obstacles import first_of

__all__ = ["ARCHITECTURES", "Architecture", "BoundLeaf", "Leaf", "architecture_of", "expressed", "named", "register"]


class _Families(MutableMapping[str, Architecture]):
    """The families by name or by model type, the oldest first, and then those of plugins.

    Looking up a family imports only the file of that name, if it has one. Everything else imports all files.
    """

    def __init__(self, keys: Callable[[Architecture], tuple[str, ...]]) -> None:
        self._keys = keys
        self._all: dict[str, Architecture] | None = None

    def _load(self) -> dict[str, Architecture]:
        if self._all is None:
            self._all = {key: family for family in _in_order() for key in self._keys(family)}
        return self._all

    def __getitem__(self, key: str) -> Architecture:
        if self._all is None and key in _files():
            family = next((family for family in _in_file(key) if key in self._keys(family)), None)
            if family is not None:
                return family
        return self._load()[key]

    def __setitem__(self, key: str, family: Architecture) -> None:
        self._load()[key] = family

    def __delitem__(self, key: str) -> None:
        del self._load()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._load())

    def __len__(self) -> int:
        return len(self._load())


@functools.cache
def _files() -> frozenset[str]:
    return frozenset(each.name for each in pkgutil.iter_modules(families.__path__))


@functools.cache
def _in_file(name: str) -> tuple[Architecture, ...]:
    """Return the families in the file of this name, and those that it imports."""
    file = importlib.import_module(f"{families.__name__}.{name}")
    return tuple(value for value in vars(file).values() if isinstance(value, Architecture))


def _in_order() -> list[Architecture]:
    found = {family.name: family for name in _files() for family in _in_file(name)}
    return sorted(found.values(), key=lambda family: (family.released, family.name))


ARCHITECTURES = _Families(lambda family: (family.name,))
BY_MODEL_TYPE = _Families(lambda family: family.model_types)


def register(family: Architecture) -> None:
    """Make a family known.

    Raises:
        ConfigError: another has its name, or one of its model types.
    """
    taken = [kind for kind in (family.name, *family.model_types) if kind in {*ARCHITECTURES, *BY_MODEL_TYPE}]
    if taken:
        raise ConfigError(f"a model family with the name or model type {taken[0]} is already registered")
    ARCHITECTURES[family.name] = family
    BY_MODEL_TYPE.update(dict.fromkeys(family.model_types, family))


_NEAR = 0.75  # how alike a model_type must be to a known one to be taken for a typo of it: mamba and llama are at 0.6

_LISTS = ("auto_mappings.py", "configuration_auto.py")
"""transformers' files that name its model types, in releases from 5 on and before."""


def named(name: str) -> Architecture:
    """The family of that name.

    Raises:
        UnknownFamily: with the list of known ones.
    """
    if name not in ARCHITECTURES:
        raise UnknownFamily(
            (f"gptkit does not support the architecture {shown(name)}"),
            f"gptkit families lists all {len(ARCHITECTURES)}.",
        )
    return ARCHITECTURES[name]


def expressed(spec: ModelSpec) -> tuple[str | None, ModelSpec]:
    """The first family that has this tree, and the tree in its arithmetic; None and the tree itself where none has."""
    found, refused = first_of(ARCHITECTURES.values(), spec, clear=("rounding",), nearest=False)
    if found is None or found.found is None:
        return None, spec
    return list(ARCHITECTURES)[len(refused)], found.found


def architecture_of(config: Mapping[str, Any]) -> Architecture:
    """The family of a config.json, told from its `model_type`.

    Raises:
        ConfigError: it names no model_type.
        UnknownFamily: no architecture file knows the model_type.
    """
    kind = config.get("model_type")
    if isinstance(kind, str) and kind in BY_MODEL_TYPE:
        return BY_MODEL_TYPE[kind]
    known = f"gptkit families lists all {len(ARCHITECTURES)}."
    if not isinstance(kind, str):
        raise ConfigError("config.json has no field model_type", known)
    near = difflib.get_close_matches(kind[:60], BY_MODEL_TYPE, 1, _NEAR) if not _in_transformers(kind) else []
    guess = f" (did you mean {near[0]}?)" if near else ""
    raise UnknownFamily(
        (f"gptkit does not support the model_type {shown(kind)} in config.json{guess}"), _way_on(config, known)
    )


def _way_on(config: Mapping[str, Any], known: str) -> str:
    """Say what to do about a model of no known family: a composite may have a language model of one."""
    text = config.get("text_config")
    kind = text.get("model_type") if isinstance(text, dict) else None
    if isinstance(kind, str) and (kind in BY_MODEL_TYPE or any(kind in each.texts for each in ARCHITECTURES.values())):
        return f"its language model is a {shown(kind)}: gptkit extract text MODEL OUT writes that by itself"
    return f"gptkit draft MODEL writes a definition to start from; {known}"


def _in_transformers(kind: str) -> bool:
    """Whether transformers has a model of that type, which then is no typo: looked up in the text of its list of them,
    since to import it takes a second.
    """
    return f'"{kind}"' in transformers_lists(*_LISTS)


@functools.cache
def transformers_lists(*names: str) -> str:
    """The source of these files of transformers' models/auto, as far as it has them; "" where there is none."""
    found = importlib.util.find_spec("transformers")
    if found is None or found.origin is None:
        return ""
    folder = Path(found.origin).parent / "models" / "auto"
    try:
        return "".join((folder / name).read_text("utf-8") for name in names if (folder / name).is_file())
    except (OSError, ValueError):
        return ""
