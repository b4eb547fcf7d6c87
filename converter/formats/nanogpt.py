"""Read and write nanoGPT's ckpt.pt: a dictionary of torch.save with the model's tensors and its class's arguments.

The file is a pickle, so gptkit reads it only with --allow-pickle, in a separate process (`pickles`). gptkit writes it
without torch, as an archive (`torch_archive`) that torch.load can memory-map. Reading leaves out the optimizer, the
iteration and other training state. A written file has the iteration of a new run and no optimizer.
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
_COMPILED = "_orig_mod."  # the prefix that torch.compile adds to names
_NOTE = "gptkit"
"""The key under which gptkit notes the kind of GELU, if it is not the one in today's model.py of nanoGPT."""


finds = describe = read = None  # `trained` reads pickles, and recognises this format by their content


def opened(file: Path, content: Any) -> Opened:
    """Return the model in a ckpt.pt, whose `content` was already read.

    Raises CheckpointError unless it is nanoGPT's.
    """
    from ..pickles import not_as_it_is

    if not isinstance(content, dict) or not all(isinstance(content.get(key), dict) for key in ("model", "model_args")):
        raise not_as_it_is(file, content)
    weights, notes = _weights(file, content["model"])
    arguments, bias = _arguments(file, content["model_args"], weights)
    written_by_gptkit = content.get(_NOTE)
    activation: Activation = "gelu"
    if isinstance(written_by_gptkit, dict) and written_by_gptkit.get("activation_function") == "gelu_new":
        activation = "gelu_new"
    elif not isinstance(written_by_gptkit, dict) or written_by_gptkit.get("activation_function") != "gelu":
        notes.append(
            "the file does not say which GELU the model was trained with: gptkit uses the exact one, as "
            "nanoGPT's model.py does"
        )
    if arguments["n_layer"] > len(weights.info):
        raise CheckpointError(
            f"{file} has only {len(weights.info)} tensors, but its model_args say {arguments['n_layer']} layers"
        )
    spec = spec_of(arguments, activation, bias)
    others = [key for key in content if key not in ("model", "model_args", _NOTE)]
    if others:
        notes.append(f"left out, because it is not part of the model: {', '.join(str(key) for key in others)}")
    if not bias:
        notes.append("the model has no biases, but transformers' gpt2 has: --to hf:gpt2 adds biases that are zero")
    text = json.dumps(config_of(arguments, activation), indent=2) + "\n"
    origin = Origin(family="gpt2", config_text=text) if bias else Origin()
    return Opened(spec, origin, bind("nanoGPT", LEAVES, spec), weights, (file,), {}, notes, format="nanogpt")


def _weights(file: Path, state: Mapping[Any, Any]) -> tuple[Weights, list[str]]:
    """Return the tensors of a state dict by their names in nanoGPT's model.py, and notes for the user.

    Buffers and the copy of the tied head are left out.
    """
    from ..pickles import named_tensors
    from ..safetensors import DTYPES
    from ..weights import Weights

    tensors: dict[str, Stored] = {}
    dropped = []
    for own, tensor in named_tensors(file, state):
        name = own.removeprefix(_COMPILED)
        if name in tensors:
            raise CheckpointError(f"{file}: {shown(name, 80)} exists both with and without the prefix {_COMPILED}")
        if is_buffer(name):
            dropped.append(name)
        else:
            tensors[name] = tensor
    notes = [f"buffers that are not weights were left out: {', '.join(dropped[:8])}"] if dropped else []
    if HEAD in tensors and EMBEDDING not in tensors:
        tensors[EMBEDDING] = tensors.pop(HEAD)
        notes.append(f"the file has no embedding; {HEAD} is used instead, because nanoGPT ties the two")
    weights = Weights(tensors)
    weights.check()
    if HEAD not in tensors:
        return weights, notes
    if weights.info[HEAD][0] not in DTYPES or not weights.same(HEAD, EMBEDDING):
        raise CheckpointError(f"{file}: {HEAD} differs from the embedding, although nanoGPT ties the two")
    del tensors[HEAD]
    return Weights(tensors), [*notes, f"{HEAD} is a copy of the embedding, to which it is tied: stored only once"]


def _arguments(file: Path, given: Mapping[Any, Any], weights: Weights) -> tuple[dict[str, int], bool]:
    """Return the sizes that a checkpoint's `model_args` state, by name, and whether the model has biases.

    Checkpoints of nanoGPT's first versions do not say whether they have biases. Then the names of their tensors decide.

    Args:
        file: the file, for messages.
        given: the dictionary `model_args` in the checkpoint.
        weights: the tensors of the checkpoint.
    """
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
    """Plan a ckpt.pt for nanoGPT's model.py.

    `activation` is the GELU of that model.py: "gelu" (exact) today, "gelu_new" (tanh) in older versions.
    """
    from ..dtypes import widest
    from ..safetensors import DTYPES
    from ..write import FolderPlan, Output, Shard

    arguments, leaves = expressed(request.source.spec, activation)
    # In the order of model.py: embeddings, blocks, last norm.
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
"""The format for older versions of nanoGPT's model.py, with the tanh GELU of GPT-2 instead of torch.nn.GELU."""


def _program(arguments: Mapping[str, Any], tensors: list[tuple[BoundLeaf, str]], activation: Activation) -> bytes:
    """Return the pickle of a ckpt.pt: what nanoGPT's train.py saves before the first step, without the optimizer.

    The head and the embedding refer to the same data.
    """
    state = {
        leaf.checkpoint: pickled_tensor(str(index), dtype, leaf.shape) for index, (leaf, dtype) in enumerate(tensors)
    }
    state[HEAD] = state[EMBEDDING]
    content: dict[str, Any] = {"model": state, "model_args": dict(arguments)}
    content |= {"iter_num": 0, "best_val_loss": 1e9, "config": {}}
    if activation != "gelu":
        content[_NOTE] = {"activation_function": activation}
    return program(content)
