"""At most one writer of a folder."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import GptkitError, UsageError
from .files import UNSUPPORTED, write_all

_log = logging.getLogger(__name__)

_PID = re.compile(rb"[0-9]{0,19}\n?")  # what is in a lock's file; a file with anything else is somebody's own


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
    in_the_way = UsageError(f"{path} is in the way: gptkit keeps its lock under this name", "Remove it.")
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
        who = f"pid {pid}" if pid.isdigit() else "it has just begun"
        message = f"{target} is being written by another gptkit ({who})"
        raise GptkitError(message, "Wait for it, or choose another name.") from error
    except OSError as error:
        if error.errno not in (errno.ENOLCK, *UNSUPPORTED):
            raise
        _log.warning("no locks in %s: nothing keeps another writer of %s away", target.parent, target.name)
        return False
    return True
