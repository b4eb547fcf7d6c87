"""Quantised weights as other programs store them, packed a bit at a time by their published layouts, and the numbers
that the published formulas make of them, in torch.
"""

import json
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from gptkit.converter.quantised import dequantised
from gptkit.converter.weights import Stored, Weights
from helpers.families import randomised_reference

Tensors = dict[str, torch.Tensor]
Made = tuple[Tensors, torch.Tensor]
"""What is stored of a weight, by the ends of names, and the weight that it stands for."""

KINDS = {
    torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.uint8: "U8", torch.int8: "I8",
    torch.int32: "I32", torch.int64: "I64", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e8m0fnu: "F8_E8M0",
}  # fmt: skip
NF4 = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
]  # fmt: skip
"""QLoRA's normal float (arXiv 2305.14314, appendix E)."""


def numbers(tensors: Tensors, settings: Mapping[str, Any], dtype: str = "BF16") -> Tensors:
    """What tensors stand for, without files and a model."""
    stored = {}
    for name, each in tensors.items():
        raw = each.view({torch.bfloat16: torch.uint16}.get(each.dtype, each.dtype))
        array = (raw.view(torch.uint8) if each.dtype.itemsize == 1 and each.is_floating_point() else raw).numpy()
        stored[name] = Stored(None, KINDS[each.dtype], tuple(each.shape), decode=lambda _, array=array: array)
    found, _ = dequantised(Weights(stored), {"quantization_config": settings}, dtype, Path("here"))
    made = {}
    for name, (kind, _) in found.info.items():
        if name in found.blocks:
            array = torch.from_numpy(found.read(name))
            made[name] = array.view(torch.bfloat16) if kind == "BF16" else array
    return made


def same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """NaN is NaN, whatever it carries; -0 is not 0."""
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return False
    nan = theirs.isnan()
    bits = {2: torch.int16, 4: torch.int32}[theirs.element_size()]
    return torch.equal(ours.isnan(), nan) and bool(((ours.view(bits) == theirs.view(bits)) | nan).all())


def write(folder: Path, config: dict[str, Any], settings: dict[str, Any], tensors: Tensors, shards: int = 1) -> Path:
    """A checkpoint, its tensors dealt out to shards in turns, so that scales lie elsewhere than their weights."""
    folder.mkdir()
    names = (
        [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)] if shards > 1 else ["model.safetensors"]
    )
    homes = {name: names[i % shards] for i, name in enumerate(sorted(tensors))}
    for each in names:
        held = {name: tensor.contiguous() for name, tensor in tensors.items() if homes[name] == each}
        save_file(held, folder / each, {"format": "pt"})
    if shards > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": homes}))
    stated = {**config, "dtype": "bfloat16", "quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(stated))
    return folder


def words(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Unsigned integers along the last dimension, as one long number of so many bits each, cut into 32."""
    rows = []
    for row in values.tolist():
        whole = sum(value << bits * place for place, value in enumerate(row))
        rows.append([whole >> 32 * word & 0xFFFFFFFF for word in range(-(-len(row) * bits // 32))])
    return torch.tensor(rows, dtype=torch.int64).to(torch.int32)


def draws(shape: tuple[int, ...], most: int, seed: int, least: int = 0) -> torch.Tensor:
    return torch.randint(least, most, shape, generator=torch.Generator().manual_seed(seed))


def scales_of(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    return (torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 0.01 + 1e-3).to(dtype)


# --- a weight [out, in] a method ---


def gptq(
    out: int, columns: int, seed: int, bits: int = 4, size: int = 16, act: bool = False, version: int = 1,
    dtype: torch.dtype = torch.float16,
) -> Made:  # fmt: skip
    """AutoGPTQ's pack: [in, out] along in, zeros along out, less by one in version 1."""
    groups = -(-columns // size)
    values, zeros = draws((columns, out), 2**bits, seed), draws((groups, out), 2**bits, seed + 1, int(version == 1))
    index = torch.arange(columns) // size
    if act:
        index = index[torch.randperm(columns, generator=torch.Generator().manual_seed(seed))]
    scales = scales_of((groups, out), dtype, seed)
    stored = {
        "qweight": words(values.T, bits).T.contiguous(),
        "qzeros": words(zeros - int(version == 1), bits),
        "scales": scales,
        "g_idx": index.to(torch.int32),
    }
    return stored, (scales[index] * (values - zeros[index])).T.contiguous()


def awq(out: int, columns: int, seed: int, size: int = 16, dtype: torch.dtype = torch.float16) -> Made:
    """AutoAWQ's gemm pack: [in, out] along out, of eight integers the even ones first."""
    order = torch.arange(out).reshape(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]].flatten()
    values, zeros = draws((columns, out), 16, seed), draws((columns // size, out), 16, seed + 1)
    scales = scales_of((columns // size, out), dtype, seed)
    stored = {"qweight": words(values[:, order], 4), "qzeros": words(zeros[:, order], 4), "scales": scales}
    spread = [each.repeat_interleave(size, 0) for each in (zeros, scales)]
    return stored, ((values - spread[0]) * spread[1]).T.contiguous()


def int8(out: int, columns: int, seed: int) -> Made:
    bits, scales = draws((out, columns), 128, seed, -127).to(torch.int8), scales_of((out,), torch.float32, seed)
    return {"weight": bits, "SCB": scales}, bits * scales.view(-1, 1) * 7.874015718698502e-3


def four_bits(
    out: int, columns: int, seed: int, size: int = 64, nested: bool = True, kind: str = "nf4",
    dtype: torch.dtype = torch.bfloat16,
) -> Made:  # fmt: skip
    """bitsandbytes' flat blocks, the first of two numbers in the high bits."""
    fp4 = [0, 0.0625, 8, 12, 4, 6, 2, 3]
    code = torch.tensor(NF4 if kind == "nf4" else fp4 + [-each for each in fp4])
    code = code / code.abs().max()
    values = draws((out * columns,), 16, seed)
    packed = torch.cat([values, values[:1]])[: -(-len(values) // 2) * 2]
    blocks = -(-len(values) // size)
    absmax = scales_of((blocks,), torch.float32, seed)
    state: dict[str, Any] = {"quant_type": kind, "blocksize": size, "dtype": str(dtype)[6:], "shape": [out, columns]}
    stored = {
        "weight": (packed[::2] << 4 | packed[1::2]).to(torch.uint8)[:, None],
        "weight.absmax": absmax,
        "weight.quant_map": code,
    }
    if nested:
        outer, inner = scales_of((-(-blocks // 256),), torch.float32, seed + 1), draws((blocks,), 256, seed + 2)
        table = torch.linspace(-1, 1, 256)
        absmax = table[inner] * outer.repeat_interleave(256)[:blocks] + torch.tensor(0.0123)
        stored |= {"weight.absmax": inner.to(torch.uint8), "weight.nested_absmax": outer}
        stored |= {"weight.nested_quant_map": table}
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": torch.tensor(0.0123).item()}
    stored[f"weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(list(json.dumps(state).encode())).to(torch.uint8)
    spread = absmax.repeat_interleave(size)[: len(values)]
    return stored, (code[values] * spread).reshape(out, columns).to(dtype)


def compressed(out: int, columns: int, seed: int, args: Mapping[str, Any], dtype: torch.dtype = torch.bfloat16) -> Made:
    """compressed-tensors: words of integers along in, zeros along out; or bytes."""
    bits, packed, size = args["num_bits"], "packed" in args, args.get("group_size")
    high, wide = {"tensor": (out, columns), "channel": (1, columns), "group": (1, size)}.get(
        args["strategy"], args.get("block_structure")
    )
    grid = -(-out // high), -(-columns // wide)
    scales, half = scales_of(grid, dtype, seed), 2 ** (bits - 1)
    spread = partial(lambda each: each.repeat_interleave(high, 0).repeat_interleave(wide, 1)[:out, :columns])
    if args["type"] == "float":
        values = torch.randn((out, columns), generator=torch.Generator().manual_seed(seed)).to(torch.float8_e4m3fn)
    else:
        values = draws((out, columns), half, seed, -half).to(torch.int8)
    zeros = torch.zeros(grid, dtype=torch.int8) if args.get("symmetric", True) else draws(grid, half, seed, -half)
    stored = {"weight_scale": scales[0, 0].reshape(1) if args["strategy"] == "tensor" else scales}
    if packed:
        stored["weight_packed"] = words(values.int() + half, bits)
        stored["weight_shape"] = torch.tensor([out, columns])
    else:
        stored["weight"] = values
    if not args.get("symmetric", True):
        plain = zeros.to(torch.int8)
        stored["weight_zero_point"] = words(zeros.T + half, bits).T.contiguous() if packed else plain
    return stored, (values.to(dtype) - spread(zeros).to(dtype)) * spread(scales)


def torchao(
    out: int, columns: int, seed: int, kind: str = "int4", size: int = 16, dtype: torch.dtype = torch.bfloat16
) -> Made:
    """Its tensor classes in safetensors: a number a byte, parts of a matrix that have one scale, zeros in int8."""
    grid = out, columns // size
    scales, most = scales_of(grid, dtype, seed), {"int8": 128, "int4": 8, "fp8": 8}[kind]
    values = draws((out, columns), most, seed, -most)
    values = values.to(torch.float8_e4m3fn if kind == "fp8" else torch.int8)
    zeros = torch.zeros(grid, dtype=torch.int8) if kind == "fp8" else draws(grid, most, seed + 1, -most).to(torch.int8)
    stored = {"_weight_qdata": values, "_weight_scale": scales, "_weight_zero_point": zeros}
    if kind == "fp8":
        del stored["_weight_zero_point"]
    spread = [each.repeat_interleave(size, 1) for each in (zeros, scales)]
    return stored, (values.float() - spread[0]).to(dtype) * spread[1]


_GROUP = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16, "symmetric": True, "packed": True}


def _settings(args: Mapping[str, Any], form: str) -> dict[str, Any]:
    weights = {name: value for name, value in args.items() if name != "packed"}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ["lm_head"]}


_Quantise = Callable[[int, int, int], Made]
METHODS: dict[str, tuple[_Quantise, dict[str, Any]]] = {
    "gptq": (partial(gptq, act=True), {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": True}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"}),
    "int8": (int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "nf4": (four_bits, {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
    "int4 groups": (partial(compressed, args=_GROUP), _settings(_GROUP, "pack-quantized")),
    "torchao": (torchao, {"quant_method": "torchao", "quant_type": {"default": {"_type": "IntxWeightOnlyConfig"}}}),
}
"""How a model's linear layers are quantised, and what its config.json says of it."""


@cache
def _plain(config: str) -> Tensors:
    model = randomised_reference(json.loads(config))
    return {name: each.bfloat16() for name, each in model.state_dict().items()}


def checkpoint(folder: Path, config: dict[str, Any], method: str, shards: int = 1) -> tuple[Path, Tensors]:
    """A model whose projections are quantised, and the tensors that it stands for."""
    quantise, settings = METHODS[method]
    plain, stored = dict(_plain(json.dumps(config))), {}
    for seed, name in enumerate(sorted(plain)):
        if "_proj." not in name:
            stored[name] = plain[name]
            continue
        parts, plain[name] = quantise(*plain[name].shape, seed)
        stored |= {name.removesuffix("weight") + part: each for part, each in parts.items()}
    return write(folder, config, settings, stored, shards), plain
