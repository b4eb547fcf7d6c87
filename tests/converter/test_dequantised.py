"""Quantised weights as the numbers that they stand for: bit for bit what transformers makes of them, or refused."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers.families import CONFIGS, edited, randomised_reference
from helpers.quantised import METHODS, Tensors, checkpoint, numbers, same_bits, write
from safetensors.torch import load_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import gptkit
from gptkit.converter import transfer
from gptkit.converter.convert import convert
from gptkit.converter.dequantise import _halfway
from gptkit.converter.tree import Quantised
from gptkit.errors import GptkitError, InvalidInput
from gptkit.parity.diff import diff

BLOCK = (16, 32)
QWEN3 = {**CONFIGS["qwen3"], "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 2, "vocab_size": 40}
GPT_OSS = {**CONFIGS["gpt_oss"], "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "vocab_size": 40}
UP = "model.layers.1.mlp.up_proj.weight"
EXPERTS = "model.layers.1.mlp.experts.gate_up_proj"


def in_fp8(weight: torch.Tensor, block: tuple[int, int] = BLOCK) -> tuple[torch.Tensor, torch.Tensor]:
    """DeepSeek-V3's recipe: the largest value of a block becomes fp8's largest."""
    (rows, columns), (high, wide) = weight.shape, block
    padded = torch.zeros(-(-rows // high) * high, -(-columns // wide) * wide)
    padded[:rows, :columns] = weight
    scales = padded.unfold(0, high, high).unfold(1, wide, wide).abs().amax((2, 3)) / 448
    return (weight / spread(scales, weight.shape, block)).to(torch.float8_e4m3fn), scales


def spread(scales: torch.Tensor, shape: torch.Size, block: tuple[int, int]) -> torch.Tensor:
    """Every element's scale."""
    return scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[: shape[0], : shape[1]]


def fp8(folder: Path, config: dict[str, Any] = QWEN3, shards: int = 1) -> tuple[Path, Tensors]:
    weights = {name: each.bfloat16() for name, each in randomised_reference(config).state_dict().items()}
    for name in [name for name in weights if "_proj." in name]:
        weights[name], weights[f"{name}_scale_inv"] = in_fp8(weights[name].float())
    settings = {"quant_method": "fp8", "weight_block_size": [*BLOCK], "activation_scheme": "dynamic"}
    return write(folder, config, settings, weights, shards), weights


def mxfp4(folder: Path) -> tuple[Path, Tensors]:
    reference = randomised_reference(GPT_OSS, attention="eager")
    weights = {name: each.bfloat16() for name, each in reference.state_dict().items()}
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in weights if name.endswith("_proj")]:
        experts, inside, outside = weights.pop(name).shape
        shape = experts, outside, inside // 32
        weights[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
        weights[f"{name}_scales"] = torch.randint(118, 125, shape, dtype=torch.uint8, generator=generator)
    return write(folder, GPT_OSS, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, weights), weights


def converted(folder: Path, out: Path, dtype: str) -> Tensors:
    convert(folder, out, "hf", dtype=dtype)
    assert "quantization_config" not in (config := json.loads((out / "config.json").read_text()))
    assert config["dtype"] == dtype
    return {name: each for file in out.glob("*.safetensors") for name, each in load_file(file).items()}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_fp8_becomes_what_transformers_makes_of_it(dtype: str, tmp_path: Path) -> None:
    """Scales lie in other shards than weights, and no block size divides all of the sizes."""
    folder, stored = fp8(tmp_path / "fp8", shards=3)
    made, torch_dtype, whole = converted(folder, tmp_path / "out", dtype), getattr(torch, dtype), 0
    assert {name for name in stored if not name.endswith("_scale_inv")} == made.keys()
    for name, ours in made.items():
        scales = stored.get(f"{name}_scale_inv")
        if scales is None:
            assert same_bits(ours, stored[name].to(torch_dtype))
            continue
        assert same_bits(ours, (stored[name].float() * spread(scales, ours.shape, BLOCK)).to(torch_dtype))
        if all(side % each == 0 for side, each in zip(ours.shape, BLOCK, strict=True)):
            theirs = Fp8Dequantize(None)._dequantize_one(stored[name], scales, torch_dtype)
            assert same_bits(ours, theirs)
            whole += 1
    assert 0 < whole < sum(name.endswith("_scale_inv") for name in stored)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_mxfp4_becomes_what_transformers_makes_of_it(dtype: str, tmp_path: Path) -> None:
    folder, stored = mxfp4(tmp_path / "mxfp4")
    made, torch_dtype = converted(folder, tmp_path / "out", dtype), getattr(torch, dtype)
    for name, ours in made.items():
        theirs = stored[name].to(torch_dtype) if name in stored else None
        if theirs is None:
            theirs = convert_moe_packed_tensors(stored[f"{name}_blocks"], stored[f"{name}_scales"], dtype=torch_dtype)
        assert same_bits(ours, theirs), name
    assert sum(name not in stored for name in made) == 4


@pytest.mark.parametrize("written", [fp8, mxfp4])
def test_pages_that_were_given_back_are_read_again(
    written: Callable[[Path], tuple[Path, Tensors]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = written(tmp_path / "stored")
    kept = converted(folder, tmp_path / "kept", "bfloat16")
    monkeypatch.setattr(transfer, "_READ", 1)
    given_back = converted(folder, tmp_path / "given back", "bfloat16")
    assert kept.keys() == given_back.keys() and all(same_bits(kept[name], given_back[name]) for name in kept)


@pytest.mark.parametrize("scales", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu, torch.uint8])
def test_every_byte_of_fp8_and_every_kind_of_scales(scales: torch.dtype) -> None:
    bits = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).repeat(2, 6, 2)
    grid = torch.tensor([1e-3, 2.0**-140, 3e38, 1.0, 0.0, 1e-30, 7.0, 2.0]).reshape(2, 2, 2)
    bytes_ = torch.tensor([0, 1, 100, 127, 128, 200, 253, 255], dtype=torch.uint8).reshape(2, 2, 2)
    grid = bytes_ if scales is torch.uint8 else grid.to(scales)
    settings = {"quant_method": "fp8", "weight_block_size": [3, 256]}
    ours = numbers({"x": bits, "x_scale_inv": grid}, settings, "F32")["x"]
    assert same_bits(ours, Fp8Dequantize(None)._dequantize_one(bits, grid, torch.float32))


@pytest.mark.parametrize(
    ("block", "grid"),
    [(None, ()), (None, (1,)), (None, (1, 1)), ([2**70, 2**70], (1, 1)), ([10, 20], (3, 300)), ([30, 7], (1, 858))],
)
def test_blocks_of_any_size(block: list[int] | None, grid: tuple[int, ...]) -> None:
    """One for all of a matrix, beyond its end, and more of them in a row than a byte counts."""
    bits = torch.randint(0, 256, (30, 6006 if grid == (1, 858) else 6000), dtype=torch.uint8)
    bits[bits & 127 == 127] = 5
    settings = {"quant_method": "fp8", "weight_block_size": block}
    for most, nan in ((1.0, False), (1.0, True), (3e4, False)):  # which are computed in three ways
        scales = torch.rand(grid) * most
        bits[7, 5] = 127 if nan else 0
        for dtype in (torch.bfloat16, torch.float32):
            kind = {torch.bfloat16: "BF16", torch.float32: "F32"}[dtype]
            given = {"x": bits.view(torch.float8_e4m3fn), "x_scale_inv": scales}
            theirs = Fp8Dequantize(None)._dequantize_one(given["x"], scales, dtype)
            assert same_bits(numbers(given, settings, kind)["x"], theirs)


@pytest.mark.parametrize("kind", ["random", "halfway", "powers", "small", "bf16"])
def test_scales_whose_products_are_rounded_in_other_ways(kind: str) -> None:
    """Blocks that are large enough to look whether a product lies halfway between two numbers of bf16."""
    bits = torch.arange(256, dtype=torch.uint8).repeat(64, 2)
    bits[bits & 127 == 127] = 5
    scales = torch.rand((64, 2), generator=torch.Generator().manual_seed(0)) * 1e-3
    if kind == "halfway":
        scales = (scales.view(torch.int32) & -0x10000 | 0x8000).view(torch.float32)
    elif kind == "powers":
        scales = 2.0 ** -torch.arange(128.0).reshape(64, 2)
    elif kind == "small":
        scales *= 1e-36
    elif kind == "bf16":
        scales = scales.bfloat16().float()
    settings, given = {"quant_method": "fp8", "weight_block_size": [64, 256]}, bits.view(torch.float8_e4m3fn)
    looked = 0
    for row in scales:
        ours = numbers({"x": given, "x_scale_inv": row[None].clone()}, settings, "BF16")["x"]
        assert same_bits(ours, Fp8Dequantize(None)._dequantize_one(given, row[None], torch.bfloat16))
        looked += _halfway(row.numpy())
    assert looked == {"random": 0, "halfway": 64, "powers": 14, "small": 64, "bf16": 55}[kind]


def test_every_byte_of_mxfp4_at_every_scale() -> None:
    blocks = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16).repeat(1, 256, 1, 1)
    scales = torch.arange(256, dtype=torch.uint8).reshape(1, 256, 1).repeat(1, 1, 16)
    ours = numbers({"x_blocks": blocks, "x_scales": scales}, {"quant_method": "mxfp4"})["x"]
    assert same_bits(ours, convert_moe_packed_tensors(blocks, scales))


@pytest.mark.parametrize("method", ["fp8", "mxfp4"])
def test_logits_are_those_of_transformers(method: str, tmp_path: Path) -> None:
    """Which reads the quantised files and dequantises them itself."""
    if method == "fp8":  # blocks are whole here: transformers takes their size from the number of scales
        folder = fp8(tmp_path / "stored", {**QWEN3, "intermediate_size": 96, "num_attention_heads": 4})[0]
        how: Any = transformers.FineGrainedFP8Config(dequantize=True)
    else:
        folder, how = mxfp4(tmp_path / "stored")[0], transformers.Mxfp4Config(dequantize=True)
    options = {"dtype": torch.bfloat16, "quantization_config": how, "attn_implementation": "eager"}
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, **options)
    ids = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        ours = gptkit.load(folder, dtype="bfloat16", attention="eager")(ids)
        assert torch.equal(ours, reference(ids).logits)


def test_a_change_is_that_of_the_numbers(tmp_path: Path) -> None:
    folder, _ = mxfp4(tmp_path / "mxfp4")
    converted(folder, tmp_path / "plain", "bfloat16")
    found = diff(folder, tmp_path / "plain")
    assert found.same and found.same_bytes
    edited(folder, lambda tensors: tensors[f"{EXPERTS}_scales"].add_(1))
    (changed,) = diff(folder, tmp_path / "plain").changed[:1]
    assert "experts" in changed.name and changed.quantised == ("a",)


def without(*names: str) -> Callable[[Tensors], object]:
    return lambda tensors: [tensors.pop(name) for name in names]


def changed(name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: make(tensors[name]).contiguous()})


BAD: dict[str, tuple[Callable[..., Any], Callable[[Tensors], object], dict[str, Any], str]] = {
    "weight without scales": (fp8, without(f"{UP}_scale_inv"), {}, f"1 quantised weights have no scales: {UP}"),
    "scales without weight": (fp8, without(UP), {}, f"1 scales belong to no quantised weight: {UP}_scale_inv"),
    "scales of a plain weight": (fp8, changed(UP, torch.Tensor.bfloat16), {}, f"no quantised weight: {UP}_scale_inv"),
    "too few scales": (fp8, changed(f"{UP}_scale_inv", lambda x: x[1:]), {}, r"scales must have shape \[5, 2\]"),
    "scales turned": (fp8, changed(f"{UP}_scale_inv", torch.t), {}, r"F32 \[2, 5\]: the scales"),
    "scales of integers": (fp8, changed(f"{UP}_scale_inv", torch.Tensor.int), {}, "I32 .* floating-point numbers"),
    "a vector": (fp8, changed(UP, torch.Tensor.flatten), {}, "must be a matrix"),
    "other blocks": (fp8, without(), {"weight_block_size": [32, 32]}, "14 quantised weights do not fit their scales"),
    "blocks of nothing": (fp8, without(), {"weight_block_size": [0, 32]}, r"weight_block_size is \[0, 32\]"),
    "one scale is meant": (fp8, without(), {"weight_block_size": None}, r"scales must have shape \[1\]"),
    "another method": (fp8, without(), {"quant_method": "secret"}, r"quantised \(secret"),
    "nothing is quantised": (mxfp4, without(), {"quant_method": "fp8"}, "quantised .fp8., but no tensor is"),
    "a weight is there twice": (
        mxfp4,
        lambda x: x.update({EXPERTS: x[f"{EXPERTS}_scales"].clone()}),
        {},
        f"{EXPERTS} exists as well as",
    ),
    "blocks without scales": (mxfp4, without(f"{EXPERTS}_scales"), {}, "1 quantised weights have no scales"),
    "scales without blocks": (mxfp4, without(f"{EXPERTS}_blocks"), {}, "1 scales belong to no quantised weight"),
    "blocks of floats": (mxfp4, changed(f"{EXPERTS}_blocks", torch.Tensor.half), {}, "F16 .*U8 of shape .experts"),
    "scales of floats": (mxfp4, changed(f"{EXPERTS}_scales", torch.Tensor.half), {}, "scales must be U8"),
    "scales of one expert": (mxfp4, changed(f"{EXPERTS}_scales", lambda x: x[:1]), {}, "scales must be U8"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("stored")
    return {make.__name__: make(root / make.__name__)[0] for make in (fp8, mxfp4)}


def broken(folder: Path, out: Path, change: Callable[[Tensors], object], settings: dict[str, Any]) -> Path:
    """A copy with other tensors and settings."""
    shutil.copytree(folder, out)
    edited(out, change)
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"] |= settings
    (out / "config.json").write_text(json.dumps(config))
    return out


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_named_and_nothing_is_written(case: str, folders: dict[str, Path], tmp_path: Path) -> None:
    make, change, settings, message = BAD[case]
    folder = broken(folders[make.__name__], tmp_path / "bad", change, settings)
    with pytest.raises(InvalidInput, match=message):
        convert(folder, tmp_path / "out", dtype="bfloat16")
    assert {each.name for each in tmp_path.iterdir()} == {"bad"}


VALUES: tuple[Any, ...] = (
    *(
        None,
        "fp8",
        "mxfp4",
        "gptq",
        "awq",
        "bitsandbytes",
        "compressed-tensors",
        "",
        3,
        4,
        8,
        -1,
        0,
        True,
        [],
        {},
        "gemm",
    ),
    *([16], [16, 32], [32, 16], [0, 1], [2**70, 2**70], [1.5, 2], 2**70, 1.5, "gptq_v2", "pack-quantized", "group"),
)
ENDS = (
    "_scale_inv",
    "_scales",
    "_blocks",
    "x",
    ".qweight",
    ".weight",
    "_packed",
    ".absmax",
    ".SCB",
    "_scale",
    ".g_idx",
)


def fuzzed(folder: Path, root: Path, rounds: int, seed: int) -> dict[str, int]:
    """Tensors dropped, renamed, cut, turned and of other types and values at random, settings of other values: refused
    by our own errors, or converted.
    """
    draw, counts = random.Random(seed), {"refused": 0, "converted": 0}
    types = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8)
    types += (torch.int8, torch.int32, torch.int64)

    def mutate(tensors: Tensors) -> None:
        for name in draw.sample(sorted(tensors), draw.choice((1, 1, 1, 2, 5))):
            tensor = tensors.pop(name)
            kind = draw.randrange(8)
            if kind == 0:
                name += draw.choice(ENDS)
            elif kind == 1:
                tensor = tensor.to(draw.choice(types))
            elif kind == 2 and tensor.ndim:
                tensor = tensor[: draw.randrange(len(tensor) + 1)]
            elif kind == 3 and tensor.ndim:
                tensor = tensor.transpose(0, -1)
            elif kind == 4:
                tensor = tensor[None] if draw.random() < 0.5 else tensor.flatten()
            elif kind == 5 and tensor.numel():
                raw = tensor.contiguous().flatten().view(torch.uint8).clone()
                raw[draw.randrange(len(raw))] = draw.randrange(256)
                tensor = raw.view(tensor.dtype).reshape(tensor.shape)
            elif kind == 6:
                name = name.replace(draw.choice(("layers.0", "q_proj", "weight")), draw.choice(("layers.1", "k_proj")))
            if kind < 7:
                tensors[name] = tensor.contiguous()

    for number in range(rounds):
        bad, out, settings = root / f"bad{number}", root / f"out{number}", {}
        if draw.random() < 0.3:
            stated = json.loads((folder / "config.json").read_text())["quantization_config"]
            key = draw.choice(sorted({*stated, "bits", "group_size", "weight_block_size", "quant_method"}))
            settings[key] = draw.choice(VALUES)
            if key == "config_groups" and draw.random() < 0.8:
                group = stated[key]["group_0"]
                inner = draw.choice(sorted({*group["weights"], "num_bits", "type", "actorder"}))
                settings[key] = {"group_0": {**group, "weights": {**group["weights"], inner: draw.choice(VALUES)}}}
        change = mutate if not settings or draw.random() < 0.5 else without()
        broken(folder, bad, change, settings)
        try:
            convert(bad, out, dtype=draw.choice(("bfloat16", "float32")))
            counts["converted"] += 1
            shutil.rmtree(out)
        except GptkitError:
            counts["refused"] += 1
            assert not out.exists()
        shutil.rmtree(bad)
    assert not list(root.iterdir())
    return counts


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory, folders: dict[str, Path]) -> dict[str, Path]:
    """A small checkpoint of every method."""
    root, small = tmp_path_factory.mktemp("methods"), {**QWEN3, "num_hidden_layers": 1, "intermediate_size": 96}
    return {**folders, **{method: checkpoint(root / method, small, method)[0] for method in METHODS}}


def test_broken_files_are_refused(quantised: dict[str, Path], memory_path: Path) -> None:
    counts = [fuzzed(folder, memory_path, 5, seed=1) for folder in quantised.values()]
    refused, converted = (sum(each[what] for each in counts) for what in ("refused", "converted"))
    assert refused > 15 and converted > 0, counts


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fp8", "mxfp4", *METHODS])
def test_many_broken_files_are_refused(method: str, quantised: dict[str, Path], memory_path: Path) -> None:
    counts = fuzzed(quantised[method], memory_path, 20_000, seed=2)
    assert counts["refused"] > 8_000 and counts["converted"] > 500, counts


@pytest.mark.parametrize("name", ["x_scale", "x_scale_inv"])
@pytest.mark.parametrize(
    ("shape", "grid"),
    [
        ((30, 40), ()),
        ((30, 40), (1,)),
        ((30, 40), (30,)),
        ((30, 40), (30, 1)),
        ((3, 30, 40), (3,)),
        ((3, 30, 40), (3, 1, 1)),
        ((3, 30, 40), (3, 30, 1)),
    ],
)
def test_fp8_with_a_scale_a_matrix_or_a_row_as_vllm_has_it(
    name: str, shape: tuple[int, ...], grid: tuple[int, ...]
) -> None:
    bits = torch.randint(0, 127, shape, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scales = torch.rand(grid) + 0.5
    stored = {"x": bits, name: scales, "input_scale": torch.ones(())}
    made = numbers(stored, {"quant_method": "fp8", "activation_scheme": "static"}, "F32")["x"]
    while scales.ndim < len(shape):
        scales = scales[..., None]
    assert torch.equal(made, bits.float() * scales)


def test_fp8_with_neither_name_of_a_scale_is_refused() -> None:
    bits = torch.ones(4, 4).to(torch.float8_e4m3fn)
    with pytest.raises(Quantised, match="1 quantised weights have no scales: x"):
        numbers({"x": bits}, {"quant_method": "fp8"})
    with pytest.raises(Quantised, match="1 scales belong to no quantised weight: y_scale"):
        numbers({"x": bits, "x_scale": torch.ones(()), "y_scale": torch.ones(())}, {"quant_method": "fp8"})
    with pytest.raises(Quantised, match=r"scales must have shape \[1\]"):
        numbers({"x": bits, "x_scale": torch.ones(3)}, {"quant_method": "fp8"})
