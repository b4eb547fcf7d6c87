"""Check names of files, list folders, open plain files, write JSON, and recognise git-lfs pointers."""

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
ADAPTER_CONFIG = "adapter_config.json"  # peft's config of an adapter
ADAPTER_WEIGHTS = "adapter_model.safetensors"

POINTER = b"version https://git-lfs"
"""The first bytes of the small text that replaces a file which git-lfs did not fetch."""


def is_plain(name: str) -> bool:
    """Return whether this is the name of a file in a folder, without any path. Such a file may be a link."""
    return name not in ("", ".", "..") and name.isprintable() and not set(name) & set("/\\:")


def listing(path: Path) -> frozenset[str] | None:
    """Return the names of the files in a folder, or None if the path is a file.

    Raises OSError; InvalidInput for a pipe or device.
    """
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
    with suppress(OSError):  # a circular link
        return entry.is_file()
    return False


@contextmanager
def plain_file(path: Path) -> Iterator[BinaryIO]:
    """Open a plain file for reading. Raises CheckpointError if it is not one, or if reading fails."""
    try:
        # stat first, because opening a pipe would wait for a writer.
        if not stat.S_ISREG(path.stat().st_mode):
            raise CheckpointError(f"{path} is not a file")
        with path.open("rb") as file:
            yield file
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL in it
        raise CheckpointError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


def pointer(where: Path | str) -> CheckpointError:
    """Return the error for a file that is a git-lfs pointer instead of a weight file."""
    return CheckpointError(f"{where} is a git-lfs pointer, not the file itself", "Fetch the file with `git lfs pull`.")


def untrusted(path: Path, hint: str) -> UntrustedInput:
    """Return the error for a pickle that the user did not allow."""
    return UntrustedInput(f"{path} is a pickle: loading it can run any code that its author put in", hint)


def refuse_pointer(path: Path) -> None:
    """Raise CheckpointError if a weight file is a git-lfs pointer. Call this before asking the user to trust a file."""
    with suppress(OSError, ValueError):
        if path.is_file():
            with path.open("rb") as file:
                if file.read(len(POINTER)) == POINTER:
                    raise pointer(path)


def json_bytes(data: Any) -> bytes:
    """Return JSON as transformers writes config files. Lone surrogates, which UTF-8 cannot encode, are escaped."""
    try:
        return (json.dumps(data, indent=2, ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError:
        return (json.dumps(data, indent=2) + "\n").encode()


_MAX_NAME = 255
"""The maximum length of a file's name in bytes."""


def stated_name(path: Path) -> str:
    """Return the name of a folder that a small file such as `latest` contains.

    Raises:
        CheckpointError: the file cannot be read.
        UntrustedInput: the file is a link out of its folder. Links into the blobs of the hub's cache are allowed.
    """
    home, target = path.parent.resolve(), path.resolve()
    if not target.is_relative_to(home) and target.parent != home.parent.parent / "blobs":
        raise UntrustedInput(
            f"{path} is a link to a file outside of its folder", "Replace the link with the file itself."
        )
    with plain_file(path) as file:
        return file.read(_MAX_NAME + 1).decode("utf-8", "replace").strip()


def is_folder(path: Path) -> bool:
    """Return whether a folder exists; False for impossible names."""
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False
