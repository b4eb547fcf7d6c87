"""Write a file whose layout is known in advance: a header, and blocks at fixed positions.

Blocks can be written in any order and from any thread. Every block is read back, compared and hashed. The sha256 of the
whole file is computed along with the blocks from the front, so that the file is not read a second time.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from ..errors import CheckpointError, GptkitError
from .files import write_all
from .manifest import FileRecord, TensorRecord

CHUNK = 1 << 19  # bytes to read back and hash at a time; they fit into the processor's cache


@dataclass(frozen=True, slots=True)
class FileBlock:
    """A named part of a file: bytes `start` to `end` (exclusive)."""

    name: str
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start


class BlockFile:
    """A new file with a header and blocks. All other bytes are zero. After `close()`, `record` has the hashes."""

    def __init__(self, path: Path, header: bytes, blocks: Sequence[FileBlock], nbytes: int | None = None) -> None:
        """Create the file and write the header.

        Args:
            path: the path of the file, which must not exist.
            header: the first bytes of the file.
            blocks: the blocks, in the order of their first bytes. A block may also be inside the header.
            nbytes: the size of the file in bytes. By default the file ends with the last block.
        """
        self.path = path
        self.blocks = {block.name: block for block in blocks}
        self._size = nbytes if nbytes is not None else max([len(header), *(block.end for block in blocks)])
        self._order = [block for block in blocks if block.nbytes]
        nothing = xxhash.xxh3_128().hexdigest()
        self._digests: dict[str, str] = {block.name: nothing for block in blocks if not block.nbytes}
        self._begun: set[str] = set()
        self._mutex = threading.Lock()
        self._hashing = threading.Lock()
        self._hashed = min([len(header), *(block.start for block in self._order)])  # bytes that _hash has seen
        self._hash = hashlib.sha256(header[: self._hashed])
        self._next = 0  # the first block in the order of the file that _hash has not seen
        self._sha256: str | None = None
        try:
            self._fd: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise GptkitError(f"could not create {path}: {error.strerror}") from error
        try:
            with self._disk() as fd:
                os.ftruncate(fd, self._size)
                write_all(fd, header, 0)
        except BaseException:
            self.release()
            raise

    @property
    def record(self) -> FileRecord:
        """The hashes of the file and of its blocks. Only available after `close()`."""
        if self._sha256 is None:
            raise RuntimeError(f"{self.path} is not closed yet")
        tensors = {b.name: TensorRecord(b.start, b.end, self._digests[b.name]) for b in self.blocks.values()}
        return FileRecord(self._sha256, tensors)

    def write(self, name: str, data: Any) -> None:
        """Write a whole block from a contiguous buffer. Raises GptkitError if writing fails."""
        with self.pieces(name) as piece:
            if memoryview(data).nbytes:
                piece(data)

    @contextlib.contextmanager
    def pieces(self, name: str) -> Iterator[Callable[[Any], None]]:
        """Write the block called `name` in several pieces, inside a `with`.

        Yield a function; each of its calls appends bytes to the block. Raises CheckpointError at the end of the `with`
        if the block is not full.
        """
        block = self.blocks.get(name)
        if block is None:
            raise CheckpointError(f"{self.path}: tensor {name!r} is not planned for this file")
        with self._mutex:
            if name in self._begun:
                raise CheckpointError(f"{self.path}: tensor {name!r} was written twice")
            self._begun.add(name)
        at, digest = block.start, xxhash.xxh3_128()
        front = self._at_front(block)  # then the hash of the file can be computed along with the block

        def piece(data: Any) -> None:
            nonlocal at
            view = memoryview(data).cast("B")
            if at + view.nbytes > block.end:
                raise CheckpointError(f"{self.path}: more than {block.nbytes} bytes were written for tensor {name!r}")
            for begin in range(0, view.nbytes, CHUNK):
                chunk = np.frombuffer(view[begin : begin + CHUNK], np.uint8)
                written = _buffer("file")[: chunk.nbytes]
                with self._disk() as fd:
                    write_all(fd, chunk.data, at)
                    _read(fd, written, at)
                addresses = (ctypes.c_void_p(array.ctypes.data) for array in (written, chunk))
                if _LIBC.memcmp(*addresses, ctypes.c_size_t(written.nbytes)):
                    raise GptkitError(
                        f"{self.path} differs from what gptkit wrote to it, from byte {at} on",
                        "The disk or the memory of this machine may be failing.",
                    )
                digest.update(written.data)
                if front:
                    self._see(written)
                at += written.nbytes

        try:
            yield piece
            if at != block.end:
                raise CheckpointError(
                    f"{self.path}: only {at - block.start} of the {block.nbytes} bytes of tensor {name!r} were written"
                )
            # Ask the kernel (Linux) to begin writing, so that the fsync at the end has little to do. A failure here
            # does not matter, because the fsync will fail and report it.
            if hasattr(_LIBC, "sync_file_range"):
                with self._disk() as fd:
                    _LIBC.sync_file_range(fd, ctypes.c_int64(block.start), ctypes.c_int64(block.nbytes), 2)
            with self._mutex:
                self._digests[name] = digest.hexdigest()
                self._next += front
        finally:
            if front:
                self._hashing.release()
        # Only one thread hashes the file. Other threads continue with other blocks and leave the hash to it, or to
        # close.
        while self._ready() and self._hashing.acquire(blocking=False):
            try:
                while (end := self._ready()) is not None:
                    self._advance(end)
                    with self._mutex:
                        self._next += 1
            finally:
                self._hashing.release()

    def copy(self, name: str, source: int, start: int, look: Callable[[np.ndarray], None] = lambda chunk: None) -> None:
        """Fill a block with bytes that are copied from another file.

        copy_file_range(2) is not used. Every chunk must be read anyway, to compare and hash it, and writing it from the
        processor's cache takes half as long (measured on ext4 and tmpfs).

        Args:
            name: the name of the block.
            source: the file descriptor of the other file.
            start: the offset in `source`, in bytes, at which the copied bytes begin.
            look: called with every chunk of copied bytes (uint8).

        Raises:
            CheckpointError: `source` ends early.
        """
        with self.pieces(name) as piece:
            nbytes = self.blocks[name].nbytes
            for at in range(0, nbytes, CHUNK):
                chunk = _buffer("source")[: min(CHUNK, nbytes - at)]
                try:
                    _read(source, chunk, start + at)
                except OSError as error:
                    raise CheckpointError(
                        f"cannot read tensor {name!r} to write it to {self.path}: {error.strerror}"
                    ) from error
                piece(chunk)
                look(chunk)

    def close(self, ending: bytes = b"") -> None:
        """Check that every block was written, write `ending` as the last bytes, finish the hashes, and fsync."""
        if self._fd is None:
            return
        try:
            missing = [name for name in self.blocks if name not in self._digests]
            if missing:
                listed = ", ".join(map(repr, missing[:10]))
                raise CheckpointError(
                    f"{self.path}: {len(missing)} of {len(self.blocks)} tensors were not written: {listed}"
                )
            with self._disk() as fd:
                write_all(fd, ending, self._size - len(ending))
                if os.pread(fd, len(ending), self._size - len(ending)) != ending:
                    raise OSError(errno.EIO, "its bytes differ from the bytes that were written")
                os.fsync(fd)
                with self._hashing:
                    self._advance(self._size)
                self._sha256 = self._hash.hexdigest()
        finally:
            self.release()

    def _at_front(self, block: FileBlock) -> bool:
        """Return whether the file's sha256 can be computed while this block is written.

        It can if all bytes before the block are hashed, and no other thread is hashing. The calling thread then has the
        lock of the sha256.
        """
        if not block.nbytes or not self._hashing.acquire(blocking=False):
            return False
        with self._mutex:
            front = self._next < len(self._order) and self._order[self._next] is block
        if front:
            self._advance(block.start)
        else:
            self._hashing.release()
        return front

    def _ready(self) -> int | None:
        """Return the end of the next block to hash, as a byte offset, or None if this block is not yet written."""
        with self._mutex:
            if self._next < len(self._order) and self._order[self._next].name in self._digests:
                return self._order[self._next].end
        return None

    def _advance(self, end: int) -> None:
        """Read the file up to byte `end`, and add these bytes to its sha256."""
        while self._hashed < end:
            chunk = _buffer("file")[: min(CHUNK, end - self._hashed)]
            with self._disk() as fd:
                _read(fd, chunk, self._hashed)
            self._see(chunk)

    def _see(self, chunk: np.ndarray) -> None:
        self._hash.update(chunk.data)
        self._hashed += chunk.nbytes

    @contextlib.contextmanager
    def _disk(self) -> Iterator[int]:
        if self._fd is None:
            raise ValueError(f"{self.path} is closed")
        try:
            yield self._fd
        except OSError as error:
            raise GptkitError(f"could not write {self.path}: {error.strerror}") from error

    def release(self) -> None:
        """Close the file descriptor. Without a previous `close()` the file is incomplete."""
        if self._fd is not None:
            fd, self._fd = self._fd, None
            os.close(fd)

    def __enter__(self) -> BlockFile:
        return self

    def __exit__(self, kind: object, _error: object, _traceback: object) -> None:
        if kind is None:
            self.close()
        else:
            self.release()


_BUFFERS = threading.local()


def _buffer(name: str) -> np.ndarray:
    """Return a buffer that the calling thread reuses.

    A new one would take time, because the system fills it with zeros.
    """
    if not hasattr(_BUFFERS, name):
        setattr(_BUFFERS, name, np.empty(CHUNK, np.uint8))
    buffer: np.ndarray = getattr(_BUFFERS, name)
    return buffer


def _read(fd: int, into: np.ndarray, offset: int) -> None:
    """Fill the array `into` (uint8) with bytes of a file from byte `offset` on.

    Raises OSError if the file ends early.
    """
    view = into.data
    while view.nbytes:
        done = os.preadv(fd, [view], offset)
        if done == 0:
            raise OSError(errno.EIO, "the file ends early")
        view, offset = view[done:], offset + done


_LIBC = ctypes.CDLL(None)
