"""Pickled weights: read where they lie, by a process that cannot be talked into anything."""

import io
import json
import pickle
import pickletools
import resource
import shutil
import struct
import subprocess
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.covering import few
from helpers.families import CONFIGS, save_hf
from helpers.processes import imported
from safetensors.torch import load_file
from torch._subclasses.fake_tensor import FakeTensorMode

from gptkit.converter import confinement, pickles
from gptkit.converter.checkpoint import open_checkpoint
from gptkit.converter.convert import convert
from gptkit.converter.pickles import Unpickler, Unplain, pickle_weights, unpickled
from gptkit.converter.weights import Stored, Weights
from gptkit.errors import CheckpointError

Edit = Callable[[dict[str, torch.Tensor]], Any]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A gpt2 folder with model.safetensors, and `state`, its tensors as torch.save has them."""
    folder = tmp_path_factory.mktemp("original")
    torch.save(save_hf(CONFIGS["gpt2"], folder).state_dict(), folder / "state")
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A copy with the pickle alone."""
    (tmp_path / "bin").mkdir()
    shutil.copy(original / "config.json", tmp_path / "bin")
    shutil.copy(original / "state", tmp_path / "bin" / "pytorch_model.bin")
    return tmp_path / "bin"


def refused(folder: Path, **options: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        convert(folder, folder.parent / "out", allow_pickle=True, **options)
    assert not (folder.parent / "out").exists()
    message = str(caught.value)
    assert len(message.splitlines()) <= 2
    return message


def change(folder: Path, edit: Edit) -> None:
    state = torch.load(folder / "pytorch_model.bin", weights_only=True)
    edit(state)
    torch.save(state, folder / "pytorch_model.bin")


def archive(path: Path, program: bytes, storages: dict[str, bytes] | None = None) -> Path:
    """An archive of torch.save's form around any pickle."""
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", program)
        for key, data in (storages or {}).items():
            file.writestr(f"archive/data/{key}", data)
    return path


# --- what is there ---


def test_tensors_are_read_and_copied_where_they_lie(folder: Path, original: Path) -> None:
    source = open_checkpoint(folder, allow_pickle=True)
    expected = load_file(original / "model.safetensors")
    data = (folder / "pytorch_model.bin").read_bytes()
    for leaf in source.leaves:
        span = source.span(leaf)
        assert span is not None and span[0] == folder / "pytorch_model.bin"
        theirs = expected[leaf.checkpoint].numpy()
        assert data[span[1] : span[1] + theirs.nbytes] == theirs.tobytes()
        assert np.array_equal(source.read(leaf), theirs)
        assert not source.read(leaf).flags.writeable


def test_every_dtype_and_view(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    state = {
        **{str(t): base.to(t) for t in (torch.float64, torch.float16, torch.bfloat16, torch.int16, torch.uint8)},
        "uint16": torch.arange(5).to(torch.uint16),
        "float8": base.to(torch.float8_e4m3fn),
        "parameter": torch.nn.Parameter(base),
        "transposed": base.T,
        "row": base[2],
        "column": base[:, 1],
        "every second": base[1::2, ::3],
        "once more": base,
        "one": torch.tensor(3.0),
        "none": torch.ones(0, 5),
        "wide": torch.ones(1, 4)[:, :1].expand(2, 1),
        "bool": torch.tensor([True, False]),
    }
    torch.save(state, tmp_path / "all.bin")
    weights = pickle_weights([tmp_path / "all.bin"])
    assert list(weights.info) == list(state)
    for name, tensor in state.items():
        dtype, shape = weights.info[name]
        assert shape == tuple(tensor.shape)
        read = weights.read(name)
        plain = tensor.detach().contiguous()
        if dtype in ("BF16", "U16", "F8_E4M3"):
            plain = plain.view(torch.uint8)
            read = np.ascontiguousarray(read).view(np.uint8).reshape(plain.shape)
        assert np.array_equal(read, plain.numpy()), name
        assert (weights.span(name) is not None) == tensor.is_contiguous(), name


def test_values_beside_tensors(tmp_path: Path) -> None:
    values = {
        "a": 1,
        "b": [1.5, None, "x"],
        "c": (True, {"d": OrderedDict(e=2)}),
        "f": 2**70,
        3: torch.float32,
        "g": {4},
    }
    torch.save(values | {"t": torch.ones(2)}, tmp_path / "x.pt")
    (found,) = unpickled([tmp_path / "x.pt"])
    assert isinstance(found.pop("t"), Stored)
    assert found == {
        "a": 1,
        "b": [1.5, None, "x"],
        "c": [True, {"d": {"e": 2}}],
        "f": Unplain("int"),
        3: Unplain("dtype"),
        "g": [4],
    }


def answers(files: Sequence[Path]) -> Iterator[Any]:
    """As `unpickled`, with a CheckpointError in the place of a file that cannot be read, and not raised."""
    process = Unpickler()
    for path in files:
        try:
            yield process.ask(path, str(path), (str(path.absolute()), 0, None))
        except CheckpointError as error:
            yield error


def test_no_torch_is_imported(folder: Path) -> None:
    program = (
        "from gptkit.converter.convert import convert; "
        f"convert({str(folder)!r}, {str(folder.parent / 'x')!r}, allow_pickle=True)"
    )
    assert not imported(program, "torch")


def save_incrementally(state: dict[str, torch.Tensor], path: Path) -> None:
    """As litgpt's incremental_save: each tensor's bytes as they come, its storage numbered with an integer."""
    writer = torch._C.PyTorchFileWriter(str(path))

    class Numbering(pickle.Pickler):
        count = 0

        def persistent_id(self, each: Any) -> Any:
            if not isinstance(each, torch.storage.TypedStorage):
                return None
            storage, number = each._untyped_storage, Numbering.count
            Numbering.count += 1
            writer.write_record(f"data/{number}", storage, storage.nbytes())
            return "storage", getattr(torch, each._pickle_storage_type()), number, "cpu", each._size()

    text = io.BytesIO()
    Numbering(text, 2).dump(state)
    writer.write_record("data.pkl", text.getvalue(), len(text.getvalue()))
    writer.write_end_of_file()


def save_as_before_1_6(state: dict[str, torch.Tensor], path: Path) -> None:
    torch.save(state, path, _use_new_zipfile_serialization=False)


@pytest.mark.parametrize("save", [save_incrementally, save_as_before_1_6])
@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pth", "model.pt"])
def test_other_ways_to_save_are_read(
    save: Callable[[dict[str, torch.Tensor], Path], None], name: str, folder: Path, original: Path
) -> None:
    state = torch.load(folder / "pytorch_model.bin", weights_only=True)
    (folder / "pytorch_model.bin").unlink()
    save(state, folder / name)
    convert(folder, folder.parent / "back", "hf", allow_pickle=True)
    back = folder.parent / "back" / "model.safetensors"
    assert back.read_bytes() == (original / "model.safetensors").read_bytes()


@pytest.mark.parametrize("save", [save_incrementally, save_as_before_1_6])
def test_other_ways_to_save_keep_dtypes_and_views(
    save: Callable[[dict[str, torch.Tensor], Path], None], tmp_path: Path
) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    state = {str(t): base.to(t) for t in (torch.float64, torch.float16, torch.int16, torch.uint8)}
    state |= {"all": base, "row": base[2], "column": base[:, 1], "none": torch.ones(0, 5), "tied": base}
    save(state, tmp_path / "x.bin")
    weights = pickle_weights([tmp_path / "x.bin"])
    assert list(weights.info) == list(state)
    for name, tensor in state.items():
        assert np.array_equal(weights.read(name), tensor.numpy()), name


def test_what_is_wrong_with_a_file_from_before_1_6(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    save_as_before_1_6({"x": torch.arange(64.0)}, path)
    whole = path.read_bytes()
    size = whole.rindex(struct.pack("<q", 64))
    cases = {
        "truncated": whole[:-1],
        "does not match its tensors": whole[:size] + struct.pack("<q", 65) + whole[size + 8 :],
        "torch.save did not write": pickle.dumps({"x": 1}, 2),
        "big-endian": whole.replace(b"little_endianq\x02\x88", b"little_endianq\x02\x89"),
        "truncated|does not match its tensors": whole.replace(b"K@Nt", b"K\xffNt"),
        "damaged": whole[:200],
    }
    for message, data in cases.items():
        assert data != whole
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match=message):
            pickle_weights([path])
    generator = np.random.default_rng(0)
    files = [tmp_path / f"{index}.bin" for index in range(300)]
    for file in files:
        data = bytearray(whole)
        for at in generator.integers(0, size + 8, generator.integers(1, 4)):
            data[at] = generator.integers(256)
        file.write_bytes(data)
    for file, answer in zip(files, answers(files), strict=True):
        if isinstance(answer, CheckpointError):
            assert file.name in str(answer) and len(str(answer)) < 600
            continue
        try:
            weights = Weights(dict(pickles.named_tensors(file, answer)))
            weights.check()
            for name, (dtype, _) in weights.info.items():
                if dtype == "F32":
                    weights.read(name).sum()
        except CheckpointError:
            pass


# --- what is no dictionary of tensors ---


@few(4)
@pytest.mark.parametrize("where", ["with a config", "alone"])
@pytest.mark.parametrize("kind", ["state_dict", "model", "nested", "parallel", "with a number"])
def test_what_is_in_a_file_is_told(kind: str, where: str, folder: Path) -> None:
    file = folder / "pytorch_model.bin"
    state = torch.load(file, weights_only=True)
    wrapped, told, save = {
        "state_dict": (
            {"state_dict": {f"module.{name}": each for name, each in state.items()}, "epoch": 3, "optimizer": {}},
            ("41 tensors in ['state_dict']: module.transformer.wte.weight [97, 48], ", "epoch (int), optimizer (dict"),
            "torch.save({k.removeprefix('module.'): v for k, v in torch.load(FILE)['state_dict'].items()}, ",
        ),
        "model": (
            {"model": state, "iter": 7},
            ("41 tensors in ['model']: transformer.wte.weight [97, 48], ", "it also contains iter (int)"),
            "torch.save(torch.load(FILE)['model'], ",
        ),
        "nested": (
            {"a": {"b": {f"net.inner.{name}": each for name, each in state.items()}}},
            ("41 tensors in ['a']['b']: net.inner.transformer", "gpt2, ", "with the prefix 'net.inner.'"),
            "removeprefix('net.inner.'): v for k, v in torch.load(FILE)['a']['b']",
        ),
        "parallel": (
            {f"module.{name}": each for name, each in state.items()},
            ("module.transformer.wte.weight", "gpt2, ", "with the prefix 'module.'"),
            "removeprefix('module.')" if where == "alone" else "without the prefix 'module.'",
        ),
        "with a number": (
            {**state, "step": 3},
            ("41 tensors: transformer.wte.weight [97, 48], ", "it also contains step (int)"),
            "for k, v in torch.load(FILE).items() if torch.is_tensor(v)}, ",
        ),
    }[kind]
    torch.save(wrapped, file)
    if where == "alone":
        (folder / "config.json").unlink()
        file = file.rename(folder / "x.pt")
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder if where == "with a config" else file, allow_pickle=True)
    message = str(caught.value)
    assert all(part in message for part in (*told, "he tensor names are those of gpt2", save)), message
    assert len(message.splitlines()) == 2 and "nanoGPT" not in message


def test_the_way_that_is_told_leads_on(folder: Path, original: Path) -> None:
    file = folder / "pytorch_model.bin"
    state = torch.load(file, weights_only=True)
    torch.save({"epoch": 3, "state_dict": {f"module.{name}": each for name, each in state.items()}}, file)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder, allow_pickle=True)
    hint = (caught.value.hint or "").partition(": ")[2]
    program = f"import torch; FILE = {str(file)!r}; {hint}"
    subprocess.run([sys.executable, "-c", program], cwd=folder, check=True)
    convert(folder, folder.parent / "back", "hf", allow_pickle=True)
    back = folder.parent / "back" / "model.safetensors"
    assert back.read_bytes() == (original / "model.safetensors").read_bytes()


@pytest.mark.parametrize("wrapped", [False, True])
def test_litgpts_own_names(wrapped: bool, folder: Path) -> None:
    names = ["lm_head.weight", "transformer.wte.weight", "transformer.ln_f.weight"]
    names += [
        f"transformer.h.{layer}.{each}.weight" for layer in range(3) for each in ("attn.qkv", "norm_1", "mlp.fc_1")
    ]
    state = {name: torch.ones(2, 2) for name in names}
    (folder / "pytorch_model.bin").unlink()
    save_incrementally({"model": state} if wrapped else state, folder / "lit_model.pth")  # type: ignore[dict-item]
    with pytest.raises(
        CheckpointError,
        match="he tensor names are those of litgpt, but the config in the folder describes a model with other tensors",
    ):
        open_checkpoint(folder, allow_pickle=True)  # GPT-2's


@pytest.mark.parametrize("allow", [False, True])
@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pth", "ckpt.pt", "x.pt", "x.gguf", "x.bin"])
def test_git_lfs_pointers(name: str, allow: bool, folder: Path) -> None:
    (folder / "pytorch_model.bin").unlink()
    (folder / name).write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 548118077\n")
    alone = name.startswith(("x.", "ckpt"))
    if alone:
        (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=f"{name} is a git-lfs pointer, not the file itself") as caught:
        open_checkpoint(folder / name if alone else folder, allow_pickle=allow)
    assert caught.value.hint == "Fetch the file with `git lfs pull`."


# --- what is wrong with the tensors ---


def test_missing_extra_and_misshapen(folder: Path, original: Path) -> None:
    def edit(state: dict[str, torch.Tensor]) -> None:
        del state["transformer.h.1.ln_1.weight"]
        state["more"] = torch.ones(1)
        state["transformer.wpe.weight"] = state["transformer.wpe.weight"].T.contiguous()
        state["transformer.h.0.ln_1.bias"] = torch.ones(48, dtype=torch.int8)

    change(folder, edit)
    message = refused(folder)
    for part in (
        "1 of 40 tensors are missing: transformer.h.1.ln_1.weight",
        "no place in the model: more",
        "transformer.wpe.weight is [48, 256], expected [256, 48]",
        "transformer.h.0.ln_1.bias is I8",
    ):
        assert part in message, part
    shutil.copy(original / "state", folder / "pytorch_model.bin")
    change(folder, lambda state: state.update(more=torch.ones(1)))
    assert "no place" in refused(folder)
    convert(folder, folder.parent / "back", "hf", allow_pickle=True, allow_extra=True)
    back = folder.parent / "back" / "model.safetensors"
    assert back.read_bytes() == (original / "model.safetensors").read_bytes()


def test_one_name_in_two_files(folder: Path) -> None:
    shutil.copy(folder / "pytorch_model.bin", folder / "other.bin")
    index = {"weight_map": {"a": "pytorch_model.bin", "b": "other.bin"}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    (folder / "pytorch_model.bin").rename(folder / "first.bin")
    index["weight_map"]["a"] = "first.bin"
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert "first.bin and in " in refused(folder)


def test_values_that_are_not_finite_are_counted(folder: Path) -> None:
    change(folder, lambda state: state["transformer.wte.weight"][0].fill_(torch.nan))
    done = convert(folder, folder.parent / "out", allow_pickle=True)
    assert done.transferred is not None and done.transferred.not_finite == {"embedding.weight": 48}


@pytest.mark.parametrize("left", [0.1, 0.5, 0.999])
def test_truncated(folder: Path, left: float) -> None:
    path = folder / "pytorch_model.bin"
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * left)])
    message = refused(folder)
    assert "truncated" in message and f"{int(len(data) * left):,} bytes found" in message and path.name in message


# --- what is wrong with the file ---


def program(*opcodes: bytes) -> bytes:
    return b"\x80\x02" + b"".join(opcodes) + b"."


def tensor_of(shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0, count: int = 4) -> bytes:
    """{"x": a tensor made by hand}."""

    def numbers(values: tuple[int, ...]) -> bytes:
        return b"(" + b"".join(pickle.dumps(value, 2)[2:-1] for value in values) + b"t"

    storage = b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpu" + numbers((count,))[1:] + b"Q"
    made = (
        b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + numbers((offset,))[1:-1] + numbers(shape) + numbers(strides)
    )
    return program(b"}X\x01\0\0\0x", made, b"\x89}tRs")


BOMB = b"]" + b"".join(b"q%c(" % i + (b"h%c" % i) * 10 + b"l" for i in range(12))
BAD: dict[str, tuple[bytes, str]] = {
    "a call": (program(b"cposix\nsystem\n(X\x04\0\0\0truetR"), "posix.system"),
    "a name that leads elsewhere": (program(b"cbuiltins\neval\n"), "builtins.eval"),
    "an attribute of a known one": (program(b"ctorch\nsave\n"), "torch.save"),
    "lists within lists": (program(BOMB), "too many values|damaged"),
    "a place in the memo far away": (program(b"]r\xff\xff\xff\x7f"), "memory|damaged"),
    "a string longer than the file": (program(b"X\xff\xff\xff\x7f"), "damaged|memory"),
    "bytes of 2**62": (b"\x80\x05\x8e" + struct.pack("<Q", 2**62) + b".", "memory|damaged"),
    "deep": (program(b"]" * 50_000 + b"a" * 49_999), "too many values"),
    "nothing": (b"", "damaged"),
    "a class instantiated": (program(b"ctorch\nSize\n)\x81"), "damaged"),
    "a call bound to arguments": (program(b"cfunctools\npartial\n(cposix\nsystem\nX\x04\0\0\0truetR"), "posix.system"),
    "a way to an attribute": (program(b"cbuiltins\ngetattr\n(cpathlib\nPath\nX\x05\0\0\0touchtR"), "builtins.getattr"),
    "an extension": (program(b"\x82\x01"), "extension"),
    "a state for a class": (program(b"cpathlib\nPath\n}X\x08\0\0\0__call__cpathlib\nos.system\nsb"), "damaged"),
    "a tensor's class": (
        program(b"ctorch._tensor\n_rebuild_from_type_v2\n(ctorch\nSize\nctransformers\nInFourBits\n)}tR"),
        "a class that gptkit cannot read .InFourBits",
    ),
    "a storage with a state": (
        tensor_of((2,), (1,)).replace(b"Q", b"Q}X\x05\0\0\0startJ\xff\xff\xff\xffsb"),
        "storage",
    ),
    "no such storage": (
        program(b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x009X\x03\0\0\0cpuK\x04tQ"),
        "missing",
    ),
    "a storage too long": (tensor_of((2,), (1,), count=5), "claims 5 elements"),
    "stride 0": (tensor_of((2**30, 2**10), (0, 0)), "1,099,511,627,776 elements"),
    "beyond the storage": (tensor_of((2,), (1,), offset=3), "its shape needs more bytes than"),
    "apart beyond the storage": (tensor_of((2, 2), (3, 1)), "its shape needs more bytes than"),
    "a negative stride": (tensor_of((2,), (-1,), offset=3), "invalid sizes"),
    "a negative size": (tensor_of((-2,), (1,)), "invalid sizes"),
    "sizes beyond 64 bits": (tensor_of((2**63,), (1,)), "invalid sizes"),
    "sizes of another number": (tensor_of((1, 1), (1,)), "differently from torch"),
    "33 dimensions": (tensor_of((1,) * 33, (1,) * 33), "differently from torch"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_pickles(name: str, folder: Path) -> None:
    data, message = BAD[name]
    archive(folder / "pytorch_model.bin", data, {"0": bytes(16)})
    with pytest.raises(CheckpointError, match=message):
        pickle_weights([folder / "pytorch_model.bin"])


SYSTEM = b"cpathlib\nos.system\n"  # pickle itself would find the function behind this name, from protocol 4 on
TOUCH = b"X\x0a\0\0\0touch made"
INERT = {
    "reduce": program(SYSTEM, b"(", TOUCH, b"tR"),
    "protocol 4": b"\x80\x04X\x07\0\0\0pathlibX\x09\0\0\0os.system\x93(" + TOUCH + b"tR.",
    "a module's module": program(b"cpathlib.os\nsystem\n(", TOUCH, b"tR"),
    "inst": program(b"(", TOUCH, b"ipathlib\nos.system\n"),
    "obj": program(b"(", SYSTEM, TOUCH, b"o"),
    "new": program(SYSTEM, b"(", TOUCH, b"t\x81"),
    "partial": program(b"cfunctools\npartial\n(", SYSTEM, TOUCH, b"tR)R"),
    "reduced": program(b"cfunctools\nreduce\n(", SYSTEM, b"]", TOUCH, b"atR"),
    "numpy's own": program(b"cnumpy.testing._private.utils\nrunstring\n(", TOUCH, b"}tR"),
    "what is not imported yet": program(b"clightning.antigravity\nfly\n)R"),
    "a path that acts": program(b"cpathlib\nPosixPath.touch\n(cpathlib\nPosixPath\n(X\x04\0\0\0madetRtR"),
    "a state": program(b"cargparse\nNamespace\n)\x81N}X\x09\0\0\0__class__", SYSTEM, b"s\x86b)R"),
    "items": program(SYSTEM, b")\x81(", TOUCH, TOUCH, b"u(", TOUCH, b"e"),
}
"""Calls under the names of packages whose objects are let go."""

AUDITED = """
import json, pickle, sys, types
folder, *files = sys.argv[1:]
sys.modules["confined"] = package = types.ModuleType("confined")
package.__path__ = [folder]
from confined import pickle_process
pickle_process.answer((files[0], 0, None))
told = []
sys.addaudithook(lambda event, args: told.append((event, str(args[0]) if args else "")))
answers = [pickle_process.answer((file, 0, None)) for file in files]
count = len(told)
pickle.loads(b"\\x80\\x02cpathlib\\nPath\\n.")
print(json.dumps([answers, told[:count], told[count:]]))
"""


def test_nothing_that_a_pickle_names_is_imported_or_called(tmp_path: Path) -> None:
    """By what the interpreter itself tells of a process that reads them: it opens the files and limits itself."""
    files = [str(archive(tmp_path / f"{index}.pt", data)) for index, data in enumerate(INERT.values())]
    command = [sys.executable, "-I", "-S", "-c", AUDITED, str(Path(pickles.__file__).parent), *files]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    answers, told, otherwise = json.loads(done.stdout)
    assert all(set(each) == {"other"} for each in answers)
    assert {event for event, _ in told} == {"open", "resource.setrlimit"}
    assert {file for event, file in told if event == "open"} == {*files, "/proc/self/statm"}
    assert "pickle.find_class" in {event for event, _ in otherwise}, "what pickle itself would have told"
    assert sorted(map(str, tmp_path.iterdir())) == sorted(files)


def test_the_hand_made_tensor_is_one(tmp_path: Path) -> None:
    made = tensor_of((2, 2), (1, 2))
    pickletools.dis(made, io.StringIO())
    weights = pickle_weights([archive(tmp_path / "x.bin", made, {"0": np.arange(4, dtype="f4").tobytes()})])
    assert weights.read("x").tolist() == [[0, 2], [1, 3]]


def test_bad_archives(tmp_path: Path) -> None:
    whole = archive(tmp_path / "x.bin", tensor_of((4,), (1,)), {"0": bytes(16)}).read_bytes()
    with zipfile.ZipFile(tmp_path / "x.bin") as file:
        place = {info.filename: info.header_offset for info in file.infolist()}
        directory = file.start_dir
    second = whole.index(b"PK\1\2", directory + 4)
    cases = {
        # Two entries over the same bytes: the sum of sizes is what a zip bomb lies about.
        "overlapping another|no entry": (second + 42, struct.pack("<I", place["archive/data.pkl"])),
        "no entry": (second + 42, struct.pack("<I", place["archive/data/0"] + 3)),
        "claims": (second + 20, struct.pack("<2I", 2**30, 2**30)),
        "compressed": (second + 24, struct.pack("<I", 2**30)),
        "encrypted": (second + 8, b"\1"),
        "truncated": (second + 20, struct.pack("<2I", 60, 60)),
    }
    for message, (at, new) in cases.items():
        data = bytearray(whole)
        data[at : at + len(new)] = new
        (tmp_path / "y.bin").write_bytes(data)
        (answer,) = answers([tmp_path / "y.bin"])
        assert isinstance(answer, CheckpointError)
        assert any(part in str(answer) for part in message.split("|")), (message, str(answer))


def test_big_endian(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.bin", "w") as file:
        file.writestr("a/data.pkl", program(b"}"))
        file.writestr("a/byteorder", "big")
    with pytest.raises(CheckpointError, match="big-endian"):
        pickle_weights([tmp_path / "x.bin"])


def test_a_process_that_dies_or_hangs(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [folder / "pytorch_model.bin"] * 3
    once = "import struct, sys; sys.stdout.buffer.write(struct.pack('<Q', 13) + b'{\"answer\": 1}' + b'x'); "
    (tmp_path / "dead.py").write_text(once + "sys.stdout.flush(); sys.stdin.buffer.read(1)")
    monkeypatch.setattr(confinement, "__file__", str(tmp_path / "dead.py"))
    first, second, third = answers(files)
    assert first == third == 1 and "crashed" in str(second)
    (tmp_path / "slow.py").write_text("import time; time.sleep(60)")
    monkeypatch.setattr(confinement, "__file__", str(tmp_path / "slow.py"))
    monkeypatch.setattr(pickles, "_TIMEOUT", 0.2)
    with pytest.raises(CheckpointError, match="too long"):
        pickle_weights(files[:1])


def test_mutated_files_raise_nothing_else(folder: Path, tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    whole = (folder / "pytorch_model.bin").read_bytes()
    with zipfile.ZipFile(folder / "pytorch_model.bin") as file:
        directory = file.start_dir
        size = next(info.file_size for info in file.infolist() if info.filename.endswith("data.pkl"))
    start = whole.index(b"data.pkl") + 8
    generator = np.random.default_rng(0)
    files = []
    for index in range(500):
        data = bytearray(whole)
        low, high = [(start, start + size), (directory, len(whole)), (0, 400)][index % 3]
        for at in generator.integers(low, min(high, len(data)), generator.integers(1, 5)):
            data[at] = generator.integers(256)
        if index % 7 == 0:
            del data[int(generator.integers(len(data))) :]
        files.append(tmp_path / f"{index}.bin")
        files[-1].write_bytes(data)
    found = 0
    for path, answer in zip(files, answers(files), strict=True):
        if isinstance(answer, CheckpointError):
            assert path.name in str(answer) and len(str(answer)) < 600
            continue
        try:
            weights = Weights(dict(pickles.named_tensors(path, answer)))
            weights.check()
            for name, (dtype, _) in weights.info.items():
                if dtype in ("F32", "BF16"):
                    weights.read(name).sum()
            found += 1
        except CheckpointError:
            pass
    assert 0 < found < 400
    # In kilobytes, the largest of this process's children, which earlier tests had too.
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss <= max(before, 512 * 1024)


# --- what torch's own reader lacks ---


def placed_by_torch(path: Path) -> tuple[int, int | None]:
    """The bytes of the tensor "x" and where they begin, as torch tells without loading them."""
    with FakeTensorMode():
        storage = torch.load(path, weights_only=True, mmap=True)["x"].untyped_storage()
    return storage.nbytes(), storage._checkpoint_offset  # type: ignore[attr-defined]


def test_torch_tells_where_a_tensor_lies_and_holds_it_against_nothing(tmp_path: Path) -> None:
    """torch.load(weights_only=True, mmap=True) of a good file, and of such as its places cannot be believed of."""
    path = tmp_path / "x.bin"
    torch.save({"x": torch.arange(4.0)}, path)
    nbytes, start = placed_by_torch(path)
    assert start is not None and path.read_bytes()[start : start + nbytes] == np.arange(4, dtype="f4").tobytes()

    def made(opcodes: bytes, compression: int = zipfile.ZIP_STORED) -> None:
        with zipfile.ZipFile(path, "w", compression) as file:
            for name, data in (("data.pkl", opcodes), ("version", b"3\n"), ("data/0", bytes(16))):
                file.writestr(f"archive/{name}", data)

    made(tensor_of((2,), (1,), count=5))  # twenty bytes of sixteen
    assert placed_by_torch(path)[0] == 20
    made(tensor_of((4,), (1,)), zipfile.ZIP_DEFLATED)  # the compressed bytes, and those behind them
    (nbytes, start), size = placed_by_torch(path), path.stat().st_size
    assert start is not None and path.read_bytes()[start : start + nbytes] != bytes(16) and start < size
    for answer in answers([path]):
        assert isinstance(answer, CheckpointError) and "compressed" in str(answer)


def test_torch_does_not_tell_where_a_tensor_of_before_1_6_lies(tmp_path: Path) -> None:
    save_as_before_1_6({"x": torch.arange(4.0)}, tmp_path / "x.bin")
    with pytest.raises(RuntimeError, match="mmap can only be used"):
        torch.load(tmp_path / "x.bin", weights_only=True, mmap=True)
    with FakeTensorMode():
        state = torch.load(tmp_path / "x.bin", weights_only=True)
    assert getattr(state["x"].untyped_storage(), "_checkpoint_offset", None) is None
    assert pickle_weights([tmp_path / "x.bin"]).span("x") is not None
