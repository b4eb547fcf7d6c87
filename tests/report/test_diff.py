"""gptkit diff as it is called: exit codes, what a terminal of any width shows, JSON, and the page."""

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.command import call
from helpers.covering import few
from helpers.families import LLAMA, edited, save_hf
from helpers.processes import HANGS, imported
from typer.testing import Result

import gptkit
from gptkit.parity.diff import diff
from gptkit.report.diff import readings, verdict

CONFIG = {**LLAMA, "hidden_size": 96, "num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 4}
ATTACK = "<img src=x onerror=alert(1)>\x1b[31m"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Never changed."""
    folder = tmp_path_factory.mktemp("models") / "base"
    save_hf(CONFIG, folder)
    return folder


@pytest.fixture
def altered(base: Path, tmp_path: Path) -> Callable[..., Path]:
    """Copies of it with tensors changed."""

    def make(change: Callable[[dict[str, torch.Tensor]], object], name: str = "b") -> Path:
        shutil.copytree(base, tmp_path / name)
        edited(tmp_path / name, change)
        return tmp_path / name

    return make


def adapter(weights: dict[str, torch.Tensor]) -> None:
    generator = torch.Generator().manual_seed(0)
    for name, tensor in weights.items():
        if name.endswith("q_proj.weight"):
            update = torch.randn(len(tensor), 4, generator=generator) @ torch.randn(4, 96, generator=generator)
            tensor += update * 0.05 * tensor.norm() / update.norm()


def everything(weights: dict[str, torch.Tensor]) -> None:
    generator = torch.Generator().manual_seed(0)
    for tensor in weights.values():
        tensor += 0.02 * tensor.std() * torch.randn(tensor.shape, generator=generator)


def run(*args: Any, code: int = 3, width: int = 80, **env: str) -> Result:
    result = call("diff", *args, env={"COLUMNS": str(width), "TERM": "dumb", **env})
    assert result.exit_code == code, (result.output, result.exception)
    return result


# --- the verdict ------------------------------------------------------------------------------------------------------


def test_verdicts(base: Path, altered: Callable[..., Path], tmp_path: Path) -> None:
    """Each in words of its own, with the exit code that goes with it."""
    gptkit.convert(base, tmp_path / "local")
    gptkit.convert(base, tmp_path / "half", to="hf", dtype="bfloat16")
    gptkit.convert(tmp_path / "half", tmp_path / "wide", to="hf", dtype="float32")
    zeros = altered(lambda w: w["model.norm.weight"].fill_(0.0), "zeros")
    minus = altered(lambda w: w["model.norm.weight"].fill_(-0.0), "minus")
    total = len(diff(base, base).tensors)
    for a, b, code, words in (
        (base, tmp_path / "local", 0, f"The same: all {total} tensors to the last bit"),
        (tmp_path / "half", tmp_path / "wide", 0, f"The same values: all {total} tensors, {total} in another dtype"),
        (zeros, minus, 0, f"The same values: all {total} tensors (zeros or NaN by other bits)"),
        (base, tmp_path / "half", 3, "Rounding alone: B is A, rounded to bfloat16"),
        (tmp_path / "half", base, 3, "Rounding alone: A is B, rounded to bfloat16"),
        (base, altered(adapter, "lora"), 3, f"Different: 4 of {total} tensors changed, relative change of those 0.05"),
        (base, altered(everything, "full"), 3, f"Different: all {total} tensors changed, relative change 0."),
        (base, "sample:gpt2", 3, "Different: the checkpoints have no tensor in common"),
    ):
        found = run(a, b, code=code).stdout
        assert words in " ".join(found.split()), found
        assert run(a, b, "-q", code=code).output == ""


def test_what_the_figures_come_to(base: Path, altered: Callable[..., Path], tmp_path: Path) -> None:
    save_hf(CONFIG, tmp_path / "other", seed=1)
    for b, words in (
        (
            altered(adapter, "lora"),
            "A LoRA-sized update: all 4 changed matrices, in attention.q_proj, by ranks up to 4.",
        ),
        (altered(everything, "full"), "No LoRA-sized update: 30 of 30 changed matrices by a high rank."),
        (tmp_path / "other", "The matrices have nothing in common"),
        (altered(lambda w: w["lm_head.weight"][7:9].zero_(), "rows"), "head.weight: rows 7–8 changed, 2 of 97"),
        (altered(lambda w: w["model.norm.weight"][1].fill_(math.nan), "nan"), "NaN or infinite values in final_norm"),
    ):
        assert any(line.startswith(words) for line in readings(diff(base, b))), readings(diff(base, b))


def test_an_update_with_more_than_matrices_is_none_of_an_adapter(
    base: Path, altered: Callable[..., Path], tmp_path: Path
) -> None:
    """Norms, rows and tensors that came or went: then ranks are a fact, and no verdict."""
    shutil.copytree(base, tmp_path / "deep")
    for name, more in (
        ("norm", lambda w: w["model.norm.weight"].add_(1)),
        ("rows", lambda w: w["lm_head.weight"][7:9].zero_()),
        ("gone", lambda w: w.pop("model.layers.0.self_attn.k_proj.weight")),
        ("came", lambda w: w.update({"more.weight": torch.ones(3)})),
    ):

        def both(weights: dict[str, torch.Tensor], more: Callable[..., object] = more) -> None:
            adapter(weights)
            more(weights)

        found = diff(base, altered(both, name))
        told = " ".join(readings(found))
        assert "LoRA" not in told, (name, told)
        which = "4 of 5 changed matrices" if name == "rows" else "4 changed matrices"
        assert f"{which}, in attention.q_proj, each by a rank of at most 4." in told, (name, told)
        assert found.low_rank is not None and found.low_rank.alone is False


def test_tensors_missing_and_renamed(base: Path, altered: Callable[..., Path]) -> None:
    """They are listed by the command that is to find them, without an option, and the exit code is that of changes."""
    gone = altered(lambda w: w.pop("model.layers.1.self_attn.q_proj.weight"), "gone")
    for a, b, heading in ((base, gone, "Only in A"), (gone, base, "Only in B")):
        text = run(a, b).stdout
        assert f"{heading}\n  blocks.*.attention.q_proj.weight  96 × 96  (layer 1)" in text

    def rename(weights: dict[str, torch.Tensor]) -> None:
        for layer in range(4):
            own = f"model.layers.{layer}.self_attn."
            weights[f"{own}query.weight"] = weights.pop(f"{own}q_proj.weight")

    text = run(base, altered(rename, "renamed")).stdout
    assert "Only in A\n  blocks.*.attention.q_proj.weight  96 × 96  (layers 0–3)" in text
    assert "Only in B\n  model.layers.*.self_attn.query.weight  96 × 96  (layers 0–3)" in text
    assert "query.weight  96" not in run(base, altered(rename, "left"), "--allow-extra").stdout


def test_figures_say_of_what_they_are(base: Path, altered: Callable[..., Path]) -> None:
    text = run(base, altered(lambda w: w["model.norm.weight"].mul_(8))).stdout
    assert "1 of 39 tensors changed, relative change of those 7\n" in text
    assert "Changed values (figures are of the tensors that changed)" in text


def test_errors(base: Path, tmp_path: Path) -> None:
    assert "no such" in run(base, tmp_path / "none", code=4).stderr.lower()
    assert "--by" in run(base, base, "--by", "weight", code=2).stderr
    shutil.copytree(base, tmp_path / "cut")
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    result = run(base, tmp_path / "cut", code=4)
    assert "truncated" in result.stderr and result.stdout == ""
    assert run(base, base, "--html", tmp_path / "no" / "page.html", code=2).stdout == ""


# --- the terminal -----------------------------------------------------------------------------------------------------


@few(4)
@pytest.mark.parametrize("width", [40, 60, 80, 200])
@pytest.mark.parametrize("by", ["component", "layer", "tensor"])
def test_it_fits(altered: Callable[..., Path], base: Path, width: int, by: str) -> None:
    """No line is wider than the terminal but for a name, no number is cut."""

    def change(weights: dict[str, torch.Tensor]) -> None:
        adapter(weights)
        weights["lm_head.weight"][7:9] = 0

    b = altered(change)
    found = run(base, b, "--by", by, width=width).stdout
    for line in found.splitlines():
        assert len(line) <= width or len(line.split()) == 1, line
    assert "…" not in found and "\x1b" not in found
    told = {"component": "attention.q_proj", "layer": "layer 2", "tensor": "blocks.2.attention.q_proj.weight"}
    assert told[by] in found
    assert "0.05" in found and "0.998" in found
    everything = run(base, b, "--all", width=width).stdout
    assert all(f"blocks.{layer}.attention.q_proj.weight" in everything for layer in range(4))


def test_names_are_not_broken(altered: Callable[..., Path], base: Path) -> None:
    found = run(base, altered(adapter), "--all", width=24).stdout
    assert all(f"blocks.{layer}.attention.q_proj.weight\n" in found for layer in range(4))


def test_ascii_alone(base: Path, altered: Callable[..., Path]) -> None:
    b = altered(lambda w: w["lm_head.weight"][7:9].zero_())
    command = [sys.executable, "-X", "utf8=0", "-m", "gptkit", "diff", str(base), str(b)]
    environment = {"PATH": "", "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, env=environment, check=False, timeout=HANGS)
    assert done.returncode == 3, done.stderr
    text = done.stdout.decode("ascii")
    assert "rows 7-8 changed" in text and "\\u" not in text, text


def test_no_torch(base: Path) -> None:
    code = f"from gptkit.parity.diff import diff\nassert diff({str(base)!r}, {str(base)!r}).same"
    assert not imported(code, "torch", "transformers", "rich", "plotly")


def test_names_are_somebody_elses_text(base: Path, tmp_path: Path) -> None:
    other = tmp_path / "<img src=x onerror=alert(1)>"
    shutil.copytree(base, other)
    config = other / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), ATTACK: ATTACK}))
    page = tmp_path / "page.html"
    result = run(base, other, "--html", page, code=0)
    assert "\x1b" not in result.output
    text = page.read_text()
    assert "<img src=x" not in text and "&lt;img src=x" in text and "\x1b" not in text


# --- JSON and the page ------------------------------------------------------------------------------------------------


def test_json(base: Path, altered: Callable[..., Path]) -> None:
    b = altered(adapter)
    data = json.loads(run(base, b, "--json").stdout)
    assert data == diff(base, b).as_json()
    assert data["low_rank"] == {"alone": True, "matrices": 4, "unclear": 0, "rank": 4, "modules": ["attention.q_proj"]}
    assert json.loads(run(base, base, "--json", code=0).stdout)["same"] is True


def test_the_page(base: Path, altered: Callable[..., Path], tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    from gptkit.report.diff import diff_page
    from gptkit.report.pages import Figure

    b = altered(adapter)
    found = diff(base, b)
    page = diff_page(found)
    (figure,) = [block for section in page.sections for block in section.blocks if isinstance(block, Figure)]
    assert page.verdict == verdict(found) and page.good is None
    assert {key.words for key in figure.keys} == {"exactly 0", "more than rounding explains"}
    assert len(figure.table.rows) == len(found.by_place())
    rows = {row[0]: row for row in figure.table.rows}
    assert rows["layer 3 attention.q_proj"][1:] == ("1", "1", "0.05", "0.99875", "4")
    assert rows["layer 3 attention.k_proj"][1:3] == ("1", "0")
    result = run(base, b, "--html", tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert "page: " in result.stdout and "LoRA-sized" in text
    same = diff_page(diff(base, base))
    assert same.good is True and "Nothing changed." in next(
        block.summary for section in same.sections for block in section.blocks if isinstance(block, Figure)
    )


def test_places_that_cannot_be_compared_are_on_the_map(base: Path, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    from gptkit.report.diff import diff_page
    from gptkit.report.pages import Figure

    save_hf({**CONFIG, "num_key_value_heads": 2, "num_hidden_layers": 5}, tmp_path / "b")
    page = diff_page(diff(base, tmp_path / "b"))
    (figure,) = [block for section in page.sections for block in section.blocks if isinstance(block, Figure)]
    assert "only on one side, or of another shape" in {key.words for key in figure.keys}
    data = figure.spec["data"][-1]
    k_proj = figure.spec["layout"]["yaxis"]["ticktext"].index("attention k_proj")
    assert data["text"][k_proj] == ["", "≠", "≠", "≠", "≠", "B", ""]
    assert "96 → 24" in str(data["hovertext"][k_proj]) or "48 × 96 → 24 × 96" in str(data["hovertext"][k_proj])


def test_names_break_behind_dots_on_the_page(base: Path, altered: Callable[..., Path], tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    run(base, altered(adapter), "--html", tmp_path / "page.html")
    assert '<th scope="row">attention.<wbr>q_<wbr>proj</th>' in (tmp_path / "page.html").read_text()


def test_rounding_and_what_cannot_be_compared_on_the_page(base: Path, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    from gptkit.report.diff import diff_page
    from gptkit.report.pages import Figure

    gptkit.convert(base, tmp_path / "half", to="hf", dtype="bfloat16")
    figures = [block for s in diff_page(diff(base, tmp_path / "half")).sections for block in s.blocks]
    (figure,) = [block for block in figures if isinstance(block, Figure)]
    assert {key.words for key in figure.keys} == {"within rounding"}
    nothing = diff_page(diff(base, "sample:gpt2"))
    assert not any(isinstance(block, Figure) for section in nothing.sections for block in section.blocks)
    titles = [section.title for section in nothing.sections]
    assert {"Tensors of another shape", "Tensors only in A", "Architectures", "Notes"} <= set(titles)


def test_no_change_is_told_as_rank_0(base: Path, altered: Callable[..., Path]) -> None:
    """A change in one row is of rank 1; of two that rounding might have made there is no rank to tell."""

    def nudge(weight: torch.Tensor, rows: list[int]) -> None:
        weight[rows, 0] *= 1 + 2.0**-22

    one = altered(lambda w: nudge(w["model.layers.0.self_attn.q_proj.weight"], [3]), "one")
    two = altered(lambda w: nudge(w["model.layers.0.mlp.up_proj.weight"], [3, 5]), "two")
    for folder, module, expected in ((one, "attention.q_proj", "1"), (two, "feed_forward.up_proj", "–")):
        row = next(line for line in run(base, folder).stdout.splitlines() if line.startswith(module))
        assert row.split()[-1] == expected
        told = json.loads(run(base, folder, "--json").stdout)
        changed = [each["compared"] for each in told["tensors"] if each["status"] == "changed"]
        assert [each["rank"] for each in changed] == [1 if expected == "1" else None]
