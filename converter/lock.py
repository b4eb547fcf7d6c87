"""At most one writer of a folder."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import stat
from contextlib import suppress
from pathlib import Path

from ..errors import GptkitError, UsageError
from .files import UNSUPPORTED, write_all

_log = logging.getLogger(__name__)

_MAX_PID = 20
_PID = re.compile(rb"[0-9]{0,19}\n?")  # what is in a lock's file; a file with anything else is somebody's own


class Lock:
    """At most one writer a target: flock on a sibling `.<name>.lock`, which the next run takes after a kill -9."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self.path = target.parent / f".{target.name}.lock"
        self.held = False
        self._fd: int | None = None
        self._depth = 0

    def acquire(self) -> None:
        """Take the lock, or go on without (`held` stays False) where the file system has none."""
        while self._fd is None:
            # Neither through a planted link, nor waiting for the other end of a planted pipe.
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            try:
                fd = os.open(self.path, flags, 0o666)
            except OSError as error:
                if error.errno in (errno.ELOOP, errno.EISDIR):
                    raise self._in_the_way() from error
                raise
            try:
                locked, same = self._flock(fd), False
                # The holder before may have removed the file between our open and our lock: then it guards nothing.
                with suppress(FileNotFoundError):
                    same = os.path.samestat(os.fstat(fd), self.path.lstat())
                if same:
                    if not _PID.fullmatch(os.pread(fd, _MAX_PID + 1, 0)):
                        raise self._in_the_way()
                    self._fd, self.held = fd, locked
            finally:
                if self._fd is None:
                    os.close(fd)
        self._depth += 1
        if self.held and self._depth == 1:
            try:
                os.ftruncate(self._fd, 0)
                write_all(self._fd, f"{os.getpid()}\n".encode(), 0)
            except BaseException:
                self.release()
                raise

    def _in_the_way(self) -> UsageError:
        return UsageError(f"{self.path} is in the way: gptkit keeps its lock under this name", "Remove it.")

    def _flock(self, fd: int) -> bool:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise self._in_the_way()
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            pid = os.pread(fd, 20, 0).decode("ascii", "replace").strip()
            who = f"pid {pid}" if pid.isdigit() else "it has just begun"
            hint = "Wait for it, or choose another name."
            raise GptkitError(f"{self.target} is being written by another gptkit ({who})", hint) from error
        except OSError as error:
            if error.errno not in (errno.ENOLCK, *UNSUPPORTED):
                raise
            _log.warning("no locks in %s: nothing keeps another writer of %s away", self.path.parent, self.target.name)
            return False
        return True

    def release(self) -> None:
        if self._fd is None:
            return
        self._depth -= 1
        if not self._depth:
            try:
                self.path.unlink(missing_ok=True)  # while it is held: nobody else's
            except OSError as error:
                _log.debug("could not remove %s: %s", self.path, error)
            finally:
                os.close(self._fd)
                self._fd, self.held = None, False
