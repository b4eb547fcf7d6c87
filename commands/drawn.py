"""--html, --png and --svg, for every command that has them: looked at before the work, written and told after it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import UsageError
from ..terminal import say

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..report.pages import Page

__all__ = ["Drawn"]


@dataclass(frozen=True)
class Drawn:
    """The files that a command is to draw; false where there is none. figure: which one of the page a picture is of.

    Raises:
        UsageError: when it is made, one of them could not be written, a package is missing, or a figure is named and
            no picture.

    """

    html: Path | None
    png: Path | None
    svg: Path | None
    figure: str | None = None

    def __post_init__(self) -> None:
        if self.figure is not None and self.png is None and self.svg is None:
            raise UsageError("--figure names what a picture shows", "Add --svg FILE or --png FILE.")
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

        for path, title in write(page(), self.html, self.png, self.svg, self.figure):
            say([f"picture: {path} ({title})" if title else f"page: {path}"], quiet)
