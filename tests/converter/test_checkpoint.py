"""Bad checkpoints: what is wrong is told, all of it, as gptkit's own errors, and nothing is written."""

import copy
import io
import json
import math
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.covering import examples, few
from helpers.families import CONFIGS, REPRESENTATIVES, save_hf
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.console import Console
from safetensors.torch import load_file, save_file

from gptkit.architectures import ARCHITECTURES
from gptkit.converter.checkpoint import open_checkpoint
from gptkit.converter.convert import convert, plan_conversion
from gptkit.converter.dtypes import from_float64, parse_dtype, to_float64, widest
from gptkit.errors import (
    CheckpointError,
    ConfigError,
    GptkitError,
    InvalidInput,
    UnknownFamily,
    UntrustedInput,
    UsageError,
)
from gptkit.report.checkpoints import load_json, load_summary

Folder = Path
FUZZ = settings(deadline=None)


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of checkpoints that tests copy: gpt2, shards of it, its .bin, a llama, and a gptkit folder of that."""
    home = tmp_path_factory.mktemp("originals")
    model = save_hf(CONFIGS["gpt2"], home / "gpt2")
    model.save_pretrained(home / "shards", max_shard_size=20_000)
    shutil.copytree(home / "gpt2", home / "bin")
    (home / "bin" / "model.safetensors").unlink()
    torch.save(model.state_dict(), home / "bin" / "pytorch_model.bin")
    save_hf(CONFIGS["llama-yarn"], home / "llama")
    convert(home / "llama", home / "local")
    return home


@pytest.fixture
def copied(originals: Path, tmp_path: Path) -> Callable[[str], Folder]:
    """Gives a copy of one of them."""
    return lambda name: shutil.copytree(originals / name, tmp_path / name)


def change(folder: Folder, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Edit a folder's tensors."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def configure(folder: Folder, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def refused(folder: Folder, error: type[GptkitError] = CheckpointError, **options: Any) -> str:
    """The message with which a conversion is refused, which must have written nothing."""
    before = sorted(folder.parent.rglob("*"))
    with pytest.raises(error) as caught:
        convert(folder, folder.parent / "out", **options)
    assert caught.value.exit_code == error.exit_code
    assert sorted(folder.parent.rglob("*")) == before
    message = str(caught.value)
    assert len(message.splitlines()) <= 2
    return message


# --- tensors ---


def test_missing_tensors_are_all_listed(copied: Callable[[str], Folder]) -> None:
    folder = copied("gpt2")
    names = ["transformer.h.0.attn.c_attn.weight", "transformer.h.2.ln_2.bias", "transformer.wte.weight"]
    change(folder, lambda tensors: [tensors.pop(name) for name in names])
    message = refused(folder)
    assert "3 of 40 tensors are missing" in message
    assert all(name in message for name in names)


def test_extra_tensors_are_listed_and_can_be_left_out(copied: Callable[[str], Folder], originals: Path) -> None:
    folder = copied("gpt2")
    change(folder, lambda tensors: tensors.update(score=torch.ones(2), adapter=torch.ones(1, dtype=torch.int8)))
    message = refused(folder)
    assert "2 tensors have no place" in message and "score" in message and "adapter" in message
    assert "--allow-extra" in message
    done = convert(folder, folder.parent / "back", "hf", allow_extra=True)
    assert any("score" in note for note in done.source.notes)
    back = folder.parent / "back" / "model.safetensors"
    assert back.read_bytes() == (originals / "gpt2" / "model.safetensors").read_bytes()


def test_everything_wrong_is_told_at_once(copied: Callable[[str], Folder]) -> None:
    folder = copied("gpt2")

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["transformer.h.1.ln_1.weight"]
        tensors["transformer.h.3.ln_1.weight"] = torch.ones(48)
        tensors["transformer.h.0.attn.c_proj.weight"] = torch.ones(48, 47)
        tensors["transformer.wpe.weight"] = torch.ones(256, 48, dtype=torch.int8)
        tensors["ln_f.weight"] = torch.ones(48)
        tensors["lm_head.weight"] = torch.ones(97, 48)

    change(folder, edit)
    message = refused(folder, allow_extra=False)
    for part in (
        "1 of 40 tensors are missing: transformer.h.1.ln_1.weight",
        "1 tensors have no place in the model: transformer.h.3.ln_1.weight",
        "transformer.h.0.attn.c_proj.weight is [48, 47], expected [48, 48]",
        "transformer.wpe.weight is I8",
        "under two names",
        "lm_head.weight has different values",
    ):
        assert part in message, part
    # Leaving out what is extra mends only that.
    assert "no place" not in refused(folder, allow_extra=True)


def test_a_transposed_weight_is_another_shape(copied: Callable[[str], Folder]) -> None:
    folder = copied("gpt2")
    name = "transformer.h.0.mlp.c_fc.weight"
    change(folder, lambda tensors: tensors.update({name: tensors[name].T.contiguous()}))
    assert f"{name} is [192, 48], expected [48, 192]" in refused(folder)


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.uint8, torch.bool, torch.int64, torch.float8_e4m3fn, torch.complex64]
)
def test_weights_that_are_not_floating_point(dtype: torch.dtype, copied: Callable[[str], Folder]) -> None:
    folder = copied("gpt2")
    change(folder, lambda tensors: tensors.update({name: t.to(dtype) for name, t in tensors.items()}))
    assert "40 weights are not floating-point numbers" in refused(folder)


def test_scalars_and_empty_tensors(copied: Callable[[str], Folder]) -> None:
    folder = copied("gpt2")
    odd = {"transformer.wte.weight": torch.tensor(1.0), "lm_head.weight": torch.tensor(1.0)}
    change(folder, lambda tensors: tensors.update(odd | {"transformer.ln_f.bias": torch.ones(0)}))
    message = refused(folder)
    assert "transformer.wte.weight is [], expected [97, 48]" in message
    assert "transformer.ln_f.bias is [0], expected [48]" in message


def test_missing_tensors_without_a_counterpart_come_first(copied: Callable[[str], Folder]) -> None:
    """Tensors that are stored under another prefix are missing too, but they are not lost."""
    folder = copied("gpt2")
    lost = "transformer.h.2.mlp.c_proj.weight"

    def move(tensors: dict[str, torch.Tensor]) -> None:
        renamed = {f"model.{name}": tensors.pop(name) for name in list(tensors)}
        del renamed[f"model.{lost}"]
        tensors.update(renamed)

    change(folder, move)
    message = refused(folder)
    assert f"40 of 40 tensors are missing: {lost}, " in message and " and 37 more; 39 tensors have" in message


def test_names_are_cut_short(copied: Callable[[str], Folder]) -> None:
    folder = copied("gpt2")
    change(folder, lambda tensors: tensors.update({f"extra.{i}": torch.ones(1) for i in range(5000)}))
    message = refused(folder)
    assert "5000 tensors have no place" in message and "extra.10 and 4997 more\n" in message
    assert len(message) < 1000


# --- files ---


@pytest.mark.parametrize("name", ["gpt2", "shards", "local"])
def test_truncated_file(name: str, copied: Callable[[str], Folder]) -> None:
    folder = copied(name)
    path = sorted(folder.glob("*.safetensors"))[-1]
    size = path.stat().st_size
    for left in (size - 1, size // 2, 100, 7, 0):
        os.truncate(path, left)
        message = refused(folder)
        assert path.name in message and "truncated" in message
        assert f"{left} found" in message or left < 8


def test_missing_shard(copied: Callable[[str], Folder]) -> None:
    folder = copied("shards")
    shards = sorted(folder.glob("*.safetensors"))
    shards[1].unlink()
    shards[3].unlink()
    message = refused(folder)
    assert shards[1].name in message and shards[3].name in message


@pytest.mark.parametrize("there", ["../gpt2/model.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "x\0y"])
def test_index_that_leads_elsewhere(there: str, copied: Callable[[str], Folder]) -> None:
    copied("gpt2")
    folder = copied("shards")
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["transformer.wte.weight"] = there
    path.write_text(json.dumps(index))
    assert "outside of its folder" in refused(folder, UntrustedInput)


def test_folders_without_weights_or_without_config(copied: Callable[[str], Folder], tmp_path: Path) -> None:
    folder = copied("gpt2")
    (folder / "model.safetensors").unlink()
    assert "no weights" in refused(folder)
    (folder / "config.json").unlink()
    assert "no config.json in it" in refused(folder, InvalidInput)
    (tmp_path / "alone.safetensors").write_bytes(b"")
    with pytest.raises(InvalidInput, match=r"no config\.json next to it"):
        open_checkpoint(tmp_path / "alone.safetensors")


def test_a_config_alone_is_no_checkpoint(copied: Callable[[str], Folder]) -> None:
    folder = copied("gpt2")
    with pytest.raises(InvalidInput, match="is not a weight file"):
        open_checkpoint(folder / "config.json")


def test_a_weight_file_can_be_named(copied: Callable[[str], Folder]) -> None:
    assert len(open_checkpoint(copied("gpt2") / "model.safetensors").leaves) == 40


# --- config.json ---


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "3",
        '"x"',
        '{"model_type": "gpt2",}',
        "\xff",
        "{" * 100_000,
        "[" * 100_000,
        "\0",
        "9" * 5000,
    ],
    ids=lambda text: repr(text[:20]),
)
@pytest.mark.parametrize("name", ["config.json", "gptkit.json"])
def test_broken_json(name: str, text: str, copied: Callable[[str], Folder]) -> None:
    folder = copied("gpt2" if name == "config.json" else "local")
    (folder / name).write_bytes(text.encode("latin-1"))
    assert name in refused(folder, ConfigError)


@pytest.mark.parametrize(
    "fields",
    [
        {"layer_norm_epsilon": math.nan},
        {"layer_norm_epsilon": math.inf},
        {"layer_norm_epsilon": 0},
        {"layer_norm_epsilon": "1e-5"},
        {"layer_norm_epsilon": 10**400},
        {"n_layer": 0},
        {"n_layer": -1},
        {"n_layer": 10_000_000},
        {"n_layer": 2.0},
        {"n_layer": True},
        {"n_layer": None},
        {"n_layer": [3]},
        {"n_head": 5},
        {"n_embd": 2**40},
        {"vocab_size": 0},
        {"activation_function": "swishy"},
        {"tie_word_embeddings": "no"},
        {"add_cross_attention": True},
    ],
    ids=repr,
)
def test_config_out_of_range(fields: dict[str, Any], copied: Callable[[str], Folder]) -> None:
    folder = copied("gpt2")
    configure(folder, **fields)
    assert next(iter(fields)) in refused(folder, ConfigError)


@pytest.mark.parametrize("layers", [2, 4, 9_999])
def test_config_of_other_weights(layers: int, copied: Callable[[str], Folder]) -> None:
    folder = copied("gpt2")
    configure(folder, n_layer=layers)
    refused(folder)


@pytest.mark.parametrize("kind", ["xlstm", "gpt3", "", "transformer\x1b[31m", "x" * 1000])
def test_unknown_family_names_the_known_ones(kind: str, copied: Callable[[str], Folder]) -> None:
    folder = copied("gpt2")
    configure(folder, model_type=kind)
    message = refused(folder, UnknownFamily)
    assert f"gptkit families lists all {len(ARCHITECTURES)}." in message
    assert "\x1b" not in message and len(message) < 300


def test_no_model_type(copied: Callable[[str], Folder]) -> None:
    folder = copied("gpt2")
    configure(folder, model_type=None)
    assert "model_type" in refused(folder, ConfigError)


def test_unknown_fields_are_told(copied: Callable[[str], Folder]) -> None:
    folder = copied("gpt2")
    configure(folder, my_field=1)
    assert any("my_field" in note for note in open_checkpoint(folder).notes)


# --- gptkit.json ---


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("schema_version",), 2),
        (("schema_version",), None),
        (("spec",), None),
        (("spec", "blocks"), []),
        (("spec", "blocks", 0, "attention", "scale"), math.nan),
        (("spec", "final_norm", "eps"), math.inf),
        (("spec", "final_norm", "eps"), 10**400),
        (("spec", "final_norm", "type"), "BatchNorm"),
        (("spec", "final_norm", "size"), 47),
        (("spec", "surprise"), 1),
        (("origin",), None),
        (("origin", "family"), "xlstm"),
        (("origin", "family"), 3),
        (("origin", "revision"), ["a"]),
        (("origin", "reference"), "\ud800"),
        (("origin", "config"), "\udfff"),
        (("history",), {"swap": 1}),
        (("history",), ["norm"]),
        (("history",), [{"error": math.nan}]),
    ],
    ids=repr,
)
def test_gptkit_json_that_gptkit_did_not_write(
    path: tuple[Any, ...], value: Any, copied: Callable[[str], Folder]
) -> None:
    folder = copied("local")
    data = json.loads((folder / "gptkit.json").read_text())
    put(data, path, value)
    (folder / "gptkit.json").write_text(json.dumps(data))
    refused(folder, InvalidInput if path[-1] == "family" else ConfigError)


def put(data: Any, path: tuple[Any, ...], value: Any) -> None:
    for key in path[:-1]:
        data = data[key]
    data[path[-1]] = value


def places(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value in a JSON value but the whole."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [found for key, value in items for found in [(*path, key), *places(value, (*path, key))]]


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.sampled_from([0, 1, -1, 2**31, 10**400, 10_000_000, 1e-320, "", "x" * 300, "\ud800", "llama", "gpt2"])
    | st.floats()
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def use(folder: Folder, **options: Any) -> None:
    """All that is done with a checkpoint before its weights are read, which may raise GptkitError alone."""
    found: list[GptkitError] = []
    try:
        checkpoint = open_checkpoint(folder, allow_extra=True, **options)
        for to in ("local", "hf", "hf:gpt2", "hf:falcon"):
            try:
                plan_conversion(checkpoint, to)
            except GptkitError as error:
                found.append(error)
        Console(file=io.StringIO(), width=80).print(load_summary(checkpoint))
        json.dumps(load_json(checkpoint), allow_nan=False)
    except GptkitError as error:
        found.append(error)
    assert all(len(str(error)) < 4000 for error in found)


@few(1)
@pytest.mark.parametrize(
    ("kind", "name"), [("local", "gptkit.json"), ("gpt2", "config.json"), ("llama", "config.json")]
)
def test_mutated_descriptions_raise_nothing_else(kind: str, name: str, copied: Callable[[str], Folder]) -> None:
    folder = copied(kind)
    original = json.loads((folder / name).read_text())
    paths = places(original)

    @settings(FUZZ, max_examples=examples(300))
    @given(
        st.lists(
            st.tuples(st.sampled_from(paths), st.sampled_from(["put", "put", "drop", "twice", "add"]), JSON),
            min_size=1,
            max_size=3,
        )
    )
    def mutate(edits: list[tuple[tuple[Any, ...], str, Any]]) -> None:
        data = copy.deepcopy(original)
        for path, how, value in edits:
            try:
                parent = data
                for key in path[:-1]:
                    parent = parent[key]
                if how == "put":
                    parent[path[-1]] = value
                elif how == "drop":
                    del parent[path[-1]]
                elif how == "twice":
                    parent.append(parent[path[-1]])
                else:
                    parent["new"] = value
            except (KeyError, IndexError, TypeError, AttributeError):
                continue  # an earlier edit took the place away
        (folder / name).write_text(json.dumps(data))
        use(folder)

    mutate()


@pytest.mark.parametrize(("kind", "name"), [("local", "gptkit.json"), ("gpt2", "config.json")])
def test_mutated_bytes_raise_nothing_else(kind: str, name: str, copied: Callable[[str], Folder]) -> None:
    folder = copied(kind)
    original = (folder / name).read_bytes()

    @settings(FUZZ, max_examples=examples(300))
    @given(st.lists(st.tuples(st.integers(0, len(original) - 1), st.integers(0, 255)), min_size=1, max_size=8))
    def mutate(edits: list[tuple[int, int]]) -> None:
        data = bytearray(original)
        for at, byte in edits:
            data[at] = byte
        (folder / name).write_bytes(data)
        use(folder)

    mutate()


# --- pickles ---


class Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


def test_bin_is_refused_unless_allowed(copied: Callable[[str], Folder], originals: Path) -> None:
    folder = copied("bin")
    assert "--allow-pickle" in refused(folder, UntrustedInput)
    convert(folder, folder.parent / "back", "hf", allow_pickle=True)
    for name in ("model.safetensors", "config.json"):
        assert (folder.parent / "back" / name).read_bytes() == (originals / "gpt2" / name).read_bytes()
    assert not list((folder.parent / "back").glob("*.bin"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_bin_in_every_dtype_and_in_shards(dtype: torch.dtype, tmp_path: Path) -> None:
    model = save_hf(REPRESENTATIVES["llama"].config, tmp_path / "safe", dtype)
    (tmp_path / "bin").mkdir()
    shutil.copy(tmp_path / "safe" / "config.json", tmp_path / "bin")
    names = list(model.state_dict())
    shards = {"pytorch_model-00001-of-00002.bin": names[::2], "pytorch_model-00002-of-00002.bin": names[1::2]}
    for file, members in shards.items():
        # Rows apart in memory: what is pickled need not be contiguous.
        apart = {n: torch.stack([model.state_dict()[n]] * 2, -1)[..., 0] for n in members}
        torch.save(apart, tmp_path / "bin" / file)
    weight_map = {name: file for file, members in shards.items() for name in members}
    (tmp_path / "bin" / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    convert(tmp_path / "bin", tmp_path / "back", "hf", allow_pickle=True)
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (
        tmp_path / "safe" / "model.safetensors"
    ).read_bytes()


def test_safetensors_win_over_pickles(copied: Callable[[str], Folder], originals: Path) -> None:
    folder = copied("gpt2")
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Evil(folder.parent / "ran")))
    convert(folder, folder.parent / "out", allow_pickle=True)
    assert not (folder.parent / "ran").exists()


def test_compressed_archive(copied: Callable[[str], Folder]) -> None:
    folder = copied("bin")
    path = folder / "pytorch_model.bin"
    with zipfile.ZipFile(path) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    assert "compressed" in refused(folder, allow_pickle=True)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lambda: {"x": torch.zeros(1).expand(2**36)}, "68,719,476,736 elements"),
        (lambda: {"x": torch.zeros(8).as_strided((4, 4), (1, 1))}, "16 elements"),
        (lambda: {"x": torch.zeros(3, 3).to_sparse()}, "not a plain tensor"),
        (lambda: {"x": torch.zeros(2**40, device="meta")}, "not a plain tensor"),
        (lambda: [torch.zeros(1)], "contains a list"),
        (lambda: {"model": {"x": torch.zeros(1)}}, r"contains 1 tensor in \['model'\]: x \[1\]"),
        (lambda: {3: torch.zeros(1)}, r"contains a dict of 1, not a dictionary of tensors: 3 \(Tensor of \[1\]\)"),
        (lambda: {"x\x1b[31m": 3}, r"x\\x1b"),
    ],
)
def test_pickles_of_something_else(
    content: Callable[[], Any], message: str, copied: Callable[[str], Folder], recwarn: pytest.WarningsRecorder
) -> None:
    folder = copied("bin")
    torch.save(content(), folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=message):
        convert(folder, folder.parent / "out", allow_pickle=True)


def test_integers_in_a_pickle(copied: Callable[[str], Folder]) -> None:
    folder = copied("bin")
    state = torch.load(folder / "pytorch_model.bin", weights_only=True)
    torch.save({name: tensor.to(torch.int8) for name, tensor in state.items()}, folder / "pytorch_model.bin")
    assert "is I8" in refused(folder, allow_pickle=True)
    convert(folder, folder.parent / "out", allow_pickle=True, dtype="float32")


@pytest.mark.parametrize("how", ["bare", "archive", "beside tensors", "old format"])
def test_a_malicious_pickle_does_not_run(how: str, copied: Callable[[str], Folder]) -> None:
    folder, marker = copied("bin"), None
    marker = folder.parent / "ran"
    path, evil = folder / "pytorch_model.bin", Evil(marker)
    if how == "bare":
        path.write_bytes(pickle.dumps(evil))
    elif how == "archive":
        torch.save(evil, path)
    elif how == "beside tensors":
        torch.save({**torch.load(path, weights_only=True), "extra": evil}, path)
    else:
        torch.save(evil, path, _use_new_zipfile_serialization=False)
    assert "torch.load" not in refused(folder, allow_pickle=True, allow_extra=True)  # no advice to trust it
    assert not marker.exists()
    pickle.loads(pickle.dumps(evil))
    assert marker.exists(), "the test's own pickle does nothing"


def test_damaged_archives(copied: Callable[[str], Folder]) -> None:
    folder = copied("bin")
    path = folder / "pytorch_model.bin"
    whole = path.read_bytes()
    generator = np.random.default_rng(0)
    for left in (0, 1, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:left])
        refused(folder, allow_pickle=True)
    start = whole.index(b"data.pkl") + 8
    for _ in range(examples(60)):  # in the pickle itself
        data = bytearray(whole)
        for at in generator.integers(start, start + 1500, 3):
            data[at] = generator.integers(256)
        path.write_bytes(data)
        use(folder, allow_pickle=True)


# --- dtypes ---

# precision in bits (the hidden one included), least and greatest exponent
FORMATS = {"BF16": (8, -126, 127), "F16": (11, -14, 15), "F32": (24, -126, 127)}


def exactly(value: float, dtype: str) -> float | None:
    """The nearest value of the type, ties to even, by integer arithmetic; None beyond its range."""
    precision, least, most = FORMATS[dtype]
    if value == 0:
        return value
    exponent = math.frexp(value)[1] - 1
    unit = Fraction(2) ** (max(exponent, least) - precision + 1)
    nearest = round(Fraction(value) / unit) * unit  # Python rounds fractions half to even
    if abs(nearest) >= Fraction(2) ** (most + 1):
        return None
    return math.copysign(float(nearest), value)


def adversaries(dtype: str) -> list[float]:
    """Values of every exponent: halfway between two neighbours and a last bit to either side, and two bits away."""
    precision, least, most = FORMATS[dtype]
    generator = np.random.default_rng(0)
    values = [0.0, -0.0, 5e-324, -5e-324]
    for exponent in [*range(least - precision - 3, least + 4), -1, 0, 1, *range(most - 2, most + 2)]:
        for mantissa in [0, 1, 2 ** (precision - 1) - 1, *generator.integers(0, 2 ** (precision - 1), 4).tolist()]:
            base = math.ldexp(1 + mantissa / 2 ** (precision - 1), exponent)
            unit = math.ldexp(1.0, max(exponent, least) - precision + 1)
            for part in (0.0, 0.25, 0.5, 0.75, 1.0):
                middle = base + part * unit
                values += [middle, math.nextafter(middle, 0), math.nextafter(middle, math.inf)]
                # A last bit of fp32: where rounding twice goes wrong.
                values += [middle * (1 + 2**-23), middle * (1 - 2**-24), middle * (1 + 2**-25), middle * (1 - 2**-25)]
    return [sign * value for value in values for sign in (1, -1)]


def carried(value: float, dtype: str) -> float:
    """What `from_float64` makes of one value, read back without gptkit."""
    array = from_float64(np.array([value]), dtype)
    tensor = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16) if dtype == "BF16" else torch.from_numpy(array)
    return float(tensor[0].double())


def assert_rounds(value: float, dtype: str) -> None:
    expected = exactly(value, dtype)
    if expected is None:
        with pytest.raises(CheckpointError, match="too large for"):
            from_float64(np.array([value]), dtype)
    else:
        found = carried(value, dtype)
        assert (found, math.copysign(1, found)) == (expected, math.copysign(1, expected)), value


@few(1)
@pytest.mark.parametrize("dtype", FORMATS)
def test_rounding_is_exact_where_it_is_hard(dtype: str) -> None:
    for value in adversaries(dtype):
        assert_rounds(value, dtype)


@pytest.mark.parametrize("dtype", FORMATS)
@settings(max_examples=examples(300), deadline=None)
@given(value=st.floats(allow_nan=False, allow_infinity=False))
@example(value=1 + 2**-8 + 2**-40)  # rounding twice gives 1
@example(value=1 + 2**-8 - 2**-40)
def test_rounding_is_exact(dtype: str, value: float) -> None:
    assert_rounds(value, dtype)


@pytest.mark.parametrize(("dtype", "other"), [("BF16", torch.bfloat16), ("F16", torch.float16), ("F32", torch.float32)])
def test_rounding_is_torchs(dtype: str, other: torch.dtype) -> None:
    """Of fp32 values for the 16-bit types: of fp64 values torch rounds twice, through fp32."""
    generator = np.random.default_rng(0)
    values = generator.standard_normal(100_000) * np.exp2(generator.integers(-40, 15, 100_000))
    if dtype != "F32":
        values = values.astype(np.float32).astype(np.float64)
    expected = torch.from_numpy(values).to(other)
    found = torch.from_numpy(from_float64(values, dtype).view(np.int16 if dtype != "F32" else np.int32))
    assert torch.equal(found, expected.view(found.dtype))


@pytest.mark.parametrize("dtype", [*FORMATS, "F64"])
def test_what_is_not_finite_passes_through(dtype: str) -> None:
    found = to_float64(from_float64(np.array([np.inf, -np.inf, np.nan, -np.nan, 1.0]), dtype), dtype)
    np.testing.assert_array_equal(found, [np.inf, -np.inf, np.nan, np.nan, 1.0])


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_every_16_bit_value_survives(dtype: str) -> None:
    """Signalling NaNs included, without a warning."""
    bits = np.arange(2**16, dtype=np.uint16)
    carrier = bits if dtype == "BF16" else bits.view(np.float16)
    wide = to_float64(carrier, dtype)
    torch_dtype = torch.bfloat16 if dtype == "BF16" else torch.float16
    np.testing.assert_array_equal(wide, torch.from_numpy(bits.view(np.int16)).view(torch_dtype).double().numpy())
    back = from_float64(wide, dtype).view(np.uint16)
    numbers = ~np.isnan(wide)
    assert np.array_equal(back[numbers], bits[numbers])
    assert np.isnan(to_float64(back if dtype == "BF16" else back.view(np.float16), dtype)[~numbers]).all()


def test_signalling_nan_in_fp32() -> None:
    signalling = np.array([0x7F800001, 0xFFBFFFFF], dtype=np.uint32).view(np.float32)
    assert np.isnan(to_float64(signalling, "F32")).all()


def test_shapes_and_counts() -> None:
    assert from_float64(np.float64(1.5).reshape(()), "BF16").shape == ()
    assert from_float64(np.zeros((0, 3)), "BF16").shape == (0, 3)
    with pytest.raises(CheckpointError, match="2 values are too large for float16"):
        from_float64(np.array([1.0, 1e6, -1e6]), "F16")


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [(["BF16"], "BF16"), (["BF16", "F16"], "F32"), (["F16", "F32", "BF16"], "F32"), (["F32", "F64"], "F64")],
)
def test_widest_holds_every_value(dtypes: list[str], expected: str) -> None:
    assert widest(dtypes) == expected


def test_dtype_names() -> None:
    names = ("bf16", "BFloat16", "torch.float16", "fp32", "f64")
    assert [parse_dtype(name) for name in names] == ["BF16", "BF16", "F16", "F32", "F64"]
    for name in ("int8", "", "float"):
        with pytest.raises(UsageError, match="unknown dtype"):
            parse_dtype(name)
