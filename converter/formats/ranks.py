"""Join the files of several ranks, each of which saved a part of one model.

Some files state how a tensor is split: those with DTensors (FSDP 2, tensor parallelism), and those with the flat
partitions of DeepSpeed's ZeRO-3. In other files, such as Meta's, the shapes show how a tensor is split: along the one
dimension in which the sizes of the parts add up to the size that the model needs. A tensor that is complete in all
files must be equal in all of them.

Source of ZeRO-3: DeepSpeed 0.19.8, utils/zero_to_fp32.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...errors import CheckpointError, shown
from ..chunks import Chunk, Chunked, filling
from ..pickles import PickledShard, unpickled
from ..weights import Stored, Weights
from . import ALL_RANKS as _HINT

_DEPTH = 4
_Tensors = Mapping[str, Any]


def tables(content: Any, where: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Yield every dictionary with tensors in a file's content: the keys that lead to it, and its tensors by name."""
    if not isinstance(content, dict) or len(where) > _DEPTH:
        return
    entries = {key: value for key, value in content.items() if isinstance(key, str)}
    tensors = {key: value for key, value in entries.items() if isinstance(value, Stored | PickledShard)}
    if tensors:
        yield where, tensors
    for key, value in entries.items():
        yield from tables(value, (*where, key))


def joined(
    files: Sequence[Path], parts: Sequence[_Tensors], shapes: Mapping[str, tuple[int, ...] | None]
) -> dict[str, Chunked]:
    """Return the tensors by name, joined from the files of all ranks. Raises CheckpointError if they do not fit.

    Args:
        files: the files.
        parts: the tensors of every file by name.
        shapes: the shape that the model needs for every tensor, by name; None if it is unknown.
    """
    holders: dict[str, list[int]] = {}
    for index, table in enumerate(parts):
        for name in table:
            holders.setdefault(name, []).append(index)
    ranks = any(len(value) > 1 for value in holders.values())
    if ranks or any(isinstance(value, PickledShard) for value in parts[0].values()):
        _all_ranks(files)
    tensors = {}
    for name, indices in holders.items():
        values = {files[index]: parts[index][name] for index in indices}
        if ranks and len(values) < len(files):
            missing = next(file for file in files if file not in values)
            raise CheckpointError(
                f"{shown(name, 80)} is in {len(values)} of {len(files)} files, but missing in {missing}", _HINT
            )
        first = next(iter(values.values()))
        if isinstance(first, PickledShard):
            tensors[name] = _placed(name, values)
        elif len(values) == 1:
            tensors[name] = Chunked(first.dtype, first.shape, (Chunk((0,) * len(first.shape), first),))
        else:
            tensors[name] = _by_shapes(name, values, shapes.get(name))
    return tensors


def _all_ranks(files: Sequence[Path]) -> None:
    """Raise CheckpointError if files of ranks are missing, according to the numbers in the names of the files."""
    numbers = [[int(number) for number in re.findall(r"\d{1,18}", file.name)] for file in files]
    columns = list(zip(*numbers, strict=False)) if len({len(number) for number in numbers}) == 1 else []
    differing = [column for column in columns if len(set(column)) > 1]
    if len(files) > 1 and len(differing) != 1:
        raise CheckpointError(
            f"{files[0].name} and {files[1].name} have tensors with the same names, but are not ranks of one "
            "checkpoint",
            _HINT,
        )
    stated = re.search(r"(?:world_size_|-of-)(\d{1,9})", files[0].name)
    ranks = set(differing[0]) if differing else {0}
    expected = range(int(stated[1])) if stated else range(max(ranks) + 1)
    if 0 not in ranks and stated and stated[0].startswith("-of-"):
        expected = range(1, int(stated[1]) + 1)
    if len(expected) > 2**16:
        raise CheckpointError(
            f"{files[0]} claims to be one of {len(expected):,} ranks, but gptkit reads at most {2**16:,}", _HINT
        )
    if missing := sorted(set(expected) - ranks):
        some = ", ".join(map(str, missing[:8]))
        raise CheckpointError(
            f"{files[0].parent}: there should be {len(expected)} ranks, but these are missing: {some}", _HINT
        )


def _placed(name: str, values: Mapping[Path, Any]) -> Chunked:
    """Join a tensor whose parts state how it is split over the ranks (DTensor). `values` has the part in every file."""
    where = f"{next(iter(values)).parent}: {shown(name, 80)}"
    first = next(iter(values.values()))
    if not all(isinstance(part, PickledShard) for part in values.values()):
        raise CheckpointError(f"{where} is split over ranks in some files, but whole in others", _HINT)
    if any((e.shape, e.placements, e.local.dtype) != (first.shape, first.placements, first.local.dtype)
           for e in values.values()):  # fmt: skip
        raise CheckpointError(f"{where} has a different shape, dtype or placement in another file", _HINT)
    if first.coordinate is None and len(first.placements) > 1:
        raise CheckpointError(f"{where} does not state the device mesh over which it is split", _HINT)
    sharing = {
        dim: [mesh for mesh, split in enumerate(first.placements) if split == dim]
        for dim in {split for split in first.placements if split is not None}
    }
    boxes: dict[tuple[tuple[int, ...], ...], tuple[Path, Stored]] = {}
    extents: dict[int, dict[tuple[int, ...], int]] = {dim: {} for dim in sharing}
    for rank, (file, part) in enumerate(values.items()):
        place = (rank,) if part.coordinate is None else part.coordinate
        if len(place) != len(first.placements) or len(part.local.shape) != len(part.shape):
            raise CheckpointError(f"{where} has a device mesh with other dimensions in {file.name}", _HINT)
        key = tuple(tuple(place[mesh] for mesh in meshes) for meshes in sharing.values())
        if key in boxes:
            same_in(name, *boxes[key], file, part.local)
            continue
        boxes[key] = file, part.local
        for dim, index in zip(sharing, key, strict=True):
            extent = part.local.shape[dim] if 0 <= dim < len(part.local.shape) else -1
            if extents[dim].setdefault(index, extent) != extent:
                raise CheckpointError(f"{where} has parts with different sizes in {file.name}", _HINT)
    chunks = []
    for key, (_, stored) in boxes.items():
        at = [0] * len(first.shape)
        for dim, index in zip(sharing, key, strict=True):
            at[dim] = sum(extent for other, extent in extents[dim].items() if other < index)
        chunks.append(Chunk(tuple(at), stored))
    return Chunked(first.local.dtype, first.shape, filling(where, first.shape, chunks, _HINT))


def _by_shapes(name: str, values: Mapping[Path, Any], shape: tuple[int, ...] | None) -> Chunked:
    """Join a tensor whose parts do not state how it is split over the ranks. Every rank may also have all of it.

    `values` has the part in every file. `shape` is the shape that the model needs, or None if it is unknown.
    """
    (one, first), *others = values.items()
    shapes = [list(part.shape) for part in values.values() if isinstance(part, Stored)]
    if len(shapes) != len(values) or len({part.dtype for part in values.values()}) > 1:
        raise CheckpointError(f"{one.parent}: {shown(name, 80)} has different dtypes in different files", _HINT)
    shape = first.shape if shape is None else shape
    if shapes[0] == list(shape):
        for other, part in others:
            same_in(name, one, first, other, part)
        return Chunked(first.dtype, first.shape, (Chunk((0,) * len(shape), first),))
    for dim, size in enumerate(shape):
        if all(len(part) == len(shape) for part in shapes) and sum(part[dim] for part in shapes) == size:
            chunks, at = [], 0
            for part in values.values():
                offsets = [0] * len(shape)
                offsets[dim], at = at, at + part.shape[dim]
                chunks.append(Chunk(tuple(offsets), part))
            if all([*part[:dim], *part[dim + 1 :]] == [*shape[:dim], *shape[dim + 1 :]] for part in shapes):
                return Chunked(first.dtype, shape, filling(f"{one.parent}: {shown(name, 80)}", shape, chunks, _HINT))
    some = " and ".join(map(str, shapes[:4]))
    raise CheckpointError(
        f"{one.parent}: {shown(name, 80)} of shape {list(shape)} cannot be joined from parts of the shapes {some}",
        _HINT,
    )


def same_in(name: str, one: Path, first: Stored, other: Path, second: Stored) -> None:
    """Raise CheckpointError unless a tensor has the same bytes in two files.

    Args:
        name: the name of the tensor, for the message.
        one: a file, for the message.
        first: the tensor in `one`.
        other: another file, for the message.
        second: the tensor in `other`.
    """
    both = Weights({"a": first, "b": second})
    both.check()
    if not both.same("a", "b"):
        raise CheckpointError(f"{one} and {other.name} have different values of {shown(name, 80)}", _HINT)


# --- DeepSpeed's ZeRO-3 ---


def partitioned(files: Sequence[Path], contents: Sequence[Any], parts: Sequence[dict[str, Any]]) -> dict[str, Chunked]:
    """Join the tensors that ZeRO-3 stores as one flat piece per rank.

    Return them by name, and remove them from `parts`.

    Args:
        files: the files of all ranks.
        contents: the content of every file.
        parts: the tensors of every file by name.

    Raises:
        CheckpointError: files of ranks are missing or do not match each other.
    """
    first = contents[0]
    shapes = {} if not isinstance(first, dict) else _listed(first.get("param_shapes"))
    prefix = next((n.removesuffix(o) for o in parts[0] for n in shapes if n.endswith(o)), "") if parts else ""
    own = {name.removeprefix(prefix): shape for name, shape in shapes.items()}
    holders = [name for name, shape in own.items() if name in parts[0] and parts[0][name].shape != shape]
    if not holders:
        return {}
    folder = files[0].parent
    states = []
    for file in files:  # bf16_zero_pp_rank_0_…, without a type where it is fp16
        name = file.name.replace("_model_states.pt", "_optim_states.pt")
        matching = [path for path in folder.glob("*_optim_states.pt") if path.name.removeprefix("bf16_") == name]
        if len(matching) != 1:
            raise CheckpointError(
                f"{folder / name} is missing or exists twice, but ZeRO-3 stores the weights in it", _HINT
            )
        states.append(matching[0])
    _all_ranks(states)
    groups = [_groups(file, content, len(files)) for file, content in zip(states, unpickled(states), strict=True)]
    tensors, at = {}, 0
    for name, shape in own.items():
        count = math.prod(shape)
        width = -(-count // len(files))
        tensors[name] = _flat(f"{folder}: {shown(name, 80)}", shape, [_cut(group, at, width) for group in groups])
        at += width
    counts = {sum(piece.count for piece in group) for group in groups}
    if counts != {at}:
        raise CheckpointError(
            f"{folder}: its ranks have {sorted(counts)} elements, but its param_shapes need {at:,} per rank", _HINT
        )
    fragments = [content.get("frozen_param_fragments") for content in contents if isinstance(content, dict)]
    for name, shape in _listed([first.get("frozen_param_shapes")]).items():
        pieces = [table[name] for table in fragments if isinstance(table, dict) and isinstance(table.get(name), Stored)]
        if len(pieces) < len(files):
            raise CheckpointError(f"{folder}: one of the ranks has no part of {shown(name, 80)}", _HINT)
        tensors[name.removeprefix(prefix)] = _flat(f"{folder}: {shown(name, 80)}", shape, [[piece] for piece in pieces])
    for table in parts:
        for name in tensors:
            table.pop(name, None)
    return tensors


def _listed(given: Any) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter, by name, from DeepSpeed's list of parameter groups (`param_shapes`)."""
    shapes = {}
    for group in given if isinstance(given, list) else ():
        for name, shape in group.items() if isinstance(group, dict) else ():
            if isinstance(name, str) and isinstance(shape, list) and all(type(size) is int for size in shape):
                shapes[name] = tuple(shape)
    return shapes


def _groups(file: Path, content: Any, ranks: int) -> list[Stored]:
    """Return the flat tensors in the file of a rank. They contain its pieces of all parameters, one after the other.

    `ranks` is the number of ranks.
    """
    state = content.get("optimizer_state_dict") if isinstance(content, dict) else None
    flat = state.get("fp32_flat_groups") if isinstance(state, dict) else None
    if not isinstance(state, dict) or not isinstance(flat, list) or not all(isinstance(x, Stored) for x in flat):
        raise CheckpointError(
            f"{file} has no flattened partitions of the weights, which a ZeRO-3 checkpoint has", _HINT
        )
    count = state.get("partition_count")
    if count != ranks:
        raise CheckpointError(
            f"{file} says that there are {shown(count, 20)} partitions, but there are {ranks} files", _HINT
        )
    if any(len(tensor.shape) != 1 or not tensor.contiguous or tensor.dtype != flat[0].dtype for tensor in flat):
        raise CheckpointError(f"{file} has partitions of the weights that are not one-dimensional", _HINT)
    return flat


def _cut(group: Sequence[Stored], start: int, width: int) -> list[Stored]:
    """Return elements `start` to `start + width` of several flat tensors, counted through all of them.

    The result is a list, because the elements may be in more than one of the tensors.
    """
    pieces, at = [], 0
    for tensor in group:
        begin, end = max(start - at, 0), min(start + width - at, tensor.count)
        if begin < end:
            pieces.append(replace(tensor, shape=(end - begin,), strides=None, offset=tensor.offset + begin))
        at += tensor.count
    return pieces


def _flat(where: str, shape: tuple[int, ...], ranks: Sequence[Sequence[Stored]]) -> Chunked:
    """Return a tensor of this shape, whose elements are stored in flat pieces, in the order of the ranks.

    Padding after the last element is left out. Raises CheckpointError if the pieces have too few elements or
    different dtypes.

    Args:
        where: the name of the tensor for messages.
        shape: the shape.
        ranks: the pieces of every rank.
    """
    count, at, chunks = math.prod(shape), 0, []
    for piece in (part for rank in ranks for part in rank):
        size = min(piece.count, count - at)
        if size > 0:
            chunks.append(Chunk((at,), replace(piece, shape=(size,), strides=None)))
            at += size
    if len({chunk.stored.dtype for chunk in chunks}) > 1:
        raise CheckpointError(f"{where} has different dtypes in different files", _HINT)
    dtype = chunks[0].stored.dtype if chunks else "F32"
    return Chunked(dtype, (count,), filling(where, (count,), chunks, _HINT), shape)
