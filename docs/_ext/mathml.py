"""Formulas as MathML, which browsers draw without scripts, fonts or a server."""

from __future__ import annotations

from typing import Any

from docutils import nodes  # type: ignore[import-untyped]
from latex2mathml.converter import convert
from sphinx.application import Sphinx


def mathml(formula: str, display: str) -> str:
    """Return a formula as MathML.

    Raises:
        ValueError: the converter does not know a command of the formula, and would show it as text.
    """
    found: str = convert(formula, display=display)
    if "\\" in found:
        raise ValueError(f"a command that is unknown in {formula!r}")
    return found


def inline(translator: Any, node: nodes.math) -> None:
    """Write a formula within a line."""
    translator.body.append(mathml(node.astext(), "inline"))
    raise nodes.SkipNode


def block(translator: Any, node: nodes.math_block) -> None:
    """Write a formula on a line of its own. It scrolls if the screen is too narrow."""
    translator.body.append(f'<div class="math-block" tabindex="0">{mathml(node.astext(), "block")}</div>')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    """Use this renderer for the site."""
    app.add_html_math_renderer("mathml", inline_renderers=(inline, None), block_renderers=(block, None))
    app.connect("config-inited", lambda app, config: setattr(config, "html_math_renderer", "mathml"))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
