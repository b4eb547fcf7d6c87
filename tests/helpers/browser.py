"""Pages in headless Chromium: what they say and ask for is kept, and screenshots where somebody wants them."""

import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from .processes import HANGS

SCREENS: dict[str, dict[str, Any]] = {
    "wide": {"viewport": {"width": 1100, "height": 900}},
    "phone": {"viewport": {"width": 375, "height": 700}, "is_mobile": True, "has_touch": True},
}


def chromium() -> Iterator[Any]:
    """A running headless Chromium, playwright's own or the system's; skips the test where there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: make test-browser")
    with playwright.sync_playwright() as driver:
        own = driver.chromium.executable_path
        found = own if Path(own).exists() else system_browser()
        if found is None:
            pytest.skip("no Chromium: make test-browser, or a chromium on the PATH")
        running = driver.chromium.launch(executable_path=found, args=["--no-sandbox"], timeout=HANGS * 1000)
        yield running
        running.close()


def system_browser() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    return next(filter(None, map(shutil.which, names)), None)


@dataclass
class Shown:
    """A page in a window of its own. said: its console and its errors; asked: requests, all refused but the page's."""

    context: Any
    page: Any
    said: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def keep(self, name: str) -> None:
        """A screenshot, in the folder that GPTKIT_SCREENSHOTS names."""
        if folder := os.environ.get("GPTKIT_SCREENSHOTS"):
            self.page.screenshot(path=Path(folder) / f"{name}.png", full_page=True)

    def texts(self, selector: str) -> list[str]:
        return [" ".join(text.split()) for text in self.page.locator(selector).all_text_contents()]

    def until(self, condition: str) -> None:
        """Wait for an expression to be true; playwright's own way needs an eval, which pages forbid."""
        end = time.monotonic() + HANGS
        while not self.page.evaluate(condition):
            assert time.monotonic() < end, f"never came: {condition}"
            self.page.wait_for_timeout(20)


def opened(browser: Any, path: Path, screen: str = "wide", scheme: str = "light", **more: Any) -> Shown:
    """A page drawn to the end; `more` is playwright's (reduced_motion="reduce")."""
    context = browser.new_context(color_scheme=scheme, **SCREENS[screen], **more)
    context.set_default_timeout(HANGS * 1000)  # playwright's own 30 seconds are short on a busy machine
    shown = Shown(context, context.new_page())

    def answer(route: Any) -> None:
        url = route.request.url
        if url == path.as_uri() or url.startswith(("data:", "blob:")):
            route.continue_()
        else:
            shown.asked.append(url)
            route.abort()

    context.route("**/*", answer)
    shown.page.on("console", lambda message: shown.said.append(message.text))
    shown.page.on("pageerror", lambda error: shown.said.append(str(error)))
    shown.page.on("websocket", lambda socket: shown.asked.append(socket.url))
    shown.page.goto(path.as_uri())
    shown.until("[...document.querySelectorAll('.picture')].every(each => each.dataset.drawn)")
    return shown
