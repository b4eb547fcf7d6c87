"""A recommendation as it is printed: at any width whole numbers and whole words, each choice with its paper."""

import io
import json
import shlex
from pathlib import Path

import pytest
from helpers.covering import few
from rich.cells import cell_len
from rich.console import Console
from typer.testing import CliRunner

from gptkit.analysis.recommend import GOALS, Recommendation, recommend
from gptkit.cli import app
from gptkit.report.quantities import signed
from gptkit.report.recommendation import recommendation_table

runner = CliRunner()


def render(found: Recommendation, width: int = 80) -> str:
    file = io.StringIO()
    Console(file=file, width=width).print(recommendation_table(found))
    return file.getvalue()


@few(1)
@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("goal", GOALS)
def test_every_width(goal: str, width: int) -> None:
    found = recommend(goal, "7B", context=32_768)
    text = render(found, width)
    assert all(cell_len(line) <= width for line in text.splitlines())
    words = set(text.split())
    for choice in found.choices:
        assert set(choice.words.split()) <= words
        assert choice.paper is None or choice.paper.arxiv in words
        if not choice.usual and choice.cost.parameters:
            assert f"{choice.cost.parameters:+,}" in words
    assert {f"{found.parameters:,}", f"{found.baseline_costs.parameters:,}"} <= words
    flat = " ".join(text.split())
    for finding in found.findings:
        assert finding.words in flat
    said = " ".join(f"- {finding.words}" for finding in found.findings if finding.against)
    assert ("The costs disagree: see below." in flat) == bool(said)
    assert f"As usually advised for {goal}: {found.way}." in flat
    if said:
        assert f"Where the costs disagree with the advice {said} What the costs say - " in flat
    else:
        assert "disagree" not in flat


def test_only_what_is_exchanged_has_a_cost() -> None:
    lines = [" ".join(line.split()) for line in render(recommend("simplicity", "7B")).splitlines()]
    start = next(i for i, line in enumerate(lines) if line.startswith("GPT-2's design 6,"))
    assert lines[start + 1].startswith("ALiBi, scaled -16,777,216 0 0")
    assert lines[start + 2] == ""
    assert lines[start + 3].startswith("(RoPE 10,000) -16,777,216")


def test_a_difference_has_a_sign() -> None:
    assert [signed(n, "{:,}".format) for n in (0, 1500, -1500)] == ["0", "+1,500", "-1,500"]


# --- the command ---


def test_what_it_says_next_can_be_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said = runner.invoke(app, ["recommend", "--goal", "quality", "--params", "30M", "--vocab", "4096"]).stdout
    lines = said[said.index("Next:") :].splitlines()[1:]
    loadable = runner.invoke(app, ["recommend", "--goal", "balance", "--params", "30M", "--loadable"]).stdout
    assert "gptkit recommend --goal balance --params 30M --loadable --out balance.json" in loadable
    assert "ArceeForCausalLM" in loadable
    long = runner.invoke(app, ["recommend", "--goal", "quality", "--params", "1B", "--context", "10M", "--json"])
    assert json.loads(long.stdout)["context"] == 10 * 2**20
    assert lines[0] == "gptkit recommend --goal quality --params 30M --vocab 4096 --out quality.json"
    for line in lines[:2]:
        result = runner.invoke(app, shlex.split(line)[1:])
        assert result.exit_code == 0, (line, result.output)
    assert "parameters" in result.stdout


def test_it_writes_a_tree_that_params_counts(tmp_path: Path) -> None:
    file = tmp_path / "my spec.json"
    call = ["recommend", "--goal", "memory", "--params", "50M", "--out", str(file), "--json"]
    found = json.loads(runner.invoke(app, call).stdout)
    counted = json.loads(runner.invoke(app, ["params", str(file), "--json"]).stdout)["models"][0]
    assert counted["total"] == found["parameters"]
    assert counted["family"] == found["family"] == "llama"
    again = runner.invoke(app, call)
    assert again.exit_code == 2 and "exists already" in again.stderr
    assert runner.invoke(app, [*call, "--force"]).exit_code == 0
    compared = json.loads(runner.invoke(app, ["compare", str(file), "gpt2", "--json"]).stdout)
    assert compared["models"][0]["costs"]["parameters"] == found["parameters"]


def test_quiet_and_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    call = ["recommend", "--goal", "speed", "--params", "7B", "-q"]
    result = runner.invoke(app, call)
    assert (result.exit_code, result.stdout) == (2, "")
    assert (
        "-q prints nothing, and without --out gptkit also writes nothing" in result.stderr
        and "--out FILE.json" in result.stderr
    )
    result = runner.invoke(app, [*call, "--out", "a.json"])
    assert (result.exit_code, result.output) == (0, "") and Path("a.json").is_file()
    assert json.loads(runner.invoke(app, [*call, "--json"]).stdout)["goal"] == "speed"
    for wrong in (["--goal", "fame", "--params", "7B"], ["--goal", "speed", "--params", "big"], ["--goal", "speed"]):
        result = runner.invoke(app, ["recommend", *wrong])
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr.startswith("gptkit: ")
