"""The pre-commit hooks and the GitHub Action, run as they are written."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.families import CONFIGS, save_hf
from safetensors.torch import load_file, save_file

from gptkit import precommit

ROOT = Path(__file__).parents[1]
HOOKS = {hook["id"]: hook for hook in yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())}
ACTION = yaml.safe_load((ROOT / "action.yml").read_text())
LOST = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A repository with a good checkpoint, and one whose index names a tensor that no file has."""
    save_hf(CONFIGS["llama"], tmp_path / "good")
    folder = tmp_path / "models" / "broken"
    save_hf(CONFIGS["llama"], folder, max_shard_size=20_000)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shard = folder / index["weight_map"][LOST]
    save_file({name: tensor for name, tensor in load_file(shard).items() if name != LOST}, shard, {"format": "pt"})
    return tmp_path


def hook(name: str, files: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a hook as pre-commit does: its entry, its arguments, and the names of files."""
    entry = shlex.split(HOOKS[name]["entry"])
    command = [sys.executable if entry[0] == "python" else entry[0], *entry[1:], *HOOKS[name]["args"], *files]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True)


def test_a_broken_index_fails_the_hook_and_the_tensor_is_named(broken: Path) -> None:
    files = ["models/broken/model.safetensors.index.json", "models/broken/config.json", "good/config.json"]
    done = hook("gptkit-audit", files, broken)
    assert done.returncode == 3
    assert LOST in done.stdout
    assert hook("gptkit-audit", ["good/config.json"], broken).returncode == 0


def test_each_folder_is_audited_once(broken: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(broken)
    (broken / "model.gguf").touch()
    names = ["good/config.json", "good/model.safetensors", "model.gguf", "no-longer-there/config.json"]
    assert precommit.folders(names) == [Path("good"), Path("model.gguf")]
    assert precommit.run(["--for", "transformers", "--", "gone/config.json"]) == 0


def test_options_before_the_files_reach_audit(broken: Path) -> None:
    command = [sys.executable, "-m", "gptkit.precommit", "--for", "nothing", "--", "good/config.json"]
    done = subprocess.run(command, cwd=broken, capture_output=True, text=True)
    assert done.returncode == 2
    assert "nothing" in done.stderr


def test_hooks_name_existing_commands() -> None:
    for name, written in HOOKS.items():
        assert {"id", "name", "entry", "language", "files"} <= written.keys(), name
        assert written["entry"].split()[0] in ("gptkit", "python")


@pytest.mark.slow
@pytest.mark.parametrize(("folder", "code"), [("good", 0), ("models/broken", 3)])
def test_the_steps_of_the_action(folder: str, code: int, broken: Path, tmp_path: Path) -> None:
    """With the variables that GitHub sets, in a shell. Installing takes a minute."""
    temp, output = tmp_path / "runner", tmp_path / "output"
    temp.mkdir()
    inputs = {name: given.get("default", "") for name, given in ACTION["inputs"].items()} | {"model": folder}
    env = {**os.environ, "RUNNER_TEMP": str(temp), "GITHUB_OUTPUT": str(output), "GITHUB_ACTION_PATH": str(ROOT)}
    codes = []
    for step in ACTION["runs"]["steps"]:
        given: dict[str, Any] = {
            name: inputs[value.removeprefix("${{ inputs.").removesuffix(" }}")]
            for name, value in step.get("env", {}).items()
        }
        command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
        codes.append(subprocess.run(command, cwd=broken, env={**env, **given}).returncode)
    assert codes == [0, code]
    said = dict(line.split("=", 1) for line in output.read_text().splitlines())
    assert said["clean"] == ("true" if code == 0 else "false")
    (run,) = json.loads(Path(said["sarif"]).read_text())["runs"]
    assert (LOST in json.dumps(run)) == (code == 3)
