"""How values show themselves in a notebook."""

from __future__ import annotations

import importlib

__all__ = ["Shown"]


class Shown:
    """A value that a notebook shows as the table which the command prints.

    What draws it is in `report`, which stands above the values: it is imported by name, once a notebook asks.
    """

    __slots__ = ()

    def _repr_html_(self) -> str:
        found: str = importlib.import_module(".report.notebook", __package__).html(self)
        return found
