"""Weights in torch's pickled files (pytorch_model.bin, ckpt.pt), read only where the caller said that they are trusted.

A pickle runs code, lies about sizes, and can take any memory on the way. So it is read in a process of its own
(`pickle_process`), with a memory limit, that runs nothing of it and hands back names, dtypes, shapes and places;
nothing of that is believed here before it is held against the file. torch.save stores tensors as they are: they are
read from where they lie, memory-mapped, without torch, and copied by the kernel where they are contiguous.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any

from ..errors import CheckpointError
from .confinement import command
from .contents import Unplain, not_as_it_is
from .names import refuse_pointer
from .weights import Stored, Weights

TIMEOUT = 120.0
"""Seconds for all files of a checkpoint; a real one takes a fraction of one."""
HINT = "Do not use this file: it is damaged, or holds more than tensors."


def pickle_weights(files: Sequence[Path]) -> Weights:
    """The tensors of one or several pickled state dictionaries.

    Raises CheckpointError for a file that is not one of tensors by name, or claims more than it has.
    """
    found: dict[str, Stored] = {}
    for path, state in zip(files, unpickled(files), strict=True):
        for name, tensor in named_tensors(path, state):
            if name in found:
                raise CheckpointError(f"{name!r:.80} is in two of the files")
            found[name] = tensor
    weights = Weights(found)
    weights.check()
    return weights


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
        for line in _ask(left):
            path = left.pop(0)
            answer = json.loads(line, object_hook=partial(_value, path))
            if "value" in answer:
                yield answer["value"]
                continue
            told = "".join(sign if sign.isprintable() else " " for sign in answer["error"])
            if told.split(" ")[0] not in ("is", "has", "holds", "claims", "was", "needs", "cannot"):
                told = f"cannot be read as plain weights: {told}"
            yield CheckpointError(f"{path} {told}", HINT)
        if left:
            path = left.pop(0)
            yield CheckpointError(f"{path} cannot be read: what unpickles it died, or took too long", HINT)


def _ask(files: Sequence[Path]) -> list[bytes]:
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
    return [line for line in told.splitlines(keepends=True) if line.endswith(b"\n")]


def _value(path: Path, answer: dict[str, Any]) -> Any:
    """What an object of an answer stands for."""
    ((kind, content),) = answer.items()
    if kind == "dict":
        plain = (str, int, float, NoneType)
        return {key if isinstance(key, plain) else Unplain("key"): value for key, value in content}
    if kind == "list":
        return content
    if kind == "tensor":
        dtype, shape, strides, offset, start, nbytes = content
        return Stored(path, dtype, tuple(shape), start, nbytes, tuple(strides), offset)
    return Unplain(content) if kind == "other" else answer
