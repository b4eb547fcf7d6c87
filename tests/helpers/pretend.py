"""A second device for machines without a GPU: the device "pretend", whose tensors are stored in the CPU's memory.

An operation on tensors of two devices is an error, as on a GPU, and so is `.numpy()` on a tensor of this device. So a
test can run any computation on it, and finds what would fail on a GPU because a tensor was left behind. The results are
those of the CPU, but for the order of sums. The tests do not show how a GPU rounds, or how fast it is.

Import transformers and load a model of the class before: its first load inside the `with` gives wrong rotary tables.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

NAME = "pretend"
_MOVES = ("to", "_to_copy", "copy_")
_INDEXES = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index")
"""Operations that accept indices on the CPU for a tensor on a GPU."""


class _Elsewhere(torch.Tensor):
    """A tensor on the device "pretend". Its values are a tensor on the CPU."""

    values_: torch.Tensor

    @staticmethod
    def __new__(cls, values: torch.Tensor, device: torch.device) -> "_Elsewhere":
        with torch.inference_mode(False):  # views of inference tensors of a subclass fail
            made: _Elsewhere = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
                cls,
                values.shape,
                strides=values.stride(),
                storage_offset=values.storage_offset(),
                dtype=values.dtype,
                device=device,
            )
        made.values_ = values
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    def tolist(self) -> Any:
        return self.values_.tolist()

    def __getitem__(self, index: Any) -> torch.Tensor:  # torch makes a tensor of a list below the dispatch to Python
        index = index if isinstance(index, tuple) else (index,)
        result: torch.Tensor = super().__getitem__(
            tuple(torch.tensor(part) if isinstance(part, list) else part for part in index)
        )
        return result

    def new_tensor(self, data: Any, **given: Any) -> torch.Tensor:
        return self.values_.new_tensor(data, **given).to(self.device)


def _inner(value: Any) -> Any:
    return value.values_ if isinstance(value, _Elsewhere) else value


def _named(args: Any, kwargs: dict[str, Any]) -> torch.device | None:
    """Return the device that an operation names for its result, or None."""
    named = next((value for value in (*args, kwargs.get("device")) if isinstance(value, torch.device)), None)
    if named is not None and named.type == NAME and named.index is None:
        return torch.device(NAME, 0)
    return named


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation on the CPU, and put its result on the device of its inputs, or on the one that it names."""
    tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
    there = {value.device for value in tensors if isinstance(value, _Elsewhere)}
    name, named = func.overloadpacket.__name__, _named(args, kwargs)
    if not there and (named is None or named.type != NAME):
        return func(*args, **kwargs)
    if name == "to" and func._overloadname == "other":
        named = args[1].device
    left = any(value.dim() for value in tensors if not isinstance(value, _Elsewhere))
    if name not in _MOVES and (len(there) > 1 or (there and left and name not in _INDEXES)):
        raise RuntimeError(f"{name}: expected all tensors to be on the same device, but found {there} and the CPU")
    on_cpu = [torch.device("cpu") if isinstance(value, torch.device) else value for value in args]
    if name == "histc":  # of integers, which the CPU cannot count; transformers counts the tokens of experts so
        on_cpu[0] = on_cpu[0].values_.float()
    given = dict(kwargs) if kwargs.get("device") is None else {**kwargs, "device": torch.device("cpu")}
    result = func(*tree_map(_inner, on_cpu), **tree_map(_inner, given))
    if name == "to" and result is _inner(args[0]):  # the device is the only difference, and the CPU sees none
        result = result.clone()
    if name == "copy_":
        return args[0]
    where = named or next(iter(there))
    if where.type != NAME:
        return result
    known = {id(value.values_): value for value in tensors if isinstance(value, _Elsewhere)}

    def outer(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return known[id(value)] if id(value) in known else _Elsewhere(value, where)

    return tree_map(outer, result)


class _Mode(TorchDispatchMode):
    """Handles operations that create tensors on the device, or move tensors to it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


@cache
def _register() -> bool:
    """Tell torch about the device. Return False if this release of torch has no devices in Python."""
    registration: Any = backend_registration
    if not hasattr(registration, "_setup_privateuseone_for_python_backend"):
        return False
    # Not available, so that other tests of this process, for example of DataParallel, do not find a GPU.
    never = {"is_available": lambda _: False}
    module, hook = (
        type(f"Pretend{base.__name__}", (base,), never)()
        for base in (registration._DummyBackendModule, registration._DummyPrivateUse1Hook)
    )
    registration._setup_privateuseone_for_python_backend(NAME, module, hook)
    return True


@contextmanager
def pretended() -> Iterator[str]:
    """Yield the name of the device, which exists inside the `with`. Skip the test if torch is too old for it."""
    if not _register():
        pytest.skip("this release of torch has no devices in Python")
    made = torch.tensor

    def tensor(data: Any, *, device: Any = None, **given: Any) -> torch.Tensor:
        """Do what torch.tensor does, which creates its result on the device itself, below the dispatch to Python."""
        values = made(data, **given)
        return values if device is None else values.to(device)

    torch.tensor = tensor
    try:
        with _Mode():
            yield f"{NAME}:0"
    finally:
        torch.tensor = made
