"""Two processes of torch save a checkpoint in parts, in every way that torch.distributed.checkpoint has.

    python tests/saved_by_ranks.py SOURCE OUT WRITTEN

SOURCE is a Hugging Face folder; OUT gets a folder each for torch's own format (plain, and nested with an optimizer),
for its Hugging Face writer with tensors in parts, and with parts put together. WRITTEN is gptkit's: both read it into
sharded tensors, and compare.
"""

import os
import socket
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor


def sharded(state: dict[str, torch.Tensor], mesh: Any) -> dict[str, DTensor]:
    """By rows, by columns, and whole, in turn."""
    ways = [lambda t: Shard(0), lambda t: Shard(t.ndim - 1), lambda t: Replicate()]
    return {
        name: distribute_tensor(tensor, mesh, [ways[i % 3](tensor)]) for i, (name, tensor) in enumerate(state.items())
    }


def run(rank: int, port: int, source: Path, out: Path, written: Path) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    whole = load_file(source / "model.safetensors")
    state = sharded(whole, mesh)
    dcp.save(dict(state), checkpoint_id=out / "plain")
    optimizer = {"state": {name: {"exp_avg": tensor} for name, tensor in list(state.items())[:3]}, "lr": 0.1}
    dcp.save({"model": dict(state), "optim": optimizer, "step": 7}, checkpoint_id=out / "nested")
    dcp.save(dict(state), storage_writer=HuggingFaceStorageWriter(str(out / "parts"), save_distributed=True))
    files = {name: 1 + i % 2 for i, name in enumerate(state)}
    together = HuggingFaceStorageWriter(str(out / "whole"), files, save_distributed=True, enable_consolidation=True)
    dcp.save(dict(state), storage_writer=together)
    for reader in ({"checkpoint_id": written}, {"storage_reader": HuggingFaceStorageReader(str(source))}):
        found = sharded({name: torch.zeros_like(tensor) for name, tensor in whole.items()}, mesh)
        dcp.load(dict(found), **reader)
        for name, tensor in found.items():
            assert torch.equal(tensor.full_tensor(), whole[name]), name
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pids = []
    for rank in range(2):
        if (pid := os.fork()) == 0:
            code = 1
            try:
                run(rank, port, *map(Path, sys.argv[1:4]))
                code = 0
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                if code:
                    import traceback

                    traceback.print_exc()
                os._exit(code)
        pids.append(pid)
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids))
