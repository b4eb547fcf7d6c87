"""What a checkpoint's files are called, a folder's listing, JSON as files have it, what git-lfs leaves of a file."""

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import CheckpointError, InvalidInput, UntrustedInput

CONFIG = "config.json"
LOCAL_CONFIG = "gptkit.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLE_SINGLE = "pytorch_model.bin"
PICKLE_INDEX = "pytorch_model.bin.index.json"
ADAPTER_CONFIG = "adapter_config.json"  # what peft writes beside the weights of an adapter
ADAPTER_WEIGHTS = "adapter_model.safetensors"

POINTER = b"version https://git-lfs"
"""How the small text begins that git leaves in a file's place where git-lfs did not fetch it."""


def is_plain(name: str) -> bool:
    """Whether this names a file within a folder; it may be a symlink, as all files are in the hub's cache."""
    return name not in ("", ".", "..") and name.isprintable() and not set(name) & set("/\\:")


def listing(path: Path) -> frozenset[str] | None:
    """The names of a folder's files, found with one call; None for a file. Raises OSError, InvalidInput for a pipe."""
    try:
        with os.scandir(path) as entries:
            return frozenset(entry.name for entry in entries if _is_file(entry))
    except NotADirectoryError:
        pass
    try:
        mode = path.stat().st_mode
    except NotADirectoryError as error:  # a part of the path is a file
        raise FileNotFoundError(*error.args) from error
    if not stat.S_ISREG(mode):
        raise InvalidInput(f"{path} is neither a file nor a folder")
    return None


def _is_file(entry: os.DirEntry[str]) -> bool:
    with suppress(OSError):  # a link that leads in a circle
        return entry.is_file()
    return False


@contextmanager
def plain_file(path: Path) -> Iterator[BinaryIO]:
    """A plain file, open for reading. Raises CheckpointError: it is none, or what is read within fails."""
    try:
        # stat first: opening a pipe would wait for its other end.
        if not stat.S_ISREG(path.stat().st_mode):
            raise CheckpointError(f"{path} is not a file")
        with path.open("rb") as file:
            yield file
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL in it
        raise CheckpointError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


def pointer(where: Path | str) -> CheckpointError:
    """The error for such a text in a weight file's place, to be raised by the caller."""
    return CheckpointError(f"{where} is a git-lfs pointer, not the file itself", "Fetch the file with `git lfs pull`.")


def untrusted(path: Path, hint: str) -> UntrustedInput:
    """The error for a pickle that was not allowed, to be raised by the caller."""
    return UntrustedInput(f"{path} is a pickle: loading it can run any code that its author put in", hint)


def refuse_pointer(path: Path) -> None:
    """Raise CheckpointError where a weight file is a git-lfs pointer: before anybody is asked to trust it."""
    with suppress(OSError, ValueError):
        if path.is_file():
            with path.open("rb") as file:
                if file.read(len(POINTER)) == POINTER:
                    raise pointer(path)


def json_bytes(data: Any) -> bytes:
    """JSON as transformers writes its config files, but for half a surrogate pair, which UTF-8 has no bytes for."""
    try:
        return (json.dumps(data, indent=2, ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError:
        return (json.dumps(data, indent=2) + "\n").encode()


_MAX_NAME = 255
"""Bytes of a file's name."""


def stated_name(path: Path) -> str:
    """Return the name that a small file states, of a folder beside it. Raises CheckpointError, and UntrustedInput for a
    link to a file outside of its folder, but for the blobs of the hub's cache, which every file of a snapshot links to.
    """
    home, target = path.parent.resolve(), path.resolve()
    if not target.is_relative_to(home) and target.parent != home.parent.parent / "blobs":
        raise UntrustedInput(f"{path} is a link to a file outside of its folder", "Put the file itself there.")
    with plain_file(path) as file:
        return file.read(_MAX_NAME + 1).decode("utf-8", "replace").strip()


def is_folder(path: Path) -> bool:
    """Return whether there is such a folder; a name that no file can have is none."""
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False
