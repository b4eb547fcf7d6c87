"""The charts: every figure on them comes from the trees, and what they draw is what they say in words and tables."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from helpers.covering import examples
from helpers.families import CONFIGS, spec_of
from helpers.random_trees import drawn_spec
from hypothesis import given, settings
from hypothesis import strategies as st

from gptkit.analysis.costs import cache_bytes, costs
from gptkit.analysis.parameters import count
from gptkit.architectures.presets import find
from gptkit.components import ModelSpec
from gptkit.errors import UsageError
from gptkit.report import pages
from gptkit.report.charts import DASHES, bars, cache_chart
from gptkit.report.pages import Figure
from gptkit.report.quantities import abbreviated, abbreviated_bytes
from gptkit.report.treemap import treemap

pytest.importorskip("plotly", reason='the pages need pip install "gptkit[html]"')


@st.composite
def specs(draw: Any) -> ModelSpec:
    return drawn_spec(lambda options: draw(st.sampled_from(options)))


def preset(name: str) -> ModelSpec:
    from gptkit.analysis.params import params

    assert find(name) is not None
    return params(name)[0].spec


def held_to_its_tree(figure: Figure, spec: ModelSpec) -> None:
    """Every area is as large as what is in it, and the tensors at the ends are the tree's."""
    (trace,) = figure.spec["data"]
    ids, parents, values = trace["ids"], trace["parents"], trace["values"]
    assert len(set(ids)) == len(ids) == len(values) == len(trace["hovertext"]) == len(trace["text"])
    inside: dict[str, int] = {}
    for parent, value in zip(parents, values, strict=True):
        inside[parent] = inside.get(parent, 0) + value
    size = dict(zip(ids, values, strict=True))
    assert inside.pop("") == size["/"] == count(spec).total
    assert all(size[place] == total for place, total in inside.items())
    # What lies in no layer and what does, each parameter once.
    ends = sum(value for place, value in size.items() if place not in inside)
    assert ends == sum(each.count for each in spec.parameters())
    for component, number in count(spec).by_component.items():
        assert size[f"/{component}"] == number
    assert all(f"{value:,} parameters" in told for value, told in zip(values, trace["hovertext"], strict=True))


@pytest.mark.parametrize("variant", ["gpt2", "llama-3", "qwen3", "mixtral", "bloom", "falcon-rw", "falcon-40b"])
def test_areas_are_as_large_as_what_they_hold(variant: str) -> None:
    spec = spec_of(CONFIGS[variant])
    figure = treemap(variant, spec)
    held_to_its_tree(figure, spec)
    numbers = [int(row[3].replace(",", "")) for row in figure.table.rows]
    assert sum(numbers) == count(spec).total


@settings(max_examples=examples(25), deadline=None)
@given(spec=specs())
def test_areas_of_any_tree(spec: ModelSpec) -> None:
    held_to_its_tree(treemap("tree", spec), spec)


def test_pointing_tells_shapes_and_experts_are_one_area() -> None:
    (trace,) = treemap("mixtral-8x7b", preset("mixtral-8x7b")).spec["data"]
    told = dict(zip(trace["ids"], trace["hovertext"], strict=True))
    assert "8 experts of 14,336 × 4,096" in told["/feed-forward/3/feed_forward.experts.*.up_proj.weight"]
    assert "in layer 3" in told["/feed-forward/3/feed_forward.experts.*.up_proj.weight"]
    assert "32,000 × 4,096" in told["/embedding"]
    assert len(trace["ids"]) < 500


def test_very_many_layers_are_folded() -> None:
    import msgspec

    small = spec_of(CONFIGS["llama"])
    deep = msgspec.structs.replace(small, blocks=small.blocks[:1] * 1000)
    figure = treemap("deep", deep)
    held_to_its_tree(figure, deep)
    (trace,) = figure.spec["data"]
    assert "layers 0–999" in trace["labels"]
    assert len(trace["ids"]) < 40


def test_names_are_text_in_charts() -> None:
    spec, attack = spec_of(CONFIGS["gpt2"]), "<b onclick=1>&\u202e"
    figures = (
        treemap(attack, spec),
        cache_chart([(attack, spec)]),
        bars([(attack, {"attention": 3})], title="Parts", what="parameters"),
    )
    for figure in figures:
        text = json.dumps(figure.spec, ensure_ascii=False)
        assert "<b onclick" not in text and "\u202e" not in text
        assert "&lt;b onclick" in text


# --- the cache --------------------------------------------------------------------------------------------------------


def lines_of(figure: Figure) -> list[dict[int, int]]:
    return [dict(zip(trace["x"], trace["y"], strict=True)) for trace in figure.spec["data"]]


def test_lines_are_the_cache_and_bend_at_windows() -> None:
    models = [(name, preset(name)) for name in ("gpt2", "llama-2-7b", "mistral-7b")]
    figure = cache_chart(models)
    for (_, spec), line in zip(models, lines_of(figure), strict=True):
        assert all(nbytes == cache_bytes(spec, length).nbytes for length, nbytes in line.items())
    gpt2, llama, mistral = lines_of(figure)
    assert max(gpt2) == 1024 and gpt2[1024] == 36 * 2**20  # 2 · 12 layers · 768 · 2 bytes · 1,024 tokens
    assert max(llama) == 4096 and llama[4096] == 2 * 2**30
    assert mistral[8192] == mistral[32768] < 2 * mistral[2048] + 1
    assert "mistral-7b" in figure.summary and "bends" in figure.summary
    assert {axis["type"] for axis in (figure.spec["layout"]["xaxis"], figure.spec["layout"]["yaxis"])} == {"log"}
    assert [row[0] for row in figure.table.rows] == ["gpt2", "llama-2-7b", "mistral-7b"]
    assert figure.table.rows[1][-2:] == ("4,096", "2.15 GB")


def test_ends_of_lines() -> None:
    gpt2, mistral = preset("gpt2"), preset("mistral-7b")
    first, second = lines_of(cache_chart([("a", gpt2), ("b", mistral)], at=[100_000]))
    assert max(first) == 1024  # a table has no more positions
    assert max(second) == 100_000


def test_lines_on_one_another_and_contexts_that_nobody_states_are_told() -> None:
    models = [(name, preset(name)) for name in ("gpt2", "llama-3-8b", "mixtral-8x7b", "bloom-7b1", "mistral-7b")]
    figure = cache_chart(models)
    assert "On one line as far as each goes: llama-3-8b, mixtral-8x7b." in figure.summary  # mistral-7b has a window
    assert "Context not stated, drawn up to 2,048 tokens: bloom-7b1." in figure.summary
    widths = [trace["line"]["width"] for trace in figure.spec["data"]]
    assert widths == [2, 5, 2, 2, 2]  # seen below the other
    assert "On one line" not in cache_chart(models[:2]).summary
    assert "not stated" not in cache_chart(models[:3]).summary


def test_the_cache_has_round_numbers_of_the_tables_unit() -> None:
    axis = cache_chart([("gpt2", preset("gpt2"))]).spec["layout"]["yaxis"]
    assert axis["ticktext"] == ["5 MB", "10 MB", "20 MB"]
    assert cache_chart([("a", preset("mistral-7b"))]).spec["layout"]["yaxis"]["ticktext"][-1] == "500 MB"


def test_dtypes_of_the_cache() -> None:
    spec = preset("gpt2")
    (wide,), (narrow,) = (lines_of(cache_chart([("a", spec)], dtype)) for dtype in ("float32", "int8"))
    assert wide[512] == 4 * narrow[512]
    with pytest.raises(UsageError, match="unknown dtype"):
        cache_chart([("a", spec)], "int3")


def test_many_lines_differ_in_more_than_colour() -> None:
    spec = preset("gpt2")
    figure = cache_chart([(str(n), spec) for n in range(24)])
    drawn = {(trace["line"]["color"], trace["line"]["dash"]) for trace in figure.spec["data"]}
    assert len(drawn) == 24
    assert [key.style.split()[2] for key in figure.keys[:3]] == list(DASHES)


@settings(max_examples=15, deadline=None)
@given(spec=specs())
def test_the_cache_of_any_tree(spec: ModelSpec) -> None:
    figure = cache_chart([("tree", spec)])
    json.dumps(figure.spec, allow_nan=False)
    for axis in ("xaxis", "yaxis"):
        low, high = figure.spec["layout"][axis]["range"]
        assert math.isfinite(low) and low < high
        assert len(figure.spec["layout"][axis]["tickvals"]) <= 8


# --- bars -------------------------------------------------------------------------------------------------------------


def test_bars_add_up() -> None:
    models = [(name, count(preset(name)).by_component) for name in ("gpt2", "bloom-7b1")]
    figure = bars(models, title="Parameters by component", what="parameters")
    for index, (_, numbers) in enumerate(models):
        assert sum(trace["x"][index] for trace in figure.spec["data"] if trace["type"] == "bar") == sum(
            numbers.values()
        )
    assert figure.spec["data"][-1]["text"] == [" 124M", " 7.07B"]  # beside bars that may be too short to be seen
    assert figure.spec["data"][-1]["x"] == [124_439_808, 7_069_016_064]
    assert figure.summary == "From 124,439,808 parameters (gpt2) to 7,069,016,064 (bloom-7b1)."
    assert figure.table.rows[0][-1] == "124,439,808"
    axis = figure.spec["layout"]["xaxis"]
    assert axis["ticktext"][:2] == ["0", "2B"] and 2 <= len(axis["tickvals"]) <= 5
    same = bars(models, title="t", what="parameters", shares=True)
    for index in range(2):
        assert math.isclose(sum(trace["x"][index] for trace in same.spec["data"]), 1)


def test_names_beside_bars_are_short_and_still_apart() -> None:
    names = ["org/llama-2-7b --attention gqa:4", "org/llama-2-7b --attention gqa:8", "/a/b/" + "x" * 40 + "-a", "a"]
    figure = bars([(name, {"a": 1}) for name in names], title="t", what="FLOPs")
    shown = figure.spec["layout"]["yaxis"]["ticktext"]
    assert shown[:2] == ["llama-2-7b<br>--attention gqa:4", "llama-2-7b<br>--attention gqa:8"]
    assert shown[2].startswith("xxx") and shown[2].endswith("-a") and len(shown[2]) == 22
    assert [row[0] for row in figure.table.rows] == names


def test_a_part_keeps_its_colour() -> None:
    models = [("a", dict(costs(preset("mixtral-8x7b"), 100).flops))]
    figure = bars(models, title="FLOPs", what="FLOPs")
    parts = {trace["name"]: trace["marker"]["color"] for trace in figure.spec["data"]}
    (areas,) = treemap("a", preset("mixtral-8x7b")).spec["data"]
    colour = dict(zip(areas["ids"], areas["marker"]["colors"], strict=True))
    assert parts["attention"] == colour["/attention"]
    assert len(set(parts.values())) == len(parts) == 5


@pytest.mark.parametrize(
    ("number", "words"), [(0, "0"), (999, "999"), (1000, "1K"), (124_439_808, "124M"), (8_190_735_360, "8.19B")]
)
def test_short_numbers(number: int, words: str) -> None:
    assert abbreviated(number) == words


def test_bytes_in_words() -> None:
    assert [abbreviated_bytes(n) for n in (5, 1000, 37_748_736, 15 * 10**8)] == ["5 B", "1 kB", "37.7 MB", "1.5 GB"]


# --- colours ----------------------------------------------------------------------------------------------------------


def palettes() -> list[dict[str, str]]:
    style = (Path(pages.__file__).parent / "page.css").read_text(encoding="utf-8")
    light, dark = style.split("@media")[:2]
    return [dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", part)) for part in (light, dark)]


def linear(colour: str) -> list[float]:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def contrast(a: str, b: str) -> float:
    """WCAG 2.2."""
    low, high = sorted(0.2126 * r + 0.7152 * g + 0.0722 * b for r, g, b in map(linear, (a, b)))
    return (high + 0.05) / (low + 0.05)


# Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB.
SIGHTS = {
    "all": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "no red": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "no green": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.01182, 0.04294, 0.968881)),
    "no blue": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.3039)),
}


def seen(colour: str, sight: Any) -> tuple[float, float, float]:
    """OKLab (Ottosson 2020) of a colour as somebody sees it."""
    rgb = linear(colour)
    r, g, b = (min(max(sum(x * y for x, y in zip(row, rgb, strict=True)), 0), 1) for row in sight)
    x = (0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b) ** (1 / 3)
    y = (0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b) ** (1 / 3)
    z = (0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b) ** (1 / 3)
    return (
        0.2104542553 * x + 0.793617785 * y - 0.0040720468 * z,
        1.9779984951 * x - 2.428592205 * y + 0.4505937099 * z,
        0.0259040371 * x + 0.7827717662 * y - 0.808675766 * z,
    )


@pytest.mark.parametrize("palette", palettes(), ids=["light", "dark"])
def test_colours_can_be_told_apart_and_read(palette: dict[str, str]) -> None:
    kinds = [palette[f"c{n}"] for n in range(8)]
    for n, colour in enumerate(kinds):
        assert contrast(colour, palette["ground"]) >= 3  # lines and areas, WCAG 1.4.11
        assert contrast(colour, palette[f"on-c{n}"]) >= 4.5  # text, WCAG 1.4.3
    for sight in SIGHTS.values():
        found = [seen(colour, sight) for colour in kinds]
        nearest = min(math.dist(a, b) for i, a in enumerate(found) for b in found[:i])
        assert nearest > 0.09
    for ink in ("text", "quiet", "link", "good", "bad"):
        grounds = {"good": "good-ground", "bad": "bad-ground"}
        assert contrast(palette[ink], palette[grounds.get(ink, "ground")]) >= 4.5
    assert contrast(palette["text"], palette["raised"]) >= 4.5
