"""Plan the bytes of the files that torch.save writes, before any tensor is read.

Such a file is a zip archive with uncompressed members:

    data.pkl          a pickle of plain data, in which a tensor is a call of torch with its storage, shape and strides
    version, …        the version of the format, the byte order
    data/0, data/1, … the bytes of one tensor, aligned to 64 bytes, followed by their crc32
    zip directory     the place and crc32 of every member

Everything except the tensors' bytes and their crc32 is known in advance. So gptkit can write tensors in any order, as
in other formats. `write.Output.around` has the bytes before and after a tensor. torch.save itself does not know the
sizes in advance: it writes tensors from memory, one after the other. tests/converter/test_dcp.py compares the bytes,
and test_interrupted.py continues interrupted runs. Source: PKZIP's APPNOTE 6.3.10, 4.3; torch/serialization.py,
`_save`.
"""

import math
import pickle
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

ALIGNMENT = 64
_STORAGES = {"F64": "DoubleStorage", "F32": "FloatStorage", "F16": "HalfStorage", "BF16": "BFloat16Storage"}
_UTF8, _CRC_AFTER = 0x800, 0x8
"""Flags of a zip member: its name is UTF-8; its crc32 follows its bytes, instead of being in its header."""
_ELSEWHERE = 0xFFFFFFFF
"""The value of a four-byte size or offset that is too large for four bytes. The zip64 fields then have the number."""
_LIMIT = _ELSEWHERE


@dataclass(frozen=True)
class _Member:
    """A file inside the zip archive."""

    name: str
    start: int  # the offset of its header in the archive, in bytes
    nbytes: int  # the size of its content
    crc: int | None  # the crc32 of its content; None for a tensor, which is not yet read

    @property
    def head(self) -> bytes:
        """The zip header of the member. It is padded, so that the content begins at a multiple of ALIGNMENT bytes."""
        wide = struct.pack("<HHQQ", 1, 16, self.nbytes, self.nbytes) if self.nbytes >= _LIMIT else b""
        padding = -(self.start + 30 + len(self.name) + len(wide) + 4) % ALIGNMENT
        extra = wide + struct.pack("<2sH", b"FB", padding) + b"Z" * padding
        numbers = (45 if wide else 0, self._flags, 0, 0, 0, self.crc or 0, *self._sizes, len(self.name), len(extra))
        return struct.pack("<4sHHHHHIIIHH", b"PK\3\4", *numbers) + self.name.encode() + extra

    def tail(self, crc: int) -> bytes:
        """Return the bytes that follow a tensor in the archive. `crc` is the crc32 of the tensor."""
        return struct.pack("<4sIQQ" if self.nbytes >= _LIMIT else "<4sIII", b"PK\7\10", crc, self.nbytes, self.nbytes)

    @property
    def size(self) -> int:
        return len(self.head) + self.nbytes + (len(self.tail(0)) if self.crc is None else 0)

    def entry(self, crc: int) -> bytes:
        large = [self.nbytes] * 2 * (self.nbytes >= _LIMIT) + [self.start] * (self.start >= _LIMIT)
        wide = struct.pack(f"<HH{len(large)}Q", 1, 8 * len(large), *large) if large else b""
        version = 45 if wide else 0
        numbers = (version, version, self._flags, 0, 0, 0, crc, *self._sizes, len(self.name), len(wide), 0, 0, 0, 0)
        fixed = struct.pack("<4sHHHHHHIIIHHHHHII", b"PK\1\2", *numbers, _short(self.start))
        return fixed + self.name.encode() + wide

    @property
    def _flags(self) -> int:
        return _UTF8 | (_CRC_AFTER if self.crc is None else 0)

    @property
    def _sizes(self) -> tuple[int, int]:
        return (_short(self.nbytes),) * 2


@dataclass(frozen=True)
class _Archive:
    """The layout of a zip archive that torch.save would write.

    `head` and `tail` are for an archive of one tensor: all bytes before and after the tensor.
    """

    header: bytes  # all bytes before the first tensor's zip header
    members: tuple[_Member, ...]  # the small files
    tensors: tuple[_Member, ...]  # the members data/0, data/1, …

    @property
    def size(self) -> int:
        return self._directory + len(self.end([0] * len(self.tensors)))

    @property
    def _directory(self) -> int:
        last = (*self.members, *self.tensors)[-1]
        return last.start + last.size

    @property
    def head(self) -> bytes:
        return self.header + self.tensors[0].head

    def tail(self, crc: int) -> bytes:
        return self.tensors[0].tail(crc) + self.end([crc])

    def end(self, crcs: Sequence[int]) -> bytes:
        """Return the zip directory that ends the file. `crcs` has the crc32 of every tensor."""
        entries = [member.entry(member.crc or 0) for member in self.members]
        entries += [member.entry(crc) for member, crc in zip(self.tensors, crcs, strict=True)]
        text, at, count = b"".join(entries), self._directory, len(entries)
        large = b""
        if at >= _LIMIT or count >= 0xFFFF:
            large = struct.pack("<4sQHHIIQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, count, count, len(text), at)
            large += struct.pack("<4sIQI", b"PK\6\7", 0, at + len(text), 1)
        counts = (min(count, 0xFFFF),) * 2
        return text + large + struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, *counts, len(text), _short(at), 0)


def _short(value: int) -> int:
    """Return the value of a four-byte size or offset: the number, or `_ELSEWHERE` if it is too large."""
    return value if value < _LIMIT else _ELSEWHERE


def archive_of(prefix: str, files: Mapping[str, bytes], tensors: Sequence[int]) -> _Archive:
    """Return the layout of an archive with small files and tensors.

    Args:
        prefix: the folder of all members inside the archive.
        files: the content of the small files by name.
        tensors: the size of every tensor in bytes.
    """
    header, members, storages = b"", [], []
    for name, data in files.items():
        members.append(_Member(f"{prefix}/{name}", len(header), len(data), zlib.crc32(data)))
        header += members[-1].head + data
    at = len(header)
    for index, nbytes in enumerate(tensors):
        storages.append(_Member(f"{prefix}/data/{index}", at, nbytes, None))
        at += storages[-1].size
    return _Archive(header, tuple(members), tuple(storages))


def program(value: Any) -> bytes:
    """Return a pickle of a value, in protocol 2 as torch.save uses.

    Bytes in the value must be pickle opcodes, such as those of `pickled_tensor`. They are inserted unchanged.
    """
    return b"\x80\x02" + _pickled(value) + b"."


def _pickled(value: Any) -> bytes:
    """Return the pickle opcodes that make a value.

    Bytes in the value must already be opcodes, such as those of `pickled_tensor`. They are inserted unchanged.
    """
    if isinstance(value, bytes):
        return value
    if isinstance(value, dict):
        return b"}(" + b"".join(_pickled(key) + _pickled(item) for key, item in value.items()) + b"u"
    if isinstance(value, tuple):
        return b"(" + b"".join(map(_pickled, value)) + b"t"
    if isinstance(value, str):
        data = value.encode()
        return b"X" + struct.pack("<I", len(data)) + data
    return pickle.dumps(value, 2)[2:-1]  # without the opcodes PROTO and STOP


def pickled_tensor(key: str, dtype: str, shape: Sequence[int]) -> bytes:
    """Return the pickle opcodes that make a contiguous tensor. Its data is the member data/KEY of the archive."""
    strides = [*accumulate((max(size, 1) for size in reversed(shape[1:])), lambda x, y: x * y, initial=1)][::-1]
    kind = b"ctorch\n" + _STORAGES[dtype].encode() + b"\n"
    storage = _pickled(("storage", kind, key, "cpu", math.prod(shape))) + b"Q"
    arguments = (storage, 0, tuple(shape), tuple(strides[: len(shape)]), False, b"ccollections\nOrderedDict\n)R")
    return b"ctorch._utils\n_rebuild_tensor_v2\n" + _pickled(arguments) + b"R"
