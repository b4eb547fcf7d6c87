"""Read untrusted YAML as dictionaries, lists and scalars, with limits on nesting and aliases."""

from typing import Any

import yaml  # type: ignore[import-untyped]

_MAX_MARKS = 2**6
"""The maximum number of brackets, anchors and tags in a file. The parser's time grows with its square."""
_MAX_VALUES = 2**16
"""The maximum number of values in a file. The values of an anchor are counted again for each of its aliases."""


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """PyYAML's safe loader, which refuses merge keys (<<), because they can multiply values without limit.

    It is the loader written in Python, not the one in C, because Python limits the depth of recursion.
    """

    def flatten_mapping(self, node: Any) -> None:
        if any(key.tag == "tag:yaml.org,2002:merge" for key, _ in node.value):
            raise yaml.YAMLError("it has merge keys (<<), which gptkit does not read")


def read_yaml(text: str) -> Any:
    """Return the value that a YAML text describes. Raises ValueError."""
    if sum(map(text.count, "[{&!")) > _MAX_MARKS or text.count("- - ") > _MAX_MARKS:
        raise ValueError("it is nested more deeply than any config")
    try:
        value = yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader
        if _count(value, {}) > _MAX_VALUES:
            raise ValueError("its aliases give more values than any config has")
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    except RecursionError as error:
        raise ValueError("it is nested more deeply than any config") from error
    return value


def _count(value: Any, counted: dict[int, int]) -> int:
    """Count the values in a value. Aliases are counted as if they were written out.

    A value that contains itself counts as more than `_MAX_VALUES`. `counted` has the counts of values by their id.
    """
    if not isinstance(value, dict | list | set | tuple):
        return 1
    if id(value) not in counted:
        counted[id(value)] = _MAX_VALUES + 1  # as long as it is open: an alias in it that names it has no end
        parts = [*value, *value.values()] if isinstance(value, dict) else value
        counted[id(value)] = 1 + sum(_count(part, counted) for part in parts)
    return counted[id(value)]
