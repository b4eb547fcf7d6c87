"""nanoGPT's ckpt.pt written: the members of a torch archive one after the other, a tensor some rows at a time."""

from __future__ import annotations

import hashlib
import struct
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np
import xxhash

from ...errors import GptkitError
from ..dtypes import cast, not_finite
from ..files import failed
from ..publish import FileRecord, Staging, TensorRecord
from ..transfer import contiguous, row_slices
from ..write import Output, Shard

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint

__all__ = ["lay_out", "write_archive"]

CHUNK = 1 << 20
PREFIX = "ckpt/"
ALIGNMENT = 64


@dataclass(frozen=True)
class Member:
    """One file of the archive: its first byte in it, the padding before that, and its content unless it is a tensor."""

    name: str
    start: int
    nbytes: int
    extra: bytes
    data: bytes | None


def lay_out(tensors: list[int], program: bytes) -> tuple[list[Member], int]:
    """The archive's members in their order, and its size."""
    wanted: list[tuple[str, int, bytes | None]] = [
        ("data.pkl", len(program), program),
        ("byteorder", 6, b"little"),
        *((f"data/{index}", nbytes, None) for index, nbytes in enumerate(tensors)),
        ("version", 2, b"3\n"),
    ]
    members, at, directory = [], 0, 0
    limit = zipfile.ZIP64_LIMIT  # type: ignore[attr-defined, unused-ignore]
    for short, nbytes, data in wanted:
        name = PREFIX + short
        large = is_large(nbytes)
        fixed = at + 30 + len(name) + 20 * large + 4
        padding = -fixed % ALIGNMENT
        extra = b"FB" + struct.pack("<H", padding) + b"Z" * padding
        members.append(Member(name, fixed + padding, nbytes, extra, data))
        wide = 16 * (nbytes > limit) + 8 * (at > limit)
        directory += 46 + len(name) + len(extra) + (wide + 4 if wide else 0)
        at = fixed + padding + nbytes
    ends = 22 + (76 if len(members) > zipfile.ZIP_FILECOUNT_LIMIT or max(at, directory) > limit else 0)  # type: ignore[attr-defined, unused-ignore]
    return members, at + directory + ends


def is_large(nbytes: int) -> bool:
    """Whether a member's header has room for sizes of 64 bits."""
    return nbytes > 2**31 - 2**20


def member_into(archive: zipfile.ZipFile, member: Member) -> IO[bytes]:
    """A new member of an archive, to be written to; the same at any time and on any system."""
    info = zipfile.ZipInfo(member.name)
    info.create_system, info.external_attr, info.extra = 3, 0o600 << 16, member.extra
    return archive.open(info, "w", force_zip64=is_large(member.nbytes))


def write_archive(
    source: Checkpoint,
    shard: Shard,
    members: Sequence[Member],
    staging: Staging,
    progress: Callable[[int], None] | None,
) -> dict[str, FileRecord]:
    """Write the file into an open staging folder and read it back.

    Raises:
        CheckpointError: a value does not fit the output's dtype.
        GptkitError: a write fails, or the disk does not hold what was written.

    """
    if shard.name in staging.finished:
        if progress is not None:
            progress(shard.nbytes)
        return {shard.name: staging.finished[shard.name]}
    path = staging.path / shard.name
    tensors: dict[str, TensorRecord] = {}
    outputs = iter(shard.outputs)
    try:
        with path.open("xb") as file, zipfile.ZipFile(file, "w") as archive:
            for member in members:
                with member_into(archive, member) as into:
                    if file.tell() != member.start:
                        raise AssertionError(f"{member.name} begins at {file.tell()}, planned was {member.start}")
                    if member.data is not None:
                        into.write(member.data)
                        continue
                    output = next(outputs)
                    digest = _write_tensor(source, output, into)
                tensors[output.leaf.checkpoint] = TensorRecord(output.start, output.start + output.nbytes, digest)
                source.release()
                if progress is not None:
                    progress(output.nbytes)
        record = FileRecord(_read_back(path, tensors), tensors)
    except OSError as error:
        raise failed("write", path, error) from error
    staging.finish(shard.name, record)
    return {shard.name: record}


def _write_tensor(source: Checkpoint, output: Output, into: IO[bytes]) -> str:
    """One tensor's bytes; returns their hash, as TensorRecord has it."""
    parts = [cast(*source.tensor(name), output.dtype) for name in output.leaf.shared]
    array = output.leaf.to_checkpoint(parts)
    digest, bad = xxhash.xxh3_128(), 0
    for rows in row_slices(array):
        chunk = contiguous(array[rows])
        bad += not_finite(chunk, output.dtype)
        data = chunk.reshape(-1).view(np.uint8).data
        digest.update(data)
        into.write(data)
    if bad:
        source.notes.append(f"{output.leaf.checkpoint}: {bad:,} values are NaN or infinite")
    return digest.hexdigest()


def _read_back(path: Path, tensors: Mapping[str, TensorRecord]) -> str:
    """The file's sha256, its tensors compared with what was written. Raises OSError, GptkitError."""
    whole = hashlib.sha256()
    with path.open("rb", buffering=0) as file:

        def until(end: int | None) -> str:
            part = xxhash.xxh3_128()
            while data := file.read(CHUNK if end is None else min(CHUNK, end - file.tell())):
                whole.update(data)
                part.update(data)
            return part.hexdigest()

        for name, record in sorted(tensors.items(), key=lambda item: item[1].start):
            until(record.start)
            if until(record.end) != record.xxh3:
                raise GptkitError(
                    f"{path} does not hold what was written to it, in {name}",
                    "The disk or the memory of this machine may be failing.",
                )
        until(None)
    return whole.hexdigest()
