"""What an interrupted run has finished, for the next one to go on from."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TypeGuard

from .files import open_own, write_all
from .manifest import JOURNAL, MANIFEST, FileRecord, file_entry, read_entry

_MAX_BYTES = 1 << 30  # a journal is read whole

_log = logging.getLogger(__name__)


class Journal:
    """The finished files of a partial folder, a line of checksum and JSON each behind one with the key; the first that
    does not hold ends it. No line is trusted: names are plain, and a file's bytes still have the sha256.
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
        noted = read_journal(self.folder)[1:]
        self.count = len(noted)  # what an interruption of the hashing would still leave
        known = {name: found for entry in noted if is_plain(name := entry.get("name")) and (found := read_entry(entry))}
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
            with open_own(self.folder / name) as file:
                same = os.fstat(file.fileno()).st_size == nbytes
                return same and hashlib.file_digest(file, "sha256").hexdigest() == record.sha256
        except (OSError, ValueError) as error:  # ValueError: half a surrogate pair in the name
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
            text = file.read(_MAX_BYTES)
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


def is_plain(name: object) -> TypeGuard[str]:
    """Whether this names a file in the folder itself that is not one of ours."""
    reserved = (".", "..", MANIFEST, JOURNAL, f"{JOURNAL}.new")
    return isinstance(name, str) and bool(name) and name not in reserved and not set(name) & {"/", "\0"}
