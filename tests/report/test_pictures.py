"""--png and --svg: what is refused before the work, and what is drawn, by a browser that nothing is fetched for."""

import os
import re
import struct
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.browser import system_browser
from helpers.command import call
from helpers.covering import exhaustive

import gptkit
from gptkit.errors import UsageError
from gptkit.report import pages, pictures
from gptkit.report.charts import cache_chart
from gptkit.report.counts_page import counts_page
from gptkit.report.diagram import block_diagram
from gptkit.report.heatmap import Cell, heatmap
from gptkit.report.pages import Figure, Page, Table
from gptkit.report.treemap import treemap

pytest.importorskip("plotly", reason='the pages need pip install "gptkit[html]"')

ATTACK = "<script>alert(1)</script><b>"
SVG = "{http://www.w3.org/2000/svg}"


def no_page(*blocks: Any) -> Page:
    return Page("title", "", "", None, (), (pages.Section("s", blocks),))


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--png", "picture.svg"), "--png picture.svg: the name of the file must end in .png"),
        (("--svg", "picture"), "the name of the file must end in .svg"),
        (("--png", "no/picture.png"), "no such folder"),
        (("--svg", "folder.svg"), "it exists, but is not a regular file"),
        (("--html", "p.html", "--png", "picture.jpg"), "the name of the file must end in .png"),
        (("--html", "p.PNG"), "use --png p.PNG"),
        (("--html", "p.txt"), "must end in .html"),
        (("--html", "page"), "must end in .html"),
    ],
)
def test_what_cannot_be_written_is_refused_first(
    words: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.svg").mkdir()
    for command in (["verify", "no-such-model"], ["params", "gpt2"]):
        run = call(*command, *words)
        assert run.exit_code == 2, run.output
        assert said in " ".join(run.stderr.split())
        assert run.stdout == ""
    assert sorted(tmp_path.iterdir()) == [tmp_path / "folder.svg"]


def test_a_package_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "find_spec", lambda name: None if name == "kaleido" else object())
    with pytest.raises(UsageError, match="--svg needs kaleido") as told:
        pictures.ready(None, None, tmp_path / "a.svg")
    assert told.value.hint == "Install: pip install kaleido, or pip install 'gptkit[images]'."
    lacking = ("kaleido", "choreographer")
    monkeypatch.setattr(pages, "find_spec", lambda name: None if name in lacking else object())
    with pytest.raises(UsageError, match="--svg needs kaleido and choreographer") as told:
        pictures.ready(None, None, tmp_path / "a.svg")
    assert told.value.hint.startswith("Install: pip install kaleido choreographer, ")
    pictures.ready(tmp_path / "page.html", None, None)  # which needs none


def test_a_browser_that_is_missing_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("choreographer")
    monkeypatch.setenv("BROWSER_PATH", str(tmp_path / "chrome"))
    with pytest.raises(UsageError, match="needs Chrome or Chromium") as told:
        pictures.ready(None, tmp_path / "a.png", None)
    assert told.value.hint is not None and "apt install chromium" in told.value.hint


def test_a_page_without_a_figure_has_no_picture(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="this command has no figure"):
        pictures.write(no_page(Table("t", (), ())), tmp_path / "page.html", None, tmp_path / "a.svg")
    assert (tmp_path / "page.html").exists()  # what could be written was
    assert not (tmp_path / "a.svg").exists()


# --- what is drawn ----------------------------------------------------------------------------------------------------

drawing = pytest.mark.skipif(system_browser() is None, reason="no Chromium on the PATH")


def cells() -> Figure:
    found = [Cell("embedding", None, 4.0, (), True)]
    found += [
        Cell(name, layer, value, (), value > 1) for layer, name, value in ((5, "q", 1e-9), (5, "k", 2.1), (6, "q", 3.2))
    ]
    found.append(Cell("head", None, 0.0, (), False))  # drawn first, and still the last column
    return heatmap(found, title="t", summary="s", measure="difference", table=Table("t", (), ()), marked=found[2])


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    """All that is drawn here, by one browser."""
    pytest.importorskip("kaleido", reason='pictures need pip install "gptkit[images]"')
    models = [(each.name, each.spec) for each in gptkit.params("gpt2", "mistral-7b")]
    many = [Cell("q", layer, 1.0, (), True) for layer in range(60)]
    figures = {
        "areas": treemap(*models[0]),
        "cells": cells(),
        "png": cells(),
        "lines": cache_chart([*models, (ATTACK, models[0][1])]),
        "again": cache_chart([*models, (ATTACK, models[0][1])]),
        "wide": heatmap(many, title="t", summary="s", measure="m", table=Table("t", (), ())),
        "block": block_diagram(models[1][1]),
    }
    made = pictures.drawn([(figure, "png" if name == "png" else "svg") for name, figure in figures.items()])
    if folder := os.environ.get("GPTKIT_SCREENSHOTS"):
        for name, content in zip(figures, made, strict=True):
            (Path(folder) / f"picture-{name}.{'png' if name == 'png' else 'svg'}").write_bytes(content)
    return dict(zip(figures, made, strict=True))


def parsed(content: bytes) -> tuple[ET.Element, list[str]]:
    """The drawing, and its words."""
    root = ET.fromstring(content)
    return root, ["".join(each.itertext()).strip() for each in root.iter(f"{SVG}text")]


@drawing
@pytest.mark.parametrize("name", ["areas", "cells", "lines", "wide", "block"])
def test_a_drawing_is_lines_and_words(files: dict[str, bytes], name: str) -> None:
    root, words = parsed(files[name])
    assert len(words) > 5
    assert not list(root.iter(f"{SVG}image")) and not list(root.iter(f"{SVG}foreignObject"))
    everything = ET.tostring(root, encoding="unicode")
    assert "var(--" not in everything
    assert not re.search(r"(href|src)=.(?!#)|url\((?!.?#)|@import", everything)


@drawing
def test_areas_have_their_names(files: dict[str, bytes]) -> None:
    root, words = parsed(files["areas"])
    assert {"attention", "feed-forward", "embedding"} <= set(words)
    assert "Parameters of gpt2" in words
    assert root.get("width") == "520"


def placed(node: ET.Element, origin: tuple[float, float]) -> Iterator[tuple[ET.Element, tuple[float, float]]]:
    """Texts with where they stand."""
    moved = re.match(r"translate\(([\d.-]+), ?([\d.-]+)\)", node.get("transform", ""))
    x, y = origin if moved is None else (origin[0] + float(moved[1]), origin[1] + float(moved[2]))
    if node.tag == f"{SVG}text":
        yield node, (x + float(node.get("x", 0)), y + float(node.get("y", 0)))
    for below in node:
        yield from placed(below, (x, y))


@drawing
def test_cells_of_a_heatmap_lie_where_they_should(files: dict[str, bytes]) -> None:
    root, words = parsed(files["cells"])
    for word in ("embedding", "q", "k", "head", "in", "5", "6", "out", "2.1", "4.0", "exactly 0", "within rounding"):
        assert word in words, word
    places = {"".join(each.itertext()).strip(): at for each, at in placed(root, (0, 0))}
    columns = ["in", "5", "6", "out"]
    assert sorted(columns, key=lambda column: places[column][0]) == columns  # as the cells' rectangles count them
    # The figure of a cell stands under its layer's name and beside its component's.
    where = {"2.1": ("5", "k"), "3.2": ("6", "q"), "4.0": ("in", "embedding"), "0": ("out", "head"), "1e-9": ("5", "q")}
    for cell, (column, row) in where.items():
        assert abs(places[cell][0] - places[column][0]) < 3, cell
        assert abs(places[cell][1] - places[row][1]) < 6, cell


@drawing
def test_a_line_chart_has_its_legend(files: dict[str, bytes]) -> None:
    _, words = parsed(files["lines"])
    assert {"gpt2", "mistral-7b", "tokens", "100 MB", "8k", ATTACK} <= set(words)


@drawing
def test_the_same_figure_is_the_same_file(files: dict[str, bytes]) -> None:
    assert files["lines"] == files["again"]


@drawing
def test_a_png_has_the_dots_that_print_needs(files: dict[str, bytes]) -> None:
    assert files["png"].startswith(b"\x89PNG")
    width, height = struct.unpack(">II", files["png"][16:24])
    assert width == 4 * 520 and 600 < height < 2000


@drawing
def test_a_wide_figure_is_as_wide_as_it_needs(files: dict[str, bytes]) -> None:
    root, words = parsed(files["wide"])
    assert float(root.get("width", 0)) > 1000
    assert "55" in words and "57" not in words


@exhaustive
@drawing
def test_what_the_browser_says_is_an_error() -> None:
    figure = cells()
    figure.spec["layout"]["margin"] = {"t": 10**6}  # no room for anything
    figure.spec["data"][0]["x"] = {1j}  # which JSON has no way to say
    with pytest.raises(UsageError, match="could not draw"):
        pictures.drawn([(figure, "svg")])


@drawing
def test_files_are_written_whole_and_named(
    tmp_path: Path, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = {"png": files["png"], "svg": files["areas"]}
    monkeypatch.setattr(pictures, "drawn", lambda figures: [made[form] for _, form in figures])
    page = counts_page(gptkit.params("gpt2", "llama-2-7b"))
    paths = (tmp_path / "a.html", tmp_path / "a.png", tmp_path / "a.svg")
    paths[1].write_text("old")
    assert pictures.write(page, *paths) == [
        (path, "" if path == paths[0] else page.figures()[0].title) for path in paths
    ]
    assert sorted(tmp_path.iterdir()) == sorted(paths)
    assert [path.read_bytes() for path in paths[1:]] == [*made.values()]


@exhaustive
@drawing
def test_the_command_asks_no_server_for_anything(tmp_path: Path) -> None:
    """As a process of its own, with a browser that writes down what it was asked to fetch."""
    log = tmp_path / "net.json"
    browser = tmp_path / "chrome"
    browser.write_text(f'#!/bin/sh\nexec {system_browser()} --log-net-log={log} "$@"\n')
    browser.chmod(0o755)
    command = [sys.executable, "-m", "gptkit", "params", "gpt2", "--svg", str(tmp_path / "a.svg")]
    run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "BROWSER_PATH": str(browser)})
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    assert (tmp_path / "a.svg").stat().st_size > 10_000
    # What the browser asks for of its own accord (updates, accounts) ends at a closed port of this machine, and the
    # drawing needs nothing of it.
    notes = log.read_text()
    reached = {address for found in re.findall(r'"address_list":\[([^\]]*)\]', notes) for address in found.split(",")}
    assert reached <= {'"127.0.0.1:9"'}
    assert not re.search(r'"url":"https?:[^"]*(plot|mathjax|cdn)', notes, re.IGNORECASE)
