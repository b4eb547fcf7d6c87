"""A page: text, tables and figures in one HTML file that opens offline.

The page asks no server for anything: plotly's script lies inside it, and a content security policy forbids requests and
every script but the page's own two. What is on it is data (`Page` and its blocks); page.html, page.css and page.js say
how it looks. Text is escaped by the template, since names of models and prompts are somebody else's.

Colours in a figure are names, "var(--cell-high)", which page.css gives a value for light and for dark.
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

PALETTE = 8  # page.css's colours for kinds of things, c0 to c7, with on-c0 to on-c7 for text on them
COLOURS = {"attention": 0, "feed-forward": 1, "embedding": 2, "head": 3, "positions": 4, "router": 5, "norms": 6}
"""A component has one colour wherever it is drawn."""


@dataclass(frozen=True)
class Lines:
    """Paragraphs, or a list of things of one kind."""

    kind: ClassVar[str] = "lines"
    lines: tuple[str, ...]
    listed: bool = False


@dataclass(frozen=True)
class Code:
    """A command, to be copied."""

    kind: ClassVar[str] = "code"
    text: str


@dataclass(frozen=True)
class Table:
    """Rows below (heading, whether it holds figures); `lit` rows stand out in bold, and `bold` says what that means."""

    kind: ClassVar[str] = "table"
    caption: str
    columns: tuple[tuple[str, bool], ...]
    rows: tuple[tuple[str, ...], ...]
    lit: frozenset[int] = frozenset()
    folded: bool = False
    bold: str = ""


@dataclass(frozen=True)
class Key:
    """What a colour means: `style` is one of page.css's: "zero", "c3"; of a line "line c3 dash" (solid, dash, dot)."""

    style: str
    words: str


@dataclass(frozen=True)
class Figure:
    """A plotly figure, what it shows in a sentence, and the same figures as a table, for those who cannot see it.

    spec: plotly's data and layout as JSON values; width: what it needs at least, in pixels, and scrolls where a screen
    is narrower.
    """

    kind: ClassVar[str] = "figure"
    title: str
    summary: str
    spec: dict[str, Any]
    height: int
    width: int
    keys: tuple[Key, ...]
    table: Table


@dataclass(frozen=True)
class Section:
    """A heading and what is below it, or, `beside` one another, as far as a screen is wide."""

    title: str
    blocks: tuple[Lines | Code | Table | Figure, ...]
    beside: bool = False


@dataclass(frozen=True)
class Page:
    """All of it. verdict: in a line that stands out; good: whether that is good news, None for neither."""

    title: str
    subtitle: str
    verdict: str = ""
    good: bool | None = None
    facts: tuple[tuple[str, str], ...] = ()
    sections: tuple[Section, ...] = ()
    footer: str = f"Made by gptkit {__version__}. This page asks no server for anything."

    def figures(self) -> list[Figure]:
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
    """A figure of plotly's in the page's font and colours; `layout` has its height, and what is special about it."""
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
    """For plotly, which takes some HTML in texts, never in attributes, and knows no escaped quotes in all of them."""
    return html.escape(plain(text), quote=False)


def ready(path: Path) -> None:
    """Raise UsageError where a page could not be made or not be written at `path`: before the work, not after it."""
    require("--html", ("jinja2", "plotly"), "html")
    writable(path, "--html")


def require(option: str, packages: Sequence[str], extra: str) -> None:
    """Raise UsageError where a package is missing that an option needs."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        are = "is" if len(missing) == 1 else "are"
        raise UsageError(
            f"{option} needs {' and '.join(missing)}, which {are} not installed",
            f"Install with pip install {' '.join(missing)}, or gptkit's extra {extra}.",
        )


def writable(path: Path, option: str) -> None:
    """Raise UsageError where no file can be written at `path`, which the option named."""
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
    """Text with control characters, and what turns the direction of writing, as escapes; a hard blank stays."""
    return "".join(c if c.isprintable() or c == "\u00a0" else c.encode("unicode_escape").decode() for c in text)


def render(page: Page) -> str:
    """The page as HTML."""
    import jinja2
    from markupsafe import Markup, escape

    def shown(value: object) -> object:
        return plain(value) if isinstance(value, str) and not isinstance(value, Markup) else value

    def breakable(value: object) -> Markup:
        """Names of modules may be broken behind their dots and underscores, rather than anywhere."""
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
        allowed=Markup(" ".join(f"'sha256-{each}'" for each in hashes) or "'none'"),  # noqa: S704
    )


def write_page(page: Page, path: Path) -> None:
    """Write the page at `path`, all of it or nothing; what is there is replaced. Raises UsageError where that fails."""
    ready(path)
    put(render(page).encode("utf-8", "replace"), path)


def put(content: bytes, path: Path) -> None:
    """Write a file, all of it or nothing; what is there is replaced. Raises UsageError where that fails."""
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
    """A section of sentences, where there are any."""
    return (Section(title, (Lines(tuple(notes), listed=True),)),) if notes else ()
