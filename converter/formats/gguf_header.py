"""The header of a GGUF file, read strictly: without the gguf package, whose reader trusts what it reads, which is asked
for the values of quantised blocks alone.

    4 bytes   "GGUF"; then the version (2 or 3), the number of tensors and of metadata keys
    metadata  each a key, a type and a value; strings are a length and UTF-8, arrays a type, a length and values
    tensors   each a name, its sizes (the innermost first), its type, and its offset into the data
    the data  from the next multiple of `general.alignment`; every tensor begins at such a multiple, without holes

A header is somebody else's data: every number in it is checked against the file's size before anything is allocated,
and nothing but CheckpointError comes out of a bad one. https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
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
MAX_STRINGS = 1_500_000  # of all arrays together: a vocabulary of 262,000 tokens and its merges are 780,000
_MAX_TEXT = 2**26  # bytes of all strings together: such a vocabulary takes a tenth of it
_MAX_NAME = 2**16 - 1
_SMALL = 2**16  # so many numbers of arrays are read at once, further ones when they are asked for

_PART = 2**22  # elements that are dequantised at a time: the gguf package's numpy takes several times their memory

_Buffer = bytes | mmap.mmap

_START, _U64 = struct.Struct("<4sIQQ"), struct.Struct("<Q")
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
_BOOL, _STRING, _ARRAY = 7, 8, 9


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor lies: bytes `start` to `end` (exclusive) of the file. `shape` is numpy's, the innermost last."""

    name: str
    type: Quant
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Array:
    """An array of metadata that is read when it is asked for: `count` values from byte `start`."""

    kind: int
    count: int
    start: int


class Incomplete(Exception):
    """The beginning of a file that is elsewhere does not hold its whole header: `needed` bytes of it are, at least."""

    def __init__(self, needed: int) -> None:
        super().__init__(needed)
        self.needed = needed


@dataclass(frozen=True)
class GgufHeader:
    """A checked header.

    metadata: values by key; short arrays of numbers are lists, others an `Array` for `values`.
    tensors: in the order of their bytes. buffer: the file; of a file elsewhere its beginning, with the whole header.
    elsewhere: how bytes `start` to `end` of a file elsewhere are had, a few at a time; None where it is all here.
    ends: where the value of each key ends.
    """

    where: str
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    buffer: _Buffer
    elsewhere: Callable[[int, int], bytes] | None = None
    ends: Mapping[str, int] = field(default_factory=dict)

    def read(self, start: int, end: int) -> bytes:
        """Bytes `start` to `end` (exclusive) of the file."""
        return self.buffer[start:end] if self.elsewhere is None else self.elsewhere(start, end)

    def numbers(self, key: str, count: int) -> list[GgufTensor]:
        """The `count` fp32 values at `key`, or the one that stands for all, as tensors of the key's name and a number.
        Raises CheckpointError: there is something else.
        """
        value = self.metadata.get(key)
        values = value if isinstance(value, list) else [value]
        start = self.ends.get(key, 0) - 4 * len(values)
        try:
            found = struct.pack(f"<{len(values)}f", *values) == self.read(start, start + 4 * len(values))
        except (struct.error, OverflowError):
            found = False
        if not found or len(values) not in (1, count):
            raise CheckpointError(f"{self.where}: {key} must have {count} float32 numbers, one per layer")
        places = [start + 4 * (number % len(values)) for number in range(count)]
        return [GgufTensor(f"{key}.{number}", TYPES[0], (1,), at, at + 4) for number, at in enumerate(places)]

    def values(self, key: str, most: int) -> list[Any] | None:
        """The array at `key`, None where there is none; more than `most` values are refused before they are read."""
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
        found, at, unpack, buffer = [], value.start, _U64.unpack_from, self.buffer
        try:
            for _ in range(value.count):
                length = unpack(buffer, at)[0]
                found.append(buffer[at + 8 : at + 8 + length].decode())
                at += 8 + length
        except UnicodeDecodeError as error:
            message = f"{self.where}: {key} has a string that is not UTF-8 (entry {len(found)})"
            raise CheckpointError(message) from error
        return found


def open_header(path: Path) -> GgufHeader:
    """Read and check the header of a GGUF file, which stays memory-mapped. Raises CheckpointError, whatever it is."""
    with plain_file(path) as file:
        if not os.fstat(file.fileno()).st_size:
            raise CheckpointError(f"{path} is empty")
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return parse_header(path, mapped)


def parse_header(
    where: Path | str, buffer: _Buffer, size: int | None = None, elsewhere: Callable[[int, int], bytes] | None = None
) -> GgufHeader:
    """Check the header in a file's bytes, of a file `elsewhere` its beginning. Raises CheckpointError, Incomplete."""
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
    # Each takes at least so many bytes, so that no count can make anything large.
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
    """A place in the header that only moves on within the file."""

    def __init__(self, where: str, buffer: _Buffer, size: int, at: int) -> None:
        self.where, self.buffer, self.size, self.at = where, buffer, size, at
        self.strings, self.text, self.small = MAX_STRINGS, _MAX_TEXT, _SMALL

    def take(self, length: int, what: str) -> int:
        """The place, which then is behind the next `length` bytes. Raises CheckpointError: the file ends before."""
        at = self.at
        if length > self.size - at:
            message = f"{self.where} is truncated: {what} takes {length} bytes from byte {at}, {self.size} found"
            raise CheckpointError(message, "Download or copy this file again.")
        if at + length > len(self.buffer):
            raise Incomplete(at + length)
        self.at = at + length
        return at

    def numbers(self, format_: str, what: str) -> tuple[Any, ...]:
        """The next numbers, in the format's letters."""
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
        """Count bytes of strings. Raises CheckpointError: there are more than any header has."""
        self.text -= length
        if self.text < 0:
            raise CheckpointError(
                f"{self.where}: with {what}, the text in the header has more than {_MAX_TEXT:,} bytes"
            )

    def skip_strings(self, count: int, what: str) -> None:
        """Go over an array of strings, all of which lie within the file."""
        self.strings -= count
        if self.strings < 0 or count > (self.size - self.at) // 8:
            raise CheckpointError(f"{self.where}: {what} claims {count} strings, more than fit into the file")
        unpack, buffer, at, last = _U64.unpack_from, self.buffer, self.at, len(self.buffer) - 8
        for _ in range(count):
            if at > last:
                break
            at += 8 + unpack(buffer, at)[0]
            count -= 1
        # A length that leads beyond the end stops the loop; `take` then says so.
        length = at - self.at + 8 * count
        self.take(length, what)
        self.read_text(length, what)


def _metadata(cursor: _Cursor, keys: int) -> tuple[dict[str, Any], dict[str, int]]:
    """The values by key, and where each ends."""
    found: dict[str, Any] = {}
    ends: dict[str, int] = {}
    for _ in range(keys):
        key = cursor.string("a metadata key", _MAX_NAME)
        if key in found:
            raise CheckpointError(f"{cursor.where}: the metadata key {shown(key)} occurs twice")
        (kind,) = cursor.numbers("I", "a type")
        what = f"the value of {shown(key)}"
        if kind == _STRING:
            found[key] = cursor.string(what)
        elif kind == _ARRAY:
            found[key] = _array(cursor, what)
        elif kind in _SCALARS:
            at = cursor.take(struct.calcsize(f"<{_SCALARS[kind]}"), what)
            (found[key],) = _numbers(cursor.where, cursor.buffer, kind, 1, at)
        else:
            raise CheckpointError(f"{cursor.where}: {what} has the unknown type {kind}")
        ends[key] = cursor.at
    return found, ends


def _array(cursor: _Cursor, what: str) -> list[Any] | Array:
    kind, count = cursor.numbers("IQ", what)
    start = cursor.at
    if kind == _STRING:
        cursor.skip_strings(count, what)
        return Array(kind, count, start)
    if kind not in _SCALARS:  # arrays of arrays are none that llama.cpp reads
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
    """One tensor's entry, its place still counted from the beginning of the data."""
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
            f"{where}: shape {list(sizes)} does not fit type {kind.name}: sizes are positive, and rows are multiples of"
            f" {kind.block}"
        )
    nbytes = math.prod(sizes) // kind.block * kind.nbytes
    if offset % alignment:
        raise CheckpointError(f"{where} begins at {offset}, which is not a multiple of {alignment}")
    return GgufTensor(name, kind, tuple(reversed(sizes)), offset, offset + nbytes)


def _place(where: str, infos: list[GgufTensor], end: int, alignment: int, size: int) -> dict[str, GgufTensor]:
    """The tensors by name, at their places in the file, which they fill from the end of the header without holes."""
    found: dict[str, GgufTensor] = {}
    data = at = -(-end // alignment) * alignment
    for info in sorted(infos, key=lambda info: (info.start, info.end)):
        start, end = data + info.start, data + info.end
        if info.name in found:
            raise CheckpointError(f"{where}: tensor {shown(info.name)} occurs twice")
        if start != at:
            what = "overlaps the tensor before it" if start < at else "leaves unused bytes before it"
            raise CheckpointError(f"{where}: tensor {shown(info.name)} {what} (byte {start}, {at} expected)")
        if end > size:
            message = f"{where} is truncated: tensor {shown(info.name)} ends at byte {end}, {size} found"
            raise CheckpointError(message, "Download or copy this file again.")
        found[info.name] = GgufTensor(info.name, info.type, info.shape, start, end)
        at = -(-end // alignment) * alignment
    if size > max(at, end):
        raise CheckpointError(f"{where} has trailing bytes: {at} bytes expected, {size} found")
    return found


def dequantised(data: np.ndarray, kind: Quant) -> np.ndarray:
    """The values that blocks of a type stand for, in fp32."""
    import numpy as np
    from gguf import GGMLQuantizationType, quants

    blocks = data.reshape(-1, kind.nbytes)
    values = np.empty((len(blocks), kind.block), np.float32)
    step = max(1, _PART // kind.block)
    for at in range(0, len(blocks), step):
        # As one row: the package takes rows by the dozen, in a loop.
        part = blocks[at : at + step].reshape(1, -1)
        values[at : at + step] = quants.dequantize(part, GGMLQuantizationType[kind.name]).reshape(-1, kind.block)
    return values
