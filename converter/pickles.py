"""Weights in torch's pickled files (pytorch_model.bin, ckpt.pt), read only where the caller said that they are trusted.

A pickle runs code, lies about sizes, and can take any memory on the way. So it is read in a process of its own
(`pickle_process`), with a memory limit, that runs nothing of it and hands back names, dtypes, shapes and places;
nothing of that is believed here before it is held against the file. torch.save stores tensors as they are: they are
read from where they lie, memory-mapped, without torch, and copied by the kernel where they are contiguous.
"""

from __future__ import annotations

import json
import mmap
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import CheckpointError
from .confinement import command
from .contents import Stored, Unplain, not_as_it_is
from .names import refuse_pointer
from .safetensors import DTYPES

__all__ = ["PickleWeights", "StoredWeights", "answers", "named_tensors", "unpickled"]

TIMEOUT = 120.0
"""Seconds for all files of a checkpoint; a real one takes a fraction of one."""
HINT = "Do not use this file: it is damaged, or holds more than tensors."


class StoredWeights:
    """Tensors of files by name, read from where they lie."""

    def __init__(self, tensors: Mapping[str, Stored]) -> None:
        """Raises CheckpointError for one that claims more than its file has."""
        self._tensors = dict(tensors)
        self._maps: dict[Path, mmap.mmap] = {}
        self.info = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            self._check(name, tensor)

    def _check(self, name: str, tensor: Stored) -> None:
        where = f"{tensor.path}: {name!r:.80}"
        if tensor.count * tensor.itemsize > tensor.nbytes:
            raise CheckpointError(f"{where} claims {tensor.count:,} elements that are not in the file")
        if tensor.count and (tensor.offset + tensor.reach) * tensor.itemsize > tensor.nbytes:
            raise CheckpointError(f"{where} reaches beyond the bytes that are its")
        if tensor.start + tensor.nbytes > len(self._mapped(tensor.path)):
            raise CheckpointError(f"{where} lies beyond the end of the file")

    def _mapped(self, path: Path) -> mmap.mmap:
        if path not in self._maps:
            try:
                with path.open("rb") as file:
                    self._maps[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except (OSError, ValueError) as error:
                raise CheckpointError(f"cannot map {path}: {error}") from error
        return self._maps[path]

    def span(self, name: str) -> tuple[Path, int] | None:
        """The file and where the tensor begins in it; None for one whose elements lie in another order."""
        tensor = self._tensors[name]
        return (tensor.path, tensor.place) if tensor.contiguous else None

    def read(self, name: str) -> np.ndarray:
        """The tensor in its carrier dtype (bf16 as uint16): a read-only view of the file, copied if not contiguous."""
        tensor = self._tensors[name]
        carrier = DTYPES[tensor.dtype].carrier
        if not tensor.count:
            return np.empty(tensor.shape, carrier)
        flat = np.frombuffer(self._maps[tensor.path], carrier, tensor.reach, tensor.place)
        flat.flags.writeable = False
        if tensor.contiguous:
            return flat.reshape(tensor.shape)
        strides = [stride * tensor.itemsize for stride in tensor.strides]
        return np.ascontiguousarray(np.lib.stride_tricks.as_strided(flat, tensor.shape, strides, writeable=False))

    def release(self) -> None:
        """Give the pages that were read back to the system; views stay valid and read them again."""
        for mapped in self._maps.values():
            if hasattr(mapped, "madvise"):
                mapped.madvise(mmap.MADV_DONTNEED)


class PickleWeights(StoredWeights):
    """The tensors of one or several pickled state dictionaries."""

    def __init__(self, files: Sequence[Path]) -> None:
        """Raises CheckpointError for a file that is not a torch archive of tensors by name, or claims more than it
        has.
        """
        found: dict[str, Stored] = {}
        for path, state in zip(files, unpickled(files), strict=True):
            for name, tensor in named_tensors(path, state):
                if name in found:
                    raise CheckpointError(f"{name!r:.80} is in two of the files")
                found[name] = tensor
        super().__init__(found)


def named_tensors(path: Path, state: Any) -> Iterator[tuple[str, Stored]]:
    """The tensors of a state dictionary. Raises CheckpointError where it holds anything else."""
    if not isinstance(state, dict):
        raise not_as_it_is(path, state)
    for name, tensor in state.items():
        if isinstance(name, str) and isinstance(tensor, Unplain) and tensor.name.startswith("_rebuild"):
            raise CheckpointError(f"{path}: {name!r:.80} is not a plain tensor (sparse, quantised or without data)")
        if not isinstance(name, str) or not isinstance(tensor, Stored):
            raise not_as_it_is(path, state)
        yield name, tensor


def unpickled(files: Sequence[Path]) -> Iterator[Any]:
    """What the files hold, in their order: plain data, with `Stored` for tensors and `Unplain` for anything else.

    Raises CheckpointError where `answers` has one, after what came before it.
    """
    for answer in answers(files):
        if isinstance(answer, CheckpointError):
            raise answer
        yield answer


def answers(files: Sequence[Path]) -> Iterator[Any]:
    """As `unpickled`, with a CheckpointError in the place of a file that is not an archive of torch.save, is damaged,
    asks for code, or takes more memory or time than a checkpoint's names can.
    """
    left = list(files)
    for path in left:
        refuse_pointer(path)
    while left:
        lines = _ask(left)
        for line in lines:
            path = left.pop(0)
            yield _value(path, line["value"]) if "value" in line else _refusal(path, str(line["error"]))
        if left:
            path = left.pop(0)
            yield CheckpointError(f"{path} cannot be read: what unpickles it died, or took too long", HINT)


def _refusal(path: Path, reason: str) -> CheckpointError:
    told = "".join(sign if sign.isprintable() else " " for sign in reason)
    if told.split(" ")[0] not in ("is", "has", "holds", "claims", "was", "needs", "cannot"):
        told = f"cannot be read as plain weights: {told}"
    return CheckpointError(f"{path} {told}", HINT)


def _ask(files: Sequence[Path]) -> list[dict[str, Any]]:
    """The answers of a new process, as many as it gave."""
    paths = json.dumps([str(path.absolute()) for path in files])
    pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
    try:
        asked = command("pickle_process")
        with subprocess.Popen(asked, stdin=pipe, stdout=pipe, stderr=nothing, cwd=os.sep) as process:  # noqa: S603
            try:
                told, _ = process.communicate(paths.encode(), TIMEOUT)
            except subprocess.TimeoutExpired:
                process.kill()
                told, _ = process.communicate()
            except BaseException:
                process.kill()
                raise
    except OSError as error:
        raise CheckpointError(f"cannot start a process that unpickles {files[0]}: {error}") from error
    # A line that does not end is what it died over.
    return [json.loads(line) for line in told.splitlines(keepends=True) if line.endswith(b"\n")]


def _value(path: Path, value: Any) -> Any:
    """An answer's value as it was."""
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "dict":
        return {Unplain("key") if isinstance(key, dict) else key: _value(path, item) for key, item in content}
    if kind == "list":
        return [_value(path, item) for item in content]
    if kind == "tensor":
        dtype, itemsize, shape, strides, offset, start, nbytes = content
        return Stored(path, dtype, itemsize, tuple(shape), tuple(strides), offset, start, nbytes)
    return Unplain(content)
