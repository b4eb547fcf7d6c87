"""Weights stored in fp8 with scales: bit for bit as transformers quantises them, read back by it and by us."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from helpers.families import CONFIGS, save_hf
from helpers.quantised import same_bits
from safetensors.torch import load_file
from transformers.integrations.finegrained_fp8 import Fp8Quantize

import gptkit
from gptkit.converter.convert import convert
from gptkit.converter.fp8 import _bits, _inverses, _numbers, _rounded
from gptkit.errors import UsageError
from gptkit.report.checkpoints import conversion_lines

WIDE = {**CONFIGS["qwen3"], "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2, "head_dim": 64}


def theirs(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    config = SimpleNamespace(weight_block_size=[128, 128], scale_fmt="float")
    return Fp8Quantize(SimpleNamespace(quantization_config=config))._quantize_one("x.weight", weight)


def test_every_value_rounds_as_torch_does() -> None:
    """All of bf16's within fp8's range, and those between two of fp8's."""
    values = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    halves = (codes[:-1] + codes[1:]) / 2
    values = torch.cat([values, halves, torch.nextafter(halves, torch.tensor(9e9)), codes])
    values = values[~(values.abs() > 448)]
    ours = torch.from_numpy(_rounded(values.numpy()))
    expected = values.to(torch.float8_e4m3fn).view(torch.uint8)
    nan = values.isnan()
    assert torch.equal(ours[~nan], expected[~nan]) and (ours[nan] & 0x7F == 0x7F).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_are_quantised_as_transformers_does(dtype: torch.dtype) -> None:
    weight = torch.randn(256, 384, generator=torch.Generator().manual_seed(0)) * torch.logspace(-30, 3, 384)
    weight[:128, :128] = 0
    weight = weight.to(dtype)
    expected = theirs(weight)
    raw = weight.numpy() if dtype is torch.float32 else weight.view(torch.uint16).numpy()
    kind = {torch.float32: "F32", torch.bfloat16: "BF16"}[dtype]
    bits, scales = _bits(raw, kind), _inverses(raw, kind)
    assert torch.equal(torch.from_numpy(bits), expected["x.weight"].view(torch.uint8))
    assert same_bits(torch.from_numpy(scales), expected["x.weight_scale_inv"])
    wide = expected["x.weight_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
    assert np.array_equal(_numbers(bits, raw, kind), (expected["x.weight"].float() * wide).numpy())


def test_a_checkpoint_in_fp8_is_read_by_transformers_and_back(tmp_path: Path) -> None:
    save_hf(WIDE, tmp_path / "plain")
    done = convert(tmp_path / "plain", tmp_path / "fp8", "hf", dtype="fp8")
    plain, stored = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "fp8"))
    scaled = {name.removesuffix("_scale_inv") for name in stored if name.endswith("_scale_inv")}
    assert scaled == {name for name in plain if "_proj" in name} and len(stored) == len(plain) + len(scaled)
    for name, weight in plain.items():
        expected = theirs(weight) if name in scaled else {"x.weight": weight}
        assert torch.equal(stored[name].view(torch.uint8), expected["x.weight"].view(torch.uint8)), name
        if name in scaled:
            assert same_bits(stored[f"{name}_scale_inv"], expected["x.weight_scale_inv"])
    settings = json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]
    assert settings["quant_method"] == "fp8" and settings["modules_to_not_convert"] == ["lm_head", "model.embed_tokens"]
    lines = conversion_lines(done)
    assert f"{len(scaled)} of {len(stored)} tensors are quantised to F8_E4M3" in lines
    assert any("with a relative RMS error of 2.6e-02" in line for line in lines), lines
    how = transformers.FineGrainedFP8Config(dequantize=True)
    options = {"dtype": torch.float32, "quantization_config": how, "attn_implementation": "eager"}
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "fp8", **options)
    ids = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        ours = gptkit.load(tmp_path / "fp8", dtype="float32", attention="eager")(ids)
        assert torch.equal(ours, reference(ids).logits)


def test_edges_and_routers(tmp_path: Path) -> None:
    """Blocks that are not whole, and matrices that transformers leaves as they are."""
    save_hf(CONFIGS["qwen3_moe"], tmp_path / "plain")
    convert(tmp_path / "plain", tmp_path / "fp8", "hf", dtype="fp8")
    convert(tmp_path / "fp8", tmp_path / "back", "hf", dtype="float32")
    plain, stored, back = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "fp8", "back"))
    for name, weight in plain.items():
        scaled = f"{name}_scale_inv" in stored
        assert scaled == ("_proj" in name)
        most = weight.abs().max() / 16 if scaled else 0  # half of a step at the largest value
        assert (back[name] - weight).abs().max() <= most
    settings = json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]
    assert "model.layers.0.mlp.gate" in settings["modules_to_not_convert"]


def test_other_formats_have_none(tmp_path: Path) -> None:
    save_hf(CONFIGS["gpt2"], tmp_path / "gpt2")
    for to, message in (("local", "cannot store the dtype fp8"), ("hf", "gpt2 has no matrices"), ("gguf", "fp8")):
        with pytest.raises(UsageError, match=message):
            convert(tmp_path / "gpt2", tmp_path / "out", to, dtype="fp8")
    assert {each.name for each in tmp_path.iterdir()} == {"gpt2"}


def test_shards_of_fp8(tmp_path: Path) -> None:
    """Scales may lie in another file than their weights."""
    save_hf(WIDE, tmp_path / "plain")
    convert(tmp_path / "plain", tmp_path / "one", "hf", dtype="fp8")
    convert(tmp_path / "plain", tmp_path / "fp8", "hf", dtype="fp8", max_shard_bytes=100_000)
    shards = sorted((tmp_path / "fp8").glob("*.safetensors"))
    found = {name: each for shard in shards for name, each in load_file(shard).items()}
    whole = load_file(tmp_path / "one" / "model.safetensors")
    assert len(shards) > 5 and found.keys() == whole.keys()
    assert all(torch.equal(found[name].view(torch.uint8), whole[name].view(torch.uint8)) for name in whole)
