"""What `convert --to` takes is one list, in the help, the error, the shell, the docs; and all of it is written."""

import re
from pathlib import Path

import pytest
from helpers.command import call

import gptkit
from gptkit.commands.completion import complete_target
from gptkit.converter.formats import format_named
from gptkit.converter.targets import FOLDERS, FORMATS, READ_ONLY, target, targets
from gptkit.errors import UnknownFamily, UsageError


def test_help_error_shell_and_docs_have_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(UsageError) as error:
        gptkit.convert("sample:gpt2", tmp_path / "out", to="onnx")
    told = (error.value.hint or "").removeprefix("Choose one of ").removesuffix(".").split(", ")
    assert tuple(told) == targets()
    printed = call("convert", "--help").output
    words = " ".join(re.sub(r"[│\n]", " ", printed).split())
    assert ", ".join(targets()) in words
    assert {each for each in targets() if each != "hf:FAMILY"} <= set(complete_target(""))
    page = Path(gptkit.__file__).parent / "docs" / "howto" / "convert-and-back.md"
    table = page.read_text().partition("| `--to` |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| (`[^|]*`) \|", table, re.MULTILINE)
    assert tuple(name for row in rows for name in re.findall(r"`([^`]+)`", row)) == targets()


def test_every_one_is_written() -> None:
    """But for the one that is only read, which is offered nowhere and has nothing to write it."""
    assert {name for name in FORMATS if format_named(name).plan is None} == {READ_ONLY}
    assert set(targets()) == {*FOLDERS, *FORMATS} - {READ_ONLY}
    with pytest.raises(UsageError, match="unknown format"):
        target(READ_ONLY)


@pytest.mark.parametrize(
    "line", ["convert sample:gpt2 out --to mistral", "swap sample:gpt2 out --norm rmsnorm --as mistral"]
)
def test_a_family_by_itself_is_told_how_it_is_written(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = call(*line.split())
    assert done.exit_code == 2
    assert "unknown format 'mistral'" in done.stderr and "Did you mean hf:mistral?" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_target_is_parsed_once() -> None:
    for text, kind, family in (
        ("local", "local", None),
        ("hf", "hf", None),
        ("hf:auto", "hf", "auto"),
        ("hf:llama", "hf", "llama"),
        ("gguf", "gguf", None),
    ):
        found = target(text)
        assert (found.kind, found.family, str(found)) == (kind, family, text) and target(found) is found
    for text in ("", "hf:", "local:x", "gguf:llama", "HF", "hf:FAMILY:x"):
        with pytest.raises((UsageError, UnknownFamily)):
            target(text)
    with pytest.raises(UsageError, match="unknown format 'gguf'") as error:
        target("gguf", FOLDERS)
    assert "gptkit convert can convert the result" in str(error.value)
