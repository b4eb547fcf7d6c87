"""The tree behind a reference, without a weight: what there may be, and what is asked of the hub for it."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from helpers.families import CONFIGS, save_hf, spec_of
from helpers.hubserver import Big, Hub, Repo
from safetensors.numpy import save_file

import gptkit
from gptkit.architectures.presets import presets
from gptkit.components import ModelSpec
from gptkit.converter.formats.gguf_header import Incomplete, open_header, parse_header
from gptkit.converter.outline import outline
from gptkit.converter.resolve import read_spec
from gptkit.converter.tree import write_spec
from gptkit.errors import CheckpointError, GptkitError, InvalidInput, Offline, UntrustedInput


def gguf(name: str, folder: Path) -> Path:
    """A family's checkpoint as a GGUF file."""
    save_hf(CONFIGS[name], folder / "hf")
    gptkit.convert(folder / "hf", folder / "out", to="gguf")
    (path,) = (folder / "out").glob("*.gguf")
    return path


def same(spec: ModelSpec, path: Path) -> bool:
    """Whether it is what the whole file says."""
    return spec == read_spec(path)[0] == gptkit.open_checkpoint(path).spec


def huge(path: Path, more: int) -> Big:
    """The file with so many bytes more of metadata, before its tensors."""
    data, key = path.read_bytes(), b"some.text"
    version, tensors, keys = struct.unpack_from("<IQQ", data, 4)
    fixed = struct.pack("<Q", len(key)) + key + struct.pack("<IQ", 8, more)
    text = struct.pack("<Q", len(key)) + key + struct.pack("<IQ", 8, more + -(len(fixed) + more) % 32)
    added = text + b"x" * (more + -(len(fixed) + more) % 32)
    whole = b"GGUF" + struct.pack("<IQQ", version, tensors, keys + 1) + added + data[24:]
    return Big(whole, len(whole))


# --- here -------------------------------------------------------------------------------------------------------------


def test_presets_have_a_config_and_no_file() -> None:
    found = outline("Qwen3-8B", offline=True)
    config = presets()["qwen3-8b"].config
    assert (found.path, found.revision, found.origin.family) == (None, None, "qwen3")
    assert json.loads(found.origin.config_text or "") == config
    with pytest.raises(InvalidInput, match="Did you mean qwen3-8b"):
        outline("qwen3-8bb")


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3", "bloom"])
def test_a_gguf_file(name: str, tmp_path: Path) -> None:
    path = gguf(name, tmp_path)
    found = outline(str(path))
    assert found.path == path and same(found.spec, path)
    (counted,) = gptkit.params(path)
    assert counted.spec == found.spec


def test_a_pickle_is_read_where_that_is_allowed(tmp_path: Path) -> None:
    gptkit.convert("sample:gpt2", tmp_path / "nano", to="nanogpt_tanh")
    for path in (tmp_path / "nano", tmp_path / "nano" / "ckpt.pt"):
        with pytest.raises(UntrustedInput, match="is a pickle") as raised:
            outline(str(path))
        assert "--allow-pickle" in str(raised.value.hint)
        found = outline(str(path), allow_pickle=True)
        assert found.spec == gptkit.open_checkpoint(path, allow_pickle=True).spec


def test_a_tree_and_a_config_by_any_name(tmp_path: Path) -> None:
    path = write_spec(spec_of(CONFIGS["bloom"]), tmp_path / "mine.json")
    assert outline(str(path)).spec == spec_of(CONFIGS["bloom"])
    (tmp_path / "other.json").write_text(json.dumps(CONFIGS["falcon-rw"]))
    assert outline(str(tmp_path / "other.json")).spec == spec_of(CONFIGS["falcon-rw"])


# --- what is not here -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["./x", "runs/x/y", "~/x", "/absent/x", "x/", "runs/x.gguf", "runs/x", "runs/x@main"])
@pytest.mark.parametrize("offline", [True, False])
def test_a_path_that_is_missing_is_no_question_for_the_hub(
    name: str, offline: bool, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "first").mkdir(parents=True)
    if not offline and name.startswith("runs/x") and name.count("/") == 1 and not name.endswith("gguf"):
        hub.stop()  # it may be a repository; that the hub cannot be reached is not all there is to say
    with pytest.raises(InvalidInput, match="no such file or folder") as raised:
        outline(name, offline=offline)
    if name.startswith("runs/x") and name.count("/") == 1 and not name.endswith("gguf"):
        assert "The local folder runs contains first." in str(raised.value.hint)
    assert hub.asked == []


def test_a_repository_is_still_asked_for(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").mkdir()
    hub.repos["org/name"] = Repo({"config.json": json.dumps(CONFIGS["gpt2"]).encode()})
    assert outline("org/name").spec == spec_of(CONFIGS["gpt2"])
    with pytest.raises(Offline, match="not in the local cache"):
        outline("nobody/name", offline=True)


def test_where_a_gguf_of_the_hub_is_to_be_named_with_it(hub: Hub) -> None:
    with pytest.raises(InvalidInput) as raised:
        outline("org/name/x.gguf")
    assert "hf://org/name/x.gguf" in str(raised.value.hint) and hub.asked == []


# --- a GGUF on the hub ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "llama", "llama-3", "bloom"])
def test_the_header_alone_is_fetched(name: str, hub: Hub, tmp_path: Path) -> None:
    """Of a vocabulary larger than the first question, too, and the head's ties are told."""
    path = gguf(name, tmp_path)
    hub.repos["org/model"] = Repo({"model.gguf": huge(path, 3 * 2**20), "README.md": b"x"})
    found = outline("org/model")
    assert found.spec == read_spec(path)[0] and found.origin.family == read_spec(path)[1].family
    assert found.revision == hub.repos["org/model"].commit and found.path is None
    assert outline("hf://org/model/model.gguf").spec == found.spec
    assert outline("hf://org/model@main/model.gguf").spec == found.spec
    assert gptkit.params("org/model")[0].spec == found.spec
    assert not any(line.startswith("GET") and "Range" in line for line in hub.asked)
    assert all("bytes=" in line for line in hub.asked if line.startswith("GET"))


def test_weights_are_never_fetched(hub: Hub, tmp_path: Path) -> None:
    config = {**CONFIGS["llama"], "vocab_size": 60_000}
    save_hf(config, tmp_path / "hf")
    gptkit.convert(tmp_path / "hf", tmp_path / "out", to="gguf", dtype="float32")
    (path,) = (tmp_path / "out").glob("*.gguf")
    hub.repos["org/model"] = Repo({"model.gguf": path.read_bytes()})
    found = outline("org/model")
    assert found.spec == read_spec(path)[0]
    assert path.stat().st_size > 10**7 and hub.sent["model.gguf"] < 2_000_000


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_that_may_repeat_the_embedding_is_compared_in_part(tied: bool, hub: Hub, tmp_path: Path) -> None:
    """Far behind the header: that what was not fetched is not taken for zeros."""
    config = {**CONFIGS["llama"], "vocab_size": 60_000, "tie_word_embeddings": False}
    save_hf(config, tmp_path / "hf")
    gptkit.convert(tmp_path / "hf", tmp_path / "out", to="gguf", dtype="float32")
    (path,) = (tmp_path / "out").glob("*.gguf")
    if tied:
        header = open_header(path)
        a, b = (header.tensors[name] for name in ("token_embd.weight", "output.weight"))
        data = bytearray(path.read_bytes())
        data[b.start : b.end] = data[a.start : a.end]
        path.write_bytes(data)
    hub.repos["org/model"] = Repo({"model.gguf": path.read_bytes()})
    found = outline("org/model")
    assert found.spec == read_spec(path)[0] and found.spec.head.tied is tied
    assert any("compared in part" in note for note in found.notes)
    assert hub.sent["model.gguf"] < 4_000_000


def test_several_files_are_to_be_named(hub: Hub, tmp_path: Path) -> None:
    data = gguf("gpt2", tmp_path).read_bytes()
    hub.repos["org/model"] = Repo({"model-Q4_0.gguf": data, "model-F16.gguf": data})
    with pytest.raises(
        InvalidInput, match=r"no config.json, but 2 GGUF files: model-F16.gguf, model-Q4_0.gguf"
    ) as raised:
        outline("org/model")
    named = str(raised.value.hint).removeprefix("Give one of these files, such as ")
    assert outline(named).spec.vocab_size == CONFIGS["gpt2"]["vocab_size"]
    hub.repos["org/none"] = Repo({"README.md": b"x"})
    with pytest.raises(InvalidInput, match=r"org/none has no config.json"):
        outline("org/none")
    with pytest.raises(InvalidInput, match=r"has no file absent.gguf"):
        outline("hf://org/model/absent.gguf")
    with pytest.raises(InvalidInput, match="only one of the files of a split model"):
        outline("hf://org/model/m-00001-of-00002.gguf")
    with pytest.raises(InvalidInput):
        outline("hf://org/model/../x.gguf")
    with pytest.raises(Offline, match="not in the local cache"):
        outline("hf://org/model/model-F16.gguf", offline=True)


@pytest.mark.parametrize(
    ("start", "size", "message"),
    [
        (
            b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 5) + b"a.key" + struct.pack("<IQ", 8, 2**30),
            2**40,
            "claims to have a header of more than",
        ),
        (b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q", 2**50), 2**40, "a tensor's name"),
        (b"GGUF" + struct.pack("<IQQ", 9, 0, 0), 10**6, "version 9"),
        (b"<html>", 10**6, "is not a GGUF file"),
        (b"", 0, "is not a GGUF file"),
    ],
)
def test_headers_that_are_none(start: bytes, size: int, message: str, hub: Hub) -> None:
    hub.repos["org/model"] = Repo({"model.gguf": Big(start, size)})
    with pytest.raises(GptkitError, match=message):
        outline("org/model")
    assert hub.sent.get("model.gguf", 0) < 3_000_000


def test_a_connection_that_breaks_off(hub: Hub, tmp_path: Path) -> None:
    data = gguf("gpt2", tmp_path).read_bytes()
    hub.repos["org/model"] = Repo({"model.gguf": data}, cut={"model.gguf": [100, 100, 100, 100]})
    with pytest.raises(Offline):
        outline("org/model")


def test_a_header_cut_anywhere_asks_for_more_or_is_refused(tmp_path: Path) -> None:
    """Whatever part of the file has come: the same header, more of it wanted, or an error; nothing else."""
    data = gguf("llama", tmp_path).read_bytes()
    whole = parse_header("x", data)
    end = min(tensor.start for tensor in whole.tensors.values())
    with pytest.raises(Incomplete):
        parse_header("x", data[:24], len(data))
    # Between the last entry and the first tensor there are zeros, to a multiple of 32.
    last = next(reversed(list(whole.tensors)))
    whole_header = data.index(last.encode(), 0, end) + len(last) + 4 + 8 * len(whole.tensors[last].shape) + 12
    for length in np.linspace(24, end, 200).astype(int):
        if length < whole_header:
            with pytest.raises(Incomplete) as raised:
                parse_header("x", data[:length], len(data))
            assert length < raised.value.needed <= whole_header
        else:
            found = parse_header("x", data[:length], len(data))
            assert (found.metadata, found.tensors) == (whole.metadata, whole.tensors)
    with pytest.raises(CheckpointError, match="truncated"):
        parse_header("x", data[:end], end)


# --- a folder whose files disagree ---


def test_weights_that_are_not_the_configs_are_noted(tmp_path: Path) -> None:
    save_hf(CONFIGS["llama"], tmp_path / "m")
    assert outline(str(tmp_path / "m")).notes == ()
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    config["num_hidden_layers"] += 1
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    (note,) = outline(str(tmp_path / "m")).notes
    assert note.startswith("its weights do not match its config.json") and "missing" in note
    for path in (tmp_path / "m").glob("*.safetensors*"):
        path.unlink()
    assert outline(str(tmp_path / "m")).notes == (), "there is nothing to disagree with"


# --- what is no model by itself ---------------------------------------------------------------------------------------


def adapter(folder: Path, **fields: object) -> Path:
    folder.mkdir()
    config = {"peft_type": "LORA", "base_model_name_or_path": "org/base", "r": 8, **fields}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file({"base_model.model.x.lora_A.weight": np.ones((8, 4), np.float32)}, folder / "adapter_model.safetensors")
    return folder


@pytest.mark.parametrize("file", ["", "adapter_config.json", "adapter_model.safetensors"])
def test_an_adapter_is_told_as_one(file: str, tmp_path: Path) -> None:
    folder = adapter(tmp_path / "my adapter")
    for reading in (outline, gptkit.open_checkpoint):
        with pytest.raises(InvalidInput, match="is a LoRA adapter of rank 8 for org/base, not a model") as caught:
            reading(str(folder / file))
        assert caught.value.hint == f"Merge it: gptkit swap org/base OUT --merge-lora '{folder}'"


def test_other_adapters(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="is an adapter for org/base, not a model") as caught:
        outline(str(adapter(tmp_path / "ia3", peft_type="IA3")))
    assert "merges only LoRA" in (caught.value.hint or "")
    with pytest.raises(InvalidInput, match="is a LoRA adapter, not a model"):
        outline(str(adapter(tmp_path / "odd", base_model_name_or_path="\x1b[1m", r="x")))
    both = adapter(tmp_path / "both")
    (both / "config.json").write_text(json.dumps(CONFIGS["llama"]))
    with pytest.raises(CheckpointError, match="only the weights of an adapter"):
        gptkit.open_checkpoint(both)
    hub.repos["org/adapter"] = Repo({each.name: each.read_bytes() for each in adapter(tmp_path / "hub").iterdir()})
    with pytest.raises(InvalidInput, match="org/adapter is an adapter") as caught:
        outline("org/adapter")
    assert (
        caught.value.hint or ""
    ) == "Merge the adapter into its base model: gptkit swap BASE OUT --merge-lora org/adapter"


def test_a_gguf_with_a_vocabulary_alone(tmp_path: Path) -> None:
    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    tokens = b"".join(map(text, ("a", "b", "c")))
    keys = text("general.architecture") + struct.pack("<I", 8) + text("llama")
    keys += text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 3) + tokens
    (tmp_path / "vocab.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + keys)
    for reading in (outline, gptkit.open_checkpoint):
        with pytest.raises(InvalidInput, match="contains only a vocabulary of 3 tokens and no weights"):
            reading(str(tmp_path / "vocab.gguf"))
