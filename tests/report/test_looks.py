"""How pages look: what is bold is told, colours span the data, areas are named, models stand side by side."""

import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from helpers.browser import opened

import gptkit
from gptkit.parity.damage import Damage, DamageBin, LayerDamage
from gptkit.report.comparison import comparison_page
from gptkit.report.counts_page import counts_page
from gptkit.report.damage import damage_sections
from gptkit.report.heatmap import Cell, heatmap
from gptkit.report.pages import Figure, Page, Table, render, write_page
from gptkit.report.treemap import treemap

pytest.importorskip("plotly", reason='the pages need pip install "gptkit[html]"')

SEVERAL = ("gpt2", "llama-2-7b", "falcon-7b")


def damaged() -> Page:
    bins = (DamageBin(0, 0, 2, 0.5, 0.5, 90.0, 120.0), DamageBin(1, 1, 2, 0.1, 1.0, 8.0, 8.0))
    layers = (
        LayerDamage(0, 0, 0.0, 0.2, 1.0, (0.3, 0.1), 50.0, 50.0),
        LayerDamage(1, 1, 0.2, 0.25, 0.75, (0.5, 0.2), 27, 31),
    )
    found = Damage("4 tokens of text", "float64", DamageBin(0, 1, 4, 0.25, 0.75, 27.0, 31.0), bins, layers, (), ())
    return Page("t", "s", "", None, (), damage_sections(found))


def compared() -> Page:
    found = gptkit.compare(*SEVERAL)
    return comparison_page(found, found.shown())


PAGES = {
    "params": lambda: counts_page(gptkit.params("qwen3-8b")),
    "several": lambda: counts_page(gptkit.params(*SEVERAL)),
    "compare": compared,
    "damage": damaged,
}


# --- bold rows --------------------------------------------------------------------------------------------------------


def tables(page: Page) -> list[Table]:
    blocks = [block for section in page.sections for block in section.blocks]
    return [
        block.table if isinstance(block, Figure) else block for block in blocks if isinstance(block, Table | Figure)
    ]


@pytest.mark.parametrize("name", PAGES)
def test_bold_rows_have_a_legend(name: str) -> None:
    page = PAGES[name]()
    lit = [table for table in tables(page) if table.lit]
    assert lit
    text = render(page)
    for table in lit:
        assert table.bold, table.caption
        assert f"<b>Bold</b>: {table.bold}" in text
    assert text.count("<b>Bold</b>:") == len(lit)


# --- heat maps --------------------------------------------------------------------------------------------------------


def colours(*values: float) -> tuple[dict[str, Any], list[float]]:
    """The trace of what counts, and how far along the scale each of its cells is."""
    cells = [Cell("a", layer, value, (), True) for layer, value in enumerate(values)]
    figure = heatmap(cells, title="t", summary="s", measure="m", table=Table("t", (), ()))
    (trace,) = figure.spec["data"]
    (row,) = trace["z"]
    return trace, [(value - trace["zmin"]) / (trace["zmax"] - trace["zmin"]) for value in row]


@pytest.mark.parametrize("scale", [1e-6, 1e-2, 1.0, 1e5])
def test_colours_span_the_data(scale: float) -> None:
    _, parts = colours(*(scale * value for value in (1.0, 3.0, 8.0)))
    assert parts[0] == pytest.approx(0) and parts[-1] == pytest.approx(1)


def test_what_is_nearly_alike_looks_alike() -> None:
    _, parts = colours(0.100, 0.101, 0.102)
    assert max(parts) - min(parts) < 0.1


@pytest.mark.parametrize(
    "values",
    [(0.03, 0.07), (0.11, 0.14), (1e-8, 1.0), (2e-3, 0.9), (0.5,), (3.0, math.inf), (math.inf,), (7e-9, 7.1e-9)],
)
def test_the_scale_names_values_on_it(values: tuple[float, ...]) -> None:
    trace, parts = colours(*values)
    bar = trace["colorbar"]
    assert 2 <= len(bar["tickvals"]) <= 9 and len(set(bar["ticktext"])) == len(bar["ticktext"])
    assert all(trace["zmin"] - 1e-6 <= tick <= trace["zmax"] + 1e-6 for tick in bar["tickvals"])
    assert all(low < high for low, high in pairwise(bar["tickvals"]))
    assert all(-1e-9 <= part <= 1 + 1e-9 for part in parts)


# --- areas ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "llama-3-8b", "falcon-7b", "llama-3.1-405b", "qwen3-0.6b"])
def test_small_layers_are_one_area_that_opens(name: str) -> None:
    (model,) = gptkit.params(name)
    (trace,) = treemap(name, model.spec).spec["data"]
    numbers = dict(zip(trace["ids"], trace["values"], strict=True))
    inside: dict[str, list[str]] = {}
    for place, parent in zip(trace["ids"], trace["parents"], strict=True):
        inside.setdefault(parent, []).append(place)
    for place, number in numbers.items():
        assert place not in inside or number == sum(numbers[each] for each in inside[place]), place
    for component in ("/attention", "/feed-forward"):
        drawn = inside[component]
        assert len(drawn) == 1 or min(numbers[place] for place in drawn) >= model.count.total / 60
        layers = sum(len(inside[place]) if "-" in place.rpartition("/")[2] else 1 for place in drawn)
        assert layers == len(model.spec.blocks)


# --- axes and diagrams ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PAGES)
def test_axes_have_titles(name: str) -> None:
    for figure in PAGES[name]().figures():
        if figure.title.endswith("layers") or figure.spec["data"][0]["type"] == "treemap":
            continue  # a diagram, and areas, which have no axes
        layout, kind = figure.spec["layout"], figure.spec["data"][0]["type"]
        wanted = ("xaxis",) if kind == "bar" else ("xaxis", "yaxis")  # beside bars stand the models' names
        assert all(layout[axis]["title"]["text"] for axis in wanted), figure.title


@pytest.mark.parametrize("name", ["several", "compare"])
def test_models_layers_stand_side_by_side(name: str) -> None:
    sections = [section for section in PAGES[name]().sections if section.side_by_side]
    (section,) = sections
    assert [block.title.partition(":")[0] for block in section.blocks if isinstance(block, Figure)] == list(SEVERAL)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("looks")
    for name in ("compare", "params"):
        write_page(PAGES[name](), folder / f"{name}.html")
    return {path.stem: path for path in folder.iterdir()}


@pytest.fixture
def show(browser: Any, written: dict[str, Path]) -> Iterator[Any]:
    windows = []

    def shown(name: str, *screen: str) -> Any:
        windows.append(opened(browser, written[name], *screen))
        return windows[-1]

    yield shown
    for window in windows:
        window.context.close()


def hinted(shown: Any) -> list[list[bool]]:
    """Of each hint, but for what is folded away: whether it shows, and whether there is reason to."""
    found = """all => all.filter(each => !each.closest('details:not([open])')).map(each =>
      [each.offsetHeight > 0, each.nextElementSibling.scrollWidth > each.nextElementSibling.clientWidth])"""
    result: list[list[bool]] = shown.page.locator(".sideways").evaluate_all(found)
    return result


def test_a_hint_says_that_a_table_scrolls(show: Any) -> None:
    """Where it does and nowhere else; the rows' names stay in sight."""
    phone, wide = hinted(show("compare", "phone")), hinted(show("compare", "wide"))
    assert all(shown == scrolls for shown, scrolls in (*phone, *wide))
    assert sum(shown for shown, _ in phone) >= 2 and not wide[0][0]
    shown = show("compare", "phone")
    left = shown.page.evaluate(
        "() => { const area = document.querySelector('.scroll'); area.scrollLeft = 200;"
        " return area.querySelector('tbody th').getBoundingClientRect().x - area.getBoundingClientRect().x; }"
    )
    assert abs(left) < 1


def test_diagrams_stand_in_a_row(show: Any) -> None:
    boxes = (
        show("compare")
        .page.locator(".side-by-side figure")
        .evaluate_all("all => all.map(each => each.getBoundingClientRect()).map(({x, y}) => [x, y])")
    )
    assert len(boxes) == len(SEVERAL)
    assert len({y for _, y in boxes}) == 1 and len({x for x, _ in boxes}) == len(boxes)


@pytest.mark.parametrize("screen", ["wide", "phone"])
def test_areas_of_layers_are_named(show: Any, screen: str) -> None:
    """Each in sight of attention and feed-forward, whatever the screen."""
    shown = show("params", screen)
    areas = """() => [...document.querySelectorAll('.treemaplayer .trace > g.slice')]
      .map(each => [each.__data__.data.id, each.querySelector('text')?.textContent ?? ''])
      .filter(([id]) => /^.(attention|feed-forward).[0-9-]+$/.test(id))"""
    named = shown.page.evaluate(f"({areas})()")
    assert len(named) > 20 and all(text.startswith("layer") for _, text in named), named
