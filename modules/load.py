"""Load a checkpoint, or an architecture with random weights, as a torch module."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, Unpack

import numpy as np
import torch
from torch import Tensor, nn

from ..analysis.activations import Kernel
from ..components import ModelSpec
from ..converter.checkpoint import Checkpoint, open_checkpoint
from ..converter.convert import companions
from ..converter.dtypes import HF_NAMES, parse_dtype
from ..converter.opening import Opening
from ..converter.outline import Outline, outline
from ..converter.weights import Tree
from ..signatures import takes
from .decoder import Decoder
from .devices import Devices, devices_of, reported_memory
from .placement import allocate, connect, placement, with_memory

_M = TypeVar("_M", bound=nn.Module)


def torch_dtype(dtype: torch.dtype | str | None, default: str = "F32") -> torch.dtype:
    """Return the torch dtype of a dtype or its name. `default` is a safetensors name, used if `dtype` is None.

    Raises:
        UsageError: gptkit does not compute in this dtype.
    """
    name = dtype if isinstance(dtype, str) else str(dtype) if dtype is not None else HF_NAMES[default]
    converted: torch.dtype = getattr(torch, HF_NAMES[parse_dtype(name)])
    return converted


@takes(Opening)
def load(
    model: str | Path,
    dtype: torch.dtype | str | None = None,
    attention: Kernel = "sdpa",
    *,
    device: Devices = "cpu",
    allow_extra: bool = False,
    random: bool = False,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
    **opening: Unpack[Opening],
) -> Decoder:
    """Open a checkpoint and return it as a torch module in eval mode.

    The module computes logits (B, T, vocabulary) from `input_ids` (B, T) and an optional `attention_mask` (B, T).

    Args:
        model: the checkpoint: a folder, a file, a sample, a preset, or a repository on the hub.
        dtype: the dtype to compute in; by default the dtype that the checkpoint names, as in transformers.
        attention: "sdpa" (torch's fused kernels) or "eager" (the formula written out).
        device: the device of the parameters: "cpu", "cuda" (the first GPU), "cuda:1", "mps", or "auto" (a GPU if there
            is one). Several, such as "cuda:0,cuda:1" or a list, divide the layers among them. Token ids then go in, and
            logits come out, on the first device.
        offline, allow_pickle: see `Opening`.
        allow_extra: leave out tensors that have no place in the model instead of refusing them.
        random: draw random weights instead of reading those of a checkpoint. A preset, a config.json or a gptkit.json
            is then enough. The dtype is then float32 unless `dtype` says otherwise. `initialise` describes the
            distributions.
        seed: the seed of the random weights.
        progress: called with the number of bytes of every tensor after it is read.

    Raises:
        InvalidInput, Offline: as in `open_checkpoint`.
        UsageError: the dtype, the attention or the device is unknown; the model cannot be divided over these devices.
        GptkitError: the weights do not fit into the memory of the GPU, or random weights into that of the machine.
    """
    places = devices_of(device)
    if random:
        from .initialise import drawn_from

        tree = outline(str(model), **opening)
        drawn = load_random(tree.spec, dtype, attention, seed=seed, name=str(model), device=places, progress=progress)
        drawn.source = drawn_from(tree, seed, parse_dtype(str(torch_dtype(dtype))))
        return drawn
    checkpoint = open_checkpoint(model, allow_extra=allow_extra, **opening)
    return load_checkpoint(checkpoint, dtype, attention, device=places, progress=progress)


def load_checkpoint(
    checkpoint: Checkpoint, dtype: torch.dtype | str | None = None, attention: Kernel = "sdpa", **options: Any
) -> Decoder:
    """Return an opened checkpoint as a torch module in eval mode, as `load` does.

    This needs memory for the weights in `dtype`, and for one stored tensor. `options` are `device` and `progress`.
    """
    spec, folder = checkpoint.spec, companions(checkpoint)
    with reported_memory(checkpoint.reference):
        model = build(spec, checkpoint.tensors(), torch_dtype(dtype, checkpoint.dtype), attention, **options)
    model.source = Outline(spec, checkpoint.origin, folder, checkpoint.revision, texts=checkpoint.texts)
    return model


def load_random(
    spec: ModelSpec,
    dtype: torch.dtype | str | None = None,
    attention: Kernel = "sdpa",
    *,
    seed: int = 0,
    name: str = "the model",
    device: Devices = "cpu",
    **options: Any,
) -> Decoder:
    """Build a model with random weights. The arguments are those of `load`; `options` may have `progress`.

    Without a dtype, the weights are in float32. Error messages call the model `name`.
    """
    from .initialise import initialised, require_memory

    wanted = torch_dtype(dtype)
    stored = parse_dtype(str(wanted))
    places = devices_of(device)
    if all(place.type == "cpu" for place in places):
        require_memory(spec, stored, name)
    with reported_memory(name):
        return build(spec, initialised(spec, seed, stored), wanted, attention, device=places, **options)


def build(
    spec: ModelSpec,
    tensors: Iterable[tuple[str, np.ndarray, str]],
    dtype: torch.dtype,
    attention: Kernel = "sdpa",
    *,
    device: Devices = "cpu",
    progress: Callable[[int], None] | None = None,
) -> Decoder:
    """Build a model in eval mode, and fill it with tensors, given as (gptkit's name, array, dtype).

    An array of dtype BF16 is uint16, because numpy has no bf16. `device` is one device or several, as in `load`.
    """
    places = placement(spec, dtype.itemsize, devices_of(device))

    def values() -> Iterator[tuple[str, Tensor]]:
        for name, array, stored in tensors:
            yield name, as_torch(array, stored)
            if progress is not None:
                progress(array.nbytes)

    with torch.device("meta"):
        model = Decoder(spec, attention).to(dtype)
    allocate(model, places)
    if len(places.nbytes) > 1:
        connect(model, places)
    return _fill(model, values())


def filled(
    make: Callable[[], _M],
    read: Callable[[str], Tensor],
    dtype: torch.dtype,
    path: str = "",
    device: torch.device | str = "cpu",
) -> _M:
    """Build a part of a model, such as one layer, as a module in eval mode with its parameters.

    Args:
        make: a function that builds the module. It is called on the meta device, without memory for parameters.
        read: a function that returns a parameter by its name in the whole model.
        dtype: the dtype of the parameters.
        path: the name of the part in the model, such as "blocks.0". It is a prefix of its parameters' names.
        device: the device of the parameters.
    """
    module, prefix = _empty(make, dtype, device), f"{path}." if path else ""
    return _fill(module, ((name, read(prefix + name)) for name, _ in module.named_parameters()))


def _empty(make: Callable[[], _M], dtype: torch.dtype, device: str | torch.device) -> _M:
    """Build a module with memory for its parameters, which are not initialised."""
    with torch.device("meta"):
        module = make().to(dtype)
    return with_memory(module, device)


def _fill(module: _M, tensors: Iterable[tuple[str, Tensor]]) -> _M:
    """Copy tensors into a module's parameters, one by one, rounded to their dtype. Return the module in eval mode."""
    parameters = dict(module.named_parameters())
    with torch.no_grad():
        for name, values in tensors:
            parameters.pop(name).copy_(values)
    assert not parameters, f"never filled: {list(parameters)[:4]}"
    return module.eval()


def as_torch(array: np.ndarray, dtype: str) -> torch.Tensor:
    """Return a copy of an array as a tensor. `dtype` is the true dtype: an array of dtype BF16 is uint16."""
    return view_as_torch(np.array(array), dtype)  # a copy, since a file's pages are read-only and tensors cannot be


def tensor_of(tree: Tree, name: str) -> Tensor:
    """Return a tensor of an opened checkpoint by its name in gptkit.

    Do not write into the tensor: it may share memory with the mapped file.
    """
    return view_as_torch(*tree.tensor(name))


def as_array(tensor: Tensor) -> tuple[np.ndarray, str]:
    """Return a tensor as an array with the same strides, and its dtype. A bf16 tensor becomes a uint16 array."""
    values, dtype = tensor.detach().cpu(), parse_dtype(str(tensor.dtype))
    return (values.view(torch.int16).numpy().view(np.uint16) if dtype == "BF16" else values.numpy()), dtype


def view_as_torch(array: np.ndarray, dtype: str) -> torch.Tensor:
    """Return a tensor that shares the array's memory, with the true dtype as in `as_torch`. Do not write into it."""
    if not array.flags.writeable:  # torch warns about read-only arrays, so pass the same memory without that flag
        interface = {**array.__array_interface__, "data": (array.__array_interface__["data"][0], False)}
        array = np.asarray(SimpleNamespace(__array_interface__=interface, kept=array))
    if dtype == "BF16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
