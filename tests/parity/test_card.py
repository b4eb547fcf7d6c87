"""The card holds what a reader needs to repeat and trust a verification."""

import hashlib
import json
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.command import call

from gptkit.converter.checkpoint import open_checkpoint
from gptkit.converter.convert import convert
from gptkit.parity.card import card, command, markdown
from gptkit.parity.verify import resolved, verify

SAMPLE = Path(__file__).parents[2] / "samples" / "llama"


def test_a_card_says_what_was_checked(tmp_path):
    convert("sample:llama", tmp_path / "local")
    run = call("verify", "sample:llama", str(tmp_path / "local"), "--card", str(tmp_path / "card"))
    assert run.exit_code == 0, run.output
    data = json.loads((tmp_path / "card.json").read_text())
    assert data["verdict"] == {"function": "identical", "bytes": "equal", "passed": True}
    names = ("model.safetensors", "config.json")
    digests = {name: hashlib.sha256((SAMPLE / name).read_bytes()).hexdigest() for name in names}
    assert data["checkpoints"]["model"]["sha256"] == digests
    assert data["mutations"]["tried"] == len(data["mutations"]["caught"]) >= 10
    assert set(data["versions"]) == {"gptkit", "transformers", "torch", "python"}
    assert data["command"].startswith("gptkit verify sample:llama")
    page = (tmp_path / "card.md").read_text()
    assert "identical to transformers to the last bit" in page
    assert all(digest in page for digest in digests.values())
    assert data["command"] in page
    # The command repeats it.
    assert call(*data["command"].split()[1:], "-q").exit_code == 0


def test_the_command_repeats_everything_that_was_asked():
    prompt = '--long \'tis; "so"'
    asked = {"long": True, "stream": True, "mutations": False, "allow_pickle": True, "allow_extra": True}
    result = verify("sample:llama", "sample:llama", dtype="bfloat16", attention="eager", prompts=[prompt], **asked)
    words = shlex.split(command(result))
    assert words[:4] == ["gptkit", "verify", "sample:llama", "sample:llama"]
    for option in ("--long", "--stream", "--no-mutations", "--allow-pickle", "--allow-extra", f"--prompt={prompt}"):
        assert option in words
    again = call(*words[1:], "--json")
    assert again.exit_code == 0, again.output
    data = json.loads(again.stdout)
    assert data["arguments"] == list(result.arguments)
    assert [each["name"] for each in data["prompts"]] == [each.name for each in result.prompts]


def test_the_command_names_the_commit():
    checkpoint = open_checkpoint("sample:llama")
    for reference in ("org/name", "org/name@main", "hf://org/name@main", "llama-3-8b"):
        found = resolved(replace(checkpoint, reference=reference, revision="c0ffee"))
        assert found == f"{reference.partition('@')[0]}@c0ffee"
    assert resolved(checkpoint) == "sample:llama"


def test_a_card_tells_a_failure(tmp_path):
    result = verify("sample:gpt2", "sample:falcon", mutations=False)
    data = card(result)
    assert data["verdict"]["function"] == "different"
    assert not data["verdict"]["passed"]
    assert "**different from transformers**" in markdown(data)


def test_a_card_that_cannot_be_written_is_refused(tmp_path):
    run = call("verify", "sample:llama", "--no-mutations", "--card", str(tmp_path / "no" / "card"))
    assert run.exit_code == 2
    assert "cannot write" in run.stderr


# --- checked by others ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint in two formats that were verified, and the card."""
    folder = tmp_path_factory.mktemp("card")
    call("convert", "sample:gpt2", str(folder / "local"))
    call("convert", str(folder / "local"), str(folder / "hf"), "--to", "hf")
    words = ["--no-mutations", "--card", str(folder / "card")]
    assert call("verify", str(folder / "hf"), str(folder / "local"), *words).exit_code == 0
    return folder, folder / "card.json"


@pytest.mark.parametrize("name", ["hf", "local"])
def test_the_files_of_a_card_are_recognised(name: str, described: tuple[Path, Path], tmp_path: Path) -> None:
    folder, card_file = described
    done = call("check", str(card_file), str(folder / name))
    assert done.exit_code == 0
    assert "every file is the one that" in done.stdout
    copy = shutil.copytree(folder / name, tmp_path / "copy")
    (copy / "notes.txt").write_text("mine")
    assert call("check", str(card_file), str(copy)).exit_code == 0


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("lost", [True, False])
def test_another_file_is_named(file: str, lost: bool, described: tuple[Path, Path], tmp_path: Path) -> None:
    folder, card_file = described
    copy = shutil.copytree(folder / "hf", tmp_path / "copy")
    data = (copy / file).read_bytes()
    (copy / file).unlink()
    if not lost:
        (copy / file).write_bytes(data[:-2] + b" " + data[-1:])
    done = call("check", str(card_file), str(copy))
    assert done.exit_code == 4
    assert f"{file} {'is missing' if lost else 'has other content'}" in done.stderr


def test_a_card_of_a_failure_is_exit_3(described: tuple[Path, Path], tmp_path: Path) -> None:
    folder, card_file = described
    data = json.loads(card_file.read_text())
    data["verdict"] |= {"function": "different", "passed": False}
    (tmp_path / "card.json").write_text(json.dumps(data))
    done = call("check", str(tmp_path / "card.json"), str(folder / "hf"))
    assert (done.exit_code, "other logits than transformers" in done.stdout) == (3, True)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: [],
        lambda data: {**data, "schema_version": 2},
        lambda data: {**data, "checkpoints": {}},
        lambda data: {**data, "checkpoints": {"model": {"reference": "x", "sha256": {"../passwd": "0" * 64}}}},
        lambda data: {**data, "checkpoints": {"model": {"reference": "x", "sha256": {"a": "0"}}}},
        lambda data: {**data, "command": None},
    ],
)
def test_what_is_no_card_is_refused(change: Any, described: tuple[Path, Path], tmp_path: Path) -> None:
    folder, card_file = described
    (tmp_path / "card.json").write_text(json.dumps(change(json.loads(card_file.read_text()))))
    done = call("check", str(tmp_path / "card.json"), str(folder / "hf"))
    assert done.exit_code == 4
    assert "Traceback" not in done.stderr and "bug" not in done.stderr


def test_a_missing_card_is_one_line(tmp_path: Path) -> None:
    done = call("check", str(tmp_path / "card.json"), str(tmp_path))
    assert done.exit_code == 4 and "cannot read" in done.stderr


def test_a_missing_folder_is_named(described: tuple[Path, Path], tmp_path: Path) -> None:
    done = call("check", str(described[1]), str(tmp_path / "nowhere"))
    assert done.exit_code == 4 and "no such folder" in done.stderr
