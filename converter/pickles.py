"""Weights in torch's pickled files (pytorch_model.bin, ckpt.pt), read only where the caller said that they are trusted.

A process of its own (`pickle_process`) says their names, dtypes, shapes and places, of which nothing is believed before
it is held against the file. Tensors are read from where they lie, memory-mapped, without torch, and copied by the
kernel where they are contiguous.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any

from ..architectures.namings import whose
from ..errors import CheckpointError, shown
from .confinement import Confined
from .names import plain_file, refuse_pointer
from .weights import Stored, Weights

_TIMEOUT = 120.0  # seconds for all files of a checkpoint; a real one takes a fraction of one
_PART = 0.1  # seconds more for every part of a file that is looked into
_HINT = "Do not use this file: it is damaged, or contains more than tensors."
_ARRAYS_HINT = "Save its arrays again with numpy.savez, as numbers in the dtypes of safetensors."
_OTHER = {
    b"\x89HDF": ("an HDF5 file, as Keras writes them", "Load it with the program that wrote it, and save safetensors."),
    b"GGUF": ("a GGUF file", "Give it a name that ends in .gguf."),
    b"\x1f\x8b": ("a gzip archive", "Unpack it first."),
    b"(\xb5/\xfd": ("a zstandard archive", "Unpack it first."),
    b"\x93NUMPY": ("a single array of numpy", "Save all tensors together with numpy.savez, or as safetensors."),
    b"<": ("a text in HTML or XML, as a server sends it in place of a file", "Download the file again."),
}
"""Formats that other programs write, by how their files begin: what such a file is, and what to do."""


@dataclass(frozen=True, slots=True)
class Unplain:
    """Something in a file that is neither plain data nor a plain tensor."""

    name: str


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's part of a tensor, as `pickle_process._Shard`."""

    local: Stored
    shape: tuple[int, ...]
    placements: tuple[int | None, ...]
    coordinate: tuple[int, ...] | None


def pickle_weights(files: Sequence[Path]) -> Weights:
    """The tensors of one or several pickled state dictionaries."""
    found: dict[str, Stored] = {}
    for path, state in zip(files, unpickled(files), strict=True):
        for name, tensor in named_tensors(path, state):
            if name in found:
                raise CheckpointError(f"{shown(name, 80)} is in two files")
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
            raise CheckpointError(
                f"{path}: {shown(name, 80)} is not a plain tensor (sparse, quantised or without data)"
            )
        if not isinstance(name, str) or not isinstance(tensor, Stored):
            raise not_as_it_is(path, state)
        yield name, tensor


def unpickled(files: Sequence[Path]) -> Iterator[Any]:
    """What the files hold, in their order: plain data, with `Stored` for tensors and `Unplain` for anything else."""
    for path in files:
        refuse_pointer(path)
        _refuse_other(path)
    process = Unpickler()
    for path in files:
        yield process.ask(path, str(path), (str(path.absolute()), 0, None))


def arrays(path: Path) -> dict[str, Stored]:
    """The arrays of an .npz file, which holds no pickle. Raises CheckpointError."""
    refuse_pointer(path)
    _refuse_other(path)
    found: dict[str, Stored] = Unpickler(hint=_ARRAYS_HINT).ask(path, str(path), (str(path.absolute()),), "arrays")
    return found


def _refuse_other(path: Path) -> None:
    """Raise CheckpointError where a file is of another format: it is not damaged, and nothing here reads it."""
    with plain_file(path) as file:
        head = file.read(12)
    found = next((told for begins, told in _OTHER.items() if head.startswith(begins)), None)
    if found is None and head[8:9] == b"{":
        found = "a safetensors file by another name", "Give it a name that ends in .safetensors."
    if found is not None:
        raise CheckpointError(f"{path} is {found[0]}", found[1])


class Unpickler:
    """A process that reads pickles, another one where one has died; `parts` is how often a part of a file is asked.
    `hint` is what to do with a file that cannot be read.
    """

    def __init__(self, parts: int = 0, hint: str = _HINT) -> None:
        self._hint = hint
        self._seconds = _TIMEOUT + _PART * parts
        self._process: Confined | None = None

    def ask(self, path: Path, where: str, question: Any, what: str = "weights") -> Any:
        """What it answers of a file, tensors as `Stored` in it. Raises CheckpointError, which begins with `where`."""
        try:
            self._process = self._process or Confined("pickle_process", self._seconds)
        except OSError as error:
            raise CheckpointError(f"cannot start the process that reads {path}: {error}") from error
        answer = self._process.ask(question, partial(_value, path))
        if answer is None:
            self._process = None
            raise CheckpointError(
                f"{where} cannot be read: the process that reads it crashed or took too long", self._hint
            )
        if "answer" in answer:
            return answer["answer"]
        reason = "".join(sign if sign.isprintable() else " " for sign in answer["error"])
        if reason.startswith(":"):
            raise CheckpointError(f"{where}{reason}", self._hint)
        if reason.split(" ")[0] not in ("is", "has", "contains", "claims", "does", "was", "needs", "cannot"):
            reason = f"cannot be read as plain {what}: {reason}"
        raise CheckpointError(f"{where} {reason}", self._hint)


def _value(path: Path, answer: dict[str, Any]) -> Any:
    ((kind, content),) = answer.items()
    if kind == "dict":
        plain = (str, int, float, NoneType)
        return {key if isinstance(key, plain) else Unplain("key"): value for key, value in content}
    if kind == "list":
        return content
    if kind == "tensor":
        dtype, shape, strides, offset, start, nbytes = content
        return Stored(path, dtype, tuple(shape), start, nbytes, tuple(strides), offset)
    if kind == "shard":
        local, shape, placements, coordinate = content
        return Shard(local, tuple(shape), tuple(placements), None if coordinate is None else tuple(coordinate))
    return Unplain(content) if kind == "other" else answer


_SHOWN = 3  # tensors named, and twice as many other entries
_DEPTH = 3
_OTHERS = {
    "litgpt": "`litgpt convert_from_litgpt` writes the family's own."
}  # the way on from names that no family has


def not_as_it_is(path: Path, content: Any) -> CheckpointError:
    """The error for a file that holds something else than tensors by name alone, to be raised by the caller."""
    none: tuple[tuple[str, ...], dict[str, Stored], int] = ((), {}, 0)
    where, tensors, entries = max(_dictionaries(content, ()), key=lambda each: len(each[1]), default=none)
    beside = _entries(content, (*tensors, *where[:1]))
    if not tensors:
        return CheckpointError(
            f"{path} contains a {_kind(content)}, not a dictionary of tensors{beside and ': ' + beside}"
        )
    some = ", ".join(f"{_shown(name)} {list(each.shape)}" for name, each in list(tensors.items())[:_SHOWN])
    keys = "".join(f"[{_shown(key)!r}]" for key in where)
    count = f"{len(tensors)} tensor{'s' if len(tensors) > 1 else ''}"
    told = f"{path} contains {count}{keys and ' in ' + keys}: {some}{', …' if len(tensors) > _SHOWN else ''}"
    told += beside and f"; it also contains {beside}"
    found = whose(list(tensors))
    if found is None:
        return CheckpointError(told, "Their names do not match any family that gptkit supports.")
    owner, prefix = found
    only = len(tensors) < entries
    return CheckpointError(f"{told}; {_names_of(owner, prefix)}", _OTHERS.get(owner) or _way_on(keys, prefix, only))


def renamed(names: Sequence[str]) -> str | None:
    """Whose names these are and the way on, of tensors that have no place in a model; None where nobody's."""
    found = whose(names)
    if found is None:
        return None
    owner, prefix = found
    behind = f" Save the tensors without the prefix {prefix!r}." if prefix else ""
    return f"T{_names_of(owner, prefix)[1:]}.{f' {_OTHERS[owner]}' if owner in _OTHERS else behind}"


def _names_of(owner: str, prefix: str) -> str:
    return f"the tensor names are those of {owner}" + (f", with the prefix {prefix!r}" if prefix else "")


def _way_on(keys: str, prefix: str, only: bool) -> str:
    """How a file is made that holds the tensors alone, under the family's names."""
    state = f"torch.load(FILE){keys}"
    if prefix or only:
        name = f"k.removeprefix({prefix!r})" if prefix else "k"
        state = f"{{{name}: v for k, v in {state}.items(){' if torch.is_tensor(v)' if only else ''}}}"
    if state == "torch.load(FILE)":
        return "Put the model's config.json into the same folder, and name the folder."
    return f"Save only the tensors, next to the model's config.json: torch.save({state}, 'pytorch_model.bin')"


def _dictionaries(value: Any, where: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], dict[str, Stored], int]]:
    """A dictionary and those within it: the keys that lead to each, its tensors, and how many entries it has."""
    if not isinstance(value, dict) or len(where) > _DEPTH:
        return
    named = {key: each for key, each in value.items() if isinstance(key, str)}
    yield where, {key: each for key, each in named.items() if isinstance(each, Stored)}, len(value)
    for key, each in named.items():
        yield from _dictionaries(each, (*where, key))


def _entries(content: Any, without: Collection[str]) -> str:
    """A dictionary's keys but for some, with what stands there."""
    kinds = [(key, each) for key, each in content.items() if key not in without] if isinstance(content, dict) else []
    shown = [(key.name if isinstance(key, Unplain) else str(key), _kind(each)) for key, each in kinds[: 2 * _SHOWN]]
    return ", ".join([f"{_shown(key)} ({kind})" for key, kind in shown] + ["…"] * (len(kinds) > 2 * _SHOWN))


def _kind(value: Any) -> str:
    if isinstance(value, Stored):
        return f"Tensor of {list(value.shape)}"
    if isinstance(value, Unplain):
        return _shown(value.name)
    if isinstance(value, dict | list):
        return f"{type(value).__name__} of {len(value)}"
    return "None" if value is None else type(value).__name__


def _shown(text: str) -> str:
    """Somebody else's text on a terminal: its control characters are escaped, and it is short."""
    short = text if len(text) <= 60 else text[:59] + "…"
    return short if short.isprintable() else ascii(short)[1:-1]
