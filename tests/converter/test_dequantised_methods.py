"""GPTQ, AWQ, bitsandbytes, compressed-tensors and torchao, as the numbers that they stand for: bit for bit what the
published formulas make of them; and what AutoAWQ, bitsandbytes, compressed-tensors and torchao make themselves, where
these are installed (what GPTQModel makes: tests/produced.py).
"""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.covering import few
from helpers.families import CONFIGS
from helpers.quantised import (
    METHODS,
    NF4,
    awq,
    checkpoint,
    compressed,
    four_bits,
    gptq,
    int8,
    numbers,
    same_bits,
    torchao,
)
from safetensors.torch import load_file

from gptkit.converter.convert import convert
from gptkit.converter.tree import Quantised

QWEN3 = {**CONFIGS["qwen3"], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 40}
QWEN3["num_attention_heads"] = 4


def only(made: dict[str, torch.Tensor]) -> torch.Tensor:
    (found,) = made.values()
    return found


@few(2)
@pytest.mark.parametrize("method", METHODS)
def test_a_checkpoint_becomes_a_plain_one(method: str, tmp_path: Path) -> None:
    """Scales lie in other shards than bits, and what is written is what the method's reader gives, cast."""
    folder, plain = checkpoint(tmp_path / "stored", QWEN3, method, shards=3)
    convert(folder, tmp_path / "out", "hf", dtype="bfloat16")
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    made = {name: each for file in (tmp_path / "out").glob("*.safetensors") for name, each in load_file(file).items()}
    assert made.keys() == plain.keys()
    assert all(same_bits(made[name], plain[name].bfloat16()) for name in plain)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq(bits: int, version: int) -> None:
    for act, size, dtype in ((False, 32, torch.float16), (True, 16, torch.bfloat16), (False, 96, torch.float32)):
        stored, expected = gptq(64, 96, bits, bits, size, act, version, dtype)
        form = "gptq" if version == 1 else "gptq_v2"
        settings = {
            "quant_method": "gptq",
            "bits": bits,
            "group_size": size,
            "desc_act": act,
            "checkpoint_format": form,
        }
        assert same_bits(only(numbers(stored, settings)), expected)
        if not act:
            stored.pop("g_idx")
            assert same_bits(only(numbers(stored, settings | {"group_size": -1 if size == 96 else size})), expected)


def test_gptq_of_a_last_group_that_is_not_whole_and_of_bits_by_layer() -> None:
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
    stored, expected = gptq(32, 80, 0, size=32)
    assert same_bits(only(numbers(stored, settings)), expected)
    other, second = gptq(32, 96, 1, bits=8, size=16)
    both = {f"a.{name}": each for name, each in stored.items()} | {f"b.{name}": each for name, each in other.items()}
    made = numbers(both, settings | {"dynamic": {"+:b": {"bits": 8, "group_size": 16}}})
    assert same_bits(made["a.weight"], expected) and same_bits(made["b.weight"], second)


def test_a_zero_of_version_1_that_overflows() -> None:
    """GPTQModel adds one to whole words, so that what is too much goes over into the next integer."""
    stored, _ = gptq(64, 32, 0, size=32)
    stored["qzeros"] = torch.tensor([[-1, 0x7FFFFFFF, 15, 0xF0, 0, 1, 2, 3]], dtype=torch.int32)
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
    moved = {**stored, "qzeros": stored["qzeros"] + 0x11111111}
    theirs = numbers(moved, settings | {"checkpoint_format": "gptq_v2"})
    assert same_bits(only(numbers(stored, settings)), only(theirs))


def test_awq() -> None:
    for out, columns, size, dtype in ((64, 32, 32, torch.float16), (264, 96, 32, torch.bfloat16)):
        stored, expected = awq(out, columns, 3, size, dtype)
        settings = {"quant_method": "awq", "bits": 4, "group_size": size, "zero_point": True, "version": "gemm"}
        assert same_bits(only(numbers(stored, settings)), expected)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_four_bits(kind: str) -> None:
    """Blocks that end within rows, rows of odd widths, a last block that is not whole."""
    for out, columns, size, nested in ((48, 64, 64, True), (7, 33, 32, False), (301, 70, 128, True)):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            stored, expected = four_bits(out, columns, 5, size, nested, kind, dtype)
            assert same_bits(only(numbers(stored, {"quant_method": "bitsandbytes"})), expected)


def test_int8() -> None:
    stored, expected = int8(30, 50, 1)
    for more in ({}, {"weight_format": torch.tensor(0, dtype=torch.uint8)}):
        assert same_bits(only(numbers(stored | more, {"quant_method": "bitsandbytes"})), expected)


ARGS: dict[str, dict[str, Any]] = {
    "int4 groups": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "packed": True},
    "int4 groups with zeros": {
        "num_bits": 4, "type": "int", "strategy": "group", "group_size": 16, "symmetric": False, "packed": True,
    },
    "int4 rows with zeros": {"num_bits": 4, "type": "int", "strategy": "channel", "symmetric": False, "packed": True},
    "int8 groups": {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 32, "packed": True},
    "int2 rows": {"num_bits": 2, "type": "int", "strategy": "channel", "packed": True},
    "int8 rows": {"num_bits": 8, "type": "int", "strategy": "channel"},
    "int8 rows with zeros": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False},
    "int8 tensor": {"num_bits": 8, "type": "int", "strategy": "tensor"},
    "fp8 rows": {"num_bits": 8, "type": "float", "strategy": "channel"},
    "fp8 tensor": {"num_bits": 8, "type": "float", "strategy": "tensor"},
    "fp8 blocks": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [16, 32]},
}  # fmt: skip


def described(args: dict[str, Any]) -> dict[str, Any]:
    form = "pack-quantized" if "packed" in args else "float-quantized" if args["type"] == "float" else "int-quantized"
    weights = {name: value for name, value in args.items() if name != "packed"}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}


@pytest.mark.parametrize("name", ARGS)
def test_compressed_tensors(name: str) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        stored, expected = compressed(48, 96, 2, ARGS[name], dtype)
        assert same_bits(only(numbers(stored, described(ARGS[name]))), expected)


def test_compressed_tensors_of_an_order() -> None:
    """Old files have their groups in the order of activations; -1 says that they have not."""
    stored, _ = compressed(48, 96, 2, ARGS["int4 groups"])
    settings = described(ARGS["int4 groups"])
    plain = only(numbers(stored, settings))
    order = torch.randperm(96)
    moved = only(numbers(stored | {"weight_g_idx": (torch.arange(96) // 32)[order].int()}, settings))
    ones = {**stored, "weight_packed": torch.full_like(stored["weight_packed"], -0x66666667)}  # each a 1
    first = only(numbers(ones, settings))
    index = (torch.arange(96) // 32)[order].int()
    assert same_bits(only(numbers(ones | {"weight_g_idx": index}, settings)), first[:, order])
    assert not same_bits(moved, plain)
    assert same_bits(only(numbers(stored | {"weight_g_idx": torch.full((96,), -1).int()}, settings)), plain)


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
def test_torchao(kind: str) -> None:
    for size, dtype in ((96, torch.float32), (32, torch.bfloat16), (16, torch.float16)):
        stored, expected = torchao(48, 96, 1, kind, size, dtype)
        made = only(numbers(stored, TORCHAO, "F32" if dtype is torch.float32 else "BF16"))
        assert same_bits(made, expected)
        if dtype is torch.float32:
            assert same_bits(only(numbers(stored, TORCHAO, "BF16")), expected.bfloat16())


TORCHAO = {"quant_method": "torchao", "quant_type": {"default": {"_type": "IntxWeightOnlyConfig"}}}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"}
BNB = {"quant_method": "bitsandbytes"}
INT4 = {**ARGS["int4 groups"], "group_size": 16}
NF4_STATE = "weight.quant_state.bitsandbytes__nf4"
"""What each case below spoils."""


def state_of(**fields: Any) -> torch.Tensor:
    stated = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [64, 64], **fields}
    return torch.tensor(list(json.dumps(stated).encode())).to(torch.uint8)


BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "gptq: no bits": ("gptq", {"qweight": None}, "3 scales belong to no quantised weight: qzeros, scales, g_idx"),
    "gptq: no scales": ("gptq", {"scales": None}, r"no scales: qweight \(scales is expected\)"),
    "gptq: five bits": ("gptq", {"bits": 5}, "GPTQ with 2, 3, 4 or 8 bits, not 5"),
    "gptq: eight bits": ("gptq", {"bits": 8}, "32 inputs in groups of 16 cannot have 4 scales"),
    "gptq: true bits": ("gptq", {"bits": True}, "not True"),
    "gptq: marlin": ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
    "gptq: words of 16": ("gptq", {"pack_dtype": "int16"}, "pack_dtype is 'int16'"),
    "gptq: group out of range": (
        "gptq",
        {"g_idx": torch.arange(64, dtype=torch.int32)},
        "has values from 0 to 63, but",
    ),
    "gptq: group below": ("gptq", {"g_idx": torch.arange(64, dtype=torch.int32) // 16 - 1}, "has values from -1 to 2"),
    "gptq: an index of another length": (
        "gptq",
        {"g_idx": torch.zeros(60).int()},
        r"g_idx must be I32 of shape \[64\]",
    ),
    "gptq: an order, and no index": ("gptq", {"g_idx": None, "desc_act": True}, "there is no g_idx"),
    "gptq: two candidates": (
        "gptq",
        {"weight": torch.zeros(64, 64)},
        "1 quantised weights are also stored unquantised: weight exists",
    ),
    "gptq: zeros of too few": (
        "gptq",
        {"qzeros": torch.zeros(4, 7).int()},
        "scales and zeros must be for 4 groups and 64",
    ),
    "gptq: bits of floats": ("gptq", {"qweight": torch.zeros(8, 64)}, "must be I32 or U32"),
    "awq: gemv": ("awq", {"version": "gemv"}, "version is 'gemv', but gptkit reads only gemm"),
    "awq: three bits": ("awq", {"bits": 3}, "AWQ with 4 bits, not 3"),
    "awq: without zeros": ("awq", {"zero_point": False}, "only with zeros"),
    "awq: zeros lost": ("awq", {"qzeros": None}, "qzeros is expected"),
    "awq: groups": ("awq", {"group_size": 24}, "64 inputs cannot be divided into groups of 24"),
    "int8: no weight": ("int8", {"weight": None}, "1 scales belong to no quantised weight: SCB"),
    "int8: no scales": ("int8", {"SCB": None}, "SCB is expected"),
    "int8: another order": ("int8", {"weight_format": torch.tensor(1, dtype=torch.uint8)}, "weight_format"),
    "int8: both": ("int8", {"weight.absmax": torch.zeros(64)}, "1 scales belong to no quantised weight: weight.absmax"),
    "nf4: no state": ("nf4", {NF4_STATE: None}, "exactly one quant_state, but has 0"),
    "nf4: two states": ("nf4", {NF4_STATE.replace("nf4", "fp4"): state_of()}, "exactly one quant_state, but has 2"),
    "nf4: no JSON": ("nf4", {NF4_STATE: torch.tensor([123, 91], dtype=torch.uint8)}, "no valid shape"),
    "nf4: another type": ("nf4", {NF4_STATE: state_of(quant_type="fp4")}, "quant_type 'fp4' and dtype 'bfloat16'"),
    "nf4: a shape too large": ("nf4", {NF4_STATE: state_of(shape=[64, 128])}, r"does not have 2048 bytes"),
    "nf4: blocks of nothing": ("nf4", {NF4_STATE: state_of(blocksize=0)}, "no valid shape and blocksize"),
    "nf4: an offset that is none": ("nf4", {NF4_STATE: state_of(nested_blocksize=256, nested_offset="x")}, "offset"),
    "nf4: scales of scales lost": ("nf4", {"weight.nested_absmax": None}, "absmax must be F32"),
    "nf4: the map of scales lost": ("nf4", {"weight.nested_quant_map": None}, "nested_quant_map must be F32"),
    "int4: no bits": ("int4", {"weight_packed": None}, "2 scales belong to no quantised weight"),
    "int4: no scales": ("int4", {"weight_scale": None}, "weight_scale is expected"),
    "int4: two candidates": ("int4", {"weight": torch.zeros(64, 64)}, "weight exists as well as weight_packed"),
    "int4: another shape": ("int4", {"weight_shape": torch.tensor([64, 80])}, r"weight_shape is \[64, 80\]"),
    "int4: a shape of floats": ("int4", {"weight_shape": torch.tensor([64.0, 64.0])}, r"weight_shape is \[\]"),
    "int4: other groups": ("int4", {"weight_scale": torch.zeros(64, 2)}, r"scales must have shape \[64, 4\]"),
    "int4: an order out of range": ("int4", {"weight_g_idx": torch.full((64,), 4).int()}, "has values from 4 to 4"),
    "int4: a format": ("int4", {"format": "nvfp4-pack-quantized"}, "format is 'nvfp4-pack-quantized'"),
    "int4: sparse": ("int4", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "cannot read its sparsity_config"),
    "int4: turned": ("int4", {"transform_config": {"config_groups": {"u": {}}}}, "cannot read its transform_config"),
    "int4: no groups": ("int4", {"config_groups": {}}, "config_groups do not say"),
    "int4: three bits": ("int4", described({**INT4, "num_bits": 3}), "not of 3"),
    "int4: zeros lost": ("int4", described({**INT4, "symmetric": False}), "has no weight_zero_point"),
    "torchao: for a GPU": (
        "torchao",
        {"quant_type": {"default": {"_type": "Int4WeightOnlyConfig"}}},
        "'Int4WeightOnly",
    ),
    "torchao: of before": ("torchao", {"quant_type": "int4_weight_only"}, "quant_type is 'int4_weight_only'"),
    "torchao: no type": ("torchao", {"quant_type": {"default": [1]}}, r"quant_type is \[1\]"),
    "torchao: packed": ("torchao", {"_weight_qdata": torch.zeros(64, 32).byte()}, "must be I8 or F8_E4M3"),
    "torchao: scales lost": ("torchao", {"_weight_scale": None}, "_weight_scale is expected"),
    "torchao: no bits": ("torchao", {"_weight_qdata": None}, "2 scales belong to no quantised weight"),
    "torchao: scales of integers": ("torchao", {"_weight_scale": torch.ones(64, 4).int()}, "floating-point numbers"),
    "torchao: scales that do not divide": (
        "torchao",
        {"_weight_scale": torch.ones(64, 3)},
        "must be multiples of those",
    ),
    "torchao: no scales": ("torchao", {"_weight_scale": torch.ones(64, 0)}, "must be multiples of those"),
    "torchao: zeros of floats": (
        "torchao",
        {"_weight_zero_point": torch.ones(64, 4)},
        r"zeros must be I8 of shape \[64, 4\]",
    ),
    "torchao: zeros of too few": ("torchao", {"_weight_zero_point": torch.ones(64, 2).char()}, "zeros must be I8"),
    "torchao: scaled inputs": ("torchao", {"_weight_act_pre_scale": torch.ones(64)}, "act_pre_scale"),
    "torchao: two candidates": ("torchao", {"weight": torch.ones(64, 64)}, "weight exists as well as _weight_qdata"),
    "int4: floats": ("int4", described({**INT4, "type": "float"}), "no group in config.json has the type int"),
}
_SOUND: dict[str, tuple[Any, dict[str, Any]]] = {
    "gptq": (gptq, GPTQ),
    "awq": (awq, AWQ),
    "int8": (int8, BNB),
    "nf4": (four_bits, BNB),
    "int4": (partial(compressed, args=INT4), described(INT4)),
    "torchao": (torchao, TORCHAO),
}


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_named(case: str) -> None:
    method, changes, message = BAD[case]
    make, settings = _SOUND[method]
    tensors, settings = make(64, 64, 0)[0], dict(settings)
    only(numbers(tensors, settings))
    for name, value in changes.items():
        if value is None:
            del tensors[name]
        else:
            (tensors if isinstance(value, torch.Tensor) else settings)[name] = value
    with pytest.raises(Quantised, match=message):
        numbers(tensors, settings)


# --- their own code, where it is installed ---


@pytest.mark.filterwarnings("ignore")
def test_autoawq_itself() -> None:
    """Quantises to nearest, packs and dequantises."""
    gemm: Any = pytest.importorskip("awq.modules.linear.gemm")
    packing: Any = pytest.importorskip("awq.utils.packing_utils")
    for out, columns, size in ((64, 128, 32), (256, 96, 96)):
        linear = torch.nn.Linear(columns, out, bias=False, dtype=torch.float16)
        grouped = linear.weight.data.unflatten(1, (-1, size))
        scales = (grouped.amax(2) - grouped.amin(2)) / 15
        zeros = (-grouped.amin(2) / scales).round().clamp(0, 15)
        made = gemm.WQLinear_GEMM.from_linear(linear, 4, size, False, scales.T.contiguous(), zeros.T.contiguous())
        settings = {"quant_method": "awq", "bits": 4, "group_size": size, "zero_point": True, "version": "gemm"}
        theirs = packing.dequantize_gemm(made.qweight, made.qzeros, made.scales, 4, size)
        assert same_bits(only(numbers(made.state_dict(), settings)), theirs.T.contiguous())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["int8", "int8 groups", "int4 groups", "int4 groups with zeros", "int3 rows", "fp8"])
def test_torchao_itself(name: str) -> None:
    """Quantises, and flattens its tensors as transformers saves them."""
    api: Any = pytest.importorskip("torchao.quantization")
    granularity: Any = pytest.importorskip("torchao.quantization.granularity")
    support: Any = pytest.importorskip("torchao.prototype.safetensors.safetensors_support")
    groups, turned = granularity.PerGroup(16), api.MappingType.ASYMMETRIC
    config = {
        "int8": lambda: api.Int8WeightOnlyConfig(),
        "int8 groups": lambda: api.Int8WeightOnlyConfig(granularity=groups),
        "int4 groups": lambda: api.IntxWeightOnlyConfig(torch.int4, groups),
        "int4 groups with zeros": lambda: api.IntxWeightOnlyConfig(torch.int4, groups, turned),
        "int3 rows": lambda: api.IntxWeightOnlyConfig(torch.int3, granularity.PerAxis(0)),
        "fp8": lambda: api.Float8WeightOnlyConfig(),
    }[name]()
    for dtype, asked in ((torch.bfloat16, "BF16"), (torch.float32, "F32")):
        module = torch.nn.Sequential(torch.nn.Linear(96, 64, bias=False, dtype=dtype))
        api.quantize_(module, config)
        stored, _ = support.flatten_tensor_state_dict(module.state_dict())
        ours = numbers(stored, TORCHAO, asked)
        assert same_bits(ours["0.weight"], module[0].weight.dequantize())


def test_bitsandbytes_itself() -> None:
    functional: Any = pytest.importorskip("bitsandbytes.functional")
    weight = torch.randn(96, 130, generator=torch.Generator().manual_seed(0)) * 0.02
    for kind in ("nf4", "fp4"):
        assert kind == "fp4" or functional.get_4bit_type("nf4", device="cpu").tolist() == NF4
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for size, nested in ((64, True), (64, False), (32, True), (4096, True)):
                bits, state = functional.quantize_4bit(weight.to(dtype), None, None, size, nested, kind)
                packed = {f"weight.{name}": each for name, each in state.as_dict(packed=True).items()}
                ours = only(numbers({"weight": bits, **packed}, {"quant_method": "bitsandbytes"}))
                theirs = functional.dequantize_4bit(bits, state)
                # fp4's second zero has no sign in bitsandbytes' table and generic code, and one in its AVX512 code.
                assert same_bits(ours + 0 if kind == "fp4" else ours, theirs + 0 if kind == "fp4" else theirs)
    bits, scales = torch.randint(-127, 128, (96, 130), dtype=torch.int8), torch.rand(96)
    ours = only(numbers({"weight": bits, "SCB": scales}, {"quant_method": "bitsandbytes"}))
    assert same_bits(ours, functional.int8_vectorwise_dequant(bits, scales))


@pytest.mark.parametrize("name", ARGS)
def test_compressed_tensors_itself(name: str) -> None:
    """Quantises by its own observer's scales, stores and reads them."""
    compressors: Any = pytest.importorskip("compressed_tensors.compressors")
    quantization: Any = pytest.importorskip("compressed_tensors.quantization")
    args = {key: value for key, value in ARGS[name].items() if key != "packed"}
    settings = described(ARGS[name])
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=quantization.QuantizationArgs(**args))
    weight = torch.randn(48, 96, generator=torch.Generator().manual_seed(0)) * 0.02
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        stored, _ = compressed(48, 96, 2, ARGS[name], dtype)
        zeros = {"weight_zero_point": torch.zeros_like(stored["weight_scale"], dtype=torch.int8)}
        if not args.get("symmetric", True):
            zeros["weight_zero_point"] = torch.randint(-2, 2, stored["weight_scale"].shape, dtype=torch.int8)
        compressor = compressors.BaseCompressor.get_value_from_registry(settings["format"])
        given = {"weight": weight.to(dtype), "weight_scale": stored["weight_scale"], **zeros}
        state = compressor.compress(given, scheme)
        ours = only(numbers(state, settings))
        assert same_bits(ours, compressor.decompress(state, scheme)["weight"])


@pytest.mark.parametrize(
    ("method", "file", "names"),
    [
        ("gptq", "quantize_config.json", {}),
        ("awq", "quant_config.json", {"bits": "w_bit", "group_size": "q_group_size"}),
    ],
)
def test_settings_in_a_file_of_the_quantising_program(
    method: str, file: str, names: dict[str, str], tmp_path: Path
) -> None:
    """AutoGPTQ and AutoAWQ once wrote them beside a config.json that says nothing of them."""
    known = next(each for each in METHODS if each.startswith(method))
    folder, _ = checkpoint(tmp_path / "stored", QWEN3, known)
    convert(folder, tmp_path / "one", to="hf", dtype="float32")
    config = json.loads((folder / "config.json").read_text())
    settings = config.pop("quantization_config")
    settings.pop("quant_method")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / file).write_text(json.dumps({names.get(key, key): value for key, value in settings.items()}))
    convert(folder, tmp_path / "two", to="hf", dtype="float32")
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two"))
    assert one == two
