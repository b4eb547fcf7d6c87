"""The safetensors format: what is read, what is refused, and that what is written is what the library writes."""

import hashlib
import json
import os
import struct
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from helpers.covering import examples
from helpers.processes import imported
from helpers.writing import SafetensorsWriter
from hypothesis import given, settings
from hypothesis import strategies as st

from gptkit.converter.block_file import CHUNK
from gptkit.converter.index import single
from gptkit.converter.safetensors import DTYPES, TensorInfo, build_header, read_header
from gptkit.converter.weights import Weights
from gptkit.errors import CheckpointError, GptkitError

CARRIED = [name for name, dtype in DTYPES.items() if dtype.carrier is not None]


@contextmanager
def opened(path: Path) -> Iterator[Weights]:
    yield Weights(single(path, read_header(path)).tensors)


def raw_file(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(**fields: object) -> dict[str, object]:
    return {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], **fields}


def write_raw(folder: Path, content: bytes) -> Path:
    path = folder / "model.safetensors"
    path.write_bytes(content)
    return path


def random_array(dtype: str, shape: Sequence[int], seed: int = 0) -> np.ndarray:
    carrier = DTYPES[dtype].carrier
    assert carrier is not None
    count = int(np.prod(shape, dtype=int)) * carrier.itemsize
    raw = np.random.default_rng(seed).integers(0, 2 if dtype == "BOOL" else 256, count, dtype=np.uint8)
    return raw.view(carrier).reshape(tuple(shape))


# --- reading


def test_header_gives_places_in_the_order_of_the_bytes(tmp_path: Path) -> None:
    header = {
        "__metadata__": {"format": "pt"},
        "late": entry(data_offsets=[4, 8]),
        "early": entry(data_offsets=[0, 4]),
        "none": entry(shape=[0, 3], data_offsets=[8, 8]),
    }
    path = write_raw(tmp_path, raw_file(header, b"\0" * 8))
    data = path.stat().st_size - 8
    read = read_header(path)
    assert read.metadata == {"format": "pt"}
    assert list(read.tensors.values()) == [
        TensorInfo("early", "F32", (1,), data, data + 4),
        TensorInfo("late", "F32", (1,), data + 4, data + 8),
        TensorInfo("none", "F32", (0, 3), data + 8, data + 8),
    ]
    assert read.tensors["late"].nbytes == 4


def test_read_gives_read_only_views_that_outlive_the_file(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    values = {
        "f": torch.randn(3, 5),
        "b": torch.randn(4).to(torch.bfloat16),
        "s": torch.tensor(7),
        "z": torch.zeros(0, 3),
    }
    save_file(values, tmp_path / "m.safetensors")
    with opened(tmp_path / "m.safetensors") as file:
        views = {name: file.read(name) for name in file.info}
        with pytest.raises(KeyError):
            file.read("absent")
    assert {name: view.shape for name, view in views.items()} == {"f": (3, 5), "b": (4,), "s": (), "z": (0, 3)}
    assert np.array_equal(views["f"], values["f"].numpy())
    assert np.array_equal(views["b"], values["b"].view(torch.uint16).numpy())
    assert views["s"] == 7
    for view in views.values():
        assert not view.flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            view[...] = 0


def test_file_without_tensors(tmp_path: Path) -> None:
    with opened(write_raw(tmp_path, raw_file({}))) as file:
        assert file.info == {}


def test_unaligned_data_is_read(tmp_path: Path) -> None:
    header = json.dumps({"a": entry(shape=[2], data_offsets=[0, 8])}).encode()
    header += b" " * (1 - len(header) % 2)  # an odd length, so that no float lies on a multiple of its size
    path = write_raw(tmp_path, raw_file(header, struct.pack("<2f", 1.5, -2.0)))
    with opened(path) as file:
        assert file.read("a").tolist() == [1.5, -2.0]


def test_packed_types_are_listed_but_not_read(tmp_path: Path) -> None:
    path = write_raw(tmp_path, raw_file({"a": entry(dtype="F4", shape=[4], data_offsets=[0, 2])}, b"ab"))
    with opened(path) as file:
        assert read_header(path).tensors["a"].nbytes == 2
        with pytest.raises(CheckpointError, match="packs elements of 4 bits"):
            file.read("a")


GOOD = raw_file({"a": entry()}, b"\0" * 4)
TWICE = b'{"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}'

REFUSED: dict[str, tuple[bytes, str]] = {
    "empty file": (b"", "truncated.*at least 8 bytes, 0 found"),
    "seven bytes": (b"\0" * 7, "at least 8 bytes, 7 found"),
    "header past the end": (struct.pack("<Q", 100) + b"{}", "108 bytes expected for its header alone, 10 found"),
    "huge header length": (b"\xff" * 16, "claims a header of"),
    "git-lfs pointer": (b"version https://git-lfs.github.com/spec/v1\n", "git-lfs pointer"),
    "no header at all": (b"\0" * 8, "does not start with"),
    "not UTF-8": (raw_file(b'{"\xff":1}'), "cannot be read"),
    "not JSON": (raw_file(b"{nope}"), "cannot be read"),
    "a list": (raw_file(b"[]"), "does not start with"),
    "more than one value": (raw_file(b"{} {}"), "cannot be read"),
    "NaN": (raw_file(b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,0]}}'), "NaN is not JSON"),
    "number of 5000 digits": (raw_file(b'{"a":' + b"9" * 5000 + b"}"), "cannot be read"),
    "half a surrogate pair": (
        raw_file(b'{"\\ud800":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}'),
        "cannot be read",
    ),
    "deep nesting": (raw_file(b'{"a":' + b"[" * 100_000), "nested too deeply"),
    "key twice": (raw_file(TWICE), "'a' occurs twice"),
    "metadata key twice": (raw_file(b'{"__metadata__":{"a":"1","a":"2"}}'), "occurs twice"),
    "metadata of a number": (raw_file({"__metadata__": {"a": 1}}), "__metadata__"),
    "entry is no object": (raw_file({"a": 1}), "must have exactly the fields dtype, shape"),
    "entry without shape": (raw_file({"a": {"dtype": "F32", "data_offsets": [0, 0]}}), "must have exactly"),
    "entry with a stranger": (
        raw_file({"a": entry(strides=[1])}, b"\0" * 4),
        "must have exactly the fields dtype, shape",
    ),
    "unknown dtype": (raw_file({"a": entry(dtype="F33")}, b"\0" * 4), "unknown dtype 'F33'"),
    "dtype is a list": (raw_file({"a": entry(dtype=["F32"])}, b"\0" * 4), "unknown dtype"),
    "negative size": (raw_file({"a": entry(shape=[-1, -1])}, b"\0" * 4), "not a list of up to"),
    "minus nought": (raw_file(b'{"a":{"dtype":"F32","shape":[-0],"data_offsets":[0,0]}}'), "has the size -0"),
    "float size": (raw_file({"a": entry(shape=[1.0])}, b"\0" * 4), "not a list of up to"),
    "bool size": (raw_file({"a": entry(shape=[True])}, b"\0" * 4), "not a list of up to"),
    "shape is a number": (raw_file({"a": entry(shape=1)}, b"\0" * 4), "not a list of up to"),
    "100 dimensions": (raw_file({"a": entry(shape=[1] * 100)}, b"\0" * 4), "not a list of up to"),
    "size beyond 64 bits": (raw_file({"a": entry(shape=[2**64])}), "not a list of up to"),
    "product overflows": (raw_file({"a": entry(shape=[2**40, 2**40])}), "more bytes than a file can have"),
    "overflow hidden by a zero": (
        raw_file({"a": entry(shape=[2**40, 2**40, 0], data_offsets=[0, 0])}),
        "more bytes than a file can have",
    ),
    "three offsets": (raw_file({"a": entry(data_offsets=[0, 4, 8])}, b"\0" * 4), "two ascending"),
    "descending offsets": (raw_file({"a": entry(data_offsets=[4, 0])}, b"\0" * 4), "two ascending"),
    "negative offset": (raw_file({"a": entry(data_offsets=[-4, 0])}, b"\0" * 4), "two ascending"),
    "offsets unlike shape": (raw_file({"a": entry(shape=[2])}, b"\0" * 4), "needs 8 bytes, but its offsets span 4"),
    "half a byte": (raw_file({"a": entry(dtype="F4", shape=[3], data_offsets=[0, 2])}, b"ab"), "fill whole bytes"),
    "overlap": (raw_file({"a": entry(), "b": entry(data_offsets=[2, 6])}, b"\0" * 6), "overlaps"),
    "same bytes twice": (raw_file({"a": entry(), "b": entry()}, b"\0" * 4), "overlaps"),
    "hole": (raw_file({"a": entry(data_offsets=[4, 8])}, b"\0" * 8), "leaves unused bytes"),
    "empty tensor inside another": (
        raw_file({"a": entry(), "b": entry(shape=[0], data_offsets=[2, 2])}, b"\0" * 4),
        "overlaps",
    ),
    "truncated data": (GOOD[:-1], f"truncated: {len(GOOD)} bytes expected, {len(GOOD) - 1} found"),
    "trailing bytes": (GOOD + b"x", f"trailing bytes: {len(GOOD)} bytes expected, {len(GOOD) + 1} found"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_files_are_refused_by_name(case: str, tmp_path: Path) -> None:
    content, message = REFUSED[case]
    path = write_raw(tmp_path, content)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_header(path)
    assert str(path) in caught.value.message
    assert len(caught.value.message) < 1000


def test_what_is_not_a_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "absent", tmp_path / "pipe", tmp_path / "a\0b", tmp_path / ("x" * 300)):
        with pytest.raises(CheckpointError):
            read_header(path)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
sizes = st.integers(-2, 6) | st.sampled_from([2**31, 2**62, 2**63, 2**64, True, 1.0, None])
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*DTYPES, "F128", "f32", 3]),
        "shape": st.lists(sizes, max_size=4) | json_values,
        "data_offsets": st.lists(sizes, min_size=1, max_size=3) | json_values,
    }
)
headers = st.dictionaries(st.text(max_size=4) | st.just("__metadata__"), entries | json_values, max_size=4)


@settings(max_examples=examples(400), deadline=None)
@given(header=headers, data=st.binary(max_size=40), cut=st.integers(0, 40))
def test_any_header_is_read_or_refused(tmp_path: Path, header: dict[str, Any], data: bytes, cut: int) -> None:
    content = raw_file(json.dumps(header).encode(), data)
    read_or_refuse(write_raw(tmp_path, content[: len(content) - cut]))


@settings(max_examples=examples(400), deadline=None)
@given(at=st.integers(0, 10_000), value=st.integers(0, 255), drop=st.integers(0, 3), raw=st.binary(max_size=60))
def test_any_mutation_is_read_or_refused(tmp_path: Path, at: int, value: int, drop: int, raw: bytes) -> None:
    tensors = [("a.weight", "F32", (2, 3)), ("b", "BF16", (4,)), ("c", "BOOL", (0,))]
    header, infos = build_header(tensors, {"format": "pt"})
    content = bytearray(header + b"\0" * (max(info.end for info in infos) - len(header)))
    at %= len(content)
    content[at : at + drop] = bytes([value])
    read_or_refuse(write_raw(tmp_path, bytes(content)))
    read_or_refuse(write_raw(tmp_path, raw))


def read_or_refuse(path: Path) -> None:
    try:
        with opened(path) as file:
            for name, info in read_header(path).tensors.items():
                if DTYPES[info.dtype].carrier is not None:
                    assert file.read(name).nbytes == info.nbytes
    except CheckpointError:
        return


# --- writing


@settings(max_examples=examples(150), deadline=None)
@given(
    names=st.lists(st.text(max_size=6).filter(lambda text: text != "__metadata__"), unique=True, max_size=8),
    metadata=st.none() | st.dictionaries(st.text(max_size=4), st.text(max_size=4), max_size=1),
    data=st.data(),
)
def test_files_equal_the_librarys(tmp_path: Path, names: list[str], metadata: dict[str, str] | None, data: Any) -> None:
    from safetensors.numpy import save_file

    known = ["BOOL", "U8", "I8", "I16", "U16", "F16", "I32", "U32", "F32", "C64", "F64", "I64", "U64"]
    dtypes = [data.draw(st.sampled_from(known)) for _ in names]
    shapes = [tuple(data.draw(st.lists(st.integers(0, 4), max_size=3))) for _ in names]
    arrays = {n: random_array(d, s, seed) for seed, (n, d, s) in enumerate(zip(names, dtypes, shapes, strict=True))}
    save_file(arrays, tmp_path / "theirs", metadata)
    with SafetensorsWriter(fresh(tmp_path / "ours"), list(zip(names, dtypes, shapes, strict=True)), metadata) as writer:
        for name in data.draw(st.permutations(names)):
            writer.write(name, arrays[name])
    theirs = (tmp_path / "theirs").read_bytes()
    if not names and metadata == {}:
        # Here safetensors 0.8.0 writes what no reader takes: {},"__metadata__":{}}
        theirs = build_header([], {})[0]
    assert (tmp_path / "ours").read_bytes() == theirs
    assert writer.record.sha256 == hashlib.sha256(theirs).hexdigest()
    hashes = {name: tensor.xxh3 for name, tensor in writer.record.tensors.items()}
    assert hashes == {name: xxhash.xxh3_128(arrays[name].tobytes()).hexdigest() for name in writer.tensors}
    assert list(read_header(tmp_path / "ours").tensors.values()) == list(writer.tensors.values())


def fresh(path: Path) -> Path:
    path.unlink(missing_ok=True)
    return path


def test_every_dtype_is_ordered_as_the_library_does(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    dtypes = {
        "BOOL": torch.bool,
        "U8": torch.uint8,
        "I8": torch.int8,
        "F8_E5M2": torch.float8_e5m2,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E8M0": torch.float8_e8m0fnu,
        "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
        "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
        "I16": torch.int16,
        "U16": torch.uint16,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "I32": torch.int32,
        "U32": torch.uint32,
        "F32": torch.float32,
        "C64": torch.complex64,
        "F64": torch.float64,
        "I64": torch.int64,
        "U64": torch.uint64,
    }
    assert sorted(dtypes) == sorted(CARRIED)
    # Names that sort against the order of the types, two a type, shapes that make every type end off its alignment.
    arrays = {
        f"{letter}{rank:02d}": (name, random_array(name, (3, 1), rank))
        for letter in "zé"
        for rank, name in enumerate(sorted(dtypes))
    }
    theirs = {key: torch.from_numpy(array.view(np.uint8)).view(dtypes[name]) for key, (name, array) in arrays.items()}
    save_file(theirs, tmp_path / "theirs", {"format": "pt"})
    tensors = [(key, name, array.shape) for key, (name, array) in arrays.items()]
    with SafetensorsWriter(tmp_path / "ours", tensors, {"format": "pt"}) as writer:
        for key, (_, array) in arrays.items():
            writer.write(key, array)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_metadata_keeps_the_callers_order() -> None:
    header, _ = build_header([], {"b": "1", "a": "2"})
    assert header[8:].rstrip() == b'{"__metadata__":{"b":"1","a":"2"}}'
    assert build_header([], None)[0] == struct.pack("<Q", 8) + b"{}      "


@pytest.mark.parametrize(
    "tensors",
    [
        [("a", "F32", (1,)), ("a", "F32", (1,))],
        [("__metadata__", "F32", (1,))],
        [("a", "float32", (1,))],
        [("a", "F32", (-1,))],
        [("a", "F32", (2**40, 2**40))],
        [("\ud800", "F32", (1,))],
    ],
)
def test_headers_that_no_reader_takes_are_not_built(tensors: list[tuple[str, str, tuple[int, ...]]]) -> None:
    with pytest.raises(CheckpointError):
        build_header(tensors, {})


def test_a_view_of_another_file_is_written_as_it_lies(tmp_path: Path) -> None:
    array = random_array("F32", (4, 6))
    tensors = [("w", "F32", (4, 6)), ("t", "F32", (6, 4))]
    with SafetensorsWriter(tmp_path / "a", tensors) as writer:
        writer.write("w", array)
        writer.write("t", array.T)  # not contiguous
    with opened(tmp_path / "a") as file, SafetensorsWriter(tmp_path / "b", tensors) as copy:
        assert np.array_equal(file.read("t").view(np.uint32), array.T.view(np.uint32))
        for name in tensors:
            copy.write(name[0], file.read(name[0]))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_tensors_are_written_from_several_threads(tmp_path: Path) -> None:
    arrays = {f"t{at}": random_array("F32", (500, 7), at) for at in range(40)}
    with (
        SafetensorsWriter(tmp_path / "a", [(name, "F32", (500, 7)) for name in arrays]) as writer,
        ThreadPoolExecutor(8) as pool,
    ):
        for done in [pool.submit(writer.write, name, array) for name, array in arrays.items()]:
            done.result()
    with opened(tmp_path / "a") as file:
        assert all(file.read(name).tobytes() == array.tobytes() for name, array in arrays.items())
    assert writer.record.sha256 == hashlib.sha256((tmp_path / "a").read_bytes()).hexdigest()


def test_bool_bytes_other_than_0_and_1_survive(tmp_path: Path) -> None:
    odd = np.arange(6, dtype=np.uint8).view(np.bool_).reshape(2, 3)
    with SafetensorsWriter(tmp_path / "a", [("m", "BOOL", (3, 2))]) as writer:
        writer.write("m", odd.T)
    assert (tmp_path / "a").read_bytes()[-6:] == bytes([0, 3, 1, 4, 2, 5])


def test_wrong_writes_are_refused(tmp_path: Path) -> None:
    writer = SafetensorsWriter(tmp_path / "a", [("a", "F32", (2,)), ("b", "BF16", (2,)), ("c", "F32", (2,))])
    with pytest.raises(CheckpointError, match="not planned for this file"):
        writer.write("d", np.zeros(2, np.float32))
    with pytest.raises(CheckpointError, match="more than 8 bytes were written for tensor 'c'"):
        writer.write("c", np.zeros(3, np.float32))
    with pytest.raises(CheckpointError, match="2 of the 4 bytes of tensor 'b' were written"):
        writer.write("b", np.zeros(1, np.float16))
    writer.write("a", np.zeros(2, np.float32))
    with pytest.raises(CheckpointError, match="written twice"):
        writer.write("a", np.zeros(2, np.float32))
    with pytest.raises(RuntimeError):
        _ = writer.record
    with pytest.raises(CheckpointError, match="2 of 3 tensors were not written: 'c', 'b'"):
        writer.close()


def test_a_disk_that_gives_back_other_bytes_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.pwrite

    def corrupt(fd: int, data: Any, at: int) -> int:
        changed = bytearray(data)
        changed[-1] ^= 1
        return whole(fd, changed, at)

    writer = SafetensorsWriter(tmp_path / "a", [("a", "F32", (2,))])
    monkeypatch.setattr(os, "pwrite", corrupt)
    with pytest.raises(GptkitError, match="differs from what gptkit wrote"):
        writer.write("a", np.ones(2, np.float32))


def test_blocks_are_copied_from_another_file(tmp_path: Path) -> None:
    """Longer than a chunk, from an odd place; a source that ends early is told."""
    data = np.random.default_rng(0).integers(0, 256, 3 * CHUNK + 17, np.uint8)
    (tmp_path / "source").write_bytes(b"abc" + data.tobytes())
    with (tmp_path / "source").open("rb") as source:
        seen = []
        tensors = [("b", "U8", (len(data) - 5,)), ("a", "U8", (5,))]
        with SafetensorsWriter(tmp_path / "out", tensors) as writer:
            writer.copy("b", source.fileno(), 8, lambda chunk: seen.append(chunk.copy()))
            writer.copy("a", source.fileno(), 3)
        assert np.array_equal(np.concatenate(seen), data[5:])
        with opened(tmp_path / "out") as file:
            assert np.array_equal(file.read("a"), data[:5])
            assert np.array_equal(file.read("b"), data[5:])
        assert writer.record.sha256 == hashlib.sha256((tmp_path / "out").read_bytes()).hexdigest()
        with pytest.raises(CheckpointError, match="cannot read tensor 'b'"):
            SafetensorsWriter(tmp_path / "short", tensors).copy("b", source.fileno(), 9)


def test_an_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"mine")
    with pytest.raises(GptkitError, match="File exists"):
        SafetensorsWriter(tmp_path / "a", [])
    assert (tmp_path / "a").read_bytes() == b"mine"


def test_short_writes_are_completed_and_errors_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: whole(fd, memoryview(data)[:7], at))
    array = random_array("I64", (5, 5))
    with SafetensorsWriter(tmp_path / "a", [("a", "I64", (5, 5))]) as writer:
        writer.write("a", array)
    with opened(tmp_path / "a") as file:
        assert np.array_equal(file.read("a"), array)

    def full(fd: int, data: object, at: int) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(GptkitError, match="No space left"):
        SafetensorsWriter(tmp_path / "b", [("a", "I64", (5, 5))])


def test_an_exception_lets_go_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), SafetensorsWriter(tmp_path / "a", [("a", "F32", (2,))]) as writer:
        raise KeyboardInterrupt
    with pytest.raises(RuntimeError, match="not closed"):
        _ = writer.record


def test_mode_follows_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        SafetensorsWriter(tmp_path / "a", []).close()
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640


def test_the_module_needs_no_torch() -> None:
    code = "import gptkit.converter.safetensors, gptkit.converter.index"
    assert not imported(code, "torch", "transformers", "huggingface_hub", "safetensors")
