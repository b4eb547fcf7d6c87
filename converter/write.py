"""Plan the files of a conversion from shapes alone, and write them.

`plan` decides the files, and the dtype and byte position of every tensor in them, without reading a weight. Then the
module `transfer` writes the tensors of a checkpoint into the planned files, or `execute` writes tensors that are
computed, as in a swap. If a tensor of a file consists of several computed ones, `execute` keeps these in memory until
all of them are there.
"""

import hashlib
import json
import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from ..architectures import BoundLeaf
from ..errors import CheckpointError
from ..version import __version__
from .block_file import BlockFile, FileBlock
from .companions import Companion
from .dtypes import cast, widest
from .files import copy_file, write_bytes
from .manifest import FileRecord
from .names import INDEX, is_plain
from .publish import Staging
from .safetensors import DTYPES, build_header, parse_header

DEFAULT_SHARD_BYTES = 5 * 10**9
_METADATA = {"format": "pt"}  # what save_pretrained writes, and transformers asks for

Encode = Callable[[np.ndarray, str], np.ndarray]
"""(rows of a tensor, their dtype) -> the bytes to store. bf16 rows have the numpy dtype uint16."""
_Decode = Callable[[np.ndarray, np.ndarray, str], np.ndarray]
"""(stored bytes, the rows before encoding, the dtype of these rows) -> the rows that the bytes represent, in fp32."""
_Around = tuple[bytes, Callable[[int], bytes]]
"""What is stored around a tensor: the bytes before it, and a function: crc32 of the tensor -> the bytes after it."""


@dataclass(frozen=True)
class Output:
    """A tensor to write, and its place in a file."""

    leaf: BoundLeaf  # the name and layout of the tensor, and the parameters that it stores
    dtype: str  # the dtype in the file
    start: int  # the offset in the file, in bytes
    nbytes: int  # the size in the file, including the bytes in `around`
    encode: Encode | None = None  # quantises the values; None if they are only cast to `dtype`
    decode: _Decode | None = None  # the inverse of `encode`, for measuring the error of quantising
    around: _Around | None = None  # bytes before and after the tensor, in formats that need them
    rows: int = 1  # `encode` must be called with a multiple of this number of rows


class Entry(NamedTuple):
    """A tensor to write, whose place in a file is not yet known. For the fields see `Output`."""

    leaf: BoundLeaf
    dtype: str
    encode: Encode | None = None
    decode: _Decode | None = None
    rows: int = 1


@dataclass(frozen=True)
class Shard:
    """A planned weight file. Bytes that belong to nothing are padding."""

    name: str
    header: bytes
    outputs: tuple[Output, ...]  # the tensors
    size: int  # the size of the file in bytes
    constants: tuple[tuple[FileBlock, bytes], ...] = ()  # known bytes after the header, such as RoPE tables
    ending: Callable[[Sequence[int]], bytes] | None = None  # the crc32 of every output -> the last bytes of the file

    @property
    def nbytes(self) -> int:
        """Return the size in bytes of all tensors together."""
        return sum(output.nbytes for output in self.outputs)


@dataclass(frozen=True)
class FolderPlan:
    """Everything that will be in an output folder."""

    shards: tuple[Shard, ...]  # the weight files
    texts: Mapping[str, bytes]  # small files: name -> content
    companions: tuple[Companion, ...]  # files to copy

    @property
    def nbytes(self) -> int:
        """Return the size in bytes of all files except the manifest."""
        files = sum(companion.path.stat().st_size for companion in self.companions)
        return sum(s.size for s in self.shards) + sum(len(t) for t in self.texts.values()) + files

    def digest(self, *about: object) -> str:
        """Return a hash of this plan and of `about`, values that identify the source of the tensors."""
        digest = hashlib.sha256(f"{__version__} {about!r}".encode())
        for shard in self.shards:
            digest.update(repr((shard.name, shard.size)).encode() + shard.header)
        return digest.hexdigest()

    @property
    def tensors(self) -> int:
        return sum(len(shard.outputs) for shard in self.shards)

    @property
    def largest(self) -> int:
        return max(output.nbytes for shard in self.shards for output in shard.outputs)


def _lay_out(name: str, tensors: Sequence[Entry]) -> Shard:
    """Plan a safetensors file with these tensors, in the order that the safetensors library uses."""
    header, infos = build_header(
        [(entry.leaf.checkpoint, entry.dtype, entry.leaf.shape) for entry in tensors], _METADATA
    )
    by_name = {entry.leaf.checkpoint: entry for entry in tensors}
    places = [(by_name[info.name], info) for info in infos]
    outputs = tuple(
        Output(entry.leaf, entry.dtype, info.start, info.nbytes, entry.encode, entry.decode, rows=entry.rows)
        for entry, info in places
    )
    return Shard(name, header, outputs, max([len(header), *(info.end for info in infos)]))


def plan(
    leaves: Sequence[BoundLeaf],
    dtypes: Mapping[str, str],
    texts: Mapping[str, bytes],
    companions: Sequence[Companion],
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    homes: Mapping[str, Path] | None = None,
    otherwise: Mapping[str, Sequence[Entry]] = MappingProxyType({}),
    unwritten: int = 0,
) -> FolderPlan:
    """Plan a folder of safetensors files.

    Args:
        leaves: the tensors to write. A tensor that stores several parameters gets the widest of their dtypes.
        dtypes: the dtype of every parameter, by gptkit's name of the parameter (shared name).
        texts: the content of small files by name.
        companions: files to copy.
        max_shard_bytes: the maximum size of a file in bytes. The tensors are divided into files as by transformers.
        homes: the source file of every parameter, by shared name. If it is given, there is one output file for every
            source file, of any size.
        otherwise: what to write for tensors that are not just cast, by checkpoint name.
        unwritten: the number of parameters that the index counts although no file contains them.
    """
    tensors = [
        entry
        for leaf in leaves
        for entry in otherwise.get(leaf.checkpoint) or [Entry(leaf, widest([dtypes[name] for name in leaf.shared]))]
    ]
    groups: list[list[Entry]] = []
    if homes:
        by_file: dict[Path, list[Entry]] = {}
        for entry in tensors:
            by_file.setdefault(homes[entry.leaf.shared[0]], []).append(entry)
        groups = list(by_file.values())
    else:
        group: list[Entry] = []
        filled = 0
        for entry in tensors:
            nbytes = math.prod(entry.leaf.shape) * DTYPES[entry.dtype].itemsize
            if nbytes > max_shard_bytes:
                groups.append([entry])
                continue
            if filled + nbytes > max_shard_bytes:
                groups.append(group)
                group, filled = [], 0
            group.append(entry)
            filled += nbytes
        groups += [group] if group else []
    if (count := len(groups)) == 1:
        return FolderPlan((_lay_out("model.safetensors", groups[0]),), texts, tuple(companions))
    shards = tuple(_lay_out(f"model-{i:05}-of-{count:05}.safetensors", group) for i, group in enumerate(groups, 1))
    index = {
        "metadata": {
            "total_parameters": unwritten + sum(math.prod(leaf.shape) for leaf in leaves if not leaf.buffer),
            "total_size": sum(shard.nbytes for shard in shards),
        },
        "weight_map": {output.leaf.checkpoint: shard.name for shard in shards for output in shard.outputs},
    }
    text = json.dumps(index, indent=2, sort_keys=True) + "\n"
    return FolderPlan(shards, {**texts, INDEX: text.encode()}, tuple(companions))


def as_it_was(
    leaves: Sequence[BoundLeaf],
    dtypes: Mapping[str, str],
    files: Mapping[str, str],
    canonical: Callable[[str, Mapping[str, Any]], str | None],
) -> tuple[tuple[Shard, ...], dict[str, bytes]] | None:
    """Plan the same weight files and index that the original checkpoint had, so that the output has identical bytes.

    Args:
        leaves: the tensors to write.
        dtypes: the dtype of every parameter, by shared name.
        files: the headers and the index of the original (`Origin.files`). They are untrusted, because the user may have
            edited them.
        canonical: called with the name of a tensor in `files`, and the tensors in `leaves` by name. It returns the
            name that the tensor has in `leaves`.

    Returns:
        The weight files, and the index by file name. None if `files` do not have exactly the tensors in `leaves`.
    """
    leaf_of = {leaf.checkpoint: (leaf, widest([dtypes[name] for name in leaf.shared])) for leaf in leaves}
    index = {name: text.encode() for name, text in files.items() if name == INDEX}
    shards: list[Shard] = []
    seen: list[str | None] = []
    for name, text in files.items():
        if name in index:
            continue
        raw = text.encode()
        if not is_plain(name) or not name.endswith(".safetensors"):  # another file in the folder may have this name
            return None
        try:
            infos = parse_header(name, raw).tensors.values()
        except CheckpointError:
            return None
        outputs: list[Output] = []
        for info in infos:
            leaf_name = canonical(info.name, leaf_of)
            leaf, dtype = leaf_of.get(leaf_name or "", (None, ""))
            if leaf is None or (info.shape, info.dtype) != (leaf.shape, dtype):
                return None
            seen.append(leaf_name)
            outputs.append(Output(replace(leaf, checkpoint=info.name), info.dtype, info.start, info.nbytes))
        start = struct.pack("<Q", len(raw)) + raw
        shards.append(Shard(name, start, tuple(outputs), max([len(start), *(i.end for i in infos)])))
    # Parsed one by one, so that a name in two files is only seen here.
    complete = len(seen) == len(leaf_of) == len(set(seen))
    return (tuple(shards), index) if complete and (len(shards) == 1 or index) else None


def prepare(plan: FolderPlan, staging: Staging) -> None:
    """Write all files of a plan except weight files into a staging folder.

    Raises GptkitError if there is not enough disk space for all files.
    """
    unfinished_bytes = sum(shard.size for shard in plan.shards if shard.name not in staging.finished)
    staging.require_space(unfinished_bytes + plan.nbytes - sum(shard.size for shard in plan.shards))
    for name, text in plan.texts.items():
        (staging.path / name).parent.mkdir(exist_ok=True)
        write_bytes(staging.path / name, text)
    for companion in plan.companions:
        target = staging.path / companion.name
        target.parent.mkdir(exist_ok=True)
        copy_file(companion.path, target)


def writer(shard: Shard, staging: Staging) -> BlockFile:
    """Create a weight file, and write its header and `shard.constants`. Return the file, without its tensors."""
    blocks = [FileBlock(o.leaf.checkpoint, o.start, o.start + o.nbytes) for o in shard.outputs]
    blocks = sorted([*blocks, *(block for block, _ in shard.constants)], key=lambda block: (block.start, block.end))
    file = BlockFile(staging.path / shard.name, shard.header, blocks, shard.size)
    try:
        for block, data in shard.constants:
            file.write(block.name, data)
    except BaseException:
        file.release()
        raise
    return file


def execute(
    plan: FolderPlan,
    tensors: Iterable[tuple[str, np.ndarray, str]],
    staging: Staging,
    progress: Callable[[int], None] | None = None,
) -> dict[str, FileRecord]:
    """Write the files of a plan into a staging folder. Return the hashes of the weight files by name.

    `tensors` yields the parameters as (shared name, array, dtype).
    """
    prepare(plan, staging)
    pending: dict[str, tuple[np.ndarray, str]] = {}
    with ExitStack() as stack:
        writers = [stack.enter_context(writer(shard, staging)) for shard in plan.shards]
        files = zip(plan.shards, writers, strict=True)
        home = {name: (o, file) for shard, file in files for o in shard.outputs for name in o.leaf.shared}
        for name, array, dtype in tensors:
            pending[name] = (array, dtype)
            output, file = home[name]
            if all(part in pending for part in output.leaf.shared):
                parts = [cast(*pending.pop(part), output.dtype) for part in output.leaf.shared]
                file.write(output.leaf.checkpoint, np.ascontiguousarray(output.leaf.to_checkpoint(parts)))
                if progress is not None:
                    progress(output.nbytes)
    return {shard.name: file.record for shard, file in zip(plan.shards, writers, strict=True)}
