"""Dequantise weights: fp8, MXFP4, GPTQ, AWQ, int8, nf4 and fp4 of bitsandbytes, compressed-tensors and torchao.

`METHODS` has an entry for every quantisation method. Every method has a program that defines it, such as GPTQModel, and
gptkit computes the same values, bit for bit. They are computed in fp32 and rounded to the dtype in which this program
returns them, usually the dtype of the scales.

Sources: transformers 5 (integrations/finegrained_fp8.py, mxfp4.py, bitsandbytes.py), GPTQModel 7 (nn_modules/qlinear,
utils/model.py: zeros of version 1; quantization/awq/utils/packing_utils.py), bitsandbytes 0.50 (functional.py,
backends/default/ops.py), compressed-tensors 0.20 (compressors, quantization/lifecycle), torchao 0.18
(prototype/safetensors, quantization/quant_primitives.py: dequantize_affine).
"""

import json
import math
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, NamedTuple, TypeGuard

import numpy as np

from ..components import Shape
from ..errors import shown
from .dtypes import F8, Array, cast_freely, to_float64
from .safetensors import DTYPES
from .weights import Weights

_Settings = Mapping[str, Any]
_Rows = Callable[[int, int, int], Array]
"""(index of a matrix, first row, end row) -> the dequantised rows, contiguous. bf16 values are given as uint16.

A weight with more than two dimensions, such as that of several experts, is a stack of matrices.
"""
_LINE = 64  # bytes of a cache line


class Numbers(NamedTuple):
    """A weight whose values are dequantised only when they are read."""

    dtype: str
    shape: Shape
    decoder: Callable[[], _Rows]
    """Read the scales, and return a function that computes any rows of the weight."""
    step: int = 1
    """Rows are computed in multiples of this number, for speed, or because two rows may share a byte."""


class Parts:
    """The tensors that store one quantised weight: quantised values, scales and so on.

    The key of a tensor is the end of its name, such as "qweight" or "scales".
    """

    def __init__(self, weights: Weights, names: Mapping[str, str]) -> None:
        self._weights, self._names = weights, names
        self.fetched = weights.fetched

    def __contains__(self, part: str) -> bool:
        return part in self._names

    def __getitem__(self, part: str) -> Array:
        return self._weights.read(self._names[part])

    def called(self, names: Mapping[str, str]) -> "Parts":
        """Return the same tensors under other keys. `names` maps each old key to its new one."""
        return Parts(self._weights, {ours: self._names[part] for part, ours in names.items() if part in self._names})

    def kind(self, part: str) -> str:
        """Return the dtype of the tensor with this key, or "" if there is none."""
        return self._weights.info[self._names[part]][0] if part in self._names else ""

    def shape(self, part: str) -> Shape:
        """Return the shape of the tensor with this key, or () if there is none."""
        return self._weights.info[self._names[part]][1] if part in self._names else ()

    def described(self) -> str:
        """Return a text for messages with the names, dtypes and shapes of at most three of the tensors."""
        whole = [(name, *self._weights.info[name]) for name in self._names.values()]
        first, *others = [f"{name} is {kind} {list(shape)}" for name, kind, shape in whole[:3]]
        return ", ".join([first, *(other.replace(" is ", " ", 1) for other in others)])


@dataclass(frozen=True)
class Scheme:
    """A way to store a quantised weight in several tensors. Their names have one beginning and different endings."""

    bits: str
    """The ending of the tensor with the quantised values."""
    needs: tuple[str, ...]
    """The endings of the other tensors that the weight needs."""
    fit: Callable[[_Settings, Parts, str], Numbers | str]
    """(quantization_config, tensors of the weight, "F32" or "BF16") -> the weight, or why the tensors do not fit."""
    may: tuple[str, ...] = ()
    """The endings of tensors that the weight may also have."""
    kinds: tuple[str, ...] = ()
    """The dtypes that the quantised values may have; empty if any dtype is possible."""
    result: str = ""
    """The ending of the name that gptkit gives to the dequantised weight, such as "weight"."""
    other: Mapping[str, str] = field(default_factory=dict)
    """The usual ending -> another ending that some programs write instead."""

    def named(self, part: str, base: str, names: Container[str]) -> str | None:
        """Return the name of one of a weight's tensors, or None if it is not among the existing `names`.

        `part` is the usual ending of its name. `base` is the beginning, which all tensors of the weight share.
        """
        return next((base + end for end in (part, self.other.get(part, part)) if base + end in names), None)


@dataclass(frozen=True)
class _Method:
    """A quantisation method (`quant_method` in config.json), with the schemes in which it stores weights."""

    schemes: tuple[Scheme, ...]
    refuses: Callable[[_Settings], str | None] = lambda _: None
    """Return the reason why gptkit cannot read weights with these settings, or None if it can."""


def _whole(value: Any) -> bool:
    return type(value) is int and 0 < value < 2**31


def _one_of(value: Any, known: Container[int]) -> TypeGuard[int]:
    """Return whether a JSON value is one of the known integers; 64.0 and [64] are not."""
    return type(value) is int and value in known


def _finite(value: Any) -> bool:
    """Return whether a JSON value is a number within fp32's range."""
    return type(value) in (int, float) and abs(value) < 2.0**127


# --- fp8: one scale per block of a matrix, or for the whole matrix if config.json has no block size ---

_EXPONENTS = ("F8_E8M0", "U8")  # exponents of two


def _fp8(settings: _Settings, parts: Parts, dtype: str) -> Numbers | str:
    shape, scale_kind, grid = parts.shape(""), parts.kind("_scale_inv"), parts.shape("_scale_inv")
    block = settings.get("weight_block_size")
    if scale_kind not in ("F32", "BF16", "F16", *_EXPONENTS):
        return "the scales must be floating-point numbers or exponents of two"
    if len(shape) < 2:
        return "the weight must be a matrix"
    if block is None:  # one scale for the whole matrix, or one per row, as in vLLM
        *matrices, rows, columns = shape
        by_row = math.prod(grid) == math.prod(shape[:-1])
        fits = by_row or math.prod(grid) == math.prod(matrices)
        wanted, block = grid if fits else (*matrices, 1), (1 if by_row else rows, columns)
    elif not (isinstance(block, list) and len(block) == 2 and all(type(side) is int and side > 0 for side in block)):
        return f"weight_block_size is {shown(block, 40)}, but must be two positive integers"
    else:
        wanted = (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))
    if grid != wanted:
        return f"the scales must have shape {list(wanted)}"
    high, wide = (min(side, max(whole, 1)) for side, whole in zip(block, shape[-2:], strict=True))
    return Numbers(dtype, shape, partial(_fp8_rows, parts, (high, wide), dtype), min(high, 16))


def _fp8_rows(parts: Parts, block: tuple[int, int], dtype: str) -> _Rows:
    """Return a function that dequantises rows as transformers does: products in fp32, rounded once to `dtype`.

    `block` has the numbers of rows and columns that share a scale. Usually the function multiplies by manipulating bits
    (`_multiplied`). For F8_E5M2 or huge scales it uses a table of the products of every scale and all 256 bytes.
    """
    values = to_float64(np.arange(256, dtype=np.uint8), parts.kind("")).astype(np.float32)
    bits = parts[""]
    rows, columns = bits.shape[-2:]
    matrices = bits.reshape(-1, rows, columns)
    across = -(-columns // block[1])
    grids = _scales(parts["_scale_inv"], parts.kind("_scale_inv")).reshape(len(matrices), -1, across)
    blocks = min(across, 256)  # the number of the block and a byte fit into 16 bits
    starts = np.repeat(np.arange(0, 256 * blocks, 256, dtype=np.uint16), block[1])
    sound = parts.kind("") == "F8_E4M3" and bool((np.abs(grids) < 2**7).all()) and columns > 0
    width = columns if sound else min(columns, len(starts))
    step = max(1, _STEP // max(1, width))
    one, two = np.empty((2, step if sound else 0, columns), np.uint32)

    def make(which: int, start: int, end: int) -> Array:
        out = np.empty((end - start, columns), DTYPES[dtype].carrier)
        for row in range(start // block[0], -(-end // block[0])):
            first, last = max(start, row * block[0]), min(end, (row + 1) * block[0])
            if sound:
                factors = np.repeat(grids[which, row] * np.float32(2.0**120), block[1])[:columns]
                even = math.prod(block) < 2**12 or _halfway(grids[which, row])
                for at in range(first, last, step):
                    here = matrices[which, at : min(last, at + step)]
                    to = out[at - start : at - start + len(here)]
                    if (here & 0x7F).max() < 0x7F:
                        _multiplied(here, factors, one[: len(here)], two[: len(here)], to, even)
                    else:  # there are NaNs
                        scales = np.repeat(grids[which, row], block[1])[:columns]
                        to[:] = cast_freely(values.take(here) * scales, dtype)
                continue
            for column in range(0, columns, len(starts)):
                some = grids[which, row, column // block[1] :][:blocks]
                products = cast_freely(np.multiply.outer(some, values), dtype).reshape(-1)
                across = slice(column, column + len(starts))
                for at in range(first, last, step):
                    down = slice(at, min(last, at + step))
                    here = matrices[which, down, across]
                    out[down.start - start : down.stop - start, across] = products.take(starts[: here.shape[1]] + here)
        return out

    return make


_STEP = 2**16  # elements to compute at a time, so that intermediate results stay in a core's cache


def _halfway(scales: Array) -> bool:
    """Return whether a product of a scale and an F8_E4M3 value may be exactly halfway between two bf16 values.

    Only the eight mantissas of F8_E4M3 are tried, because powers of two do not change the answer. For very small
    scales, whose products may be subnormal in fp32, return True.
    """
    products = np.multiply.outer(np.arange(8, 16, dtype=np.float32), scales).view(np.uint32)
    small = (np.abs(scales) < 2**-100) & (scales != 0)
    return bool(((products & 0xFFFF) == 0x8000).any() or small.any())


def _multiplied(bits: Array, factors: Array, one: Array, two: Array, out: Array, even: bool) -> None:
    """Multiply F8_E4M3 values by their scales, and write the products to `out`.

    The sign, exponent and mantissa bits of an F8_E4M3 value, moved to the positions of those of fp32, are 2^-120 times
    the value. This is also true for subnormal values. So multiplying by the scale times 2^120 gives the product.

    Args:
        bits: the bytes of the F8_E4M3 values, without NaNs.
        factors: the scale of every column, times 2^120.
        one: a buffer of the shape of `bits`, with 32 bits per element.
        two: a second such buffer.
        out: the array for the products, fp32 or bf16 (as uint16).
        even: whether a product may be exactly halfway between two bf16 values. It is then rounded to the even one.
    """
    signed = one.view(np.int32)
    np.copyto(signed, bits.view(np.int8))  # sign extension sets all upper bits
    np.left_shift(signed, 20, out=signed)
    np.bitwise_and(one, np.uint32(0x87F00000), out=one)
    single = one.view(np.float32)
    np.multiply(single, factors, out=single)
    if out.dtype != np.uint16:
        np.copyto(out, single)
        return
    if even:
        np.right_shift(one, 16, out=two)
        np.bitwise_and(two, 1, out=two)
        np.add(two, 0x7FFF, out=two)
        np.add(one, two, out=one)
    else:
        np.add(one, 0x8000, out=one)
    np.right_shift(one, 16, out=one)
    np.copyto(out, one, casting="unsafe")


def _scales(scales: Array, kind: str) -> Array:
    """Return scales in fp32. If `kind` is F8_E8M0 or U8, a scale is a byte e that means 2^(e - 127)."""
    if kind not in _EXPONENTS:
        return to_float64(scales, kind).astype(np.float32)
    powers = np.exp2(scales.astype(np.float32) - 127)
    return np.where(scales == 255, np.float32(np.nan), powers) if kind == "F8_E8M0" else powers


# --- mxfp4: two values of 4 bits per byte, and one exponent of two per 32 values ---

_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def _mxfp4(_: _Settings, parts: Parts, __: str) -> Numbers | str:
    shape = parts.shape("_blocks")
    if parts.kind("_blocks") != "U8" or len(shape) != 4 or shape[-1] != 16:
        return "the blocks must be U8 of shape [experts, out, groups, 16]"
    if (parts.kind("_scales"), parts.shape("_scales")) != ("U8", shape[:-1]):
        return f"the scales must be U8 of shape {list(shape[:-1])}"
    experts, out, groups = shape[:-1]
    # BF16 has all values exactly.
    return Numbers("BF16", (experts, groups * 32, out), partial(_mxfp4_rows, parts), 32 * _LINE // 16)


def _mxfp4_rows(parts: Parts) -> _Rows:
    """Return a function that computes rows of weights [experts, in, out].

    They are stored as bytes [experts, out, groups, 16] with two values per byte, and scales [experts, out, groups]. The
    function transposes the bytes before it dequantises them, in strips that fit into a core's cache.
    """
    bits, exponents, pairs = parts["_blocks"], parts["_scales"], _mxfp4_pairs()
    out = bits.shape[1]

    def make(expert: int, start: int, end: int) -> Array:
        groups = slice(start // 32, -(-end // 32))
        turned = np.empty((groups.stop - groups.start, 16, 2, out), np.uint16)
        for at in range(0, out, 256):
            strip = slice(at, at + 256)
            some = bits[expert, strip, groups]
            scales = exponents[expert, strip, groups].T.astype(np.uint16) << 8
            two = pairs.take(scales[:, None] | np.ascontiguousarray(some.transpose(1, 2, 0)))
            turned[:, :, 0, strip] = two
            np.right_shift(two, 16, out=two)
            turned[:, :, 1, strip] = two
        return turned.reshape(-1, out)

    return make


@cache
def _mxfp4_pairs() -> Array:
    """Return a table of the two dequantised values that a byte of MXFP4 stores, for every scale and byte.

    The index of an entry is 256 * scale + byte. Its low 16 bits are the bf16 value of the byte's low four bits, and its
    high 16 bits that of the high four bits.
    """
    byte = np.arange(256)
    scaled = np.ldexp(np.concatenate([_FP4, -_FP4]), byte[:, None] - 127)
    numbers = cast_freely(scaled, "BF16").astype("<u4")
    pairs: Array = numbers[:, byte & 15] | numbers[:, byte >> 4] << 16
    return pairs.reshape(-1)


# --- integers in words of 32 bits, with scales and zeros per group ---


def _unpacked(words: Array, bits: int, order: tuple[int, ...] = ()) -> Array:
    """Unpack unsigned integers of `bits` bits from words of 32 bits: [rows, words] -> [rows, integers], as uint8.

    Integer number i of a word is stored at position `order[i]`, counted from the lowest bits, or at position i if there
    is no `order`.
    """
    unit = 32 // math.gcd(bits, 32)  # the number of integers that fill whole words
    groups = words.view(np.uint32).reshape(len(words), -1, unit * bits // 32)
    out = np.empty((*groups.shape[:2], unit), np.uint8)
    for number, place in enumerate(order or range(unit)):
        word, shift = divmod(place * bits, 32)
        value = groups[..., word] >> np.uint32(shift)
        if shift + bits > 32:
            value = value | groups[..., word + 1] << np.uint32(32 - shift)
        out[..., number] = value & np.uint32(2**bits - 1)
    return out.reshape(len(words), -1)


def _scaled(values: Array, scales: Array, zeros: Array | None, groups: Array | None, kind: str) -> Array:
    """Compute (values - zeros) * scales in fp32, and round the products to the dtype `kind` of the scales.

    The differences are exact. The argument `values` is overwritten.

    Args:
        values: the quantised integers as fp32, [rows, columns].
        scales: the scales, [rows, groups of columns].
        zeros: the zero points, of the same shape, or None if there are none.
        groups: the group number of every column. None if the groups are consecutive and have equal widths.
        kind: the dtype of the result.
    """
    if groups is None:
        grouped = values.reshape(len(values), scales.shape[1], -1)
        if zeros is not None:
            grouped -= zeros[:, :, None]
        grouped *= scales[:, :, None]
    else:
        if zeros is not None:
            values -= zeros.take(groups, 1)
        values *= scales.take(groups, 1)
    return cast_freely(values, kind)


def _groups(parts: Parts, part: str, columns: int, count: int) -> Array | str | None:
    """Return the group number of every column of a weight, which the tensor with the key `part` stores (GPTQ's g_idx).

    Args:
        parts: the tensors of the weight.
        part: the key of the tensor.
        columns: the number of columns.
        count: the number of groups.

    Returns:
        None if there is no such tensor, or if the groups are consecutive and have equal widths. A text that says what
        is wrong, if the tensor is invalid.
    """
    if part not in parts or not parts.fetched:
        return None
    if parts.kind(part) not in ("I32", "I64") or parts.shape(part) != (columns,):
        return f"{part} must be I32 of shape [{columns}], but is {parts.kind(part)} {list(parts.shape(part))}"
    indices = parts[part]
    if columns and (indices.min() < 0 or indices.max() >= count):
        first, last = indices.min(), indices.max()
        return f"{part} has values from {first} to {last}, but the groups are numbered 0 to {count - 1}"
    plain = columns % count == 0 and np.array_equal(indices, np.arange(columns) // (columns // count))
    return None if plain else indices.astype(np.intp)


def _transposed(matrix: Array, start: int, end: int) -> Array:
    """Return columns `start` to `end` (exclusive) of a matrix as contiguous rows."""
    return np.ascontiguousarray(np.ascontiguousarray(matrix[:, start:end]).T)


# --- GPTQ: [in, out], values packed along in, zeros along out; version 1 stores zeros minus one ---

_GPTQ_BITS = (2, 3, 4, 8)


def _refuses_gptq(settings: _Settings) -> str | None:
    bits, form, words = settings.get("bits"), _gptq_format(settings), settings.get("pack_dtype", "int32")
    if not _one_of(bits, _GPTQ_BITS):
        return f"gptkit reads GPTQ with 2, 3, 4 or 8 bits, not {shown(bits, 20)}"
    if form not in ("gptq", "gptq_v2"):
        return f"its checkpoint_format is {shown(form, 40)}, but gptkit reads only gptq and gptq_v2"
    return None if words in ("int32", None) else f"its pack_dtype is {shown(words, 40)}, but gptkit reads only int32"


def _gptq_format(settings: _Settings) -> Any:
    return settings.get("checkpoint_format") or settings.get("format") or "gptq"


def _packed(parts: Parts, bits: str = "qweight") -> str | None:
    """Check the dtypes and the number of dimensions of a weight's packed integers, zero points and scales.

    `bits` is the key of the packed integers. Return what is wrong, or None.
    """
    if parts.kind(bits) not in ("I32", "U32") or parts.kind("qzeros") not in ("I32", "U32"):
        return "the packed integers and zeros must be I32 or U32"
    if parts.kind("scales") not in ("F16", "BF16", "F32"):
        return "the scales must be floating-point numbers"
    if not all(len(parts.shape(part)) == 2 and all(parts.shape(part)) for part in (bits, "qzeros", "scales")):
        return "the packed integers, zeros and scales must be matrices"
    return None


def _gptq(settings: _Settings, parts: Parts, _: str) -> Numbers | str:
    if (wrong := _packed(parts)) is not None:
        return wrong
    (words, out), (count, wide), zeros = parts.shape("qweight"), parts.shape("scales"), parts.shape("qzeros")
    bits, size, varied = settings["bits"], settings.get("group_size", 128), bool(settings.get("dynamic"))
    indexed = parts.shape("g_idx") if "g_idx" in parts else ()
    if varied and len(indexed) == 1 and indexed[0] and 32 * words % indexed[0] == 0:
        bits = 32 * words // indexed[0]  # the number of bits differs by layer
    if bits not in _GPTQ_BITS or 32 * words % bits:
        return f"integers of {bits} bits do not fill {words} words of 32 bits"
    columns = 32 * words // bits
    if settings.get("desc_act") and not indexed:
        return "desc_act is set, but there is no g_idx"
    if not indexed or not varied:
        size = columns if size == -1 else size
        if not _whole(size) or count != -(-columns // size):
            return f"{columns} inputs in groups of {shown(size, 20)} cannot have {count} scales"
    if wide != out or 32 * zeros[1] != out * bits or zeros[0] != count:
        return f"the scales and zeros must be for {count} groups and {out} outputs"
    groups = _groups(parts, "g_idx", columns, count)
    if isinstance(groups, str):
        return groups
    if groups is None and columns % count:
        groups = np.arange(columns) // size
    decoder = partial(_gptq_rows, parts, bits, _gptq_format(settings) == "gptq", groups)
    return Numbers(parts.kind("scales"), (out, columns), decoder, _LINE // 4)


def _gptq_rows(parts: Parts, bits: int, less: bool, groups: Array | None) -> _Rows:
    kind, packed = parts.kind("scales"), parts["qzeros"].view(np.uint32)
    if less and bits != 3:  # as GPTQModel does: an overflow carries into the next integer
        packed = packed + np.uint32(sum(1 << shift for shift in range(0, 32, bits)))
    zeros = _unpacked(packed, bits).T
    if less and bits == 3:
        zeros = (zeros + np.uint8(1)) & np.uint8(7)
    zeros, scales = zeros.astype(np.float32), to_float64(parts["scales"], kind).astype(np.float32).T
    words = parts["qweight"]

    def make(_: int, start: int, end: int) -> Array:
        values = _unpacked(_transposed(words, start, end), bits).astype(np.float32)
        return _scaled(values, scales[start:end], zeros[start:end], groups, kind)

    return make


# --- AWQ: [in, out], packed along out in its own order ---

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the position in a word of every output


def _refuses_awq(settings: _Settings) -> str | None:
    form = settings.get("version") or settings.get("format") or "gemm"
    if str(form).lower() != "gemm":
        return f"its version is {shown(form, 40)}, but gptkit reads only gemm"
    if settings.get("bits", 4) != 4:
        return f"gptkit reads AWQ with 4 bits, not {shown(settings['bits'], 20)}"
    return (
        None
        if settings.get("zero_point", True) is True
        else "zero_point is not true, but gptkit reads AWQ only with zeros"
    )


def _awq(settings: _Settings, parts: Parts, _: str) -> Numbers | str:
    if (wrong := _packed(parts)) is not None:
        return wrong
    (columns, words), size = parts.shape("qweight"), settings.get("group_size", 128)
    size = columns if size == -1 else size
    if not _whole(size) or columns % size:
        return f"{columns} inputs cannot be divided into groups of {shown(size, 20)}"
    wanted = (columns // size, words)
    if parts.shape("qzeros") != wanted or parts.shape("scales") != (wanted[0], 8 * words):
        return f"the zeros must have shape {list(wanted)} and the scales {[wanted[0], 8 * words]}"
    return Numbers(parts.kind("scales"), (8 * words, columns), partial(_awq_rows, parts), 2 * _LINE)


def _awq_rows(parts: Parts) -> _Rows:
    kind, words = parts.kind("scales"), parts["qweight"]
    zeros = _unpacked(parts["qzeros"], 4, _AWQ_ORDER).T.astype(np.float32)
    scales = to_float64(parts["scales"], kind).astype(np.float32).T

    def make(_: int, start: int, end: int) -> Array:
        # Unpack first, because _unpacked puts the integers of a word next to each other, and then transpose.
        some = _unpacked(np.ascontiguousarray(words[:, start // 8 : end // 8]), 4, _AWQ_ORDER)
        values = np.ascontiguousarray(some.T).astype(np.float32)
        return _scaled(values, scales[start:end], zeros[start:end], None, kind)

    return make


# --- bitsandbytes: int8 by rows; nf4 and fp4 by blocks of the flat matrix, whose scales may be quantised to 8 bits ---


def _int8(_: _Settings, parts: Parts, __: str) -> Numbers | str:
    shape = parts.shape("weight")
    if len(shape) != 2 or (parts.kind("SCB"), parts.shape("SCB")) != ("F32", shape[:1]):
        return "the weight must be a matrix, and SCB must be F32 with one value per row"
    if "weight_format" in parts and parts.fetched and parts["weight_format"].any():
        return "its weight_format is an order of rows and columns that gptkit cannot read"
    return Numbers("F32", shape, partial(_int8_rows, parts))


def _int8_rows(parts: Parts) -> _Rows:
    bits, scales = parts["weight"], parts["SCB"]

    def make(_: int, start: int, end: int) -> Array:
        values = bits[start:end].astype(np.float32)
        values *= scales[start:end, None]
        values *= np.float32(7.874015718698502e-3)  # bitsandbytes' 1 / 127
        return values

    return make


_QUANT_STATE = ".quant_state.bitsandbytes__"
_STATE_BYTES = 2**16
_BLOCKS = {32, 64, 128, 256, 512, 1024, 2048, 4096}


def _four_bits(_: _Settings, parts: Parts, __: str) -> Numbers | str:
    quant_types = [name for name in ("nf4", "fp4") if _QUANT_STATE + name in parts]
    if len(quant_types) != 1:
        return f"it must have exactly one quant_state, but has {len(quant_types)}"
    if not parts.fetched:
        return "its shape is stored in its quant_state, which was not fetched"
    state = _state(parts, _QUANT_STATE + quant_types[0])
    shape, size, kind = state.get("shape"), state.get("blocksize"), state.get("dtype")
    dtype = {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}.get(kind) if isinstance(kind, str) else None
    if not (isinstance(shape, list) and len(shape) == 2 and all(map(_whole, shape)) and _one_of(size, _BLOCKS)):
        return "its quant_state has no valid shape and blocksize"
    if state.get("quant_type") != quant_types[0] or dtype is None:
        return f"its quant_state has quant_type {shown(state.get('quant_type'), 20)} and dtype {shown(kind, 20)}"
    elements = math.prod(shape)
    stored = math.prod(parts.shape("")) * DTYPES[parts.kind("")].itemsize
    blocks = -(-elements // size)
    if stored != -(-elements // 2):
        return f"a matrix {list(shape)} of 4-bit values does not have {stored} bytes"
    nested = ".nested_absmax" in parts
    if parts.kind(".absmax") != ("U8" if nested else "F32") or parts.shape(".absmax") != (blocks,):
        return f"absmax must be {'U8' if nested else 'F32'} of shape [{blocks}]"
    if (parts.kind(".quant_map"), parts.shape(".quant_map")) != ("F32", (16,)):
        return "quant_map must be F32 of shape [16]"
    if nested:
        inner, offset = state.get("nested_blocksize"), state.get("nested_offset")
        if not _one_of(inner, _BLOCKS) or not _finite(offset):
            return "its quant_state has no valid nested_blocksize and nested_offset"
        if (parts.kind(".nested_absmax"), parts.shape(".nested_absmax")) != ("F32", (-(-blocks // inner),)):
            return f"nested_absmax must be F32 of shape [{-(-blocks // inner)}]"
        if (parts.kind(".nested_quant_map"), parts.shape(".nested_quant_map")) != ("F32", (256,)):
            return "nested_quant_map must be F32 of shape [256]"
    return Numbers(dtype, tuple(shape), partial(_four_bit_rows, parts, tuple(shape), size, state, dtype), 2)


def _state(parts: Parts, part: str) -> Mapping[str, Any]:
    """Return the JSON object that a tensor of bytes contains, or an empty dictionary if it contains none."""
    if parts.kind(part) != "U8" or math.prod(parts.shape(part)) > _STATE_BYTES:
        return {}
    try:
        state = json.loads(parts[part].tobytes().decode())
    except (ValueError, RecursionError):
        return {}
    return state if isinstance(state, dict) else {}


def _four_bit_rows(parts: Parts, shape: Shape, size: int, state: Mapping[str, Any], dtype: str) -> _Rows:
    bits, code = np.ascontiguousarray(parts[""]).reshape(-1).view(np.uint8), parts[".quant_map"]
    scales, columns, byte = parts[".absmax"], shape[1], np.arange(256)
    if ".nested_absmax" in parts:
        outer = np.repeat(parts[".nested_absmax"], state["nested_blocksize"])[: len(scales)]
        scales = parts[".nested_quant_map"].take(scales) * outer + np.float32(state["nested_offset"])
    pairs = np.stack([code[byte >> 4], code[byte & 15]], 1).view(np.uint64).reshape(-1)  # two values per byte

    def make(_: int, start: int, end: int) -> Array:
        first, last = start * columns, end * columns  # `first` is even, because rows are computed in pairs
        values = pairs.take(bits[first // 2 : -(-last // 2)]).view(np.float32)[: last - first]
        block = first // size
        values *= np.repeat(scales[block : -(-last // size)], size)[first - block * size :][: last - first]
        return cast_freely(values, dtype).reshape(-1, columns)

    return make


# --- compressed-tensors: integers in words or bytes, or fp8, with a scale per tensor, row, group or block ---

_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision", None)


def _refuses_compressed(settings: _Settings) -> str | None:
    groups = settings.get("config_groups")
    if not isinstance(groups, dict) or not groups or not all(map(_weights_of, groups.values())):
        return "its config_groups do not say how weights are stored"
    for form in (settings.get("format"), *(group.get("format") for group in groups.values())):
        if form not in _FORMATS:
            return f"its format is {shown(form, 40)}, but gptkit reads only {', '.join(map(str, _FORMATS[:-1]))}"
    sparse, turned = (settings.get(name) or {} for name in ("sparsity_config", "transform_config"))
    if not isinstance(sparse, dict) or sparse.get("format", "dense") != "dense":
        return "gptkit cannot read its sparsity_config"
    if not isinstance(turned, dict) or turned.get("config_groups"):
        return "gptkit cannot read its transform_config"
    return None


def _weights_of(group: Any) -> Any:
    return isinstance(group, dict) and isinstance(group.get("weights"), dict) and group["weights"]


def _compressed(settings: _Settings, parts: Parts, _: str) -> Numbers | str:
    packed = "weight_packed" in parts
    own = "weight_packed" if packed else "weight"
    kind, scale_kind = parts.kind(own), parts.kind("weight_scale")
    if len(parts.shape(own)) != 2 or (packed and kind != "I32"):
        return "the weight must be a matrix" + (" of I32" if packed else "")
    if scale_kind not in ("F16", "BF16", "F32"):
        return "the scales must be floating-point numbers"
    described = [_weights_of(group) for group in settings["config_groups"].values()]
    wanted = "float" if kind in F8 else "int"
    described = [args for args in described if args.get("type", "int") == wanted]
    misfits = []
    for args in described:
        numbers = _as_described(args, parts, own)
        if not isinstance(numbers, str):
            return numbers
        misfits.append(numbers)
    return misfits[0] if misfits else f"no group in config.json has the type {wanted}"


# Complex: one branch for each scheme of compressed-tensors.
def _as_described(args: _Settings, parts: Parts, own: str) -> Numbers | str:  # noqa: C901
    """Return the weight, if its tensors agree with the settings `args`. Otherwise return a text that says why not.

    `args` are the "weights" settings of one of config.json's `config_groups`. `own` is the key of the quantised values:
    "weight_packed" for packed integers, or "weight".
    """
    bits, strategy, size = args.get("num_bits"), args.get("strategy") or "tensor", args.get("group_size")
    block, scales, kind = args.get("block_structure"), parts.shape("weight_scale"), parts.kind("weight_scale")
    rows, columns = parts.shape(own)
    if own == "weight_packed":
        if not _one_of(bits, (2, 4, 8)):
            return f"gptkit reads packed integers of 2, 4 or 8 bits, not of {shown(bits, 20)}"
        words, columns = columns, columns * (32 // bits)
        if "weight_shape" in parts and parts.fetched:
            readable = parts.kind("weight_shape") in ("I32", "I64") and parts.shape("weight_shape") == (2,)
            stated = parts["weight_shape"].tolist() if readable else []
            if len(stated) != 2 or stated[0] != rows or not columns - 32 // bits < stated[1] <= columns:
                return f"weight_shape is {stated}, which does not fit {[rows, words]} words of {bits}-bit integers"
            columns = stated[1]
    elif not _one_of(bits, (8,)):
        return f"the values have 8 bits, but config.json says {shown(bits, 20)}"
    high: Any = rows  # `high` x `wide` values have one scale
    wide: Any = columns
    if strategy == "channel":
        high = 1
    elif strategy == "group":
        high, wide = 1, size
    elif strategy == "block" and isinstance(block, list) and len(block) == 2:
        high, wide = block
    elif strategy != "tensor":
        return f"gptkit cannot read the strategy {shown(strategy, 20)}"
    if not (_whole(high) and _whole(wide)) or (strategy == "group" and columns % wide):
        return f"a matrix of {rows} x {columns} cannot be divided into blocks of {shown([high, wide])}"
    down, across = -(-rows // high), -(-columns // wide)
    if math.prod(scales) != down * across or (down * across > 1 and scales not in ((down, across), (down,))):
        return f"the scales must have shape {[down, across]}"
    zero, zeros = parts.kind("weight_zero_point"), None
    if zero and args.get("symmetric", True) is False:
        zeros = parts.shape("weight_zero_point")
        if zero == "I32" and own == "weight_packed" and strategy in ("group", "channel"):
            if zeros != (-(-rows * bits // 32), across):
                return f"the zeros must be I32 of shape {[-(-rows * bits // 32), across]}"
        elif zero not in ("I8", "I32", "I64") or math.prod(zeros) != down * across:
            return f"the zeros must be I8 of shape {[down, across]}"
    elif args.get("symmetric", True) is False:
        return "it is asymmetric, but has no weight_zero_point"
    groups = _groups(parts, "weight_g_idx", columns, across) if "weight_g_idx" in parts and _indexed(parts) else None
    if isinstance(groups, str):
        return groups
    if groups is None and columns % across:
        groups = np.arange(columns) // wide
    grid, shape = (high, down, across), (rows, columns)
    decoder = partial(_compressed_rows, parts, own, kind, bits, shape, grid, groups, zeros is not None)
    return Numbers(kind, shape, decoder)


def _indexed(parts: Parts) -> bool:
    """Return whether the tensor weight_g_idx assigns columns to groups. It does not if it contains -1."""
    return not parts.fetched or not (parts["weight_g_idx"] == -1).any()


def _compressed_rows(
    parts: Parts,
    own: str,
    kind: str,
    bits: int,
    shape: Shape,
    grid: tuple[int, int, int],
    groups: Array | None,
    zeroed: bool,
) -> _Rows:
    """Return a function that dequantises rows of a weight of compressed-tensors or torchao.

    Args:
        parts: the tensors of the weight.
        own: the key of the quantised values.
        kind: the dtype of the result.
        bits: the number of bits of a quantised value.
        shape: the shape of the weight.
        grid: the number of rows that share a scale; the number of rows and of columns of the matrix of scales.
        groups: the group number of every column. None if the groups are consecutive and have equal widths.
        zeroed: whether there are zero points.
    """
    stored, (high, down, across) = parts[own], grid
    rows, columns = shape
    scales = to_float64(parts["weight_scale"], parts.kind("weight_scale")).astype(np.float32).reshape(down, across)
    zeros = None
    if zeroed:
        given, zero_kind = parts["weight_zero_point"], parts.kind("weight_zero_point")
        if zero_kind == "I32" and own == "weight_packed" and given.shape != (down, across):
            zeros = _unpacked(np.ascontiguousarray(given.T), bits).T[:rows].astype(np.float32) - 2 ** (bits - 1)
        else:
            zeros = to_float64(given, zero_kind).astype(np.float32).reshape(down, across)
    table = to_float64(np.arange(256, dtype=np.uint8), parts.kind(own)).astype(np.float32) if own == "weight" else None

    def make(_: int, start: int, end: int) -> Array:
        some = stored[start:end]
        if own == "weight_packed":
            values = _unpacked(np.ascontiguousarray(some), bits)[:, :columns].astype(np.float32)
            values -= 2 ** (bits - 1)
        else:
            assert table is not None
            values = some.astype(np.float32) if parts.kind(own) == "I8" else table.take(some)
        which = np.arange(start, end) // high
        return _scaled(values, scales[which], None if zeros is None else zeros[which], groups, kind)

    return make


# --- torchao: integers or fp8 in bytes, with a scale for equal parts of a matrix, as saved in safetensors ---

_TORCHAO = {"_weight_qdata": "weight", "_weight_scale": "weight_scale", "_weight_zero_point": "weight_zero_point"}
_TORCHAO_READ = (
    *("Int8WeightOnlyConfig", "IntxWeightOnlyConfig", "Float8WeightOnlyConfig"),
    *("Int8DynamicActivationInt8WeightConfig", "Int8DynamicActivationIntxWeightConfig"),
    *("Float8DynamicActivationFloat8WeightConfig", "FqnToConfig", "ModuleFqnToConfig"),
)


def _refuses_torchao(settings: _Settings) -> str | None:
    stated = settings.get("quant_type")
    kind = stated.get("default") if isinstance(stated, dict) else stated
    kind = kind.get("_type") if isinstance(kind, dict) else kind
    # Others have layouts for the kernels of GPUs.
    return (
        None
        if kind in _TORCHAO_READ
        else f"its quant_type is {shown(kind)}, but gptkit reads only {', '.join(_TORCHAO_READ)}"
    )


def _torchao(_: _Settings, parts: Parts, dtype: str) -> Numbers | str:
    own, grid, kind = parts.kind("_weight_qdata"), parts.shape("_weight_scale"), parts.kind("_weight_scale")
    shape, zero = parts.shape("_weight_qdata"), parts.kind("_weight_zero_point")
    if own not in ("I8", "F8_E4M3"):
        return "the values must be I8 or F8_E4M3"
    if "_weight_act_pre_scale" in parts:
        return "gptkit cannot read act_pre_scale, a factor of the layer's input"
    if kind not in ("F16", "BF16", "F32"):
        return "the scales must be floating-point numbers"
    if not (len(shape) == len(grid) == 2 and all(grid)) or any(n % m for n, m in zip(shape, grid, strict=True)):
        return "the weight must be a matrix, and its sizes must be multiples of those of the scales"
    if zero and (zero, parts.shape("_weight_zero_point")) != ("I8", grid):
        return f"the zeros must be I8 of shape {list(grid)}"
    target = dtype if kind == "F32" else kind
    cut = (shape[0] // grid[0], *grid)
    return Numbers(
        target,
        shape,
        partial(_compressed_rows, parts.called(_TORCHAO), "weight", target, 8, shape, cut, None, bool(zero)),
    )


METHODS = {
    "fp8": _Method((Scheme("", ("_scale_inv",), _fp8, kinds=F8, other={"_scale_inv": "_scale"}),)),
    "mxfp4": _Method((Scheme("_blocks", ("_scales",), _mxfp4),)),
    "gptq": _Method((Scheme("qweight", ("scales", "qzeros"), _gptq, ("g_idx",), result="weight"),), _refuses_gptq),
    "awq": _Method((Scheme("qweight", ("scales", "qzeros"), _awq, result="weight"),), _refuses_awq),
    "bitsandbytes": _Method((
        Scheme("weight", ("SCB",), _int8, ("weight_format",), ("I8",), "weight"),
        Scheme("", (".absmax", ".quant_map"), _four_bits,
               (".nested_absmax", ".nested_quant_map", f"{_QUANT_STATE}nf4", f"{_QUANT_STATE}fp4"),
               ("U8", "BF16", "F16", "F32")),
    )),
    "compressed-tensors": _Method((
        Scheme("weight_packed", ("weight_scale",), _compressed,
               ("weight_zero_point", "weight_shape", "weight_g_idx"), result="weight"),
        Scheme("weight", ("weight_scale",), _compressed,
               ("weight_zero_point", "weight_g_idx"), ("I8", "F8_E4M3"), "weight"),
    ), _refuses_compressed),
    "torchao": _Method((
        Scheme("_weight_qdata", ("_weight_scale",), _torchao,
               ("_weight_zero_point", "_weight_act_pre_scale"), result="weight"),
    ), _refuses_torchao),
}  # fmt: skip
"""The quantisation methods that gptkit reads, by `quant_method` in config.json."""
