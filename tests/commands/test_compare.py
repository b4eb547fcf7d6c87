"""`gptkit compare` as it is called: one output at a time, pages and pictures asked for, swaps beside their model."""

import json
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

import gptkit
from gptkit.cli import app

runner = CliRunner()


def run(*args: str | Path, code: int = 0) -> Result:
    result = runner.invoke(app, ["compare", *map(str, args)], env={"COLUMNS": "80", "HF_HUB_OFFLINE": "1"})
    assert result.exit_code == code, result.output
    if code:
        assert result.stdout == "" and result.stderr.startswith("gptkit: ")
    return result


def test_the_usual_table() -> None:
    text = run("gpt2", "llama-2-7b", "bloom-7b1", "falcon-7b").stdout
    assert "* attention" in text and "MQA 71/1" in text and "more rows" not in text and "--all adds" in text
    assert all(len(line) <= 80 for line in text.splitlines())


def test_a_pickle_that_is_allowed(tmp_path: Path) -> None:
    gptkit.convert("sample:gpt2", tmp_path / "out", "nanogpt_tanh")
    assert "Pass --allow-pickle to read the file" in run(tmp_path / "out", "sample:gpt2", code=4).stderr
    assert "learned" in run(tmp_path / "out", "sample:gpt2", "--allow-pickle").stdout


def test_more_and_fewer_rows() -> None:
    options = (["--only-differences"], [], ["--all"])
    few, usual, all_of_them = (run("gpt2", "llama-2-7b", *more).stdout for more in options)
    assert len(few) < len(usual) < len(all_of_them)
    assert "window" not in few and "norm eps" in all_of_them and "--all" not in all_of_them


def test_one_output_at_a_time() -> None:
    json.loads(run("gpt2", "--json").stdout)
    assert run("gpt2", "--csv").stdout.startswith("aspect,differs,gpt2\n")
    assert run("gpt2", "--markdown").stdout.startswith("|  | gpt2 |\n")
    run("gpt2", "--csv", "--json", code=2)
    run("gpt2", "--only-differences", "--all", code=2)


@pytest.mark.parametrize("wrong", [["--context", "0"], ["--dtype", "float3"], ["--swap", "attention"], ["--html", "."]])
def test_what_cannot_be_asked(wrong: list[str]) -> None:
    run("gpt2", *wrong, code=2)


def test_the_one_that_fails_is_named() -> None:
    assert "gpt2-medum" in run("gpt2", "gpt2-medum", "llama-7b", code=4).stderr


def test_what_a_swap_would_make_of_it() -> None:
    found = json.loads(run("llama-2-7b", "--swap", "attention=gqa:8", "--swap", "tie", "--json").stdout)
    before, after = found["models"]
    assert (before["model"], after["model"]) == ("llama-2-7b", "llama-2-7b swapped")
    assert after["family"] == "llama"
    assert after["aspects"]["attention"]["words"] == "GQA 32/8"
    assert 4 * after["costs"]["cache_bytes_a_token"] == before["costs"]["cache_bytes_a_token"]
    assert found["differs"] == ["attention", "head"]
    assert "--attention gqa:8" in after["notes"][0]
    # k and v of 24 heads of 128 a layer, and the head.
    fewer = before["costs"]["parameters"] - after["costs"]["parameters"]
    assert fewer == 32 * 2 * 24 * 128 * 4096 + 32000 * 4096


def test_a_page(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    page = tmp_path / "page.html"
    said = run("gpt2", "falcon-7b", "--html", page).stdout
    assert said.endswith(f"page: {page}\n")
    text = page.read_text(encoding="utf-8")
    assert "parallel, one norm" in text and "Key-value cache" in text
    assert json.loads(run("gpt2", "--json", "--html", page).stdout)["models"]
