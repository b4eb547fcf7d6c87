"""What `convert --to` takes is one list, in the help, the error, the shell, the README; and all of it is written."""

import re
from pathlib import Path

import pytest
from helpers.command import call

import gptkit
from gptkit.commands.completion import complete_target
from gptkit.converter.formats import writable
from gptkit.converter.targets import FORMATS, TARGETS
from gptkit.errors import UsageError


def test_help_error_shell_and_readme_have_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(UsageError) as error:
        gptkit.convert("sample:gpt2", tmp_path / "out", to="onnx")
    told = (error.value.hint or "").removeprefix("known: ").split(", ")
    assert tuple(told) == TARGETS
    printed = call("convert", "--help").output
    words = " ".join(re.sub(r"[│\n]", " ", printed).split())
    assert f"one of {', '.join(TARGETS)};" in words
    assert {target for target in TARGETS if target != "hf:FAMILY"} <= set(complete_target(""))
    table = (
        Path(gptkit.__file__).parent.joinpath("README.md").read_text().partition("| `--to` |")[2].partition("\n\n")[0]
    )
    rows = re.findall(r"^\| (`[^|]*`) \|", table, re.MULTILINE)
    assert tuple(name for row in rows for name in re.findall(r"`([^`]+)`", row)) == TARGETS


def test_every_one_is_written() -> None:
    assert all(map(writable, FORMATS))
    here = Path(gptkit.__file__).parent / "converter" / "formats"
    assert all((here / f"{name}.py").is_file() for name in FORMATS)
