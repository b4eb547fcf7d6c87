"""A folder that appears complete or not at all.

Everything is written into a sibling `.<name>.partial-<pid>-<random>` and fsynced, the manifest last; one rename then
makes it the target. Whatever stops the process before that rename (an exception, Ctrl-C, kill -9, a full disk) leaves
the target as it was: absent, or the old one complete. What a killed process leaves beside the target is swept by the
next `Staging` of that target.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import cast

from ..errors import GptkitError, UsageError

__all__ = [
    "MANIFEST",
    "SCHEMA_VERSION",
    "Staging",
    "check_manifest",
    "copy_file",
    "sha256_file",
    "write_all",
    "write_bytes",
]

MANIFEST = "manifest.json"
SCHEMA_VERSION = 1

_LOCK = ".lock"
_CHUNK = 8 << 20
# What "this file system or kernel cannot do that" looks like, as opposed to "it failed".
_UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EXDEV, errno.EPERM, errno.EBADF)

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
        if error.errno not in _UNSUPPORTED:
            raise
    return offset


def sha256_file(path: Path) -> str:
    """The sha256 of a file's bytes, in hex. Raises OSError."""
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Staging:
    """A context manager that makes the folder `target` out of what is written into `.path`, at `commit()`, not before.

    `force` lets an existing checkpoint folder (one that holds config.json or gptkit.json, or is empty) be replaced in
    one step. Leaving the `with` block without a commit, by whatever way, removes what was written.

    Entering raises UsageError for a target that exists (or may not be replaced) and for a parent that is missing or
    read-only, GptkitError where the staging folder cannot be made.
    """

    def __init__(self, target: Path, force: bool = False) -> None:
        # Not Path.resolve(), as ruff wants: a target that is a symlink has to be seen as one.
        self.target = Path(os.path.abspath(os.path.expanduser(target)))  # noqa: PTH100, PTH111
        self.force = force
        self._path: Path | None = None
        self._lock: int | None = None

    @property
    def path(self) -> Path:
        """The folder to write into, inside the `with` block. Raises RuntimeError outside of it and after the commit."""
        if self._path is None:
            raise RuntimeError("this Staging is not open: use it in a `with` block, before commit()")
        return self._path

    def __enter__(self) -> Staging:
        self._check_parent()
        try:
            _sweep(self.target)
        except OSError as error:
            raise _failed("sweep what is left beside", self.target, error) from error
        self._check_target()
        path = self.target.with_name(f".{self.target.name}.partial-{os.getpid()}-{secrets.token_hex(4)}")
        try:
            self._path = path
            path.mkdir()
            self._lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            _flock(self._lock)
        except OSError as error:
            self._abandon()
            raise _failed("create", path, error) from error
        except BaseException:
            self._abandon()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._abandon()

    def require_space(self, nbytes: int) -> None:
        """Raise GptkitError unless the disk has `nbytes` free for this user: before the first byte is written."""
        free = shutil.disk_usage(self.path).free
        if free < nbytes:
            raise GptkitError(
                f"not enough disk space in {self.target.parent}: {_size(nbytes)} needed, {_size(free)} free",
                "Free some space, or write to another disk.",
            )

    def commit(
        self,
        manifest: Mapping[str, object],
        *,
        files: Mapping[str, str] | None = None,
        tensors: Mapping[str, str] | None = None,
    ) -> None:
        """Publish the folder: fsync all of it, write manifest.json last, rename it to the target, fsync the parent.

        `manifest` holds the caller's own entries (JSON values). `files` gives the sha256 of files by name, relative to
        the folder, where they are known already: every other file is read and hashed here. `tensors` gives the sha256
        of tensors by name. Raises GptkitError where a step fails, or UsageError where the target appeared meanwhile:
        the target then is as it was (or new and complete, where the fsync after the rename is what failed).
        """
        path = self.path
        if clash := {"schema_version", "files", "tensors"} & manifest.keys():
            raise ValueError(f"the manifest's own keys cannot be passed in: {sorted(clash)}")
        try:
            listed = _list_files(path, dict(files or {}))
            for name in listed:
                _fsync(path / name)
            record = {"schema_version": SCHEMA_VERSION, **manifest, "files": listed, "tensors": dict(tensors or {})}
            text = json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
            write_bytes(path / MANIFEST, text.encode())
            _fsync(path / MANIFEST)
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
            # The lock goes last: without it a sweeper in another container could take the folder for an orphan.
            (self.target / _LOCK).unlink()
            _fsync(self.target)
            _fsync(self.target.parent)
        finally:
            self._unlock()
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

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _abandon(self) -> None:
        if self._path is not None:
            _remove(self._path)
            self._path = None
        self._unlock()


def _list_files(folder: Path, known: dict[str, str]) -> dict[str, dict[str, object]]:
    """`{relative name: {"sha256", "bytes"}}` of every file below `folder`, sorted; `known` spares hashing again."""
    listed: dict[str, dict[str, object]] = {}
    for name in sorted(_walk(folder)):
        info = (folder / name).lstat()
        if not stat.S_ISREG(info.st_mode):
            raise ValueError(f"{name} in the staging folder is not a plain file")
        digest = known.pop(name, None) or sha256_file(folder / name)
        listed[name] = {"sha256": digest, "bytes": info.st_size}
    if known:
        raise ValueError(f"hashes were given for files that were not written: {sorted(known)}")
    return listed


def _walk(folder: Path) -> Iterator[str]:
    """The names of all files and links below `folder`, relative to it with `/`, but for the lock and the manifest."""
    for at, folders, names in os.walk(folder):
        for name in names + [name for name in folders if (Path(at) / name).is_symlink()]:
            relative = (Path(at) / name).relative_to(folder).as_posix()
            if relative not in (_LOCK, MANIFEST):
                yield relative


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


def _sweep(target: Path) -> None:
    """Remove the partial folders that dead processes left for this target; put an old folder set aside back."""
    for path in sorted(target.parent.iterdir()):
        for kind in ("partial", "old"):
            prefix = f".{target.name}.{kind}-"
            pid, dash, token = path.name.removeprefix(prefix).partition("-")
            if not path.name.startswith(prefix) or not (dash and token and pid.isascii() and pid.isdigit()):
                continue
            if path.is_symlink() or not path.is_dir() or _alive(int(pid)):
                continue
            if kind == "old" and not os.path.lexists(target):
                path.rename(target)
            elif kind == "old" or _unowned(path):
                _remove(path)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # it lives, as somebody else's
        return True
    return True


def _unowned(path: Path) -> bool:
    """Whether a partial folder whose pid is dead here has no owner: that pid may live in another container, which then
    holds the lock. Only the old side of an exchange, and a folder just created (still empty), have no lock file.
    """
    try:
        fd = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    except PermissionError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        _log.debug("%s is in use: %s", path, error)
        return False
    finally:
        os.close(fd)
    return True


def _flock(fd: int) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        # Some network file systems have no locks. A sweeper cannot take one there either, so it leaves the folder.
        if error.errno not in (errno.ENOLCK, *_UNSUPPORTED):
            raise
        _log.debug("no lock on this file system: %s", error)


def check_manifest(folder: Path) -> list[str]:
    """Hash the files of a published folder again; returns what differs from manifest.json, in words."""
    try:
        record = json.loads((folder / MANIFEST).read_bytes())
    except FileNotFoundError:
        return [f"{MANIFEST} is missing"]
    except (OSError, ValueError, RecursionError) as error:
        return [f"{MANIFEST} cannot be read: {error}"]
    if not isinstance(record, dict) or not isinstance(record.get("files"), dict):
        return [f"{MANIFEST} is not a gptkit manifest: it has no object named files"]
    if record.get("schema_version") != SCHEMA_VERSION:
        return [f"{MANIFEST} has schema version {record.get('schema_version')!r}, this gptkit knows {SCHEMA_VERSION}"]
    listed = cast("dict[str, object]", record["files"])
    problems = [problem for name in sorted(listed) for problem in _check_file(folder, name, listed[name])]
    return problems + [f"{name} is not in the manifest" for name in sorted(_walk(folder)) if name not in listed]


def _check_file(folder: Path, name: str, entry: object) -> list[str]:
    if not isinstance(entry, dict) or not isinstance(entry.get("sha256"), str):
        return [f"{name}: its entry in the manifest holds no sha256"]
    if name.startswith("/") or ".." in name.split("/") or "\0" in name:
        return [f"{name!r}: the manifest names a file outside of its folder"]
    path = folder / name
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return [f"{name} is not a file"]
        size = path.stat().st_size
        if size != entry.get("bytes"):
            return [f"{name}: {entry.get('bytes')} bytes expected, {size} found"]
        found = sha256_file(path)
    except FileNotFoundError:
        return [f"{name} is missing"]
    except OSError as error:
        return [f"{name} cannot be read: {error.strerror}"]
    if found != entry["sha256"]:
        return [f"{name}: its bytes changed (sha256 {entry['sha256'][:12]}… expected, {found[:12]}… found)"]
    return []


def _failed(what: str, path: Path, error: OSError) -> GptkitError:
    hint = None
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        hint = "Free some space, or write to another disk."
    return GptkitError(f"could not {what} {path}: {error.strerror or error}", hint)


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 10_000_000 else f"{nbytes:,} bytes"
