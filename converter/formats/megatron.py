"""Read Megatron-LM's checkpoints.

Such a checkpoint has folders mp_rank_TT or mp_rank_TT_PPP, one for every rank of tensor (TT) and pipeline (PPP)
parallelism. Or it is a folder of torch.distributed.checkpoint (torch_dist) that contains common.pt.

The file of a rank has the training arguments. Every pipeline stage numbers its layers from 0, and gptkit renumbers the
layers of later stages. The tensor-parallel parts of a tensor are concatenated. For SwiGLU, the parts of gate_proj and
up_proj are concatenated separately, because every rank has a part of both in one tensor. A tensor that is not split
must be equal in all ranks.
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
from ...architectures.megatron import EMBEDDING, HEAD, LEAVES, config_of, split_dimension
from ...architectures.megatron import named as name_of
from ...components import differences, without_rounding
from ...components.ranges import some_of
from ...errors import CannotExpress, CheckpointError, shown
from ..names import is_folder, stated_name
from ..tree import Origin
from . import ALL_RANKS as _HINT
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


def files_of(folder: Path) -> list[Path]:
    """Return the files of all ranks in a folder, or an empty list. The folder may also be that of one rank."""
    places = [folder, *sorted(folder.iterdir())] if folder.is_dir() else []
    ranks = [place for place in places if _RANK.fullmatch(place.name)]
    ranks = ranks[:1] if ranks[:1] == [folder] else ranks
    files = (next((rank / name for name in _NAMES if (rank / name).is_file()), None) for rank in ranks)
    return [file for file in files if file is not None]


def step_in(folder: Path) -> Path | None:
    """Return the folder of a training run's latest step, or None if `folder` is not a training run.

    Raises CheckpointError if that folder does not exist.
    """
    pointer = folder / LATEST
    if not pointer.is_file():
        return None
    text = stated_name(pointer)
    inside = folder / (f"iter_{text.zfill(7)}" if text.isdecimal() else text)
    if not (text == "release" or text.isdecimal()) or not is_folder(inside):
        raise CheckpointError(
            f"{pointer} names a folder that does not exist: {inside.name}", "Download or copy the checkpoint again."
        )
    return inside


def opened(folder: Path, files: Sequence[Path], contents: Sequence[Any], beside: ModelSpec | None) -> Opened:
    """Join the files of all ranks to one model.

    Args:
        folder: the folder of the checkpoint, for messages.
        files: the files of all ranks.
        contents: the content of every file.
        beside: the model (tree of components) in the folder's config.json, which must be that of the checkpoint. None
            if there is no config.json.

    Raises:
        CheckpointError: ranks are missing or do not match each other. ConfigError: gptkit does not support the training
            arguments.
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


def distributed(folder: Path, stored: Mapping[str, Chunked], beside: ModelSpec | None) -> Opened:
    """Return the model in a checkpoint of Megatron-LM's format torch_dist. Raises the errors of `opened`.

    Args:
        folder: the folder of the checkpoint.
        stored: the tensors that `.metadata` lists, by name. A tensor may contain the weights of all layers.
        beside: the model (tree of components) in the folder's config.json, or None.
    """
    from ..pickles import unpickled
    from .dcp_read import located

    common = folder / COMMON
    arguments = _arguments(common, next(unpickled([common])))
    known = {name: part for name, part in stored.items() if name.startswith(_OURS) and name_of(name) is not None}
    _worth(folder, arguments, sum(len(part.chunks) for part in known.values()))
    tensors: dict[str, Chunked] = {}
    for name, tensor in located(known).items():
        ours = str(name_of(name))
        stacked = ours.startswith("decoder.layers.") and _LAYER.match(ours) is None
        for whole, part in _unstacked(folder, ours, tensor) if stacked else [(ours, tensor)]:
            if whole in tensors:
                raise CheckpointError(f"{folder} has the tensor {shown(whole, 80)} twice", _HINT)
            tensors[whole] = part
    rows = tensors[EMBEDDING].shape[0] if EMBEDDING in tensors and tensors[EMBEDDING].shape else 0
    files = {chunk.stored.path for part in tensors.values() for chunk in part.chunks if chunk.stored.path is not None}
    return _opened(folder, [common, *sorted(files)], arguments, rows, tensors, beside, "read from torch_dist's chunks")


def _unstacked(folder: Path, name: str, tensor: Chunked) -> Iterator[tuple[str, Chunked]]:
    """Yield a name and a tensor for every layer of a tensor that contains the weights of all layers."""
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
    """Raise CheckpointError if the training arguments claim more layers than there are tensors.

    A false number of layers would make gptkit allocate much memory. `there` is the number of tensors.
    """
    layers = arguments.get("num_layers")
    if type(layers) is not int or layers > there:
        raise CheckpointError(
            f"{folder} has only {there} tensors, but its training arguments (args) describe {shown(layers, 20)} layers"
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
    different = [path for path, *_ in differences(without_rounding(beside), without_rounding(spec))] if beside else []
    if different := [path for path in different if path != "context_length"]:
        what = some_of(different, 3, ", …")
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
    """Return the tensors of every pipeline stage and, within a stage, of every tensor-parallel rank.

    The stages are in the order of their layers. With virtual pipeline parallelism, every stage has several parts. The
    second parts of all stages follow after the first parts of all stages.
    """
    tensor, pipeline = arguments.get("tensor_model_parallel_size", 1), arguments.get("pipeline_model_parallel_size", 1)
    if not all(type(size) is int and 0 < size < 2**12 for size in (tensor, pipeline)):
        raise CheckpointError(
            f"{files[0]} has an impossible number of ranks: {shown(tensor, 20)} tensor-parallel, "
            f"{shown(pipeline, 20)} pipeline-parallel"
        )
    states: dict[tuple[int, int], Any] = {}
    for file, content in zip(files, contents, strict=True):
        match = _RANK.fullmatch(file.parent.name)
        place = (int(match[2] or 0), int(match[1])) if match else (0, 0)
        if place in states:
            raise CheckpointError(
                f"{file.parent} has the same tensor- and pipeline-parallel rank as another folder", _HINT
            )
        own = content.get("args") if isinstance(content, dict) else None
        if not isinstance(own, dict):
            raise CheckpointError(f"{file} does not contain the training arguments (args)", _HINT)
        if other := [str(key) for key in arguments if key not in _OWN and own.get(key) != arguments[key]]:
            raise CheckpointError(
                f"{file} and {files[0]} have different training arguments (args): {some_of(other, 3)}", _HINT
            )
        states[place] = content
    outside = any(stage >= pipeline or rank >= tensor for stage, rank in states)
    if len(states) != tensor * pipeline or outside:
        # Only the first missing ranks, because a file may claim any number of ranks.
        claimed = ((stage, rank) for stage in range(pipeline) for rank in range(tensor))
        missing = list(islice((place for place in claimed if place not in states), 4))
        dots = ", …" if tensor * pipeline - len(states) > 4 else ""
        what = (
            f"lacks the files of (pipeline stage, tensor rank) {', '.join(map(str, missing))}{dots}"
            if missing
            else "has the files of more ranks"
        )
        raise CheckpointError(
            f"{folder} {what}, but its training arguments (args) say {tensor} tensor-parallel x {pipeline} "
            "pipeline-parallel ranks",
            _HINT,
        )
    keys = [key for key in states[0, 0] if re.fullmatch(r"model\d*", str(key))]
    if set(keys) != {"model"} and set(keys) != {f"model{number}" for number in range(max(1, len(keys)))}:
        raise CheckpointError(f"{files[0]} contains no model, only {some_of([str(key) for key in states[0, 0]], 6)}")
    ordered = sorted(keys, key=lambda key: int(key[5:] or 0))
    return [
        [_flat(folder, states[stage, rank].get(key)) for rank in range(tensor)]
        for key in ordered
        for stage in range(pipeline)
    ]


_OWN = ("rank", "local_rank", "iteration", "curr_iteration", "data_parallel_random_init")
"""Training arguments that may differ between ranks."""


def _flat(folder: Path, state: Any) -> dict[str, Stored]:
    """Return the tensors in a rank's state dict, under the names of today's Megatron-LM.

    Older checkpoints have nested dictionaries and other names.
    """
    from ..weights import Stored

    tensors: dict[str, Stored] = {}
    for name, value in _entries(state, ()):
        ours = name_of(name)
        if ours is None:
            continue
        if not isinstance(value, Stored):
            raise CheckpointError(
                f"{folder}: {shown(name, 80)} is not a dense tensor with data (for example sparse or quantised)"
            )
        if ours in tensors:
            raise CheckpointError(f"{folder} has two tensors for the same parameter {shown(name, 80)}")
        tensors[ours] = value
    return tensors


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
    """Yield the names and tensors of a pipeline stage, joined from its tensor-parallel ranks.

    `tables` has the tensors of every rank. `gated` says whether the feed-forward is SwiGLU.
    """
    from ..chunks import Chunk, Chunked, filling
    from .ranks import same_in

    for name in tables[0]:
        where = f"{folder}: {shown(name, 80)}"
        if any(name not in table for table in tables):
            raise CheckpointError(
                f"{where} is missing in some of the {len(tables)} tensor-parallel ranks of its pipeline stage", _HINT
            )
        parts = [table[name] for table in tables]
        dim, first = split_dimension(name), parts[0]
        if dim is None or len(parts) == 1:
            for file, part in zip(files[1:], parts[1:], strict=False):
                same_in(name, files[0], first, file, part)
            yield name, Chunked(first.dtype, first.shape, (Chunk((0,) * len(first.shape), first),))
            continue
        if len({(part.dtype, part.shape) for part in parts}) > 1 or len(first.shape) <= dim:
            raise CheckpointError(f"{where} has parts with different sizes or dtypes in different ranks", _HINT)
        if gated and "linear_fc1." in name:
            parts = [half for which in (0, 1) for part in parts for half in [_half(where, part, which)]]
        shape = (*first.shape[:dim], first.shape[dim] * len(tables), *first.shape[dim + 1 :])
        chunks, at = [], 0
        for part in parts:
            chunks.append(Chunk((0,) * dim + (at,) + (0,) * (len(shape) - dim - 1), part))
            at += part.shape[dim]
        yield name, Chunked(first.dtype, shape, filling(where, shape, chunks, _HINT))


def _half(where: str, part: Stored, which: int) -> Stored:
    """Return the rows of gate_proj (`which` is 0) or of up_proj (1) in a rank's tensor that has both."""
    rows = part.shape[0] // 2
    if part.shape[0] % 2 or not part.contiguous:
        raise CheckpointError(f"{where} cannot be split into gate_proj and up_proj with the same number of rows", _HINT)
    count = part.count // 2
    return replace(part, shape=(rows, *part.shape[1:]), strides=None, offset=part.offset + which * count)
