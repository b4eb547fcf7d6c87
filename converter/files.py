"""Write, copy, hash, lock and fsync files, with errors that name them."""

import errno
import fcntl
import hashlib
import io
import logging
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..errors import GptkitError, UsageError

_log = logging.getLogger(__name__)

_UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EXDEV, errno.EPERM, errno.EBADF)
"""The error codes of operations that the file system or kernel does not support."""

_PID = re.compile(rb"[0-9]{0,19}\n?")  # the content of a lock file; other files are the user's


def write_all(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of `data` at byte `offset` of `fd`, in several calls if needed. Raises OSError."""
    view = memoryview(data).cast("B")
    while view.nbytes:
        # Linux writes at most 2 GiB - 4 KiB per call, and macOS fails above 2 GiB - 1.
        done = os.pwrite(fd, view[: 1 << 30], offset)
        if done == 0:
            raise OSError(errno.EIO, "the write stopped short")
        view, offset = view[done:], offset + done


def write_bytes(path: Path, data: bytes) -> None:
    """Create `path` with this content (mode by the umask). Raises GptkitError if writing fails or the file exists."""
    try:
        with path.open("xb", buffering=0) as file:
            write_all(file.fileno(), data, 0)
    except OSError as error:
        raise failed("write", path, error) from error


def copy_file(src: Path, dst: Path) -> None:
    """Copy a file's bytes to a new file, inside the kernel if possible.

    The mode follows the umask. Raises GptkitError.
    """
    try:
        with src.open("rb", buffering=0) as source, dst.open("xb", buffering=0) as sink:
            offset = 0
            try:
                while hasattr(os, "copy_file_range") and (  # not on macOS
                    done := os.copy_file_range(source.fileno(), sink.fileno(), 1 << 30, offset, offset)
                ):
                    offset += done
            except OSError as error:
                if error.errno not in _UNSUPPORTED:
                    raise
            # Copy the rest if the kernel stopped early. At the end of the file, the first read is empty.
            while chunk := os.pread(source.fileno(), 8 << 20, offset):
                write_all(sink.fileno(), chunk, offset)
                offset += len(chunk)
    except OSError as error:
        raise failed(f"copy {src} to", dst, error) from error


def sha256_file(path: Path) -> str:
    """Return the sha256 of a file in hex. Raises OSError."""
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_small(path: Path, most: int) -> bytes:
    """Return the bytes of a plain file. Raises OSError for a pipe or device, and if it has more than `most` bytes."""
    return _read(path, most, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)


def read_own(path: Path, most: int) -> bytes:
    """Return the bytes of a file that gptkit wrote, as `read_small`. Raises OSError also for a symbolic link."""
    return _read(path, most, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)


def _read(path: Path, most: int, flags: int) -> bytes:
    fd = os.open(path, flags)
    with os.fdopen(fd, "rb") as file:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise OSError(errno.EINVAL, "not a plain file", str(path))
        if info.st_size > most:
            raise OSError(
                errno.EFBIG, f"the file has {info.st_size:,} bytes, more than gptkit reads of such a file", str(path)
            )
        return file.read(most)


def at_once(work: Callable[[str], Any], items: Iterable[str]) -> list[Any]:
    """Return the results of `work` for the items, in their order. A few threads work in parallel."""
    from concurrent.futures import ThreadPoolExecutor  # here, because most commands never need it

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return list(pool.map(work, items))


def fsync(path: Path, flags: int = 0) -> int:
    """Fsync a file or folder and return its size in bytes. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    try:
        os.fsync(fd)
        return os.fstat(fd).st_size
    finally:
        os.close(fd)


def seal(path: Path) -> int:
    """Fsync a file that is not a link and return its size in bytes. Raises OSError."""
    return fsync(path, os.O_NOFOLLOW)


def open_own(path: Path) -> io.BufferedReader:
    """Open a plain file that belongs to this user and has no other hard link. Raises OSError for anything else."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid() or info.st_nlink != 1:
        os.close(fd)
        raise OSError(errno.EPERM, "not a plain file that belongs to this user", str(path))
    return os.fdopen(fd, "rb")


def failed(what: str, path: Path, error: OSError) -> GptkitError:
    """Return the error for a failed operation (`what`, a verb) on a path, with a hint if the disk is full."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    hint = "Free some space, or write to another disk." if full else None
    return GptkitError(f"could not {what} {path}: {error.strerror or error}", hint)


@contextmanager
def locked(target: Path) -> Iterator[bool]:
    """Lock a target with flock on the file `.<name>.lock` next to it. The lock ends with this process, even by kill -9.

    Yield whether the target is locked; some file systems have no locks. Raises GptkitError if another process has the
    lock.
    """
    path = target.parent / f".{target.name}.lock"
    while (lock := _take(path, target)) is None:
        pass
    fd, is_locked = lock
    try:
        if is_locked:
            os.ftruncate(fd, 0)
            write_all(fd, f"{os.getpid()}\n".encode(), 0)
        yield is_locked
    finally:
        try:
            path.unlink(missing_ok=True)  # still locked, so no other process uses it
        except OSError as error:
            _log.debug("could not remove %s: %s", path, error)
        finally:
            os.close(fd)


def _take(path: Path, target: Path) -> tuple[int, bool] | None:
    """Return the open lock file and whether it is locked; None if another process has just removed it."""
    in_the_way = UsageError(f"{path} exists, but gptkit needs this name for a lock file", "Remove this file.")
    try:
        # Do not follow a link, and do not wait for a pipe, that an attacker may have made.
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR):
            raise in_the_way from error
        raise
    same = False
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise in_the_way
        is_locked = _flock(fd, target)
        # Another process may have removed the file between open and lock; then the lock has no effect.
        with suppress(FileNotFoundError):
            same = os.path.samestat(os.fstat(fd), path.lstat())
        if same and not _PID.fullmatch(os.pread(fd, 21, 0)):
            same = False
            raise in_the_way
        return (fd, is_locked) if same else None
    finally:
        if not same:
            os.close(fd)


def _flock(fd: int, target: Path) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        pid = os.pread(fd, 20, 0).decode("ascii", "replace").strip()
        who = f"pid {pid}" if pid.isdigit() else "which has just started"
        raise GptkitError(
            f"another gptkit process ({who}) is writing {target}",
            "Wait until that process ends, or choose another name for the output.",
        ) from error
    except OSError as error:
        if error.errno not in (errno.ENOLCK, *_UNSUPPORTED):
            raise
        _log.warning(
            "the file system of %s has no file locks: do not write %s with two gptkit processes at once",
            target.parent,
            target.name,
        )
        return False
    return True
