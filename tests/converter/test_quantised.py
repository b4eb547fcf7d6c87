"""Weights that are not floating-point numbers: what is told of them, what works without them, and what they take."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from helpers.families import CONFIGS, save_hf
from helpers.hubserver import Hub, Repo
from safetensors.numpy import load_file, save_file

import gptkit
from gptkit.analysis.params import StoredTensors, params
from gptkit.converter.checkpoint import open_checkpoint
from gptkit.converter.convert import convert
from gptkit.converter.outline import outline
from gptkit.converter.resolve import SAMPLES_DIR
from gptkit.converter.tree import Quantised
from gptkit.errors import InvalidInput

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False}
SECRET = {**GPTQ, "quant_method": "hqq"}
"""What is not read."""


def stored(reference: str) -> StoredTensors:
    (found,) = params(reference, stored=True)
    assert found.stored is not None
    return found.stored


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A llama whose feed-forward matrices are stored as gptq stores them."""
    path = tmp_path / "llama-gptq"
    save_hf(CONFIGS["llama"], path)
    configure(path, quantization_config=GPTQ)
    tensors = load_file(path / "model.safetensors")
    for name in [name for name in tensors if ".mlp." in name and name.endswith("weight")]:
        rows, columns = tensors.pop(name).shape
        stem = name.removesuffix("weight")
        tensors[stem + "qweight"] = np.ones((columns // 8, rows), np.int32)
        tensors[stem + "scales"] = np.ones((columns // 16, rows), np.float16)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def configure(path: Path, **fields: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **fields}))


def test_the_method_and_a_way_on_are_told(folder: Path) -> None:
    with pytest.raises(InvalidInput, match=r"quantised \(gptq, 4 bits, groups of 16\)") as caught:
        convert(folder, folder.parent / "out")
    assert "gptkit convert --dtype bfloat16" in (caught.value.hint or "")
    configure(folder, quantization_config=SECRET)
    for reading in (open_checkpoint, lambda path: convert(path, path.parent / "out", dtype="bfloat16")):
        with pytest.raises(InvalidInput, match=r"quantised \(hqq, 4 bits, groups of 16\)") as caught:
            reading(folder)
        assert "Use the unquantised model from which these weights were made" in (caught.value.hint or "")
        assert len(str(caught.value).splitlines()) == 2
    configure(folder, quantization_config=None, quantization={"group_size": 16, "bits": 4})
    with pytest.raises(InvalidInput, match=r"mlx, 4 bits") as caught:
        open_checkpoint(folder)
    assert "mlx_lm.convert" in (caught.value.hint or "")


def test_what_needs_no_weights_works(folder: Path) -> None:
    plain = gptkit.params("sample:llama")[0]
    (found,) = gptkit.params(folder)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder.parent / "config.json").write_text(json.dumps(config))
    assert found.spec == gptkit.params(folder.parent / "config.json")[0].spec != plain.spec
    assert any("quantised (gptq, 4 bits, groups of 16)" in note for note in found.notes)
    assert not any("are not those of its config.json" in note for note in found.notes)


def test_stored_tells_the_headers_own_tensors(folder: Path) -> None:
    found = stored(str(folder))
    expected = load_file(folder / "model.safetensors")
    assert {each.name: (each.shape, each.nbytes) for each in found.tensors} == {
        name: (array.shape, array.nbytes) for name, array in expected.items()
    }
    assert found.nbytes == sum(array.nbytes for array in expected.values())
    assert {"I32", "F16"} <= found.by_dtype().keys()


def test_a_repository_is_refused_before_its_weights_are_fetched(folder: Path, hub: Hub) -> None:
    configure(folder, quantization_config=SECRET)
    hub.repos["org/model"] = Repo({each.name: each.read_bytes() for each in folder.iterdir()})
    with pytest.raises(InvalidInput, match="hqq, 4 bits"):
        open_checkpoint("org/model")
    assert outline("org/model").spec == outline(str(folder)).spec
    assert "model.safetensors" not in hub.sent
    assert stored("org/model") == stored(str(folder))
    assert hub.sent["model.safetensors"] < (folder / "model.safetensors").stat().st_size


def test_random_weights_for_such_a_config_are_not_called_quantised(folder: Path, tmp_path: Path) -> None:
    from gptkit.modules.initialise import write_random

    write_random(outline(str(folder)), tmp_path / "random", seed=0, dtype="float32")
    convert(tmp_path / "random", tmp_path / "hf", "hf")
    assert "quantization_config" not in json.loads((tmp_path / "hf" / "config.json").read_text())
    open_checkpoint(tmp_path / "hf")


def test_stored_bytes_of_a_quantised_gguf_are_those_of_the_file(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    convert("sample:llama", tmp_path / "out", "gguf", dtype="q8_0")
    (path,) = (tmp_path / "out").glob("*.gguf")
    found = stored(str(path))
    tensors = gguf.GGUFReader(path).tensors
    assert found.nbytes == sum(int(tensor.n_bytes) for tensor in tensors) < path.stat().st_size
    assert {each.name: (each.dtype, each.nbytes) for each in found.tensors} == {
        tensor.name: (tensor.tensor_type.name, int(tensor.n_bytes)) for tensor in tensors
    }
    assert path.stat().st_size - found.nbytes == tensors[0].data_offset  # the header is all that is left
    assert found.by_dtype()["Q8_0"][2] > found.by_dtype()["F32"][2]


def test_weights_in_fp8_go_there_and_back_with_their_scales(tmp_path: Path) -> None:
    """Byte for byte, in files of other sizes too; whatever would compute them, or give them other names, refuses."""
    shutil.copytree(SAMPLES_DIR / "llama", tmp_path / "hf")
    path, config_path = tmp_path / "hf" / "model.safetensors", tmp_path / "hf" / "config.json"
    held = safetensors.torch.load_file(path)
    narrow = {name: each.to(torch.float8_e4m3fn) for name, each in held.items() if "proj" in name}
    scales = {f"{name}_scale_inv": torch.rand(1, 2) for name in narrow}
    safetensors.torch.save_file({**held, **narrow, **scales}, path, metadata={"format": "pt"})
    config = json.loads(config_path.read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config_path.write_text(json.dumps(config))
    done = convert(tmp_path / "hf", tmp_path / "local")
    assert any(
        "that scale quantised weights (scales), which gptkit does not compute" in note for note in done.source.notes
    )
    convert(tmp_path / "local", tmp_path / "back", "hf")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "hf" / name).read_bytes()
    convert(tmp_path / "local", tmp_path / "shards", "hf", max_shard_bytes=100_000)
    assert json.loads((tmp_path / "shards" / "config.json").read_text()) == config
    again = {
        name: each
        for file in (tmp_path / "shards").glob("*.safetensors")
        for name, each in safetensors.torch.load_file(file).items()
    }
    assert again.keys() == {**held, **scales}.keys()
    assert all(torch.equal(again[name].view(torch.uint8), each.view(torch.uint8)) for name, each in narrow.items())
    for folder, way in ((tmp_path / "hf", "--dtype bfloat16"), (tmp_path / "local", "--to hf")):
        for how in ({"to": "gguf"}, {"to": "hf:qwen2"}, {"drop": ["scales"]}):
            with pytest.raises(Quantised) as refused:
                convert(folder, tmp_path / "never", **how)
            assert way in (refused.value.hint or "")
    with pytest.raises(Quantised, match="quantised"):
        open_checkpoint(tmp_path / "local")
    with pytest.raises(Quantised, match="quantised"):
        convert(tmp_path / "local", tmp_path / "never", dtype="float32")
    assert not (tmp_path / "never").exists()
