"""Formulas as MathML, which browsers draw by themselves: no script, no font, no server."""

from __future__ import annotations

from typing import Any

from docutils import nodes  # type: ignore[import-untyped]
from latex2mathml.converter import convert
from sphinx.application import Sphinx


def mathml(formula: str, display: str) -> str:
    """A formula drawn.

    Raises:
        ValueError: it has a command that the converter does not know and would show as it is written.

    """
    found: str = convert(formula, display=display)
    if "\\" in found:
        raise ValueError(f"a command that is unknown in {formula!r}")
    return found


def inline(translator: Any, node: nodes.math) -> None:
    """A formula in a line."""
    translator.body.append(mathml(node.astext(), "inline"))
    raise nodes.SkipNode


def block(translator: Any, node: nodes.math_block) -> None:
    """A formula on a line of its own, which scrolls where a phone is too narrow for it."""
    translator.body.append(f'<div class="math-block" tabindex="0">{mathml(node.astext(), "block")}</div>')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    """Make it the renderer of this site."""
    app.add_html_math_renderer("mathml", inline_renderers=(inline, None), block_renderers=(block, None))
    app.connect("config-inited", lambda app, config: setattr(config, "html_math_renderer", "mathml"))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
