"""The page of compare in a browser: all of it is drawn, what differs is lit, and nothing is asked of anybody."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.browser import chromium, opened

from gptkit.analysis.compare import compare
from gptkit.report.comparison import comparison_page
from gptkit.report.pages import write_page

pytest.importorskip("plotly")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    yield from chromium()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = compare("gpt2", "llama-2-7b", "bloom-7b1", "falcon-7b")
    path = tmp_path_factory.mktemp("pages") / "compare.html"
    write_page(comparison_page(found, found.shown()), path)
    return path


@pytest.mark.parametrize(("screen", "scheme"), [("wide", "light"), ("wide", "dark"), ("phone", "light")])
def test_it_is_drawn_and_asks_nobody(browser: Any, path: Path, screen: str, scheme: str) -> None:
    shown = opened(browser, path, screen, scheme)
    try:
        assert shown.page.locator(".picture svg.main-svg").count() >= 4 + 4
        assert shown.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        lit = shown.texts("table tbody tr.lit th")
        assert "attention" in lit and "window" not in lit
        assert shown.texts("h2") == ["Components", "Costs", "Key-value cache", "Layers"]
        shown.keep(f"compare-{screen}-{scheme}")
        assert shown.said == [] and shown.asked == []
    finally:
        shown.context.close()


def test_pointing_at_a_line_tells_the_bytes(browser: Any, path: Path) -> None:
    shown = opened(browser, path)
    try:
        plot = shown.page.locator(".picture[aria-label='Key-value cache by context']")
        plot.scroll_into_view_if_needed()
        shown.page.wait_for_timeout(200)
        point = plot.locator(".scatterlayer .points path").last.bounding_box()
        shown.page.mouse.move(point["x"] + point["width"] / 2, point["y"] + point["height"] / 2)
        hover = shown.page.locator(".hovertext").first
        hover.wait_for()
        assert "tokens" in (hover.text_content() or "") and "bytes" in (hover.text_content() or "")
        assert shown.said == []
    finally:
        shown.context.close()
