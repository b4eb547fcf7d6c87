"""How values show themselves in a notebook."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar


class Shown:
    """A value that a notebook shows as the table which the command prints.

    Values stand far below what draws tables (`report.notebook`): the package, which stands above both, hands the
    function down when it is imported, as it is before any of its modules.
    """

    __slots__ = ()

    _repr_html_: ClassVar[Callable[[Any], str]]
