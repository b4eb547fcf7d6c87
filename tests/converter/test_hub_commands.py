"""The commands with a hub: of a process of its own HF_ENDPOINT is the server of the tests."""

import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from helpers.command import call
from helpers.covering import few
from helpers.families import CONFIGS, save_hf
from helpers.hubserver import NEW, OLD, Big, Hub, Repo
from typer.testing import Result


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes | Big]:
    folder = tmp_path_factory.mktemp("llama")
    save_hf(CONFIGS["llama"], folder, max_shard_size="20KB")
    (folder / "merges.txt").write_text("a b")
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def environment(hub: Hub, tmp_path: Path, files: dict[str, bytes | Big]) -> dict[str, str]:
    hub.repos["org/llama"] = Repo(files)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return {**kept, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "COLUMNS": "80", "NO_COLOR": "1"}


def gptkit(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "gptkit", *arguments], env=environment, capture_output=True, text=True)


def call_here(*arguments: str) -> Result:
    """The same in this process, for which the hub's fixture stands."""
    return call(*arguments, env={"COLUMNS": "80", "NO_COLOR": "1"})


def test_params(hub: Hub, environment: dict[str, str]) -> None:
    done = gptkit(environment, "params", "org/llama")
    assert done.returncode == 0, done.stderr
    assert f"at commit {NEW}" in done.stdout
    assert done.stderr == ""
    assert hub.fetched() == ["config.json"]
    offline = gptkit(environment, "params", "org/llama", "--offline")
    assert offline.stdout == done.stdout
    hub.stop()
    unreachable = gptkit(environment, "params", "org/llama")
    assert unreachable.returncode == 0
    assert "note: the hub could not be reached: org/llama is read from the cache" in unreachable.stdout
    gone = gptkit(environment, "params", "org/other")
    assert gone.returncode == 5
    assert "could not be reached" in gone.stderr
    assert len(gone.stderr.splitlines()) == 2


def test_what_is_stored(hub: Hub, environment: dict[str, str]) -> None:
    done = call_here("params", "org/llama", "--stored")
    assert done.exit_code == 0, done.stderr
    assert "stored as F32 " in done.stdout
    shown = json.loads(call_here("params", "org/llama", "--stored", "--json").stdout)["models"][0]
    assert shown["revision"] == NEW
    assert shown["stored"]["bytes"] == 4 * shown["total"]
    assert shown["stored"]["dtypes"]["F32"]["parameters"] == shown["total"]
    assert len(shown["stored"]["files"]) > 2
    assert shown["stored"]["tensors"][0].keys() == {"name", "dtype", "shape", "bytes"}
    for line in hub.asked:
        assert "model-" not in line or "bytes=" in line


def test_a_dry_run_and_then_the_conversion(hub: Hub, environment: dict[str, str], tmp_path: Path) -> None:
    dry = gptkit(environment, "convert", "org/llama", str(tmp_path / "out"), "--dry-run")
    assert dry.returncode == 0, dry.stderr
    assert f"from org/llama at commit {NEW}" in dry.stdout
    assert "would write" in dry.stdout
    assert not (tmp_path / "out").exists()
    for line in hub.asked:
        assert "model-" not in line or "bytes=" in line
    hub.asked.clear()
    done = gptkit(environment, "convert", "org/llama@main", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # no bars where nobody looks
    assert {name for name in hub.fetched() if not name.startswith("model-")} == set()
    local = json.loads((tmp_path / "out" / "gptkit.json").read_text())
    assert (local["origin"]["reference"], local["origin"]["revision"]) == ("org/llama@main", NEW)
    assert (tmp_path / "out" / "merges.txt").is_file()
    # The branch moves: the next run follows, and a pinned one does not.
    hub.repos["org/llama"] = Repo(hub.repos["org/llama"].files, commit=OLD, history={NEW: hub.repos["org/llama"].files})
    assert f"at commit {OLD}" in call_here("convert", "org/llama", "x", "--dry-run").stdout
    assert f"at commit {NEW}" in call_here("convert", f"org/llama@{NEW}", "x", "--dry-run").stdout


def test_exit_codes(hub: Hub, environment: dict[str, str], files: dict[str, bytes | Big], tmp_path: Path) -> None:
    hub.repos["org/gated"] = Repo(files, status=403, error_code="GatedRepo")
    hub.repos["org/broken"] = Repo({**files, sorted(files)[-1]: b"{"})
    out = str(tmp_path / "out")
    for arguments, code, message in (
        (("org/llama", out, "--offline"), 5, "not in the local cache"),
        (("org/gated", out), 4, "is gated"),
        (("org/llama@v9", out, "--dry-run"), 4, "no revision v9"),
        (("org/none", out, "--dry-run"), 4, "there is no model org/none"),
    ):
        done = call_here("convert", *arguments)
        assert done.exit_code == code, done.stderr
        assert message in done.stderr
        assert len(done.stderr.splitlines()) <= 2
    assert not Path(out).exists()


@few(1)
@pytest.mark.parametrize("quiet", [True, False])
def test_bars_where_a_person_looks(hub: Hub, environment: dict[str, str], tmp_path: Path, quiet: bool) -> None:
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    command = [sys.executable, "-m", "gptkit", "convert", "org/llama", "out", *(["-q"] if quiet else [])]
    with subprocess.Popen(
        command, env={**environment, "TERM": "xterm"}, stdout=subprocess.PIPE, stderr=follower
    ) as run:
        os.close(follower)
        shown = b""
        try:
            while chunk := os.read(leader, 1 << 16):
                shown += chunk
        except OSError:  # the other end was closed
            pass
        os.close(leader)
    assert run.returncode == 0, shown
    assert (b"model-00001" in shown and b"100%" in shown) is not quiet
    assert (shown == b"") is quiet


def test_a_folder_that_hides_a_preset(environment: dict[str, str], tmp_path: Path) -> None:
    save_hf(CONFIGS["llama"], tmp_path / "gpt2")
    done = call_here("params", "gpt2")
    assert "note: gpt2 is a local path here; the model of that name is hf://openai-community/gpt2" in done.stdout
