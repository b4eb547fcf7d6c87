"""The page of params: what is on it, and that a mouse, a finger and a keyboard get everywhere on it."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.browser import Shown, opened
from helpers.command import call

import gptkit
from gptkit.analysis.costs import costs
from gptkit.analysis.figures import Scenario
from gptkit.report.counts_page import counts_page
from gptkit.report.pages import Figure, Lines, Page, Table, render, write_page

pytest.importorskip("plotly", reason='the pages need pip install "gptkit[html]"')

ATTACK = '<script>document.title="taken"</script><img src=x onerror=alert(1)>'


def blocks(page: Page, kind: type[Any]) -> list[Any]:
    return [block for section in page.sections for block in section.blocks if isinstance(block, kind)]


# --- what is on it ----------------------------------------------------------------------------------------------------


def test_one_model() -> None:
    (model,) = gptkit.params("mixtral-8x7b")
    page = counts_page([model])
    facts = dict(page.facts)
    assert facts["parameters"] == f"{model.count.total:,}" == "46,702,792,704"
    assert facts["used per token"] == f"{costs(model.spec).active:,}"
    assert facts["KV cache per token, bfloat16"] == "131 kB"  # 2 · 32 layers · 8 heads · 128 · 2 bytes
    assert [each.title for each in blocks(page, Figure)] == [
        "Parameters of mixtral-8x7b",
        "Block diagram, each of 32 layers",
        "Key-value cache by context",
        "FLOPs per token by component",
    ]
    (components,) = [each for each in blocks(page, Table) if each.caption == "Parameters by component"]
    (total,) = components.lit
    assert components.rows[total] == ("total", "", "46,702,792,704", "100.0 %")
    assert components.columns[1] == ("what it is", False)
    assert "verdict" not in render(page).partition("<main>")[2].partition("</header>")[0]


def test_a_dtype_of_the_cache_and_more_sections() -> None:
    asked = Scenario(kv_dtype="float32", memory=True)
    page = counts_page(gptkit.params("gpt2", asked=asked), asked)
    assert dict(page.facts)["KV cache per token, float32"] == "73.7 kB"
    assert any(section.title.startswith("Memory for 1,024 tokens") for section in page.sections)


def test_what_was_asked_for_is_in_the_charts() -> None:
    """int4, two contexts and a batch: each is in a chart, not only in the tables below."""
    asked = Scenario("int4", kv=(8192, 131_072), memory=True, context=4096, batch=4)
    (model,) = gptkit.params("llama-3-8b", asked=asked)
    page = counts_page([model], asked)
    figures = {each.title: each for each in blocks(page, Figure)}
    weights = figures["Weights by component, int4"].spec["data"]
    assert sum(trace["x"][0] for trace in weights if trace["type"] == "bar") == model.count.total // 2
    memory = figures["Memory to run, weights in int4, cache in bfloat16"]
    by_part = {trace["name"]: trace["x"] for trace in memory.spec["data"] if trace["type"] == "bar"}
    assert by_part["weights"] == [model.count.total // 2] * 3
    assert by_part["KV cache"] == [4 * tokens * 131_072 for tokens in (4096, 8192, 131_072)]
    assert by_part["activations"][0] > 0 and by_part["activations"][1:] == [0, 0]
    assert memory.table is not None and "4 × 131,072 tokens" in memory.table.rows[2][0]
    (line,) = figures["Key-value cache by context"].spec["data"]
    there = dict(zip(line["x"], line["y"], strict=True))
    assert there[131_072] == 4 * 131_072 * 131_072 and there[8192] == there[131_072] // 16
    marked = [x for x, symbol in zip(line["x"], line["marker"]["symbol"], strict=True) if symbol == "diamond"]
    assert marked == [8192, 131_072]
    assert "The cache of 4 sequences" in figures["Key-value cache by context"].summary
    plain = counts_page(gptkit.params("llama-3-8b"))
    assert not [each.title for each in blocks(plain, Figure) if "Memory" in each.title or "Weights" in each.title]


def test_one_context_for_all_of_a_page() -> None:
    (model,) = gptkit.params("qwen3-8b", asked=Scenario(flops=True))
    (asked,) = gptkit.params("qwen3-8b", asked=Scenario(flops=True, context=1000))
    for count, told in ((model, 40_960), (asked, 1000)):
        page = counts_page([count])
        assert any(
            f"one token that sees {told:,} tokens," in line for each in blocks(page, Lines) for line in each.lines
        )
        assert blocks(page, Figure)[-1].table.rows[0][-1] == f"{costs(count.spec, told).total_flops:,}"
    models = gptkit.params("gpt2", "qwen3-8b", asked=Scenario(flops=True, context=2000))
    page = counts_page(models)
    (flops,) = [each for each in blocks(page, Figure) if each.title.startswith("FLOPs")]
    assert [row[0] for row in flops.table.rows] == ["qwen3-8b"]
    assert "gpt2 has fewer positions than that." in render(page)


def test_several_models() -> None:
    models = gptkit.params("gpt2", "llama-2-7b")
    page = counts_page(models)
    titles = [each.title for each in blocks(page, Figure)]
    assert titles[:2] == ["Parameters by component", "Shares by component"]  # 124M and 6.7B
    assert titles.count("Parameters of gpt2") == titles.count("Parameters of llama-2-7b") == 1
    assert "1,024" in next(line for each in blocks(page, Lines) for line in each.lines)  # FLOPs at one context for both
    alike = counts_page(gptkit.params("llama-2-7b", "mistral-7b"))
    assert "Shares by component" not in [each.title for each in blocks(alike, Figure)]


@pytest.mark.exhaustive
def test_very_many_models_have_a_short_title() -> None:
    models = gptkit.params("gpt2") * 40
    page = counts_page(models)
    assert page.title == "40 models"
    assert len(blocks(page, Figure)) == 3 + 2 * 40  # of each its areas and its block


def test_notes_are_on_it() -> None:
    models = [dataclasses.replace(each, notes=("a note",)) for each in gptkit.params("gpt2", "gpt2-medium")]
    assert "a note" in render(counts_page(models[:1]))
    assert "gpt2-medium: a note" in render(counts_page(models))


def test_the_command_writes_it(tmp_path: Path) -> None:
    run = call("params", "gpt2", "--flops", "--memory", "--html", str(tmp_path / "page.html"))
    assert run.exit_code == 0, run.output
    text = (tmp_path / "page.html").read_text()
    assert "124,439,808" in text and "Adam" in text


# --- in a browser -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("counts")
    one, many = gptkit.params("qwen3-8b"), gptkit.params("gpt2", "mistral-7b", "falcon-7b")
    hostile = [dataclasses.replace(each, name=ATTACK, family=ATTACK, notes=(ATTACK,)) for each in many[:2]]
    found = {}
    small = gptkit.params("sample:bloom")
    for name, models in {"one": one, "small": small, "many": many, "hostile": hostile}.items():
        found[name] = folder / f"{name}.html"
        write_page(counts_page(models), found[name])
    return found


@pytest.fixture
def show(browser: Any, written: dict[str, Path]) -> Iterator[Any]:
    windows = []

    def shown(name: str, *screen: str, **more: Any) -> Shown:
        windows.append(opened(browser, written[name], *screen, **{"reduced_motion": "reduce", **more}))
        return windows[-1]

    yield shown
    for window in windows:
        window.context.close()


def areas(shown: Shown) -> list[str]:
    """Labels of the areas in sight, the largest's first; the bar that leads back is not among them."""
    found = """all => all.map(e => [e.__data__.data.data.label, e.querySelector('path').getBoundingClientRect()])
      .filter(([, box]) => box.width > 2 && box.height > 2).map(([label]) => label)"""
    return shown.page.locator(".treemaplayer .trace > g.slice").evaluate_all(found)


def middle(shown: Shown, place: str) -> tuple[float, float]:
    """Of an area."""
    found = f"""[...document.querySelectorAll('.treemaplayer .trace > g.slice')]
      .find((each) => each.__data__.data.id === '{place}').getBoundingClientRect()"""
    box = shown.page.evaluate(f"JSON.parse(JSON.stringify({found}))")
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


def under(shown: Shown, number: int = 0) -> str:
    return shown.page.locator(".under").nth(number).inner_text()


@pytest.mark.parametrize(
    ("name", "screen", "scheme"),
    [("one", "wide", "light"), ("one", "phone", "dark"), ("many", "wide", "dark"), ("many", "phone", "light")],
)
def test_it_draws(show: Any, name: str, screen: str, scheme: str) -> None:
    shown = show(name, screen, scheme)
    assert shown.said == shown.asked == []
    page, window = shown.page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert page == window
    inside = "all => all.map(each => [each.scrollWidth, each.clientWidth])"
    assert all(inner <= outer for inner, outer in shown.page.locator("figure > .scroll").evaluate_all(inside))
    size = "all => all.map(each => parseFloat(getComputedStyle(each).fontSize))"
    sizes = shown.page.locator(".picture svg text").evaluate_all(size)
    assert min(sizes) >= 10
    shown.keep(f"params-{name}-{screen}-{scheme}")


def test_narrow_areas_have_their_names_and_the_ring_has_room(show: Any) -> None:
    shown = show("one")
    assert {"embedding", "attention", "feed-forward", "head"} <= {
        text.replace("622M", "") for text in shown.texts(".treemaplayer .slicetext")
    }
    ring = """() => { const picture = document.querySelector('.picture'); picture.focus({focusVisible: true});
      const own = getComputedStyle(picture), around = getComputedStyle(picture.parentElement);
      return [own.outlineStyle, parseFloat(own.outlineWidth) + parseFloat(own.outlineOffset),
        parseFloat(around.paddingLeft)]; }"""
    style, needed, room = shown.page.evaluate(ring)
    assert style == "solid" and 0 < needed <= room


def test_per_cents_stay_in_one_piece() -> None:
    page = render(counts_page(gptkit.params("qwen3-8b")))
    assert "feed-forward, 66.4\u00a0%." in page and "xa0" not in page.partition("<script")[0]


def test_names_run_nothing(show: Any) -> None:
    shown = show("hostile")
    assert shown.said == shown.asked == []
    assert shown.page.title() != "taken" and shown.page.locator("img").count() == 0
    assert any(ATTACK in text for text in shown.texts(".treemaplayer .slicetext"))


def test_pointing_tells_and_a_click_opens(show: Any) -> None:
    shown = show("one")
    shown.page.mouse.move(*middle(shown, "/feed-forward/7"))
    label = shown.page.locator(".picture .hovertext").first
    label.wait_for()
    assert "layer 7" in label.text_content() and "150,994,944 parameters" in label.text_content()
    shown.page.mouse.click(*middle(shown, "/feed-forward/7"))
    shown.until("pictures[0].level === '/feed-forward/7'")
    assert {"gate_proj.weight", "up_proj.weight", "down_proj.weight"} <= set(areas(shown))
    assert "attention" not in areas(shown)
    shown.keep("params-opened")
    # The bar above leads back.
    shown.page.locator(".pathbar", has_text="qwen3-8b").first.click()
    shown.until("pictures[0].level === '/'")
    assert "attention" in areas(shown)
    assert shown.said == []


def test_a_finger_opens(show: Any) -> None:
    shown = show("one", "phone")
    shown.page.locator(".picture").first.scroll_into_view_if_needed()
    shown.page.touchscreen.tap(*middle(shown, "/feed-forward/7"))
    shown.until("pictures[0].level === '/feed-forward/7'")
    assert "up_proj.weight" in areas(shown)
    shown.keep("params-opened-phone")


def test_a_keyboard_opens_and_leads_back(show: Any) -> None:
    shown = show("one")
    shown.page.keyboard.press("Tab")
    assert under(shown) == "Arrow keys move, Enter opens, Backspace leads back."
    told = []
    for _ in range(6):
        shown.page.keyboard.press("ArrowRight")
        told.append(under(shown).partition(" · ")[0])
    # Norms, too small to be seen, among them; at the end it stays.
    assert told == ["embedding", "norms", "attention", "feed-forward", "head", "head"]
    shown.page.keyboard.press("Home")
    assert shown.page.locator(".cursor").first.is_visible()
    shown.page.keyboard.press("ArrowRight")  # where nothing is drawn there is no frame either
    assert under(shown).endswith("too small to be drawn") and not shown.page.locator(".cursor").first.is_visible()
    shown.page.keyboard.press("End")
    keys = [("ArrowLeft", "feed-forward"), ("Enter", "layer 0"), ("End", "layer 35"), ("Enter", "gate_proj.weight")]
    keys += [("ArrowRight", "up_proj.weight"), ("Backspace", "layer 35"), ("Escape", "feed-forward")]
    for key, name in keys:
        shown.page.keyboard.press(key)
        shown.until(f"document.querySelector('.under').textContent.startsWith('{name} · ')")
        assert shown.page.locator(".cursor").first.is_visible()
        if name == "up_proj.weight":
            assert "12,288 × 4,096" in under(shown)
            assert "up_proj.weight" in shown.page.locator(".picture .hovertext").first.text_content()
            shown.keep("params-keyboard")
            shown.page.keyboard.press("Enter")
            assert under(shown).endswith("nothing inside")
    shown.page.keyboard.press("Escape")
    assert under(shown) == "" and not shown.page.locator(".cursor").first.is_visible()
    assert shown.said == []


def test_with_motion_it_arrives_too(show: Any) -> None:
    shown = show("one", reduced_motion="no-preference")
    shown.page.locator(".picture").first.focus()
    for key in ("ArrowRight", "End", "ArrowLeft", "Enter", "ArrowRight", "Enter", "Backspace", "Backspace", "Enter"):
        shown.page.keyboard.press(key)  # faster than it moves
    shown.until("pictures[0].level === '/feed-forward' && pictures[0].at === '/feed-forward/0'")
    frame = shown.page.locator(".cursor").first
    cell = shown.page.locator(".treemaplayer .trace > g.slice", has_text="layer 0").first
    where = "e => e.getBoundingClientRect().x"
    for _ in range(50):
        if abs(frame.evaluate(where) - cell.evaluate(where)) < 6:
            break
        shown.page.wait_for_timeout(50)
    assert abs(frame.evaluate(where) - cell.evaluate(where)) < 6
    assert shown.said == []


def test_every_area_is_reached_by_keys(show: Any) -> None:
    shown = show("small")
    reached = shown.page.evaluate(
        """async () => {
          const picture = pictures[0], seen = [];
          const walk = async (level) => {
            await picture.zoom(level, "first");
            const inside = [];
            for (let at = null; at !== picture.at; ) {
              inside.push(at = picture.at);
              const cells = picture.cells();
              picture.move(cells, cells.findIndex((cell) => cell.key === at), [1, 0]);
            }
            seen.push(...inside);
            for (const each of inside) if (picture.nested.parents.includes(each)) await walk(each);
          };
          await walk("/");
          return [new Set(seen).size, picture.nested.ids.length - 1];
        }"""
    )
    assert reached[0] == reached[1] > 30


def test_lines_and_bars_by_keys(show: Any) -> None:
    shown = show("many")
    titles = shown.page.locator(".picture").evaluate_all("all => all.map(e => e.getAttribute('aria-label'))")

    def keys(title: str, *pressed: str) -> list[str]:
        number = titles.index(title)
        shown.page.locator(".picture").nth(number).focus()
        told = []
        for key in pressed:
            shown.page.keyboard.press(key)
            told.append(under(shown, number))
        return told

    lines = keys("Key-value cache by context", "ArrowRight", "ArrowRight", "ArrowUp", "End")
    assert lines[0] == "gpt2 · 128 tokens · 4.72 MB (4,718,592 bytes)"
    assert lines[1].startswith("gpt2 · 256 tokens") and lines[2].startswith("mistral-7b · 256 tokens")
    bars = keys("Parameters by component", "ArrowDown", "ArrowDown", "ArrowRight", "ArrowRight")
    assert bars[0].startswith("gpt2: embedding") and bars[1].startswith("mistral-7b: ")
    assert bars[3].startswith("mistral-7b: ") and bars[3] != bars[1]
    assert len(shown.page.locator(".picture .hovertext").all()) >= 1
    blocks = keys("gpt2: block diagram, each of 12 layers", *["ArrowDown"] * 5)
    assert len(set(blocks)) == 5
    assert shown.said == []


def test_what_is_open_stays_open_when_the_light_changes(show: Any) -> None:
    shown = show("one")
    shown.page.locator(".picture").first.focus()
    for key in ("End", "ArrowLeft", "Enter"):
        shown.page.keyboard.press(key)
    shown.until("pictures[0].at === '/feed-forward/0'")
    fill = ".treemaplayer .trace > g.slice path"
    before = shown.page.locator(fill).first.evaluate("e => getComputedStyle(e).fill")
    shown.page.emulate_media(color_scheme="dark", reduced_motion="reduce")
    shown.until(f"getComputedStyle(document.querySelector('{fill}')).fill !== '{before}'")
    assert "attention" not in areas(shown)
    assert shown.page.evaluate("pictures[0].level") == "/feed-forward"
