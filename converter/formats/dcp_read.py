"""Find the tensors of a distributed checkpoint, which several processes saved in chunks.

In torch's own format, `.metadata` is a pickle that gives the place of every chunk in the .distcp files, and a chunk is
an archive of torch.save. The Hugging Face writer saves chunks in safetensors files, whose headers say where in a tensor
a chunk belongs. From `.metadata` and the headers, gptkit takes only names, sizes and file positions. Confined processes
read the pickles, and every number is checked against the files before anything is allocated.

gptkit does not read with torch.distributed.checkpoint, because its reader runs code in `.metadata`. torch's
weights-only reader does not know this pickle protocol (tests/converter/test_dcp.py,
test_torchs_own_reader_runs_what_metadata_says).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...errors import CheckpointError, UntrustedInput, shown
from ..chunks import Chunk, Chunked, filling
from ..names import is_plain
from ..pickles import Unpickler
from ..safetensors import MAX_DIMS, parse_json_object, read_header
from ..weights import Stored

_HINT = "Do not use this checkpoint: the file is damaged, or somebody has manipulated it."
_AGAIN = "Download or save the checkpoint again, with all its files."
_SHARDING = "DCP_SHARDING_INFO"


def metadata(folder: Path) -> tuple[dict[str, Chunked], list[str]]:
    """Return the tensors that a folder's `.metadata` lists, by name, and the names of its other entries.

    The place of a chunk is still that of its whole archive. `located` finds the data inside the archive.
    """
    path = folder / ".metadata"
    entries, others = Unpickler().ask(path, str(path), str(path.absolute()), "data")
    sizes: dict[str, int] = {}  # by the names of the files
    tensors: dict[str, Chunked] = {}
    for name, dtype, shape, boxes in entries:
        chunks = [
            Chunk(tuple(offsets), Stored(_checked(folder, file, at + nbytes, sizes), dtype, tuple(whole), at, nbytes))
            for offsets, whole, file, at, nbytes in boxes
        ]
        tensors[name] = Chunked(dtype, tuple(shape), filling(f"{path}: {shown(name, 80)}", tuple(shape), chunks, _HINT))
    return tensors, others


def _checked(folder: Path, name: str, end: int, sizes: dict[str, int]) -> Path:
    """Return the path of a file in the folder, after checking that it has at least `end` bytes.

    `sizes` caches the sizes of files in bytes. Raises UntrustedInput if `name` is not inside the folder, and
    CheckpointError if the file is missing or too short.
    """
    path = folder / name
    if name not in sizes:
        if not is_plain(name):
            raise UntrustedInput(f"{folder / '.metadata'} names a file outside of its folder: {shown(name, 80)}", _HINT)
        if not path.is_file():
            raise CheckpointError(
                f"{path} is missing", "Download or save the checkpoint again, with the files of all ranks."
            )
        sizes[name] = path.stat().st_size
    if end > sizes[name]:
        raise CheckpointError(
            f"{path} is truncated: {end:,} bytes expected, {sizes[name]:,} found",
            "Download or save the checkpoint again.",
        )
    return path


def located(tensors: Mapping[str, Chunked]) -> dict[str, Chunked]:
    """Return the same tensors, with the place of every chunk's data instead of the archive that contains the data.

    Raises CheckpointError.
    """
    process = Unpickler(parts=sum(len(tensor.chunks) for tensor in tensors.values()))
    return {
        name: tensor._replace(chunks=tuple(_located(name, chunk, process) for chunk in tensor.chunks))
        for name, tensor in tensors.items()
    }


def _located(name: str, chunk: Chunk, process: Unpickler) -> Chunk:
    stored = chunk.stored
    assert stored.path is not None
    where = f"{stored.path}: {shown(name, 80)}, at byte {stored.start:,},"
    inside = process.ask(stored.path, where, (str(stored.path.absolute()), stored.start, stored.nbytes), "data")
    if not isinstance(inside, Stored):
        raise CheckpointError(f"{where} is not a dense tensor with data (for example sparse or quantised)", _HINT)
    if (inside.dtype, inside.shape) != (stored.dtype, stored.shape):
        stated = f"but .metadata says {stored.dtype} of shape {list(stored.shape)}"
        raise CheckpointError(f"{where} is {inside.dtype} of shape {list(inside.shape)}, {stated}", _HINT)
    return Chunk(chunk.offsets, replace(inside, start=stored.start + inside.start))


def hugging_face(files: Sequence[Path]) -> dict[str, Chunked]:
    """Return the tensors whose chunks the Hugging Face writer saved in safetensors files. Raises CheckpointError."""
    boxes: dict[str, list[Chunk]] = {}
    for path in files:
        header = read_header(path)
        text = header.metadata.get(_SHARDING)
        sharding = {} if text is None else parse_json_object(text.encode(), f"{path}: {_SHARDING}")
        for name, info in header.tensors.items():
            entry, others = sharding.get(name), boxes.setdefault(name, [])
            offsets: Any = entry.get("saved_offsets") if isinstance(entry, dict) else None
            if not isinstance(offsets, list):
                offsets = [0] * len(info.shape)
            if len(offsets) > MAX_DIMS or any(type(offset) is not int or not 0 <= offset < 2**63 for offset in offsets):
                raise CheckpointError(
                    f"{path}: {shown(name, 80)} has invalid saved_offsets (its position in the whole tensor)", _HINT
                )
            if len(offsets) != len(info.shape) or (others and others[0].stored.dtype != info.dtype):
                what = "its dtype or number of dimensions differs between files"
                raise CheckpointError(f"{path}: {shown(name, 80)}: {what}", _HINT)
            others.append(Chunk(tuple(offsets), Stored(path, info.dtype, info.shape, info.start, info.nbytes)))
    tensors: dict[str, Chunked] = {}
    for name, chunks in boxes.items():
        ends = [[o + s for o, s in zip(offsets, stored.shape, strict=True)] for offsets, stored in chunks]
        shape = tuple(map(max, *ends)) if len(ends) > 1 else tuple(ends[0])  # the headers do not have the shape
        full = filling(f"{files[0].parent}: {shown(name, 80)}", shape, chunks, _AGAIN)
        tensors[name] = Chunked(chunks[0].stored.dtype, shape, full)
    return tensors
