"""Read headers of safetensors files with strict checks, and write headers.

    8 bytes   N, the header's length, little-endian
    N bytes   JSON: {"__metadata__": {str: str}, name: {"dtype", "shape", "data_offsets": [begin, end]}, ...}, padded
    the rest  the tensors' bytes, little-endian, row-major, without holes

A header is untrusted data. A bad one raises only CheckpointError, within a second and 512 MB, whatever it contains.
Source: https://github.com/huggingface/safetensors#format
"""

import json
import math
import os
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NoReturn, cast

import msgspec
import numpy as np

from ..errors import CheckpointError
from .names import POINTER, plain_file, pointer

MAX_HEADER = 32 * 2**20
"""The maximum size of a header in bytes.

The safetensors library allows 100 MB, which take half a minute and 2 GB of memory. Real headers have about 130 bytes
per tensor. A model of 10^12 parameters in one file has 140,000 tensors and so a header of 20 MB.
"""
MAX_KEYS = 600_000  # in a JSON object, with nested ones; four per tensor are enough for 10,000 layers
MAX_DIMS = 32  # the limit of numpy; the format has none
_MAX_BYTES = 2**63 - 1
_MAX_REST = 2**16  # bytes of everything in an index except its weight_map
_LONG_ENTRY = 2**16  # bytes; a tensor's entry has about a hundred
_EXPLAINED = 2**18  # bytes of JSON that are parsed a second time to find the error


@dataclass(frozen=True, slots=True)
class _Dtype:
    """A dtype of safetensors."""

    name: str
    bits: int  # of one element; packed dtypes have 4 or 6
    # The numpy dtype of arrays, which has the same bits: uint16 for BF16. None for packed dtypes.
    carrier: np.dtype[np.generic] | None

    @property
    def itemsize(self) -> int:
        """The size of one element in bytes. Raises CheckpointError for a packed dtype."""
        if self.carrier is None:
            raise CheckpointError(
                f"gptkit cannot convert the dtype {self.name}, which packs elements of {self.bits} bits into bytes"
            )
        return self.bits // 8


# In the order of the library's enum. save_file writes the types of this table from last to first.
DTYPES: dict[str, _Dtype] = {
    name: _Dtype(name, bits, None if carrier is None else np.dtype(carrier))
    for name, bits, carrier in (
        ("BOOL", 8, "?"), ("F4", 4, None), ("F6_E2M3", 6, None), ("F6_E3M2", 6, None), ("U8", 8, "u1"), ("I8", 8, "i1"),
        ("F8_E5M2", 8, "u1"), ("F8_E4M3", 8, "u1"), ("F8_E8M0", 8, "u1"), ("F8_E4M3FNUZ", 8, "u1"),
        ("F8_E5M2FNUZ", 8, "u1"), ("I16", 16, "<i2"), ("U16", 16, "<u2"), ("F16", 16, "<f2"), ("BF16", 16, "<u2"),
        ("I32", 32, "<i4"), ("U32", 32, "<u4"), ("F32", 32, "<f4"), ("C64", 64, "<c8"), ("F64", 64, "<f8"),
        ("I64", 64, "<i8"), ("U64", 64, "<u8"),
    )
}  # fmt: skip
_RANK = {name: rank for rank, name in enumerate(DTYPES)}


class TensorInfo(msgspec.Struct, frozen=True, gc=False):
    """A tensor and its place in a safetensors file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int  # the offset of the first byte in the file
    end: int  # the offset after the last byte

    @property
    def nbytes(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Header:
    """The checked header of a safetensors file."""

    tensors: dict[str, TensorInfo]  # by name, in the order of their bytes in the file
    metadata: dict[str, str]
    text: str = ""  # the JSON text


def read_header(path: Path) -> Header:
    """Read and check the header of a safetensors file. Raises CheckpointError."""
    with plain_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = header_length(path, file.read(8), size)
        raw = file.read(length)
    if len(raw) < length:
        raise CheckpointError(f"{path} is truncated: its header has {length} bytes, {len(raw)} found")
    return parse_header(path, raw, size)


def parse_header(where: Path | str, raw: bytes, size: int | None = None) -> Header:
    """Check the header of a safetensors file, and return it.

    Args:
        where: the name of the file for messages.
        raw: the JSON text of the header, without the 8 bytes before it.
        size: the size of the file in bytes. If it is given, the tensors must fill the file.

    Raises:
        CheckpointError: the header is invalid.
    """
    if not raw.startswith(b"{"):
        raise CheckpointError(f"{where} is not a safetensors file: its header does not start with '{{'")
    infos, metadata = _read_entries(where, raw)
    infos.sort(key=lambda info: (info.start, info.end))
    # The tensors must cover the file after the header without holes or overlaps.
    at = 8 + len(raw)
    end = infos[-1].end if infos else at
    size = max([at, *(info.end for info in infos)]) if size is None else size
    if end > size:
        raise CheckpointError(
            f"{where} is truncated: {end} bytes expected, {size} found", "Fetch or copy this file again."
        )
    for info in infos:
        if info.start != at:
            what = "overlaps the tensor before it" if info.start < at else "leaves unused bytes before it"
            raise CheckpointError(f"{where}: tensor {_short(info.name)} {what} (byte {info.start}, {at} expected)")
        at = info.end
    if end < size:
        raise CheckpointError(f"{where} has trailing bytes: {end} bytes expected, {size} found")
    return Header({info.name: info for info in infos}, metadata, raw.decode())


_Size = Annotated[int, msgspec.Meta(ge=0, le=_MAX_BYTES)]


class _HeaderEntry(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """The entry of a tensor in the JSON of a header.

    Unknown keys are an error, because they could change the meaning of the bytes.
    """

    dtype: str
    shape: tuple[_Size, ...]
    data_offsets: tuple[_Size, _Size]


_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ENTRY = msgspec.json.Decoder(_HeaderEntry)
_ENTRIES = msgspec.json.Decoder(list[_HeaderEntry])
_METADATA = msgspec.json.Decoder(dict[str, str] | None)
_WEIGHT_MAP = msgspec.json.Decoder(dict[str, str])
_MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""The errors of msgspec's JSON decoders: not JSON or values of other types, not UTF-8, nested too deeply."""


def _read_entries(where: Path | str, raw: bytes) -> tuple[list[TensorInfo], dict[str, str]]:
    """Return the tensors that a header lists, in the order of its JSON text `raw`, and the metadata.

    The JSON is decoded directly to typed records, so that a bad header cannot make the decoder use much memory.
    """
    what = f"the header of {where}"
    members: dict[str, msgspec.Raw] = {}
    try:
        members = _members_of(raw, what)
        stated = members.pop("__metadata__", None)
        metadata = None if stated is None else _METADATA.decode(stated)
        for name, text in members.items() if len(raw) > _LONG_ENTRY else ():
            if memoryview(text).nbytes > _LONG_ENTRY:
                _check_entry(where, name, None)
        texts = b",".join(members.values())
        entries = _ENTRIES.decode(b"[" + texts + b"]")
    except _MALFORMED as error:
        _explain(where, raw, members, error)
    _refuse_twins(what, raw, 4 * len(members) + (stated is not None) + len(metadata or ()))
    data = 8 + len(raw)
    infos = []
    for name, entry in zip(members, entries, strict=True):
        start, end = entry.data_offsets
        shape, dtype = entry.shape, DTYPES.get(entry.dtype)
        # A fast check, because there may be many tensors. `_check_entry` finds what is wrong.
        if dtype is None or not _fits(shape, dtype.bits, end - start):
            _check_entry(where, name, {"dtype": entry.dtype, "shape": list(shape), "data_offsets": [start, end]})
        infos.append(TensorInfo(name, entry.dtype, shape, data + start, data + end))
    if b"-" in texts:  # sizes are not negative, and no dtype has this sign
        raise CheckpointError(
            f"{where}: the shape has the size -0, which other programs read as a floating-point number"
        )
    return infos, metadata or {}


def parse_weight_map(what: str, raw: bytes) -> dict[str, str]:
    """Return the `weight_map` in the JSON text of an index: name of a tensor -> name of its file.

    Raises CheckpointError if the text fails the checks that a header must also pass. `what` names it in messages.
    """
    no_weight_map = CheckpointError(f"{what} has no weight_map of tensor names to file names")
    try:
        members = _members_of(raw, what)
        if (text := members.pop("weight_map", None)) is None:
            raise no_weight_map
        mapping = _WEIGHT_MAP.decode(text)
    except _MALFORMED as error:
        if len(raw) <= _EXPLAINED:
            weight_map = parse_json_object(raw, what).get("weight_map")
            if not isinstance(weight_map, dict):
                raise no_weight_map from None
            if not all(isinstance(name, str) for name in weight_map.values()):
                raise CheckpointError(f"{what}: its weight_map has a value that is not a file name") from None
        raise _cannot_be_read(what, error) from None
    if not mapping:
        raise CheckpointError(f"{what} has an empty weight_map")
    rest = b"{" + b",".join(msgspec.json.encode(name) + b":" + bytes(text) for name, text in members.items()) + b"}"
    if len(rest) > _MAX_REST:
        raise CheckpointError(f"{what} has {len(rest):,} bytes outside of its weight_map, too many for an index")
    parse_json_object(rest, what)
    _refuse_twins(what, raw, colons(rest) + 1 + len(mapping))
    return mapping


def _members_of(raw: bytes, what: str) -> dict[str, msgspec.Raw]:
    """Return the members of a JSON object, whose values are still JSON text.

    Raises CheckpointError if there are too many keys, and one of the errors in `_MALFORMED` if the JSON is invalid.
    """
    if raw.count(b":") > MAX_KEYS:
        raise CheckpointError(f"{what} cannot be read: it has more than {MAX_KEYS:,} keys, too many for an index")
    return _MEMBERS.decode(raw)


def _refuse_twins(what: str, raw: bytes, count: int) -> None:
    """Raise CheckpointError if a key occurs twice in a JSON object.

    Decoding keeps only one of two equal keys. So the number of decoded keys, `count`, is then smaller than the number
    of keys in the JSON text `raw`.
    """
    if raw.count(b":") == count or colons(raw) == count:
        return
    if len(raw) <= _EXPLAINED:
        parse_json_object(raw, what)  # raises with the name of the key
    raise CheckpointError(f"{what} cannot be read: a key occurs twice")


def colons(raw: bytes) -> int:
    """Count the keys in a valid JSON text, nested ones included. Every key has one colon outside of strings."""
    # After removing escapes, which only strings have, every quote begins or ends a string.
    text = raw.replace(rb"\\", b"").replace(rb"\"", b"") if b"\\" in raw else raw
    signs = np.frombuffer(text, np.uint8)
    inside = np.logical_xor.accumulate(signs == ord('"'))
    return int(np.count_nonzero((signs == ord(":")) & ~inside))


def _explain(where: Path | str, raw: bytes, members: Mapping[str, msgspec.Raw], error: Exception) -> NoReturn:
    """Raise CheckpointError that says what is wrong with a header that msgspec could not decode.

    Args:
        where: the name of the file for messages.
        raw: the JSON text of the header.
        members: the entries that could be separated, as JSON text.
        error: the error of msgspec.
    """
    what = f"the header of {where}"
    parsed = parse_json_object(raw, what) if len(raw) <= _EXPLAINED else {}
    metadata = parsed.pop("__metadata__", None)
    if metadata is not None and not (
        isinstance(metadata, dict) and all(isinstance(text, str) for text in metadata.values())
    ):
        raise CheckpointError(f"{where}: __metadata__ is not an object of strings")
    for name, entry in parsed.items():
        _check_entry(where, name, entry)
    for name, text in members.items():
        try:
            _ENTRY.decode(text)
        except _MALFORMED:
            alone = b'{"":' + bytes(text) + b"}"
            _check_entry(where, name, parse_json_object(alone, f"{where}: tensor {_short(name)}")[""])
            break
    raise _cannot_be_read(what, error)


def _cannot_be_read(what: str, error: Exception) -> CheckpointError:
    """Return the error for JSON that cannot be decoded."""
    if isinstance(error, RecursionError):
        return CheckpointError(f"{what} is nested too deeply")
    return CheckpointError(f"{what} cannot be read: {error}")


def header_length(where: Path | str, prefix: bytes, size: int) -> int:
    """Return the length of the header's JSON text in bytes, which the first 8 bytes of a file state.

    `size` is the size of the file in bytes. Raises CheckpointError if the length is impossible.
    """
    if prefix == POINTER[:8]:
        raise pointer(where)
    if len(prefix) < 8:
        raise CheckpointError(f"{where} is truncated: a safetensors file has at least 8 bytes, {size} found")
    (length,) = cast("tuple[int]", struct.unpack("<Q", prefix))
    if length > MAX_HEADER:
        claim = f"it claims a header of {length:,} bytes, and no real one has more than {MAX_HEADER:,}"
        raise CheckpointError(f"{where} is not a safetensors file: {claim}")
    if 8 + length > size:
        raise CheckpointError(f"{where} is truncated: {8 + length} bytes expected for its header alone, {size} found")
    return length


def parse_json_object(raw: bytes, what: str) -> dict[str, object]:
    """Parse a JSON object strictly: only UTF-8, no key twice, no NaN, no lone surrogates. Raises CheckpointError.

    `what` names the text in messages. Parsing needs up to 100 times as much memory as the text.
    """

    def refuse(name: str) -> NoReturn:
        raise ValueError(f"{name} is not JSON")

    try:
        parsed: object = json.loads(raw.decode("utf-8"), object_pairs_hook=_no_duplicates, parse_constant=refuse)
    except (RecursionError, ValueError) as error:  # not UTF-8, not JSON, or a duplicate key
        raise _cannot_be_read(what, error) from None
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{what} is not a JSON object")
    return parsed


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    # Readers may choose different ones of two entries, and so read different tensors.
    result = dict(pairs)
    if len(result) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {_short(twice)} occurs twice")
    for text in (text for pair in pairs for text in pair if isinstance(text, str)):
        text.encode()  # raises UnicodeEncodeError, a ValueError, for a lone surrogate
    return result


def _fits(shape: tuple[int, ...], bits: int, nbytes: int) -> bool:
    """Return whether a tensor of this shape, with elements of `bits` bits, has exactly `nbytes` bytes."""
    if bits * math.prod(shape) != 8 * nbytes or len(shape) > MAX_DIMS:
        return False
    return bits * (math.prod(shape) or math.prod(filter(None, shape))) <= _MAX_BYTES


def _check_entry(file: Path | str, name: str, entry: object) -> None:
    """Raise CheckpointError unless an entry of the header, parsed from JSON, describes a valid tensor."""
    where = f"{file}: tensor {_short(name)}"
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(
            f"{where}: its entry in the header must have exactly the fields dtype, shape and data_offsets"
        )
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(f"{where}: unknown dtype {_short(dtype)}")
    if not _is_sizes(shape) or len(shape) > MAX_DIMS:
        raise CheckpointError(f"{where}: shape {_short(shape)} is not a list of up to {MAX_DIMS} sizes")
    if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{where}: data_offsets {_short(offsets)} are not two ascending byte positions")
    expected = _nbytes(where, dtype, shape)
    if offsets[1] - offsets[0] != expected:
        span = offsets[1] - offsets[0]
        raise CheckpointError(f"{where}: {dtype} {_short(shape)} needs {expected} bytes, but its offsets span {span}")


def _is_sizes(value: object) -> bool:
    return isinstance(value, list | tuple) and all(type(size) is int and 0 <= size <= _MAX_BYTES for size in value)


def _nbytes(where: str, dtype: str, shape: Sequence[int]) -> int:
    """Return the size of a tensor in bytes.

    Raises CheckpointError if it is too large, or if the elements of a packed dtype do not fill whole bytes.
    """
    bits = DTYPES[dtype].bits
    # Without zeros, because numpy refuses a shape that would overflow without its zeros.
    if bits * math.prod(size for size in shape if size) > _MAX_BYTES:
        raise CheckpointError(f"{where}: shape {_short(list(shape))} has more bytes than a file can have")
    total = bits * math.prod(shape)
    if total % 8:
        raise CheckpointError(f"{where}: {dtype} of shape {_short(list(shape))} does not fill whole bytes")
    return total // 8


def _short(value: object) -> str:
    if isinstance(value, str | list):
        value = value[:100]  # a name may have megabytes
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def build_header(
    tensors: Sequence[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, list[TensorInfo]]:
    """Return the header of a safetensors file, and the place of every tensor in the file.

    The header has the same bytes as that of safetensors 0.8. It lists the tensors by dtype, in the reverse order of
    DTYPES, and then by name, and is padded to a multiple of 8 bytes.

    Args:
        tensors: the name, dtype and shape of every tensor.
        metadata: the content of `__metadata__`.

    Raises:
        CheckpointError: a dtype, shape or name is not allowed, or the header is too large.
    """
    for name, dtype, shape in tensors:
        if dtype not in DTYPES or not _is_sizes(shape) or len(shape) > MAX_DIMS:
            raise CheckpointError(
                f"tensor {_short(name)}: {_short(dtype)} {_short(shape)} is not a valid dtype and shape"
            )
    entries: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    placed: list[TensorInfo] = []
    at = 0
    for name, dtype, shape in sorted(tensors, key=lambda tensor: (-_RANK[tensor[1]], tensor[0])):
        if name in entries or name == "__metadata__":
            raise CheckpointError(f"two tensors have the name {_short(name)}")
        end = at + _nbytes(f"tensor {_short(name)}", dtype, shape)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        placed.append(TensorInfo(name, dtype, shape, at, end))
        at = end
    try:
        text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError as error:
        raise CheckpointError(
            f"the name of a tensor or the text of the metadata is not valid Unicode: {error}"
        ) from error
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER or text.count(b":") > MAX_KEYS:
        raise CheckpointError(
            f"the header of {len(tensors):,} tensors would have {len(text):,} bytes, more than gptkit reads",
            "Write smaller weight files, for example with --max-shard-size 1GB.",
        )
    data = 8 + len(text)
    infos = [TensorInfo(info.name, info.dtype, info.shape, data + info.start, data + info.end) for info in placed]
    return struct.pack("<Q", len(text)) + text, infos
