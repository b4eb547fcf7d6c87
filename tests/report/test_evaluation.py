"""An evaluation as it is printed and as a page: at any width, whole figures, one mark a curve and bin."""

import io
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.browser import SCREENS, opened
from rich.cells import cell_len
from rich.console import Console
from typer.testing import CliRunner

import gptkit
from gptkit.cli import app
from gptkit.report.evaluation import evaluation_page, evaluation_report
from gptkit.report.pages import render, write_page
from gptkit.training.evaluate import Bin, Curve, Estimate, Evaluation, evaluate

SAMPLES = Path(gptkit.__file__).parent / "samples"
runner = CliRunner()


@pytest.fixture(scope="module")
def play(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "play.txt"
    path.write_text((SAMPLES / "play.txt").read_text()[:4000])
    return path


@pytest.fixture(scope="module")
def found(play: Path) -> Evaluation:
    return evaluate("sample:llama", play, against="sample:llama", past=2, rope="yarn:2")


def printed(found: Evaluation, width: int = 80, ascii_only: bool = False) -> list[str]:
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii" if ascii_only else "utf-8")
    Console(file=file, width=width).print(evaluation_report(found))
    file.seek(0)
    return file.read().splitlines()


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("ascii_only", [False, True])
def test_every_width(found: Evaluation, width: int, ascii_only: bool) -> None:
    lines = printed(found, width, ascii_only)
    assert max(map(cell_len, lines)) <= width
    assert "the same in each of" in " ".join(" ".join(lines).split())
    assert sum(line.startswith("256") for line in lines) == 1


def test_marks_stand_where_their_figures_are(play: Path) -> None:
    def curve(name: str, *values: float) -> Curve:
        bins = (Bin(at, at, 5, Estimate(value, None), {}) for at, value in enumerate(values))
        return Curve(name, 2, 4, tuple(bins))

    base = evaluate("sample:llama", play, context=2, stride=2)
    shown = replace(base, extrapolation=(curve("a", 1, 2, 3, math.inf), curve("b", 1, 3, 2)))
    rows = [line for line in printed(shown) if line[:1].isdigit() and "document" not in line]
    places = [{mark: row.rfind(mark) for mark in "●○◉" if mark in row} for row in rows]
    left, right = places[0]["◉"], places[1]["○"]
    assert places[1] == {"●": (left + right) // 2, "○": right} or places[1]["●"] in range(left + 1, right)
    assert places[2]["●"] == right
    assert places[3] == {}


def test_as_json(play: Path) -> None:
    done = runner.invoke(app, ["eval", "sample:gpt2", "--data", str(play), "--against", "sample:llama", "--json"])
    assert done.exit_code == 0, done.output
    values = json.loads(done.output)
    assert values["paired"]["unit"] == "nats a token"
    assert values["score"]["perplexity"] == pytest.approx(math.exp(values["score"]["nats"]["value"]))
    assert values["against"]["top_k"].keys() == {"1", "5"}


def test_the_terminal_names_the_figures_in_the_words_of_the_field(play: Path) -> None:
    done = runner.invoke(app, ["eval", "sample:gpt2", "--data", str(play), "--against", "sample:llama"])
    assert done.exit_code == 0, done.output
    labels = ("nats per token", "bits per byte", "top-1 accuracy", "top-5 accuracy")
    assert [line[:14].strip() for line in done.output.splitlines() if line.startswith(labels)] == [*labels]
    assert " nats per token; better in " in done.output


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["--data", "none.txt"], 4),
        (["--data", "none.txt", "--top-k", "one"], 2),
        (["--data", "none.txt", "--attention", "own"], 2),
        (["--data", str(SAMPLES / "play.txt"), "--past", "2"], 2),
        ([], 2),
    ],
)
def test_wrong_calls(options: list[str], code: int) -> None:
    done = runner.invoke(app, ["eval", "sample:gpt2", *options])
    assert done.exit_code == code, done.output


def test_the_page_has_the_figures_and_the_curve(found: Evaluation) -> None:
    page = evaluation_page(found)
    (figure,) = page.figures()
    assert len(figure.spec["data"]) == len(found.extrapolation) == 3
    assert len(figure.table.rows) == sum(len(curve.bins) for curve in found.extrapolation)
    assert "Perplexity" in page.verdict
    assert "yarn:2" in render(page)


@pytest.mark.parametrize(("screen", "scheme"), [("wide", "light"), ("phone", "dark")])
def test_it_draws(browser: Any, found: Evaluation, tmp_path: Path, screen: str, scheme: str) -> None:
    write_page(evaluation_page(found), tmp_path / "page.html")
    shown = opened(browser, tmp_path / "page.html", screen, scheme)
    assert shown.page.locator(".scatterlayer .trace").count() == 3
    assert shown.said == shown.asked == []
    assert shown.page.evaluate("document.documentElement.scrollWidth") == SCREENS[screen]["viewport"]["width"]
    shown.keep(f"eval-{screen}-{scheme}")
    shown.context.close()
