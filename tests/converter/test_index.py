"""Finding a checkpoint's weights: which files count, what an index may say, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
from helpers.covering import examples
from helpers.writing import SafetensorsWriter
from hypothesis import given, settings
from hypothesis import strategies as st

from gptkit.converter.index import read_index, weight_files
from gptkit.errors import CheckpointError, InvalidInput, UntrustedInput

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def save(path: Path, names: list[str]) -> Path:
    with SafetensorsWriter(path, [(name, "F32", (2,)) for name in names], {"format": "pt"}) as writer:
        for name in names:
            writer.write(name, np.zeros(2, np.float32))
    return path


def save_index(folder: Path, weight_map: object, name: str = "model.safetensors.index.json") -> Path:
    (folder / name).write_text(json.dumps({"metadata": {"total_size": 24}, "weight_map": weight_map}))
    return folder


def sharded(folder: Path) -> dict[str, str]:
    save(folder / SHARDS[0], ["a", "b"])
    save(folder / SHARDS[1], ["c"])
    weight_map = {"a": SHARDS[0], "b": SHARDS[0], "c": SHARDS[1]}
    save_index(folder, weight_map)
    return weight_map


def test_single_file_in_a_folder_or_by_itself(tmp_path: Path) -> None:
    path = save(tmp_path / "model.safetensors", ["a", "b"])
    found = weight_files(tmp_path)
    assert found.format == "safetensors"
    assert found.files == (path,)
    assert list(found.tensors) == ["a", "b"]
    assert found.tensors["b"].path == path
    assert found.tensors["b"].shape == (2,)
    assert sum(tensor.nbytes for tensor in found.tensors.values()) == 16
    assert weight_files(path) == found


def test_shards_with_an_index(tmp_path: Path) -> None:
    sharded(tmp_path)
    found = weight_files(tmp_path)
    assert [path.name for path in found.files] == list(SHARDS)
    assert {name: tensor.path.name for name, tensor in found.tensors.items()} == {
        "a": SHARDS[0],
        "b": SHARDS[0],
        "c": SHARDS[1],
    }


def test_one_file_wins_over_an_index_as_in_transformers(tmp_path: Path) -> None:
    sharded(tmp_path)
    save(tmp_path / "model.safetensors", ["z"])
    assert list(weight_files(tmp_path).tensors) == ["z"]


def test_safetensors_win_over_pickles(tmp_path: Path) -> None:
    save(tmp_path / "model.safetensors", ["a"])
    (tmp_path / "pytorch_model.bin").write_bytes(b"never read")
    assert weight_files(tmp_path, allow_pickle=True).format == "safetensors"


def test_a_single_file_of_another_name_counts(tmp_path: Path) -> None:
    save(tmp_path / "consolidated.safetensors", ["a"])
    assert list(weight_files(tmp_path).tensors) == ["a"]
    save(tmp_path / "second.safetensors", ["b"])
    with pytest.raises(CheckpointError, match=r"has 2 .safetensors files but no model.safetensors.index.json"):
        weight_files(tmp_path)


def test_a_file_that_the_index_does_not_name_is_left_alone(tmp_path: Path) -> None:
    sharded(tmp_path)
    save(tmp_path / "consolidated.safetensors", ["a", "b", "c"])
    assert len(weight_files(tmp_path).files) == 2


def test_symlinks_as_in_the_hub_cache(tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshots" / "rev"
    blobs = tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    sharded(snapshot)
    for path in list(snapshot.iterdir()):
        blob = path.rename(blobs / f"{abs(hash(path.name)):x}")
        path.symlink_to(Path("..") / ".." / "blobs" / blob.name)
    assert sorted(weight_files(snapshot).tensors) == ["a", "b", "c"]


@pytest.mark.parametrize(
    "name",
    [
        "../other/x.safetensors",
        "/etc/x.safetensors",
        "sub/x.safetensors",
        "..\\x.safetensors",
        "C:x.safetensors",
        "..",
        ".",
        "",
        "a\0.safetensors",
        "a\n.safetensors",
        "model.bin",
        "config.json",
    ],
)
def test_an_index_must_not_reach_elsewhere(tmp_path: Path, name: str) -> None:
    weight_map = sharded(tmp_path)
    outside = tmp_path.parent / "other"
    outside.mkdir(exist_ok=True)
    (outside / "x.safetensors").unlink(missing_ok=True)
    save(outside / "x.safetensors", ["a"])
    save_index(tmp_path, {**weight_map, "a": name})
    with pytest.raises(UntrustedInput):
        weight_files(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"weight_map": []}',
        '{"weight_map": {}}',
        '{"weight_map": {"a": 1}}',
        '{"weight_map": {"a": null}}',
        '{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}',
        '{"weight_map": ' + "[" * 100_000,
        '{"weight_map": {"\\ud800": "x.safetensors"}}',
        '{"weight_map": NaN}',
    ],
)
def test_an_index_of_another_form_is_refused(tmp_path: Path, text: str) -> None:
    sharded(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError):
        weight_files(tmp_path)


def test_missing_shards_are_named(tmp_path: Path) -> None:
    sharded(tmp_path)
    (tmp_path / SHARDS[1]).unlink()
    with pytest.raises(CheckpointError, match=f"1 of 2 weight files are missing: {SHARDS[1]}"):
        weight_files(tmp_path)


def test_a_truncated_shard_is_named(tmp_path: Path) -> None:
    sharded(tmp_path)
    shard = tmp_path / SHARDS[1]
    size = shard.stat().st_size
    shard.write_bytes(shard.read_bytes()[:-3])
    with pytest.raises(CheckpointError, match=f"{SHARDS[1]} is truncated: {size} bytes expected, {size - 3} found"):
        weight_files(tmp_path)


def test_index_and_shards_must_name_the_same_tensors(tmp_path: Path) -> None:
    weight_map = sharded(tmp_path)
    save_index(tmp_path, {**weight_map, "d": SHARDS[1]})
    with pytest.raises(CheckpointError, match="1 tensors in the index but not in the shard it names: d "):
        weight_files(tmp_path)
    save_index(tmp_path, {"a": SHARDS[0], "c": SHARDS[1]})
    with pytest.raises(CheckpointError, match=r"1 tensors in a shard but not in the index: b \(model-00001"):
        weight_files(tmp_path)
    save_index(tmp_path, {**weight_map, "a": SHARDS[1]})
    with pytest.raises(CheckpointError, match="1 tensors in the index but not in the shard it names: a "):
        weight_files(tmp_path)


def test_one_key_in_two_shards(tmp_path: Path) -> None:
    sharded(tmp_path)
    (tmp_path / SHARDS[1]).unlink()
    save(tmp_path / SHARDS[1], ["b", "c"])
    with pytest.raises(CheckpointError, match=r"1 tensors in more than one shard: b \(model-00001.*, model-00002"):
        weight_files(tmp_path)


def test_long_lists_are_cut_and_counted(tmp_path: Path) -> None:
    weight_map = sharded(tmp_path)
    save_index(tmp_path, {**weight_map, **{f"x{at:02d}\x1b[31m": SHARDS[0] for at in range(25)}})
    with pytest.raises(CheckpointError, match=r"25 tensors .* and 15 more") as caught:
        weight_files(tmp_path)
    assert "x09" in caught.value.message
    assert "x10" not in caught.value.message
    assert "\x1b" not in caught.value.message


@pytest.mark.parametrize("name", ["pytorch_model.bin", "weights.pt", "model.pth", "pytorch_model.bin.index.json"])
def test_pickles_are_refused_with_the_reason_and_the_flag(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text('{"weight_map": {"a": "pytorch_model-1.bin"}}')
    (tmp_path / "pytorch_model-1.bin").touch()
    with pytest.raises(UntrustedInput, match="can run any code") as caught:
        weight_files(tmp_path)
    assert "--allow-pickle" in str(caught.value)
    found = weight_files(tmp_path, allow_pickle=True)
    assert found.format == "pickle"
    assert found.files
    assert found.tensors == {}
    if name.endswith((".pt", ".pth")):
        with pytest.raises(UntrustedInput):
            weight_files(tmp_path / name)


def test_a_pickle_index_is_checked_too(tmp_path: Path) -> None:
    save_index(tmp_path, {"a": "../evil.bin"}, "pytorch_model.bin.index.json")
    with pytest.raises(UntrustedInput, match="outside"):
        weight_files(tmp_path, allow_pickle=True)
    save_index(tmp_path, {"a": "absent.bin"}, "pytorch_model.bin.index.json")
    with pytest.raises(CheckpointError, match=r"missing: absent\.bin"):
        weight_files(tmp_path, allow_pickle=True)


def test_what_holds_no_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="contains no weights"):
        weight_files(tmp_path)
    with pytest.raises(InvalidInput, match="no such file or folder"):
        weight_files(tmp_path / "absent")
    (tmp_path / "notes.txt").touch()
    with pytest.raises(InvalidInput, match="not a weight file"):
        weight_files(tmp_path / "notes.txt")
    with pytest.raises(InvalidInput, match="cannot read"):
        weight_files(tmp_path / ("x" * 300))


shard_names = st.sampled_from(
    [*SHARDS, "../x.safetensors", "absent.safetensors", "x" * 300 + ".safetensors"]
) | st.text(max_size=8)
json_values = st.none() | st.booleans() | st.integers() | st.floats() | st.lists(st.text(max_size=3), max_size=2)


@settings(max_examples=examples(300), deadline=None)
@given(
    weight_map=st.dictionaries(st.sampled_from("abcdé"), shard_names | json_values, max_size=4) | json_values,
    raw=st.none() | st.binary(max_size=40),
)
def test_any_index_is_read_or_refused(tmp_path: Path, weight_map: object, raw: bytes | None) -> None:
    if not (tmp_path / SHARDS[0]).exists():
        sharded(tmp_path)
    save_index(tmp_path, weight_map)
    if raw is not None:
        (tmp_path / "model.safetensors.index.json").write_bytes(raw)
    try:
        found = weight_files(tmp_path)
    except (CheckpointError, UntrustedInput):
        return
    assert found.tensors.keys() == read_index(tmp_path / "model.safetensors.index.json").keys()
