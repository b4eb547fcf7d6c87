"""Writing a checkpoint: a plan made from shapes alone, then one walk that fills it.

`plan` says every file, tensor, dtype and place without reading a weight; it is what --dry-run prints. `execute` takes
the shared tensors as they come, holds a part only until the output tensor it belongs to is whole, writes that at its
place, and publishes the folder in one step (see `publish`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..architectures import BoundLeaf
from .dtypes import FLOATS, from_float64, to_float64, widest
from .publish import FileRecord, Staging, TensorRecord, copy_file, write_bytes
from .resolve import INDEX
from .safetensors import DTYPES, SafetensorsWriter

__all__ = ["DEFAULT_SHARD_BYTES", "Output", "Plan", "Shard", "execute", "plan"]

DEFAULT_SHARD_BYTES = 5 * 10**9
METADATA = {"format": "pt"}
"""What save_pretrained writes, and transformers asks for."""


@dataclass(frozen=True)
class Output:
    """One tensor to be written."""

    leaf: BoundLeaf
    dtype: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.leaf.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Shard:
    """One weight file."""

    name: str
    outputs: tuple[Output, ...]

    @property
    def nbytes(self) -> int:
        return sum(output.nbytes for output in self.outputs)


@dataclass(frozen=True)
class Plan:
    """Everything that will be in a folder: weights by shard, small files by their bytes, files copied as they are."""

    shards: tuple[Shard, ...]
    texts: Mapping[str, bytes]
    companions: tuple[Path, ...]

    @property
    def nbytes(self) -> int:
        """Bytes on disk, headers aside."""
        files = sum(path.stat().st_size for path in self.companions)
        return sum(s.nbytes for s in self.shards) + sum(len(t) for t in self.texts.values()) + files

    @property
    def tensors(self) -> int:
        return sum(len(shard.outputs) for shard in self.shards)

    @property
    def largest(self) -> int:
        """Bytes of the largest tensor, which is what a conversion holds in memory."""
        return max(output.nbytes for shard in self.shards for output in shard.outputs)


def plan(
    leaves: Sequence[BoundLeaf],
    dtypes: Mapping[str, str],
    texts: Mapping[str, bytes],
    companions: Sequence[Path],
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> Plan:
    """A plan for the target's leaves, `dtypes` by shared name. An output made of several has the widest's dtype."""
    outputs = [Output(leaf, widest([dtypes[name] for name in leaf.shared])) for leaf in leaves]
    groups: list[list[Output]] = [[]]
    filled = 0
    for output in outputs:
        if groups[-1] and filled + output.nbytes > max_shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(output)
        filled += output.nbytes
    if len(groups) == 1:
        return Plan((Shard("model.safetensors", tuple(outputs)),), texts, tuple(companions))
    count = len(groups)
    shards = tuple(Shard(f"model-{i:05}-of-{count:05}.safetensors", tuple(g)) for i, g in enumerate(groups, 1))
    index = {
        "metadata": {
            "total_parameters": sum(math.prod(output.leaf.shape) for output in outputs),
            "total_size": sum(output.nbytes for output in outputs),
        },
        "weight_map": {output.leaf.checkpoint: shard.name for shard in shards for output in shard.outputs},
    }
    text = json.dumps(index, indent=2, sort_keys=True) + "\n"
    return Plan(shards, {**texts, INDEX: text.encode()}, tuple(companions))


def execute(
    plan: Plan,
    tensors: Iterable[tuple[str, np.ndarray, str]],
    staging: Staging,
    progress: Callable[[int], None] | None = None,
) -> dict[str, FileRecord]:
    """Write the plan into an open staging folder, `tensors` being (shared name, array, dtype) in any order.

    Returns:
        What is known of the weight files by name, for the manifest.

    Raises:
        CheckpointError: a value does not fit the output's dtype.
        GptkitError: the disk is too small or a write fails; nothing is published.

    """
    staging.require_space(plan.nbytes)
    for name, text in plan.texts.items():
        write_bytes(staging.path / name, text)
    for path in plan.companions:
        copy_file(path, staging.path / path.name)
    writers = [
        SafetensorsWriter(
            staging.path / shard.name, [(o.leaf.checkpoint, o.dtype, o.leaf.shape) for o in shard.outputs], METADATA
        )
        for shard in plan.shards
    ]
    home = {
        name: (o, w)
        for shard, w in zip(plan.shards, writers, strict=True)
        for o in shard.outputs
        for name in o.leaf.shared
    }
    pending: dict[str, tuple[np.ndarray, str]] = {}
    try:
        for name, array, dtype in tensors:
            pending[name] = (array, dtype)
            output, writer = home[name]
            if all(part in pending for part in output.leaf.shared):
                parts = [cast(*pending.pop(part), output.dtype) for part in output.leaf.shared]
                writer.write(output.leaf.checkpoint, output.leaf.to_checkpoint(parts))
                if progress is not None:
                    progress(output.nbytes)
    except BaseException as error:
        for writer in writers:
            writer.__exit__(type(error), error, error.__traceback__)
        raise
    for writer in writers:
        writer.close()
    return {writer.path.name: _record(writer) for writer in writers}


def _record(writer: SafetensorsWriter) -> FileRecord:
    digests = writer.tensor_sha256
    places = writer.tensors.items()
    return FileRecord(writer.sha256, {name: TensorRecord(at.start, at.end, digests[name]) for name, at in places})


def cast(array: np.ndarray, dtype: str, target: str) -> np.ndarray:
    """The array in another floating point type, rounded to nearest even where that is narrower."""
    if dtype == target:
        return array
    assert dtype in FLOATS and target in FLOATS
    return from_float64(to_float64(array, dtype), target)


def json_bytes(data: Any) -> bytes:
    """JSON as transformers writes its config files, but for half a surrogate pair, which UTF-8 has no bytes for."""
    try:
        return (json.dumps(data, indent=2, ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError:
        return (json.dumps(data, indent=2) + "\n").encode()
