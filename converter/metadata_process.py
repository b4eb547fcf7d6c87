"""What `.metadata` of a distributed checkpoint says, read without torch: a worker of `confinement`, which
`formats.dcp_read` asks. It is a pickle of torch's own objects, of which names, numbers and places alone are taken.
"""

from __future__ import annotations

import io
import os
from typing import Any

from .confinement import MEMORY, allow
from .pickle_process import KNOWN, MAX_DIMS, MAX_INTEGER, Known, Reader, RefusedError, load
from .pickle_process import reason as reason

MAX_BYTES = 2**28  # A thousand tensors in a thousand chunks each take a third of it
COSTS = (MEMORY, 32, 3.0, 1 / 2**20)


class Stand:
    """What stands for an object of one of torch's classes: the state it was pickled with."""

    state: Any = None

    def __init__(self, *args: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, name: str) -> Any:
        return self.state.get(name) if isinstance(self.state, dict) else None


METADATA = "torch.distributed.checkpoint.metadata"
CLASSES = {
    METADATA: (
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "MetadataIndex",
        "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed._shard.sharded_tensor.metadata": ("TensorProperties", "MEM_FORMAT_ENCODING"),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "pathlib": ("PosixPath", "WindowsPath"),
    "pathlib._local": ("PosixPath", "WindowsPath"),
}  # fmt: skip
NAMES = {**KNOWN, **{(path, name): type(name, (Stand,), {}) for path, names in CLASSES.items() for name in names}}
"""Every name that may stand in .metadata, and what stands for it here."""


def answer(path: str) -> Any:
    """The tensors, each [name, element type, shape, chunks], and the names of what is beside. Raises RefusedError."""
    with open(path, "rb") as file:  # noqa: PTH123, as few imports as can be
        size = os.fstat(file.fileno()).st_size
        if size > MAX_BYTES:
            raise RefusedError(f"has more than {MAX_BYTES:,} bytes")
        allow(size, COSTS)
        metadata = load(Reader(io.BytesIO(file.read(size)), names=NAMES))
    try:
        return _entries(metadata)
    except RefusedError as error:
        raise RefusedError(f": {error}") from error


def _is(value: Any, name: str) -> bool:
    return isinstance(value, Stand) and type(value).__name__ == name


def _entries(metadata: Any) -> list[list[Any]]:
    if not _is(metadata, "Metadata"):
        raise RefusedError("it holds no metadata of torch.distributed.checkpoint")
    entries, places = metadata.get("state_dict_metadata"), metadata.get("storage_data")
    if not isinstance(entries, dict) or not isinstance(places, dict):
        raise RefusedError("its tensors or their places are missing")
    at: dict[tuple[str, tuple[int, ...]], Any] = {}
    for index, place in places.items():
        if not _is(index, "MetadataIndex") or not _is(place, "_StorageInfo"):
            raise RefusedError("the place of something is not told as torch tells it")
        name, offset = index.get("fqn"), index.get("offset")
        if isinstance(name, str) and offset is not None:
            at[name, tuple(_sizes(offset))] = place
    tensors: list[Any] = []
    others: list[Any] = []
    for name, entry in entries.items():
        if not isinstance(name, str):
            raise RefusedError("a name is not text")
        if _is(entry, "BytesStorageMetadata"):
            others.append(name)
            continue
        if not _is(entry, "TensorStorageMetadata"):
            raise RefusedError(f"{name!r:.80} is neither a tensor nor an object")
        properties, boxes = entry.get("properties"), entry.get("chunks")
        state = properties.state if _is(properties, "TensorProperties") else None
        kind = state.get("dtype") if isinstance(state, dict) else state[0] if isinstance(state, tuple) and state else 0
        if not isinstance(kind, Known) or not kind.element or not isinstance(boxes, list):
            raise RefusedError(f"{name!r:.80} has no dtype or no chunks")
        chunks = [_chunk(name, box, at) for box in boxes]
        tensors.append([name, kind.element, _sizes(entry.get("size")), chunks])
    return [tensors, others]


def _chunk(name: str, box: Any, at: dict[tuple[str, tuple[int, ...]], Any]) -> list[Any]:
    if not _is(box, "ChunkStorageMetadata"):
        raise RefusedError(f"{name!r:.80} has a chunk that is none")
    offsets, sizes = _sizes(box.get("offsets")), _sizes(box.get("sizes"))
    place = at.get((name, tuple(offsets)))
    if place is None:
        raise RefusedError(f"{name!r:.80}: nothing says where its chunk at {offsets} lies")
    if transforms := place.get("transform_descriptors"):
        raise RefusedError(f"{name!r:.80} was written through an extension ({transforms})")
    file, start, nbytes = place.get("relative_path"), place.get("offset"), place.get("length")
    if not isinstance(file, str) or type(start) is not int or type(nbytes) is not int or min(start, nbytes) < 0:
        raise RefusedError("the place of a chunk is no place")
    return [offsets, sizes, file, start, nbytes]


def _sizes(value: Any) -> list[int]:
    sizes = list(value) if isinstance(value, list | tuple) and len(value) <= MAX_DIMS else [-1]
    if any(type(number) is not int or not 0 <= number < MAX_INTEGER for number in sizes):
        raise RefusedError("sizes that are no sizes")
    return sizes
