"""The pages of verify --html: what is on them, that nothing from outside is taken for HTML, and, where a browser is
there, that they draw, answer the mouse and the keyboard, and ask no server for anything.
"""

import base64
import dataclasses
import hashlib
import html.parser
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from helpers.browser import Shown, opened, system_browser
from helpers.command import call
from helpers.families import GROUPED, LLAMA, save_hf
from safetensors.torch import load_file, save_file

from gptkit.errors import UsageError
from gptkit.parity.bisect import Cause, Divergence, Part
from gptkit.parity.compare import LogitDifference
from gptkit.parity.port import PortMatch, PortMistake, PortVerification
from gptkit.parity.score import MistakeScore
from gptkit.parity.stored import BytesVerdict
from gptkit.parity.verify import Noise, Verification
from gptkit.report import pages
from gptkit.report.heatmap import Cell, heatmap
from gptkit.report.pages import Figure, Page, Table, ready, render, write_page
from gptkit.report.verification import port_page, verification_page

pytest.importorskip("plotly", reason='the pages need pip install "gptkit[html]"')

ATTACK = '<script>document.title="taken"</script><img src=x onerror=alert(1)>&amp;"\''
COMPONENTS = ("attention norm", "attention q", "attention mix (positions, scale, mask, softmax)", "feed-forward down")


def parts(layers: int = 3, wrong: int | None = 1) -> tuple[Part, ...]:
    """A model's places: rounding up to layer `wrong`'s attention q, a difference from there on."""
    found = [Part("embedding", "embedding", None, 0.0, 1e-7)]
    for layer in range(layers):
        for index, label in enumerate(COMPONENTS):
            off = wrong is not None and (layer, index) >= (wrong, 1)
            found.append(Part(f"layer {layer} {label}", label, layer, 0.25 if off else 3e-8, 5e-7))
    last = 0.125 if wrong is not None else 4e-8
    return (*found, Part("final norm", "final norm", None, last, 5e-7), Part("head", "head", None, last, 6e-7))


def verification(**fields: Any) -> Verification:
    prompts = (
        LogitDifference("random tokens", 64, 16.5, 1.8, 1.3, 0.328),
        LogitDifference("a\nb", 3, 0.0, 0.0, 0.0, 1.0),
    )
    given: dict[str, Any] = {
        "model": "sample:llama",
        "other": "spoilt",
        "dtype": "float32",
        "attention": "sdpa",
        "prompts": prompts,
        "bytes": BytesVerdict(48, "sample:llama", ("blocks.1.attention.q_proj.weight",)),
        "noise": Noise(2e-6, 1e-6, 3e-6, 16.0, {"float32": (1e-6, 2e-6)}),
        "score": MistakeScore(("q and k swapped", "eps off by ten"), ("norms swapped",), (), 1e-5),
        "divergence": Divergence(parts(), (Cause("swapping q and k", True, 1e-6), Cause("another eps", False, 0.5))),
        "notes": ("not probed past the window",),
    }
    return Verification(**{**given, **fields})


def identical(**fields: Any) -> Verification:
    places = tuple(dataclasses.replace(place, relative=0.0) for place in parts())
    same = {
        "other": None,
        "prompts": (LogitDifference("random tokens", 64, 0.0, 0.0, 0.0, 1.0),),
        "bytes": BytesVerdict(48, "the source", ()),
        "noise": None,
        "divergence": Divergence(places),
    }
    return verification(**{**same, **fields})


class Parsed(html.parser.HTMLParser):
    """The elements of a page, its text, and its scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.words: list[str] = []
        self.inside = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""

    def handle_data(self, data: str) -> None:
        if self.inside == "script":
            self.scripts[-1] += data
        elif self.inside == "wbr":  # the same word goes on
            self.words[-1] += data
        elif self.inside != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def figure_of(page: Page) -> Figure:
    (figure,) = [block for section in page.sections for block in section.blocks if isinstance(block, Figure)]
    return figure


def cells_of(figure: Figure) -> dict[tuple[int, str], tuple[float, str, str]]:
    """What is drawn: (row, column) -> (colour's number, hover, trace's first colour)."""
    found = {}
    for trace in figure.spec["data"]:
        for row, line in enumerate(trace["z"]):
            for column, value in enumerate(line):
                if value is not None:
                    place = (row, trace["x"][column])
                    assert place not in found
                    found[place] = (value, trace["hovertext"][row][column], trace["colorscale"][0][1])
    return found


# --- what is on a page ------------------------------------------------------------------------------------------------


def test_a_page_has_all_that_was_found() -> None:
    text = Parsed(render(verification_page(verification()))).text
    for words in (
        "spoilt verified against sample:llama in transformers",
        "✗ Different",
        "1.6e+01",
        "layer 1 attention q: the first component that differs by more than rounding.",
        "swapping q and k restores parity",
        "another eps leaves 5.0e-01",
        "random tokens 64 1.6e+01 1.8e+00 1.3e+00 32.8%",
        "47 of 48 tensors equal sample:llama.",
        "blocks.1.attention.q_proj.weight",
        "rounding explains up to 4.0e-06",
        "transformers: sdpa against eager, in float32 3.0e-06",
        "3 of 3 mistakes made on purpose were caught",
        "norms swapped not visible on this checkpoint, caught with random weights",
        "not probed past the window",
        "gptkit verify",
    ):
        assert words in text, words


def test_the_figure_has_every_place_with_its_rounding() -> None:
    page = verification_page(verification())
    figure = figure_of(page)
    cells = cells_of(figure)
    assert len(cells) == len(parts())
    names = figure.spec["layout"]["yaxis"]["ticktext"]
    inside = ["attention norm", "attention q", "attention mix", "feed-forward down"]
    assert names == ["embedding", *inside, "final norm", "head"]
    assert figure.spec["data"][0]["x"] == ["in", "0", "1", "2", "out"]
    value, hover, colour = cells[2, "1"]
    assert math.isclose(value, math.log10(0.25))
    assert hover == (
        "<b>layer 1 attention q</b><br>relative difference: 2.5e-01<br>rounding there: 5.0e-07"
        "<br>more than rounding explains"
    )
    assert colour == "var(--cell-0)"
    assert cells[0, "in"][2] == "var(--zero)"
    assert cells[1, "0"][2] == "var(--rounding)"
    (frame,) = figure.spec["layout"]["shapes"]
    assert (frame["x0"], frame["y0"]) == (1.5, 1.5)
    # The same figures as a table, the first place lit.
    assert len(figure.table.rows) == len(cells)
    (lit,) = figure.table.lit
    assert figure.table.rows[lit] == ("layer 1 attention q", "2.5e-01", "5.0e-07", "first difference")


def test_identical_models_are_said_to_be_and_their_zeros_have_a_colour() -> None:
    page = verification_page(identical())
    assert page.good and page.verdict == "Identical to the last bit"
    assert {colour for _, _, colour in cells_of(figure_of(page)).values()} == {"var(--zero)"}
    text = Parsed(render(page)).text
    assert "Every component gives the same numbers to the last bit" in text
    assert "exactly 0 at all 15 places" in text
    assert "cause" not in text
    # What rounds apart in float64 is neither zero nor a difference.
    rounded = verification_page(identical(divergence=Divergence(parts(wrong=None))))
    colours = [colour for _, _, colour in cells_of(figure_of(rounded)).values()]
    assert set(colours) == {"var(--zero)", "var(--rounding)"}
    assert "Components are compared in float64" in Parsed(render(rounded)).text


def test_a_verdict_that_did_not_pass_for_another_reason_says_so() -> None:
    page = verification_page(identical(bytes=BytesVerdict(2, "a", ("x",))))
    assert not page.good and page.verdict.endswith("but the bytes differ")
    page = verification_page(identical(score=MistakeScore((), (), ("eps off by ten",), 1e-5)))
    assert not page.good and page.verdict.endswith("but the probe missed mistakes")
    assert "eps off by ten MISSED" in Parsed(render(page)).text


def test_without_places_there_is_no_figure_and_no_script() -> None:
    page = render(verification_page(verification(divergence=None)))
    parsed = Parsed(page)
    assert "components were not compared" in parsed.text
    assert parsed.scripts == [] and "script-src 'none'" in page
    assert len(page) < 50_000


def test_values_that_are_no_numbers_are_drawn_and_told() -> None:
    places = (*parts()[:-1], Part("head", "head", None, math.inf, math.inf))
    figure = figure_of(verification_page(verification(divergence=Divergence(places))))
    value, hover, _ = cells_of(figure)[6, "out"]
    assert value == 0  # the end of the scale
    assert "not a number" in hover
    json.dumps(figure.spec, allow_nan=False)
    nan = LogitDifference("n", 1, math.nan, math.nan, math.nan, math.nan)
    assert "nan" in Parsed(render(verification_page(verification(prompts=(nan,))))).text


def test_a_component_that_one_layer_alone_has_stands_where_it_is_computed() -> None:
    order = ["embedding", "q", "down", "q", "q norm", "down", "head"]
    layers = [None, 0, 0, 1, 1, 1, None]
    cells = [Cell(name, layer, 1.0, (), True) for name, layer in zip(order, layers, strict=True)]
    figure = heatmap(cells, title="t", summary="s", measure="m", table=Table("t", (), ()))
    assert figure.spec["layout"]["yaxis"]["ticktext"] == ["embedding", "q", "q norm", "down", "head"]


def test_figures_in_cells_are_as_they_are_read() -> None:
    """Two digits where there is room for them; a place that cannot be compared has a mark, and a colour of its own."""
    told = {0.0: "0", 1.1: "1.1", 2.0: "2.0", 55.6: "56", 0.123: "0.12", 0.0994: "0.10", 0.996: "1.0", 999.6: "1e3"}
    told |= {0.03: "3e-2", 3e-5: "3e-5", math.inf: "–"}
    cells = [Cell("q", layer, value, (), True) for layer, value in enumerate(told)]
    figure = heatmap(
        [*cells, Cell("k", 0, 0.0, (), True, apart="A")], title="t", summary="s", measure="m", table=Table("t", (), ())
    )
    words = {kind: trace["text"] for kind, trace in zip(("0", "counts", "apart"), figure.spec["data"], strict=True)}
    assert words["counts"][0][1:] == list(told.values())[1:] and words["0"][0][0] == "0"
    assert words["apart"][1][0] == "A" and "A" not in str(words["counts"])
    assert [key.style for key in figure.keys] == ["zero", "counts", "apart"]


def test_many_layers_get_narrow_columns_without_figures() -> None:
    few, many = (figure_of(verification_page(verification(divergence=Divergence(parts(n))))) for n in (4, 40))
    assert few.spec["data"][0]["texttemplate"] == "%{text}"
    assert "texttemplate" not in many.spec["data"][0]
    assert many.width < 40 * 25


def test_a_port_has_a_page_too() -> None:
    places = parts()
    matches = tuple(PortMatch(place, None if place.label == "head" else f"layers.{ATTACK}") for place in places)
    prompt = LogitDifference("one token", 1, 0.5, 0.1, 0.0, 1.0)
    result = PortVerification("sample:llama", "my_port:build", (prompt,), 0.5, 1e-6, (1e-7, 1e-7), matches)
    page = port_page(result)
    assert not page.good
    text = Parsed(render(page)).text
    assert "layer 1 attention q: the first component that no module of yours computes." in text
    assert "gptkit verify sample:llama --against my_port:build" in text
    cells = cells_of(figure_of(page))
    assert "your module: none has an output of its size" in cells[6, "out"][1]
    assert "not found: gptkit tried 0 known mistakes one at a time" in text
    told = dataclasses.replace(
        result,
        causes=(PortMistake("RoPE on queries alone", False, 0.25, part="this place"),),
        notes=(f"not probed: {ATTACK}",),
    )
    text = Parsed(render(port_page(told))).text
    assert "RoPE on queries alone: it explains this place, but the logits still differ by 2.5e-01" in text
    assert f"not probed: {ATTACK}" in text
    assert "<script" not in cells[2, "1"][1]
    same = dataclasses.replace(
        result, functions=0.0, matches=(), prompts=(LogitDifference("one token", 1, 0, 0, 0, 1.0),)
    )
    assert port_page(same).good and "functions are the same" in Parsed(render(port_page(same))).text


# --- what comes from outside ------------------------------------------------------------------------------------------


def hostile() -> Verification:
    """Whatever may come from outside is HTML."""
    return verification(
        model=ATTACK,
        other=f"/tmp/{ATTACK}\u202e\x1b[31m\udce9",
        prompts=(LogitDifference(ATTACK, 1, 1.0, 1.0, 1.0, 1.0),),
        bytes=BytesVerdict(1, ATTACK, (ATTACK,)),
        notes=(ATTACK, "</script><script>1</script>"),
        divergence=Divergence((Part(ATTACK, ATTACK, 0, 1.0, 0.0),), (Cause(ATTACK, True, 0.0),)),
    )


def test_names_and_prompts_are_text() -> None:
    page = render(verification_page(hostile()))
    parsed = Parsed(page)
    assert len(parsed.scripts) == 3  # the figure's data, plotly, the page's own
    assert not parsed.all("img")
    assert parsed.text.count(ATTACK) >= 7
    assert "\u202e" not in page and "\x1b" not in page
    assert all("onerror" not in attributes for _, attributes in parsed.elements)
    spec = json.loads(parsed.scripts[0])
    assert "<script" not in json.dumps(spec)


def test_nothing_is_loaded_and_no_other_script_runs() -> None:
    page = render(verification_page(verification()))
    parsed = Parsed(page)
    for tag, attributes in parsed.elements:
        assert "src" not in attributes, tag
        assert tag not in ("iframe", "object", "embed", "base", "form")
    assert [link["href"] for link in parsed.all("link")] == ["data:,"]
    style = page[page.index("<style>") : page.index("</style>")]
    assert "url(" not in style and "@import" not in style
    (policy,) = [each["content"] for each in parsed.all("meta") if each.get("http-equiv")]
    assert policy is not None and policy.startswith("default-src 'none';")
    allowed = re.findall(r"'sha256-([^']+)'", policy)
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in parsed.scripts[1:]]
    assert allowed == digests
    assert "unsafe" not in policy[policy.index("script-src") : policy.index("style-src")]


def test_it_is_for_everybody() -> None:
    page = render(verification_page(verification()))
    parsed = Parsed(page)
    assert parsed.all("html")[0]["lang"] == "en"
    assert any(each.get("name") == "viewport" for each in parsed.all("meta"))
    assert "prefers-color-scheme: dark" in page
    picture = next(each for each in parsed.all("div") if each.get("class") == "picture")
    assert picture["role"] == "application" and picture["tabindex"] == "0"
    named = {each["id"] for _, each in parsed.elements if "id" in each}
    assert picture["aria-label"] and picture["aria-describedby"] in named
    assert all(each.get("aria-labelledby") in named for each in parsed.all("section"))
    regions = [each for each in parsed.all("div") if each.get("class") == "scroll"]
    # A table that scrolls takes the focus itself, a figure does inside.
    assert len([each for each in regions if each.get("tabindex") == "0" and each["aria-label"]]) == len(regions) - 1
    assert len(parsed.all("caption")) == len(parsed.all("table")) >= 5
    assert all(each.get("scope") in ("col", "row") for each in parsed.all("th"))
    style = page[page.index("<style>") : page.index("</style>")]
    light, dark = (set(re.findall(r"--[\w-]+(?=:)", part)) for part in style.split("@media")[:2])
    assert light == dark
    assert set(re.findall(r"var\((--[\w-]+)\)", json.dumps(json.loads(parsed.scripts[0])))) <= light


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_page_is_written_whole_and_over_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "page.html"
    target.write_text("old")
    write_page(verification_page(identical()), target)
    assert "Identical to the last bit" in target.read_text()
    assert list(tmp_path.iterdir()) == [target]
    umask = os.umask(0o022)
    os.umask(umask)
    assert target.stat().st_mode & 0o777 == 0o666 & ~umask

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    before = target.read_bytes()
    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(UsageError, match=r"cannot write .*page\.html: No space left"):
        write_page(verification_page(identical()), target)
    assert target.read_bytes() == before and list(tmp_path.iterdir()) == [target]


def test_a_link_keeps_being_one(tmp_path: Path) -> None:
    (tmp_path / "link.html").symlink_to(tmp_path / "real.html")
    write_page(verification_page(verification(divergence=None)), tmp_path / "link.html")
    assert (tmp_path / "link.html").is_symlink() and (tmp_path / "real.html").is_file()


@pytest.mark.parametrize("name", ["no/page.html", ".", "/dev/null", "x" * 300])
def test_what_cannot_be_written_is_refused_first(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = call("verify", "no-such-model", "--html", name)
    assert run.exit_code == 2, run.output
    assert "cannot write" in run.stderr


def test_a_package_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "find_spec", lambda name: None if name == "plotly" else object())
    with pytest.raises(UsageError, match="--html needs plotly") as told:
        ready(tmp_path / "page.html")
    assert told.value.hint == "Install: pip install plotly, or pip install 'gptkit[html]'."
    monkeypatch.setattr(pages, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="--html needs jinja2 and plotly") as told:
        ready(tmp_path / "page.html")
    assert told.value.hint.startswith("Install: pip install jinja2 plotly, ")


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pages as the command writes them (identical; one tensor off, in a folder with a bad name), and a hostile one."""
    folder = tmp_path_factory.mktemp("pages")
    right, spoilt = folder / "tiny", folder / "<script>alert(1)<x>"
    save_hf({**LLAMA, **GROUPED}, right)
    shutil.copytree(right, spoilt)
    tensors = load_file(spoilt / "model.safetensors")
    name = "model.layers.1.self_attn.k_proj.weight"
    tensors[name] = tensors[name].flip(0).contiguous()
    save_file(tensors, spoilt / "model.safetensors", metadata={"format": "pt"})
    found = {name: folder / f"{name}.html" for name in ("same", "different", "hostile")}
    quick = ["--no-mutations", "-q"]
    run = call("verify", str(right), "--html", str(found["same"]), *quick)
    assert run.exit_code == 0, run.output
    if system_browser() is not None and find_spec("kaleido") is not None:
        quick += ["--svg", str(folder / "different.svg")]
    run = call("verify", str(right), str(spoilt), "--html", str(found["different"]), *quick)
    assert run.exit_code == 3, run.output
    assert run.stdout == ""
    write_page(verification_page(hostile()), found["hostile"])
    return found


def test_verify_writes_pages(written: dict[str, Path]) -> None:
    different, same = (Parsed(written[name].read_text()) for name in ("different", "same"))
    assert "layer 1 attention k: the first component that differs" in different.text
    assert "restores parity" in different.text
    assert "/<script>alert(1)<x> verified against" in different.text and len(different.scripts) == 3
    assert "Identical to the last bit" in same.text
    assert "more than rounding" not in same.text
    assert all(path.stat().st_size < 6_000_000 for path in written.values())


def test_verify_draws_a_picture(written: dict[str, Path]) -> None:
    picture = written["different"].with_suffix(".svg")
    if not picture.exists():
        pytest.skip("no Chromium on the PATH, or no kaleido")
    words = re.findall(r"<text[^>]*>([^<]+)</text>", picture.read_text())
    assert {"layer", "in", "0", "1", "2", "out", "embedding", "head", "the first place that differs"} <= set(words)
    assert "<image" not in picture.read_text()


@pytest.mark.exhaustive
def test_a_port_of_ones_own_gets_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ported_page.py").write_text(
        "import gptkit\n\n\ndef build():\n    model = gptkit.load('sample:gpt2', 'float32')\n"
        "    model.blocks[1].feed_forward.down_proj.weight.data *= 1.5\n    return model\n"
    )
    monkeypatch.chdir(tmp_path)
    run = call("verify", "sample:gpt2", "--against", "ported_page:build", "--html", "port.html")
    sys.modules.pop("ported_page", None)
    assert run.exit_code == 3, run.output
    assert "page: port.html" in run.stdout
    text = Parsed((tmp_path / "port.html").read_text()).text
    assert "layer 1 feed-forward down: the first component that no module of yours computes" in text


# --- in a browser -----------------------------------------------------------------------------------------------------


@pytest.fixture
def show(browser: Any, written: dict[str, Path]) -> Iterator[Any]:
    """Opens one of the pages; what it says on the console and asks for is kept."""
    windows = []

    def shown(name: str, *screen: str, **more: Any) -> Shown:
        windows.append(opened(browser, written[name], *screen, **more))
        return windows[-1]

    yield shown
    for window in windows:
        window.context.close()


@pytest.mark.parametrize(
    ("name", "screen", "scheme"),
    [
        ("same", "wide", "dark"),
        ("same", "phone", "light"),
        ("different", "wide", "light"),
        ("different", "phone", "dark"),
    ],
)
def test_it_draws(show: Any, name: str, screen: str, scheme: str) -> None:
    shown = show(name, screen, scheme)
    assert shown.said == shown.asked == []
    assert shown.page.title().endswith("Identical to the last bit" if name == "same" else "Different")
    # Nothing is wider than the screen but what scrolls by itself, and the whole figure is inside it here.
    widths = "[document.documentElement.scrollWidth, innerWidth, ...[...document.querySelectorAll('figure > .scroll')]"
    page, screen_width, inner, outer = shown.page.evaluate(f"{widths}.flatMap(e => [e.scrollWidth, e.clientWidth])]")
    assert page == screen_width and inner == outer
    ground, ink = shown.page.evaluate(
        "[getComputedStyle(document.body).backgroundColor, document.querySelector('.picture .ytick text').style.fill]"
    )
    brightness = [sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in (ground, ink)]
    assert (brightness[0] > brightness[1]) == (scheme == "light")
    shown.keep(f"verify-{name}-{screen}-{scheme}")


def test_what_comes_from_outside_runs_nothing(show: Any) -> None:
    shown = show("hostile")
    assert shown.said == shown.asked == []
    assert shown.page.title() != "taken"
    label = shown.page.locator(".picture .ytick").text_content()
    assert "".join(label.split()) == "".join(ATTACK.split())  # on two lines


def test_a_change_of_light_is_followed(show: Any) -> None:
    from playwright.sync_api import expect

    shown = show("different")
    tick = shown.page.locator(".picture .ytick text").first
    before = tick.evaluate("each => getComputedStyle(each).fill")
    shown.page.emulate_media(color_scheme="dark")
    expect(tick).not_to_have_css("fill", before)
    assert shown.said == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_figures_in_cells_can_be_read(show: Any, scheme: str) -> None:
    shown = show("different", "wide", scheme)
    words = shown.page.locator(".picture .scatterlayer .textpoint text")
    assert words.count() == 36
    # Along the whole scale, by the page's own code, the ink that it takes stands out (WCAG 1.4.3).
    worst = shown.page.evaluate(
        """() => {
          const { data, layout } = painted(pictures[0].figure, getComputedStyle(document.documentElement));
          const found = [];
          for (const trace of data) for (let part = 0; part <= 1; part += 0.005) {
            const [low, high] = [trace.zmin ?? 0, trace.zmax ?? 1], value = low + part * (high - low);
            const cell = { ...trace, x: ["0"], z: [[value]], text: [["1"]], texttemplate: "t" };
            const drawn = inked([cell], layout);
            const [ground, ink] = [luminance(shade(trace, value)), drawn[1].textfont.color[0] === "#ffffff" ? 1 : 0];
            found.push((Math.max(ground, ink) + 0.05) / (Math.min(ground, ink) + 0.05));
          }
          return [found.length, Math.min(...found)];
        }"""
    )
    assert worst[0] > 150 and worst[1] > 4.5


def test_pointing_shows_the_figures(show: Any) -> None:
    shown = show("different")
    plot = shown.page.locator(".picture .nsewdrag")
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    # Five columns, of which layer 1 is the third. The rows: embedding, attention norm, q, k of fourteen.
    shown.page.mouse.move(box["x"] + box["width"] * 2.5 / 5, box["y"] + box["height"] * 3.5 / 14)
    hover = shown.page.locator(".picture .hovertext")
    hover.wait_for()
    text = hover.text_content()
    assert "layer 1 attention k" in text
    assert "relative difference:" in text and "rounding there:" in text
    assert shown.said == []


def test_the_picture_zooms(show: Any) -> None:
    from playwright.sync_api import expect

    shown = show("different")
    ticks = shown.page.locator(".picture .xtick")
    before = ticks.count()
    shown.page.locator(".picture").hover()
    shown.page.locator("[data-title='Zoom in']").click()
    expect(ticks).not_to_have_count(before)
    shown.page.locator("[data-title='Reset axes']").click()
    expect(ticks).to_have_count(before)
    titles = shown.page.locator(".modebar-btn").evaluate_all("all => all.map(each => each.dataset.title)")
    assert not any("share" in title.lower() for title in titles)
    assert shown.said == []


def test_names_of_layers_stand_over_their_columns(show: Any) -> None:
    shown = show("different", reduced_motion="reduce")
    where = "all => all.map(e => [e.textContent, e.getBoundingClientRect()]).map(([t, b]) => [t, b.x + b.width / 2])"
    middles = dict(shown.page.locator(".picture .xtick").evaluate_all(where))
    assert list(middles) == ["in", "0", "1", "2", "out"]
    shown.page.locator(".picture").focus()
    for key, column in (("Home", "in"), ("End", "out")):
        shown.page.keyboard.press(key)
        box = shown.page.locator(".cursor").bounding_box()
        assert abs(box["x"] + box["width"] / 2 - middles[column]) < 2


def test_arrow_keys_move_over_the_cells(show: Any) -> None:
    shown = show("different")
    line, frame = shown.page.locator(".under"), shown.page.locator(".cursor")
    assert line.get_attribute("role") == "status"
    shown.page.keyboard.press("Tab")
    assert "Arrow keys move" in line.inner_text()
    assert not frame.is_visible()
    told = []
    for key in ("ArrowDown", "ArrowDown", "ArrowDown", "ArrowRight", "ArrowLeft", "ArrowUp", "End"):
        shown.page.keyboard.press(key)
        told.append(line.inner_text().partition(" · ")[0])
    assert told[:3] == ["embedding", "layer 0 attention norm", "layer 0 attention q"]
    assert told[3:] == ["layer 1 attention q", "layer 0 attention q", "layer 0 attention norm", "head"]
    assert "relative difference:" in line.inner_text()
    # plotly's own label says the same.
    assert "head" in shown.page.locator(".picture .hovertext").text_content()
    assert frame.is_visible()
    shown.page.keyboard.press("Escape")
    assert not frame.is_visible() and line.inner_text() == ""
    shown.page.keyboard.press("Tab")  # plotly's own buttons
    assert shown.page.evaluate("document.activeElement.className").startswith("modebar-btn")
    assert shown.said == []


def test_every_cell_is_reached_by_arrow_keys(show: Any) -> None:
    shown = show("different")
    # All moves from every cell, through the page's own code: breadth first.
    reached = shown.page.evaluate(
        """() => {
          const picture = pictures[0], cells = picture.cells(), seen = new Set([cells[0]]);
          for (const from of seen) for (const way of Object.values(ARROWS)) seen.add(beside(from, cells, way) || from);
          return [seen.size, cells.length];
        }"""
    )
    assert reached[0] == reached[1] == 36


def test_the_keyboard_reaches_everything(show: Any) -> None:
    shown = show("different")
    focus = "(e => [e.tagName, e.getAttribute('aria-label') || e.textContent])(document.activeElement)"
    reached = []
    for _ in range(40):
        shown.page.keyboard.press("Tab")
        tag, name = shown.page.evaluate(focus)
        if tag == "BODY":
            break
        reached.append((tag, name.strip()))
        if tag == "SUMMARY" and name.strip().endswith("as a table"):
            shown.page.keyboard.press("Enter")  # opens the figure's table
            assert shown.page.locator("figure details").get_attribute("open") is not None
    names = [name for _, name in reached]
    assert "Difference by component and layer" in names
    assert any(tag == "DIV" and name.endswith("as a table") for tag, name in reached)  # the table, once open
    assert "Logits by input" in names
    assert any(tag == "PRE" for tag, _ in reached)
    rows = shown.page.locator("figure details tbody tr")
    assert rows.count() == 36
    assert "first difference" in shown.page.locator("figure details tr.lit").inner_text()
