"""show: what it prints, as words and as JSON, which models it takes, and its page in a browser."""

import io
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.browser import Shown, opened
from helpers.command import call
from helpers.covering import examples
from helpers.drawn_specs import specs
from helpers.families import CONFIGS, LLAMA, QWEN2, WINDOWED, spec_of
from helpers.processes import imported
from hypothesis import given, settings
from rich.console import Console

import gptkit
from gptkit.analysis.params import ModelCount
from gptkit.components import ModelSpec, to_json
from gptkit.report.pages import render
from gptkit.report.show import kinds_differ, model_drawing, show_json, show_page
from gptkit.report.structure import structure

ATTACK = '<script>document.title="taken"</script><img src=x onerror=alert(1)>'


def run(*words: str | Path, code: int = 0, columns: int = 80) -> str:
    result = call("show", *words, env={"COLUMNS": str(columns), "NO_COLOR": "1"})
    assert result.exit_code == code, result.output
    return result.stderr if code else result.stdout


def config_of(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# --- words ------------------------------------------------------------------------------------------------------------


def test_a_pickle_that_is_allowed(tmp_path: Path) -> None:
    gptkit.convert("sample:gpt2", tmp_path / "out", "nanogpt_tanh")
    told = run(tmp_path / "out", code=4)
    assert "Pass --allow-pickle to read the file" in told
    assert "q_proj" in run(tmp_path / "out", "--allow-pickle")


def test_it_prints_the_tree_and_the_path() -> None:
    text = run("qwen3-8b")
    for words in (
        "36 layers · hidden size 4,096",
        "│  ├─ q_proj          [4,096 × 4,096]                      16,777,216",
        "total                                                   8,190,735,360",
        "each of 36 layers ┐",
        "32 q heads, 4 to each kv head",
        "qqqq qqqq qqqq qqqq qqqq qqqq qqqq qqqq",
        "weights are",
    ):
        assert words in text, words
    assert "\x1b" not in text and max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("columns", [24, 40, 60, 200])
def test_it_fits_the_columns(columns: int) -> None:
    for name in ("mixtral-8x7b", "bloom-176b"):
        assert max(map(len, run(name, columns=columns).splitlines())) <= columns


def test_what_letters_mean_is_told_once() -> None:
    for columns in (30, 40, 80):
        assert " ".join(run("falcon-7b", columns=columns).split()).count("B sequences, T tokens") == 1


def test_layers_that_differ_are_told_and_each_can_be_drawn(tmp_path: Path) -> None:
    model = config_of(tmp_path, {**QWEN2, **WINDOWED})
    text = run(model)
    assert "blocks.0–2" in text and "3 of one shape, each" in text  # windows are no shapes
    assert "layers 1–2: window 16 (--layer 1)" in text
    assert "softmax, causal, last 16" not in text and "layer 0 ┐" in text
    windowed = run(model, "--layer", "2")
    assert "causal, last 16" in windowed and "layers 1–2 ┐" in windowed
    assert "q_proj          [" not in windowed  # the path alone
    assert run(model, "--layer", "1") == windowed


def test_many_kinds_are_folded_where_only_words_differ(tmp_path: Path) -> None:
    text = run(config_of(tmp_path, {**CONFIGS["gpt2-by-layer"], "n_layer": 12}))
    assert "12 of one shape, each" in text and text.count("q_proj  ") == 1 + 1  # in the tree, and drawn
    assert "layers differ" in text and "layer 7: attention" in text and "4 more kinds of layers" in text


def test_a_layer_that_is_not_there_is_refused() -> None:
    for layer in ("12", "-1"):
        assert f"gpt2 has no layer {layer}" in run("gpt2", "--layer", layer, code=2)
    assert "0 to 11" in run("gpt2", "--layer", "12", code=2)


def test_what_params_takes_it_takes(tmp_path: Path) -> None:
    assert "falcon-7b" in run("falcon-7b", "--offline")
    assert "[97 × 48]" in run(config_of(tmp_path, LLAMA))
    assert "total" in run("sample:bloom")
    tree = {"schema_version": 1, "origin": {}, "spec": to_json(spec_of(CONFIGS["mixtral"]))}
    (tmp_path / "tree.json").write_text(json.dumps(tree))
    assert "4 experts" in run(tmp_path / "tree.json")
    assert "Did you mean" in run("qwen3-8c", code=4)


def test_names_out_of_files_are_text() -> None:
    (model,) = gptkit.params("gpt2")
    graph = structure(model.spec)
    hostile = ModelCount("a\x1b[31m\u202e[b]", ATTACK, model.spec, None, (ATTACK,))
    file = io.StringIO()
    Console(file=file, width=80).print(model_drawing(hostile, graph, graph.kinds[0], None))
    assert "a?[31m?[b]" in file.getvalue() and "\x1b" not in file.getvalue()
    pytest.importorskip("plotly", reason='pages need pip install "gptkit[html]"')
    page = render(show_page(hostile, graph, graph.kinds))
    assert "<img" not in page and "\u202e" not in page


def test_it_needs_no_torch() -> None:
    script = "from gptkit.cli import app; app(['show', 'mixtral-8x7b'], standalone_mode=False)"
    assert not imported(script, "torch", "numpy", "transformers", "plotly", "jinja2")


# --- JSON -------------------------------------------------------------------------------------------------------------


def test_json_has_the_tree_nodes_and_edges() -> None:
    data = json.loads(run("mixtral-8x7b", "--json"))
    assert data["schema_version"] == 1 and data["total"] == 46_702_792_704
    top = [row for row in data["tree"] if row["depth"] == 0]
    assert sum(row["parameters"] * row["copies"] for row in top) == data["total"]
    (path,) = data["paths"]
    assert path["layers"] == list(range(32))
    nodes = {node["id"]: node for node in path["nodes"]}
    gate = nodes["feed_forward.experts.gate_proj"]
    assert gate["weights"] == {"weight": [14_336, 4_096]} and gate["copies"] == 8 and gate["in_block"]
    assert gate["parameters"] == 8 * 14_336 * 4_096
    assert nodes["x"]["in_block"] and not nodes["embedding"]["in_block"]
    assert {"from": "x", "to": "attention_output", "kind": "residual"} in path["edges"]
    assert {"from": "feed_forward.chosen", "to": gate["id"], "kind": "choice"} in path["edges"]
    assert {edge[end] for edge in path["edges"] for end in ("from", "to")} == nodes.keys()


def test_json_of_layers_that_differ(tmp_path: Path) -> None:
    model = config_of(tmp_path, {**QWEN2, **WINDOWED})
    assert [path["layers"] for path in json.loads(run(model, "--json"))["paths"]] == [[0], [1, 2]]
    assert [path["layers"] for path in json.loads(run(model, "--json", "--layer", "1"))["paths"]] == [[1, 2]]


@settings(deadline=None, max_examples=examples(20))
@given(specs())
def test_any_tree_is_json_and_a_page(spec: ModelSpec) -> None:
    pytest.importorskip("plotly", reason='pages need pip install "gptkit[html]"')
    model, graph = ModelCount("m", "", spec), structure(spec)
    data = json.loads(json.dumps(show_json(model, graph, graph.kinds), allow_nan=False))
    assert sum(row["parameters"] * row["copies"] for row in data["tree"] if row["depth"] == 0) == data["total"]
    page = show_page(model, graph, graph.kinds)
    assert len(page.sections) == len(graph.kinds) + 2
    assert len(kinds_differ(graph)) == len(graph.kinds)


# --- the page ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    pytest.importorskip("plotly", reason='pages need pip install "gptkit[html]"')
    folder = tmp_path_factory.mktemp("show")
    (folder / "windowed").mkdir()
    windowed = str(config_of(folder / "windowed", {**QWEN2, **WINDOWED}))
    found = {}
    for name in ("gpt2", "falcon-40b", "mixtral-8x7b", windowed):
        page = folder / f"{Path(name).name}.html"
        run(name, "--html", page)
        found[page.stem] = page
    return found


def test_the_page_has_the_diagrams_and_the_tree(written: dict[str, Path]) -> None:
    text = written["windowed"].read_text()
    assert text.count('class="picture"') == 2
    assert "The data&#39;s path through layer 0" in text and "The data&#39;s path through layers 1–2" in text
    assert "window 16" in text and "feed_forward.gate_proj" in text


@pytest.fixture
def show(browser: Any, written: dict[str, Path]) -> Iterator[Any]:
    windows = []

    def shown(name: str, *screen: str) -> Shown:
        windows.append(opened(browser, written[name], *screen, reduced_motion="reduce"))
        return windows[-1]

    yield shown
    for window in windows:
        window.context.close()


RECTANGLES = "all => all.map(e => e.getBoundingClientRect()).map(b => [b.left, b.top, b.right, b.bottom])"


@pytest.mark.parametrize(
    ("name", "screen", "scheme"),
    [("gpt2", "phone", "light"), ("falcon-40b", "phone", "dark"), ("windowed", "wide", "dark")],
)
def test_it_draws_with_words_in_their_boxes(show: Any, name: str, screen: str, scheme: str) -> None:
    """As wide as this browser's font makes them: the boxes were made by an estimate."""
    shown = show(name, screen, scheme)
    assert shown.said == shown.asked == []
    page, window = shown.page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert page == window
    inside = "all => all.map(each => [each.scrollWidth, each.clientWidth])"
    assert all(inner <= outer for inner, outer in shown.page.locator("figure > .scroll").evaluate_all(inside))
    picture = shown.page.locator(".picture").first
    words = picture.locator(".annotation text").evaluate_all(RECTANGLES)
    assert len(words) > 40
    for one, other in itertools.combinations(words, 2):
        across = min(one[2], other[2]) - max(one[0], other[0])
        down = min(one[3], other[3]) - max(one[1], other[1])
        assert across < 1 or down < 3, (one, other)  # a line's letters have air above and below
    whole = picture.evaluate_all(RECTANGLES)
    assert all(within(word, whole) for word in words)
    # The block's own ground is no box; on it stand the layers and x, and the token ids above it.
    boxes = [box for box in picture.locator(".shapelayer path").evaluate_all(RECTANGLES) if box[3] - box[1] < 200]
    assert sum(not within(word, boxes) for word in words) <= 3
    shown.keep(f"show-{name}-{screen}-{scheme}")


def within(word: list[float], boxes: list[list[float]]) -> bool:
    x0, y0, x1, y1 = word
    return any(box[0] <= x0 + 1 and x1 <= box[2] + 1 and box[1] <= y0 + 1 and y1 <= box[3] + 1 for box in boxes)


def test_pointing_and_a_keyboard_tell_shape_parameters_and_formula(show: Any) -> None:
    shown = show("mixtral-8x7b")
    router = shown.page.locator(".annotation text", has_text="router").first
    router.scroll_into_view_if_needed()
    box = router.bounding_box()
    shown.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 4)
    label = shown.page.locator(".picture .hovertext").first
    label.wait_for()
    text = label.text_content()
    for words in ("feed_forward.router", "output (B, T, 8)", "weight [8 × 4,096]", "32,768 parameters", "x·Wᵀ"):
        assert words in text, words
    shown.page.locator(".picture").first.focus()
    told = []
    for key in ("Home", *["ArrowDown"] * 12, "End"):
        shown.page.keyboard.press(key)
        told.append(shown.page.locator(".under").first.inner_text().partition(" · ")[0])
    assert told[0] == "tokens" and "embedding" in told and len(set(told)) > 8 and told[-1] == "head"
    assert shown.said == []
    shown.keep("show-mixtral-8x7b-wide-light")
