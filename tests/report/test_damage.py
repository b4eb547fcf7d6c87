"""The damage report as people get it: on a page in a browser, in the terminal, as JSON; and what is refused."""

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.browser import SCREENS, opened
from helpers.command import call
from helpers.covering import exhaustive
from helpers.held import Held
from helpers.trees import TREES, random_weights
from typer.testing import Result

from gptkit.parity.damage import Damage, DamageBin, LayerDamage, Place, damage
from gptkit.report.damage import damage_lines, damage_sections, swap_page
from gptkit.report.pages import Figure, Lines, Page, Table, render
from gptkit.report.surgery import steps_cells
from gptkit.surgery.swap import assess, swap

pytest.importorskip("plotly", reason='the pages need pip install "gptkit[html]"')

ATTACK = '<script>document.title="taken"</script>'


def gptkit(*words: object) -> Result:
    return call(*words)


@pytest.fixture(scope="module", autouse=True)
def short() -> Iterator[None]:
    """A text of few tokens, of which each takes a pass in fp64."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gptkit.parity.damage._TEXT", 256)
        yield


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a swap, its report, and the page of its verification."""
    folder = tmp_path_factory.mktemp("damage")
    run = gptkit(
        "swap", "sample:gpt2", folder / "rms", "--norm", "rmsnorm", "--approximate", "--report", folder / "swap.html"
    )
    assert run.exit_code == 0, run.output
    (folder / "swap.txt").write_text(run.stdout)
    quick = ("--no-mutations", "--html", folder / "verify.html")
    run = gptkit("verify", "sample:gpt2", folder / "rms", *quick)
    assert run.exit_code == 3, run.output
    (folder / "verify.txt").write_text(run.stdout)
    return folder


def sample_damage(**fields: Any) -> Damage:
    bins = (DamageBin(0, 0, 2, 0.5, 0.5, 90.0, 120.0), DamageBin(1, 1, 2, 1e-12, 1.0, 8.0, 8.0))
    given: dict[str, Any] = {
        "on": "4 tokens of text",
        "dtype": "float64",
        "total": DamageBin(0, 1, 4, 0.25, 0.75, 27.0, 31.0),
        "bins": bins,
        "layers": (
            LayerDamage(0, 0, 0.0, 0.0, 1.0, (0.0, 0.0), 50.0, 50.0),
            LayerDamage(1, 1, 0.2, 0.25, 0.75, (0.5, 1e-12), 27, 31),
        ),
        "places": (
            Place("embedding", None, 0.0, False),
            Place("attention", 0, 1e-16, False),
            Place("attention", 1, 0.1, True),
            Place("feed-forward", 1, 0.3, True),
            Place("whole block", 1, 0.9, True),
        ),
        "notes": ("a note",),
    }
    return Damage(**{**given, **fields})


def page_of(found: Damage) -> str:
    return render(Page("title", "subtitle", "verdict", False, (), damage_sections(found)))


# --- what is said -----------------------------------------------------------------------------------------------------


def test_the_terminal_has_the_worst_of_it() -> None:
    lines = damage_lines(sample_damage())
    text = "\n".join(lines)
    assert max(map(len, lines)) <= 80
    for words in (
        "KL 2.5e-01 nats per token, top-1 75.0%",
        "on 4 tokens of text",
        "perplexity 27.00 -> 31.00",
        "KL 5.0e-01 at 0, the worst",
        "layer 1: KL 2.5e-01, streams by 2.0e-01",
        "layer 1 attention: the first that differs by itself, by 1.0e-01",
        "layer 1 feed-forward: differs most by itself, by 3.0e-01",
        "note: a note",
    ):
        assert words in text, words


def test_what_is_not_there_is_left_out() -> None:
    total = DamageBin(0, 0, 1, 0.25, 1.0)
    found = sample_damage(layers=(), places=(), bins=(total,), total=total, notes=())
    assert len(damage_lines(found)) == 2
    (section,) = damage_sections(found)
    assert section.title == "Change by position"  # without a text nobody knows whether it is for the worse
    nothing = sample_damage(places=(Place("embedding", None, 0.0, False),))
    assert any("begins    nowhere" in line for line in damage_lines(nothing))
    assert "None differs by more than rounding" in page_of(nothing)


@pytest.mark.parametrize(
    ("before", "after", "called"),
    [(27.0, 31.0, "damage"), (27.0, 26.0, "change"), (27.0, 27.0, "change"), (27.0, math.nan, "damage")],
)
def test_damage_is_what_is_worse(before: float, after: float, called: str) -> None:
    """A perplexity that improved was not damaged, and neither was one that stayed."""
    found = sample_damage(total=DamageBin(0, 1, 4, 0.25, 0.75, before, after))
    other = {"damage", "change"} - {called}
    assert damage_lines(found)[0].startswith(f"{called}    KL")
    titles = [section.title for section in damage_sections(found)]
    assert f"{called.capitalize()} by layer" in titles
    assert not any(title.lower().startswith(tuple(other)) for title in titles)


def test_a_thousand_layers_are_three_lines() -> None:
    layers = tuple(LayerDamage(n, n, None, n / 1000, 0.5, (0.0, 0.0)) for n in range(1000))
    lines = damage_lines(sample_damage(layers=layers))
    assert len(lines) < 20
    assert any("(the worst 3 of 1000)" in line for line in lines)
    assert any("layer 999: KL" in line for line in lines)


def test_figures_have_their_table() -> None:
    sections = {section.title: section.blocks for section in damage_sections(sample_damage())}
    lens = next(block for block in sections["Damage by layer"] if isinstance(block, Figure))
    assert lens.table.rows == (("0", "0", "0"), ("1", "5.0e-01", "1.0e-12"))
    drawn = [value for trace in lens.spec["data"] for line in trace["z"] for value in line if value is not None]
    assert len(drawn) == 4
    assert {key.words for key in lens.keys} == {"exactly 0", "within rounding", "more than rounding explains"}
    born = next(block for block in sections["Where it begins"] if isinstance(block, Figure))
    assert [row[0] for row in born.table.rows] == [place.name for place in sample_damage().places]
    assert born.table.lit == {2}
    positions = next(block for block in sections["Damage by position"] if isinstance(block, Table))
    assert positions.lit == {0}
    assert positions.rows[-1][0] == "all"


def test_what_is_no_number_is_shown_as_none() -> None:
    nan = math.nan
    total = DamageBin(0, 1, 4, nan, 0.0, 27.0, math.inf)
    layers = (LayerDamage(0, 0, nan, nan, 0.0, (nan, nan), 27.0, math.inf),)
    places = (Place("embedding", None, nan, True),)
    found = sample_damage(total=total, bins=(total, total), layers=layers, places=places)
    assert "nan" in page_of(found)
    assert any("nan" in line for line in damage_lines(found))
    assert json.loads(json.dumps(found.as_json(), allow_nan=False))["total"]["after"] is None


def test_a_note_runs_nothing() -> None:
    page = page_of(sample_damage(notes=(ATTACK,)))
    assert ATTACK not in page
    assert "&lt;script&gt;document.title" in page


def test_a_mixture_has_a_page() -> None:
    tree = Held(TREES["both"], random_weights(TREES["both"]))
    after = tree.changed("blocks.0.feed_forward.router.weight", lambda w: w.flip(0))
    found = damage(tree, after, text=[i % 97 for i in range(40)])
    assert found.first is not None
    assert found.first.name == "layer 0 feed-forward"
    assert "layer 0 feed-forward" in page_of(found)


# --- the commands -----------------------------------------------------------------------------------------------------


def test_swap_writes_a_report(made: Path) -> None:
    text = (made / "swap.txt").read_text()
    assert "change    KL" in text or "damage    KL" in text
    assert "perplexity 24" in text
    assert f"report: {made / 'swap.html'}, {made / 'swap.json'}" in text
    data = json.loads((made / "swap.json").read_text())
    assert data["guarantee"] == "approximate"
    assert data["damage"]["first"] == "layer 0 attention"
    assert len(data["damage"]["layers"]) == 4
    assert data["damage"]["total"]["positions"] == 256
    page = (made / "swap.html").read_text()
    assert "swapped from sample:gpt2" in page
    assert "\u2717" not in page and 'class="verdict good"' not in page  # it is what was asked for, and not exact
    assert "Where it begins" in page


@pytest.mark.exhaustive
def test_verify_shows_it_for_a_changed_tree(made: Path) -> None:
    text = (made / "verify.txt").read_text()
    assert "on 256 tokens of text, in float64" in text
    assert "begins    layer 0 attention" in text
    page = (made / "verify.html").read_text()
    assert "Damage by layer" in page
    swapped = json.loads((made / "swap.json").read_text())["damage"]
    run = gptkit("verify", "sample:gpt2", made / "rms", "--no-mutations", "--json", "--stream")
    assert run.exit_code == 3
    assert json.loads(run.stdout)["damage"] == swapped
    run = gptkit("verify", "sample:gpt2", made / "rms", "--no-mutations", "--json", "--no-damage")
    assert json.loads(run.stdout)["damage"] is None


@pytest.mark.exhaustive
def test_an_exact_swap_has_no_damage(tmp_path: Path) -> None:
    run = gptkit("swap", "sample:gpt2", tmp_path / "rms", "--norm", "rmsnorm", "--report", tmp_path / "report", "-q")
    assert run.exit_code == 0, run.output
    assert run.stdout == ""
    found = json.loads((tmp_path / "report.json").read_text())["damage"]
    assert found["total"]["kl"] < 1e-12
    assert found["total"]["before"] == pytest.approx(found["total"]["after"], rel=1e-9)
    assert any("different bases" in note for note in found["notes"])
    assert "The same function" in (tmp_path / "report.html").read_text()


@pytest.mark.exhaustive
def test_dropped_layers_stand_beside_those_that_stayed(tmp_path: Path) -> None:
    run = gptkit("swap", "sample:gpt2", tmp_path / "out", "--layers", "0,2-3", "--report", tmp_path / "report")
    assert run.exit_code == 0, run.output
    assert "note: not compared: the original's layer 1" in run.stdout
    found = json.loads((tmp_path / "report.json").read_text())["damage"]
    assert [(each["before"], each["after"]) for each in found["layers"]] == [(0, 0), (2, 1), (3, 2)]
    assert found["layers"][0]["kl"] < 1e-12 < found["layers"][1]["kl"]


@pytest.mark.exhaustive
def test_added_layers_stand_for_nothing(tmp_path: Path) -> None:
    run = gptkit("swap", "sample:gpt2", tmp_path / "out", "--layers", "+2", "--report", tmp_path / "report")
    assert run.exit_code == 0, run.output
    found = json.loads((tmp_path / "report.json").read_text())["damage"]
    assert len(found["layers"]) == 4
    assert all(each["kl"] < 1e-12 for each in found["layers"])
    assert not any(each["differs"] for each in found["places"])
    assert any("not compared: the other's layers" in note for note in found["notes"])


@pytest.mark.exhaustive
def test_a_tree_of_the_same_kind_is_asked_about(made: Path, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("To be, or not to be, that is the question. " * 3)
    run = gptkit("verify", "sample:gpt2", "sample:falcon", "--no-mutations", "--text", tmp_path / "short.txt")
    assert run.exit_code == 3
    assert "tokens of text" in run.stdout
    run = gptkit("verify", "sample:gpt2", "sample:gpt2", "--no-mutations", "--damage", "--json")
    assert run.exit_code == 0
    assert json.loads(run.stdout)["damage"]["total"]["kl"] < 1e-14
    run = gptkit("verify", "sample:gpt2", "sample:gpt2", "--no-mutations", "--json")
    assert json.loads(run.stdout)["damage"] is None


def test_bad_requests_are_refused_before_the_work(tmp_path: Path) -> None:
    run = gptkit("swap", "sample:gpt2", tmp_path / "out", "--norm", "rmsnorm", "--report", tmp_path / "no" / "page")
    assert run.exit_code == 2
    assert "no such folder" in run.stderr
    assert not (tmp_path / "out").exists()
    run = gptkit("verify", "sample:gpt2", "--damage")
    assert run.exit_code == 2
    assert "ORIGINAL CHANGED --damage" in run.stderr


# --- in a browser -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "screen", "scheme"),
    [("swap", "wide", "light"), ("swap", "phone", "dark"), ("verify", "phone", "light"), ("verify", "wide", "dark")],
)
def test_it_draws(browser: Any, made: Path, name: str, screen: str, scheme: str) -> None:
    shown = opened(browser, made / f"{name}.html", screen, scheme)
    assert shown.page.locator(".picture .heatmaplayer").count() == (2 if name == "swap" else 3)
    assert shown.said == shown.asked == []
    # Nothing is wider than the screen but what scrolls by itself.
    assert shown.page.evaluate("document.documentElement.scrollWidth") == SCREENS[screen]["viewport"]["width"]
    labels = " ".join(shown.texts(".picture .ytick"))
    assert "at 64–127" in labels
    assert "feed-forward" in labels
    shown.keep(f"damage-{name}-{screen}-{scheme}")
    shown.context.close()


def test_fields_are_what_the_docs_say() -> None:
    names = {each.name for each in dataclasses.fields(Damage)}
    assert set(sample_damage().as_json()) == names | {"first", "most"}


@exhaustive
def test_the_page_of_several_steps_has_what_each_costs_by_itself(tmp_path: Path) -> None:
    done = swap("sample:llama", tmp_path / "out", attention="mha", quantize="int4")
    columns, rows, _ = steps_cells(done)
    assert [row[1] for row in rows] == ["--attention mha", "--quantize int4"] and columns[-1][0] == "perplexity"
    page = swap_page(done, assess(done, None))
    steps, table = page.sections[0], page.sections[0].blocks[-1]
    assert steps.title == "Step by step" and isinstance(table, Table)
    assert table.rows == tuple(rows) and [heading for heading, _ in table.columns] == [name for name, _ in columns]
    assert isinstance(steps.blocks[0], Lines) and steps.blocks[0].lines[0].startswith(
        "Each step compared with the one before"
    )
