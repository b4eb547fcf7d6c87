"""Base classes of results: their display in a notebook, and their JSON."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from operator import attrgetter
from typing import Any, ClassVar


class Shown:
    """Base class of results that a notebook shows as the table that the command prints.

    This module may not import `report.notebook`, which draws tables. So the package sets `_repr_html_` when it is
    imported.
    """

    __slots__ = ()

    _repr_html_: ClassVar[Callable[[Any], str]]


class Record:
    """Base class of dataclasses with a JSON form.

    `JSON` lists the names of the JSON values in order, as "name" or "name=attribute". A name with dots creates nested
    objects, and an attribute with dots is looked up in nested records. If `JSON` is empty, all fields are included.
    """

    __slots__ = ()

    JSON: ClassVar[str] = ""

    def as_json(self) -> dict[str, Any]:
        """Return the record as plain JSON values."""
        values: dict[str, Any] = {}
        for entry in self.JSON.split() or [field.name for field in fields(self)]:  # type: ignore[arg-type]
            name, _, path = entry.partition("=")
            *above, last = name.split(".")
            place = values
            for part in above:
                place = place.setdefault(part, {})
            place[last] = plain(attrgetter(path or name)(self))
        return values


def plain(value: Any) -> Any:
    """Convert a value, and all records in it, to plain JSON values."""
    if isinstance(value, Record):
        return value.as_json()
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value
