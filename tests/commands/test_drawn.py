"""--html, --png and --svg on every command that has them: told alike, refused before any work."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from gptkit.cli import app

COMMANDS = {
    "params": ["params", "gpt2"],
    "compare": ["compare", "gpt2", "falcon-7b"],
    "show": ["show", "gpt2"],
    "diff": ["diff", "sample:gpt2", "sample:gpt2"],
    "verify": ["verify", "sample:gpt2", "--no-mutations"],
}


def run(*args: str | Path) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, list(map(str, args)))
    return done.exit_code, done.stdout, done.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_a_page_is_written_and_named_last(name: str, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    code, out, err = run(*COMMANDS[name], "--html", page)
    assert code == 0, err
    assert out.splitlines()[-1] == f"page: {page}" and len(out.splitlines()) > 1
    assert page.read_text().startswith("<!doctype html>")


@pytest.mark.parametrize("name", COMMANDS)
def test_json_stays_json(name: str, tmp_path: Path) -> None:
    import json

    code, out, err = run(*COMMANDS[name], "--json", "--html", tmp_path / "page.html")
    assert code == 0, err
    assert json.loads(out)
    assert (tmp_path / "page.html").exists()


@pytest.mark.parametrize("option", ["--html", "--png", "--svg"])
@pytest.mark.parametrize("name", COMMANDS)
def test_what_cannot_be_written_is_refused_at_once(name: str, option: str, tmp_path: Path) -> None:
    suffix = option.removeprefix("--")
    code, out, err = run(*COMMANDS[name], option, tmp_path / "no" / f"page.{suffix}")
    assert (code, out) == (2, "")
    assert "no such folder" in err
