"""Train one model in several processes. torchrun starts them, and every process has a share of all parameters (FSDP2).

    torchrun --nproc-per-node 2 -m gptkit train MODEL OUT --data FILE

The sequences of a step are divided between the processes, and their gradients are added. The results of one process and
of several differ only in the order of these sums.
"""

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..converter.distributed import meet, several
from ..errors import Elsewhere
from ..modules.devices import AUTO, Device, device_of

_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of malloc.h
_PIECE = 2**20  # bytes


@dataclass(frozen=True)
class Group:
    """The processes that train a model together, as seen by one of them."""

    rank: int  # the number of this process, from 0
    size: int  # the number of processes
    device: torch.device  # on which this process computes

    @property
    def alone(self) -> bool:
        return self.size == 1

    def total(self, *values: float) -> list[float]:
        """Return every value summed over the processes, in fp64. All processes must call this."""
        if self.alone:
            return list(values)
        sums = torch.tensor(values, dtype=torch.float64, device=self.device)
        torch.distributed.all_reduce(sums)
        return [float(value) for value in sums]

    def lead(self, work: Callable[[], object]) -> None:
        """Call `work` in the first process only, while the other processes wait.

        If `work` raises an error, the other processes raise Elsewhere.
        """
        error: BaseException | None = None
        try:
            if self.rank == 0:
                work()
        except BaseException as raised:
            error = raised
        code = 0 if error is None else getattr(error, "exit_code", 1)
        (failed,) = self.total(float(code))
        if error is not None:
            raise error
        if failed:
            raise Elsewhere("the first process failed, so this process stops too", int(failed))

    def share_out(self, model: Any) -> None:
        """Shard the parameters of a model over the processes with FSDP2. Every layer is sharded separately."""
        if self.alone:
            return
        from torch.distributed.fsdp import FSDPModule, fully_shard

        if isinstance(model, FSDPModule):  # an earlier run did this
            return

        for parameter in model.parameters():  # GPT-2's are stored by columns, which FSDP2 cannot shard
            parameter.data = parameter.data.contiguous()
        for block in model.blocks:
            fully_shard(block)
        # Otherwise an evaluation would leave the parameters whole, because it has no backward pass that shards them.
        fully_shard(model, reshard_after_forward=True)

    def local(self, tensor: Tensor) -> Tensor:
        """Return this process's shard of a tensor."""
        return tensor.to_local() if hasattr(tensor, "to_local") else tensor

    def whole(self, tensor: Tensor) -> Tensor:
        """Return the unsharded tensor, gathered from all processes. All processes must call this."""
        return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _return_freed_memory() -> None:
    """Make glibc return large blocks of memory to the system as soon as they are freed.

    Otherwise glibc would keep the memory in which FSDP2 gathers the parameters of layers. Each of two processes would
    then use as much memory as a single process needs. With another C library, this function does nothing.
    """
    tune = getattr(ctypes.CDLL(None), "mallopt", None)
    if tune is not None:
        tune(_MMAP_THRESHOLD, _PIECE)


@contextmanager
def process_group(device: Device | None = AUTO) -> Iterator[Group]:
    """Yield the processes that torchrun started, or this process alone, as a `Group`.

    Raise UsageError if there is no device with this name.
    """
    if not several():
        yield Group(0, 1, device_of(device))
        return
    import torch.distributed as dist

    where = device_of(device)
    if where.type == "cuda":
        where = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(where)
    _return_freed_memory()
    # There is no timeout, because the other processes wait while the first one tokenises or writes.
    meet("nccl" if where.type == "cuda" else "gloo")
    try:
        yield Group(dist.get_rank(), dist.get_world_size(), where)
    finally:
        dist.destroy_process_group()
