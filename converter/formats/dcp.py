"""Read and write distributed checkpoints of torch (torch.distributed.checkpoint): .distcp files and `.metadata`.

gptkit writes the tensors under the names that transformers uses, and config.json into the same folder. So a model of
transformers, sharded or not, can load the folder with `dcp.load(model.state_dict(), checkpoint_id=folder)`. A tied head
is also listed under its own name. torch's own planner, on the meta device, writes the list of tensors (`.metadata`),
and `torch_archive` describes the bytes of every tensor.

torch.distributed.checkpoint also has a Hugging Face writer. It writes safetensors files with parts of tensors, which
gptkit can read.
"""

from __future__ import annotations

import fnmatch
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...architectures import BoundLeaf, named
from ...architectures.stacks import STACKS
from ...components import ModelSpec
from ...components.ranges import some_of
from ...errors import CheckpointError, InvalidInput
from ..names import CONFIG, INDEX, LOCAL_CONFIG, SINGLE, untrusted
from ..tree import Origin
from . import Opened, Request
from .torch_archive import ALIGNMENT, archive_of, pickled_tensor, program

if TYPE_CHECKING:
    from ..write import FolderPlan, Output, Shard

_METADATA = ".metadata"
_BESIDE = ("optimizer.", "lr_scheduler.", "train_state", "dataloader")
"""The prefixes of entries that torchtitan saves besides the model. The model's own names have no prefix there."""
_SHARDS = "shard-*-model-*-of-*.safetensors"
"""The names that torch's Hugging Face writer gives to files with parts of tensors."""


def finds(path: Path, names: frozenset[str] | None) -> Path | None:
    """Return the folder if it is a distributed checkpoint, else None.

    Such a folder has `.metadata`, or files of the Hugging Face writer, but not the files of a Hugging Face checkpoint.
    `names` are the names of the files in the folder `path`, or None if `path` is a file.
    """
    if names is None or SINGLE in names or INDEX in names:
        return None
    return path if _METADATA in names or fnmatch.filter(names, _SHARDS) else None


def describe(path: Path) -> tuple[ModelSpec, Origin, list[str]]:
    """Return the tree of components, its origin and the unknown config fields, from config.json or gptkit.json.

    Raises InvalidInput.
    """
    from ..tree import read_description

    return read_description(_description(path), path, folder=True)


def _description(path: Path) -> Path:
    for name in (LOCAL_CONFIG, CONFIG):
        if (path / name).is_file():
            return path / name
    raise InvalidInput(
        f"{path} is a distributed checkpoint without a config.json, so gptkit does not know its architecture",
        f"Put the model's {CONFIG} into the same folder as {_METADATA}.",
    )


def read(path: Path, allow_pickle: bool) -> Opened:
    """Open a distributed checkpoint.

    Raises InvalidInput; UntrustedInput if there is `.metadata`, which is a pickle, and pickles are not allowed.
    """
    from ..chunks import chunked
    from ..weights import identity_leaves
    from . import megatron
    from .dcp_read import hugging_face, located, metadata
    from .stack_weights import leaves_of, without_buffers

    pickled = path / _METADATA
    if (path / megatron.COMMON).is_file() and pickled.is_file():
        if not allow_pickle:
            raise untrusted(pickled, "Pass --allow-pickle if you trust its author.")
        tree = describe(path)[0] if (path / CONFIG).is_file() else None
        return megatron.distributed(path, metadata(path)[0], tree)
    described = _description(path)
    spec, origin, _ = describe(path)
    if pickled.is_file():
        if not allow_pickle:
            raise untrusted(
                pickled,
                "Pass --allow-pickle if you trust its author. gptkit reads only names and sizes from this file.",
            )
        tensors, others = metadata(path)
    else:
        tensors, others = hugging_face(sorted(path.glob(_SHARDS))), []
    if len(spec.blocks) > len(tensors):
        raise CheckpointError(
            f"{path} has only {len(tensors)} tensors, but {described.name} describes {len(spec.blocks)} layers",
            f"Put the {described.name} of this model into the folder.",
        )
    local = described.name == LOCAL_CONFIG
    architecture = None if local or origin.family is None else named(origin.family)
    leaves = identity_leaves(spec) if architecture is None else architecture.bind(spec)
    stack = next(
        (candidate for candidate in STACKS if any(f".{name}".endswith(f".{candidate.sign}") for name in tensors)), None
    )
    if stack is not None:  # torchtitan uses Meta's names
        architecture, leaves = None, leaves_of(stack, spec)
    notes: list[str] = []
    prefix = _prefix(path, tensors, leaves)
    model = [name for name in tensors if name.startswith(prefix) and not name.startswith(_BESIDE)]
    own = {name.removeprefix(prefix): tensors[name] for name in model}
    if left_out := [*others, *sorted(tensors.keys() - {*model})]:
        notes.append(
            f"{len(left_out)} entries that are not weights of the model were left out: {some_of(left_out, 3, ', …')}"
        )
    if pickled.is_file():
        own = located(own)
    files = {chunk.stored.path for tensor in own.values() for chunk in tensor.chunks if chunk.stored.path is not None}
    here = (*sorted(files), *([pickled] if pickled.is_file() else []))
    weights = chunked(own)
    if stack is not None:
        weights, _ = without_buffers(weights, stack, notes)
    return Opened(spec, origin, leaves, weights, here, notes=notes, architecture=architecture)


def _prefix(path: Path, names: Iterable[str], leaves: Sequence[BoundLeaf]) -> str:
    """Return the prefix of the model's tensor names, such as "model." if {"model": model.state_dict(), …} was saved."""
    embedding = next(leaf.checkpoint for leaf in leaves if "embedding.weight" in leaf.shared)
    if embedding in names:
        return ""
    prefixes = [name.removesuffix(embedding) for name in names if name.endswith("." + embedding)]
    if len(prefixes) > 1 and "model." in prefixes:
        return "model."
    if len(prefixes) > 1:
        raise CheckpointError(
            f"{path} contains {len(prefixes)} models. Their tensor names begin with "
            f"{', '.join(map(repr, prefixes[:5]))}"
        )
    return prefixes[0] if prefixes else ""


def plan(request: Request) -> FolderPlan:
    """Plan .distcp files, `.metadata` and config.json.

    A model without a family is written under gptkit's own tensor names, with gptkit.json instead of config.json.
    """
    from ..convert import plan_output
    from ..dtypes import parse_dtype

    dtypes = request.source.shared_dtypes(request.asked)
    compute = request.source.dtype if request.asked is None else parse_dtype(request.asked)
    to = "local" if request.source.origin.family is None else "hf"
    spec, origin = request.source.spec, replace(request.source.origin, files={})
    like = plan_output(spec, origin, to, dtypes, compute, None, request.max_shard_bytes, request.source.texts)
    shards = tuple(_lay_out(f"__0_{i}.distcp", shard.outputs) for i, shard in enumerate(like.shards))
    tied = {}
    if to == "hf" and spec.tied:
        tied[named(str(request.source.origin.family)).head] = "embedding.weight"
    texts = {name: text for name, text in like.texts.items() if name != INDEX}
    return replace(
        like, shards=shards, texts={**texts, _METADATA: _metadata(shards, tied)}, companions=request.companions
    )


_FILES = {".format_version": b"1", ".storage_alignment": b"64", "byteorder": b"little", "version": b"3\n"}
"""The small files that torch.save puts into every archive, besides data.pkl and the tensors."""


def _lay_out(name: str, outputs: Iterable[Output]) -> Shard:
    """Lay out a .distcp file: one archive of torch.save per tensor, each at a multiple of 64 bytes."""
    from ..write import Output, Shard

    at, laid = 0, []
    for output in outputs:
        at += -at % ALIGNMENT
        pickled = program(pickled_tensor("0", output.dtype, output.leaf.shape))
        around = archive_of("archive", {"data.pkl": pickled, **_FILES}, [output.nbytes])
        laid.append(Output(output.leaf, output.dtype, at, around.size, around=(around.head, around.tail)))
        at += around.size
    return Shard(name, b"", tuple(laid), at)


def _metadata(shards: Sequence[Shard], tied: Mapping[str, str]) -> bytes:
    """Return the content of `.metadata`: the tensors as torch plans them, and their places in the files.

    A tied head is listed too. `tied` maps its name to gptkit's name of the embedding whose data it shares.
    """
    import torch
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
    from torch.distributed.checkpoint.metadata import StorageMeta

    from ..dtypes import HF_NAMES

    at: dict[str, tuple[Shard, Output]] = {}
    for shard in shards:
        for output in shard.outputs:
            at[output.leaf.checkpoint] = (shard, output)
            at.update({name: (shard, output) for name, shared in tied.items() if shared in output.leaf.shared})
    state: dict[str, Any] = {
        name: torch.empty(output.leaf.shape, dtype=getattr(torch, HF_NAMES[output.dtype]), device="meta")
        for name, (_, output) in at.items()
    }
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=True)
    (planned,), metadata = planner.create_global_plan([planner.create_local_plan()])
    metadata.storage_data = {
        item.index: _StorageInfo(shard.name, output.start, output.nbytes)
        for item in planned.items
        for shard, output in (at[item.index.fqn],)
    }
    metadata.storage_meta = StorageMeta()  # no path of this machine, no random id
    metadata.version = CURRENT_DCP_VERSION
    return pickle.dumps(metadata)
