"""Headers by range requests, against a hub of our own on 127.0.0.1: what is asked for, and what is believed."""

import json
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import transformers
from helpers.families import CONFIGS, save_hf
from helpers.hubserver import NEW, OLD, Big, Hub, Repo

import gptkit
from gptkit.converter.checkpoint import open_checkpoint
from gptkit.converter.convert import convert
from gptkit.converter.hub import Repository
from gptkit.converter.index import WeightFiles, weight_files
from gptkit.converter.remote import weight_headers
from gptkit.errors import CheckpointError, GptkitError, InvalidInput, Offline

CONFIG = {"config.json": b"{}"}


def headers(repo: str, revision: str | None = None, offline: bool = False) -> WeightFiles:
    """Every tensor of a repository, by range requests where the cache has no file."""
    found = weight_headers(Repository.open(repo, revision, offline=offline))
    assert found is not None
    return found


def one_tensor(size: int, name: str = "w", metadata: str = "") -> Big:
    """A file of one U8 tensor, `size` bytes in all."""
    data = 100 + len(name) + 40 + len(metadata)
    entry = {"dtype": "U8", "shape": [size - data], "data_offsets": [0, size - data]}
    text = json.dumps({"__metadata__": {"note": metadata}, name: entry}).encode().ljust(data - 8)
    assert len(text) == data - 8
    return Big(struct.pack("<Q", len(text)) + text, size)


def uploaded(folder: Path) -> dict[str, bytes | Big]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_headers_are_those_of_the_files(hub: Hub, tmp_path: Path) -> None:
    save_hf(CONFIGS["llama"], tmp_path / "hf", max_shard_size="20KB")
    hub.repos["org/name"] = Repo(uploaded(tmp_path / "hf"), cdn=True)
    remote, local = headers("org/name"), weight_files(tmp_path / "hf")
    assert len(local.files) > 2
    assert [path.name for path in remote.files] == [path.name for path in local.files]
    assert {n: replace(each, path=Path(each.path.name)) for n, each in remote.tensors.items()} == {
        n: replace(each, path=Path(each.path.name)) for n, each in local.tensors.items()
    }
    assert remote.headers == local.headers
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
    # What the cache has is read there.
    open_checkpoint("org/name")
    hub.asked.clear()
    assert headers("org/name", NEW).tensors == remote.tensors
    assert hub.fetched() == []
    hub.stop()
    assert headers("org/name", offline=True).tensors == remote.tensors


@pytest.mark.parametrize("ranges", [True, False])
def test_a_terabyte_costs_a_few_kilobytes(hub: Hub, ranges: bool) -> None:
    hub.repos["org/name"] = Repo({**CONFIG, "model.safetensors": one_tensor(10**12)}, ranges=ranges)
    found = headers("org/name")
    assert found.tensors["w"].nbytes == found.tensors["w"].shape[0] > 10**11
    assert sum(hub.sent.values()) < 20_000_000  # what the system's buffers take before the server notices
    if ranges:
        assert hub.sent["model.safetensors"] == 100_000


@pytest.mark.parametrize("ranges", [True, False])
def test_a_long_header(hub: Hub, ranges: bool) -> None:
    body = one_tensor(10**9, metadata="x" * 300_000)
    hub.repos["org/name"] = Repo({**CONFIG, "model.safetensors": body}, ranges=ranges)
    assert "x" * 300_000 in headers("org/name").headers["model.safetensors"]
    lines = [line for line in hub.asked if "GET org/name" in line and "model" in line]
    assert [line.split()[-1] for line in lines] == ["bytes=0-99999", f"bytes=100000-{len(body.start) - 1}"]


@pytest.mark.parametrize(
    ("start", "size", "message"),
    [
        (struct.pack("<Q", 1 << 60), 10**15, "claims a header"),
        (struct.pack("<Q", 90_000_000), 10**8, "claims a header"),
        (struct.pack("<Q", 15_000_000), 1_000_000, "truncated"),
        (struct.pack("<Q", 100) + b"[]", 1000, "does not start"),
        (b"version https://git-lfs", 200, "git-lfs pointer"),
        (b"abc", 3, "truncated"),
        (b"", 0, "truncated"),
    ],
)
def test_a_header_that_lies_is_not_read(hub: Hub, start: bytes, size: int, message: str) -> None:
    hub.repos["org/name"] = Repo({**CONFIG, "model.safetensors": Big(start, size)})
    with pytest.raises(CheckpointError, match=message) as caught:
        headers("org/name")
    assert "hf://org/name/model.safetensors" in str(caught.value)
    assert sum(hub.sent.values()) <= 200_000


def test_a_file_shorter_than_its_header_says(hub: Hub) -> None:
    whole = one_tensor(10**6)
    hub.repos["org/name"] = Repo({**CONFIG, "model.safetensors": Big(whole.start, 10**6 - 1)})
    with pytest.raises(CheckpointError, match="truncated: 1000000 bytes expected, 999999 found"):
        headers("org/name")


def test_what_the_hub_lists_and_serves_must_agree(hub: Hub) -> None:
    hub.repos["org/name"] = Repo({**CONFIG, "model.safetensors": one_tensor(10**6)}, short={"model.safetensors": 5000})
    with pytest.raises(CheckpointError, match="has 5000 bytes, but 1000000 bytes in the hub's list"):
        headers("org/name")


def test_a_connection_that_breaks(hub: Hub) -> None:
    repo = hub.repos["org/name"] = Repo({**CONFIG, "model.safetensors": one_tensor(10**6)})
    repo.cut["model.safetensors"] = [50]
    with pytest.raises(Offline, match=r"model\.safetensors from org/name was interrupted"):
        headers("org/name")
    assert headers("org/name").tensors


def test_a_file_that_changes_between_two_ranges(hub: Hub) -> None:
    repo = hub.repos["org/name"] = Repo({**CONFIG, "model.safetensors": one_tensor(10**6, metadata="x" * 200_000)})

    def change(line: str) -> None:
        if "bytes=100000-" in line:
            repo.files["model.safetensors"] = one_tensor(10**6, metadata="y" * 200_000)

    hub.before = change
    with pytest.raises(Offline, match="changed while it was read"):
        headers("org/name")


def test_a_branch_that_moves_meanwhile(hub: Hub) -> None:
    old, new = one_tensor(10**6, "old"), one_tensor(10**6, "new")
    repo = hub.repos["org/name"] = Repo({**CONFIG, "model.safetensors": new}, commit=OLD)
    repo.history = {OLD: {**CONFIG, "model.safetensors": old}}

    def move(line: str) -> None:
        repo.commit = NEW

    hub.before = move
    assert list(headers("org/name", OLD).tensors) == ["old"]
    assert list(headers("org/name").tensors) == ["new"]
    repo.lies = OLD
    with pytest.raises(InvalidInput, match=f"at commit {NEW} but returned it at {OLD}"):
        headers("org/name", NEW)


def test_a_proxy_that_compresses(hub: Hub) -> None:
    repo = hub.repos["org/name"] = Repo({**CONFIG, "model.safetensors": one_tensor(10**6)})

    def compress(line: str) -> None:
        repo.gzip = "model.safetensors" in line

    hub.before = compress
    with pytest.raises(InvalidInput, match="compressed"):
        headers("org/name")


@pytest.mark.parametrize("says", ["", "bytes", "bytes 5-99/1000000", "bytes 0-/9", "bytes 0-100000/1000000", "0-99999"])
def test_an_answer_with_other_bytes(hub: Hub, says: str) -> None:
    hub.repos["org/name"] = Repo({**CONFIG, "model.safetensors": one_tensor(10**6)}, range_says=says)
    with pytest.raises(InvalidInput, match="does not send the requested bytes"):
        headers("org/name")


def test_an_answer_that_leaves_the_size_open(hub: Hub) -> None:
    hub.repos["org/name"] = Repo({**CONFIG, "model.safetensors": one_tensor(10**6)}, range_says="bytes 0-99999/*")
    assert headers("org/name").tensors
    hub.repos["org/name"].listed = False
    with pytest.raises(InvalidInput, match="does not report the size"):
        headers("org/name")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"status": 403, "error_code": "GatedRepo"}, "gated"),
        ({"status": 500}, "HTTP status 500"),
        ({"status": 429}, "HTTP status 429"),
        ({"status": 401}, "no model"),
    ],
)
def test_refusals(hub: Hub, change: dict[str, object], message: str) -> None:
    repo = hub.repos["org/name"] = Repo({**CONFIG, "model.safetensors": one_tensor(10**6)})

    def refuse(line: str) -> None:
        for key, value in change.items() if "model.safetensors" in line else ():
            setattr(repo, key, value)

    hub.before = refuse
    with pytest.raises(GptkitError, match=message):
        headers("org/name")


def test_a_shard_that_is_not_there(hub: Hub) -> None:
    index = {"weight_map": {"w": "a.safetensors"}}
    files: dict[str, bytes | Big] = {**CONFIG, "model.safetensors.index.json": json.dumps(index).encode()}
    for listed in (True, False):
        hub.repos["org/name"] = Repo(files, listed=listed)
        with pytest.raises(CheckpointError, match=r"(has no|does not have) a\.safetensors"):
            headers("org/name")


def test_shards_and_index_must_agree(hub: Hub) -> None:
    index = {"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}
    hub.repos["org/name"] = Repo(
        {
            **CONFIG,
            "model.safetensors.index.json": json.dumps(index).encode(),
            "a.safetensors": one_tensor(1000, "a"),
            "b.safetensors": one_tensor(1000, "a"),
        }
    )
    with pytest.raises(CheckpointError, match="in more than one shard"):
        headers("org/name")


def test_a_token_stays_with_the_hub(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repos["org/name"] = Repo({**CONFIG, "model.safetensors": one_tensor(10**6)}, token="hf_secret", cdn=True)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert headers("org/name").tensors
    assert any(line.startswith("CDN") for line in hub.asked)


def test_offline(hub: Hub) -> None:
    hub.repos["org/name"] = Repo({**CONFIG, "model.safetensors": one_tensor(1000)})
    headers("org/name")
    with pytest.raises(Offline, match="the weights of org/name are not in the local cache"):
        headers("org/name", offline=True)


# --- a checkpoint of headers


@pytest.fixture
def llama(hub: Hub, tmp_path: Path) -> Path:
    """A repository, org/llama, and the folder that it was made from."""
    folder = tmp_path / "llama"
    save_hf(CONFIGS["llama"], folder, max_shard_size="20KB")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "token_mappings.json").write_text("{}")
    hub.repos["org/llama"] = Repo(uploaded(folder))
    return folder


def weights_sent(hub: Hub) -> int:
    return sum(sent for name, sent in hub.sent.items() if name.endswith(".safetensors"))


def test_a_dry_run_fetches_no_weight(hub: Hub, llama: Path, tmp_path: Path) -> None:
    # Weights much larger than the first range, so that a header alone cannot be the whole file.
    done = convert("org/llama", tmp_path / "out", dry_run=True)
    local = convert(llama, tmp_path / "out", dry_run=True)
    assert [(s.name, s.nbytes) for s in done.plan.shards] == [(s.name, s.nbytes) for s in local.plan.shards]
    assert done.plan.nbytes - len(done.plan.texts["gptkit.json"]) == (
        local.plan.nbytes - len(local.plan.texts["gptkit.json"])
    )
    assert {path.name for path in done.plan.companions} == {path.name for path in local.plan.companions}
    assert done.source.revision == NEW
    assert not (tmp_path / "out").exists()
    for line in hub.asked:
        if ".safetensors" in line and "index" not in line:
            assert line.startswith("GET") and "bytes=0-99999" in line
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.name.endswith(".safetensors")]
    with pytest.raises(RuntimeError, match="only the headers"):
        done.source.tensor("embedding.weight")
    # The real one then needs what is left.
    convert("org/llama", tmp_path / "out")
    assert (tmp_path / "out" / "gptkit.json").is_file()
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["source"]["revision"] == NEW


def test_what_does_not_fit_is_told_from_headers(hub: Hub, llama: Path, tmp_path: Path) -> None:
    config = json.loads((llama / "config.json").read_text())
    files = uploaded(llama)
    files["config.json"] = json.dumps({**config, "intermediate_size": 48}).encode()
    hub.repos["org/llama"] = Repo(files)
    with pytest.raises(CheckpointError, match="do not have the shape"):
        convert("org/llama", tmp_path / "out", dry_run=True)
    files["config.json"] = json.dumps({**config, "model_type": "xlstm", "architectures": ["xLSTMForCausalLM"]}).encode()
    hub.asked.clear()
    hub.repos["org/llama"] = Repo(files, commit=OLD)
    for dry_run in (True, False):
        with pytest.raises(InvalidInput):
            convert("org/llama", tmp_path / "out", dry_run=dry_run)
    assert set(hub.fetched()) == {"config.json"}


def test_pickles_have_no_headers(hub: Hub, tmp_path: Path) -> None:
    hub.repos["org/name"] = Repo({**CONFIG, "pytorch_model.bin": b"x"})
    with pytest.raises(CheckpointError, match="no safetensors weights"):
        headers("org/name")


def test_a_model_of_no_known_family_is_counted_from_headers(hub: Hub, tmp_path: Path) -> None:
    config = {"vocab_size": 97, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3}
    model = transformers.DiffLlamaForCausalLM(transformers.DiffLlamaConfig(**config, num_attention_heads=2))
    model.save_pretrained(tmp_path / "hf", max_shard_size="10KB")
    hub.repos["org/name"] = Repo(uploaded(tmp_path / "hf"), cdn=True)
    for stored in (False, True):
        (found,) = gptkit.params("org/name", stored=stored)
        told = found.as_json()
        assert (told["total"], told["layers"], told["revision"]) == (model.num_parameters(), 3, NEW)
    assert told["stored"]["bytes"] == 4 * model.num_parameters()
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
