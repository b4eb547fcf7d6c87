"""Notebooks: values show themselves as tables, progress is a line, and the example runs in a kernel as it is."""

import html
import inspect
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.covering import exhaustive
from helpers.family_specs import preset_spec
from helpers.processes import imported
from helpers.trees import TREES

import gptkit
from gptkit.analysis.figures import Scenario
from gptkit.components import ModelSpec
from gptkit.display import Shown
from gptkit.report.notebook import DRAWN, progress

EXAMPLE = Path(__file__).parents[2] / "examples" / "first-steps.ipynb"


def words(value: Any) -> str:
    """What a notebook shows, as text."""
    found = value._repr_html_()
    assert found.startswith("<pre") and found.rstrip().endswith("</pre>")
    return html.unescape(re.sub("<[^>]*>", "", found))


def test_values_show_the_tables_of_their_commands() -> None:
    counts = gptkit.params("gpt2", "llama-3-8b")
    assert "124,439,808" in words(counts) and "8,030,261,248" in words(counts)
    assert "MHA, 12 heads" in words(counts[0]) and "100.0 %" in words(counts[0])
    assert "28,348,416" in words(counts[0].count)
    assert "hidden size" in words(gptkit.compare("gpt2", "llama-3-8b"))
    assert "blocks.0–31" in words(counts[1].spec) and "k_proj" in words(counts[1].spec)
    asked = gptkit.params("gpt2", asked=Scenario(explain=True, kv=(512,)))
    assert "V·d + T·d + L(12d² + 13d) + 2d" in words(asked) and "KV cache" in words(asked[0])
    assert "quality" in words(gptkit.recommend("quality", "125M"))
    assert "llama" in words(gptkit.open_checkpoint("sample:llama"))
    assert "only in A" in words(gptkit.diff("sample:llama", "sample:gpt2"))


def test_values_of_every_kind_are_drawn() -> None:
    for name in gptkit.__all__:  # what they return is defined where they are
        getattr(gptkit, name)
    assert {kind.__name__ for kind in Shown.__subclasses__()} == set(DRAWN)


@pytest.mark.parametrize("spec", [preset_spec("gpt2"), preset_spec("llama-3.1-405b"), *TREES.values()])
def test_a_repr_is_short(spec: ModelSpec) -> None:
    told = repr(spec)
    assert len(told) < 2500 and len(told.splitlines()) <= 14
    assert f"{sum(each.count for each in spec.parameters()):,} parameters" in told
    assert "Attention(heads " in told


def test_reprs_of_results_are_a_line() -> None:
    (count,) = gptkit.params("llama-3.1-405b")
    for value in (count, count.count, gptkit.compare("gpt2"), gptkit.open_checkpoint("sample:llama")):
        assert len(repr(value)) < 400 and "\n" not in repr(value)


def test_names_from_outside_are_text() -> None:
    (count,) = gptkit.params("gpt2")
    named = type(count)("<script>alert(1)</script>", "<b>", count.spec, count.count)
    assert "<script" not in named._repr_html_() and "<script>alert(1)</script>" in words(named)


def test_no_torch_for_a_table() -> None:
    code = (
        "import gptkit\ncounts = gptkit.params('gpt2', 'llama-3-8b')\n"
        "for value in (counts, counts[0], counts[0].spec, counts[0].count, gptkit.compare('gpt2')):\n"
        "    value._repr_html_(), repr(value)"
    )
    assert not imported(code, "torch", "transformers", "numpy", "plotly", "IPython")


def test_progress_takes_what_functions_tell(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines: list[str] = []

    class Kernel:
        kernel = True

    class Handle:
        def update(self, data: dict[str, str], raw: bool) -> None:
            lines.append(data["text/plain"])

    def display(data: dict[str, str], raw: bool, display_id: bool) -> Handle:
        lines.append(data["text/plain"])
        return Handle()

    monkeypatch.setattr("gptkit.report.notebook._OFTEN", 0)
    monkeypatch.setitem(sys.modules, "IPython", type("IPython", (), {"get_ipython": Kernel}))
    monkeypatch.setitem(sys.modules, "IPython.display", type("Display", (), {"display": display}))
    with progress("working") as told:
        told(500)
        told(1500, 8000)
        told("the bytes\x1b[2J")
    assert lines == [
        "working",
        "working: 500 bytes",
        "working: 2.000 kB of 8.000 kB",
        "working: the bytes\\x1b[2J",
        "working: done, 2.000 kB",
    ]
    monkeypatch.setitem(sys.modules, "IPython", None)
    with progress() as told:
        told(1)
    assert capsys.readouterr() == ("", "")


def test_functions_that_take_long_take_progress() -> None:
    done: list[int] = []
    gptkit.load("sample:llama", progress=done.append)
    assert sum(done) == 2 * 652_320 and len(done) == 48
    for function in (gptkit.load, gptkit.convert, gptkit.swap, gptkit.diff, gptkit.verify):
        assert "progress" in inspect.signature(function).parameters


@exhaustive
@pytest.mark.filterwarnings("ignore")
def test_the_example_runs(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat", reason="notebooks need nbclient and ipykernel")
    client = pytest.importorskip("nbclient")
    notebook = nbformat.read(EXAMPLE, as_version=4)
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in notebook.cells)
    client.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [
        "\n".join("".join(output.get("data", {}).values()) + output.get("text", "") for output in cell.outputs)
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]
    told = ["124,439,808", "2V·d", "GQA", "sample:llama", "blocks.0–4", "exact", "k_proj", "identical", ""]
    assert len(shown) == len(told)
    for text, expected in zip(shown, told, strict=True):
        assert expected in html.unescape(text) and text
    assert sum("<pre" in text for text in shown) == 8  # all but the text that the model wrote
    assert all("done" in text for text in (shown[5], shown[7]))
