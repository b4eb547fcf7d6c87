"""Read weights in files that torch.save wrote, such as pytorch_model.bin. They contain pickles.

Callers must ask the user first whether the files are trusted. A separate process (`pickle_process`) reads the pickle
and returns the name, dtype, shape and place of every tensor. All of these are checked against the file before they are
used. The tensors themselves are memory-mapped, without torch.
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
_PART = 0.1  # additional seconds for every part of a file that is read
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
"""The first bytes of a file in another format -> the name of the format, and a hint for the user."""


@dataclass(frozen=True, slots=True)
class Unplain:
    """A stand-in for an object in a pickle that is neither plain data nor a plain tensor."""

    name: str  # its class, or the function that would make it


@dataclass(frozen=True, slots=True)
class PickledShard:
    """A rank's part of a tensor (a DTensor)."""

    local: Stored  # the place of the part in the file
    shape: tuple[int, ...]  # the shape of the whole tensor
    placements: tuple[int | None, ...]  # see `pickle_process._Shard`
    coordinate: tuple[int, ...] | None  # the rank's position in the device mesh, if the file has it


def pickle_weights(files: Sequence[Path]) -> Weights:
    """Return the tensors in files that each contain a pickled state dict. Raises CheckpointError."""
    tensors: dict[str, Stored] = {}
    for path, state in zip(files, unpickled(files), strict=True):
        for name, tensor in named_tensors(path, state):
            if name in tensors:
                raise CheckpointError(f"the tensor {shown(name, 80)} is in {tensors[name].path} and in {path}")
            tensors[name] = tensor
    weights = Weights(tensors)
    weights.check()
    return weights


def named_tensors(path: Path, state: Any) -> Iterator[tuple[str, Stored]]:
    """Yield the names and places of the tensors in a state dict, which was read from `path`.

    Raises CheckpointError if it contains anything else.
    """
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
    """Yield the content of every file: plain data, with `Stored` for tensors and `Unplain` for other objects.

    Raises CheckpointError.
    """
    for path in files:
        refuse_pointer(path)
        _refuse_other(path)
    process = Unpickler()
    for path in files:
        yield process.ask(path, str(path), (str(path.absolute()), 0, None))


def arrays(path: Path) -> dict[str, Stored]:
    """Return the places of the arrays in an .npz file, by name. Raises CheckpointError if it contains other objects."""
    refuse_pointer(path)
    _refuse_other(path)
    tensors: dict[str, Stored] = Unpickler(hint=_ARRAYS_HINT).ask(path, str(path), (str(path.absolute()),), "arrays")
    return tensors


def _refuse_other(path: Path) -> None:
    """Raise CheckpointError with a hint if the first bytes of a file are those of another known format."""
    with plain_file(path) as file:
        head = file.read(12)
    known = next((description for begins, description in _OTHER.items() if head.startswith(begins)), None)
    if known is None and head[8:9] == b"{":
        known = "a safetensors file by another name", "Give it a name that ends in .safetensors."
    if known is not None:
        raise CheckpointError(f"{path} is {known[0]}", known[1])


class Unpickler:
    """A separate process that reads pickles. If it dies, a new one is started."""

    def __init__(self, parts: int = 0, hint: str = _HINT) -> None:
        """Prepare the process, which starts with the first question.

        Args:
            parts: the number of questions about parts of files that will be asked. The time limit grows with it.
            hint: the hint of errors about files that cannot be read.
        """
        self._hint = hint
        self._seconds = _TIMEOUT + _PART * parts
        self._process: Confined | None = None

    def ask(self, path: Path, where: str, question: Any, what: str = "weights") -> Any:
        """Ask the process about a file, and return its answer, in which tensors are `Stored`. Raises CheckpointError.

        Args:
            path: the path of the file.
            where: the beginning of error messages.
            question: the question; see `pickle_process.answer`.
            what: what the file should contain, for error messages.
        """
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
        return PickledShard(local, tuple(shape), tuple(placements), None if coordinate is None else tuple(coordinate))
    return Unplain(content) if kind == "other" else answer


_SHOWN = 3  # tensors named, and twice as many other entries
_DEPTH = 3
_OTHERS = {
    "litgpt": "`litgpt convert_from_litgpt` writes the family's own."
}  # the way on from names that no family has


def not_as_it_is(path: Path, content: Any) -> CheckpointError:
    """Return the error for a file whose content is not just a state dict. It says what the file contains."""
    none: tuple[tuple[str, ...], dict[str, Stored], int] = ((), {}, 0)
    where, tensors, entries = max(_dictionaries(content, ()), key=lambda state: len(state[1]), default=none)
    entries_text = _entries(content, (*tensors, *where[:1]))
    if not tensors:
        return CheckpointError(
            f"{path} contains a {_kind(content)}, not a dictionary of tensors{entries_text and ': ' + entries_text}"
        )
    some = ", ".join(f"{_shown(name)} {list(tensor.shape)}" for name, tensor in list(tensors.items())[:_SHOWN])
    keys = "".join(f"[{_shown(key)!r}]" for key in where)
    count = f"{len(tensors)} tensor{'s' if len(tensors) > 1 else ''}"
    message = f"{path} contains {count}{keys and ' in ' + keys}: {some}{', …' if len(tensors) > _SHOWN else ''}"
    message += entries_text and f"; it also contains {entries_text}"
    match = whose(list(tensors))
    if match is None:
        return CheckpointError(message, "The names of the tensors are not those of any family that gptkit supports.")
    owner, prefix = match
    only = len(tensors) < entries
    message += f"; {_names_of(owner, prefix)}"
    return CheckpointError(message, _OTHERS.get(owner) or _way_on(keys, prefix, only))


def renamed(names: Sequence[str]) -> str | None:
    """Return a hint for the user that says which model family uses these tensor names, or None if no family does."""
    match = whose(names)
    if match is None:
        return None
    owner, prefix = match
    prefix_hint = f" Save the tensors without the prefix {prefix!r}." if prefix else ""
    return f"T{_names_of(owner, prefix)[1:]}.{f' {_OTHERS[owner]}' if owner in _OTHERS else prefix_hint}"


def _names_of(owner: str, prefix: str) -> str:
    return f"the tensor names are those of {owner}" + (f", with the prefix {prefix!r}" if prefix else "")


def _way_on(keys: str, prefix: str, only: bool) -> str:
    """Return a hint for the user: the Python code that saves only the tensors, under the family's names.

    Args:
        keys: the keys that lead to the state dict in the file, as text: "['model']".
        prefix: the prefix to remove from the tensor names.
        only: whether the state dict also contains other objects, which must be left out.
    """
    state = f"torch.load(FILE){keys}"
    if prefix or only:
        name = f"k.removeprefix({prefix!r})" if prefix else "k"
        state = f"{{{name}: v for k, v in {state}.items(){' if torch.is_tensor(v)' if only else ''}}}"
    if state == "torch.load(FILE)":
        return "Put the model's config.json into the same folder, and name the folder."
    return f"Save only the tensors, next to the model's config.json: torch.save({state}, 'pytorch_model.bin')"


def _dictionaries(value: Any, where: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], dict[str, Stored], int]]:
    """Yield `value`, if it is a dictionary, and the dictionaries nested in it.

    A dictionary is given by the keys that lead to it from the content of the file, its tensors by name, and the number
    of its entries. `where` has the keys that lead to `value`.
    """
    if not isinstance(value, dict) or len(where) > _DEPTH:
        return
    named = {key: item for key, item in value.items() if isinstance(key, str)}
    yield where, {key: item for key, item in named.items() if isinstance(item, Stored)}, len(value)
    for key, item in named.items():
        yield from _dictionaries(item, (*where, key))


def _entries(content: Any, without: Collection[str]) -> str:
    """Describe a dictionary in words: the first keys with the kinds of their values. Keys in `without` are left out."""
    kinds = [(key, value) for key, value in content.items() if key not in without] if isinstance(content, dict) else []
    shown = [(key.name if isinstance(key, Unplain) else str(key), _kind(value)) for key, value in kinds[: 2 * _SHOWN]]
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
    """Shorten untrusted text for a terminal, and escape its control characters."""
    short = text if len(text) <= 60 else text[:59] + "…"
    return short if short.isprintable() else ascii(short)[1:-1]
