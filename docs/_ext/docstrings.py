"""Docstrings as reStructuredText: they are plain text, with code in single backticks and formulas set in."""

from __future__ import annotations

import re
from typing import Any

import msgspec
from sphinx.application import Sphinx
from sphinx.ext.napoleon.docstring import GoogleDocstring

SECTIONS = ("Args:", "Raises:", "Returns:", "Yields:")


def escaped(line: str) -> str:
    """A line of prose: `code` as ``code``, and no other sign that reStructuredText would obey."""
    parts = line.split("`")
    if len(parts) % 2 == 0:  # a lone backtick: code that goes on in the next line is not told from it
        return re.sub(r"([*|`\\])", r"\\\1", line)
    prose = [re.sub(r"([*|\\])", r"\\\1", part) for part in parts]
    prose = [re.sub(r"(\w)_(?=\W|$)", r"\1\\_", part) for part in prose]
    return "".join(
        f"``{part}``" if odd % 2 else text for odd, (part, text) in enumerate(zip(parts, prose, strict=True))
    )


def restructured(lines: list[str]) -> list[str]:
    """The docstring's lines, its set-in blocks as literal text; sections with arguments are napoleon's, but that of
    attributes, which are properties and fields that have entries of their own, becomes a list.
    """
    found: list[str] = []
    section = literal = attributes = False
    for line in lines:
        indented = line.startswith("    ")
        if not line.strip():
            found.append("")
            continue
        if line.strip() == "Attributes:":
            attributes = True
            continue
        attributes = attributes and indented
        if attributes:
            found.append(escaped(line[4:] if line.startswith("     ") else f"- {line[4:]}"))
            continue
        if not indented:
            section, literal = line.strip() in SECTIONS, False
        elif not section and not literal:
            found += ["", ".. code-block:: text", ""]
            literal = True
        found.append(line if literal or line.strip() in SECTIONS else escaped(line))
    return found


def process(app: Sphinx, what: Any, name: str, subject: Any, options: Any, lines: list[str]) -> None:
    """For autodoc. napoleon is asked here, for it would take a property's text up to a colon for its type."""
    kind: Any = "method" if what in ("attribute", "property") else what
    lines[:] = str(GoogleDocstring(restructured(lines), what=kind, name=name, obj=subject)).splitlines()


def signature(app: Sphinx, what: str, name: str, subject: Any, *_: Any) -> tuple[str, None] | None:
    """A component's fields stand in a table, not in a line of ranges and unions."""
    component = isinstance(subject, type) and issubclass(subject, msgspec.Struct)
    return ("", None) if component else None


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect both."""
    app.connect("autodoc-process-docstring", process)
    app.connect("autodoc-process-signature", signature)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
