"""Run models of any size in little memory: gptkit reads some rows of a weight, multiplies by them, and releases them.

gptkit's decoder runs unchanged. Only its norms and biases are in memory; its other parameters are on the meta device.
The weight of a linear map or an embedding is read when the module is called. All batches run together, so that each
weight is read once: a forward pass pauses at every linear map (see `passes`), and the inputs of all waiting passes are
multiplied together. Matrix products are only split along their outputs. So every sum is computed as in the whole
product, as far as the kernel allows.

A model computes on the device of its batches, and the weights are copied there as they are read.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from ..converter.weights import Tree
from ..modules.decoder import Decoder, EmbeddingModule, HeadModule, HeadTransformModule
from ..modules.layers import LinearModule, multiply
from ..modules.load import filled, tensor_of
from ..modules.registry import build_module
from .outputs import outputs_of
from .passes import ask, hooked, run_together, trim_heaps
from .probe import EMBEDDING, ENCODER, TABLES, ProbeBatch, device_of_batches

_CHUNK_BYTES = 8 * 2**20  # widened rows of a weight in memory at once
_MAPPED_BYTES = 32 * 2**20  # bytes read from a mapped file after which its pages are released
_LARGE_BYTES = 4 * 2**20  # after a product of this size, freed memory is returned to the system

_See = Callable[[str, Tensor, Any], None]
"""Called with a module's path, its input and its output, in the pass of the batch in `probe.RUNNING`."""
_Feed = Callable[[int], Tensor | None]
"""Returns a layer's replacement input, in the pass of the batch in `probe.RUNNING`; None keeps the input."""


def states(
    tree: Tree,
    batches: Sequence[ProbeBatch],
    dtype: torch.dtype,
    *,
    see: _See | None = None,
    seen: Sequence[str] = (),
    feed: _Feed | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[Tensor]:
    """Run a model and return the hidden states after the last norm, (B, T, hidden) per batch, on the batches' device.

    Args:
        tree: the model.
        batches: its inputs. All are on one device.
        dtype: the dtype to which weights are converted, and in which the model computes.
        see: called with the path, the input and the output of every module in `seen`.
        seen: paths of modules in the decoder, such as "blocks.3".
        feed: called with a layer's index before the block runs. It returns another input for the block, or None to keep
            the computed input.
        progress: called with the size in bytes of every weight after it was read.

    Raises:
        IndexError: a token id is beyond the vocabulary, or a batch is longer than the position table.
    """
    device = device_of_batches(batches)
    model = _model(tree, dtype, device)
    modules = dict(model.named_modules())

    def tell(path: str, _: nn.Module, inputs: Any, output: Any) -> None:
        if see is not None:
            see(path, inputs[0], output)

    def fed(layer: int, _: nn.Module, inputs: Any) -> Any:
        value = None if feed is None else feed(layer)
        return None if value is None else (value, *inputs[1:])

    hooks = [modules[path].register_forward_hook(partial(tell, path)) for path in seen]
    hooks += [block.register_forward_pre_hook(partial(fed, n)) for n, block in enumerate(model.blocks)]
    for path in (f"{stack}{table}" for stack in ("", ENCODER) for table in TABLES):
        module = modules.get(path.removesuffix(".weight"))
        shared = isinstance(module, EmbeddingModule) and module.spec.shared
        if module is not None and (shared or getattr(module, "weight", None) is not None):  # positions may have none
            hooks += _gathered(module, tree, EMBEDDING if shared else path, dtype, device)
    linears = [module for module in model.modules() if isinstance(module, _Rows)]

    def serve(place: int, brought: list[Tensor]) -> Generator[Tensor]:
        sizes, together = [len(x) for x in brought], torch.cat(brought)
        del brought
        parts = list(torch.split(linears[place].product(together, tree.release, progress), sizes))
        del together
        while parts:
            yield parts.pop(0)

    with hooked(hooks):
        outputs = run_together(partial(outputs_of, model), batches, serve)
    if sum(output.nbytes for output in outputs) > _LARGE_BYTES:
        trim_heaps()
    return outputs


def final_norm(tree: Tree, dtype: torch.dtype, device: torch.device | str = "cpu") -> nn.Module:
    """Return a model's last norm as a module with its weights on a device, or the identity if it has none."""
    if tree.spec.final_norm is None:
        return nn.Identity()
    make: Callable[[], nn.Module] = partial(build_module, tree.spec.final_norm)
    return filled(make, partial(tensor_of, tree), dtype, "final_norm", device)


def head_rows(
    tree: Tree, dtype: torch.dtype, columns: Sequence[Tensor | slice], device: torch.device | str = "cpu"
) -> Iterator[Callable[[Tensor], Tensor]]:
    """Yield functions that compute the logits of some tokens from the head's input, (N, hidden) -> (N, tokens).

    There is one function for each item of `columns`, which has token ids (on the CPU) or is a slice of the vocabulary.
    The functions compute on `device`. Use a function before you ask for the next one.
    """
    head = tree.spec.head
    if head is None:  # the hidden states are compared
        yield from (lambda x, ids=ids: x[..., ids] for ids in columns)
        return
    transform = None
    if head.transform is not None:
        make = partial(HeadTransformModule, head.transform)
        transform = filled(make, partial(tensor_of, tree), dtype, "head.transform", device)
    weight = tensor_of(tree, "embedding.weight" if head.tied else "head.weight")
    bias = tensor_of(tree, "head.bias") if head.bias else None
    projection = tensor_of(tree, "head.projection.weight") if head.width is not None else None
    for tokens in columns:
        rows = weight[tokens].to(dtype)
        if head.tied and tree.spec.embedding.blank is not None:
            rows = rows.masked_fill((torch.arange(len(weight))[tokens] == tree.spec.embedding.blank)[:, None], 0)
        with torch.device("meta"):
            module = HeadModule(msgspec.structs.replace(head, vocab_size=len(rows), tied=False))
        module.transform, rows = transform, rows.to(device)
        module.weight = nn.Parameter(rows, requires_grad=False)
        if module.projection is not None and projection is not None:
            module.projection.weight = nn.Parameter(projection.to(device, dtype), requires_grad=False)
        if bias is not None:
            module.bias = nn.Parameter(bias[tokens].to(device, dtype), requires_grad=False)
        yield partial(module, embedding=rows)
        tree.release()


class _Rows(nn.Module):
    """A linear map without a weight in memory: it reads the weight from the file while it computes."""

    def __init__(
        self, linear: LinearModule, name: str, order: int, tree: Tree, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.order, self.outputs, self.arithmetic = order, linear.weight.shape[0], linear.arithmetic
        self.bias = linear.bias
        self._read = partial(tensor_of, tree, f"{name}.weight")
        self._dtype, self._device = dtype, device

    @property
    def weight(self) -> Tensor:
        """Return the complete weight, for modules that use it in another way than by calling this linear map."""
        return self._read().to(self._device, self._dtype)

    def forward(self, x: Tensor) -> Tensor:  # (…, in) -> (…, out)
        flat: Tensor = ask(self.order, x.reshape(-1, x.shape[-1]))
        return flat.reshape(*x.shape[:-1], self.outputs)

    def product(self, x: Tensor, release: Callable[[], None], progress: Callable[[int], None] | None) -> Tensor:
        """Return the product of x (N, in) with the weight, (N, out). The weight is read some rows at a time.

        Args:
            x: the inputs of all waiting passes.
            release: releases the pages of the file that were read.
            progress: called with the size of the weight in bytes.
        """
        stored = self._read()
        rows = max(1, _CHUNK_BYTES // (stored.shape[1] * x.element_size()))
        # Every row of a transposed view is spread over all pages, so releasing them would read everything again.
        row_bytes = stored.shape[1] * stored.element_size() if stored.is_contiguous() else 0
        out = x.new_empty(len(x), self.outputs)
        mapped = 0
        for start in range(0, self.outputs, rows):
            part = slice(start, start + rows)
            bias = None if self.bias is None else self.bias[part]
            weight = stored[part].to(x.device).to(x.dtype)  # the narrower dtype is the smaller copy
            out[:, part] = multiply(x, weight, bias, self.arithmetic)
            mapped += rows * row_bytes
            if mapped > _MAPPED_BYTES:
                release()
                mapped = 0
        release()
        if progress is not None:
            progress(stored.nbytes)
        if out.nbytes > _LARGE_BYTES:
            trim_heaps()
        return out


def _model(tree: Tree, dtype: torch.dtype, device: torch.device) -> Decoder:
    """Return gptkit's decoder without its head, on a device. Its linear maps are `_Rows`, and its embeddings are on the
    meta device.
    """
    with torch.device("meta"):
        model = Decoder(tree.spec).to(dtype).eval()
    model.head, model.pooler = _Ends(), None  # type: ignore[assignment]
    linears = [(name, module) for name, module in model.named_modules() if isinstance(module, LinearModule)]
    for order, (name, linear) in enumerate(linears):
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, _Rows(linear, name, order, tree, dtype, device))
    for name, parameter in list(model.named_parameters()):
        if name.removeprefix(ENCODER) not in TABLES:
            path, _, attribute = name.rpartition(".")
            value = tensor_of(tree, name).to(device, dtype, copy=True)
            assert value.shape == parameter.shape, f"{name} is {tuple(value.shape)}, expected {tuple(parameter.shape)}"
            model.get_submodule(path)._parameters[attribute] = nn.Parameter(value, requires_grad=False)
    tree.release()
    return model


class _Ends(nn.Module):
    """Takes the place of the head and returns the hidden states unchanged."""

    def forward(self, x: Tensor, _: Tensor) -> Tensor:
        return x


def _gathered(module: nn.Module, tree: Tree, name: str, dtype: torch.dtype, device: torch.device) -> list[Any]:
    """Return hooks for an embedding module on the meta device. Before a call they read only the rows that the call
    needs.

    The token ids of the call are replaced by indices into these rows.

    Args:
        module: the embedding or position table.
        tree: the model's weights.
        name: the name of the table in `tree`.
        dtype: the dtype to compute in.
        device: the device to compute on.
    """
    whole: Any = module.weight
    first = getattr(module.spec, "offset", 0)

    def before(_: nn.Module, inputs: Any) -> Any:
        used, ids = inputs[0].unique(return_inverse=True)
        rows = tensor_of(tree, name)[(used + first).cpu()].to(device, dtype)
        ids = ids.reshape(inputs[0].shape) - first
        if whole is None:  # another module's table, which is passed together with the ids
            return ids, rows
        module.weight = nn.Parameter(rows, requires_grad=False)
        return (ids, *inputs[1:])

    def after(*_: Any) -> None:
        module.weight = whole
        tree.release()

    return [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
