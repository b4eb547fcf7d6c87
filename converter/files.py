"""Files written, copied, hashed, locked and put on the disk, with errors that name them."""

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
"""What "this file system or kernel cannot do that" looks like, as opposed to "it failed"."""

_PID = re.compile(rb"[0-9]{0,19}\n?")  # what is in a lock's file; a file with anything else is somebody's own


def write_all(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Write every byte of `data` at byte `offset` of `fd`; the kernel may take fewer than asked. Raises OSError."""
    view = memoryview(data).cast("B")
    while view.nbytes:
        # Linux takes at most 2 GiB - 4 KiB a call, macOS fails above 2 GiB - 1: stay below both.
        done = os.pwrite(fd, view[: 1 << 30], offset)
        if done == 0:
            raise OSError(errno.EIO, "the write stopped short")
        view, offset = view[done:], offset + done


def write_bytes(path: Path, data: bytes) -> None:
    """Create `path` (mode by the umask) holding `data`. Raises GptkitError where that fails or the file exists."""
    try:
        with path.open("xb", buffering=0) as file:
            write_all(file.fileno(), data, 0)
    except OSError as error:
        raise failed("write", path, error) from error


def copy_file(src: Path, dst: Path) -> None:
    """Copy a file's bytes into a new one, inside the kernel where it can; mode by the umask, not the first one's."""
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
            # Also what follows a copy that the kernel ended early: at the end of the file the first read is empty.
            while chunk := os.pread(source.fileno(), 8 << 20, offset):
                write_all(sink.fileno(), chunk, offset)
                offset += len(chunk)
    except OSError as error:
        raise failed(f"copy {src} to", dst, error) from error


def sha256_file(path: Path) -> str:
    """The sha256 of a file's bytes, in hex. Raises OSError."""
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_small(path: Path, most: int) -> bytes:
    """A plain file's bytes, at most `most`; OSError for a pipe, a file without end, and one that is larger."""
    return _read(path, most, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)


def read_own(path: Path, most: int) -> bytes:
    """Return the bytes of a file that gptkit itself wrote, as `read_small` does; OSError for a link to another file."""
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
    """What work makes of each, in their order, by a few threads: hashing and waiting let the others run."""
    from concurrent.futures import ThreadPoolExecutor  # here, because most commands never need it

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return list(pool.map(work, items))


def fsync(path: Path, flags: int = 0) -> int:
    """Put a file or a folder on the disk; returns its bytes. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    try:
        os.fsync(fd)
        return os.fstat(fd).st_size
    finally:
        os.close(fd)


def seal(path: Path) -> int:
    """fsync a file, opened anew and not through a link; returns its bytes. Raises OSError."""
    return fsync(path, os.O_NOFOLLOW)


def open_own(path: Path) -> io.BufferedReader:
    """Open a plain file of this user's, under this name alone; OSError for a link or a pipe, which stay untouched."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid() or info.st_nlink != 1:
        os.close(fd)
        raise OSError(errno.EPERM, "not a plain file that belongs to this user", str(path))
    return os.fdopen(fd, "rb")


def failed(what: str, path: Path, error: OSError) -> GptkitError:
    """The error that says what could not be done, and what helps against it."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    hint = "Free some space, or write to another disk." if full else None
    return GptkitError(f"could not {what} {path}: {error.strerror or error}", hint)


@contextmanager
def locked(target: Path) -> Iterator[bool]:
    """Be the only writer of a target: flock on a sibling `.<name>.lock`, which the next run takes after a kill -9. It
    gives whether that keeps others away: some file systems have no locks. Raises GptkitError where another has it.
    """
    path = target.parent / f".{target.name}.lock"
    while (taken := _take(path, target)) is None:
        pass
    fd, held = taken
    try:
        if held:
            os.ftruncate(fd, 0)
            write_all(fd, f"{os.getpid()}\n".encode(), 0)
        yield held
    finally:
        try:
            path.unlink(missing_ok=True)  # while it is held: nobody else's
        except OSError as error:
            _log.debug("could not remove %s: %s", path, error)
        finally:
            os.close(fd)


def _take(path: Path, target: Path) -> tuple[int, bool] | None:
    """The open file, and whether it is locked; None where the holder before removed it meanwhile."""
    in_the_way = UsageError(f"{path} exists, but gptkit needs this name for a lock file", "Remove it.")
    try:
        # Neither through a planted link, nor waiting for the other end of a planted pipe.
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR):
            raise in_the_way from error
        raise
    same = False
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise in_the_way
        held = _flock(fd, target)
        # The holder before may have removed the file between our open and our lock: then it guards nothing.
        with suppress(FileNotFoundError):
            same = os.path.samestat(os.fstat(fd), path.lstat())
        if same and not _PID.fullmatch(os.pread(fd, 21, 0)):
            same = False
            raise in_the_way
        return (fd, held) if same else None
    finally:
        if not same:
            os.close(fd)


def _flock(fd: int, target: Path) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        pid = os.pread(fd, 20, 0).decode("ascii", "replace").strip()
        who = f"pid {pid}" if pid.isdigit() else "which has just started"
        message = f"another gptkit process ({who}) is writing {target}"
        raise GptkitError(message, "Wait until it ends, or choose another name for the output.") from error
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
