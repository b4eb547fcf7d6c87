"""What all figures share: plotly's figure in the page's font and colours, its words, its numbers in few digits."""

import html
import json
from collections.abc import Iterable, Sequence
from typing import Any

from .pages import Figure, Key, Table, plain
from .sheets import percentage

PALETTE = 8  # page.css's colours for kinds of things, c0 to c7, with on-c0 to on-c7 for text on them
COLOURS = {"attention": 0, "feed-forward": 1, "embedding": 2, "head": 3, "positions": 4, "router": 5, "norms": 6}
"""A component has one colour wherever it is drawn."""


def figure(
    title: str,
    summary: str,
    data: Sequence[Any],
    height: int,
    keys: Iterable[Key],
    table: Table,
    width: int = 280,
    font_size: int = 12,
    **layout: Any,
) -> Figure:
    """A figure of plotly's in the page's font and colours; `layout` is what is special about it."""
    import plotly.graph_objects as go

    clear, text = "rgba(0,0,0,0)", "var(--text)"
    hover = {"bgcolor": "var(--raised)", "bordercolor": "var(--line)", "font": {"color": text, "size": 13}}
    common = {
        "template": "none",
        "height": height,
        "paper_bgcolor": clear,
        "plot_bgcolor": clear,
        "font": {"color": text, "size": font_size, "family": "system-ui, sans-serif"},
        "hoverlabel": {**hover, "align": "left"},
        "modebar": {"bgcolor": clear, "color": "var(--quiet)", "activecolor": text},
    }
    spec: dict[str, Any] = json.loads(go.Figure(list(data), {**common, **layout}).to_json())
    return Figure(title, summary, spec, height, width, tuple(keys), table)


def safe(text: str) -> str:
    """For plotly, which takes some HTML in texts, never in attributes, and knows no escaped quotes in all of them."""
    return html.escape(plain(text), quote=False)


def short(number: int, units: Sequence[str] = "KMBT", one: str = "") -> str:
    """Three digits of a number of parameters: 982, 12.3M, 1.24B, 405B; of anything else with units "kMGT"."""
    for power, unit in zip((12, 9, 6, 3), reversed(units), strict=True):
        if number >= 10**power:
            value = number / 10**power
            return f"{value:,.0f}{unit}" if value >= 99.95 else f"{value:.3g}{unit}"
    return f"{number:,}{one}"


def held(nbytes: int) -> str:
    """Bytes in units of 1,000, as in the tables, in three digits: 37.7 MB, 1.5 GB."""
    return short(nbytes, (" kB", " MB", " GB", " TB"), " B")


def share(number: int, total: int) -> str:
    """Per cent, as the terminal's tables have it, in one piece where lines end."""
    return percentage(number, total).replace(" ", "\u00a0")
