"""How values show themselves: in a notebook, and as JSON."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from operator import attrgetter
from typing import Any, ClassVar


class Shown:
    """A value that a notebook shows as the table which the command prints.

    Values stand far below what draws tables (`report.notebook`): the package, which stands above both, hands the
    function down when it is imported, as it is before any of its modules.
    """

    __slots__ = ()

    _repr_html_: ClassVar[Callable[[Any], str]]


class Record:
    """A dataclass that tells its plain JSON values.

    `JSON` names them in order, as "name" or "name=attribute"; dots lead into objects on the left, and into other
    records on the right. Without it there are all of the fields.
    """

    __slots__ = ()

    JSON: ClassVar[str] = ""

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values; figures are whole numbers where nothing else is said."""
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
    """A value as JSON has it."""
    if isinstance(value, Record):
        return value.as_json()
    if isinstance(value, Mapping):
        return {name: plain(each) for name, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value
