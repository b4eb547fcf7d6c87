"""What references mean, against a hub of our own on 127.0.0.1."""

import hashlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote

import pytest

from gptkit.converter import resolve as module
from gptkit.converter.resolve import Resolved, resolve
from gptkit.errors import CheckpointError, GptkitError, InvalidInput, Offline, UntrustedInput

OLD, NEW = "a" * 40, "b" * 40
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


@dataclass
class Repo:
    files: dict[str, bytes]
    commit: str = NEW
    refs: dict[str, str] = field(default_factory=dict)
    status: int = 200
    error_code: str = ""
    message: str = ""


@dataclass
class Hub:
    """The part of the hub's HTTP interface that a download of single files uses."""

    repos: dict[str, Repo] = field(default_factory=dict)
    moved: dict[str, str] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    url: str = ""
    server: ThreadingHTTPServer | None = None

    def start(self) -> None:
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler(self))
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        """After this, connections are refused."""
        if self.server is not None:
            self.server.shutdown()
            self.server.server_close()
            self.server = None


def handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *arguments: object) -> None:
            """Nothing: the test's output is not the server's log."""

        def do_HEAD(self) -> None:
            name, marker, rest = self.path.lstrip("/").partition("/resolve/")
            revision, _, file = rest.partition("/")
            revision, file = unquote(revision), unquote(file)
            hub.asked.append(f"{self.command} {name} {revision} {file}")
            if not marker or (name not in hub.repos and name not in hub.moved):
                return self.answer(401, {"X-Error-Message": "Invalid username or password."})
            if name in hub.moved:
                return self.answer(307, {"Location": f"/{hub.moved[name]}/resolve/{rest}"})
            repo = hub.repos[name]
            if repo.status != 200:
                told = {"X-Error-Code": repo.error_code, "X-Error-Message": repo.message}
                return self.answer(repo.status, {key: value for key, value in told.items() if value})
            commits = {repo.commit, *repo.refs.values()}
            commit = revision if revision in commits else {"main": repo.commit, **repo.refs}.get(revision)
            if commit is None:
                return self.answer(404, {"X-Error-Code": "RevisionNotFound"})
            if file not in repo.files:
                return self.answer(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
            body = repo.files[file]
            return self.answer(200, {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha1(body).hexdigest()}"'}, body)

        do_GET = do_HEAD  # noqa: N815, http.server looks the name up

        def answer(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

    return Handler


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    constants = pytest.importorskip("huggingface_hub.constants")
    hub = Hub()
    hub.start()
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    yield hub
    hub.stop()


def names(resolved: Resolved) -> set[str]:
    return {path.name for path in resolved.path.iterdir()}


# --- samples and local paths


def test_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SAMPLES_DIR", tmp_path)
    (tmp_path / "gpt2").mkdir()
    assert resolve("sample:gpt2", offline=True) == Resolved("sample:gpt2", tmp_path / "gpt2", None, "sample")
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
        assert resolve(ref, repo_of=lambda name: "other/repo") == Resolved(ref, path, None, "path")
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
    assert resolved.ref == "org/name"
    assert resolved.revision == NEW
    assert resolved.path.is_relative_to(tmp_path / "cache")
    assert names(resolved) == SHARDED.keys() - {"pytorch_model.bin", "README.md"}
    assert (resolved.path / "m-2.safetensors").read_bytes() == b"two"


def test_a_single_file_and_the_chat_template(hub: Hub) -> None:
    hub.repos["org/name"] = Repo({**SHARDED, **SINGLE})
    assert names(resolve("hf://org/name")) == {*SINGLE, "tokenizer.json"}


def test_config_alone(hub: Hub) -> None:
    hub.repos["org/name"] = Repo(SHARDED)
    assert names(resolve("org/name", weights=False)) == {"config.json"}
    asked = len(hub.asked)
    resolve("org/name", weights=False)
    assert len(hub.asked) == asked
    assert "m-1.safetensors" in names(resolve("org/name"))


def test_the_cache_is_used_before_the_network_and_without_it(hub: Hub) -> None:
    hub.repos["org/name"] = Repo(SHARDED)
    first = resolve("org/name")
    asked = len(hub.asked)
    assert resolve("org/name") == first
    assert len(hub.asked) == asked
    hub.stop()
    assert resolve("org/name") == first
    assert resolve("org/name", offline=True) == first
    assert resolve(f"org/name@{NEW}", offline=True).revision == NEW


def test_another_cache(hub: Hub, tmp_path: Path) -> None:
    hub.repos["org/name"] = Repo(SINGLE)
    assert resolve("org/name", cache=tmp_path / "mine").path.is_relative_to(tmp_path / "mine")
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
    assert resolve("gpt2").revision == NEW
    resolved = resolve("gpt2-small@main", repo_of={"gpt2-small": "openai-community/gpt2"}.get)
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
    with pytest.raises(CheckpointError, match=r"lacks m-2\.safetensors"):
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
        ("org/banned", "refused .403", "hf auth whoami"),
        ("org/token", "refused .401 Invalid credentials", "hf auth whoami"),
        ("org/gguf", "has no config.json", "GGUF"),
    ):
        with pytest.raises(InvalidInput, match=message) as caught:
            resolve(name)
        assert caught.value.exit_code == 4
        assert hint in str(caught.value)


def test_a_failing_hub_is_as_good_as_none(hub: Hub) -> None:
    hub.repos["org/name"] = Repo(SINGLE, status=503)
    with pytest.raises(Offline, match="answered 503"):
        resolve("org/name")


def test_a_refused_connection_is_told_at_once(hub: Hub) -> None:
    hub.stop()
    started = time.monotonic()
    with pytest.raises(Offline, match="could not be reached") as caught:
        resolve("org/name")
    assert time.monotonic() - started < 5
    assert caught.value.exit_code == 5
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
    # As snapshot_download leaves it: files, but no record of what the repository does not have.
    for marker in (tmp_path / "cache" / "models--org--name" / ".no_exist").rglob("*.*"):
        marker.unlink()
    assert resolve("org/name", offline=True) == resolved
    hub.stop()
    assert resolve("org/name") == resolved


def test_a_cache_that_cannot_be_written(hub: Hub, tmp_path: Path) -> None:
    hub.repos["org/name"] = Repo(SINGLE)
    (tmp_path / "file").touch()
    with pytest.raises(GptkitError, match="could not write org/name to the cache: Not a directory"):
        resolve("org/name", cache=tmp_path / "file" / "cache")


def test_a_process_of_its_own(hub: Hub, tmp_path: Path) -> None:
    # Not through patched constants: the hub's address and cache as a user sets them.
    hub.repos["org/name"] = Repo(SHARDED)
    code = "from gptkit.converter.resolve import resolve; r = resolve('org/name'); print(r.revision, r.path)"
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    commit, path = done.stdout.split()
    assert commit == NEW
    assert Path(path).is_relative_to(tmp_path / "home")
    assert (Path(path) / "m-1.safetensors").read_bytes() == b"one"


def test_importing_costs_nothing() -> None:
    code = "import sys, gptkit.converter.resolve; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"numpy", "huggingface_hub", "torch", "transformers"} & set(loaded)
