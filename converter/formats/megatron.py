"""Megatron-LM's checkpoints: mp_rank_TT or mp_rank_TT_PPP, a folder a rank of tensor and of pipeline parallelism; or a
folder of torch.distributed.checkpoint (torch_dist) with common.pt in it.

A rank's file says with which arguments it was trained. Stages have layers of their own numbers, which follow one
another; what the ranks of a stage share out lies side by side, but for the gates and ups of SwiGLU, of which each rank
has its part of both. What is not shared out has to be the same in all of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...architectures import named
from ...architectures.base import bind
from ...architectures.megatron import EMBEDDING, HEAD, LEAVES, config_of, shared_out
from ...architectures.megatron import named as name_of
from ...components import differences, without_rounding
from ...components.ranges import some_of
from ...errors import CannotExpress, CheckpointError, shown
from ..names import is_folder, stated_name
from ..tree import Origin
from . import Opened

if TYPE_CHECKING:
    from ...components import ModelSpec
    from ..chunks import Chunked
    from ..weights import Stored

LATEST, COMMON = "latest_checkpointed_iteration.txt", "common.pt"
_OURS = ("embedding.", "decoder.", "output_layer.")
_RANK = re.compile(r"mp_rank_(\d{2,5})(?:_(\d{3,5}))?")
_NAMES = ("model_optim_rng.pt", "model_rng.pt")
_LAYER = re.compile(r"^decoder\.layers\.(\d{1,5})\.")
_HINT = "Put the files of all ranks of one training step into the folder, and no other files."


def files_of(folder: Path) -> list[Path]:
    """The files of the ranks in a folder, or of the one rank that it is; none where it is no such folder."""
    places = [folder, *sorted(folder.iterdir())] if folder.is_dir() else []
    ranks = [each for each in places if _RANK.fullmatch(each.name)]
    ranks = ranks[:1] if ranks[:1] == [folder] else ranks
    return [file for each in ranks for file in [next((each / n for n in _NAMES if (each / n).is_file()), None)] if file]


def step_in(folder: Path) -> Path | None:
    """The folder of the step that a run's folder names, None where it is no run's. Raises CheckpointError."""
    said = folder / LATEST
    if not said.is_file():
        return None
    text = stated_name(said)
    inside = folder / (f"iter_{text.zfill(7)}" if text.isdecimal() else text)
    if not (text == "release" or text.isdecimal()) or not is_folder(inside):
        raise CheckpointError(
            f"{said} names a folder that does not exist: {inside.name}", "Download or copy the checkpoint again."
        )
    return inside


def opened(folder: Path, files: Sequence[Path], contents: Sequence[Any], beside: ModelSpec | None) -> Opened:
    """The model in the files of all ranks. beside: the tree of a config.json that lies there, which is to be the same.

    Raises:
        CheckpointError: ranks are missing or do not fit one another. ConfigError: as `config_of`.
    """
    arguments = _arguments(files[0], contents[0])
    stages = _stages(folder, files, contents, arguments)
    rows = sum(table[EMBEDDING].shape[0] for table in stages[0] if EMBEDDING in table and table[EMBEDDING].shape)
    _worth(folder, arguments, sum(len(table) for stage in stages for table in stage))
    tensors: dict[str, Chunked] = {}
    first = 0
    for tables in stages:
        numbers = {int(match[1]) for name in tables[0] if (match := _LAYER.match(name))}
        if numbers != set(range(len(numbers))):
            what = (
                f"a pipeline stage has the layers {some_of(sorted(numbers), 8)}, but its layers must be numbered from 0"
            )
            raise CheckpointError(f"{folder}: {what}", _HINT)
        for name, tensor in _joined(folder, files, tables, bool(arguments.get("swiglu"))):
            own = _LAYER.match(name)
            whole = name if own is None else f"decoder.layers.{int(own[1]) + first}.{name[own.end() :]}"
            if whole in tensors and whole != HEAD:
                raise CheckpointError(
                    f"{folder}: the tensor {shown(whole, 80)} is in the files of two pipeline stages", _HINT
                )
            tensors[whole] = tensor
        first += len(numbers)
    how = f"joined from {len(files)} ranks ({len(stages[0])} of tensor parallelism)"
    return _opened(folder, files, arguments, rows, tensors, beside, how)


def distributed(folder: Path, found: Mapping[str, Chunked], beside: ModelSpec | None) -> Opened:
    """The model in a folder of torch_dist: `found` by torch.distributed.checkpoint's names, of which some hold all
    layers one behind the other. Raises as `opened`.
    """
    from ..pickles import unpickled
    from .dcp_read import located

    common = folder / COMMON
    arguments = _arguments(common, next(unpickled([common])))
    kept = {name: each for name, each in found.items() if name.startswith(_OURS) and name_of(name) is not None}
    _worth(folder, arguments, sum(len(each.chunks) for each in kept.values()))
    tensors: dict[str, Chunked] = {}
    for name, tensor in located(kept).items():
        ours = str(name_of(name))
        stacked = ours.startswith("decoder.layers.") and _LAYER.match(ours) is None
        for whole, each in _unstacked(folder, ours, tensor) if stacked else [(ours, tensor)]:
            if whole in tensors:
                raise CheckpointError(f"{folder} has {shown(whole, 80)} twice", _HINT)
            tensors[whole] = each
    rows = tensors[EMBEDDING].shape[0] if EMBEDDING in tensors and tensors[EMBEDDING].shape else 0
    files = {chunk.stored.path for each in tensors.values() for chunk in each.chunks if chunk.stored.path is not None}
    return _opened(folder, [common, *sorted(files)], arguments, rows, tensors, beside, "read from torch_dist's chunks")


def _unstacked(folder: Path, name: str, tensor: Chunked) -> Iterator[tuple[str, Chunked]]:
    """A tensor of all layers, a layer at a time."""
    from ..chunks import Chunk, Chunked, filling

    where, rest = f"{folder}: {shown(name, 80)}", name.removeprefix("decoder.layers.")
    boxes: dict[int, list[Chunk]] = {}
    for (first, *offsets), stored in (chunk for chunk in tensor.chunks if chunk.stored.shape):
        if not stored.contiguous:
            raise CheckpointError(f"{where} is not contiguous in memory: it was saved with strides", _HINT)
        count, shape = stored.count // max(stored.shape[0], 1), stored.shape[1:]
        for layer in range(stored.shape[0]):
            part = replace(stored, shape=shape, strides=None, offset=stored.offset + layer * count)
            boxes.setdefault(first + layer, []).append(Chunk(tuple(offsets), part))
    for layer, chunks in boxes.items():
        full = filling(where, tensor.shape[1:], chunks, _HINT)
        yield f"decoder.layers.{layer}.{rest}", Chunked(tensor.dtype, tensor.shape[1:], full)


def _arguments(file: Path, content: Any) -> Mapping[str, Any]:
    arguments = content.get("args") if isinstance(content, dict) else None
    if not isinstance(arguments, dict):
        raise CheckpointError(f"{file} does not contain the training arguments (args), which gptkit needs", _HINT)
    version = content.get("checkpoint_version", 0)
    if not isinstance(version, int | float) or version < 2:
        raise CheckpointError(f"{file} has checkpoint_version {shown(version, 20)}, but gptkit reads only 2 and later")
    return arguments


def _worth(folder: Path, arguments: Mapping[str, Any], there: int) -> None:
    """Refuse more layers than there are tensors, before a tree is made of them."""
    layers = arguments.get("num_layers")
    if type(layers) is not int or layers > there:
        raise CheckpointError(
            f"{folder} has only {there} tensors, but the arguments in it describe {shown(layers, 20)} layers"
        )


def _opened(
    folder: Path,
    files: Sequence[Path],
    arguments: Mapping[str, Any],
    rows: int,
    tensors: Mapping[str, Chunked],
    beside: ModelSpec | None,
    how: str,
) -> Opened:
    from ..chunks import chunked

    config = config_of(arguments, rows)
    family = named(config["model_type"])
    spec, _ = family.spec_and_unknown({**config, "architectures": [family.hf_class]})
    told = [path for path, *_ in differences(without_rounding(beside), without_rounding(spec))] if beside else []
    if told := [path for path in told if path != "context_length"]:
        what = some_of(told, 3, ", …")
        raise CheckpointError(
            f"{folder}: config.json and the arguments in {files[0].name} describe different models ({what})"
        )
    leaves, weights = _bound(spec), chunked(tensors)
    notes = [f"{how}; the embedding keeps the padded vocabulary of {rows:,} rows from training"]
    if spec.tied and {HEAD, EMBEDDING} <= weights.info.keys():  # the last stage's copy
        if not weights.same(HEAD, EMBEDDING):
            raise CheckpointError(
                f"{folder}: {HEAD} differs from the embedding, although the training arguments tie the two", _HINT
            )
        del weights.info[HEAD]
        notes.append(f"{HEAD} is a copy of the embedding, to which it is tied: stored only once")
    text = json.dumps({**config, "architectures": [family.hf_class]}, indent=2) + "\n"
    origin = Origin(family=family.name, config_text=text)
    return Opened(spec, origin, leaves, weights, tuple(files), notes=notes, format="Megatron-LM's")


def _bound(spec: ModelSpec) -> list[Any]:
    try:
        return bind("Megatron-LM", LEAVES, spec)
    except CannotExpress as error:
        raise CheckpointError(
            f"the training arguments (args) in the checkpoint do not match its tensors: {error.message}"
        ) from error


def _stages(
    folder: Path, files: Sequence[Path], contents: Sequence[Any], arguments: Mapping[str, Any]
) -> list[list[dict[str, Stored]]]:
    """The tensors by stage, in the order of layers, and by rank in it; virtual stages follow all the stages before."""
    tensor, pipeline = arguments.get("tensor_model_parallel_size", 1), arguments.get("pipeline_model_parallel_size", 1)
    if not all(type(each) is int and 0 < each < 2**12 for each in (tensor, pipeline)):
        raise CheckpointError(
            f"{files[0]} has an impossible number of ranks: {shown(tensor, 20)} tensor-parallel, "
            f"{shown(pipeline, 20)} pipeline-parallel"
        )
    found: dict[tuple[int, int], Any] = {}
    for file, content in zip(files, contents, strict=True):
        match = _RANK.fullmatch(file.parent.name)
        place = (int(match[2] or 0), int(match[1])) if match else (0, 0)
        if place in found:
            raise CheckpointError(f"another folder has the same rank as {file.parent}", _HINT)
        own = content.get("args") if isinstance(content, dict) else None
        if not isinstance(own, dict):
            raise CheckpointError(f"{file} does not contain the training arguments (args)", _HINT)
        if other := [str(key) for key in arguments if key not in _OWN and own.get(key) != arguments[key]]:
            raise CheckpointError(
                f"{file} has other training arguments than {files[0].parent.name}: {some_of(other, 3)}", _HINT
            )
        found[place] = content
    outside = any(stage >= pipeline or rank >= tensor for stage, rank in found)
    if len(found) != tensor * pipeline or outside:
        # Of all the ranks that a file may claim, the first ones that are not there.
        claimed = ((stage, rank) for stage in range(pipeline) for rank in range(tensor))
        missing = list(islice((place for place in claimed if place not in found), 4))
        dots = ", …" if tensor * pipeline - len(found) > 4 else ""
        what = (
            f"lacks the files of (pipeline stage, tensor rank) {', '.join(map(str, missing))}{dots}"
            if missing
            else "has more files than those"
        )
        raise CheckpointError(
            f"{folder} {what}; its arguments say {tensor} tensor-parallel x {pipeline} pipeline-parallel ranks", _HINT
        )
    keys = [key for key in found[0, 0] if re.fullmatch(r"model\d*", str(key))]
    if set(keys) != {"model"} and set(keys) != {f"model{number}" for number in range(max(1, len(keys)))}:
        raise CheckpointError(f"{files[0]} contains no model, only {some_of([str(key) for key in found[0, 0]], 6)}")
    ordered = sorted(keys, key=lambda key: int(key[5:] or 0))
    return [
        [_flat(folder, found[stage, rank].get(key)) for rank in range(tensor)]
        for key in ordered
        for stage in range(pipeline)
    ]


_OWN = ("rank", "local_rank", "iteration", "curr_iteration", "data_parallel_random_init")
"""Arguments in which ranks may differ."""


def _flat(folder: Path, state: Any) -> dict[str, Stored]:
    """The tensors of a rank, by their names among the leaves; older ones lie in dictionaries within one another."""
    from ..weights import Stored

    found: dict[str, Stored] = {}
    for name, value in _entries(state, ()):
        ours = name_of(name)
        if ours is None:
            continue
        if not isinstance(value, Stored):
            raise CheckpointError(
                f"{folder}: {shown(name, 80)} is not a dense tensor with data (for example sparse or quantised)"
            )
        if ours in found:
            raise CheckpointError(f"{folder} has two tensors for the same parameter {shown(name, 80)}")
        found[ours] = value
    return found


def _entries(state: Any, where: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    if not isinstance(state, dict) or len(where) > 4:
        return
    for key, value in state.items():
        if isinstance(key, str) and isinstance(value, dict):
            yield from _entries(value, (*where, key))
        elif isinstance(key, str):
            yield ".".join((*where, key)), value


def _joined(
    folder: Path, files: Sequence[Path], tables: Sequence[dict[str, Stored]], gated: bool
) -> Iterator[tuple[str, Chunked]]:
    """The tensors of a stage, of its ranks' parts."""
    from ..chunks import Chunk, Chunked, filling
    from .ranks import same_in

    for name in tables[0]:
        where = f"{folder}: {shown(name, 80)}"
        if any(name not in table for table in tables):
            raise CheckpointError(
                f"{where} is missing in some of the {len(tables)} tensor-parallel ranks of its pipeline stage", _HINT
            )
        parts = [table[name] for table in tables]
        dim, first = shared_out(name), parts[0]
        if dim is None or len(parts) == 1:
            for file, each in zip(files[1:], parts[1:], strict=False):
                same_in(name, files[0], first, file, each)
            yield name, Chunked(first.dtype, first.shape, (Chunk((0,) * len(first.shape), first),))
            continue
        if len({(each.dtype, each.shape) for each in parts}) > 1 or len(first.shape) <= dim:
            raise CheckpointError(f"{where} has parts with different sizes or dtypes in different ranks", _HINT)
        if gated and "linear_fc1." in name:
            parts = [half for which in (0, 1) for each in parts for half in [_half(where, each, which)]]
        shape = (*first.shape[:dim], first.shape[dim] * len(tables), *first.shape[dim + 1 :])
        chunks, at = [], 0
        for each in parts:
            chunks.append(Chunk((0,) * dim + (at,) + (0,) * (len(shape) - dim - 1), each))
            at += each.shape[dim]
        yield name, Chunked(first.dtype, shape, filling(where, shape, chunks, _HINT))


def _half(where: str, part: Stored, which: int) -> Stored:
    """The rows of a rank's gate, or of its up."""
    rows = part.shape[0] // 2
    if part.shape[0] % 2 or not part.contiguous:
        raise CheckpointError(f"{where} cannot be split into gate_proj and up_proj with the same number of rows", _HINT)
    count = part.count // 2
    return replace(part, shape=(rows, *part.shape[1:]), strides=None, offset=part.offset + which * count)
