"""Write a folder that appears complete or not at all.

gptkit writes all files into a *partial folder* next to the target, `.<name>.partial-<pid>-<random>`, with the manifest
last, and fsyncs them. Then it renames the folder to the target in one step. Before that, the target does not change.

A process that has the target's lock knows that no other process uses the partial folders of this target. If an
interrupted run for the same work has left one, the process continues in it. It keeps the files that the folder's
journal lists and whose sha256 is still right. Other partial folders are removed.

If an existing folder is replaced, the user's files in it, which are not part of the checkpoint, are linked into the new
folder before it is published. A target that is a single file (a GGUF) is also made in a partial folder, without a
manifest.
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

_OLD = "old"  # a temporary name of the replaced folder, where the system cannot exchange two folders


class Staging:
    """A context manager for writing a folder. Files are written into the folder `path`, and `commit()` publishes them.

    Leaving the `with` block without a commit removes the files. But after an interruption, if there is a key, the
    finished files remain, and a note in the exception says so. Entering the block raises UsageError if the target may
    not be made, and GptkitError if another process writes it or the folder cannot be made.

    Attributes:
        single: None for a folder. For a single file, a function that returns whether an existing file may be replaced.
        finished: the hashes of the files that an interrupted run has finished and that are still right, by file name.
    """

    def __init__(self, target: Path, force: bool = False, key: str | None = None) -> None:
        """Remember the options. Nothing is written yet.

        Args:
            target: the folder or file to make.
            force: replace an existing checkpoint folder, in one step.
            key: identifies the work. A run continues with the files that an interrupted run with the same key has
                finished. None never continues a run.
        """
        # Not Path.resolve(), because a target that is a symlink must be recognised as one.
        self.target = Path(os.path.abspath(os.path.expanduser(target)))  # noqa: PTH100, PTH111
        self.force = force
        self.key = key
        self.single: Callable[[Path], bool] | None = None
        self.finished: Mapping[str, FileRecord] = {}
        self._known: dict[str, FileRecord] = {}
        self._path: Path | None = None
        self._stack = contextlib.ExitStack()
        self._locked: bool | None = None  # whether the file system has locks; None while the target is not reserved

    @property
    def path(self) -> Path:
        """The folder to write into. Raises RuntimeError outside of the `with` block and after the commit."""
        if self._path is None:
            raise RuntimeError("this Staging is not open: use it in a `with` block, before commit()")
        return self._path

    @contextlib.contextmanager
    def reserved(self) -> Iterator[None]:
        """Lock the target inside a `with`, before this Staging is entered. `key` may still be changed meanwhile.

        Raises the same errors as entering the Staging.
        """
        with contextlib.ExitStack() as stack:
            self._claim(stack)
            yield

    def check(self) -> None:
        """Raise the errors that entering this Staging would raise now. Nothing is written."""
        with self.reserved():
            pass

    def __enter__(self) -> Staging:
        self._claim(self._stack)
        try:
            self._open()
        except BaseException as error:
            self._leave(error)
            if isinstance(error, OSError):
                raise failed("create", self.target, error) from error
            raise
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        self._leave(error)

    def require_space(self, nbytes: int) -> None:
        """Raise GptkitError unless the disk has `nbytes` bytes of free space for this user."""
        free = shutil.disk_usage(self.path).free
        if free < nbytes:
            raise GptkitError(
                f"not enough disk space in {self.target.parent}: {_size(nbytes)} needed, {_size(free)} free",
                "Free some space, or write to another disk.",
            )

    def finish(self, name: str, record: FileRecord) -> None:
        """Fsync a file in the folder `path` and record it as finished, with its hashes. Any thread may call this."""
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
        """Publish the folder: write manifest.json, fsync all files, and rename the folder to the target.

        Args:
            manifest: entries for manifest.json, in addition to the list of files.
            files: the hashes of files that are known, by file name. Other files are hashed now.

        Raises:
            GptkitError, UsageError: publishing failed. The target is unchanged, or new and complete.
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
            # From here on the target is the new folder. `old` is the replaced one, or an empty folder.
            self._path = None
            fsync(self.target.parent)
            if old is not None:  # only after the new folder is on the disk
                _remove(old)
        except OSError as error:
            raise failed("publish", self.target, error) from error

    def _keep(self, path: Path) -> list[str]:
        """Link the user's files of the replaced folder into the new folder `path`, and return their names there.

        They are linked, not copied, so a program that is writing such a file can continue. If the new checkpoint has a
        file of the same name, the user's file gets the name NAME.old. Raises OSError.
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
        """Rename the partial folder `path`, or the single file in it, to the target.

        Return the folder to remove afterwards, such as the replaced one, or None.
        """
        self._check_target()  # again, because the work since the first check may have taken an hour
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
            for entry in (
                aside / JOURNAL,
                aside,
                aside.parent,
            ):  # The journal must be on the disk before the folder has content.
                fsync(entry)
            path.rename(new)
        except BaseException:
            _remove(aside)
            raise
        self._path = aside  # to be removed if this fails
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
        """Lock the target until `stack` is closed, and check that it may be made. Raises UsageError, GptkitError."""
        require_place(self.target)
        try:
            if self._locked is None:
                self._locked = stack.enter_context(locked(self.target))
                stack.callback(setattr, self, "_locked", None)
            # Move a replaced folder back if its replacement was never published. Single files are replaced in one step.
            for folder in self._siblings("old") if self.single is None else ():
                if (folder / _OLD).is_dir() and not os.path.lexists(self.target):
                    (folder / _OLD).rename(self.target)
                _remove(folder)
            # Before anything is removed: a run without --force must not destroy what an interrupted run has finished.
            self._check_target()
        except BaseException as error:
            stack.close()
            if isinstance(error, OSError):
                raise failed("create", self.target, error) from error
            raise

    def _check_target(self) -> None:
        """Raise UsageError if something exists at the target that may not be replaced."""
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
            raise UsageError(f"{target} {why}", "Remove it yourself, or choose another name for the output.")
        if single is None:
            users_files(target)

    def _open(self) -> None:
        """Make the partial folder, or take that of an interrupted run with the same key. Remove all other ones.

        Raises OSError.
        """
        self.finished, self._known = {}, {}
        for folder in self._siblings("partial"):
            # Rename it first. If a process on another machine still uses it (some network file systems do not share
            # locks), this process can then not publish a half-emptied folder.
            path = self._sibling("partial")
            folder.rename(path)
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
        """Return the temporary folders of this user that earlier runs for the same target have left.

        `kind` is "partial", or "old" for folders with a replaced checkpoint. If the file system has no locks, return an
        empty list, because another process may use the folders.
        """
        if not self._locked:
            return []
        pattern = re.compile(re.escape(f".{self.target.name}.{kind}-") + r"[0-9]+-[0-9a-f]{8}")
        folders = []
        for path in self.target.parent.iterdir():
            if not pattern.fullmatch(path.name):
                continue
            info = path.lstat()
            if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid():
                continue
            # A Staging made this folder if it has a journal, or is empty, or has gptkit's manifest: the journal is
            # removed before publishing.
            marked = {entry.name for entry in path.iterdir()} <= {f"{JOURNAL}.new"} or _journal_key(path) is not None
            if marked or (kind == "partial" and {"schema_version", "files"} <= manifest_of(path).keys()):
                folders.append(path)
        return sorted(folders)

    def _leave(self, error: BaseException | None) -> None:
        path, self._path = self._path, None
        if path is not None:
            interrupted = isinstance(error, KeyboardInterrupt) and self.key is not None
            count = len(read_journal(path)[1:]) if interrupted else 0
            if error is not None and count:
                files = f"{count} file{'s' if count > 1 else ''}"
                error.add_note(f"{files} of {self.target} finished so far: the same command continues from there")
            else:
                _remove(path)
        self._stack.close()


def users_files(folder: Path) -> list[str]:
    """Return the relative names of files, links and empty folders that are not part of the checkpoint in a folder.

    A file is part of the checkpoint if loaders look for its name (`is_checkpoints`), or if the manifest lists it with
    its present size and hash.

    Raises:
        UsageError: there is a pipe, socket or device, which gptkit cannot move to another folder. OSError: the folder
            or its manifest cannot be read.
    """
    listed = _listed_in(folder / MANIFEST)
    kept = []
    for at, folders, names in os.walk(folder):
        here = Path(at)
        links = [name for name in folders if (here / name).is_symlink()]
        for path in (here / name for name in (*names, *links)):
            name = path.relative_to(folder).as_posix()
            mode = path.lstat().st_mode
            if not stat.S_ISREG(mode) and not stat.S_ISLNK(mode):
                raise UsageError(
                    f"{path} is neither a file nor a folder, so gptkit cannot keep it when it replaces the output",
                    f"Move {path.name} to another folder first.",
                )
            if not is_checkpoints(name) and not _is_listed(path, listed.get(name)):
                kept.append(name)
        if not folders and not names and here != folder:
            kept.append(here.relative_to(folder).as_posix())
    return sorted(kept)


def _listed_in(manifest: Path) -> Mapping[str, Any]:
    """Return the entries of the files in a manifest, by file name; empty if this is not a manifest of gptkit."""
    try:
        record = read_manifest(manifest)
    except (FileNotFoundError, ValueError, RecursionError):
        return {}
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EFBIG):  # not a plain file, or not gptkit's
            return {}
        raise
    listed = record.get("files") if isinstance(record, dict) else None
    return listed if isinstance(listed, dict) else {}


def _is_listed(path: Path, entry: object) -> bool:
    """Return whether a file has the size and the hash in its manifest entry."""
    known = read_entry(entry)
    if known is None or not stat.S_ISREG(path.lstat().st_mode):
        return False
    record, nbytes = known
    return path.stat().st_size == nbytes and sha256_file(path) == record.sha256


def _free(folder: Path, name: str) -> str:
    """Return the path, relative to a folder, at which a file called `name` can be placed in the folder.

    It is `name`, unless something exists there. If a file exists at "notes", the free path for "notes" is "notes.old",
    and that for "notes/a.txt" is "notes.old/a.txt".
    """
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
    """Give a file a second name by a hard link, or copy it if that is not possible. Raises OSError, GptkitError.

    A symbolic link or an empty folder is made again under the second name.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_symlink():
        target.symlink_to(source.readlink())
    elif source.is_dir():
        target.mkdir()
    else:
        try:
            target.hardlink_to(source)
        except OSError:  # the file system has no links, or the file is another user's
            copy_file(source, target)
            shutil.copystat(source, target)


def require_place(target: Path) -> None:
    """Raise UsageError unless the folder in which the target will be made exists and is writable."""
    parent = target.parent
    if not target.name:
        raise UsageError(f"cannot write to {target}: it is not the name of a folder", "Give the name of a new folder.")
    if not parent.is_dir():
        what = "is not a folder" if parent.exists() else "does not exist"
        raise UsageError(f"cannot create {target}: {parent} {what}", "Create the parent folder first.")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise UsageError(f"cannot create {target}: {parent} is not writable", "Choose a folder that you may write to.")


def _list_files(folder: Path, known: dict[str, FileRecord]) -> dict[str, dict[str, object]]:
    """Fsync every file in `folder`. Return their manifest entries by file name, sorted.

    `known` has the hashes of files that are not hashed again.
    """
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
    """Call renameat2(2).

    Return False if the libc, the kernel or the file system does not support it. Raises OSError.
    """
    import ctypes  # here, because most commands publish nothing

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
    """Remove a folder that a Staging made.

    The journal is removed last, so that a later run still recognises the folder if the removal is interrupted. A
    failure is only logged, because the next run tries again.
    """
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


# --- the journal, from which an interrupted run continues ---


def begin_journal(folder: Path, key: str, finished: Mapping[str, tuple[FileRecord, int]] | None = None) -> None:
    """Write the journal of an unfinished output folder in one step.

    It has a line with the key, and a line for every finished file with its name, size and hashes. A line is a checksum
    and JSON.
    """
    lines = [_journal_line({"key": key})]
    lines += [_journal_line({"name": name, **file_entry(*known)}) for name, known in (finished or {}).items()]
    path = folder / f"{JOURNAL}.new"
    with path.open("xb", buffering=0) as file:
        write_all(file.fileno(), b"".join(lines), 0)
        if finished:  # otherwise nothing can be lost yet
            os.fsync(file.fileno())
    path.rename(folder / JOURNAL)


def _note_finished(folder: Path, name: str, record: FileRecord, nbytes: int) -> None:
    """Add a finished file to the journal of its folder, and fsync the journal.

    Any thread may call this. Raises OSError.
    """
    line = _journal_line({"name": name, **file_entry(record, nbytes)})
    with _noting, (folder / JOURNAL).open("r+b", buffering=0) as file:
        write_all(file.fileno(), line, file.seek(0, os.SEEK_END))
        os.fsync(file.fileno())


def _resume_journal(folder: Path, key: str) -> dict[str, FileRecord]:
    """Return the hashes of the finished files that are still right, by name. Remove all other files from the folder.

    The journal is untrusted, so names must be plain, and the sha256 of every file is checked. Raises OSError.
    """
    noted = read_journal(folder)[1:]
    known = {name: entry for line in noted if _is_plain(name := line.get("name")) and (entry := read_entry(line))}
    right = dict(zip(known, at_once(lambda name: _is_right(folder / name, *known[name]), known), strict=True))
    for path in folder.iterdir():
        if not right.get(path.name) and path.name != JOURNAL:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
    finished = {name: entry for name, entry in known.items() if right[name]}
    begin_journal(folder, key, finished)
    return {name: record for name, (record, _) in finished.items()}


def _is_right(path: Path, record: FileRecord, nbytes: int) -> bool:
    """Return whether a file has the recorded sha256 and size, belongs to this user, and has no second hard link."""
    try:
        with open_own(path) as file:
            same = os.fstat(file.fileno()).st_size == nbytes
            return same and hashlib.file_digest(file, "sha256").hexdigest() == record.sha256
    except (OSError, ValueError) as error:  # ValueError: the name has a lone surrogate
        _log.debug("%s is not reused: %s", path.name, error)
        return False


def _journal_key(folder: Path) -> str | None:
    """Return the key of the work in a folder's journal, or None if the folder has no journal of this user."""
    lines = read_journal(folder)
    key = lines[0].get("key") if lines else None
    return key if isinstance(key, str) else None


def _journal_line(entry: Mapping[str, object]) -> bytes:
    text = json.dumps(entry)  # ASCII, so the only line break is at the end
    return f"{hashlib.sha256(text.encode()).hexdigest()} {text}\n".encode()


def read_journal(folder: Path) -> list[dict[str, object]]:
    """Return the entries of a folder's journal as JSON objects, up to the first damaged line.

    Return an empty list if there is no journal.
    """
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
    """Return whether this is the name of a file directly in the folder, other than the journal and the manifest."""
    reserved = (".", "..", MANIFEST, JOURNAL, f"{JOURNAL}.new")
    return isinstance(name, str) and bool(name) and name not in reserved and not set(name) & {"/", "\0"}
