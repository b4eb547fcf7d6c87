"""-q on every command: nothing on stdout or stderr where nothing failed, and the same exit code."""

from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from gptkit.cli import app

ROOT: Any = typer.main.get_command(app)
CALLS = [
    *("params gpt2", "params gpt2 --memory --swap norm=rmsnorm", "params sample:gpt2 --stored", "presets gpt2"),
    *("presets gpt2 -n", "families gpt2", "compare gpt2 llama-2-7b", "show sample:gpt2", "swaps", "swaps --recipes"),
    *(
        "load sample:gpt2",
        "load sample:gpt2 --random",
        "check sample",
        "audit sample:gpt2",
        "diff sample:gpt2 sample:gpt2",
    ),
    *("convert sample:gpt2 out --dry-run", "swap sample:gpt2 out --norm rmsnorm --dry-run"),
]


def call(*words: str) -> Any:
    return CliRunner().invoke(app, list(words), prog_name="gptkit")


@pytest.mark.parametrize("name", ROOT.commands)
def test_every_command_has_it(name: str) -> None:
    assert any({"-q", "--quiet"} <= set(option.opts) for option in ROOT.commands[name].params)


@pytest.mark.parametrize("words", CALLS)
def test_nothing_is_printed(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if words == "check sample":
        assert call("convert", "sample:gpt2", "sample", "--to", "local").stdout
    loud, quiet = call(*words.split()), call(*words.split(), "-q")
    assert loud.exit_code == quiet.exit_code == 0, (loud.output, quiet.output)
    assert loud.stdout and not quiet.stdout and not quiet.stderr


def test_what_was_asked_for_is_written_and_printed(tmp_path: Path) -> None:
    """Files, JSON and the text that a model generates are what a call is for, and errors are errors."""
    drawn = call("params", "gpt2", "-q", "--html", str(tmp_path / "page.html"))
    assert drawn.output == "" and (tmp_path / "page.html").stat().st_size
    for words in (
        "params gpt2 --json",
        "params gpt2 --csv",
        "compare gpt2 bloom-7b1 --markdown",
        "presets gpt2 --json",
    ):
        assert call(*words.split(), "-q").stdout == call(*words.split()).stdout != ""
    text = ["generate", "sample:gpt2", "ROMEO:", "-n", "4"]
    assert "ROMEO:" + call(*text, "-q").stdout == call(*text).stdout
    assert call("params", "no/such/model", "-q").stderr
