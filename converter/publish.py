"""A folder that appears complete or not at all.

Everything is written into a sibling `.<name>.partial-<pid>-<random>` and fsynced, the manifest last; one rename then
makes it the target, which until then stays as it was. Who holds the target's lock knows that every partial folder of it
is an orphan: one of the same work is taken over, with what its journal says is finished and still has its sha256; any
other is swept. Of a folder that is replaced, files that are not part of its checkpoint are kept: they are linked into
the new one before it is published. A target that is one file (a GGUF) is made in such a folder too, without a manifest.
"""

from __future__ import annotations

import contextlib
import errno
import filecmp
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import stat
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

import msgspec

from ..errors import GptkitError, UsageError
from .companions import free_name, is_checkpoints
from .files import at_once, copy_file, failed, fsync, locked, open_own, seal, sha256_file, write_all, write_bytes
from .manifest import (
    JOURNAL,
    MANIFEST,
    SCHEMA_VERSION,
    FileRecord,
    file_entry,
    manifest_of,
    read_entry,
    read_manifest,
    walk,
)

_log = logging.getLogger(__name__)
_noting = threading.Lock()

_OLD = "old"  # what a folder that is replaced is called where two folders cannot be exchanged, until the new one stands


class Staging:
    """A context manager that makes the folder `target` out of what is written into `.path`, at `commit()`, not before.

    `force` lets an existing checkpoint folder be replaced in one step. `key` names the work: a run takes over what an
    interrupted run of that key has finished. Leaving the block without a commit removes what was written, but after an
    interruption with a key, which says in a note that the finished files stay. Entering raises UsageError for a target
    that may not be made, GptkitError where another process writes it or the folder cannot be made.

    Attributes:
        single: None for a folder. For a target that is one file, whether a file that stands there may be replaced.
        finished: what was taken over: records by file name, each file hashed again and still right.
    """

    def __init__(self, target: Path, force: bool = False, key: str | None = None) -> None:
        # Not Path.resolve(), as ruff wants: a target that is a symlink has to be seen as one.
        self.target = Path(os.path.abspath(os.path.expanduser(target)))  # noqa: PTH100, PTH111
        self.force = force
        self.key = key
        self.single: Callable[[Path], bool] | None = None
        self.finished: Mapping[str, FileRecord] = {}
        self._known: dict[str, FileRecord] = {}
        self._path: Path | None = None
        self._stack = contextlib.ExitStack()
        self._locked: bool | None = None  # where locks keep others away; None while the target is not ours

    @property
    def path(self) -> Path:
        """The folder to write into, inside the `with` block. Raises RuntimeError outside of it and after the commit."""
        if self._path is None:
            raise RuntimeError("this Staging is not open: use it in a `with` block, before commit()")
        return self._path

    @contextlib.contextmanager
    def reserved(self) -> Iterator[None]:
        """Hold the target while the work is prepared and `key` may change; refuses what entering would refuse."""
        with contextlib.ExitStack() as stack:
            self._claim(stack)
            yield

    def check(self) -> None:
        """Refuse what entering would refuse, for now."""
        with self.reserved():
            pass

    def __enter__(self) -> Staging:
        self._claim(self._stack)
        try:
            self._open()
        except BaseException as error:
            self._leave(error)
            if isinstance(error, OSError):
                raise failed("write beside", self.target, error) from error
            raise
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        self._leave(error)

    def require_space(self, nbytes: int) -> None:
        """Raise GptkitError unless the disk has `nbytes` free for this user: before the first byte is written."""
        free = shutil.disk_usage(self.path).free
        if free < nbytes:
            message = f"not enough disk space in {self.target.parent}: {_size(nbytes)} needed, {_size(free)} free"
            raise GptkitError(message, "Free some space, or write to another disk.")

    def finish(self, name: str, record: FileRecord) -> None:
        """Put a file of the folder on the disk, and note that it needs no writing again; from any thread."""
        path = self.path
        if not _is_plain(name):
            raise ValueError(f"{name!r} is not a plain file name")
        try:
            nbytes = seal(path / name)
            if any(tensor.end > nbytes for tensor in record.tensors.values()):
                raise ValueError(f"{name} has {nbytes} bytes, its record places tensors beyond them")
            if self.key is not None:
                fsync(path)
                _note_finished(path, name, record, nbytes)
            self._known[name] = record
        except OSError as error:
            raise failed("write", path / name, error) from error

    def commit(self, manifest: Mapping[str, object], *, files: Mapping[str, FileRecord] | None = None) -> None:
        """Publish the folder: fsync all, write manifest.json with these entries last, rename, fsync the parent. `files`
        spares hashing those again. Raises GptkitError, UsageError: the target is then as it was, or new and complete.
        """
        path = self.path
        if clash := {"schema_version", "files", "kept"} & manifest.keys():
            raise ValueError(f"the manifest's own keys cannot be passed in: {sorted(clash)}")
        try:
            listed = _list_files(path, {**self.finished, **self._known, **(files or {})})
            if self.single is None:
                kept = self._keep(path)
                record = {"schema_version": SCHEMA_VERSION, **manifest, "files": listed}
                record |= {"kept": kept} if kept else {}
                text = (json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()
                write_bytes(path / MANIFEST, text)
                if seal(path / MANIFEST) != len(text):
                    raise OSError(errno.EIO, "the manifest is not what was written")
                (path / JOURNAL).unlink()
            elif list(listed) != [self.target.name]:
                raise ValueError(f"{self.target.name} was to be made, and {sorted(listed)} are there")
            for folder, _, _ in os.walk(path, topdown=False):
                fsync(Path(folder))
            old = self._rename(path)
            # From here on the target is the new one, and what stands at `old` is what it replaced, or an empty folder.
            self._path = None
            fsync(self.target.parent)
            if old is not None:  # not before the new one stands for good
                _remove(old)
        except OSError as error:
            raise failed("publish", self.target, error) from error

    def _keep(self, path: Path) -> list[str]:
        """Put what is the user's in the folder that is replaced into the new one; return its names there.

        Files are linked, so that nothing is copied and what a program still writes is not lost. A file whose name the
        new checkpoint has is kept as NAME.old. Raises OSError.
        """
        kept, renamed = [], []
        for name in users_files(self.target) if self.target.is_dir() and not self.target.is_symlink() else ():
            source, new = self.target / name, _free(path, name)
            if new != name:
                if _same_bytes(source, path / name):
                    continue
                renamed.append(f"{name} as {new}")
            _link(source, path / new)
            kept.append(new)
        if renamed:
            _log.warning("%s: kept %s", self.target, ", ".join(renamed))
        return kept

    def _rename(self, path: Path) -> Path | None:
        """Make `path`, or the one file in it, the target; returns the folder that is to be removed now, or None."""
        self._check_target()  # again: it was first checked before the work, which may have taken an hour
        if self.single is not None:
            file = path / self.target.name
            if os.path.lexists(self.target) or not _renameat2(file, self.target, _RENAME_NOREPLACE):
                file.replace(self.target)
            return path
        if not os.path.lexists(self.target):
            if not _renameat2(path, self.target, _RENAME_NOREPLACE):
                path.rename(self.target)
            return None
        aside = self._sibling("old")
        new, old = aside / "new", aside / _OLD
        aside.mkdir()
        try:
            begin_journal(aside, "")
            for entry in (aside / JOURNAL, aside, aside.parent):  # on the disk before anything is put into it
                fsync(entry)
            path.rename(new)
        except BaseException:
            _remove(aside)
            raise
        self._path = aside  # what goes where this fails
        if _renameat2(new, self.target, _RENAME_EXCHANGE):
            return aside
        try:
            self.target.rename(old)
            new.rename(self.target)
        except BaseException:
            if not os.path.lexists(self.target):
                old.rename(self.target)
            raise
        return aside

    def _claim(self, stack: contextlib.ExitStack) -> None:
        """Take the lock for the stack, and see that the target may be made. Raises UsageError, GptkitError."""
        require_place(self.target)
        try:
            if self._locked is None:
                self._locked = stack.enter_context(locked(self.target))
                stack.callback(setattr, self, "_locked", None)
            # An old folder comes back that was set aside for a new one that never came; files go in one step.
            for left in self._siblings("old") if self.single is None else ():
                if (left / _OLD).is_dir() and not os.path.lexists(self.target):
                    (left / _OLD).rename(self.target)
                _remove(left)
            # Before any sweep: a run that forgot --force must not cost what it could go on from.
            self._check_target()
        except BaseException as error:
            stack.close()
            if isinstance(error, OSError):
                raise failed("write beside", self.target, error) from error
            raise

    def _check_target(self) -> None:
        """Raise UsageError where what stands at the target may not be replaced."""
        target, single = self.target, self.single
        if not os.path.lexists(target):
            return
        if target.is_symlink() or not (target.is_dir() if single is None else target.is_file()):
            kind = "a folder" if target.is_dir() else "a file" if single is None else "not a regular file"
            kind, wanted = "a symbolic link" if target.is_symlink() else kind, "folder" if single is None else "file"
            raise UsageError(f"{target} exists and is {kind}, not a {wanted}", "Choose another name for the output.")
        if not self.force:
            raise UsageError(f"{target} exists", "Choose another name, or pass --force to replace it.")
        why = None
        if single is not None:
            if not single(target):
                why = "is a file in another format: --force replaces only a file of the same format"
        elif names := {entry.name for entry in target.iterdir()}:
            if ".git" in names:
                why = "is a git repository: --force replaces only a checkpoint's folder"
            elif not names & {"config.json", "gptkit.json"} and not {"gptkit", "files"} <= manifest_of(target).keys():
                why = "has no config.json, and gptkit did not write it: --force replaces only a checkpoint's folder"
        if why is not None:
            raise UsageError(f"{target} {why}", "Remove it yourself, or choose another name.")
        if single is None:
            users_files(target)

    def _open(self) -> None:
        """Make the folder, or take over the one of this key; sweep the others. Raises OSError."""
        self.finished, self._known = {}, {}
        for left in self._siblings("partial"):
            # A new name first: an owner that the lock did not show (on another machine, where the network file system
            # keeps locks to itself) can then not publish a folder that is being emptied.
            path = self._sibling("partial")
            left.rename(path)
            if self.key is not None and self._path is None and _journal_key(path) == self.key:
                self._path = path
            else:
                _remove(path)
        if self._path is None:
            self._path = self._sibling("partial")
            self._path.mkdir()
            begin_journal(self._path, self.key or "")
        else:
            self.finished = _resume_journal(self._path, str(self.key))

    def _sibling(self, kind: str) -> Path:
        return self.target.with_name(f".{self.target.name}.{kind}-{os.getpid()}-{secrets.token_hex(4)}")

    def _siblings(self, kind: str) -> list[Path]:
        """This user's folders of that kind that earlier runs made; none where no lock says that they are gone."""
        if not self._locked:
            return []
        pattern = re.compile(re.escape(f".{self.target.name}.{kind}-") + r"[0-9]+-[0-9a-f]{8}")
        found = []
        for path in self.target.parent.iterdir():
            if not pattern.fullmatch(path.name):
                continue
            info = path.lstat()
            if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid():
                continue
            # A Staging made it: its journal is in it, or nothing yet, or nothing any more; or it was about to be
            # published, and has our manifest, before which the journal goes.
            marked = {entry.name for entry in path.iterdir()} <= {f"{JOURNAL}.new"} or _journal_key(path) is not None
            if marked or (kind == "partial" and {"schema_version", "files"} <= manifest_of(path).keys()):
                found.append(path)
        return sorted(found)

    def _leave(self, error: BaseException | None) -> None:
        path, self._path = self._path, None
        if path is not None:
            interrupted = isinstance(error, KeyboardInterrupt) and self.key is not None
            count = len(read_journal(path)[1:]) if interrupted else 0
            if error is not None and count:
                files = f"{count} file{'s' if count > 1 else ''}"
                error.add_note(f"{files} of {self.target} finished so far: the same command goes on from there")
            else:
                _remove(path)
        self._stack.close()


def users_files(folder: Path) -> list[str]:
    """Return what is not the checkpoint's in a folder, by names relative to it: files, links and empty folders.

    A file is the checkpoint's if loaders look for it (`is_checkpoints`), or if the manifest lists it and it still has
    those bytes. Raises UsageError for a pipe, a socket or a device, which cannot be kept; OSError, also for a manifest
    that is there and cannot be read.
    """
    listed = _listed_in(folder / MANIFEST)
    found = []
    for at, folders, names in os.walk(folder):
        here = Path(at)
        links = [name for name in folders if (here / name).is_symlink()]
        for path in (here / name for name in (*names, *links)):
            name = path.relative_to(folder).as_posix()
            mode = path.lstat().st_mode
            if not stat.S_ISREG(mode) and not stat.S_ISLNK(mode):
                message = f"{path} is neither a file nor a folder, and would be lost"
                raise UsageError(message, "Move it elsewhere first.")
            if not is_checkpoints(name) and not _is_listed(path, listed.get(name)):
                found.append(name)
        if not folders and not names and here != folder:
            found.append(here.relative_to(folder).as_posix())
    return sorted(found)


def _listed_in(manifest: Path) -> Mapping[str, Any]:
    """Return the files that a manifest lists, none where there is no manifest or another file of that name."""
    try:
        record = read_manifest(manifest)
    except (FileNotFoundError, ValueError, RecursionError):
        return {}
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EFBIG):  # no plain file, or none of gptkit's
            return {}
        raise
    listed = record.get("files") if isinstance(record, dict) else None
    return listed if isinstance(listed, dict) else {}


def _is_listed(path: Path, entry: object) -> bool:
    """Whether a file is as the manifest's entry says."""
    known = read_entry(entry)
    if known is None or not stat.S_ISREG(path.lstat().st_mode):
        return False
    record, nbytes = known
    return path.stat().st_size == nbytes and sha256_file(path) == record.sha256


def _free(folder: Path, name: str) -> str:
    """The name under which something can be put into a folder: with `.old` behind the part that is taken."""
    parts = name.split("/")
    for at in range(1, len(parts) + 1):
        part = folder.joinpath(*parts[:at])
        if os.path.lexists(part) and (at == len(parts) or part.is_symlink() or not part.is_dir()):
            taken = {entry.name for entry in part.parent.iterdir()}
            parts[at - 1] = free_name(parts[at - 1], taken)
            break
    return "/".join(parts)


def _same_bytes(one: Path, other: Path) -> bool:
    return one.is_file() and other.is_file() and not one.is_symlink() and filecmp.cmp(one, other, shallow=False)


def _link(source: Path, target: Path) -> None:
    """Make a file, a link or an empty folder appear under another name too. Raises OSError, GptkitError."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_symlink():
        target.symlink_to(source.readlink())
    elif source.is_dir():
        target.mkdir()
    else:
        try:
            target.hardlink_to(source)
        except OSError:  # a file system without links, or a file of somebody else's
            copy_file(source, target)
            shutil.copystat(source, target)


def require_place(target: Path) -> None:
    """Raise UsageError where nothing of this name can be made: no folder to make it in, or not to be written to."""
    parent = target.parent
    if not target.name:
        raise UsageError(f"cannot write to {target}", "Name a folder to create.")
    if not parent.is_dir():
        what = "is not a folder" if parent.exists() else "does not exist"
        raise UsageError(f"cannot create {target}: {parent} {what}", "Create the parent folder first.")
    if not os.access(parent, os.W_OK | os.X_OK):
        hint = "Choose another place to write to."
        raise UsageError(f"cannot create {target}: {parent} is not writable", hint)


def _list_files(folder: Path, known: dict[str, FileRecord]) -> dict[str, dict[str, object]]:
    """What the manifest says of every file below `folder`, sorted, each on the disk; `known` spares hashing again."""
    listed: dict[str, dict[str, object]] = {}
    for name in sorted(walk(folder)):
        path = folder / name
        if not stat.S_ISREG(path.lstat().st_mode):
            raise ValueError(f"{name} in the staging folder is not a plain file")
        nbytes = seal(path)
        record = known.pop(name, None) or FileRecord(sha256_file(path))
        if any(tensor.end > nbytes for tensor in record.tensors.values()):
            raise ValueError(f"{name} has {nbytes} bytes, its record places tensors beyond them")
        listed[name] = file_entry(record, nbytes)
    if known:
        raise ValueError(f"records were given for files that were not written: {sorted(known)}")
    return listed


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
    """Remove a folder of ours, its mark last. A failure is only logged: the next Staging sweeps."""
    try:
        for entry in folder.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            elif entry.name not in (JOURNAL, MANIFEST):
                entry.unlink()
        shutil.rmtree(folder)
    except FileNotFoundError:
        _log.debug("%s is gone already", folder)
    except OSError as error:
        _log.warning("could not remove %s: %s", folder, error)


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 10_000_000 else f"{nbytes:,} bytes"


# --- the journal, by which an interrupted run goes on ---


def begin_journal(folder: Path, key: str, finished: Mapping[str, tuple[FileRecord, int]] | None = None) -> None:
    """Write a folder's journal in one step: its key, then a line of checksum and JSON a finished file."""
    lines = [_journal_line({"key": key})]
    lines += [_journal_line({"name": name, **file_entry(*known)}) for name, known in (finished or {}).items()]
    path = folder / f"{JOURNAL}.new"
    with path.open("xb", buffering=0) as file:
        write_all(file.fileno(), b"".join(lines), 0)
        if finished:  # else there is nothing yet that could be lost
            os.fsync(file.fileno())
    path.rename(folder / JOURNAL)


def _note_finished(folder: Path, name: str, record: FileRecord, nbytes: int) -> None:
    """Add a finished file to the journal, on the disk when this returns; from any thread. Raises OSError."""
    line = _journal_line({"name": name, **file_entry(record, nbytes)})
    with _noting, (folder / JOURNAL).open("r+b", buffering=0) as file:
        write_all(file.fileno(), line, file.seek(0, os.SEEK_END))
        os.fsync(file.fileno())


def _resume_journal(folder: Path, key: str) -> dict[str, FileRecord]:
    """The files that are finished and still right; removes everything else from the folder. No line of the journal is
    trusted: names are plain, and a file's bytes still have the sha256. Raises OSError.
    """
    noted = read_journal(folder)[1:]
    known = {name: entry for each in noted if _is_plain(name := each.get("name")) and (entry := read_entry(each))}
    right = dict(zip(known, at_once(lambda name: _is_right(folder / name, *known[name]), known), strict=True))
    for left in folder.iterdir():
        if not right.get(left.name) and left.name != JOURNAL:
            if left.is_dir() and not left.is_symlink():
                shutil.rmtree(left)
            else:
                left.unlink()
    finished = {name: entry for name, entry in known.items() if right[name]}
    begin_journal(folder, key, finished)
    return {name: record for name, (record, _) in finished.items()}


def _is_right(path: Path, record: FileRecord, nbytes: int) -> bool:
    """Whether a file is the one that was noted, and nobody else has a hand on it."""
    try:
        with open_own(path) as file:
            same = os.fstat(file.fileno()).st_size == nbytes
            return same and hashlib.file_digest(file, "sha256").hexdigest() == record.sha256
    except (OSError, ValueError) as error:  # ValueError: half a surrogate pair in the name
        _log.debug("%s is not taken over: %s", path.name, error)
        return False


def _journal_key(folder: Path) -> str | None:
    """The key of a folder with a journal of this user's, else None."""
    lines = read_journal(folder)
    key = lines[0].get("key") if lines else None
    return key if isinstance(key, str) else None


def _journal_line(entry: Mapping[str, object]) -> bytes:
    text = json.dumps(entry)  # ASCII: no line break but the one behind it
    return f"{hashlib.sha256(text.encode()).hexdigest()} {text}\n".encode()


def read_journal(folder: Path) -> list[dict[str, object]]:
    """The lines of a folder's journal up to the first that is torn or strange."""
    try:
        with open_own(folder / JOURNAL) as file:
            text = file.read(1 << 30)
    except OSError as error:
        _log.debug("no journal in %s: %s", folder, error)
        return []
    entries: list[dict[str, object]] = []
    for line in text.split(b"\n"):
        digest, _, data = line.partition(b" ")
        if hashlib.sha256(data).hexdigest().encode() != digest:
            break
        try:
            entries.append(msgspec.json.decode(data, type=dict[str, object]))
        except (msgspec.DecodeError, ValueError, RecursionError):
            break
    return entries


def _is_plain(name: object) -> TypeGuard[str]:
    """Whether this names a file in the folder itself that is not one of ours."""
    reserved = (".", "..", MANIFEST, JOURNAL, f"{JOURNAL}.new")
    return isinstance(name, str) and bool(name) and name not in reserved and not set(name) & {"/", "\0"}
