"""What torch holds, storage by storage: kept for a backward pass, and alive at the worst moment of a run."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gptkit.components import ModelSpec
from gptkit.modules import Cache, Decoder
from gptkit.modules.layers import FusedLinears


def drawn_ids(spec: ModelSpec, batch: int, tokens: int) -> Tensor:
    return torch.randint(0, spec.vocab_size, (batch, tokens), generator=torch.Generator().manual_seed(1))


def _when_joined(monkeypatch: Any, call: Callable[[Tensor], None]) -> None:
    """Have `call` told of every matrix, and bias, that parameters are joined to."""
    join = FusedLinears._concatenated

    def joined(linears: Any, groups: int = 1) -> tuple[Tensor, Tensor | None]:
        weight, bias = join(linears, groups)
        for each in (weight, bias):
            if each is not None:
                call(each)
        return weight, bias

    monkeypatch.setattr(FusedLinears, "_concatenated", staticmethod(joined))


def kept_bytes(model: nn.Module, ids: Tensor, monkeypatch: Any) -> int:
    """Bytes of the tensors that autograd keeps of a forward pass and its loss, views of one storage counted once.

    Without parameters, and without the matrices that they are joined to for one product, which are made again for each
    pass: neither depends on what is read. Without the loss's own scalar.
    """
    known = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: list[Tensor] = []  # alive, so that no address is used twice

    def joined(matrix: Tensor) -> None:
        known.add(matrix.untyped_storage().data_ptr())
        kept.append(matrix)

    _when_joined(monkeypatch, joined)
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known and tensor.dim():
            found[storage.data_ptr()] = storage.nbytes()
        kept.append(tensor)
        return tensor

    targets = ids.clone()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model(ids) if isinstance(model, Decoder) else model(ids, use_cache=False).logits
        F.cross_entropy(out.float().flatten(0, 1), targets.flatten())
    return sum(found.values())


class Alive(TorchDispatchMode):
    """Bytes of the storages that operations under it made and that are alive: `now`, and `peak`, the most ever."""

    def __init__(self, model: Decoder) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.sizes = {parameter.untyped_storage()._cdata: 0 for parameter in model.parameters()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            if isinstance(each, Tensor):
                self._see(each)
        self.peak = max(self.peak, self.now)
        return out

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.sizes:
            self.sizes[key] = storage.nbytes()
            self.now += storage.nbytes()
            weakref.finalize(storage, self._gone, key)

    def forget(self, tensor: Tensor) -> None:
        """Count it no longer."""
        key = tensor.untyped_storage()._cdata
        self.now -= self.sizes[key]
        self.sizes[key] = 0

    def _gone(self, key: int) -> None:
        self.now -= self.sizes.pop(key)


def prefill_peak(model: Decoder, ids: Tensor, last_only: bool) -> int:
    """The most bytes alive while a context is read into a cache, which is among them; weights are not."""
    with torch.no_grad():
        model(ids)  # matrices are joined once and for all
        with Alive(model) as alive:
            model(ids, cache=Cache(model.spec) if model.spec.causal else None, last_only=last_only)
    return alive.peak


def training_peak(model: Decoder, ids: Tensor, monkeypatch: Any) -> tuple[int, int]:
    """Bytes alive between forward and backward pass, token ids among them, and the most in a whole step; without
    weights, and without the matrices that they are joined to.
    """
    alive = Alive(model)
    _when_joined(monkeypatch, alive.forget)
    with alive:
        logits = model(ids)
        loss = F.cross_entropy(logits.float().flatten(0, 1), ids.clone().flatten())
        forward = alive.now
        loss.backward()
    return forward + ids.nbytes, alive.peak + ids.nbytes
