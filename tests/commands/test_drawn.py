"""--html, --png and --svg on every command that has them: told alike, refused before any work."""

from pathlib import Path
from typing import Any

import pytest
from helpers.command import call
from helpers.covering import few

from gptkit.report import pictures

COMMANDS = {
    "params": ["params", "gpt2"],
    "compare": ["compare", "gpt2", "falcon-7b"],
    "show": ["show", "gpt2"],
    "diff": ["diff", "sample:gpt2", "sample:gpt2"],
    "verify": ["verify", "sample:gpt2", "--no-mutations"],
}


def run(*args: str | Path) -> tuple[int, str, str]:
    done = call(*args)
    return done.exit_code, done.stdout, done.stderr


@few(1)
@pytest.mark.parametrize("name", COMMANDS)
def test_a_page_is_written_and_named_last(name: str, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    code, out, err = run(*COMMANDS[name], "--html", page)
    assert code == 0, err
    assert out.splitlines()[-1] == f"page: {page}" and len(out.splitlines()) > 1
    assert page.read_text().startswith("<!doctype html>")


@few(2)
@pytest.mark.parametrize("name", COMMANDS)
def test_json_stays_json(name: str, tmp_path: Path) -> None:
    import json

    code, out, err = run(*COMMANDS[name], "--json", "--html", tmp_path / "page.html")
    assert code == 0, err
    assert json.loads(out)
    assert (tmp_path / "page.html").exists()


@pytest.mark.parametrize("option", ["--html", "--png", "--svg"])
@pytest.mark.parametrize("name", COMMANDS)
def test_what_cannot_be_written_is_refused_at_once(name: str, option: str, tmp_path: Path) -> None:
    suffix = option.removeprefix("--")
    code, out, err = run(*COMMANDS[name], option, tmp_path / "no" / f"page.{suffix}")
    assert (code, out) == (2, "")
    assert "no such folder" in err


# --- which figure of the page a picture is ----------------------------------------------------------------------------


@pytest.fixture
def pictured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The titles of what would be drawn; no browser runs."""
    titles: list[str] = []

    def noted(figures: list[tuple[Any, str]]) -> list[bytes]:
        titles.extend(figure.title for figure, _ in figures)
        return [b"drawn"] * len(figures)

    monkeypatch.setattr(pictures, "drawn", noted)
    monkeypatch.setattr(pictures, "_can_draw", lambda option: None)
    return titles


@few(3)
@pytest.mark.parametrize(
    ("name", "figure", "title"),
    [
        ("compare", None, "Parameters by component"),
        ("compare", "cache", "Key-value cache by context"),
        ("compare", "Shares by Component", "Shares by component"),
        ("compare", "falcon-7b diagram", "falcon-7b: block diagram, each of 32 layers"),
        ("params", "flops", "FLOPs per token by component"),
        ("show", "diagram", "Block diagram, each of 12 layers"),
        ("diff", "change", "Relative change by layer and component"),
        ("verify", "layer", "Difference by component and layer"),
    ],
)
def test_a_picture_is_of_the_figure_that_was_named(
    name: str, figure: str | None, title: str, pictured: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "picture.svg"
    named = [] if figure is None else ["--figure", figure]
    code, out, err = run(*COMMANDS[name], "--svg", file, *named)
    assert code == 0, err
    assert pictured == [title]
    assert out.splitlines()[-1] == f"picture: {file} ({title})"


@pytest.mark.parametrize(
    ("figure", "said"),
    [
        ("component", "matches the titles of more than one"),
        ("nothing of the kind", "matches the titles of none"),
        ("", "matches the titles of more than one"),
    ],
)
def test_another_name_lists_the_figures(figure: str, said: str, pictured: list[str], tmp_path: Path) -> None:
    code, _, err = run(*COMMANDS["compare"], "--svg", tmp_path / "picture.svg", "--figure", figure)
    assert code == 2 and not pictured
    first, titles = err.splitlines()
    assert said in first and "Parameters by component; Shares by component" in titles


@pytest.mark.parametrize("name", COMMANDS)
def test_a_figure_is_named_of_a_picture(name: str, tmp_path: Path) -> None:
    for more in ([], ["--html", tmp_path / "page.html"]):
        code, out, err = run(*COMMANDS[name], "--figure", "cache", *more)
        assert (code, out) == (2, "") and "--figure works only with --png or --svg" in err
