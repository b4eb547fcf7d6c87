"""The two sides of a verification: transformers' logits and gptkit's, in memory or a layer at a time.

Of models larger than memory both sides run their own, unchanged forward with parameters on the meta device: just before
a layer (or the embedding, the last norm, the head) is called its weights are read from the files, and dropped right
after. All batches go through a layer before the next is read (see `passes`). Memory is the largest layer's, twice while
it is converted, and the activations.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._pytree import tree_leaves

from ..converter.checkpoint import Checkpoint
from ..converter.tensors import Tree
from ..errors import CannotExpress, GptkitError
from ..modules.attention import Kernel
from ..modules.decoder import Decoder
from ..modules.load import filled, load_checkpoint, tensor_of, view_as_torch
from .passes import ask, hooked, run_together, trim_heaps
from .probe import Batch
from .reference import (
    NO_CLASS,
    class_options,
    compute_experts_plainly,
    forget_lengths,
    load_reference,
    logits_of,
    own_reference,
    quiet,
    reference_folder,
)

KEPT_BYTES = 256 * 2**20
"""Parameters up to this size leave their memory to the next of their shape."""


class Absent(Tensor):
    """A parameter that is not there: its shape, and a refusal of any other use. torch computes some products with a
    tensor of the meta device, from whatever lies in memory.
    """

    full_name: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            result = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
            if not any(isinstance(each, Tensor) for each in tree_leaves(result)):
                return result
        except RuntimeError:  # most operations refuse one themselves
            pass
        name = next(each.full_name for each in tree_leaves((args, kwargs)) if isinstance(each, cls))
        raise GptkitError(
            f"this model computes with {name} without calling the module that holds it: it cannot be run a layer at a"
            " time",
            "Leave --stream out.",
        )


class Stream:
    """A model whose units are filled by `read` (a parameter's name -> its values) while they compute, or is whole."""

    def __init__(
        self,
        model: nn.Module,
        read: Callable[[str], Tensor] | None = None,
        dtype: torch.dtype = torch.float32,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        self.model, self.read, self.dtype, self.release = model, read, dtype, release
        self._spare: dict[tuple[Any, ...], list[Tensor]] = {}
        self._units = units_of(model) if read is not None else []
        for _, owners in self._units:
            self._drop(owners)

    def run(self, batches: Sequence[Batch]) -> list[Tensor]:
        """The logits of real tokens, (N, V) a batch."""

        def serve(place: int, brought: list[Any]) -> Generator[Any]:
            owners = self._units[place][1]
            try:
                self._fill(owners)
                yield from brought
            finally:
                self._drop(owners)
                trim_heaps()

        def call(batch: Batch) -> Tensor:
            return batch.valid(logits_of(self.model, batch.input_ids, batch.attention_mask))

        stops = (unit.register_forward_pre_hook(lambda *_, n=n: ask(n)) for n, (unit, _) in enumerate(self._units))
        with hooked(stops):
            return run_together(call, batches, serve)

    def _fill(self, owners: Sequence[Owner]) -> None:
        assert self.read is not None
        with torch.inference_mode(False):
            for module, name, full in owners:
                like = module._parameters[name]
                assert like is not None
                # Memory that an earlier one of its shape left (layers are alike), else new, laid out as the module has
                # it: GPT-2's products read their weights [in, out] in memory.
                spare = self._spare.get((like.shape, like.stride()), [])
                value = spare.pop() if spare else torch.empty_strided(like.shape, like.stride(), dtype=self.dtype)
                value.copy_(self.read(full))
                module._parameters[name] = nn.Parameter(value, requires_grad=False)
        self.release()

    def _drop(self, owners: Sequence[Owner]) -> None:
        for module, name, full in owners:
            held: Any = module._parameters[name]
            if held.device.type != "meta" and held.nbytes <= KEPT_BYTES:  # tables are too large to keep
                self._spare.setdefault((held.shape, held.stride()), []).append(held.data)
            empty = torch.empty_strided(held.shape, held.stride(), dtype=held.dtype, device="meta").as_subclass(Absent)
            empty.full_name = full
            module._parameters[name] = empty  # type: ignore[assignment]


Owner = tuple[nn.Module, str, str]
"""A module, the name in it of a parameter, and that one's full name."""


def units_of(model: nn.Module) -> list[tuple[nn.Module, list[Owner]]]:
    """What is filled at once: each layer of a module list, and each module outside of them with own parameters."""
    found: list[tuple[nn.Module, list[Owner]]] = []

    def walk(module: nn.Module, path: str, in_list: bool) -> None:
        if not in_list and all(each is None for each in module._parameters.values()):
            for name, child in module.named_children():
                walk(child, f"{path}{name}.", isinstance(module, nn.ModuleList))
            return
        names = [name.rpartition(".") for name, _ in module.named_parameters(remove_duplicate=False)]
        owners = [(module.get_submodule(at), name, f"{path}{at}{dot}{name}") for at, dot, name in names]
        found.append((module, owners))

    walk(model, "", False)
    return found


def stream_candidate(tree: Tree, dtype: torch.dtype, attention: Kernel) -> Stream:
    """gptkit's decoder of a tree, fed from where its tensors lie."""
    tied = tree.spec.head.tied
    with torch.device("meta"):
        model = Decoder(tree.spec, attention).to(dtype).eval()
    if tied:
        # The head computes with the embedding's table; it gets the same values when its turn comes.
        model.head.weight = nn.Parameter(torch.empty_like(model.embedding.weight), requires_grad=False)

    def read(name: str) -> Tensor:
        return tensor_of(tree, "embedding.weight" if name == "head.weight" and tied else name)

    return Stream(model, read, dtype, tree.release)


def stream_reference(checkpoint: Checkpoint, dtype: torch.dtype, attention: str) -> Stream:
    """transformers' own class, fed from the checkpoint's files. Raises CannotExpress where none computes this tree."""
    import transformers

    architecture = checkpoint.architecture
    if architecture is None:
        raise CannotExpress(NO_CLASS)
    original = checkpoint.origin.config
    config = dict(architecture.export_config(checkpoint.spec, original) or original or {})
    leaves = {leaf.checkpoint: leaf for leaf in architecture.bind(checkpoint.spec)}
    table = next(leaf for leaf in leaves.values() if leaf.shared == ("embedding.weight",))
    with quiet(), _parameters_on_meta():
        model = own_reference(config, dtype, attention)
        if model is None:
            made = transformers.AutoConfig.for_model(**config)
            model = transformers.AutoModelForCausalLM.from_config(made, **class_options(dtype, attention))
            compute_experts_plainly(model)
    forget_lengths(model)
    stacked = architecture.parameters(checkpoint.spec)

    def read(name: str) -> Tensor:
        how, parts = stacked.get(name, (None, ()))
        given: Tensor = read_tensor(name) if how is None else how.gather(parts, read_tensor)
        return given

    def read_tensor(name: str) -> Tensor:
        leaf = table if name == architecture.head and checkpoint.spec.head.tied else leaves[name]
        parts = [checkpoint.tensor(shared) for shared in leaf.shared]
        return view_as_torch(leaf.to_checkpoint([array for array, _ in parts]), parts[0][1])

    return Stream(model.eval(), read, dtype, checkpoint.release)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Models that this thread builds meanwhile have parameters on the meta device and buffers in memory."""
    builder = threading.get_ident()

    def on_meta(_: nn.Module, __: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.device.type == "meta" or threading.get_ident() != builder:
            return None  # which leaves it as it is
        return nn.Parameter(parameter.data.to("meta"), requires_grad=False)

    with hooked([register_module_parameter_registration_hook(on_meta)]):  # type: ignore[arg-type]
        yield


Watch = Callable[[nn.Module], AbstractContextManager[object]]
"""What is open while a model runs: hooks on its modules."""


@dataclass(frozen=True)
class Sides:
    """What computes logits of real tokens, (N, V) a batch, from transformers' `folder`, or (None) streamed."""

    source: Checkpoint
    target: Checkpoint
    folder: Path | None

    def reference(
        self, batches: Sequence[Batch], dtype: torch.dtype, path: str, watch: Watch = nullcontext
    ) -> list[Tensor]:
        """transformers' logits."""
        if self.folder is None:
            stream = stream_reference(self.source, dtype, path)
        else:
            stream = Stream(load_reference(self.folder, dtype, path))
        with quiet(), watch(stream.model):
            return stream.run(batches)

    def candidate(
        self,
        batches: Sequence[Batch],
        dtype: torch.dtype,
        path: Kernel,
        watch: Watch = nullcontext,
        tree: Tree | None = None,
    ) -> list[Tensor]:
        """gptkit's logits: the target's, or those of a tree that is read from it."""
        if self.folder is None:
            stream = stream_candidate(tree or self.target, dtype, path)
        elif tree is None:
            stream = Stream(load_checkpoint(self.target, dtype, path))
        else:
            stream = Stream(filled(partial(Decoder, tree.spec, path), partial(tensor_of, tree), dtype))
        with watch(stream.model):
            return stream.run(batches)


@contextmanager
def sides(source: Checkpoint, target: Checkpoint, stream: bool) -> Iterator[Sides]:
    """Both sides while the reference's folder is there; raises CannotExpress as `reference_folder`."""
    place: AbstractContextManager[Path | None] = nullcontext() if stream else reference_folder(source)
    with place as folder:
        yield Sides(source, target, folder)
