"""Write the page of --html, and for --png and --svg one of its figures as a picture for a talk or a paper.

kaleido draws pictures with the system's Chrome or Chromium and the plotly.js of plotly's package. Nothing is fetched:
there is no MathJax, and the browser's proxy is a port on which nobody listens.
"""

import math
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..errors import UsageError
from . import pages
from .pages import Figure, Page, safe

_WIDTH = 520  # pixels: in a column of a paper (84 mm), 12 pixels are 6 points high
_SCALE = 4  # pixels of a PNG per pixel of the drawing: 600 dots per inch in such a column
_NOWHERE = "127.0.0.1:9"  # the discard port
_SECONDS = 120
_FONT = "Helvetica, Arial, 'Liberation Sans', 'DejaVu Sans', sans-serif"

_TITLE = 26  # pixels above the figure for its title


def ready(html: Path | None, png: Path | None, svg: Path | None) -> None:
    """Raise UsageError if one of these files cannot be made or written.

    Commands call this before they start their work.
    """
    if html is not None:
        suffix, problem = html.suffix.lower(), f"--html {html}: the name of a page must end in .html"
        if suffix in (".png", ".svg"):
            raise UsageError(problem, f"For a picture, use --{suffix[1:]} {html}.")
        pages.ready(html)
        if suffix not in (".html", ".htm"):
            raise UsageError(problem, "Choose a name that ends in .html.")
    given = [(option, path) for option, path in (("--png", png), ("--svg", svg)) if path is not None]
    for option, path in given:
        if path.suffix.lower() != f".{option[2:]}":
            raise UsageError(f"{option} {path}: the name of the file must end in .{option[2:]}")
        pages.writable(path, option)
    if given:
        _can_draw(given[0][0])


def _can_draw(option: str) -> None:
    pages.require(option, ("plotly", "kaleido", "choreographer"), "images")
    if _browser() is None:
        raise UsageError(
            f"{option} needs Chrome or Chromium, and neither is installed",
            "Install one (apt install chromium, brew install --cask chromium, or kaleido_get_chrome),"
            " or set BROWSER_PATH=/path/to/chrome.",
        )


def _browser() -> str | None:
    """Return the path of the browser that kaleido uses, or None if there is none.

    It is the one in BROWSER_PATH, a browser that kaleido downloaded, or one of the system.
    """
    from choreographer.browsers.chromium import Chromium

    named = os.environ.get("BROWSER_PATH")
    if named:
        return named if Path(named).is_file() else None
    browser: str | None = Chromium.find_browser(skip_local=False)
    return browser


def write(
    page: Page, html: Path | None, png: Path | None, svg: Path | None, name: str | None = None
) -> list[tuple[Path, str]]:
    """Write the page to `html`, and one of its figures as pictures to `png` and `svg`, for every path that is given.

    Files are replaced, and are written completely or not at all.

    Args:
        page: the page.
        html: the path of the page.
        png: the path of the picture in PNG.
        svg: the path of the picture in SVG.
        name: the title of the figure to draw, or words in it; by default the first figure.

    Returns:
        (path, title of the figure) for every file. The title is "" for the page.

    Raises:
        UsageError: a file cannot be written or drawn, or there is no such figure.
    """
    written: list[tuple[Path, str]] = []
    if html is not None:
        pages.write_page(page, html)
        written.append((html, ""))
    wanted = [path for path in (png, svg) if path is not None]
    if not wanted:
        return written
    figures = page.figures()
    if not figures:
        raise UsageError(
            f"cannot write {wanted[0]}: the report of this command has no figure",
            "Write a page instead: --html page.html",
        )
    figure = figures[0] if name is None else _named(figures, name)
    drawings = drawn([(figure, path.suffix.lower()[1:]) for path in wanted])
    for path, drawing in zip(wanted, drawings, strict=True):
        pages.put(drawing, path)
        written.append((path, figure.title))
    return written


def _named(figures: Sequence[Figure], name: str) -> Figure:
    """Return the figure with this title, or the only figure whose title contains `name`.

    Raise UsageError if there are none or several.
    """
    wanted = name.casefold()
    fitting = [figure for figure in figures if figure.title.casefold() == wanted]
    fitting = fitting or [
        figure for figure in figures if all(word in figure.title.casefold() for word in wanted.split())
    ]
    if len(fitting) == 1:
        return fitting[0]
    titles = "; ".join(figure.title for figure in fitting or figures)
    how_many = "more than one" if fitting else "none"
    raise UsageError(
        f"--figure {name!r} matches the titles of {how_many} of the report's figures", f"Choose one of: {titles}"
    )


def drawn(figures: Sequence[tuple[Figure, str]]) -> list[bytes]:
    """Draw figures on white with a legend, and return the contents of the files.

    A figure comes with its format, "png" or "svg". Raise UsageError if the browser fails.
    """
    import asyncio

    with ThreadPoolExecutor(1) as thread:  # a notebook already runs a loop in this thread
        try:
            return thread.submit(asyncio.run, _drawn(figures)).result()
        except Exception as error:  # of any kind: from the browser, its pipes or its threads
            why = " ".join(str(error).split()) or type(error).__name__
            raise UsageError(
                f"Chrome could not draw the picture: {why}",
                "Set BROWSER_PATH to another Chrome or Chromium, or use --html, which needs no browser.",
            ) from error


async def _drawn(figures: Sequence[tuple[Figure, str]]) -> list[bytes]:
    from kaleido import Kaleido

    contents = []
    async with Kaleido(mathjax=False, proxy_server=_NOWHERE, timeout=_SECONDS, path=_browser()) as kaleido:
        for figure, form in figures:
            spec = _static(figure)
            size = {"width": max(figure.width, _WIDTH), "height": spec["layout"]["height"]}
            options = {"format": form, **size, "scale": _SCALE if form == "png" else 1}
            content = bytes(await kaleido.calc_fig(spec, opts=options))
            # plotly uses random names. Without them, a figure always gives the same file.
            random = re.search(rb'id="defs-([0-9a-f]{6})"', content) if form == "svg" else None
            contents.append(content if random is None else content.replace(random[1], b"gptkit"))
    return contents


def _static(figure: Figure) -> dict[str, Any]:
    """Return the plotly figure with its title, its legend, and the colours of page.css for light mode."""
    style = files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    light = style[style.index(":root {") : style.index("@media")]
    values = dict(re.findall(r"(--[\w-]+): (#[0-9a-f]{6});", light))
    spec: dict[str, Any] = _painted(figure.spec, values)
    layout = spec["layout"]
    shapes = list(layout.get("shapes", ()))
    data: list[dict[str, Any]] = []
    for trace in spec["data"]:
        if trace["type"] == "heatmap":
            cells, words = _vector(trace)
            shapes = [*cells, *shapes]
            data.append(words)
        else:
            data.append(_in_sight(trace) if trace["type"] == "treemap" else {**trace, "showlegend": False})
    legend = [_legend(key.style.split(), key.words, values) for key in figure.keys if key.style != "counts"]
    more = 0
    if legend:  # plotly gives all entries the width of the longest
        widest = 50 + 7 * max(len(entry["name"]) for entry in legend)
        more = 12 + 20 * math.ceil(len(legend) / max(1, max(figure.width, _WIDTH) // widest))
    margin = {"t": 0, **layout.get("margin", {})}
    nested = any(trace["type"] == "treemap" for trace in data)
    if nested:
        margin["t"] = 2  # the bar above the areas is left out
    corner = {"xref": "container", "yref": "container", "x": 0.01, "xanchor": "left", "y": 1, "yanchor": "top"}
    bottom = {"xref": "container", "yref": "container", "x": 0, "y": 0, "yanchor": "bottom"}
    layout = {
        **layout,
        "shapes": shapes,
        "paper_bgcolor": "#ffffff",
        "font": {**layout["font"], "family": _FONT, "size": 12},
        "height": figure.height + _TITLE + more,
        "margin": {**margin, "t": margin["t"] + _TITLE, "b": margin.get("b", 0) + more},
        "title": {"text": f"<b>{safe(figure.title)}</b>", "font": {"size": 13}, **corner, "pad": {"t": 6}},
        "showlegend": bool(legend),
        "legend": {"orientation": "h", "traceorder": "normal", **bottom},
    }
    if nested:  # the traces of the legend have axes
        layout |= {"xaxis": {"visible": False}, "yaxis": {"visible": False}}
    # With these names, plotly does not choose random ones.
    return {"data": [{**trace, "uid": str(n)} for n, trace in enumerate([*data, *legend])], "layout": layout}


def _in_sight(trace: dict[str, Any]) -> dict[str, Any]:
    """Return a trace of a treemap without the levels that only a click would open.

    They would be most of the file, and are not visible in a picture.
    """
    depth: dict[str, int] = {"": 0}
    for place, parent in zip(trace["ids"], trace["parents"], strict=True):
        depth[place] = depth[parent] + 1
    shown = [index for index, place in enumerate(trace["ids"]) if depth[place] <= trace["maxdepth"]]

    def cut(values: Any) -> Any:
        if isinstance(values, dict):
            return {name: cut(part) for name, part in values.items()}
        listed = isinstance(values, list) and len(values) == len(trace["ids"])
        return [values[index] for index in shown] if listed else values

    return {**cut(trace), "pathbar": {"visible": False}}


def _painted(value: Any, values: dict[str, str]) -> Any:
    """Return JSON values in which names of colours, such as "var(--line)", are replaced by the colours."""
    if isinstance(value, str):
        named = re.fullmatch(r"var\((--[\w-]+)\)", value)
        return values[named[1]] if named else value
    if isinstance(value, list):
        return [_painted(part, values) for part in value]
    return {key: _painted(part, values) for key, part in value.items()} if isinstance(value, dict) else value


def _legend(style: list[str], words: str, values: dict[str, str]) -> dict[str, Any]:
    """Return a plotly trace without points, which only adds an entry to the legend.

    Args:
        style: the words of `Key.style`, such as ["c3"] for a colour or ["line", "c3", "dash"] for a line.
        words: the text of the entry.
        values: the colours by name.
    """
    line = style[0] == "line"
    colour = values[f"--{style[1] if line else style[0]}"]
    drawn: dict[str, Any] = {"mode": "markers", "marker": {"symbol": "square", "size": 12, "color": colour}}
    if style[0] == "mark":
        drawn["marker"] |= {"symbol": "square-open", "line": {"width": 2}}
    if line:
        drawn = {"mode": "lines", "line": {"color": colour, "dash": style[2], "width": 2}}
    return {"type": "scatter", "x": [None], "y": [None], "name": safe(words), "showlegend": True, **drawn}


def _vector(trace: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return a heatmap as plotly shapes (rectangles), and a trace with the cells' texts and the colour bar.

    plotly itself would draw the cells as a bitmap, even in an SVG file.
    """
    low, high = trace.get("zmin", 0.0), trace.get("zmax", 1.0)
    cells, x, y, text, ink = [], [], [], [], []
    for row, column in ((row, column) for row, line in enumerate(trace["z"]) for column in range(len(line))):
        if (z := trace["z"][row][column]) is None:
            continue
        colour = _between(trace["colorscale"], (z - low) / (high - low))
        place = {"x0": column - 0.46, "x1": column + 0.46, "y0": row - 0.46, "y1": row + 0.46}
        cells.append({"type": "rect", "layer": "below", "fillcolor": colour, "line": {"width": 0}, **place})
        x.append(trace["x"][column])
        y.append(row)
        text.append(trace["text"][row][column] if trace.get("texttemplate") else "")
        # White or black text, whichever has the larger contrast as defined by WCAG 2.2.
        light = _luminance(colour) + 0.05
        ink.append("#ffffff" if 1.05 / light > light / 0.05 else "#000000")
    marker: dict[str, Any] = {"opacity": 0, "color": [low] * len(x), "cmin": low, "cmax": high}
    marker |= {name: trace[name] for name in ("colorscale", "colorbar") if name in trace}
    marker["showscale"] = trace.get("showscale", True)
    words = {"type": "scatter", "mode": "markers+text", "x": x, "y": y, "cliponaxis": False, "showlegend": False}
    return cells, {**words, "text": text, "textfont": {"color": ink, "size": 11}, "marker": marker}


def _between(scale: list[tuple[float, str]], part: float) -> str:
    """Return the interpolated colour of a colour scale at `part`, a number from 0 to 1."""
    part = min(max(part, 0.0), 1.0)
    (a, first), (b, second) = next((pair for pair in pairwise(scale) if part <= pair[1][0]), scale[-2:])
    weight = (part - a) / (b - a) if b > a else 0.0
    mixed = (round(x + (y - x) * weight) for x, y in zip(_rgb(first), _rgb(second), strict=True))
    return "#" + "".join(f"{value:02x}" for value in mixed)


def _rgb(colour: str) -> bytes:
    return bytes.fromhex(colour[1:])


def _luminance(colour: str) -> float:
    parts = [value / 255 for value in _rgb(colour)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
