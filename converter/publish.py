"""A folder that appears complete or not at all.

Everything is written into a sibling `.<name>.partial-<pid>-<random>` and fsynced, the manifest last; one rename then
makes it the target. Whatever stops the process before that rename (an exception, Ctrl-C, kill -9, a full disk) leaves
the target as it was: absent, or the old one complete.

A sibling `.<name>.lock`, held by flock, keeps two writers of one target apart. Who holds it knows that every partial
folder of the target is an orphan: one of the same work is taken over, with the files that its journal says are finished
and that still have their sha256; any other is swept.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import stat
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TypeGuard

from ..errors import GptkitError, UsageError
from .manifest import (
    JOURNAL,
    MANIFEST,
    SCHEMA_VERSION,
    FileRecord,
    TensorRecord,
    check_manifest,
    file_entry,
    read_entry,
    sha256_file,
    walk,
)

__all__ = [
    "MANIFEST",
    "SCHEMA_VERSION",
    "FileRecord",
    "Staging",
    "TensorRecord",
    "check_manifest",
    "copy_file",
    "sha256_file",
    "write_all",
    "write_bytes",
]

_CHUNK = 8 << 20
_MAX_JOURNAL = 1 << 30  # bytes; a journal is read whole
# What "this file system or kernel cannot do that" looks like, as opposed to "it failed".
UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EXDEV, errno.EPERM, errno.EBADF)

_log = logging.getLogger(__name__)


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
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            write_all(fd, data, 0)
        finally:
            os.close(fd)
    except OSError as error:
        raise _failed("write", path, error) from error


def copy_file(src: Path, dst: Path) -> None:
    """Copy the bytes of `src` into a new file `dst`, inside the kernel where it can; mode by the umask, not src's.

    Raises GptkitError where that fails or `dst` exists.
    """
    try:
        with (
            src.open("rb", buffering=0) as source,
            dst.open("xb", buffering=0) as sink,
        ):
            offset = _copy_in_kernel(source.fileno(), sink.fileno())
            # Also what follows a copy that the kernel ended early: at the end of the file the first read is empty.
            while chunk := os.pread(source.fileno(), _CHUNK, offset):
                write_all(sink.fileno(), chunk, offset)
                offset += len(chunk)
    except OSError as error:
        raise _failed(f"copy {src} to", dst, error) from error


def _copy_in_kernel(source: int, sink: int) -> int:
    """Copy from the start of `source` to the start of `sink`; returns the bytes copied, 0 where the kernel cannot."""
    offset = 0
    if not hasattr(os, "copy_file_range"):  # macOS
        return offset
    try:
        while done := os.copy_file_range(source, sink, 1 << 30, offset, offset):
            offset += done
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
    return offset


class Staging:
    """A context manager that makes the folder `target` out of what is written into `.path`, at `commit()`, not before.

    `force` lets an existing checkpoint folder (one that holds config.json or gptkit.json, or is empty) be replaced in
    one step. `key` names the work, so that only the same work from the same source has the same key: with one, a run
    takes over what an interrupted run of that key has finished. Without, nothing is ever taken over.

    Leaving the `with` block without a commit removes what was written: after an error, so that it does not fill the
    disk that may have caused it. After an interruption (KeyboardInterrupt, and a signal turned into one) with a key the
    finished files stay, and a note on the exception says so.

    Entering raises UsageError for a target that exists (or may not be replaced) and for a parent that is missing or
    read-only, GptkitError where the target is being written by another process or the folder cannot be made.

    Attributes:
        finished: what was taken over: records by file name, each file hashed again and still right. What else lay in
            the folder is gone.

    """

    def __init__(self, target: Path, force: bool = False, key: str | None = None) -> None:
        # Not Path.resolve(), as ruff wants: a target that is a symlink has to be seen as one.
        self.target = Path(os.path.abspath(os.path.expanduser(target)))  # noqa: PTH100, PTH111
        self.force = force
        self.key = key
        self.finished: Mapping[str, FileRecord] = {}
        self._path: Path | None = None
        self._lock = _Lock(self.target)
        self._journal: _Journal | None = None

    @property
    def path(self) -> Path:
        """The folder to write into, inside the `with` block. Raises RuntimeError outside of it and after the commit."""
        if self._path is None:
            raise RuntimeError("this Staging is not open: use it in a `with` block, before commit()")
        return self._path

    def check(self) -> None:
        """Refuse what entering would refuse, before the work that leads up to it; leaves everything as it is.

        Raises UsageError and GptkitError, as entering does.
        """
        self._check_parent()
        try:
            try:
                self._lock.acquire()
                self._restore()
                self._check_target()
            finally:
                self._lock.release()
        except OSError as error:
            raise _failed("write beside", self.target, error) from error

    def __enter__(self) -> Staging:
        self._check_parent()
        try:
            self._lock.acquire()
            self._restore()
            self._check_target()  # before the sweep: a run that forgot --force must not cost what it could resume
            self._open()
        except OSError as error:
            self._leave(error)
            raise _failed("write beside", self.target, error) from error
        except BaseException as error:
            self._leave(error)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._leave(error)

    def require_space(self, nbytes: int) -> None:
        """Raise GptkitError unless the disk has `nbytes` free for this user: before the first byte is written."""
        free = shutil.disk_usage(self.path).free
        if free < nbytes:
            raise GptkitError(
                f"not enough disk space in {self.target.parent}: {_size(nbytes)} needed, {_size(free)} free",
                "Free some space, or write to another disk.",
            )

    def finish(self, name: str, record: FileRecord) -> None:
        """Put the file `name` of the folder on the disk for good, and note that it needs no writing again.

        From any thread. `name` is a plain name, without folders. Raises GptkitError where the disk refuses.
        """
        path = self.path
        if not _is_plain(name):
            raise ValueError(f"{name!r} is not a plain file name")
        try:
            nbytes = _seal(path / name)
            if any(tensor.end > nbytes for tensor in record.tensors.values()):
                raise ValueError(f"{name} has {nbytes} bytes, its record places tensors beyond them")
            if self._journal is not None:
                _fsync(path)
                self._journal.note(name, record, nbytes)
        except OSError as error:
            raise _failed("write", path / name, error) from error

    def commit(self, manifest: Mapping[str, object], *, files: Mapping[str, FileRecord] | None = None) -> None:
        """Publish the folder: fsync all of it, write manifest.json last, rename it to the target, fsync the parent.

        `manifest` holds the caller's own entries (JSON values). `files` gives what is known of files by name, relative
        to the folder, those that were taken over included: every other file is read and hashed here. Raises GptkitError
        where a step fails, or UsageError where the target appeared meanwhile: the target then is as it was (or new and
        complete, where the fsync after the rename is what failed).
        """
        path = self.path
        if clash := {"schema_version", "files"} & manifest.keys():
            raise ValueError(f"the manifest's own keys cannot be passed in: {sorted(clash)}")
        try:
            record = {"schema_version": SCHEMA_VERSION, **manifest, "files": _list_files(path, dict(files or {}))}
            text = json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
            write_bytes(path / MANIFEST, text.encode())
            if _seal(path / MANIFEST) != len(text.encode()):
                raise OSError(errno.EIO, "the manifest is not what was written")
            if self._journal is not None:
                self._journal.remove()
            for folder, _, _ in os.walk(path, topdown=False):
                _fsync(Path(folder))
            self._publish(path)
        except OSError as error:
            raise _failed("publish", self.target, error) from error

    def _publish(self, path: Path) -> None:
        old = self._rename(path)
        # From here on the target is the new folder, and whatever stands at `old` is the one it replaced.
        self._path = None
        try:
            _fsync(self.target.parent)
        finally:
            if old is not None:
                _remove(old)

    def _rename(self, path: Path) -> Path | None:
        """Make `path` the target; returns where the folder that it replaced is now, or None."""
        self._check_target()  # again: it was first checked before the work, which may have taken an hour
        if not os.path.lexists(self.target):
            if not _renameat2(path, self.target, _RENAME_NOREPLACE):
                path.rename(self.target)
            return None
        if _renameat2(path, self.target, _RENAME_EXCHANGE):
            return path
        aside = path.with_name(path.name.replace(".partial-", ".old-"))
        try:
            self.target.rename(aside)
            path.rename(self.target)
        except BaseException:
            if not os.path.lexists(self.target):
                aside.rename(self.target)
            raise
        return aside

    def _check_parent(self) -> None:
        parent = self.target.parent
        if not self.target.name:
            raise UsageError(f"cannot write a checkpoint to {self.target}", "Name a folder to create.")
        if not parent.is_dir():
            what = "is not a folder" if parent.exists() else "does not exist"
            raise UsageError(f"cannot create {self.target}: {parent} {what}", "Create the parent folder first.")
        if not os.access(parent, os.W_OK | os.X_OK):
            raise UsageError(
                f"cannot create {self.target}: {parent} is not writable", "Choose another place to write to."
            )

    def _check_target(self) -> None:
        target = self.target
        if not os.path.lexists(target):
            return
        if target.is_symlink() or not target.is_dir():
            what = "a symbolic link" if target.is_symlink() else "a file"
            raise UsageError(f"{target} exists and is {what}, not a folder", "Choose another name for the output.")
        if not self.force:
            raise UsageError(f"{target} exists", "Choose another name, or pass --force to replace it.")
        names = {entry.name for entry in target.iterdir()}
        if names and (".git" in names or not names & {"config.json", "gptkit.json"}):
            why = "is a git repository" if ".git" in names else "holds neither config.json nor gptkit.json"
            raise UsageError(
                f"{target} {why}: --force replaces only a checkpoint's folder",
                "Remove it yourself, or choose another name.",
            )

    def _open(self) -> None:
        """Make the folder, or take over the one of this key; sweep the others. Raises OSError."""
        for left in self._siblings("partial"):
            # A new name first: an owner that the lock did not show (on another machine, where the network file system
            # keeps locks to itself) can then not publish a folder that is being emptied.
            path = self._sibling("partial")
            left.rename(path)
            if self.key is not None and self._path is None and _Journal.key_of(path) == self.key:
                self._path = path
            else:
                _remove(path)
        if self._path is None:
            path = self._sibling("partial")
            self._path = path
            path.mkdir()
            if self.key is not None:
                self._journal = _Journal(path, self.key)
                self._journal.begin()
        else:
            assert self.key is not None
            self._journal = _Journal(self._path, self.key)
            self.finished = self._journal.resume()

    def _restore(self) -> None:
        """Put an old folder back that was set aside for a new one that never came. Raises OSError."""
        for left in self._siblings("old"):
            if os.path.lexists(self.target):
                _remove(left)
            else:
                left.rename(self.target)

    def _sibling(self, kind: str) -> Path:
        return self.target.with_name(f".{self.target.name}.{kind}-{os.getpid()}-{secrets.token_hex(4)}")

    def _siblings(self, kind: str) -> list[Path]:
        """This user's folders of that kind that earlier runs left; none where no lock says that they are gone."""
        if not self._lock.held:
            return []
        pattern = re.compile(re.escape(f".{self.target.name}.{kind}-") + r"[0-9]+-[0-9a-f]{8}")
        found = [path for path in self.target.parent.iterdir() if pattern.fullmatch(path.name)]
        return sorted(path for path in found if _is_own_folder(path))

    def _leave(self, error: BaseException | None) -> None:
        path, self._path = self._path, None
        if self._journal is not None:
            self._journal.close()
        if path is not None:
            count = 0 if self._journal is None else self._journal.count
            if isinstance(error, KeyboardInterrupt) and count and (path / JOURNAL).exists():
                files = f"{count} file{'s' if count > 1 else ''}"
                error.add_note(f"{files} of {self.target} finished so far: the same command goes on from there")
            else:
                _remove(path)
        self._lock.release()


class _Lock:
    """At most one writer a target: flock on a sibling `.<name>.lock`, which goes when its holder does.

    After a kill -9 the file stays, without a holder, for the next run to take.
    """

    def __init__(self, target: Path) -> None:
        self.target = target
        self.path = target.parent / f".{target.name}.lock"
        self.held = False
        self._fd: int | None = None

    def acquire(self) -> None:
        """Take the lock, or go on without (`held` stays False) where the file system has none.

        Raises GptkitError where another process holds it, OSError.
        """
        while self._fd is None:
            # Neither through a planted link, nor waiting for the other end of a planted pipe.
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            fd = os.open(self.path, flags, 0o666)
            try:
                locked = self._flock(fd)
                # The holder before may have removed the file between our open and our lock: then it guards nothing.
                if _same_file(fd, self.path):
                    self._fd, self.held = fd, locked
            finally:
                if self._fd is None:
                    os.close(fd)
        if self.held:
            os.ftruncate(self._fd, 0)
            write_all(self._fd, f"{os.getpid()}\n".encode(), 0)

    def _flock(self, fd: int) -> bool:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise UsageError(f"{self.path} is in the way: gptkit keeps its lock under this name", "Remove it.")
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            pid = os.pread(fd, 20, 0).decode("ascii", "replace").strip()
            who = f"pid {pid}" if pid.isdigit() else "it has just begun"
            raise GptkitError(
                f"{self.target} is being written by another gptkit ({who})", "Wait for it, or choose another name."
            ) from error
        except OSError as error:
            if error.errno not in (errno.ENOLCK, *UNSUPPORTED):
                raise
            _log.warning("no locks in %s: nothing keeps another writer of %s away", self.path.parent, self.target.name)
            return False
        return True

    def release(self) -> None:
        if self._fd is None:
            return
        try:
            self.path.unlink(missing_ok=True)  # while it is held: nobody else's
        except OSError as error:
            _log.debug("could not remove %s: %s", self.path, error)
        finally:
            os.close(self._fd)
            self._fd, self.held = None, False


class _Journal:
    """The finished files of a partial folder, a line each behind a line with the key.

    A line is a checksum and JSON; the first that does not hold ends the journal, whether a kill tore it or somebody
    wrote it. No line is trusted: names are plain, and a file counts only if its bytes still have the sha256.
    """

    def __init__(self, folder: Path, key: str) -> None:
        self.folder, self.key = folder, key
        self.count = 0
        self._fd: int | None = None
        self._end = 0
        self._mutex = threading.Lock()

    def begin(self, entries: Mapping[str, Mapping[str, object]] | None = None) -> None:
        """Write a new journal in one step, with entries of the folder's files by name. Raises OSError."""
        lines = [_journal_line({"key": self.key})]
        lines += [_journal_line({"name": name, **entry}) for name, entry in (entries or {}).items()]
        text = b"".join(lines)
        path = self.folder / f"{JOURNAL}.new"
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        write_all(self._fd, text, 0)
        if entries:  # else there is nothing yet that could be lost
            os.fsync(self._fd)
        path.rename(self.folder / JOURNAL)
        self._end, self.count = len(text), len(entries or {})

    def note(self, name: str, record: FileRecord, nbytes: int) -> None:
        """Add a finished file, on the disk when this returns. Raises OSError."""
        line = _journal_line({"name": name, **file_entry(record, nbytes)})
        with self._mutex:
            if self._fd is None:
                raise ValueError("the journal is closed")
            write_all(self._fd, line, self._end)
            self._end += len(line)
            os.fsync(self._fd)
            self.count += 1

    def resume(self) -> dict[str, FileRecord]:
        """The files that are finished and still right; removes everything else from the folder. Raises OSError."""
        noted = _read_journal(self.folder)[1:]
        self.count = len(noted)  # what an interruption of the hashing would still leave
        known = {
            name: found for entry in noted if _is_plain(name := entry.get("name")) and (found := read_entry(entry))
        }
        from concurrent.futures import ThreadPoolExecutor  # here, because few runs resume anything

        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            right = dict(zip(known, pool.map(lambda name: self._is_right(name, *known[name]), known), strict=True))
        for left in self.folder.iterdir():
            if not right.get(left.name) and left.name != JOURNAL:
                if left.is_dir() and not left.is_symlink():
                    shutil.rmtree(left)
                else:
                    left.unlink()
        finished = {name: found for name, found in known.items() if right[name]}
        self.begin({name: file_entry(*found) for name, found in finished.items()})
        return {name: record for name, (record, _) in finished.items()}

    def _is_right(self, name: str, record: FileRecord, nbytes: int) -> bool:
        """Whether a file is the one that was noted, and nobody else has a hand on it."""
        try:
            fd = _open_own(self.folder / name)
        except OSError as error:
            _log.debug("%s is not taken over: %s", name, error)
            return False
        with open(fd, "rb", buffering=0) as file:  # noqa: PTH123 (a descriptor)
            try:
                same = os.fstat(fd).st_size == nbytes
                return same and hashlib.file_digest(file, "sha256").hexdigest() == record.sha256
            except OSError as error:
                _log.debug("%s is not taken over: %s", name, error)
                return False

    def remove(self) -> None:
        """Take the journal out of a folder that is whole. Raises OSError."""
        self.close()
        (self.folder / JOURNAL).unlink()

    def close(self) -> None:
        with self._mutex:
            if self._fd is not None:
                fd, self._fd = self._fd, None
                os.close(fd)

    @staticmethod
    def key_of(folder: Path) -> str | None:
        """The key of a folder with a journal of this user's, else None."""
        lines = _read_journal(folder)
        key = lines[0].get("key") if lines else None
        return key if isinstance(key, str) else None


def _journal_line(entry: Mapping[str, object]) -> bytes:
    text = json.dumps(entry)  # ASCII: no line break but the one behind it
    return f"{hashlib.sha256(text.encode()).hexdigest()} {text}\n".encode()


def _read_journal(folder: Path) -> list[dict[str, object]]:
    """The lines of a folder's journal up to the first that is torn or strange."""
    try:
        with open(_open_own(folder / JOURNAL), "rb") as file:
            text = file.read(_MAX_JOURNAL)
    except OSError as error:
        _log.debug("no journal in %s: %s", folder, error)
        return []
    entries: list[dict[str, object]] = []
    for line in text.split(b"\n"):
        digest, _, data = line.partition(b" ")
        if hashlib.sha256(data).hexdigest().encode() != digest:
            break
        try:
            entry = json.loads(data)
        except (ValueError, RecursionError):
            break
        if not isinstance(entry, dict):
            break
        entries.append(entry)
    return entries


def _is_plain(name: object) -> TypeGuard[str]:
    reserved = (".", "..", MANIFEST, JOURNAL, f"{JOURNAL}.new")
    return isinstance(name, str) and bool(name) and name not in reserved and not set(name) & {"/", "\0"}


def _is_own_folder(path: Path) -> bool:
    info = path.lstat()
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid()


def _open_own(path: Path) -> int:
    """Open a plain file of this user's under no other name, for reading. Raises OSError for anything else."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid() or info.st_nlink != 1:
        os.close(fd)
        raise OSError(errno.EPERM, "not a plain file of this user's own", str(path))
    return fd


def _same_file(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.lstat())
    except FileNotFoundError:
        return False


def _list_files(folder: Path, known: dict[str, FileRecord]) -> dict[str, dict[str, object]]:
    """What the manifest says of every file below `folder`, sorted, each on the disk; `known` spares hashing again."""
    listed: dict[str, dict[str, object]] = {}
    for name in sorted(walk(folder)):
        path = folder / name
        if not stat.S_ISREG(path.lstat().st_mode):
            raise ValueError(f"{name} in the staging folder is not a plain file")
        nbytes = _seal(path)
        record = known.pop(name, None) or FileRecord(sha256_file(path))
        if any(tensor.end > nbytes for tensor in record.tensors.values()):
            raise ValueError(f"{name} has {nbytes} bytes, its record places tensors beyond them")
        listed[name] = file_entry(record, nbytes)
    if known:
        raise ValueError(f"records were given for files that were not written: {sorted(known)}")
    return listed


def _seal(path: Path) -> int:
    """fsync a file, opened anew; returns its bytes. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        os.fsync(fd)
        return os.fstat(fd).st_size
    finally:
        os.close(fd)


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


_RENAME_NOREPLACE = 1
_RENAME_EXCHANGE = 2


def _renameat2(src: Path, dst: Path, flags: int) -> bool:
    """renameat2(2) on two paths; False where the libc, the kernel or the file system lacks it. Raises OSError."""
    import ctypes  # here, because most commands never publish anything

    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    at_cwd = -100
    if call(at_cwd, os.fsencode(src), at_cwd, os.fsencode(dst), ctypes.c_uint(flags)) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), str(dst))


def _remove(folder: Path) -> None:
    """Remove a folder of ours. A failure is only logged: no result depends on it, and the next Staging sweeps."""
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        _log.debug("%s is gone already", folder)
    except OSError as error:
        _log.warning("could not remove %s: %s", folder, error)


def _failed(what: str, path: Path, error: OSError) -> GptkitError:
    hint = None
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        hint = "Free some space, or write to another disk."
    return GptkitError(f"could not {what} {path}: {error.strerror or error}", hint)


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 10_000_000 else f"{nbytes:,} bytes"
