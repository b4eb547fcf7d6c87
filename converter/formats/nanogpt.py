"""nanoGPT's ckpt.pt: a dictionary that torch.save wrote, with the model's tensors and the arguments of its class.

It is a pickle, read as `pickles` reads one: behind --allow-pickle, by a process of its own. It is written without
torch, as an archive (`torch_archive`) that torch.load can map.
Optimizer, iteration and the like are not part of a model: they are left out, and written as those of a fresh one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ...architectures.base import BoundLeaf, bind
from ...architectures.nanogpt import ARGUMENTS, EMBEDDING, HEAD, LEAVES, config_of, expressed, is_buffer, spec_of
from ...components import Activation
from ...errors import CheckpointError, shown
from ..tree import Origin
from . import Opened, Request
from .torch_archive import archive_of, pickled_tensor, program

if TYPE_CHECKING:
    from ..weights import Stored, Weights
    from ..write import FolderPlan

_NAME = "ckpt.pt"
_COMPILED = "_orig_mod."  # what torch.compile puts before every name
_NOTE = "gptkit"
"""The entry in which a checkpoint written here says its GELU, where it is not the one of today's model.py."""


finds = describe = read = None  # a pickle, whose it is is told by what is in it (`trained`)


def opened(file: Path, content: Any) -> Opened:
    """What such a file holds. Raises CheckpointError for anything but nanoGPT's own."""
    from ..pickles import not_as_it_is

    if not isinstance(content, dict) or not all(isinstance(content.get(key), dict) for key in ("model", "model_args")):
        raise not_as_it_is(file, content)
    weights, notes = _weights(file, content["model"])
    arguments, bias = _arguments(file, content["model_args"], weights)
    said = content.get(_NOTE)
    activation: Activation = "gelu"
    if isinstance(said, dict) and said.get("activation_function") == "gelu_new":
        activation = "gelu_new"
    elif not isinstance(said, dict) or said.get("activation_function") != "gelu":
        notes.append(
            "the file does not say which GELU the model was trained with: gptkit uses the exact one, as "
            "nanoGPT's model.py does"
        )
    if arguments["n_layer"] > len(weights.info):
        raise CheckpointError(
            f"{file} has only {len(weights.info)} tensors, but its model_args say {arguments['n_layer']} layers"
        )
    spec = spec_of(arguments, activation, bias)
    kept = [key for key in content if key not in ("model", "model_args", _NOTE)]
    if kept:
        notes.append(f"left out, because it is not part of the model: {', '.join(str(key) for key in kept)}")
    if not bias:
        notes.append("the model has no biases, but transformers' gpt2 has: --to hf:gpt2 adds biases that are zero")
    text = json.dumps(config_of(arguments, activation), indent=2) + "\n"
    origin = Origin(family="gpt2", config_text=text) if bias else Origin()
    return Opened(spec, origin, bind("nanoGPT", LEAVES, spec), weights, (file,), {}, notes, format="nanogpt")


def _weights(file: Path, state: Mapping[Any, Any]) -> tuple[Weights, list[str]]:
    """The tensors by the names of model.py, without buffers and without the second copy of the tied head."""
    from ..pickles import named_tensors
    from ..safetensors import DTYPES
    from ..weights import Weights

    found: dict[str, Stored] = {}
    dropped = []
    for own, tensor in named_tensors(file, state):
        name = own.removeprefix(_COMPILED)
        if name in found:
            raise CheckpointError(f"{file}: {shown(name, 80)} exists both with and without the prefix {_COMPILED}")
        if is_buffer(name):
            dropped.append(name)
        else:
            found[name] = tensor
    notes = [f"buffers that are not weights were left out: {', '.join(dropped[:8])}"] if dropped else []
    if HEAD in found and EMBEDDING not in found:
        found[EMBEDDING] = found.pop(HEAD)
        notes.append(f"the file has no embedding; {HEAD} is used instead, because nanoGPT ties the two")
    weights = Weights(found)
    weights.check()
    if HEAD not in found:
        return weights, notes
    if weights.info[HEAD][0] not in DTYPES or not weights.same(HEAD, EMBEDDING):
        raise CheckpointError(f"{file}: {HEAD} differs from the embedding, although nanoGPT ties the two")
    del found[HEAD]
    return Weights(found), [*notes, f"{HEAD} is a copy of the embedding, to which it is tied: stored only once"]


def _arguments(file: Path, given: Mapping[Any, Any], weights: Weights) -> tuple[dict[str, int], bool]:
    """The sizes, and whether there are biases (the first versions did not say: they had them)."""
    other = [str(key) for key in given if key not in (*ARGUMENTS, "bias", "dropout")]
    missing = [key for key in ARGUMENTS if type(given.get(key)) is not int]
    if other or missing:
        what = (
            f"no field {missing[0]}"
            if missing
            else f"the fields {shown(', '.join(other), 80)}, which nanoGPT does not have"
        )
        raise CheckpointError(f"{file} is not a nanoGPT checkpoint: its model_args have {what}")
    bias = given.get("bias", "transformer.ln_f.bias" in weights.info)
    if not isinstance(bias, bool):
        raise CheckpointError(f"{file}: model_args has bias={shown(bias, 40)}, expected true or false")
    return {key: given[key] for key in ARGUMENTS}, bias


def plan(request: Request, activation: Activation = "gelu") -> FolderPlan:
    """A checkpoint for nanoGPT's model.py as it is today, or for one with another GELU."""
    from ..dtypes import widest
    from ..safetensors import DTYPES
    from ..write import FolderPlan, Output, Shard

    arguments, leaves = expressed(request.source.spec, activation)
    # As model.py lists them: the embeddings, the blocks, the last norm.
    leaves.sort(key=lambda leaf: leaf.checkpoint.startswith("transformer.ln_f."))
    dtypes = request.source.shared_dtypes(request.asked)
    tensors = [(leaf, widest([dtypes[name] for name in leaf.shared])) for leaf in leaves]
    files = {"data.pkl": _program(arguments, tensors, activation), "byteorder": b"little", "version": b"3\n"}
    archive = archive_of("ckpt", files, [math.prod(leaf.shape) * DTYPES[dtype].itemsize for leaf, dtype in tensors])
    outputs = tuple(
        Output(leaf, dtype, member.start, member.size, around=(member.head, member.tail))
        for (leaf, dtype), member in zip(tensors, archive.tensors, strict=True)
    )
    return FolderPlan(
        (Shard(_NAME, archive.header, outputs, archive.size, ending=archive.end),), {}, request.companions
    )


TANH = SimpleNamespace(finds=None, describe=None, read=None, plan=partial(plan, activation="gelu_new"))
"""The same for a model.py with GPT-2's own GELU, as it was before torch.nn.GELU, as a format to write."""


def _program(arguments: Mapping[str, Any], tensors: list[tuple[BoundLeaf, str]], activation: Activation) -> bytes:
    """The pickle: what train.py saves before the first step, but for the optimizer. The head is the embedding."""
    state = {
        leaf.checkpoint: pickled_tensor(str(index), dtype, leaf.shape) for index, (leaf, dtype) in enumerate(tensors)
    }
    state[HEAD] = state[EMBEDDING]
    content: dict[str, Any] = {"model": state, "model_args": dict(arguments)}
    content |= {"iter_num": 0, "best_val_loss": 1e9, "config": {}}
    if activation != "gelu":
        content[_NOTE] = {"activation_function": activation}
    return program(content)
