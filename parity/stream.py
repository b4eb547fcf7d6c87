"""Models larger than memory: forward passes with one layer's weights present at a time.

Both sides run their own, unchanged forward: parameters are on the meta device, and just before a layer (or the
embedding, the last norm, the head) is called its weights are read from the files, and dropped right after. All batches
go through a layer before the next is read (see `passes`). Memory is the largest layer's, twice while it is converted,
and the activations.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from ..converter.checkpoint import Checkpoint
from ..converter.tensors import Tree
from ..errors import CannotExpress
from ..modules.attention import Kernel
from ..modules.decoder import Decoder
from ..modules.load import tensor_of, view_as_torch
from .passes import ask, run_together
from .probe import Batch
from .reference import (
    compute_experts_plainly,
    experts_path,
    forget_lengths,
    own_reference,
    quiet,
    reference_logits,
)

__all__ = ["Stream", "stream_candidate", "stream_reference"]

KEPT_BYTES = 256 * 2**20
"""Parameters up to this size leave their memory to the next of their shape."""

Read = Callable[[str], Tensor]
"""A parameter's values by the module tree's own name for it."""


class Stream:
    """A model on the meta device whose units (see `units_of`) are filled while they compute."""

    def __init__(
        self,
        model: nn.Module,
        read: Read,
        dtype: torch.dtype,
        call: Callable[[nn.Module, Batch], Tensor],
        release: Callable[[], None] = lambda: None,
    ) -> None:
        self.model, self.read, self.dtype, self.call, self.release = model, read, dtype, call, release
        self.peak = 0
        """The most bytes of parameters that were present at once."""
        self._spare: dict[tuple[Any, ...], list[Tensor]] = {}

    def take(self, like: Tensor) -> Tensor:
        """Memory for a parameter: what an earlier one of its shape left (layers are alike), else new."""
        spare = self._spare.get((like.shape, like.stride()), [])
        # Laid out as the module has it: GPT-2's products read their weights [in, out] in memory.
        return spare.pop() if spare else torch.empty_strided(like.shape, like.stride(), dtype=self.dtype)

    def give_back(self, value: Tensor) -> None:
        """Keep a parameter's memory for the next of its shape; tables are too large to keep."""
        if value.nbytes <= KEPT_BYTES:
            self._spare.setdefault((value.shape, value.stride()), []).append(value)

    def run(self, batches: Sequence[Batch]) -> list[Tensor]:
        """The logits of real tokens, (N, V) a batch."""
        units = units_of(self.model)
        hooks = [
            unit.register_forward_pre_hook(lambda *_, place=place: ask(place)) for place, (unit, _) in enumerate(units)
        ]

        def serve(place: int, brought: list[Any]) -> Generator[Any]:
            owners = list(_owners(*units[place]))
            try:
                self._fill(owners)
                yield from brought
            finally:
                self._drop(owners)

        try:
            return run_together(lambda batch: batch.valid(self.call(self.model, batch)), batches, serve)
        finally:
            for hook in hooks:
                hook.remove()

    def _fill(self, owners: Sequence[Owner]) -> None:
        total = 0
        with torch.inference_mode(False):
            for module, name, full in owners:
                held = module._parameters[name]
                assert held is not None
                value = self.take(held)
                value.copy_(self.read(full))
                module._parameters[name] = nn.Parameter(value, requires_grad=False)
                total += value.nbytes
        self.release()
        self.peak = max(self.peak, total)

    def _drop(self, owners: Sequence[Owner]) -> None:
        for module, name, _ in owners:
            held = module._parameters[name]
            assert held is not None
            if held.device.type != "meta":
                self.give_back(held.data)
            empty = torch.empty_strided(held.shape, held.stride(), dtype=held.dtype, device="meta")
            module._parameters[name] = nn.Parameter(empty, requires_grad=False)
        trim_heaps()


Owner = tuple[nn.Module, str, str]
"""A module, the name in it of a parameter, and that one's full name."""


def _owners(unit: nn.Module, names: dict[str, str]) -> Iterator[Owner]:
    for local, full in names.items():
        path, _, name = local.rpartition(".")
        yield unit.get_submodule(path), name, full


def trim_heaps() -> None:
    """Let glibc give freed memory back to the system, of which its heaps keep much. Elsewhere this does nothing."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def units_of(model: nn.Module) -> list[tuple[nn.Module, dict[str, str]]]:
    """What is filled at once: every layer of a module list, and every module outside of them that has parameters of its
    own. Each with its parameters' names: (name within the unit -> name in the model).
    """
    found: list[tuple[nn.Module, dict[str, str]]] = []

    def walk(module: nn.Module, path: str, in_list: bool) -> None:
        own = [name for name, parameter in module._parameters.items() if parameter is not None]
        if in_list or own:
            names = {name: f"{path}.{name}" for name, _ in module.named_parameters(remove_duplicate=False)}
            found.append((module, names))
            return
        for name, child in module.named_children():
            walk(child, f"{path}.{name}" if path else name, isinstance(module, nn.ModuleList))

    walk(model, "", False)
    return found


def stream_candidate(tree: Tree, dtype: torch.dtype, attention: Kernel) -> Stream:
    """gptkit's decoder of a tree, fed from where its tensors lie."""
    spec = tree.spec
    with torch.device("meta"):
        model = Decoder(spec, attention).to(dtype).eval()
    if spec.head.tied:
        # The head computes with the embedding's table; it gets the same values when its turn comes.
        model.head.weight = nn.Parameter(torch.empty_like(model.embedding.weight), requires_grad=False)

    def read(name: str) -> Tensor:
        return tensor_of(tree, "embedding.weight" if name == "head.weight" and spec.head.tied else name)

    return Stream(model, read, dtype, lambda m, batch: m(batch.input_ids, batch.attention_mask), tree.release)


def stream_reference(checkpoint: Checkpoint, dtype: torch.dtype, attention: str) -> Stream:
    """transformers' own class, fed from the checkpoint's files.

    Raises:
        CannotExpress: no transformers class computes this tree.

    """
    import transformers

    architecture = checkpoint.architecture
    if architecture is None:
        raise CannotExpress("this tree never had a transformers class to compare with")
    original = checkpoint.origin.config
    config = architecture.export_config(checkpoint.spec, original) or original
    leaves = {leaf.checkpoint: leaf for leaf in architecture.bind(checkpoint.spec)}
    table = next(leaf for leaf in leaves.values() if leaf.shared == ("embedding.weight",))
    with quiet(), _parameters_on_meta():
        model = own_reference(config or {}, dtype, attention)
        if model is None:
            model = transformers.AutoModelForCausalLM.from_config(
                transformers.AutoConfig.for_model(**dict(config or {})),
                dtype=dtype,
                attn_implementation=attention,
                experts_implementation=experts_path(dtype),
            )
            compute_experts_plainly(model)
    model.eval()
    forget_lengths(model)
    stacked = architecture.parameters(checkpoint.spec)

    def read(name: str) -> Tensor:
        if name in stacked:
            how, parts = stacked[name]
            gathered: Tensor = how.gather(parts, read_tensor)
            return gathered
        return read_tensor(name)

    def read_tensor(name: str) -> Tensor:
        leaf = table if name == architecture.head and checkpoint.spec.head.tied else leaves[name]
        parts = [checkpoint.tensor(shared) for shared in leaf.shared]
        return view_as_torch(leaf.to_checkpoint([array for array, _ in parts]), parts[0][1])

    return Stream(
        model,
        read,
        dtype,
        lambda m, batch: reference_logits(m, batch.input_ids, batch.attention_mask),
        checkpoint.release,
    )


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Models that this thread builds while it is open have their parameters on the meta device and their buffers
    (rotary frequencies) in memory.
    """
    builder = threading.get_ident()

    def on_meta(_: nn.Module, __: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.device.type == "meta" or threading.get_ident() != builder:
            return None  # which leaves it as it is
        return nn.Parameter(parameter.data.to("meta"), requires_grad=False)

    hook = register_module_parameter_registration_hook(on_meta)  # type: ignore[arg-type]
    try:
        yield
    finally:
        hook.remove()
