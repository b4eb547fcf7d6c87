"""Files of ranks joined: what several processes saved of one model, a file each.

How a tensor is shared out is told where the files tell it (DTensor: FSDP 2, tensor parallelism; ZeRO-3's flat
partitions, which DeepSpeed's zero_to_fp32.py puts together), and else by its shapes: the one dimension along which the
parts add up to what the tree has (Meta's column- and row-parallel layers). What all ranks hold has to be the same.

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

_DEPTH = 4
_HINT = "Put the files of all ranks of one training step into the folder, and no other files."
_Tensors = Mapping[str, Any]


def tables(content: Any, where: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Every dictionary with tensors within what a file holds: the keys that lead to it, and its tensors."""
    if not isinstance(content, dict) or len(where) > _DEPTH:
        return
    named = {key: each for key, each in content.items() if isinstance(key, str)}
    found = {key: each for key, each in named.items() if isinstance(each, Stored | PickledShard)}
    if found:
        yield where, found
    for key, each in named.items():
        yield from tables(each, (*where, key))


def joined(
    files: Sequence[Path], parts: Sequence[_Tensors], shapes: Mapping[str, tuple[int, ...] | None]
) -> dict[str, Chunked]:
    """The tensors that lie in the files, by name; `shapes`: what the tree has of them. Raises CheckpointError."""
    holders: dict[str, list[int]] = {}
    for index, table in enumerate(parts):
        for name in table:
            holders.setdefault(name, []).append(index)
    ranks = any(len(each) > 1 for each in holders.values())
    if ranks or any(isinstance(each, PickledShard) for each in parts[0].values()):
        _all_ranks(files)
    found = {}
    for name, indices in holders.items():
        values = {files[index]: parts[index][name] for index in indices}
        if ranks and len(values) < len(files):
            lacking = next(file for file in files if file not in values)
            raise CheckpointError(
                f"{shown(name, 80)} is in {len(values)} of {len(files)} files, but missing in {lacking}", _HINT
            )
        first = next(iter(values.values()))
        if isinstance(first, PickledShard):
            found[name] = _placed(name, values)
        elif len(values) == 1:
            found[name] = Chunked(first.dtype, first.shape, (Chunk((0,) * len(first.shape), first),))
        else:
            found[name] = _by_shapes(name, values, shapes.get(name))
    return found


def _all_ranks(files: Sequence[Path]) -> None:
    """Raise CheckpointError where the files' names are not numbered without a gap, or say that there are more."""
    numbers = [[int(each) for each in re.findall(r"\d{1,18}", file.name)] for file in files]
    ways = list(zip(*numbers, strict=False)) if len({len(each) for each in numbers}) == 1 else []
    differing = [way for way in ways if len(set(way)) > 1]
    if len(files) > 1 and len(differing) != 1:
        raise CheckpointError(
            f"{files[0].name} and {files[1].name} have tensors with the same names, but are not ranks of one "
            "checkpoint",
            _HINT,
        )
    said = re.search(r"(?:world_size_|-of-)(\d{1,9})", files[0].name)
    ranks = set(differing[0]) if differing else {0}
    expected = range(int(said[1])) if said else range(max(ranks) + 1)
    if 0 not in ranks and said and said[0].startswith("-of-"):
        expected = range(1, int(said[1]) + 1)
    if len(expected) > 2**16:
        raise CheckpointError(
            f"{files[0]} claims to be one of {len(expected):,} ranks, but gptkit reads at most {2**16:,}", _HINT
        )
    if missing := sorted(set(expected) - ranks):
        told = ", ".join(map(str, missing[:8]))
        raise CheckpointError(
            f"{files[0].parent}: there should be {len(expected)} ranks, but these are missing: {told}", _HINT
        )


def _placed(name: str, values: Mapping[Path, Any]) -> Chunked:
    """A tensor of which each rank says how it is shared out."""
    where = f"{next(iter(values)).parent}: {shown(name, 80)}"
    first = next(iter(values.values()))
    if not all(isinstance(each, PickledShard) for each in values.values()):
        raise CheckpointError(f"{where} is split over ranks in some files, but whole in others", _HINT)
    if any((e.shape, e.placements, e.local.dtype) != (first.shape, first.placements, first.local.dtype)
           for e in values.values()):  # fmt: skip
        raise CheckpointError(f"{where} has a different shape, dtype or placement in another file", _HINT)
    if first.coordinate is None and len(first.placements) > 1:
        raise CheckpointError(f"{where} does not state the device mesh over which it is split", _HINT)
    sharing = {
        dim: [mesh for mesh, way in enumerate(first.placements) if way == dim]
        for dim in {way for way in first.placements if way is not None}
    }
    boxes: dict[tuple[tuple[int, ...], ...], tuple[Path, Stored]] = {}
    extents: dict[int, dict[tuple[int, ...], int]] = {dim: {} for dim in sharing}
    for rank, (file, each) in enumerate(values.items()):
        place = (rank,) if each.coordinate is None else each.coordinate
        if len(place) != len(first.placements) or len(each.local.shape) != len(each.shape):
            raise CheckpointError(f"{where} has a device mesh with other dimensions in {file.name}", _HINT)
        key = tuple(tuple(place[mesh] for mesh in meshes) for meshes in sharing.values())
        if key in boxes:
            same_in(name, *boxes[key], file, each.local)
            continue
        boxes[key] = file, each.local
        for dim, index in zip(sharing, key, strict=True):
            extent = each.local.shape[dim] if 0 <= dim < len(each.local.shape) else -1
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
    """A tensor of which each rank has a part that says nothing, or all of it."""
    (one, first), *others = values.items()
    shapes = [list(each.shape) for each in values.values() if isinstance(each, Stored)]
    if len(shapes) != len(values) or len({each.dtype for each in values.values()}) > 1:
        raise CheckpointError(f"{one.parent}: {shown(name, 80)} has different dtypes in different files", _HINT)
    shape = first.shape if shape is None else shape
    if shapes[0] == list(shape):
        for other, each in others:
            same_in(name, one, first, other, each)
        return Chunked(first.dtype, first.shape, (Chunk((0,) * len(shape), first),))
    for dim, size in enumerate(shape):
        if all(len(each) == len(shape) for each in shapes) and sum(each[dim] for each in shapes) == size:
            chunks, at = [], 0
            for each in values.values():
                offsets = [0] * len(shape)
                offsets[dim], at = at, at + each.shape[dim]
                chunks.append(Chunk(tuple(offsets), each))
            if all([*each[:dim], *each[dim + 1 :]] == [*shape[:dim], *shape[dim + 1 :]] for each in shapes):
                return Chunked(first.dtype, shape, filling(f"{one.parent}: {shown(name, 80)}", shape, chunks, _HINT))
    told = " and ".join(map(str, shapes[:4]))
    raise CheckpointError(
        f"{one.parent}: {shown(name, 80)} of {list(shape)} cannot be joined from parts of the shapes {told}", _HINT
    )


def same_in(name: str, one: Path, first: Stored, other: Path, second: Stored) -> None:
    """Raise CheckpointError unless what two files hold of a tensor has the same bytes."""
    both = Weights({"a": first, "b": second})
    both.check()
    if not both.same("a", "b"):
        told = f"{one} and {other.name} have different values of {shown(name, 80)}"
        raise CheckpointError(told, _HINT)


# --- DeepSpeed's ZeRO-3 ---


def partitioned(files: Sequence[Path], contents: Sequence[Any], parts: Sequence[dict[str, Any]]) -> dict[str, Chunked]:
    """The tensors that lie in flat pieces, a piece a rank, which are taken out of `parts`. Raises CheckpointError."""
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
        kept = [path for path in folder.glob("*_optim_states.pt") if path.name.removeprefix("bf16_") == name]
        if len(kept) != 1:
            raise CheckpointError(
                f"{folder / name} is missing or exists twice, but ZeRO-3 stores the weights in it", _HINT
            )
        states.append(kept[0])
    _all_ranks(states)
    groups = [_groups(file, content, len(files)) for file, content in zip(states, unpickled(states), strict=True)]
    found, at = {}, 0
    for name, shape in own.items():
        count = math.prod(shape)
        width = -(-count // len(files))
        found[name] = _flat(f"{folder}: {shown(name, 80)}", shape, [_cut(group, at, width) for group in groups])
        at += width
    held = {sum(each.count for each in group) for group in groups}
    if held != {at}:
        told = f"{folder}: its ranks have {sorted(held)} elements, but its param_shapes need {at:,} per rank"
        raise CheckpointError(told, _HINT)
    fragments = [content.get("frozen_param_fragments") for content in contents if isinstance(content, dict)]
    for name, shape in _listed([first.get("frozen_param_shapes")]).items():
        pieces = [each[name] for each in fragments if isinstance(each, dict) and isinstance(each.get(name), Stored)]
        if len(pieces) < len(files):
            raise CheckpointError(f"{folder}: one of the ranks has no part of {shown(name, 80)}", _HINT)
        found[name.removeprefix(prefix)] = _flat(f"{folder}: {shown(name, 80)}", shape, [[piece] for piece in pieces])
    for table in parts:
        for name in found:
            table.pop(name, None)
    return found


def _listed(given: Any) -> dict[str, tuple[int, ...]]:
    """DeepSpeed's list of groups of parameters: each one's shape."""
    found = {}
    for group in given if isinstance(given, list) else ():
        for name, shape in group.items() if isinstance(group, dict) else ():
            if isinstance(name, str) and isinstance(shape, list) and all(type(each) is int for each in shape):
                found[name] = tuple(shape)
    return found


def _groups(file: Path, content: Any, ranks: int) -> list[Stored]:
    """A rank's pieces of all parameters, one behind the other in flat tensors."""
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
    if any(len(each.shape) != 1 or not each.contiguous or each.dtype != flat[0].dtype for each in flat):
        raise CheckpointError(f"{file} has partitions of the weights that are not one-dimensional", _HINT)
    return flat


def _cut(group: Sequence[Stored], start: int, width: int) -> list[Stored]:
    """Elements `start` to `start + width` of flat tensors that follow one another."""
    found, at = [], 0
    for each in group:
        begin, end = max(start - at, 0), min(start + width - at, each.count)
        if begin < end:
            found.append(replace(each, shape=(end - begin,), strides=None, offset=each.offset + begin))
        at += each.count
    return found


def _flat(where: str, shape: tuple[int, ...], ranks: Sequence[Sequence[Stored]]) -> Chunked:
    """A tensor of the ranks' pieces one behind the other, of which the last may be padded."""
    count, at, chunks = math.prod(shape), 0, []
    for piece in (each for rank in ranks for each in rank):
        kept = min(piece.count, count - at)
        if kept > 0:
            chunks.append(Chunk((at,), replace(piece, shape=(kept,), strides=None)))
            at += kept
    if len({chunk.stored.dtype for chunk in chunks}) > 1:
        raise CheckpointError(f"{where} has different dtypes in different files", _HINT)
    dtype = chunks[0].stored.dtype if chunks else "F32"
    return Chunked(dtype, (count,), filling(where, (count,), chunks, _HINT), shape)
