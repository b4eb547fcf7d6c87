"""Convert docstrings, which are plain text with code in single backticks and indented formulas, to reStructuredText."""

from __future__ import annotations

import re
from typing import Any

import msgspec
from sphinx.application import Sphinx
from sphinx.ext.napoleon.docstring import GoogleDocstring

SECTIONS = ("Args:", "Raises:", "Returns:", "Yields:")


def escaped(line: str) -> str:
    """Return a line of prose with `code` as ``code``, and with all other markup characters escaped."""
    parts = line.split("`")
    if len(parts) % 2 == 0:  # an unpaired backtick, or code that continues in the next line
        return re.sub(r"([*|`\\])", r"\\\1", line)
    prose = [re.sub(r"([*|\\])", r"\\\1", part) for part in parts]
    prose = [re.sub(r"(\w)_(?=\W|$)", r"\1\\_", part) for part in prose]
    return "".join(
        f"``{part}``" if odd % 2 else text for odd, (part, text) in enumerate(zip(parts, prose, strict=True))
    )


def restructured(lines: list[str]) -> list[str]:
    """Return the lines of a docstring, with indented blocks as literal text.

    Sections with arguments stay as they are, for napoleon. The section "Attributes" becomes a list, because properties
    and fields have entries of their own.
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
    """Handle the event of autodoc. napoleon is called here, because by itself it takes the start of a property's text
    for a type.
    """
    kind: Any = "method" if what in ("attribute", "property") else what
    lines[:] = str(GoogleDocstring(restructured(lines), what=kind, name=name, obj=subject)).splitlines()


def signature(app: Sphinx, what: str, name: str, subject: Any, *_: Any) -> tuple[str, None] | None:
    """Leave out the signature of a component, because its fields are in a table."""
    component = isinstance(subject, type) and issubclass(subject, msgspec.Struct)
    return ("", None) if component else None


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect both functions to their events."""
    app.connect("autodoc-process-docstring", process)
    app.connect("autodoc-process-signature", signature)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
