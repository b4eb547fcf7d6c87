"""The model families that gptkit supports. Every family has a file in `families/`. No other code compares a family's
name.
"""

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
    """A mapping from names or model types to families, in the order of the families' release.

    Plugins' families come last.

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
    return frozenset(module.name for module in pkgutil.iter_modules(families.__path__))


@functools.cache
def _in_file(name: str) -> tuple[Architecture, ...]:
    """Return the families that the file `families/NAME.py` defines or imports."""
    file = importlib.import_module(f"{families.__name__}.{name}")
    return tuple(value for value in vars(file).values() if isinstance(value, Architecture))


def _in_order() -> list[Architecture]:
    by_name = {family.name: family for name in _files() for family in _in_file(name)}
    return sorted(by_name.values(), key=lambda family: (family.released, family.name))


ARCHITECTURES = _Families(lambda family: (family.name,))
BY_MODEL_TYPE = _Families(lambda family: family.model_types)


def register(family: Architecture) -> None:
    """Register the family of a plugin.

    Raises:
        ConfigError: another family has its name, or one of its model types.
    """
    existing = [kind for kind in (family.name, *family.model_types) if kind in {*ARCHITECTURES, *BY_MODEL_TYPE}]
    if existing:
        raise ConfigError(f"a model family with the name or model type {existing[0]} is already registered")
    ARCHITECTURES[family.name] = family
    BY_MODEL_TYPE.update(dict.fromkeys(family.model_types, family))


_NEAR = 0.75  # the similarity to a known model_type above which gptkit assumes a typo. mamba and llama have 0.6.

_LISTS = ("auto_mappings.py", "configuration_auto.py")
"""The files in which transformers lists its model types: the first since transformers 5, the second in older
releases."""


def named(name: str) -> Architecture:
    """Return the family with this name. Raises UnknownFamily."""
    if name not in ARCHITECTURES:
        raise UnknownFamily(
            (f"gptkit does not support the architecture {shown(name)}"),
            f"gptkit families lists all {len(ARCHITECTURES)}.",
        )
    return ARCHITECTURES[name]


def expressed(spec: ModelSpec) -> tuple[str | None, ModelSpec]:
    """Return the name of the first family that can express a model, and the ModelSpec that this family reads back.

    The latter may round intermediate results in other places than `spec`. If no family can express the model, the
    result is None and `spec`.
    """
    expression, refused = first_of(ARCHITECTURES.values(), spec, clear=("rounding",), nearest=False)
    if expression is None or expression.tree is None:
        return None, spec
    return list(ARCHITECTURES)[len(refused)], expression.tree


def architecture_of(config: Mapping[str, Any]) -> Architecture:
    """Return the family of a config.json, which its `model_type` names.

    Raises:
        ConfigError: the config has no model_type.
        UnknownFamily: no family has this model_type.
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
        (f"gptkit does not support the model_type {shown(kind)} in config.json{guess}"), _hint(config, known)
    )


def _hint(config: Mapping[str, Any], known: str) -> str:
    """Return what a user can do about an unknown family.

    If gptkit knows the language model of a composite model, the user can extract it, and otherwise draft a definition.

    Args:
        config: the config.json of the unknown family.
        known: the sentence that says how to list the known families.
    """
    text = config.get("text_config")
    kind = text.get("model_type") if isinstance(text, dict) else None
    if isinstance(kind, str) and (
        kind in BY_MODEL_TYPE or any(kind in family.texts for family in ARCHITECTURES.values())
    ):
        return f"its language model is a {shown(kind)}: gptkit extract text MODEL OUT writes that by itself"
    return f"gptkit draft MODEL writes a definition to start from; {known}"


def _in_transformers(kind: str) -> bool:
    """Return whether transformers has this model_type. If it does, the model_type is not a typo.

    gptkit searches the text of transformers' list, since importing transformers takes a second.
    """
    return f'"{kind}"' in transformers_lists(*_LISTS)


@functools.cache
def transformers_lists(*names: str) -> str:
    """Return the source code of these files in transformers' models/auto, joined into one text.

    Files that do not exist are left out.
    """
    package = importlib.util.find_spec("transformers")
    if package is None or package.origin is None:
        return ""
    folder = Path(package.origin).parent / "models" / "auto"
    try:
        return "".join((folder / name).read_text("utf-8") for name in names if (folder / name).is_file())
    except (OSError, ValueError):
        return ""
