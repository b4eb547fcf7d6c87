"""What the shell offers for a MODEL."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gptkit.architectures.presets import presets
from gptkit.commands.completion import complete_model


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def names(incomplete: str) -> list[str]:
    return [name for name, _ in complete_model(incomplete)]


def test_every_preset_is_offered_by_every_name() -> None:
    assert len(names("")) == len(presets()) + 4
    for preset in presets().values():
        for spelling in preset.known_as:
            assert any(name.lower().startswith(spelling.lower()) for name in names(spelling)), spelling


def test_a_preset_is_offered_once_and_in_its_own_spelling() -> None:
    assert names("QWEN3-8") == ["qwen3-8b"]
    assert names("Qwen/Qwen3-8") == ["Qwen/Qwen3-8B"]
    assert names("sample:g") == ["sample:gpt2"]
    assert names("nothing-of-the-kind") == []


def test_own_files_come_first_and_only_models(tmp_path: Path) -> None:
    (tmp_path / "gpt2-local").mkdir()
    for name in ("gpt2.gguf", "gpt2.txt", ".gpt2.json", "gpt2\x1b[31m.json"):
        (tmp_path / name).touch()
    assert names("gpt2")[:3] == ["gpt2-local/", "gpt2.gguf", "gpt2"]
    assert names(".g") == [".gpt2.json"]
    (tmp_path / "gpt2-local" / "config.json").touch()
    assert names("gpt2-local/") == ["gpt2-local/config.json"]
    assert names("no/such/folder/") == []


@pytest.mark.parametrize("call", ["params qwen3-3", "params gpt2 qwen3-3", "load qwen3-3", "convert qwen3-3"])
def test_bash_gets_them(call: str) -> None:
    words = call.split()
    asked = {"COMP_WORDS": f"gptkit {call}", "COMP_CWORD": str(len(words)), "_GPTKIT_COMPLETE": "complete_bash"}
    code = "import sys\nfrom gptkit.cli import main\ntry:\n    main()\nfinally:\n    assert 'torch' not in sys.modules"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **asked}, timeout=60
    )
    assert done.stdout.split() == ["qwen3-32b"], done.stderr
