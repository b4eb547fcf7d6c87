"""What references mean, against a hub of our own on 127.0.0.1."""

import json
import os
import shutil
import socket
import time
from pathlib import Path
from threading import Thread

import pytest
from helpers.hubserver import NEW, OLD, Big, Hub, Repo
from helpers.processes import imported, python
from typer.testing import CliRunner

from gptkit.architectures.presets import nearest
from gptkit.cli import app
from gptkit.converter import resolve as module
from gptkit.converter.resolve import Reference, resolve
from gptkit.errors import CheckpointError, GptkitError, InvalidInput, Offline, UntrustedInput

SHARDED = {
    "config.json": b"{}",
    "model.safetensors.index.json": json.dumps(
        {"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors"}}
    ).encode(),
    "m-1.safetensors": b"one",
    "m-2.safetensors": b"two",
    "tokenizer.json": b"{}",
    "pytorch_model.bin": b"never",
    "README.md": b"never",
}
SINGLE = {"config.json": b"{}", "model.safetensors": b"weights", "chat_template.jinja": b"{{ messages }}"}


def names(resolved: Reference) -> set[str]:
    return {path.name for path in resolved.path.iterdir()}


# --- samples and local paths


def test_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SAMPLES_DIR", tmp_path)
    (tmp_path / "gpt2").mkdir()
    found = resolve("sample:gpt2", offline=True)
    assert (found.kind, found.path, found.revision) == ("sample", tmp_path / "gpt2", None)
    for name in ("gtp2", "", "..", "../gpt2", "gpt2/"):
        with pytest.raises(InvalidInput, match="no such sample") as caught:
            resolve(f"sample:{name}")
        assert "sample:gpt2, sample:llama, sample:bloom, sample:falcon" in str(caught.value)
    with pytest.raises(InvalidInput, match="not part of this installation"):
        resolve("sample:bloom")


def test_local_paths_win(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repos["org/name"] = Repo(SINGLE)
    folder = tmp_path / "org" / "name"
    folder.mkdir(parents=True)
    file = folder / "model.safetensors"
    file.touch()
    monkeypatch.setenv("HOME", str(tmp_path))
    for ref, path in (
        ("org/name", Path("org/name")),
        ("./org/name/", Path("org/name")),
        (str(folder), folder),
        ("~/org/name", folder),
        (str(file), file),
    ):
        found = resolve(ref)
        assert (found.kind, found.path, found.revision) == ("path", path, None)
    assert hub.asked == []
    assert resolve("hf://org/name").kind == "hub"


@pytest.mark.parametrize(
    "ref",
    [
        "./absent",
        "../absent",
        "/absent",
        "~/absent",
        "absent/",
        "a/b/c",
        "a/b/c@main",
        "model.safetensors",
        "org/model.gguf",
        "a\\b",
        ".",
        "hf://a/b/c",
        "x" * 300 + "/",
    ],
)
def test_what_looks_like_a_path_never_asks_the_hub(hub: Hub, ref: str) -> None:
    if ref == ".":
        assert resolve(ref).kind == "path"
        return
    with pytest.raises(InvalidInput, match="no such file or folder"):
        resolve(ref)
    assert hub.asked == []


@pytest.mark.parametrize(
    "ref",
    [
        *(
            "",
            " ",
            "a\0b",
            "a\nb",
            "a b",
            "a/",
            "@main",
            "hf://",
            "hf:///etc/passwd",
            "https://huggingface.co/org/name",
        ),
        *("org/..", "org:name", "a--b..c/d", "org/name@", "org/name@../../x", "org/name@/x", "org/name@a//b"),
    ],
)
def test_what_means_nothing_is_refused(hub: Hub, ref: str) -> None:
    with pytest.raises(InvalidInput):
        resolve(ref)
    assert not any("GET" in asked for asked in hub.asked)


def test_what_is_neither_file_nor_folder(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InvalidInput, match="neither a file nor a folder"):
        resolve(str(tmp_path / "pipe"))


# --- the hub


def test_a_sharded_repository(hub: Hub, tmp_path: Path) -> None:
    hub.repos["org/name"] = Repo(SHARDED)
    resolved = resolve("org/name")
    assert resolved.kind == "hub"
    assert resolved.text == "org/name"
    assert resolved.revision == NEW
    assert resolved.path.is_relative_to(tmp_path / "cache")
    assert names(resolved) == SHARDED.keys() - {"pytorch_model.bin", "README.md"}
    assert (resolved.path / "m-2.safetensors").read_bytes() == b"two"


def test_a_single_file_and_the_chat_template(hub: Hub) -> None:
    """No shard of the index, which may be that of the single file and come back with it."""
    hub.repos["org/name"] = Repo({**SHARDED, **SINGLE})
    assert names(resolve("hf://org/name")) == {*SINGLE, "tokenizer.json", "model.safetensors.index.json"}


def test_config_alone(hub: Hub) -> None:
    hub.repos["org/name"] = Repo(SHARDED)
    assert names(resolve("org/name", weights=False)) == {"config.json"}
    hub.asked.clear()
    resolve("org/name", weights=False)
    assert hub.asked == ["HEAD org/name main config.json"]
    assert "m-1.safetensors" in names(resolve("org/name"))


def test_the_cache_is_asked_first_but_a_branch_may_have_moved(hub: Hub) -> None:
    hub.repos["org/name"] = Repo(SHARDED)
    first = resolve("org/name")
    assert first.notes == ()
    hub.asked.clear()
    assert resolve("org/name") == first
    assert hub.asked == ["HEAD org/name main config.json", f"LIST org/name {NEW}"]
    hub.asked.clear()
    assert resolve(f"org/name@{NEW}").path == first.path
    assert hub.asked == [f"LIST org/name {NEW}"]
    hub.asked.clear()
    assert resolve(f"org/name@{NEW}", weights=False).path == first.path
    assert hub.asked == []
    hub.stop()
    for ref in ("org/name", f"org/name@{NEW}"):
        again = resolve(ref)
        assert again.path == first.path
        assert again.notes == (f"the hub could not be reached: {ref} is read from the cache, at commit {NEW}",)
        assert resolve(ref, offline=True).notes == ()


def test_a_branch_that_moved(hub: Hub) -> None:
    repo = hub.repos["org/name"] = Repo(SHARDED, commit=OLD)
    assert resolve("org/name").revision == OLD
    hub.repos["org/name"] = Repo({**SHARDED, "m-1.safetensors": b"ONE"}, history={OLD: repo.files})
    hub.asked.clear()
    moved = resolve("org/name")
    assert moved.revision == NEW
    assert (moved.path / "m-1.safetensors").read_bytes() == b"ONE"
    assert "m-2.safetensors" not in hub.fetched()  # the same bytes: one blob
    assert resolve("org/name", offline=True) == moved
    hub.asked.clear()
    assert (resolve(f"org/name@{OLD}").path / "m-1.safetensors").read_bytes() == b"one"
    assert hub.fetched() == []


@pytest.mark.parametrize("step", range(12))
def test_one_commit_whenever_the_branch_moves(hub: Hub, step: int) -> None:
    """The branch moves, and every file with it, just before the request of that number."""
    new: dict[str, bytes | Big] = {name: body.replace(b"o", b"0") for name, body in SHARDED.items()}
    new["config.json"] = b'{"new": 1}'
    new["model.safetensors.index.json"] = SHARDED["model.safetensors.index.json"]
    repo = hub.repos["org/name"] = Repo(SHARDED, commit=OLD, history={OLD: SHARDED, NEW: new})

    def move(line: str) -> None:
        if len(hub.asked) > step:
            repo.commit = NEW

    hub.before = move
    found = resolve("org/name")
    expected = {OLD: SHARDED, NEW: new}[found.revision]
    for name in ("config.json", "m-1.safetensors", "m-2.safetensors", "tokenizer.json"):
        assert (found.path / name).read_bytes() == expected[name]
    assert found.revision == (OLD if step else NEW)


def test_a_server_that_answers_with_another_commit(hub: Hub) -> None:
    repo = hub.repos["org/name"] = Repo(SINGLE, commit=OLD)

    def lie(line: str) -> None:
        repo.lies = NEW if "model.safetensors" in line else ""

    hub.before = lie
    with pytest.raises(InvalidInput, match=f"asked for model.safetensors at commit {OLD} but returned it at {NEW}"):
        resolve("org/name")


def test_an_interrupted_move_leaves_what_worked_offline(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repos["org/name"] = Repo(SHARDED, commit=OLD)
    old = resolve("org/name")
    hub.repos["org/name"] = Repo({**SHARDED, "m-2.safetensors": b"other"}, short={"m-2.safetensors": 3})
    with pytest.raises(Offline, match=r"m-2\.safetensors from org/name was interrupted"):
        resolve("org/name")
    assert resolve("org/name", offline=True) == old


def test_the_files_are_listed_with_one_question(hub: Hub) -> None:
    more = {"token_mappings.json": b"{}", "LICENSE.md": b"l", "NOTICE": b"n", "tokenizer.model.v3": b"t"}
    never = {"modeling.py": b"", "tokenizer.py": b"", "onnx/model.onnx": b"", "sub/tokenizer.json": b"", "a.gguf": b""}
    never["tokenizer.\x1b[31m"] = b""
    hub.repos["org/name"] = Repo({**SHARDED, **more, **never})
    assert names(resolve("org/name")) == {*SHARDED, *more} - {"pytorch_model.bin", "README.md"}
    assert sum("LIST" in line for line in hub.asked) == 1
    assert not any("merges.txt" in line for line in hub.asked)


def test_a_hub_that_does_not_list(hub: Hub) -> None:
    hub.repos["org/name"] = Repo(SHARDED, listed=False)
    hub.repos["org/single"] = Repo({**SINGLE, "LICENSE": b"", "token_mappings.json": b"{}"}, listed=False)
    assert names(resolve("org/name")) == SHARDED.keys() - {"pytorch_model.bin", "README.md"}
    assert names(resolve("org/single")) == {*SINGLE, "LICENSE", "token_mappings.json"}
    hub.repos["org/lacks"] = Repo({k: v for k, v in SHARDED.items() if k != "m-2.safetensors"}, listed=False)
    with pytest.raises(CheckpointError, match=r"does not have m-2\.safetensors"):
        resolve("org/lacks")


@pytest.mark.parametrize(
    "listing",
    [
        *(b"", b"<html>", b"[]", b"{}", b'{"id": 5, "siblings": 3}', b'{"id": "x", "siblings": [{"rfilename": 3}]}'),
        b'{"id": "x", "siblings": [{"rfilename": "config.json", "size": "big", "lfs": 3}]}',
        b'{"id": "x", "siblings": [{"size": 3}]}',
        b'{"id": "x", "siblings": [{"rfilename": "a/b"}, {"rfilename": "README.md"}]}',
    ],
)
def test_a_listing_that_makes_no_sense_is_none(hub: Hub, listing: bytes) -> None:
    hub.repos["org/name"] = Repo(SHARDED, listing=listing)
    assert names(resolve("org/name")) == SHARDED.keys() - {"pytorch_model.bin", "README.md"}


def test_one_weight_file_of_another_name(hub: Hub) -> None:
    hub.repos["org/name"] = Repo({"config.json": b"{}", "consolidated.safetensors": b"w"})
    assert names(resolve("org/name")) == {"config.json", "consolidated.safetensors"}
    assert "consolidated.safetensors" in names(resolve("org/name", offline=True))


def test_config_comes_first_and_may_end_it(hub: Hub) -> None:
    hub.repos["org/name"] = Repo(SHARDED)

    def refuse(found: Reference) -> None:
        assert found.names == {"config.json"}
        raise InvalidInput("no such family")

    with pytest.raises(InvalidInput, match="no such family"):
        resolve("org/name", check=refuse)
    assert hub.fetched() == ["config.json"]


def test_companions_without_weights(hub: Hub) -> None:
    hub.repos["org/name"] = Repo(SHARDED)
    found = resolve("org/name", weights=False, companions=True)
    assert names(found) == {"config.json", "tokenizer.json"}
    assert found.repository is not None and found.repository.commit == NEW


def test_nested_companions(hub: Hub, tmp_path: Path) -> None:
    """They come from the hub and from its cache; what belongs to other programs, or is another checkpoint, does not."""
    nested = {
        "additional_chat_templates/tool_use.jinja": b"T {{ messages }}",
        "1_Pooling/config.json": b'{"pooling_mode_mean_tokens": true}',
    }
    others = {"onnx/config.json": b"{}", "onnx/model.onnx": b"w", "runs/events.out": b"x", "code/config.py": b"x"}
    hub.repos["org/name"] = Repo({**SHARDED, **nested, **others})

    def found() -> dict[str, bytes]:
        folder = resolve("org/name", weights=False, companions=True).path
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    online = found()
    assert online == {"config.json": b"{}", "tokenizer.json": b"{}", **nested}
    hub.stop()
    assert found() == online


def test_a_broken_connection_is_picked_up_where_it_broke(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 10_000)
    body = bytes(range(256)) * 1000
    repo = hub.repos["org/name"] = Repo({**SINGLE, "model.safetensors": body}, cut={"model.safetensors": [70_000, 99]})
    assert (resolve("org/name").path / "model.safetensors").read_bytes() == body
    assert any("bytes=70000-" in line for line in hub.asked)
    # It breaks for good in the second of two files: an error that says so, and the first is not fetched again.
    repo = hub.repos["org/name2"] = Repo({**SHARDED, "m-2.safetensors": body}, cut={"m-2.safetensors": [0] * 20})
    with pytest.raises(Offline, match=r"m-2\.safetensors from org/name2 was interrupted") as caught:
        resolve("org/name2")
    assert "the same command continues" in str(caught.value)
    assert caught.value.exit_code == 5
    assert not list((Path("cache") / "models--org--name2").rglob("*.incomplete"))
    repo.cut.clear()
    hub.asked.clear()
    assert (resolve("org/name2").path / "m-2.safetensors").read_bytes() == body
    assert hub.fetched() == ["m-2.safetensors"]


def test_a_file_cut_short_in_the_cache_is_fetched_again(hub: Hub) -> None:
    hub.repos["org/name"] = Repo(SINGLE)
    file = resolve("org/name").path / "model.safetensors"
    os.truncate(file, 3)
    assert (resolve("org/name").path / "model.safetensors").read_bytes() == SINGLE["model.safetensors"]


def test_a_disk_too_small_is_told_before_the_first_weight(hub: Hub) -> None:
    hub.repos["org/name"] = Repo({**SINGLE, "model.safetensors": Big(b"", 1 << 60)})
    with pytest.raises(GptkitError, match=f"needs {(1 << 60) + 14:,} bytes in the Hugging Face cache") as caught:
        resolve("org/name")
    assert caught.value.exit_code == 1
    assert "HF_HOME" in str(caught.value)
    assert hub.fetched() == ["config.json"]


def test_tokens_go_to_the_hub_alone(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repos["org/name"] = Repo(SINGLE, token="hf_secret", cdn=True)
    with pytest.raises(InvalidInput, match="or it is private"):
        resolve("org/name")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert (resolve("org/name").path / "model.safetensors").read_bytes() == b"weights"
    assert any(line.startswith("CDN") for line in hub.asked)


def test_a_repository_that_was_closed_since(hub: Hub) -> None:
    hub.repos["org/name"] = Repo(SINGLE)
    resolve("org/name")
    hub.repos["org/name"].status, hub.repos["org/name"].error_code = 403, "GatedRepo"
    with pytest.raises(InvalidInput, match="is gated") as caught:
        resolve("org/name")
    assert "--offline" in str(caught.value)
    assert resolve("org/name", offline=True).revision == NEW


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that somebody has waited for, between two attempts."""
    asked: list[float] = []
    monkeypatch.setattr(time, "sleep", asked.append)
    return asked


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_hub_that_fails_is_not_waited_for_where_the_cache_has_it(hub: Hub, status: int, waits: list[float]) -> None:
    hub.repos["org/name"] = Repo(SINGLE)
    first = resolve("org/name")
    hub.repos["org/name"].status = status
    again = resolve("org/name")
    assert again == first and waits == []
    assert "could not be reached" in again.notes[0]


def test_a_local_path_that_hides_a_preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("gpt2").mkdir()
    found = resolve("gpt2")
    assert found.kind == "path"
    assert found.notes == ("gpt2 is a local path here; the model of that name is hf://openai-community/gpt2",)
    assert resolve("./gpt2").notes == ()


def test_another_cache(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repos["org/name"] = Repo(SINGLE)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "mine"))
    assert resolve("org/name").path.is_relative_to(tmp_path / "mine")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    with pytest.raises(Offline):
        resolve("org/name", offline=True)


def test_revisions(hub: Hub) -> None:
    hub.repos["org/name"] = Repo(SINGLE, refs={"v1": OLD, "refs/pr/1": OLD})
    assert resolve("org/name").revision == NEW
    assert resolve("org/name@v1").revision == OLD
    assert resolve("hf://org/name@refs/pr/1").revision == OLD
    assert resolve(f"org/name@{NEW}").revision == NEW
    with pytest.raises(InvalidInput, match="org/name has no revision v2"):
        resolve("org/name@v2")


def test_a_branch_that_moves_while_it_is_fetched(hub: Hub) -> None:
    repo = hub.repos["org/name"] = Repo(SHARDED, commit=OLD)
    resolve("org/name", weights=False)
    repo.commit = NEW
    # The old config.json is cached, the weights are not: both have to come from one commit.
    resolved = resolve("org/name")
    assert resolved.revision == NEW
    assert {"config.json", "m-1.safetensors", "m-2.safetensors"} <= names(resolved)


def test_aliases_and_bare_names(hub: Hub) -> None:
    hub.repos["openai-community/gpt2"] = Repo(SINGLE)
    hub.moved["gpt2"] = "openai-community/gpt2"
    assert resolve("hf://gpt2").revision == NEW
    resolved = resolve("gpt2-small@main")
    assert "models--openai-community--gpt2" in str(resolved.path)


def test_without_safetensors(hub: Hub) -> None:
    hub.repos["org/name"] = Repo({"config.json": b"{}", "pytorch_model.bin": b"pickle"})
    with pytest.raises(CheckpointError, match="no safetensors weights") as caught:
        resolve("org/name")
    assert "--allow-pickle" in str(caught.value)
    assert "pytorch_model.bin" not in " ".join(hub.asked)
    assert "pytorch_model.bin" in names(resolve("org/name", allow_pickle=True))
    assert "pytorch_model.bin" in names(resolve("org/name", allow_pickle=True, offline=True))


def test_an_index_that_leads_elsewhere_or_nowhere(hub: Hub) -> None:
    index = {"weight_map": {"a": "../../evil.safetensors"}}
    hub.repos["org/evil"] = Repo({"config.json": b"{}", "model.safetensors.index.json": json.dumps(index).encode()})
    with pytest.raises(UntrustedInput):
        resolve("org/evil")
    hub.repos["org/name"] = Repo({name: body for name, body in SHARDED.items() if name != "m-2.safetensors"})
    with pytest.raises(CheckpointError, match=r"does not have m-2\.safetensors"):
        resolve("org/name")


def test_repositories_that_are_not_there_or_not_for_us(hub: Hub) -> None:
    hub.repos["org/gated"] = Repo(SINGLE, status=403, error_code="GatedRepo")
    hub.repos["org/gone"] = Repo(SINGLE, status=404, error_code="RepoNotFound")
    hub.repos["org/banned"] = Repo(SINGLE, status=403)
    hub.repos["org/token"] = Repo(SINGLE, status=401, message="Invalid credentials in Authorization header")
    hub.repos["org/gguf"] = Repo({"model.gguf": b""})
    for name, message, hint in (
        ("org/gated", "is gated", "hf auth login"),
        ("org/gone", "there is no model org/gone", "hf auth login"),
        ("org/absent", "there is no model org/absent", "hf auth login"),
        ("org/banned", "refused the request .403", "hf auth whoami"),
        ("org/token", "refused the request .401 Invalid credentials", "hf auth whoami"),
        ("org/gguf", "has no config.json", "GGUF"),
    ):
        with pytest.raises(InvalidInput, match=message) as caught:
            resolve(name)
        assert caught.value.exit_code == 4
        assert hint in str(caught.value)


def test_a_failing_hub_is_as_good_as_none(hub: Hub) -> None:
    hub.repos["org/name"] = Repo(SINGLE, status=503)
    with pytest.raises(Offline, match="HTTP status 503"):
        resolve("org/name")


def test_a_refused_connection_is_told_at_once(hub: Hub, waits: list[float]) -> None:
    hub.stop()
    with pytest.raises(Offline, match="could not be reached") as caught:
        resolve("org/name")
    assert waits == [] and caught.value.exit_code == 5
    assert "sample:gpt2" in str(caught.value)


def test_what_speaks_another_protocol_is_no_hub(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")

        def hang_up() -> None:
            server.accept()[0].close()

        Thread(target=hang_up, daemon=True).start()
        with pytest.raises(Offline):
            resolve("org/name")


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_offline_by_wish(hub: Hub, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    hub.repos["org/name"] = Repo(SHARDED)
    with pytest.raises(Offline, match="org/name is not in the local cache"):
        resolve("org/name", offline=True)
    monkeypatch.setenv(variable, "1")
    with pytest.raises(Offline):
        resolve("org/name")
    assert hub.asked == []
    monkeypatch.delenv(variable)
    resolve("org/name", weights=False)
    with pytest.raises(Offline, match="the weights of org/name are not in the local cache"):
        resolve("org/name", offline=True)
    hub.stop()
    with pytest.raises(Offline, match="could not be reached"):
        resolve("org/name")


def test_a_cache_that_others_filled_lacks_only_answers(hub: Hub, tmp_path: Path) -> None:
    hub.repos["org/name"] = Repo(SHARDED)
    resolved = resolve("org/name")
    # As other tools leave it: files, but no record of what the repository does not have.
    shutil.rmtree(tmp_path / "cache" / "models--org--name" / ".no_exist", ignore_errors=True)
    assert resolve("org/name", offline=True) == resolved
    hub.stop()
    assert resolve("org/name") == resolved


def test_a_cache_that_cannot_be_written(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repos["org/name"] = Repo(SINGLE)
    (tmp_path / "file").touch()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(GptkitError, match="could not write org/name to the Hugging Face cache: Not a directory"):
        resolve("org/name")


def test_a_process_of_its_own(hub: Hub, tmp_path: Path) -> None:
    # Not through patched constants: the hub's address and cache as a user sets them.
    hub.repos["org/name"] = Repo(SHARDED)
    code = "from gptkit.converter.resolve import resolve; r = resolve('org/name'); print(r.revision, r.path)"
    done = python("-c", code, env={"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}, check=True)
    commit, path = done.stdout.split()
    assert commit == NEW
    assert Path(path).is_relative_to(tmp_path / "home")
    assert (Path(path) / "m-1.safetensors").read_bytes() == b"one"


def test_importing_costs_nothing() -> None:
    assert not imported("import gptkit.converter.resolve", "numpy", "huggingface_hub", "torch", "transformers")


# --- names without an organisation


@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.parametrize("typo", ["gtp2", "qwne3-8b", "gtp2@main", "mistral"])
def test_a_typo_of_a_preset_is_told_without_asking(hub: Hub, typo: str, stopped: bool) -> None:
    if stopped:
        hub.stop()
    with pytest.raises(InvalidInput, match=f"no preset, file or folder is called '{typo.partition('@')[0]}'") as caught:
        resolve(typo)
    assert "Did you mean" in str(caught.value)
    assert nearest(typo.partition("@")[0])[0] in str(caught.value)
    assert hub.asked == []


def test_a_name_that_nothing_resembles_is_asked_for(hub: Hub) -> None:
    hub.repos["zebra"] = Repo(SINGLE)
    with pytest.raises(InvalidInput, match="no preset, file or folder is called 'nope', nor a model on the hub"):
        resolve("nope")
    assert resolve("zebra").revision == NEW
    for offline in (True, False):
        hub.stop()
        with pytest.raises(InvalidInput, match=r"no preset, file or folder is called 'nope'\n") as caught:
            resolve("nope", offline=offline)
        assert caught.value.exit_code == 4 and "gptkit presets" in str(caught.value)
        assert resolve("zebra", offline=offline).revision == NEW  # from the cache
    with pytest.raises(Offline):
        resolve("hf://nope")  # said to be one of the hub
    with pytest.raises(Offline):
        resolve("gpt2")  # a preset, whose repository is not here


def test_a_preset_without_weights_says_so(hub: Hub) -> None:
    with pytest.raises(InvalidInput, match="gpt3-175b has only a config") as caught:
        resolve("gpt3-175b")
    assert "load --random gpt3-175b" in str(caught.value) and hub.asked == []


@pytest.mark.parametrize(
    "call",
    [
        *("generate gtp2 hi", "convert gtp2", "diff sample:gpt2 gtp2", "swaps gtp2", "verify gtp2", "show gtp2"),
        *("params gtp2", "params --stored gtp2", "load gtp2", "compare gtp2 gpt2", "swap gtp2 out --norm rmsnorm"),
    ],
)
def test_every_command_tells_a_typo_alike(hub: Hub, call: str) -> None:
    done = CliRunner().invoke(app, call.split())
    assert done.exit_code == 4, done.output
    assert "no preset, file or folder is called 'gtp2'" in done.stderr and "Did you mean gpt2?" in done.stderr
    assert hub.asked == []
