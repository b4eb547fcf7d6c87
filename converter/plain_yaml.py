"""YAML that others wrote, read as the plain values it states and no more of them than its text has room for."""

from typing import Any

import yaml  # type: ignore[import-untyped]

_MAX_MARKS = 2**6
"""Brackets, anchors and tags in one file: the parser's time grows with their square."""
_MAX_VALUES = 2**16
"""Values of one file, one that several aliases name counted for each of them."""


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """The loader in Python, whose recursion has an end, without merge keys: nested merges copy without a bound."""

    def flatten_mapping(self, node: Any) -> None:
        if any(key.tag == "tag:yaml.org,2002:merge" for key, _ in node.value):
            raise yaml.YAMLError("it has merge keys (<<), which are not read")


def read_yaml(text: str) -> Any:
    """Return the value that YAML text states. Raises ValueError."""
    if sum(map(text.count, "[{&!")) > _MAX_MARKS or text.count("- - ") > _MAX_MARKS:
        raise ValueError("it is nested more deeply than any config")
    try:
        value = yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader
        if _count(value, {}) > _MAX_VALUES:
            raise ValueError("its aliases stand for more values than any config has")
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    except RecursionError as error:
        raise ValueError("it is nested more deeply than any config") from error
    return value


def _count(value: Any, counted: dict[int, int]) -> int:
    """Return how many values a value has once every alias is written out; too many for one that contains itself."""
    if not isinstance(value, dict | list | set | tuple):
        return 1
    if id(value) not in counted:
        counted[id(value)] = _MAX_VALUES + 1  # as long as it is open: an alias in it that names it has no end
        parts = [*value, *value.values()] if isinstance(value, dict) else value
        counted[id(value)] = 1 + sum(_count(part, counted) for part in parts)
    return counted[id(value)]
