"""Read and check manifest.json, which lists the files of a published folder with their hashes.

The manifest has the sha256 and size of every file, and the position and a hash of every tensor. So a check can name
the changed tensors without parsing the file, whose header may be damaged.
"""

import json
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, cast

import msgspec
import xxhash

from .files import at_once, read_small, sha256_file

MANIFEST = "manifest.json"
SCHEMA_VERSION = 2  # version 1 had only the tensors' sha256, without their positions
JOURNAL = ".journal"  # records the finished files until the folder is published (see `publish`)

_MAX_BYTES = 2**26  # a checkpoint of 100,000 tensors has 20 MB
_MAX_VALUES = 2**20  # objects and lists: each costs some hundred bytes of memory, however short it is written
_SHOWN = 20  # damaged tensors listed per file; the rest are counted


_Place = Annotated[int, msgspec.Meta(ge=0)]


class TensorRecord(msgspec.Struct, frozen=True):
    """The place of a tensor in its file, and the hash of its bytes.

    The hash is XXH3-128, in hex. It takes a tenth of the time of a sha256.
    """

    start: _Place  # the offset of the first byte
    end: _Place  # the offset after the last byte
    xxh3: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")] = msgspec.field(name="xxh3_128")


class FileRecord(msgspec.Struct, frozen=True):
    """The hashes of a file."""

    sha256: str  # of the whole file, in hex
    tensors: Mapping[str, TensorRecord] = {}  # by name; the other bytes of the file are its header and padding


class _ManifestEntry(msgspec.Struct):
    sha256: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
    bytes: _Place
    tensors: dict[str, TensorRecord] = {}


def manifest_of(folder: Path) -> dict[str, Any]:
    """Return the content of a folder's manifest.json, or an empty dictionary if there is none or it is unreadable."""
    try:
        record = read_manifest(folder / MANIFEST)
    except (OSError, ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def read_manifest(path: Path) -> Any:
    """Return the JSON value in a manifest.json. Raises OSError, ValueError or RecursionError if it is unreadable."""
    raw = read_small(path, _MAX_BYTES)
    if raw.count(b"{") + raw.count(b"[") > _MAX_VALUES:
        raise ValueError(f"it has more than {_MAX_VALUES:,} values")
    return json.loads(raw)


def file_entry(record: FileRecord, nbytes: int) -> dict[str, object]:
    """Return the entry of a file in the manifest, as JSON values. `nbytes` is the size of the file."""
    tensors = {name: msgspec.to_builtins(tensor) for name, tensor in record.tensors.items()}
    return {"sha256": record.sha256, "bytes": nbytes, **({"tensors": tensors} if tensors else {})}


def read_entry(entry: object) -> tuple[FileRecord, int] | None:
    """Return the hashes and the size in bytes in a file's entry in the manifest, or None if the entry is damaged."""
    try:
        read = msgspec.convert(entry, _ManifestEntry)
    except msgspec.ValidationError:
        return None
    if any(not tensor.start <= tensor.end <= read.bytes for tensor in read.tensors.values()):
        return None
    return FileRecord(read.sha256, read.tensors), read.bytes


def walk(folder: Path) -> Iterator[str]:
    """Yield the relative paths of all files and links below `folder`, except the manifest and the journal."""
    for at, folders, names in os.walk(folder):
        for name in names + [name for name in folders if (Path(at) / name).is_symlink()]:
            relative = (Path(at) / name).relative_to(folder).as_posix()
            if relative not in (JOURNAL, MANIFEST):
                yield relative


def check_manifest(folder: Path) -> list[str]:
    """Hash the files of a folder again and compare them with manifest.json. Return one line of text per difference.

    If possible, the lines name the tensors that changed.
    """
    try:
        record = read_manifest(folder / MANIFEST)
    except FileNotFoundError:
        return [f"{MANIFEST} is missing"]
    except OSError as error:
        return [f"{MANIFEST} cannot be read: {error.strerror}"]
    except (ValueError, RecursionError) as error:
        return [f"{MANIFEST} cannot be read: {error}"]
    if not isinstance(record, dict) or not isinstance(record.get("files"), dict):
        return [f"{MANIFEST} is not a gptkit manifest: it has no object named files"]
    version = record.get("schema_version")
    if type(version) is not int or not 1 <= version <= SCHEMA_VERSION:
        return [f"{MANIFEST} has schema version {version!r}, but this gptkit supports 1 to {SCHEMA_VERSION}"]
    listed = cast("dict[str, object]", record["files"])
    results = at_once(lambda name: _check_file(folder, name, listed[name]), sorted(listed))
    problems = [problem for result in results for problem in result]
    user_files = record.get("kept")  # the user's files, which came along when the folder was replaced
    expected = {*listed, *(user_files if isinstance(user_files, list) else ())}
    return problems + [f"{name} is not in the manifest" for name in sorted(walk(folder)) if name not in expected]


def _check_file(folder: Path, name: str, entry: object) -> list[str]:
    if not isinstance(entry, dict) or not isinstance(entry.get("sha256"), str):
        return [f"{name}: its entry in the manifest has no sha256"]
    if name.startswith("/") or ".." in name.split("/") or "\0" in name:
        return [f"{name!r}: the manifest names a file outside of its folder"]
    known = read_entry(entry)
    if known is None:
        return [f"{name}: its entry in the manifest is damaged"]
    record, nbytes = known
    path = folder / name
    try:
        info = path.stat()
        if not stat.S_ISREG(info.st_mode):
            return [f"{name} is not a file"]
        if info.st_size != nbytes:
            cut = sum(tensor.end > info.st_size for tensor in record.tensors.values())
            truncation = f"; {cut} of its {len(record.tensors)} tensors are cut off" if cut else ""
            return [f"{name}: {nbytes} bytes expected, {info.st_size} found{truncation}"]
        digest = sha256_file(path)
        if digest == record.sha256:
            return []
        with path.open("rb") as file:
            changed = [
                (name, tensor)
                for name, tensor in sorted(record.tensors.items(), key=lambda item: item[1].start)
                if _hash_of_range(file.fileno(), tensor.start, tensor.end) != tensor.xxh3
            ]
    except FileNotFoundError:
        return [f"{name} is missing"]
    except OSError as error:
        return [f"{name} cannot be read: {error.strerror}"]
    if changed:
        lines = [
            f"{name}: tensor {tensor_name} changed (bytes {t.start} to {t.end})" for tensor_name, t in changed[:_SHOWN]
        ]
        return lines + ([f"{name}: {len(changed) - _SHOWN} more tensors changed"] if len(changed) > _SHOWN else [])
    if record.tensors:
        return [f"{name}: its header or padding changed; its {len(record.tensors)} tensors' own bytes did not"]
    return [f"{name}: its bytes changed (sha256 {record.sha256[:12]}… expected, {digest[:12]}… found)"]


def _hash_of_range(fd: int, start: int, end: int) -> str:
    digest = xxhash.xxh3_128()
    while start < end and (chunk := os.pread(fd, min(1 << 20, end - start), start)):
        digest.update(chunk)
        start += len(chunk)
    return digest.hexdigest()
