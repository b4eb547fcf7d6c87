"""The record of one tensor in a .distcp file: what torch.save writes for it, an archive of its own.

    data.pkl   a pickle that names torch's function, the storage, shape and strides
    …          the format's version, the byte order
    data/0     the tensor's bytes, 64 bytes aligned, stored as they are
    directory  with every member's crc32

All but the bytes and their crc32 is known beforehand. So a record is written as any tensor is, between what comes
before it and behind it, and read from where it lies. (PKZIP's APPNOTE 6.3.10, 4.3; torch/serialization.py, `_save`.)
"""

from __future__ import annotations

import math
import pickle
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["ALIGNMENT", "Record", "record"]

ALIGNMENT = 64
STORAGES = {"F64": "DoubleStorage", "F32": "FloatStorage", "F16": "HalfStorage", "BF16": "BFloat16Storage"}
ITEMSIZE = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}

DATA = "archive/data/0"
UTF8, CRC_BEHIND = 0x800, 0x8
"""Flags of a member: the encoding of its name; its crc32 stands behind its bytes and in the directory only."""
BIG = 0xFFFFFFFF
"""From here on sizes and offsets stand in eight bytes, elsewhere (zip64)."""


@dataclass(frozen=True)
class Record:
    """What stands around a tensor's `nbytes` bytes."""

    head: bytes
    nbytes: int
    directory: tuple[tuple[str, int, int, int], ...]
    """(name, crc32, size, where) of the members before it."""
    start: int
    """Where its own header stands."""

    @property
    def size(self) -> int:
        """Bytes in all."""
        return len(self.head) + self.nbytes + len(self.tail(0))

    def tail(self, crc: int) -> bytes:
        """What stands behind the tensor, whose bytes have this crc32."""
        wide = self.nbytes >= BIG
        behind = struct.pack("<4sIQQ" if wide else "<4sIII", b"PK\7\10", crc, self.nbytes, self.nbytes)
        members = [*self.directory, (DATA, crc, self.nbytes, self.start)]
        entries = b"".join(_entry(*member) for member in members)
        at = len(self.head) + self.nbytes + len(behind)
        return behind + entries + _end(len(members), len(entries), at)


def record(dtype: str, shape: Sequence[int]) -> Record:
    """The record of a tensor of one of the float types, by safetensors' name, in row-major order."""
    count = math.prod(shape)
    nbytes = count * ITEMSIZE[dtype]
    members = {
        "archive/data.pkl": _pickled(dtype, shape, count),
        "archive/.format_version": b"1",
        "archive/.storage_alignment": str(ALIGNMENT).encode(),
        "archive/byteorder": b"little",
        "archive/version": b"3\n",
    }
    head, directory = b"", []
    for name, data in members.items():
        crc = zlib.crc32(data)
        directory.append((name, crc, len(data), len(head)))
        head += _header(name, crc, len(data), 0, len(head)) + data
    start = len(head)
    head += _header(DATA, 0, nbytes, CRC_BEHIND, start)
    return Record(head, nbytes, tuple(directory), start)


def _pickled(dtype: str, shape: Sequence[int], count: int) -> bytes:
    """What torch.save says of a contiguous tensor: protocol 2, without the memo that nobody asks for."""
    strides = [math.prod([max(size, 1) for size in shape[i + 1 :]]) for i in range(len(shape))]
    storage = _text("storage") + f"ctorch\n{STORAGES[dtype]}\n".encode() + _text("0") + _text("cpu") + _number(count)
    arguments = b"(" + storage + b"tQ" + _number(0) + _numbers(shape) + _numbers(strides)
    return b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + arguments + b"\x89ccollections\nOrderedDict\n)RtR."


def _text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def _number(value: int) -> bytes:
    return pickle.dumps(value, 2)[2:-1]  # without the protocol and the full stop


def _numbers(values: Sequence[int]) -> bytes:
    return b"(" + b"".join(map(_number, values)) + b"t"


def _header(name: str, crc: int, size: int, flags: int, at: int) -> bytes:
    """A member's own header at byte `at`, padded so that its bytes begin at a multiple of ALIGNMENT."""
    wide = struct.pack("<HHQQ", 1, 16, size, size) if size >= BIG else b""
    least = at + 30 + len(name) + len(wide) + 4
    padding = -least % ALIGNMENT
    extra = wide + struct.pack("<2sH", b"FB", padding) + b"Z" * padding
    sizes = (BIG, BIG) if wide else (size, size)
    version = 45 if wide else 0
    fixed = struct.pack("<4sHHHHHIIIHH", b"PK\3\4", version, flags | UTF8, 0, 0, 0, crc, *sizes, len(name), len(extra))
    return fixed + name.encode() + extra


def _entry(name: str, crc: int, size: int, at: int) -> bytes:
    """A member in the directory. All begin far below 4 GiB: the long one is the last."""
    wide = struct.pack("<HHQQ", 1, 16, size, size) if size >= BIG else b""
    flags = UTF8 | (CRC_BEHIND if name == DATA else 0)
    sizes = (BIG, BIG) if wide else (size, size)
    version = 45 if wide else 0
    lengths = (len(name), len(wide), 0)
    fixed = struct.pack(
        "<4sHHHHHHIIIHHHHHII", b"PK\1\2", version, version, flags, 0, 0, 0, crc, *sizes, *lengths, 0, 0, 0, at
    )
    return fixed + name.encode() + wide


def _end(count: int, size: int, at: int) -> bytes:
    """What ends the archive: a directory of `count` members and `size` bytes stands at byte `at`."""
    long = b""
    if at >= BIG:
        long = struct.pack("<4sQHHIIQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, count, count, size, at)
        long += struct.pack("<4sIQI", b"PK\6\7", 0, at + size, 1)
    return long + struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, count, count, size, min(at, BIG), 0)
