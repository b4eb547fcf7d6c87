"""The documentation: what it shows is what happens, what it names is there, and the site builds without a warning."""

import fcntl
import html
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from helpers.covering import exhaustive, few
from helpers.processes import HANGS
from shown import MARK, agrees, comparable, run, shown

import gptkit
from gptkit import errors
from gptkit.cli import app

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
NAMES = {page: str(page.relative_to(ROOT)) for page in PAGES}
SHOWING = [page for page in PAGES if page.is_relative_to(DOCS) and MARK.search(page.read_text())]


def named(page: Path) -> str:
    return NAMES[page]


# --- outputs ----------------------------------------------------------------------------------------------------------


LONG = {page: pytest.mark.exhaustive for page in SHOWING if page.name in ("tutorial.md", "draft-a-family.md")}
"""Pages that train and heal, or try drafts in processes of their own."""


@few(2)
@pytest.mark.parametrize("page", [pytest.param(page, marks=LONG.get(page, ())) for page in SHOWING], ids=named)
def test_a_page_does_what_it_shows(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for block, command, code, printed in run(shown(page.read_text())):
        assert code == block.code, f"gptkit {command} exits with {code}\n{printed}"
        if block.kind == "output":
            assert agrees(printed, block), f"gptkit {command} prints\n{printed}\nmake shown writes it into the pages"


@pytest.mark.parametrize("page", SHOWING, ids=named)
def test_what_is_shown_fits_a_page(page):
    """As the terminal's 80 columns do."""
    lines = [line for block in shown(page.read_text()) if block.kind == "output" for line in block.output.splitlines()]
    tables = [line for line in lines if not line.startswith(("  ", "note: "))]  # sentences are not wrapped for a file
    assert max((len(line) for line in tables), default=0) <= 80


def test_outputs_that_are_stale_are_told():
    text = "<!-- output: gptkit -h -->\n```\n$ gptkit -h\n\n Usage: gptkit [OPTIONS] COMMAND [ARGS]...\n{}\n```\n"
    outcomes = {}
    for end in ("…", "", "Nonsense\n…"):
        ((block, _, code, printed),) = run(shown(text.format(end)))
        outcomes[end] = (code, agrees(printed, block))
    assert outcomes == {"…": (0, True), "": (0, False), "Nonsense\n…": (0, False)}
    assert comparable("a 1.2e-03 b", "swap x") == comparable("a  9.9e+01 b", "swap x")
    assert comparable("1.2 %", "params x") != comparable("1.3 %", "params x")


def test_a_mark_without_its_block_is_told():
    with pytest.raises(AssertionError, match="before a block"):
        shown("<!-- output: gptkit --version -->\n\nA sentence.\n")
    with pytest.raises(AssertionError, match="another command"):
        shown("<!-- output: gptkit --version -->\n```\n$ gptkit -h\n```\n")


# --- commands ---------------------------------------------------------------------------------------------------------


FENCED = re.compile(r"^```.*?^```", re.M | re.S)
GPTKIT = typer.main.get_command(app)
COMMANDS = GPTKIT.list_commands(None)


def commands_in(text: str) -> Iterator[str]:
    """Every call of gptkit in a page: lines of blocks, and code within sentences."""
    for block in FENCED.findall(text):
        prompt = r"\$ " if "\n$ " in block else ""  # without one all lines are commands
        for line in re.findall(rf"^{prompt}((?:torchrun [^\n]*-m )?gptkit [^\n]*)", block, re.M):
            yield re.sub(r"^torchrun .*-m ", "", line)
    said = (" ".join(code.split()) for code in re.findall(r"`(gptkit\s[^`]+)`", FENCED.sub("", text)))
    yield from (code for code in said if code.partition(" ")[2] not in COMMANDS)


@cache
def parses(command: str) -> str | None:
    """Why the command line takes no such call; None where it does. Nothing is run."""
    words = shlex.split(command, comments=True)[1:]
    wrong = typer.BadParameter.__mro__[1]
    try:
        context = GPTKIT.make_context("gptkit", list(words))
        name, found, rest = GPTKIT.resolve_command(context, words)
        found.make_context(name, rest, parent=context)
    except (typer.Exit, SystemExit):  # --help, --version
        return None
    except wrong as error:
        return str(error.format_message())
    return None


@pytest.mark.parametrize("page", [page for page in PAGES if any(commands_in(page.read_text()))], ids=named)
def test_commands_that_are_named_can_be_called(page):
    wrong = {command: why for command in commands_in(page.read_text()) if (why := parses(command)) is not None}
    assert not wrong


def test_the_parser_of_commands_sees_what_is_wrong():
    assert parses("gptkit params gpt2 --offline") is None
    assert "No such option" in (parses("gptkit params gpt2 --ofline") or "")
    assert parses("gptkit parms gpt2") is not None
    assert parses("gptkit swap sample:gpt2") is not None
    page = "`gptkit load` is one; use `gptkit\nload x`.\n\n```\n$ gptkit check y  # why\ngptkit: no\n```\n"
    assert list(commands_in(page)) == ["gptkit check y  # why", "gptkit load x"]


def test_examples_in_the_helps_can_be_called():
    for name in COMMANDS:
        command = GPTKIT.get_command(None, name)
        examples = re.findall(r"gptkit .*?(?=   \(|$)", command.epilog or "", re.M)
        assert examples, f"{name} has no example"
        assert not {each: why for each in examples if (why := parses(each)) is not None}


# --- names ------------------------------------------------------------------------------------------------------------


def anchors(text: str) -> set[str]:
    """What a link to a page may name: its headings, and its marks `(name)=`."""
    plain = FENCED.sub("", text)
    heads = [re.sub(r"[`*]", "", head) for head in re.findall(r"^#+ (.*)$", plain, re.M)]
    slugs = {re.sub(r"[^\w -]", "", head.lower()).strip().replace(" ", "-") for head in heads}
    return slugs | set(re.findall(r"^\(([\w-]+)\)=$", text, re.M))


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_somewhere(page):
    text = FENCED.sub("", page.read_text())
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        if re.match(r"\w+:", target) or not path:  # the site's build follows names within it, and nobody the web
            continue
        file = (page.parent / path).resolve()
        assert file.exists(), f"{target} in {NAMES[page]}"
        assert not anchor or anchor in anchors(file.read_text()), f"{target} in {NAMES[page]}"


def test_the_reference_is_complete():
    python, wrong = (DOCS / f"reference/{name}.md" for name in ("python", "errors"))
    for name in set(gptkit.__all__) - {"__version__"}:
        assert f".. autofunction:: gptkit.{name}\n" in python.read_text(), name
    for name in (
        name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)
    ):
        assert f".. autoexception:: gptkit.errors.{name}\n" in wrong.read_text(), name
    assert "<!-- generated: commands -->" in (DOCS / "reference/commands.md").read_text()
    assert "<!-- generated: components -->" in (DOCS / "reference/components.md").read_text()


def test_the_tutorial_meets_every_command():
    tutorial = (DOCS / "tutorial.md").read_text()
    assert not [name for name in COMMANDS if f"gptkit {name}" not in tutorial]


def test_extras_that_are_named_exist():
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for page in PAGES:
        for names in re.findall(r'(?:gptkit|"\.)\[([a-z, -]+)\]', page.read_text()):
            assert {name.strip() for name in names.split(",")} <= known.keys(), NAMES[page]
    packages = {re.split("[^a-z0-9]", each)[0] for extra in known.values() for each in extra}
    asked = re.findall(r"`pip install ([a-z0-9 ]+)`", (DOCS / "install.md").read_text())
    assert len(asked) == 3 and {name for names in asked for name in names.split()} <= packages
    told = set(re.findall(r"^- `([\w-]+)` ", (DOCS / "install.md").read_text(), re.M))
    assert told == known.keys()


def test_figures_in_sentences_are_right():
    """Those that neither a command nor the presets tell."""
    norms, swaps = (DOCS / "explanation/norms.md").read_text(), (DOCS / "swaps.md").read_text()
    (row,) = re.findall(r"^\| `--norm rmsnorm` \| gpt2 \|.*$", swaps, re.M)
    before, plain = (round(float(each)) for each in re.findall(r"\d+\.\d\d(?= )", f"{row} ")[-2:])
    assert f"from {before} to {plain}" in " ".join(norms.split())

    x = torch.linspace(-6, 6, 100_001, dtype=torch.float64)
    apart = (torch.nn.functional.gelu(x) - torch.nn.functional.gelu(x, approximate="tanh")).abs().max()
    assert 4.5e-4 < apart < 5e-4
    assert "differ by up to 5e-4" in (DOCS / "explanation/feed-forward.md").read_text()


@pytest.fixture(scope="module")
def generators():
    pytest.importorskip("sphinx", reason='the site needs pip install "gptkit[docs]"')
    sys.path.insert(0, str(DOCS / "_ext"))
    import generated
    import outlines

    yield generated, outlines
    sys.path.remove(str(DOCS / "_ext"))


def test_keys_that_are_explained_are_printed(generators):
    outlines = generators[1]
    text = (DOCS / "reference/json.md").read_text()
    for section in text.split("\n## ")[1:]:
        explained = re.findall(r"^\| `([\w.\[\]]+)` \|", section, re.M)
        printed: set[str] = set()
        for command in re.findall(r"^<!-- generated: json (.*) -->$", section, re.M) if explained else []:
            printed |= {each.replace("[].", "[].") for each in outlines.paths(outlines.printed(command.split()))}
        lacking = {key for key in explained if key.removesuffix("[]") not in printed}
        assert not lacking, section.partition("\n")[0]


def test_keys_are_told_by_their_place(generators):
    paths = set(generators[1].paths({"a": [{"b": 1}, {"c": {"d": []}}], "e": 2}))
    assert paths == {"a", "a[].b", "a[].c", "a[].c.d", "e"}


def test_every_component_is_explained():
    """Each page has a formula, a source, and what the code says: who uses it, what it costs, which swaps change it."""
    listed = (DOCS / "explanation/index.md").read_text().partition(":caption: Components")[2].partition("```")[0]
    pages = re.findall(r"^[\w-]+$", listed, re.M)
    assert len(pages) >= 13
    for page in pages:
        text = (DOCS / f"explanation/{page}.md").read_text()
        assert "$" in text and "arxiv.org/abs/" in text, page
        assert "<!-- generated: users " in text and "<!-- generated: swaps " in text, page
        assert "## What it costs" in text or "## What they cost" in text, page


# --- the site ---------------------------------------------------------------------------------------------------------


def build(source: Path, out: Path) -> subprocess.CompletedProcess[str]:
    words = ["-W", "--keep-going", "-n", "-E", "-q", "-d", str(out / "doctrees"), str(source), str(out / "html")]
    return subprocess.run([sys.executable, "-m", "sphinx", *words], capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site, and what Sphinx said: built once, however many processes run these tests."""
    pytest.importorskip("sphinx", reason='the site needs pip install "gptkit[docs]"')
    run_of_all = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    shared = tmp_path_factory.getbasetemp().parent / f"site-{run_of_all}"
    out = shared if run_of_all else tmp_path_factory.mktemp("site")
    out.mkdir(exist_ok=True)
    said = out / "said.json"
    with (out / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not said.exists():
            done = build(DOCS, out)
            said.write_text(json.dumps([done.returncode, done.stderr]))
    code, told = json.loads(said.read_text())
    assert code == 0, told
    return out / "html", told


@exhaustive
def test_the_site_builds_without_a_warning(site):
    assert not site[1].strip()


@exhaustive
def test_the_site_asks_no_server_for_anything(site):
    for page in site[0].rglob("*.html"):
        text = page.read_text()
        assert not re.search(r"""(?:\bsrc|<link[^>]*\bhref)=["'](?:https?:)?//""", text), page.name
    for style in site[0].rglob("*.css"):
        assert not re.search(r"url\(\s*['\"]?(?:https?:)?//|@import", style.read_text()), style.name


@exhaustive
def test_the_site_says_nothing_of_the_machine_that_built_it(site):
    here = str(ROOT)
    assert not [page.name for page in site[0].rglob("*.html") if here in page.read_text()]


@exhaustive
def test_the_site_has_every_command_and_every_name(site):
    commands = html.unescape((site[0] / "reference/commands.html").read_text())
    for name in COMMANDS:
        assert f"Usage: gptkit {name} " in commands
    python = (site[0] / "reference/python.html").read_text()
    assert all(f'id="gptkit.{name}"' in python for name in gptkit.__all__)


def looked_at(browser: Any, path: Path, **screen: Any) -> tuple[Any, list[str]]:
    """A page of the site in a window, and what was wrong: its console, and requests for other than files."""
    page = browser.new_context(**screen).new_page()
    page.set_default_timeout(HANGS * 1000)
    wrong: list[str] = []
    page.on("console", lambda message: wrong.append(message.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda request: wrong.append(request.url) if not request.url.startswith("file:") else None)
    page.goto(path.as_uri())
    return page, wrong


LOOKED_AT = ("index", "tutorial", "explanation/norms", "explanation/attention", "reference/presets", "reference/python")


@exhaustive
@pytest.mark.parametrize("name", LOOKED_AT)
def test_a_page_reads_on_a_phone_from_the_disk(site, browser, name):
    for scheme in ("light", "dark"):
        screen = {"viewport": {"width": 375, "height": 700}, "color_scheme": scheme}
        page, wrong = looked_at(browser, site[0] / f"{name}.html", **screen)
        assert page.evaluate("document.documentElement.scrollWidth") <= 375
        page.context.close()
        assert not wrong


@exhaustive
def test_formulas_are_drawn(site, browser):
    """Taller than a line is, as fractions are; a browser without MathML would put them in one."""
    page, _ = looked_at(browser, site[0] / "explanation/norms.html")
    formulas = page.locator("math[display=block]")
    heights = formulas.evaluate_all("all => all.map(each => each.getBoundingClientRect().height)")
    assert max(heights) > 30
    page.context.close()


@exhaustive
def test_search_works_without_a_server(site, browser):
    page, wrong = looked_at(browser, site[0] / "search.html")
    page.goto(f"{(site[0] / 'search.html').as_uri()}?q=RMSNorm")
    page.wait_for_selector("#search-results li a")
    assert "norms.html" in " ".join(page.locator("#search-results a").evaluate_all("all => all.map(e => e.href)"))
    page.context.close()
    assert not wrong


BROKEN = {
    "a formula that is unknown": "$\\nonesuch$\n",
    "a dead link": "[there](nowhere.md)\n",
    "a name that is not there": "[there](#component-nothing)\n",
    "an unknown generator": "<!-- generated: nothing -->\n",
    "a figure of no preset": "<!-- generated: costs ends gpt-17 -->\n",
    "a docstring of nothing": "```{eval-rst}\n.. autofunction:: gptkit.lod\n```\n",
}


@exhaustive
@pytest.mark.parametrize("wrong", BROKEN)
def test_what_is_wrong_with_a_page_fails_the_build(wrong, tmp_path, generators):
    source = tmp_path / "docs"
    source.mkdir()
    shutil.copytree(DOCS / "_ext", source / "_ext", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(DOCS / "_static", source / "_static")
    shutil.copy(DOCS / "conf.py", source)
    (source / "index.md").write_text(f"# A page\n\n{BROKEN[wrong]}")
    assert build(source, tmp_path).returncode != 0


@pytest.mark.parametrize("page", [page for page in PAGES if page.is_relative_to(DOCS)], ids=named)
def test_a_page_opens_with_a_sentence(page):
    """Before any formula, table, list or code; a page that is another file is that file's business."""
    text = re.sub(r"\A(\([\w-]+\)=\n)?# .*\n+", "", page.read_text())
    first = text.partition("\n\n")[0]
    if not first.startswith("```{include}"):
        assert re.match(r"[A-Za-z`*\[][^|]*\w", first), first
        assert not first.startswith(("```", "$$", "- ", "1. ")) and re.search(r"[.:?]\)?($|\s)", first), first


TASKS = [page for page in PAGES if page.parent == DOCS / "howto" and page.stem not in ("index", "add-a-family")]


@pytest.mark.parametrize("page", TASKS, ids=named)
def test_a_how_to_page_says_who_needs_it_what_to_run_and_what_can_go_wrong(page):
    text = page.read_text()
    assert re.match(r"# .+\n\nThis page is for you if ", text)
    beginning = text.partition("\n## ")[0]
    assert any("gptkit" in block for block in FENCED.findall(beginning)), "no command before the first section"
    assert re.findall(r"^## (.*)$", FENCED.sub("", text), re.M)[-1:] == ["What can go wrong"]
