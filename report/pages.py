"""HTML pages of text, tables and figures. A page is one file, and opens offline.

A page requests nothing from a server: it contains plotly's script, and a content security policy forbids requests and
scripts other than the page's own two. `Page` and its blocks have the content, and page.html, page.css and page.js
define how it looks. The template escapes all text, because gptkit does not control the names of models and prompts.
Colours in a figure are names, such as "var(--cell-high)", which page.css defines for light and for dark mode.
"""

import base64
import hashlib
import html
import json
import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from ..errors import UsageError
from ..version import __version__

PALETTE = 8  # the colours c0 to c7 of page.css; on-c0 to on-c7 are for text on them
COLOURS = {"attention": 0, "feed-forward": 1, "embedding": 2, "head": 3, "positions": 4, "router": 5, "norms": 6}
"""The number of a component's colour in all figures."""


@dataclass(frozen=True)
class Lines:
    """Paragraphs, or if `listed` a bulleted list."""

    kind: ClassVar[str] = "lines"
    lines: tuple[str, ...]
    listed: bool = False


@dataclass(frozen=True)
class Code:
    """A command in an HTML page, which the reader can copy."""

    kind: ClassVar[str] = "code"
    text: str


@dataclass(frozen=True)
class Table:
    """A table in an HTML page."""

    kind: ClassVar[str] = "table"
    caption: str
    columns: tuple[tuple[str, bool], ...]  # the heading, and whether the column contains numbers
    rows: tuple[tuple[str, ...], ...]
    lit: frozenset[int] = frozenset()  # the indices of the rows in bold
    folded: bool = False  # whether the page shows only the caption until the reader opens the table
    bold: str = ""  # the meaning of bold rows, in words


@dataclass(frozen=True)
class Key:
    """An entry of a legend."""

    style: str  # a colour of page.css, such as "zero" or "c3", or for a line "line c3 dash" (solid, dash or dot)
    words: str


@dataclass(frozen=True)
class Figure:
    """A plotly figure, with a summary and a table for people who cannot see it."""

    kind: ClassVar[str] = "figure"
    title: str
    summary: str
    spec: dict[str, Any]  # plotly's data and layout as JSON values
    height: int
    width: int  # the least width in pixels; the figure scrolls on narrower screens
    keys: tuple[Key, ...]  # the legend
    table: Table  # the same figures as a table


@dataclass(frozen=True)
class Section:
    """A heading with blocks below each other, or side by side."""

    title: str
    blocks: tuple[Lines | Code | Table | Figure, ...]
    side_by_side: bool = False


@dataclass(frozen=True)
class Page:
    """The content of an HTML page."""

    title: str
    subtitle: str
    verdict: str = ""  # a line that stands out
    good: bool | None = None  # whether the verdict is good or bad; None if it is neither
    facts: tuple[tuple[str, str], ...] = ()  # (name, value) pairs
    sections: tuple[Section, ...] = ()
    footer: str = f"Made by gptkit {__version__}. This page asks no server for anything."

    def figures(self) -> list[Figure]:
        """Return the figures of all sections."""
        return [block for section in self.sections for block in section.blocks if isinstance(block, Figure)]


def figure(
    title: str,
    summary: str,
    data: Sequence[Any],
    keys: Iterable[Key],
    table: Table,
    layout: Mapping[str, Any],
    width: int = 280,
    font_size: int = 12,
) -> Figure:
    """Return a plotly figure in the page's font and colours.

    `data` are plotly's traces. `layout` has the height, and may have other fields of plotly's layout.
    """
    import plotly.graph_objects as go

    clear, text = "rgba(0,0,0,0)", "var(--text)"
    hover = {"bgcolor": "var(--raised)", "bordercolor": "var(--line)", "font": {"color": text, "size": 13}}
    common: dict[str, Any] = {"template": "none", "paper_bgcolor": clear, "plot_bgcolor": clear}
    common |= {"font": {"color": text, "size": font_size, "family": "system-ui, sans-serif"}}
    common |= {"hoverlabel": {**hover, "align": "left"}}
    common |= {"modebar": {"bgcolor": clear, "color": "var(--quiet)", "activecolor": text}}
    spec: dict[str, Any] = json.loads(go.Figure(list(data), {**common, **layout}).to_json())
    return Figure(title, summary, spec, layout["height"], width, tuple(keys), table)


def safe(text: str) -> str:
    """Escape text for plotly, which interprets some HTML in texts.

    Quotes are not escaped, because plotly does not decode them everywhere.
    """
    return html.escape(plain(text), quote=False)


def ready(path: Path) -> None:
    """Raise UsageError if an HTML page cannot be made, or not written at `path`.

    Commands call this before they start their work.
    """
    require("--html", ("jinja2", "plotly"), "html")
    writable(path, "--html")


def require(option: str, packages: Sequence[str], extra: str) -> None:
    """Raise UsageError if one of the packages that an option needs is not installed.

    The message suggests installing gptkit's optional dependencies `extra`.
    """
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        are = "is" if len(missing) == 1 else "are"
        raise UsageError(
            f"{option} needs {' and '.join(missing)}, which {are} not installed",
            f"Install: pip install {' '.join(missing)}, or pip install 'gptkit[{extra}]'.",
        )


def writable(path: Path, option: str) -> None:
    """Raise UsageError if no file can be written at `path`, the value of an option such as "--html"."""
    try:
        special = path.exists() and not stat.S_ISREG(path.stat().st_mode)
        folder = path.resolve().parent
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error
    if special:
        raise UsageError(
            f"cannot write {path}: it exists, but is not a regular file",
            f"Give a file: {option} page.{option.lstrip('-')}",
        )
    if not os.access(folder, os.W_OK):
        raise UsageError(f"cannot write {path}: {'no permission' if folder.is_dir() else 'no such folder'}")


def plain(text: str) -> str:
    """Return text with escapes for all characters that are not printable.

    These are control characters and changes of the writing direction. No-break spaces stay.
    """
    return "".join(c if c.isprintable() or c == "\u00a0" else c.encode("unicode_escape").decode() for c in text)


def render(page: Page) -> str:
    """Return the page as HTML."""
    import jinja2
    from markupsafe import Markup, escape

    def shown(value: object) -> object:
        return plain(value) if isinstance(value, str) and not isinstance(value, Markup) else value

    def breakable(value: object) -> Markup:
        """Return a text as HTML that may be broken after dots and underscores in names of modules."""
        text = str(escape(shown(value)))
        return Markup(re.sub(r"(?<=\w)(?:(?<!\d)[._]|[._](?!\d))(?=\w)", r"\g<0><wbr>", text))  # noqa: S704 (escaped before)

    def own(name: str) -> str:
        return files(__package__).joinpath(name).read_text(encoding="utf-8")

    scripts: list[str] = []
    if page.figures():
        from plotly.offline import get_plotlyjs

        scripts = [get_plotlyjs(), own("page.js")]
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    strict: dict[str, Any] = {"undefined": jinja2.StrictUndefined, "finalize": shown}
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, **strict)
    environment.filters["breakable"] = breakable
    return environment.from_string(own("page.html")).render(
        page=page,
        style=Markup(own("page.css")),  # noqa: S704 (our own files, and plotly's script)
        scripts=[Markup(script) for script in scripts],  # noqa: S704
        allowed=Markup(" ".join(f"'sha256-{digest}'" for digest in hashes) or "'none'"),  # noqa: S704
    )


def write_page(page: Page, path: Path) -> None:
    """Write the page to the file `path`, completely or not at all. Raise UsageError if that fails."""
    ready(path)
    put(render(page).encode("utf-8", "replace"), path)


def put(content: bytes, path: Path) -> None:
    """Write or replace a file, completely or not at all. Raise UsageError if that fails."""
    target = path.resolve()  # where a link leads, not the link
    part = target.with_name(f".gptkit-{os.getpid()}.part")
    try:
        part.write_bytes(content)
        part.replace(target)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def noted(notes: Sequence[str], title: str = "Notes") -> tuple[Section, ...]:
    """Return a section that lists the notes, or no section if there are no notes."""
    return (Section(title, (Lines(tuple(notes), listed=True),)),) if notes else ()
