"""The table of bad inputs, row by row, for Hugging Face folders and for gptkit's own: what is told, and by whom.

Each row is tried on both formats, whole and in shards; what is finer than the table is in test_checkpoint.py,
test_convert.py, test_index.py, test_publish.py and test_interrupted.py.
"""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.command import call
from helpers.covering import few
from helpers.families import CONFIGS, save_hf
from safetensors.torch import load_file, save_file

from gptkit.converter.convert import convert
from gptkit.converter.manifest import check_manifest
from gptkit.converter.safetensors import read_header
from gptkit.errors import CheckpointError, GptkitError, InvalidInput, UntrustedInput
from gptkit.parity.verify import verify

INDEX = "model.safetensors.index.json"
NAMES = {
    "hf": {
        "embedding": "transformer.wte.weight",
        "square": "transformer.h.1.attn.c_proj.weight",
        "norm": "transformer.h.1.ln_1.weight",
        "head": "lm_head.weight",
    },
    "local": {
        "embedding": "embedding.weight",
        "square": "blocks.1.attention.o_proj.weight",
        "norm": "blocks.1.attention_norm.weight",
        "head": "head.weight",
    },
}
SHARED = {name: NAMES["local"][name] for name in NAMES["local"]}


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("originals")
    save_hf(CONFIGS["gpt2"], home / "hf")
    convert(home / "hf", home / "hf-shards", "hf", max_shard_bytes=100_000)
    convert(home / "hf", home / "local")
    convert(home / "hf", home / "local-shards", "local", max_shard_bytes=100_000)
    assert all(len(list((home / name).glob("*.safetensors"))) > 3 for name in ("hf-shards", "local-shards"))
    return home


@dataclass(frozen=True)
class Folder:
    """A copy of a checkpoint that may be spoilt."""

    path: Path
    format: str

    def name(self, what: str) -> str:
        return NAMES[self.format][what]

    def files(self) -> list[Path]:
        return sorted(self.path.glob("*.safetensors"))

    def holding(self, what: str) -> Path:
        return next(path for path in self.files() if self.name(what) in load_file(path))

    def edit(self, path: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
        """Change a file's tensors; the index still says what it said."""
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)

    def index(self, change: Callable[[dict[str, str]], Any]) -> None:
        path = self.path / INDEX
        data = json.loads(path.read_text())
        change(data["weight_map"])
        path.write_text(json.dumps(data))

    def refused(self, error: type[GptkitError] = CheckpointError, **options: Any) -> str:
        """The message with which a conversion to the other format is refused, which must have written nothing."""
        before = sorted(self.path.parent.rglob("*"))
        with pytest.raises(error) as caught:
            convert(self.path, self.path.parent / "out", "hf" if self.format == "local" else "local", **options)
        assert caught.value.exit_code == 4
        assert sorted(self.path.parent.rglob("*")) == before
        return str(caught.value)


@pytest.fixture(params=["hf", "hf-shards", "local", "local-shards"])
def folder(request: pytest.FixtureRequest, originals: Path, tmp_path: Path) -> Folder:
    shutil.copytree(originals / request.param, tmp_path / "model")
    return Folder(tmp_path / "model", request.param.partition("-")[0])


@pytest.fixture(params=["hf", "local"])
def shards(request: pytest.FixtureRequest, originals: Path, tmp_path: Path) -> Folder:
    shutil.copytree(originals / f"{request.param}-shards", tmp_path / "model")
    return Folder(tmp_path / "model", request.param)


def test_the_untouched_are_accepted(folder: Folder, originals: Path) -> None:
    """What the rows below spoil is right before."""
    convert(folder.path, folder.path.parent / "out", "hf", max_shard_bytes=10**9)
    back = (folder.path.parent / "out" / "model.safetensors").read_bytes()
    assert back == (originals / "hf" / "model.safetensors").read_bytes()


def test_truncated_shard(folder: Folder) -> None:
    path = folder.files()[-1]
    size = path.stat().st_size
    os.truncate(path, size - 5)
    message = folder.refused()
    assert path.name in message and f"{size} bytes expected, {size - 5} found" in message


def test_missing_shard(shards: Folder) -> None:
    gone = shards.files()[1]
    gone.unlink()
    message = shards.refused()
    assert "weight files are missing" in message and gone.name in message


def test_missing_tensor(folder: Folder) -> None:
    name = folder.name("norm")
    folder.edit(folder.holding("norm"), lambda tensors: tensors.pop(name))
    if (folder.path / INDEX).exists():
        assert f"in the index but not in the shard it names: {name}" in folder.refused()
        folder.index(lambda weight_map: weight_map.pop(name))
    message = folder.refused()
    assert "tensors are missing" in message and name in message


def test_extra_tensor(folder: Folder) -> None:
    path = folder.files()[0]
    folder.edit(path, lambda tensors: tensors.update(surplus=torch.ones(2)))
    if (folder.path / INDEX).exists():
        assert "in a shard but not in the index: surplus" in folder.refused()
        folder.index(lambda weight_map: weight_map.update(surplus=path.name))
    assert "no place in the model: surplus" in folder.refused()
    done = convert(folder.path, folder.path.parent / "out", "hf", allow_extra=True)
    assert "left out, because they are not part of the model: surplus" in done.source.notes


def test_wrong_shape(folder: Folder) -> None:
    name = folder.name("norm")
    folder.edit(folder.holding("norm"), lambda tensors: tensors.update({name: torch.ones(47)}))
    assert f"{name} is [47], expected [48]" in folder.refused()


def test_int8_where_floating_point_is_expected(folder: Folder) -> None:
    """Refused, because a scale may be missing; with --dtype the integers are taken for the numbers they are."""
    numbers = torch.arange(-24, 24, dtype=torch.int8)
    name = folder.name("norm")
    folder.edit(folder.holding("norm"), lambda tensors: tensors.update({name: numbers}))
    assert f"1 weights are not floating-point numbers: {name} is I8" in folder.refused()
    out = folder.path.parent / "out"
    convert(folder.path, out, "hf", dtype="bfloat16", max_shard_bytes=10**9)
    written = load_file(out / "model.safetensors")
    assert {tensor.dtype for tensor in written.values()} == {torch.bfloat16}
    assert torch.equal(written[NAMES["hf"]["norm"]], numbers.bfloat16())


@few(1)
def test_a_square_weight_transposed(folder: Folder, originals: Path) -> None:
    """Nothing in the file says so: verify does, and where."""
    name = folder.name("square")
    folder.edit(folder.holding("square"), lambda t: t.update({name: t[name].T.contiguous()}))
    convert(folder.path, folder.path.parent / "out", "hf" if folder.format == "local" else "local")
    result = verify(originals / "hf", folder.path, mutations=False)
    assert not result.passed
    assert "blocks.1.attention.o_proj" in json.dumps(result.as_json())


@pytest.mark.parametrize("to", ["hf", "local"])
def test_nan_and_infinity(to: str, folder: Folder, originals: Path) -> None:
    """Carried over as they are, told by tensor with their number; verify compares nothing with them."""

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[folder.name("norm")][:3] = torch.tensor([float("nan"), float("inf"), float("-inf")])

    folder.edit(folder.holding("norm"), spoil)
    out = folder.path.parent / "out"
    done = convert(folder.path, out, to)
    assert list(done.transferred.not_finite.values()) == [3]
    assert set(done.transferred.not_finite) <= {NAMES["hf"]["norm"], SHARED["norm"]}
    told = call("convert", str(folder.path), str(out), "--to", to, "--force")
    assert told.exit_code == 0
    said = " ".join((told.stdout + told.stderr).split())
    assert f"{next(iter(done.transferred.not_finite))} has 3 values that are NaN or infinite" in said
    with pytest.raises(InvalidInput, match=r"NaN or infinite: blocks\.1\.attention_norm\.weight \(3 values\)"):
        verify(originals / "hf", out, mutations=False)


def test_one_key_in_two_shards(shards: Folder) -> None:
    name = shards.name("norm")
    value = load_file(shards.holding("norm"))[name]
    other = next(path for path in shards.files() if path != shards.holding("norm"))
    shards.edit(other, lambda tensors: tensors.update({name: value}))
    message = shards.refused()
    assert f"1 tensors in more than one shard: {name}" in message and other.name in message


@pytest.mark.parametrize("damage", ["half zeroed", "a bit"])
def test_damage_within_a_weight_file(damage: str, folder: Folder) -> None:
    """No header tells it: the manifest does, by tensor; and a copy of what is damaged is a copy."""
    out = folder.path.parent / "out"
    convert(folder.path, out, "local" if folder.format == "local" else "hf")
    path = next(path for path in sorted(out.glob("*.safetensors")) if folder.name("norm") in load_file(path))
    assert call("check", str(out)).exit_code == 0
    whole, places = path.read_bytes(), read_header(path).tensors
    data = bytearray(whole)
    if damage == "a bit":
        data[places[folder.name("norm")].start + 5] ^= 16
    else:
        data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
    path.write_bytes(data)
    changed = [name for name, at in places.items() if whole[at.start : at.end] != data[at.start : at.end]]
    assert len(changed) == 1 if damage == "a bit" else changed
    problems = [problem.partition(" (bytes")[0] for problem in check_manifest(out)]
    assert problems[:20] == [f"{path.name}: tensor {name} changed" for name in changed[:20]]
    assert problems[20:] == [f"{path.name}: {len(changed) - 20} more tensors changed"] * (len(changed) > 20)
    told = call("check", str(out))
    assert told.exit_code == 4
    assert f"tensor {changed[0]} changed" in " ".join(told.stderr.split())


@pytest.mark.parametrize("where", ["../other/model.safetensors", "absolute", "sub/model.safetensors"])
def test_an_index_that_leads_out_of_its_folder(where: str, shards: Folder, originals: Path) -> None:
    """To a file that is there, and that other tools would read."""
    for place in (shards.path.parent / "other", shards.path / "sub"):
        shutil.copytree(originals / shards.format, place)
    there = str(shards.path.parent / "other" / "model.safetensors") if where == "absolute" else where
    shards.index(lambda weight_map: weight_map.update({shards.name("norm"): there}))
    assert "outside of its folder" in shards.refused(UntrustedInput)


def test_a_tied_head_is_tied_by_value(folder: Folder, originals: Path) -> None:
    """Stored again it is written once; of other values it is refused."""
    path, head = folder.holding("embedding"), folder.name("head")
    embedding = load_file(path)[folder.name("embedding")]
    folder.edit(path, lambda tensors: tensors.update({head: embedding.clone()}))
    if (folder.path / INDEX).exists():
        folder.index(lambda weight_map: weight_map.update({head: path.name}))
    if folder.format == "hf":
        convert(folder.path, folder.path.parent / "out", "hf", max_shard_bytes=10**9)
        back = (folder.path.parent / "out" / "model.safetensors").read_bytes()
        assert back == (originals / "hf" / "model.safetensors").read_bytes()
        shutil.rmtree(folder.path.parent / "out")
        folder.edit(path, lambda tensors: tensors[head].mul_(1.5))
        assert "lm_head.weight has different values" in folder.refused()
    else:
        # gptkit's own files never hold it: whoever put it there meant something else.
        assert "no place in the model: head.weight" in folder.refused()


def test_what_convert_refuses_verify_refuses(folder: Folder) -> None:
    name = folder.name("norm")
    folder.edit(folder.holding("norm"), lambda tensors: tensors.update({name: torch.ones(47)}))
    with pytest.raises(CheckpointError, match=r"is \[47\], expected \[48\]"):
        verify(folder.path)
