"""Several processes train one model: torchrun starts them, and each has a share of every parameter (FSDP2).

    torchrun --nproc-per-node 2 -m gptkit train MODEL OUT --data FILE

A step's sequences are shared out over the processes, and their gradients added up; what one process computes by itself
and what several compute together differ by the order of the sums.
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
from ..errors import Elsewhere, UsageError, shown

_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of malloc.h
_PIECE = 2**20  # bytes


@dataclass(frozen=True)
class Group:
    """The processes that train together: this one's number, how many they are, and where it computes."""

    rank: int
    size: int
    device: torch.device

    @property
    def alone(self) -> bool:
        return self.size == 1

    def total(self, *values: float) -> list[float]:
        """Each value summed over the processes, in fp64."""
        if self.alone:
            return list(values)
        found = torch.tensor(values, dtype=torch.float64, device=self.device)
        torch.distributed.all_reduce(found)
        return [float(each) for each in found]

    def lead(self, work: Callable[[], object]) -> None:
        """Let the first process do something for all, which wait for it; where it fails, the others raise Elsewhere."""
        error: BaseException | None = None
        try:
            if self.rank == 0:
                work()
        except BaseException as raised:
            error = raised
        code = 0 if error is None else getattr(error, "exit_code", 1)
        (told,) = self.total(float(code))
        if error is not None:
            raise error
        if told:
            raise Elsewhere("the first process failed, so this process stops too", int(told))

    def share_out(self, model: Any) -> None:
        """Leave each process its share of the parameters: of each layer, and of what stands around them."""
        if self.alone:
            return
        from torch.distributed.fsdp import FSDPModule, fully_shard

        if isinstance(model, FSDPModule):  # a run before this one did
            return

        for each in model.parameters():  # GPT-2's lie in columns, of which nothing is shared out
            each.data = each.data.contiguous()
        for block in model.blocks:
            fully_shard(block)
        # An evaluation has no backward pass that would take whole parameters back.
        fully_shard(model, reshard_after_forward=True)

    def local(self, tensor: Tensor) -> Tensor:
        """What this process has of a tensor."""
        return tensor.to_local() if hasattr(tensor, "to_local") else tensor

    def whole(self, tensor: Tensor) -> Tensor:
        """A tensor of all processes' shares; all of them have to ask."""
        return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _device(name: str | None) -> torch.device:
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(name)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(
            f"PyTorch cannot compute on the device {shown(name, 40)}: {str(error).splitlines()[0]:.200}"
        ) from error
    return found


def _give_back() -> None:
    """Let glibc give large pieces back to the system as they are freed. Its heaps would keep those in which the
    parameters of layers are gathered, and a process of two would take as much memory as one alone. Elsewhere this does
    nothing.
    """
    tune = getattr(ctypes.CDLL(None), "mallopt", None)
    if tune is not None:
        tune(_MMAP_THRESHOLD, _PIECE)


@contextmanager
def group(device: str | None = None) -> Iterator[Group]:
    """The processes that torchrun started, or this one alone. Raises UsageError for a device that is not there."""
    if not several():
        yield Group(0, 1, _device(device))
        return
    import torch.distributed as dist

    where = _device(device)
    if where.type == "cuda":
        where = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(where)
    _give_back()
    meet("nccl" if where.type == "cuda" else "gloo")  # whose others wait while the first tokenises, or writes
    try:
        yield Group(dist.get_rank(), dist.get_world_size(), where)
    finally:
        dist.destroy_process_group()
