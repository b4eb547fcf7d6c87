"""Find the weight files of a checkpoint and the place of every tensor in them.

The weights are in a single file, or in several (shards) with an index that says which file has which tensor.
"""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np

from ..components.ranges import some_of
from ..errors import CheckpointError, InvalidInput, UntrustedInput
from .names import (
    ADAPTER_WEIGHTS,
    INDEX,
    PICKLE_INDEX,
    PICKLE_SINGLE,
    SINGLE,
    is_plain,
    listing,
    refuse_pointer,
    untrusted,
)
from .safetensors import DTYPES, Header, parse_weight_map, read_header

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
_MAX_INDEX = 32 * 2**20  # bytes; the index of a model of 10^12 parameters in 140,000 tensors has 13 MB
_MAX_SHARDS = 10_000
_MAX_HEADERS = 2 * _MAX_INDEX  # bytes, of all shards' headers together


@dataclass(frozen=True, slots=True)
class Stored:
    """The place and form in which a tensor is stored in a file."""

    path: Path | None  # None if the tensor is in no file; all of its elements are then zero
    dtype: str  # the dtype after reading, by its name in safetensors
    shape: tuple[int, ...]  # the shape after reading
    start: int = 0  # the offset in the file of the bytes that contain the elements
    nbytes: int = 0  # the number of these bytes
    strides: tuple[int, ...] | None = None  # in elements; None for a contiguous tensor
    offset: int = 0  # the position of the first element, counted in elements from `start`
    decode: Callable[[np.ndarray], np.ndarray] | None = None  # computes the tensor from the stored bytes
    kind: str = ""  # the type of the stored bytes, if they are quantised
    pieces: Callable[[int], Iterator[np.ndarray]] | None = None  # N -> pieces of whole rows, of about N bytes each

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype].itemsize if self.dtype in DTYPES else 16  # torch's C128, which no tensor may have

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def place(self) -> int:
        """Return the offset in the file, in bytes, of the first element."""
        return self.start + (self.offset * self.itemsize if self.offset else 0)

    @property
    def reach(self) -> int:
        """Return how many elements of the file the tensor spans. With strides, some of them belong to other tensors."""
        if self.strides is None or not self.count:
            return self.count
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))

    @property
    def contiguous(self) -> bool:
        """Return whether the elements follow one another in the file, in row-major order."""
        step = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides or ()), strict=False):
            if size != 1 and stride != step:
                return self.count == 0
            step *= size
        return True


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The weight files of a checkpoint, and what their headers say. For pickles, only the files are known."""

    format: Literal["safetensors", "pickle"]
    files: tuple[Path, ...]
    tensors: dict[str, Stored] = field(default_factory=dict)  # by name, in the order of their bytes
    headers: dict[str, str] = field(default_factory=dict)  # the text of every header, by file name
    index: str | None = None  # the text of the index; MLX writes one even for a single file


def weight_files(path: Path, allow_pickle: bool = False, names: frozenset[str] | None = None) -> WeightFiles:
    """Read the headers of the weight files in a folder, or of a single weight file.

    `names` are the names of the folder's files, if they are known. Raises UntrustedInput, CheckpointError.
    """
    try:
        listed_names = listing(path) if names is None else names
    except FileNotFoundError:
        raise InvalidInput(f"no such file or folder: {path}") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise InvalidInput(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    if listed_names is not None:
        return _folder(path, sorted(listed_names), allow_pickle)
    if path.name.endswith(".safetensors"):
        return single(path, read_header(path))
    if path.name.endswith(PICKLE_SUFFIXES):
        return _pickles([path], allow_pickle)
    raise InvalidInput(f"{path} is not a weight file", "Give a checkpoint's folder or a .safetensors file.")


def _folder(folder: Path, names: Sequence[str], allow_pickle: bool) -> WeightFiles:
    # The order of transformers (modeling_utils._get_resolved_checkpoint_files): one file wins over an index, and
    # safetensors over pickles. A folder that it and gptkit read differently would be verified against other weights.
    if SINGLE in names:
        files = single(folder / SINGLE, read_header(folder / SINGLE))
        return replace(files, index=index_of(folder, files)) if INDEX in names else files
    if INDEX in names:
        return _sharded(folder, names, read_index(folder / INDEX))
    safetensors_names = [name for name in names if name.endswith(".safetensors")]
    if safetensors_names == [ADAPTER_WEIGHTS]:
        raise CheckpointError(
            f"{folder} has only the weights of an adapter ({ADAPTER_WEIGHTS}), not of a model",
            f"Merge the adapter into its base model: gptkit swap BASE OUT --merge-lora {folder}",
        )
    if len(safetensors_names) == 1:
        return single(folder / safetensors_names[0], read_header(folder / safetensors_names[0]))
    if safetensors_names:
        raise CheckpointError(
            f"{folder} has {len(safetensors_names)} .safetensors files but no {INDEX}: {_listed(safetensors_names)}",
            f"Give one of these files instead of the folder, or put the {INDEX} of the model into the folder.",
        )
    if PICKLE_SINGLE in names:
        return _pickles([folder / PICKLE_SINGLE], allow_pickle)
    if PICKLE_INDEX in names:
        shards = sorted(set(read_index(folder / PICKLE_INDEX).values())) if allow_pickle else [PICKLE_INDEX]
        _require(folder, names, shards)
        return _pickles([folder / name for name in shards], allow_pickle)
    pickles = [name for name in names if name.endswith(PICKLE_SUFFIXES)]
    if pickles:
        return _pickles([folder / name for name in pickles], allow_pickle)
    raise CheckpointError(f"{folder} contains no weights: it has neither {SINGLE} nor {INDEX}")


def index_of(folder: Path, files: WeightFiles) -> str | None:
    """Return the text of the index next to a single weight file.

    Return None if there is no index, or if it does not list exactly the tensors of the file.
    """
    path = folder / INDEX
    try:
        return path.read_text("utf-8") if read_index(path) == dict.fromkeys(files.tensors, SINGLE) else None
    except (InvalidInput, OSError, ValueError):
        return None


def single(path: Path, header: Header) -> WeightFiles:
    """Return the weights in a single safetensors file, whose header was already read."""
    return _placed(path.parent, {path.name: header})


def _placed(folder: Path, headers: dict[str, Header], index: str | None = None) -> WeightFiles:
    tensors = {
        info.name: Stored(folder / name, info.dtype, info.shape, info.start, info.nbytes)
        for name, header in headers.items()
        for info in header.tensors.values()
    }
    texts = {name: header.text for name, header in headers.items()}
    return WeightFiles("safetensors", tuple(folder / name for name in headers), tensors, texts, index)


def _pickles(paths: Sequence[Path], allow_pickle: bool) -> WeightFiles:
    for path in paths:
        refuse_pointer(path)
    if not allow_pickle:
        raise untrusted(
            paths[0],
            "Use a safetensors version of this model, or pass --allow-pickle if you trust where it comes from.",
        )
    return WeightFiles("pickle", tuple(paths))


def read_index(path: Path) -> dict[str, str]:
    """Read the `weight_map` of an index: the name of a tensor -> the name of its file, in the same folder.

    Raises CheckpointError; UntrustedInput if it names other files.
    """
    try:
        size = path.stat().st_size
        raw = path.read_bytes() if size <= _MAX_INDEX else None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    if raw is None:
        raise CheckpointError(f"{path} has {size:,} bytes, too many for an index of weight files")
    mapping = parse_weight_map(str(path), raw)
    suffix = ".bin" if path.name == PICKLE_INDEX else ".safetensors"
    names = set(mapping.values())
    if len(names) > _MAX_SHARDS:
        raise CheckpointError(f"{path} names {len(names):,} weight files, but gptkit reads at most {_MAX_SHARDS:,}")
    for name in names:
        if not is_plain(name):
            raise UntrustedInput(
                f"{path} names a file outside of its folder: {name[:80]!r}",
                "Do not use this checkpoint: no program writes such an index.",
            )
        if not name.endswith(suffix):
            raise UntrustedInput(f"{path} names {name[:80]!r}, which is not a {suffix} file")
    return mapping


def _require(folder: Path, names: Collection[str], shards: Sequence[str]) -> None:
    missing = [name for name in shards if name not in names]
    if missing:
        raise CheckpointError(
            f"{folder}: {len(missing)} of {len(shards)} weight files are missing: {_listed(missing)}",
            "Download or copy the missing files again.",
        )


def _sharded(folder: Path, names: Collection[str], weight_map: dict[str, str]) -> WeightFiles:
    shards = sorted(set(weight_map.values()))
    _require(folder, names, shards)
    headers: dict[str, Header] = {}
    length = 0
    for name in shards:
        headers[name] = read_header(folder / name)
        length += len(headers[name].text)
        if length > _MAX_HEADERS:
            raise CheckpointError(
                f"{folder}: the headers of its weight files have over {_MAX_HEADERS:,} bytes together"
            )
    return assembled(folder, weight_map, headers)


def assembled(folder: Path, weight_map: dict[str, str], headers: dict[str, Header]) -> WeightFiles:
    """Return the weights in several safetensors files (shards), whose headers were already read.

    `weight_map` is that of the index. Raises CheckpointError unless it lists exactly the tensors in the files.
    """
    files_of: dict[str, list[str]] = {}
    for name, header in headers.items():
        for tensor in header.tensors:
            files_of.setdefault(tensor, []).append(name)
    twice = [f"{tensor} ({', '.join(names)})" for tensor, names in files_of.items() if len(names) > 1]
    unlisted = [f"{tensor} ({names[0]})" for tensor, names in files_of.items() if tensor not in weight_map]
    absent = [f"{tensor} ({name})" for tensor, name in weight_map.items() if tensor not in headers[name].tensors]
    for problem, tensors in (
        ("in more than one shard", twice),
        ("in a shard but not in the index", unlisted),
        ("in the index but not in the shard it names", absent),
    ):
        if tensors:
            raise CheckpointError(f"{folder}: {len(tensors)} tensors {problem}: {_listed(tensors)}")
    return _placed(folder, dict(sorted(headers.items())), (folder / INDEX).read_text("utf-8"))


def _listed(names: Sequence[str]) -> str:
    """Return a text with at most 10 of the names, and the number of the others."""
    # Names are someone else's text: control characters must not reach the terminal.
    return some_of([name if name.isprintable() else repr(name) for name in names], 10, ", and {} more")
