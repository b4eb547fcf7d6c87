"""torch's distributed checkpoints: the same bytes there and back, what torch writes and reads, and bad ones."""

import io
import json
import os
import pickle
import random
import shutil
import struct
import subprocess
import sys
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.covering import examples, few
from helpers.families import CONFIGS, save_hf
from helpers.processes import HANGS, at_most
from torch.distributed.checkpoint import FileSystemReader, HuggingFaceStorageReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata

from gptkit.analysis.params import params
from gptkit.converter.checkpoint import open_checkpoint
from gptkit.converter.convert import convert
from gptkit.converter.manifest import check_manifest
from gptkit.errors import CheckpointError, InvalidInput, UntrustedInput

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # said for no_dist=True too
TESTS = Path(__file__).parents[1]
SHARDED = 40_000
FAMILIES = ["llama", "gpt2", "falcon-7b", "qwen2", "bloom"]


def raw_tensors(folder: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Name -> (dtype, shape, bytes) of all safetensors files, read with nothing but the format's definition."""
    found: dict[str, tuple[str, list[int], bytes]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        data = path.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        for name, entry in json.loads(data[8 : 8 + length]).items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                found[name] = (entry["dtype"], entry["shape"], data[8 + length + begin : 8 + length + end])
    return found


def back(folder: Path, out: Path, **options: Any) -> dict[str, tuple[str, list[int], bytes]]:
    """The tensors of a distributed checkpoint, as an HF folder has them."""
    convert(folder, out, "hf", allow_pickle=True, **options)
    return raw_tensors(out)


def metadata(folder: Path) -> Metadata:
    return FileSystemReader(folder).read_metadata()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama of 97 words, which two ranks cannot share evenly."""
    folder = tmp_path_factory.mktemp("llama") / "llama"
    save_hf(CONFIGS["llama"], folder, torch.bfloat16)
    return folder


@pytest.fixture
def written(llama: Path, tmp_path: Path) -> Path:
    """gptkit's, to be damaged."""
    convert(llama, tmp_path / "written", "dcp")
    return tmp_path / "written"


# --- there and back


@few(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("config", FAMILIES)
def test_there_and_back(config: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = save_hf(CONFIGS[config], tmp_path / "source", dtype)
    convert(tmp_path / "source", tmp_path / "dcp", "dcp", max_shard_bytes=SHARDED)
    assert check_manifest(tmp_path / "dcp") == []
    files = sorted(path.name for path in (tmp_path / "dcp").glob("*.distcp"))
    assert len(files) > 1 and files[0] == "__0_0.distcp"
    assert back(tmp_path / "dcp", tmp_path / "back") == raw_tensors(tmp_path / "source")
    assert (tmp_path / "back" / "config.json").read_bytes() == (tmp_path / "source" / "config.json").read_bytes()

    # As a program that trains this model loads it: a tied head under both of its names.
    state = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())


def test_by_way_of_shared_names(tmp_path: Path) -> None:
    """GPT-2's fused, transposed tensors are put together on the way out."""
    save_hf(CONFIGS["gpt2"], tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "local")
    convert(tmp_path / "local", tmp_path / "dcp", "dcp")
    convert(tmp_path / "dcp", tmp_path / "local2", allow_pickle=True)
    assert back(tmp_path / "dcp", tmp_path / "back") == raw_tensors(tmp_path / "source")
    assert raw_tensors(tmp_path / "local2") == raw_tensors(tmp_path / "local")


def test_each_record_is_an_archive_of_torch_save(llama: Path, written: Path) -> None:
    found = metadata(written)
    expected = raw_tensors(llama)
    for index, place in found.storage_data.items():
        data = (written / place.relative_path).read_bytes()[place.offset : place.offset + place.length]
        assert place.offset % 64 == 0
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            assert archive.testzip() is None
        tensor = torch.load(io.BytesIO(data), weights_only=True)
        assert tensor.view(torch.uint8).numpy().tobytes() == expected[index.fqn][2]
    assert found.storage_meta is not None and found.storage_meta.checkpoint_id is None, "no path of this machine"


def test_casts_are_told(tmp_path: Path) -> None:
    save_hf(CONFIGS["llama"], tmp_path / "wide")
    done = convert(tmp_path / "wide", tmp_path / "narrow", "dcp", dtype="bfloat16").transferred
    assert done is not None and len(done.rounded) == len(raw_tensors(tmp_path / "wide"))
    assert {kind for kind, _, _ in back(tmp_path / "narrow", tmp_path / "back").values()} == {"BF16"}


def test_what_travels_along(llama: Path, tmp_path: Path) -> None:
    shutil.copytree(llama, tmp_path / "source")
    (tmp_path / "source" / "tokenizer.json").write_bytes(b'{"version":"1.0"}\r\n')
    convert(tmp_path / "source", tmp_path / "dcp", "dcp")
    back(tmp_path / "dcp", tmp_path / "back")
    for folder in ("dcp", "back"):
        assert (tmp_path / folder / "tokenizer.json").read_bytes() == b'{"version":"1.0"}\r\n'
    assert params(str(tmp_path / "dcp"))[0].count.total == params(str(llama))[0].count.total


# --- what torch writes


def test_what_one_process_of_torch_saves(tmp_path: Path) -> None:
    """A tied head twice, a tensor that lies transposed, and objects beside the model."""
    model = save_hf(CONFIGS["gpt2"], tmp_path / "source")
    state: dict[str, Any] = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    name = "transformer.h.1.mlp.c_fc.weight"
    state[name] = state[name].T.contiguous().T
    dcp.save({"state": state, "step": 3}, checkpoint_id=tmp_path / "saved", no_dist=True)
    with pytest.raises(InvalidInput, match=r"without a config.json.*\n.*config\.json"):
        open_checkpoint(tmp_path / "saved", allow_pickle=True)
    shutil.copy(tmp_path / "source" / "config.json", tmp_path / "saved")
    assert back(tmp_path / "saved", tmp_path / "back") == raw_tensors(tmp_path / "source")
    notes = open_checkpoint(tmp_path / "saved", allow_pickle=True).notes
    assert any("step" in note for note in notes) and any("lm_head.weight" in note for note in notes)


@pytest.fixture(scope="module")
def saved(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders that two ranks of torch wrote; they have also read what gptkit wrote, and compared."""
    out = tmp_path_factory.mktemp("ranks")
    convert(llama, out / "gptkit", "dcp", max_shard_bytes=SHARDED)
    done = subprocess.run(
        [sys.executable, str(TESTS / "saved_by_ranks.py"), str(llama), str(out), str(out / "gptkit")],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=HANGS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for name in ("plain", "nested", "parts", "whole"):
        shutil.copy(llama / "config.json", out / name)
    return out


@pytest.mark.exhaustive
@few(1)
@pytest.mark.parametrize("name", ["plain", "nested", "parts", "whole"])
def test_what_two_ranks_of_torch_save(name: str, saved: Path, llama: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(saved / name, allow_pickle=name in ("plain", "nested"))
    assert checkpoint.format == ("hf" if name == "whole" else "dcp")
    if name in ("plain", "nested"):
        chunks = (
            metadata(saved / name).state_dict_metadata[("model." * (name == "nested")) + "model.norm.weight"].chunks
        )
        assert len(list((saved / name).glob("*.distcp"))) == 2 and chunks
    assert back(saved / name, tmp_path / "back") == raw_tensors(llama)
    assert any("optim" in note for note in checkpoint.notes) == (name == "nested")
    convert(saved / name, tmp_path / "local", dtype="float32", allow_pickle=True)


def test_a_part_that_is_missing(saved: Path, tmp_path: Path) -> None:
    for name, pattern, told in (
        ("plain", "__1_0.distcp", "missing"),
        ("parts", "shard-00002-*", "some chunks are missing|expected"),
    ):
        shutil.copytree(saved / name, tmp_path / name)
        next((tmp_path / name).glob(pattern)).unlink()
        with pytest.raises(CheckpointError, match=told):
            open_checkpoint(tmp_path / name, allow_pickle=True)


def test_torchs_hugging_face_reader_reads_ours(llama: Path, tmp_path: Path) -> None:
    convert(llama, tmp_path / "local")
    convert(tmp_path / "local", tmp_path / "hf", "hf", max_shard_bytes=SHARDED)
    state = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, (_, shape, _) in raw_tensors(llama).items()}
    dcp.load(state, storage_reader=HuggingFaceStorageReader(str(tmp_path / "hf")), no_dist=True)
    for name, (_, _, data) in raw_tensors(llama).items():
        assert state[name].view(torch.uint8).numpy().tobytes() == data


# --- bad ones


def test_a_pickle_has_to_be_allowed(written: Path, tmp_path: Path) -> None:
    with pytest.raises(UntrustedInput, match="--allow-pickle"):
        convert(written, tmp_path / "out", "hf")
    assert not (tmp_path / "out").exists()


class Runs:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.path),))


def refused(folder: Path, match: str, kind: type[InvalidInput] = CheckpointError) -> None:
    with pytest.raises(kind, match=match):
        open_checkpoint(folder, allow_pickle=True)


def test_nothing_of_a_pickle_runs(written: Path, tmp_path: Path) -> None:
    found = metadata(written)
    found.planner_data = Runs(tmp_path / "ran")
    (written / ".metadata").write_bytes(pickle.dumps(found))
    refused(written, "posix.mkdir")
    for name, code in (("by extension", b"\x80\x04\x82\x01."), ("getattr", b"\x80\x04cbuiltins\ngetattr\n.")):
        (written / ".metadata").write_bytes(code)
        refused(written, "plain weights do not need|plain data"), name
    assert not (tmp_path / "ran").exists()


def test_nothing_of_a_record_runs(written: Path, tmp_path: Path) -> None:
    """A tensor's own pickle is read as strictly."""
    found = metadata(written)
    index, place = next(iter(found.storage_data.items()))
    buffer = io.BytesIO()
    torch.save({"tensor": Runs(tmp_path / "ran")}, buffer)
    with (written / place.relative_path).open("ab") as file:
        start = file.tell()
        file.write(buffer.getvalue())
    found.storage_data[index] = _StorageInfo(place.relative_path, start, len(buffer.getvalue()))
    (written / ".metadata").write_bytes(pickle.dumps(found))
    refused(written, "mkdir")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("opcodes", "told"),
    [
        (b"\x80\x04Nr\xff\xff\xff\x7f.", "needs more memory"),  # a memo of two billion entries
        (b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x0f.", "damaged"),  # bytes that are not there
        (b"\x80\x04ctorch\nSize\n(" + b"K\x01" * 40 + b"t\x85R.", "no metadata"),
        (b"\x80\x04" + b"(" * 100_000 + b"l" * 100_000 + b".", "no metadata|damaged"),
        (b"", "damaged"),
        (b"\x80\x04N.", "no metadata"),
    ],
)
def test_pickles_that_cost_nothing(opcodes: bytes, told: str, written: Path) -> None:
    (written / ".metadata").write_bytes(opcodes)
    with at_most(1):
        refused(written, told)


def changed(folder: Path, name: str, what: str) -> None:
    """Make one thing of a checkpoint's metadata wrong."""
    found = metadata(folder)
    entry: Any = found.state_dict_metadata[name]
    index = next(index for index in found.storage_data if index.fqn == name)
    place: Any = found.storage_data[index]
    if what == "outside":
        shutil.copy(folder / place.relative_path, folder.parent / "outside.distcp")
        place.relative_path = "../outside.distcp"
    elif what == "beyond":
        place.length += 10**9
    elif what == "negative":
        place.offset = -64
    elif what == "shape":
        entry.size = torch.Size([4 * size for size in entry.size])
        entry.chunks[0].sizes = entry.size
    elif what == "hole":
        entry.chunks[0].sizes = torch.Size([1, *entry.size[1:]])
    elif what == "twice":
        entry.chunks.append(ChunkStorageMetadata(entry.chunks[0].offsets, entry.chunks[0].sizes))
    elif what == "dtype":
        entry.properties.dtype = torch.float16
    elif what == "another":
        other = next(index for index in found.storage_data if index.fqn == "model.norm.weight")
        found.storage_data[index] = found.storage_data[other]
    elif what == "extension":
        place.transform_descriptors = ["stream.zstd/1"]
    elif what == "nowhere":
        del found.storage_data[index]
    elif what == "gone":
        del found.state_dict_metadata[name]
    (folder / ".metadata").write_bytes(pickle.dumps(found))


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("outside", "outside of its folder"),
        ("beyond", "truncated"),
        ("negative", "invalid file or position"),
        ("shape", ".metadata says"),
        ("hole", "some chunks are missing"),
        ("twice", "occur twice"),
        ("dtype", ".metadata says F16"),
        ("another", ".metadata says"),
        ("extension", "extension"),
        ("nowhere", "in the files is missing"),
        ("gone", "1 of .* missing.*down_proj"),
    ],
)
def test_metadata_that_lies(what: str, told: str, written: Path) -> None:
    changed(written, "model.layers.0.mlp.down_proj.weight", what)
    refused(written, told, UntrustedInput if what == "outside" else CheckpointError)


def test_a_storage_smaller_than_its_tensor(llama: Path, tmp_path: Path) -> None:
    """One element, and strides of zero: 1.3 KB that would be gigabytes."""
    state = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, (_, shape, _) in raw_tensors(llama).items()}
    dcp.save(state, checkpoint_id=tmp_path / "saved", no_dist=True)
    shutil.copy(llama / "config.json", tmp_path / "saved")
    found = metadata(tmp_path / "saved")
    index = next(index for index in found.storage_data if index.fqn == "model.embed_tokens.weight")
    buffer = io.BytesIO()
    torch.save(torch.zeros(1, dtype=torch.bfloat16).expand(97, 48), buffer)
    (tmp_path / "saved" / "small.distcp").write_bytes(buffer.getvalue())
    found.storage_data[index] = _StorageInfo("small.distcp", 0, len(buffer.getvalue()))
    (tmp_path / "saved" / ".metadata").write_bytes(pickle.dumps(found))
    refused(tmp_path / "saved", "the file is too short for them")


def test_any_damage_is_told_as_damage(written: Path) -> None:
    """Bytes changed at random, in the pickle and around the tensors."""
    generator = random.Random(0)
    found = metadata(written)
    places = [(written / place.relative_path, place.offset) for place in found.storage_data.values()]
    for turn in range(examples(40)):
        path, start = (written / ".metadata", 0) if turn % 2 else generator.choice(places)
        before = path.read_bytes()
        data = bytearray(before)
        end = len(data) if turn % 2 else start + 700
        for _ in range(generator.randint(1, 4)):
            data[generator.randrange(start, min(end, len(data)))] = generator.randrange(256)
        path.write_bytes(data[: generator.randrange(len(data))] if turn % 7 == 0 else data)
        with at_most(2), suppress(InvalidInput):  # or nothing that matters was hit
            open_checkpoint(written, allow_pickle=True)
        path.write_bytes(before)
    open_checkpoint(written, allow_pickle=True)


def test_torchs_own_reader_runs_what_metadata_says(written: Path, tmp_path: Path) -> None:
    """So that `.metadata` is not given to it; its weights-only reader knows no pickle of this protocol."""
    found = metadata(written)
    found.planner_data = Runs(tmp_path / "ran")
    (written / ".metadata").write_bytes(pickle.dumps(found))
    found = metadata(written)
    assert (tmp_path / "ran").exists()
    unknown = pytest.raises(pickle.UnpicklingError, match="Unsupported operand")
    with pytest.warns(UserWarning, match="protocol 4"), unknown:
        torch._weights_only_unpickler.load(io.BytesIO(pickle.dumps(found)))
