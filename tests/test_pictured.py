"""The pictures that README.md and docs/ show: there, small, and those of the commands above them."""

import re
import shlex
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from helpers.covering import exhaustive
from pictured import MARK, Pictured, draw, pictured

from gptkit.report import pictures

pytest.importorskip("plotly", reason='pictures need pip install "gptkit[images]"')

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "pictures"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SHOWN = {page: pictured(page) for page in PAGES}
ALL = {each.file: each for found in SHOWN.values() for each in found}
MEASURED = {ROOT / "docs" / "ablation.md": FOLDER / "ablation.svg"}
"""Pages whose picture is of what was measured for some twenty minutes, which `make ablation` draws."""


def test_the_readme_and_the_docs_show_pictures() -> None:
    assert len(SHOWN[ROOT / "README.md"]) >= 2
    assert sum(bool(found) for page, found in SHOWN.items() if page.is_relative_to(ROOT / "docs")) >= 3
    assert set(FOLDER.iterdir()) == {*ALL, *MEASURED.values()}  # none that no command makes


def test_a_picture_without_its_command_is_told(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- picture: gptkit show gpt2 -->\n\n![far below](a.svg)\n")
    with pytest.raises(AssertionError, match="1 marks, 0 of them before a picture"):
        pictured(page)
    for path in PAGES:
        text = path.read_text()
        assert len(re.findall(r"!\[", text)) == len(MARK.findall(text)) + (path in MEASURED), path


def texts(file: Path) -> set[str]:
    """The words in a drawing, without what breaks lines."""
    root = ET.fromstring(file.read_bytes())
    return {"".join("".join(each.itertext()).split()) for each in root.iter("{http://www.w3.org/2000/svg}text")}


def wanted(value: Any) -> set[str]:
    """The words that a figure's notes, ticks and titles have."""
    layout = value["layout"]
    notes = [note["text"] for note in layout.get("annotations", ()) if note.get("text")]
    axes = [layout.get(axis, {}) for axis in ("xaxis", "yaxis")]
    ticks = [tick for axis in axes for tick in axis.get("ticktext", ())]
    titles = [axis["title"]["text"] for axis in axes if axis.get("title")]
    plain = [re.sub(r"<[^>]*>|\s", "", word) for word in (*notes, *ticks, *titles, layout["title"]["text"])]
    return {word.replace("&lt;", "<").replace("&amp;", "&") for word in plain if word}


@exhaustive
@pytest.mark.parametrize("file", ALL, ids=lambda file: file.name)
def test_it_is_what_its_command_draws(file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By its words: what the figure says that the command would draw now is what the file says."""
    specs: list[dict[str, Any]] = []

    def noted(figures: list[tuple[Any, str]]) -> list[bytes]:
        specs.extend(pictures._static(figure) for figure, _ in figures)
        return [b""] * len(figures)

    monkeypatch.setattr(pictures, "drawn", noted)
    monkeypatch.setattr(pictures, "_can_draw", lambda option: None)
    draw(ALL[file], tmp_path / file.name)
    (spec,) = specs
    assert file.stat().st_size < 200_000
    missing = wanted(spec) - texts(file)
    assert not missing, f"make pictures draws it again: {missing}"


def test_commands_are_of_the_pages(tmp_path: Path) -> None:
    """A picture that two pages show has one command."""
    for found in SHOWN.values():
        for each in found:
            assert each.commands == ALL[each.file].commands
            assert isinstance(each, Pictured) and shlex.split(each.commands[-1]) and len(each.words) > 30
