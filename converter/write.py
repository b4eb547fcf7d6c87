"""What a conversion writes: a plan made from shapes alone, and the plain walk that fills it.

`plan` says every file, tensor, dtype and byte position without reading a weight. `transfer` carries a checkpoint's
tensors over by it; `execute` here takes tensors that somebody computes (a swap), and holds a part only until its output
is whole.
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
from .block_file import Block, BlockFile
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
"""Some whole rows of a tensor in their carrier dtype, and that dtype -> the bytes to be stored."""
_Decode = Callable[[np.ndarray, np.ndarray, str], np.ndarray]
"""Stored bytes, the rows that they were made of, and their dtype -> the values that they stand for, in fp32."""
_Around = tuple[bytes, Callable[[int], bytes]]
"""A record that a tensor is wrapped in: what stands before its bytes, and what behind bytes of this crc32."""


@dataclass(frozen=True)
class Output:
    """One tensor, and its place in its file. encode, decode: to bytes of quantised blocks and back, others are cast, by
    multiples of so many rows; around: what stands before and behind its bytes, where that depends on their crc32.
    """

    leaf: BoundLeaf
    dtype: str
    start: int
    nbytes: int
    encode: Encode | None = None
    decode: _Decode | None = None
    around: _Around | None = None
    rows: int = 1


class Entry(NamedTuple):
    """A tensor to be written, as an `Output` that has no place yet."""

    leaf: BoundLeaf
    dtype: str
    encode: Encode | None = None
    decode: _Decode | None = None
    rows: int = 1


@dataclass(frozen=True)
class Shard:
    """One weight file; what no tensor covers is padding. constants: known bytes behind the header (tables computed from
    the tree). ending: the last bytes, from the crc32 of every output.
    """

    name: str
    header: bytes
    outputs: tuple[Output, ...]
    size: int
    constants: tuple[tuple[Block, bytes], ...] = ()
    ending: Callable[[Sequence[int]], bytes] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of tensors."""
        return sum(output.nbytes for output in self.outputs)


@dataclass(frozen=True)
class Plan:
    """Everything that will be in a folder: weights by shard, small files by their bytes, files copied as they are."""

    shards: tuple[Shard, ...]
    texts: Mapping[str, bytes]
    companions: tuple[Companion, ...]

    @property
    def nbytes(self) -> int:
        """Bytes on disk, all but the manifest's."""
        files = sum(each.path.stat().st_size for each in self.companions)
        return sum(s.size for s in self.shards) + sum(len(t) for t in self.texts.values()) + files

    def digest(self, *about: object) -> str:
        """What tells this work from any other: every byte planned, and what there is to say of its source."""
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
    """A safetensors file of these tensors, as the safetensors library would write it."""
    header, infos = build_header([(each.leaf.checkpoint, each.dtype, each.leaf.shape) for each in tensors], _METADATA)
    by_name = {each.leaf.checkpoint: each for each in tensors}
    places = [(by_name[info.name], info) for info in infos]
    outputs = tuple(
        Output(each.leaf, each.dtype, info.start, info.nbytes, each.encode, each.decode, rows=each.rows)
        for each, info in places
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
) -> Plan:
    """A plan of safetensors files for leaves, `dtypes` by shared name: as many as their tensors come from (`homes`),
    else as transformers deals them out (split_state_dict_into_shards_factory). Several tensors in one get the widest
    dtype. otherwise: the tensors that a leaf is stored as, by its name, where it is not cast. unwritten: how many
    parameters the index counts and no file has.
    """
    tensors = [
        each
        for leaf in leaves
        for each in otherwise.get(leaf.checkpoint) or [Entry(leaf, widest([dtypes[name] for name in leaf.shared]))]
    ]
    groups: list[list[Entry]] = []
    if homes:
        by_file: dict[Path, list[Entry]] = {}
        for each in tensors:
            by_file.setdefault(homes[each.leaf.shared[0]], []).append(each)
        groups = list(by_file.values())
    else:
        group: list[Entry] = []
        filled = 0
        for each in tensors:
            nbytes = math.prod(each.leaf.shape) * DTYPES[each.dtype].itemsize
            if nbytes > max_shard_bytes:
                groups.append([each])
                continue
            if filled + nbytes > max_shard_bytes:
                groups.append(group)
                group, filled = [], 0
            group.append(each)
            filled += nbytes
        groups += [group] if group else []
    if (count := len(groups)) == 1:
        return Plan((_lay_out("model.safetensors", groups[0]),), texts, tuple(companions))
    shards = tuple(_lay_out(f"model-{i:05}-of-{count:05}.safetensors", group) for i, group in enumerate(groups, 1))
    index = {
        "metadata": {
            "total_parameters": unwritten + sum(math.prod(leaf.shape) for leaf in leaves if not leaf.buffer),
            "total_size": sum(shard.nbytes for shard in shards),
        },
        "weight_map": {output.leaf.checkpoint: shard.name for shard in shards for output in shard.outputs},
    }
    text = json.dumps(index, indent=2, sort_keys=True) + "\n"
    return Plan(shards, {**texts, INDEX: text.encode()}, tuple(companions))


def as_it_was(
    leaves: Sequence[BoundLeaf],
    dtypes: Mapping[str, str],
    files: Mapping[str, str],
    canonical: Callable[[str, Mapping[str, Any]], str | None],
) -> tuple[tuple[Shard, ...], dict[str, bytes]] | None:
    """The shards and the index that `files` (see Origin) describe, None where they are not these tensors any more;
    `canonical` tells whose name one is. Anybody may have edited them: checked as if read from a file.
    """
    here = {leaf.checkpoint: (leaf, widest([dtypes[name] for name in leaf.shared])) for leaf in leaves}
    index = {name: text.encode() for name, text in files.items() if name == INDEX}
    shards: list[Shard] = []
    seen: list[str | None] = []
    for name, text in files.items():
        if name in index:
            continue
        raw = text.encode()
        if not is_plain(name) or not name.endswith(".safetensors"):  # which something else in the folder may be called
            return None
        try:
            infos = parse_header(name, raw).tensors.values()
        except CheckpointError:
            return None
        outputs: list[Output] = []
        for info in infos:
            known = canonical(info.name, here)
            leaf, dtype = here.get(known or "", (None, ""))
            if leaf is None or (info.shape, info.dtype) != (leaf.shape, dtype):
                return None
            seen.append(known)
            outputs.append(Output(replace(leaf, checkpoint=info.name), info.dtype, info.start, info.nbytes))
        start = struct.pack("<Q", len(raw)) + raw
        shards.append(Shard(name, start, tuple(outputs), max([len(start), *(i.end for i in infos)])))
    # Parsed one by one, so that a name in two files is only seen here.
    whole = len(seen) == len(here) == len(set(seen))
    return (tuple(shards), index) if whole and (len(shards) == 1 or index) else None


def prepare(plan: Plan, staging: Staging) -> None:
    """Write all but the weights into an open staging folder. Raises GptkitError where the disk is too small."""
    left = sum(shard.size for shard in plan.shards if shard.name not in staging.finished)
    staging.require_space(left + plan.nbytes - sum(shard.size for shard in plan.shards))
    for name, text in plan.texts.items():
        (staging.path / name).parent.mkdir(exist_ok=True)
        write_bytes(staging.path / name, text)
    for companion in plan.companions:
        target = staging.path / companion.name
        target.parent.mkdir(exist_ok=True)
        copy_file(companion.path, target)


def writer(shard: Shard, staging: Staging) -> BlockFile:
    """The open file of a shard, its header and constants written."""
    blocks = [Block(o.leaf.checkpoint, o.start, o.start + o.nbytes) for o in shard.outputs]
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
    plan: Plan,
    tensors: Iterable[tuple[str, np.ndarray, str]],
    staging: Staging,
    progress: Callable[[int], None] | None = None,
) -> dict[str, FileRecord]:
    """Write the plan into a staging folder, `tensors` being (shared name, array, dtype); gives hashes by file."""
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
