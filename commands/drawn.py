"""--html, --png and --svg, for every command that has them: looked at before the work, written and told after it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..terminal import say

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..report.pages import Page

__all__ = ["Drawn"]


@dataclass(frozen=True)
class Drawn:
    """The files that a command is to draw; false where there is none.

    Raises:
        UsageError: when it is made, one of them could not be written, or a package is missing.

    """

    html: Path | None
    png: Path | None
    svg: Path | None

    def __post_init__(self) -> None:
        if self:
            from ..report.pictures import ready

            ready(self.html, self.png, self.svg)

    def __bool__(self) -> bool:
        return any(path is not None for path in (self.html, self.png, self.svg))

    def write(self, page: Callable[[], Page], quiet: bool) -> None:
        """Write what was asked for, if anything, and say where: below the output of a command that a person reads."""
        if not self:
            return
        from ..report.pictures import write

        for path in write(page(), self.html, self.png, self.svg):
            say([f"{'page' if path == self.html else 'picture'}: {path}"], quiet)
