"""The tables about swaps: what they say, and that 80 columns are enough."""

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console, RenderableType
from typer.testing import CliRunner

import gptkit
from gptkit.analysis.costs import costs
from gptkit.cli import app
from gptkit.report.quantities import cost_change, rounded_flops, scientific
from gptkit.report.surgery import (
    costs_table,
    dry_run_report,
    listing_report,
    recipes_report,
    registry_report,
    steps_report,
    swap_lines,
)
from gptkit.surgery.listing import listing
from gptkit.surgery.options import guarantee_in_words
from gptkit.surgery.recipe import read_recipe, shipped
from gptkit.surgery.registry import all_options, all_swaps


def printed(*parts: RenderableType, width: int = 80) -> str:
    file = io.StringIO()
    console = Console(file=file, width=width, highlight=False, markup=False, emoji=False, color_system=None)
    console.print(*parts, sep="\n")
    text = file.getvalue()
    assert all(len(line) <= width for line in text.splitlines())
    return "\n".join(line.rstrip() for line in text.splitlines())


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (100, 100, "="),
        (100, 110, "+10.0 %"),
        (100, 25, "-75.0 %"),
        (100, 1600, "×16"),
        (0, 3, "new"),
        (8, 0, "-100.0 %"),
    ],
)
def test_changes(before: int, after: int, words: str) -> None:
    assert cost_change(before, after) == words


def test_flops() -> None:
    assert [rounded_flops(x) for x in (0, 999, 1000, 1_780_000, 16.06e9, 3e15)] == [
        "0", "999", "1.00 k", "1.78 M", "16.06 G", "3,000.00 T",
    ]  # fmt: skip


def test_a_listing() -> None:
    text = printed(listing_report(listing(gptkit.open_checkpoint("sample:llama"))))
    lines = text.splitlines()
    assert lines[0] == "sample:llama" and lines[1].startswith("652,320 parameters")
    groups = [line for line in lines if line.startswith(("Possible", "Not possible", "Where"))]
    assert [group.split(" (")[0] for group in groups] == [
        "Possible and exact here",
        "Possible, approximate",
        "Possible, but needs training",
        "Not possible here",
        "Where they come from",
    ]
    mha = next(line for line in lines if line.startswith("--attention mha"))
    assert mha.split()[-5:] == ["+14.1", "%", "+9.5", "%", "+200.0", "%"][-5:]
    assert "has no LayerNorm" in text and "Ainslie" in text


def test_all_swaps_and_recipes() -> None:
    text = printed(registry_report(all_swaps(), {option.name: option.group for option in all_options()}))
    flat = " ".join(text.split())
    for swap in all_swaps():
        assert guarantee_in_words(swap.guarantee) in text and " ".join(swap.needs.split()[:2]) in flat
    headings = [line for line in text.splitlines() if line in {option.group for option in all_options()}]
    assert headings == list(dict.fromkeys(option.group for option in all_options()))
    recipes = printed(recipes_report([read_recipe(name) for name in shipped()]))
    assert "1. --norm rmsnorm" in recipes and "llama-pro" in recipes


def test_a_dry_run_shows_the_tree_and_its_costs(tmp_path: Path) -> None:
    done = gptkit.swap("sample:gpt2", tmp_path / "out", norm="rmsnorm", fold="value-bias", dry_run=True)
    text = printed(dry_run_report(done))
    assert "RMSNorm, eps 1e-05, pre-norm" in text and "751,024" in text
    assert "FLOPs per token at 256" in text and "KV cache per token, bf16" in text
    rows = {line.split("   ")[0]: line.split() for line in text.splitlines()}
    assert rows["1"][-2:] == ["+8.2", "%"] and "exact" in rows["1"] and rows["2"][-1] == "="
    both = "\n".join([*swap_lines(done), text])
    assert both.count("the head was untied") == 1
    assert "not measured" not in "\n".join(swap_lines(done)) and not (tmp_path / "out").exists()


@pytest.mark.exhaustive
def test_steps_with_their_costs(tmp_path: Path) -> None:
    done = gptkit.swap("sample:gpt2", tmp_path / "out", norm="rmsnorm", quantize="int4")
    text = printed(steps_report(done))
    first, second = (line.split() for line in text.splitlines()[-2:])
    assert first[:4] == ["1", "--norm", "rmsnorm", "exact"] and first[-2] == "100.0%"
    assert second[:4] == ["2", "--quantize", "int4", "approximate"]
    assert float(first[-3]) < 1e-9 < 1e-3 < float(second[-3])
    lines = swap_lines(done)
    on_text = next(line for line in lines if line.startswith("text        perplexity 24.37 -> "))
    assert float(second[-1]) == pytest.approx(float(on_text.split(" -> ")[1].split(",")[0]), abs=0.2)


def test_the_first_kl_is_the_one_on_the_text(tmp_path: Path) -> None:
    """The probe's KL comes after it, and its line says that the probe is random token ids."""
    done = gptkit.swap("sample:llama", tmp_path / "out", quantize="int4:16", approximate=True)
    first, *others = [line for line in swap_lines(done) if re.search(r" KL \d", line)]
    assert done.measured is not None
    assert first.startswith("text ") and f"KL {scientific(done.measured.kl_text)}" in first
    assert others[-1].startswith("random ids ") and f"KL {scientific(done.measured.kl)}" in others[-1]


def test_the_plain_form_is_explained_where_it_stands(tmp_path: Path) -> None:
    done = gptkit.swap("sample:llama", tmp_path / "out", attention="mqa", calibrate_tokens=2048)
    (line,) = (line for line in swap_lines(done) if line.startswith("plain form"))
    assert line.endswith("(without a fit: --approximate)") and len(line) <= 80


def test_costs_side_by_side() -> None:
    before = costs(gptkit.open_checkpoint("sample:llama").spec)
    text = printed(costs_table(before, before))
    assert text.count("=") == len(text.splitlines()) - 1
    assert "active per token" not in text


def test_what_needs_training_is_called_so(tmp_path: Path) -> None:
    """By people; data keeps the word that recipes and programs know."""
    done = gptkit.swap("sample:gpt2", tmp_path / "out", activation="relu", dry_run=True)
    text = "\n".join([*swap_lines(done), printed(dry_run_report(done))])
    assert "a swap that needs training" in text and "retrained" not in text
    assert done.guarantee == done.chain.swapped[0].summary["guarantee"] == "retrained"
    call = ["params", "gpt2", "--swap", "activation=relu"]
    now, then = (CliRunner().invoke(app, [*call, *more]) for more in ([], ["--json"]))
    assert "guarantee: needs training" in now.stdout
    assert json.loads(then.stdout)["models"][1]["swap"]["guarantee"] == "retrained"
