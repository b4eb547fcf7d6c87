"""Read the header of a GGUF file, with strict checks.

gptkit uses the gguf package only to dequantise blocks, because the package's reader trusts the file.

    4 bytes   "GGUF"; then the version (2 or 3), the number of tensors and of metadata keys
    metadata  each a key, a type and a value; strings are a length and UTF-8, arrays a type, a length and values
    tensors   each a name, its sizes (the innermost first), its type, and its offset into the data
    the data  from the next multiple of `general.alignment`; every tensor begins at such a multiple, without holes

The header is untrusted data. Every number in it is checked against the file's size before anything is allocated, and
a bad header raises only CheckpointError. Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...architectures.ggml import TYPES, Quant
from ...errors import CheckpointError, shown
from ..names import POINTER, plain_file, pointer

if TYPE_CHECKING:
    import numpy as np

_ALIGNMENT = 32
_MAX_ALIGNMENT = 2**20
_MAX_KEYS = 2**16
_MAX_TENSORS = 2**17
MAX_STRINGS = 1_500_000  # in all arrays; a vocabulary of 262,000 tokens with its merges has 780,000
_MAX_TEXT = 2**26  # bytes of all strings; such a vocabulary takes a tenth of this
_MAX_NAME = 2**16 - 1
_SMALL = 2**16  # numbers of arrays that are read with the header; later ones are read on demand

_PART = 2**22  # elements to dequantise at a time, because the gguf package uses several times their memory

_Buffer = bytes | mmap.mmap

_START, _U64 = struct.Struct("<4sIQQ"), struct.Struct("<Q")
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
_BOOL, _STRING, _ARRAY = 7, 8, 9


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """The place of a tensor in a GGUF file."""

    name: str
    type: Quant
    shape: tuple[int, ...]  # in the order of numpy: the innermost dimension is the last one
    start: int  # the offset of its first byte
    end: int  # the offset after its last byte


@dataclass(frozen=True, slots=True)
class Array:
    """The place of an array in the metadata that is only read on demand."""

    kind: int  # GGUF's number for the type of the values
    count: int  # the number of values
    start: int  # the offset of the first value in the file, in bytes


class Incomplete(Exception):
    """Only the beginning of a remote file was fetched, and the header is longer. It has at least `needed` bytes."""

    def __init__(self, needed: int) -> None:
        super().__init__(needed)
        self.needed = needed


@dataclass(frozen=True)
class GgufHeader:
    """The checked header of a GGUF file."""

    where: str
    """The file's name for messages."""
    metadata: dict[str, Any]
    """The metadata values by key. Long arrays and arrays of strings are an `Array`; the method `values` reads them."""
    tensors: dict[str, GgufTensor]
    """The tensors by name, in the order of their bytes in the file."""
    buffer: _Buffer
    """The bytes of the file. For a remote file, only the beginning, with the whole header."""
    elsewhere: Callable[[int, int], bytes] | None = None
    """A function that fetches bytes `start` to `end` of a remote file; None for a local file."""
    ends: Mapping[str, int] = field(default_factory=dict)
    """The offset in the file, in bytes, at which the value of each metadata key ends."""

    def read(self, start: int, end: int) -> bytes:
        """Return bytes `start` to `end` (exclusive) of the file."""
        return self.buffer[start:end] if self.elsewhere is None else self.elsewhere(start, end)

    def numbers(self, key: str, count: int) -> list[GgufTensor]:
        """Return the places of the fp32 numbers that a metadata key has for the layers, as tensors of one element.

        The tensor of layer 0 is called "KEY.0", and so on. If the key has a single number, all layers have this number.

        Args:
            key: the metadata key.
            count: the number of layers.

        Raises:
            CheckpointError: the value of the key is not one fp32 number or `count` of them.
        """
        value = self.metadata.get(key)
        values = value if isinstance(value, list) else [value]
        start = self.ends.get(key, 0) - 4 * len(values)
        try:
            stored = struct.pack(f"<{len(values)}f", *values) == self.read(start, start + 4 * len(values))
        except (struct.error, OverflowError):
            stored = False
        if not stored or len(values) not in (1, count):
            raise CheckpointError(f"{self.where}: {key} must have {count} float32 numbers, one per layer")
        places = [start + 4 * (number % len(values)) for number in range(count)]
        return [GgufTensor(f"{key}.{number}", TYPES[0], (1,), at, at + 4) for number, at in enumerate(places)]

    def values(self, key: str, most: int) -> list[Any] | None:
        """Return the array at a metadata key, or None if there is no such key.

        Raises CheckpointError, before reading, if the array has more than `most` values.
        """
        value = self.metadata.get(key)
        if value is None:
            return None
        if not isinstance(value, list | Array):
            raise CheckpointError(f"{self.where}: {key} is not an array")
        count = len(value) if isinstance(value, list) else value.count
        if count > most:
            raise CheckpointError(f"{self.where}: {key} has {count:,} values, but at most {most:,} are possible")
        if isinstance(value, list):
            return value
        if value.kind != _STRING:
            return _numbers(self.where, self.buffer, value.kind, value.count, value.start)
        strings, at, unpack, buffer = [], value.start, _U64.unpack_from, self.buffer
        try:
            for _ in range(value.count):
                length = unpack(buffer, at)[0]
                strings.append(buffer[at + 8 : at + 8 + length].decode())
                at += 8 + length
        except UnicodeDecodeError as error:
            raise CheckpointError(
                f"{self.where}: {key} has a string that is not UTF-8 (entry {len(strings)})"
            ) from error
        return strings


def open_header(path: Path) -> GgufHeader:
    """Read and check the header of a GGUF file, which stays memory-mapped. Raises CheckpointError."""
    with plain_file(path) as file:
        if not os.fstat(file.fileno()).st_size:
            raise CheckpointError(f"{path} is empty")
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return parse_header(path, mapped)


def parse_header(
    where: Path | str, buffer: _Buffer, size: int | None = None, elsewhere: Callable[[int, int], bytes] | None = None
) -> GgufHeader:
    """Check and return the header of a GGUF file.

    Args:
        where: the name of the file for messages.
        buffer: the bytes of the file, or the first bytes of a remote file.
        size: the size of the file in bytes; by default that of `buffer`.
        elsewhere: a function that fetches bytes `start` to `end` of a remote file.

    Raises:
        CheckpointError: the header is invalid. Incomplete: the header does not end in `buffer`.
    """
    where = str(where)
    size = len(buffer) if size is None else size
    if buffer[: len(POINTER)] == POINTER:
        raise pointer(where)
    if size < _START.size or buffer[:4] != b"GGUF":
        raise CheckpointError(
            f"{where} is not a GGUF file: it does not begin with the bytes GGUF and a complete header"
        )
    _, version, tensors, keys = _START.unpack_from(buffer, 0)
    if version not in (2, 3):
        what = "its numbers are big-endian" if version & 0xFFFF == 0 else f"version {version}"
        raise CheckpointError(f"{where}: {what}; gptkit reads little-endian GGUF of versions 2 and 3")
    # A key takes at least 13 bytes and a tensor 32, so a false count cannot make gptkit allocate much.
    if keys > min(_MAX_KEYS, size // 13) or tensors > min(_MAX_TENSORS, size // 32):
        raise CheckpointError(
            f"the header of {where} claims {keys} metadata keys and {tensors} tensors, too many for {size} bytes"
        )
    cursor = _Cursor(where, buffer, size, _START.size)
    metadata, ends = _metadata(cursor, keys)
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if type(alignment) is not int or not 1 <= alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
        raise CheckpointError(f"{where}: general.alignment is {shown(alignment, 40)}, expected a power of two")
    infos = [_tensor(cursor, alignment) for _ in range(tensors)]
    return GgufHeader(where, metadata, _place(where, infos, cursor.at, alignment, size), buffer, elsewhere, ends)


class _Cursor:
    """A read position in the header, which only moves forward."""

    def __init__(self, where: str, buffer: _Buffer, size: int, at: int) -> None:
        self.where, self.buffer, self.size, self.at = where, buffer, size, at
        self.strings, self.text, self.small = MAX_STRINGS, _MAX_TEXT, _SMALL

    def take(self, length: int, what: str) -> int:
        """Move forward by `length` bytes and return the old position.

        Raises CheckpointError if the file ends before the new position, and Incomplete if the fetched part does.
        `what` names these bytes in errors.
        """
        at = self.at
        if length > self.size - at:
            raise CheckpointError(
                f"{self.where} is truncated: {what} takes {length} bytes from byte {at}, {self.size} found",
                "Download or copy this file again.",
            )
        if at + length > len(self.buffer):
            raise Incomplete(at + length)
        self.at = at + length
        return at

    def numbers(self, format_: str, what: str) -> tuple[Any, ...]:
        """Read the next numbers. `format_` has one letter of Python's `struct` for every number."""
        return struct.unpack_from(f"<{format_}", self.buffer, self.take(struct.calcsize(f"<{format_}"), what))

    def string(self, what: str, most: int | None = None) -> str:
        (length,) = self.numbers("Q", what)
        if most is not None and length > most:
            raise CheckpointError(
                f"{self.where}: {what} at byte {self.at} has {length} bytes, but at most {most} are possible"
            )
        at = self.take(length, what)
        self.read_text(length, what)
        try:
            return self.buffer[at : at + length].decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.where}: {what} at byte {at} is not UTF-8") from error

    def read_text(self, length: int, what: str) -> None:
        """Add `length` to the number of bytes of all strings so far. Raises CheckpointError if it is too large.

        `what` names the string in the error. The position does not move.
        """
        self.text -= length
        if self.text < 0:
            raise CheckpointError(
                f"{self.where}: the strings in the header, up to {what}, have more than {_MAX_TEXT:,} bytes together"
            )

    def skip_strings(self, count: int, what: str) -> None:
        """Move past an array of `count` strings, and check that all of them end within the file."""
        self.strings -= count
        if self.strings < 0 or count > (self.size - self.at) // 8:
            raise CheckpointError(f"{self.where}: {what} claims to have {count} strings, more than fit into the file")
        unpack, buffer, at, last = _U64.unpack_from, self.buffer, self.at, len(self.buffer) - 8
        for _ in range(count):
            if at > last:
                break
            at += 8 + unpack(buffer, at)[0]
            count -= 1
        # A length beyond the end of the file stops the loop, and `take` then raises the error.
        length = at - self.at + 8 * count
        self.take(length, what)
        self.read_text(length, what)


def _metadata(cursor: _Cursor, keys: int) -> tuple[dict[str, Any], dict[str, int]]:
    """Read the metadata. Return the values by key, and the offset in bytes at which each value ends, also by key."""
    metadata: dict[str, Any] = {}
    ends: dict[str, int] = {}
    for _ in range(keys):
        key = cursor.string("a metadata key", _MAX_NAME)
        if key in metadata:
            raise CheckpointError(f"{cursor.where}: the metadata key {shown(key)} occurs twice")
        (kind,) = cursor.numbers("I", "a type")
        what = f"the value of {shown(key)}"
        if kind == _STRING:
            metadata[key] = cursor.string(what)
        elif kind == _ARRAY:
            metadata[key] = _array(cursor, what)
        elif kind in _SCALARS:
            at = cursor.take(struct.calcsize(f"<{_SCALARS[kind]}"), what)
            (metadata[key],) = _numbers(cursor.where, cursor.buffer, kind, 1, at)
        else:
            raise CheckpointError(f"{cursor.where}: {what} has the unknown type {kind}")
        ends[key] = cursor.at
    return metadata, ends


def _array(cursor: _Cursor, what: str) -> list[Any] | Array:
    kind, count = cursor.numbers("IQ", what)
    start = cursor.at
    if kind == _STRING:
        cursor.skip_strings(count, what)
        return Array(kind, count, start)
    if kind not in _SCALARS:  # llama.cpp does not read arrays of arrays either
        raise CheckpointError(f"{cursor.where}: {what} is an array of the unknown type {kind}")
    cursor.take(count * struct.calcsize(f"<{_SCALARS[kind]}"), what)
    cursor.small -= count
    return Array(kind, count, start) if cursor.small < 0 else _numbers(cursor.where, cursor.buffer, kind, count, start)


def _numbers(where: str, buffer: _Buffer, kind: int, count: int, start: int) -> list[Any]:
    values = struct.unpack_from(f"<{count}{_SCALARS[kind]}", buffer, start)
    if kind != _BOOL:
        return list(values)
    for value in values:
        if value > 1:
            raise CheckpointError(f"{where}: a boolean at byte {start} is {value}, expected 0 or 1")
    return [value == 1 for value in values]


def _tensor(cursor: _Cursor, alignment: int) -> GgufTensor:
    """Read the header's entry of one tensor. `start` and `end` of the result count from the beginning of the data."""
    name = cursor.string("a tensor's name", _MAX_NAME)
    where = f"{cursor.where}: tensor {shown(name)}"
    (dims,) = cursor.numbers("I", "a tensor's sizes")
    if not 1 <= dims <= 4:
        raise CheckpointError(f"{where} has {dims} dimensions, expected 1 to 4")
    sizes = cursor.numbers(f"{dims}Q", "a tensor's sizes")
    (code,) = cursor.numbers("I", "a tensor's type")
    (offset,) = cursor.numbers("Q", "a tensor's offset")
    if code not in TYPES:
        raise CheckpointError(f"{where} has the unknown type {code}")
    kind = TYPES[code]
    if min(sizes) < 1 or sizes[0] % kind.block:
        raise CheckpointError(
            f"{where}: shape {list(sizes)} is not possible with the type {kind.name}. All sizes must be positive, and "
            f"the first one a multiple of {kind.block}"
        )
    nbytes = math.prod(sizes) // kind.block * kind.nbytes
    if offset % alignment:
        raise CheckpointError(
            f"{where} begins at byte {offset} of the data, which is not a multiple of the alignment {alignment}"
        )
    return GgufTensor(name, kind, tuple(reversed(sizes)), offset, offset + nbytes)


def _place(where: str, infos: list[GgufTensor], end: int, alignment: int, size: int) -> dict[str, GgufTensor]:
    """Return the tensors by name, with offsets that count from the beginning of the file.

    The offsets in `infos` count from the beginning of the data. The header ends at byte `end`.

    Raises CheckpointError if the tensors leave holes or overlap.
    """
    tensors: dict[str, GgufTensor] = {}
    data = at = -(-end // alignment) * alignment
    for info in sorted(infos, key=lambda info: (info.start, info.end)):
        start, end = data + info.start, data + info.end
        if info.name in tensors:
            raise CheckpointError(f"{where}: tensor {shown(info.name)} occurs twice")
        if start != at:
            what = "overlaps the tensor before it" if start < at else "leaves unused bytes before it"
            raise CheckpointError(f"{where}: tensor {shown(info.name)} {what} (byte {start}, {at} expected)")
        if end > size:
            raise CheckpointError(
                f"{where} is truncated: tensor {shown(info.name)} ends at byte {end}, {size} found",
                "Download or copy this file again.",
            )
        tensors[info.name] = GgufTensor(info.name, info.type, info.shape, start, end)
        at = -(-end // alignment) * alignment
    if size > max(at, end):
        raise CheckpointError(f"{where} has trailing bytes: {at} bytes expected, {size} found")
    return tensors


def dequantised(data: np.ndarray, kind: Quant) -> np.ndarray:
    """Dequantise the bytes of blocks of the type `kind` to fp32, [blocks, values of a block]."""
    import numpy as np
    from gguf import GGMLQuantizationType, quants

    blocks = data.reshape(-1, kind.nbytes)
    values = np.empty((len(blocks), kind.block), np.float32)
    step = max(1, _PART // kind.block)
    for at in range(0, len(blocks), step):
        # As one row, because the package loops over groups of rows.
        part = blocks[at : at + step].reshape(1, -1)
        values[at : at + step] = quants.dequantize(part, GGMLQuantizationType[kind.name]).reshape(-1, kind.block)
    return values
