"""Runs gptkit's command line in several processes at once, as torchrun would start them, some of them with a fault.

One process imports everything once and forks the ranks, which saves each its seconds of importing torch. A request on
stdin is a line of JSON, {"argv": [...], "size": 2, "folder": where to work, "faults": {rank: name}}; so is the answer,
{"codes": [...], "stderr": [...], "stdout": [...]}.
"""

import errno
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed  # noqa: F401, so that no rank has to

from gptkit import cli
from gptkit.converter import block_file, convert, transfer  # noqa: F401, as above
from gptkit.report import checkpoints  # noqa: F401

PATIENCE = 600.0
"""Seconds after which ranks are killed that wait for something that never comes: a guard, and no bound on speed."""


def slow() -> None:
    """No tensor is carried before somebody ends the run."""
    carry = transfer._Carrier._carry

    def slowly(self: Any, job: Any) -> None:
        while not self.scheduler.stopped:  # as is asked first in _carry itself
            time.sleep(0.01)
        carry(self, job)

    transfer._Carrier._carry = slowly  # type: ignore[method-assign]


def full() -> None:
    """The disk is full at the tenth write."""
    write_all, left = block_file.write_all, [10]

    def refuse(*args: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_all(*args)

    block_file.write_all = refuse


def bug() -> None:
    """Something that nobody thought of."""

    def fail(*_: Any) -> NoReturn:
        raise ZeroDivisionError("nobody thought of this")

    transfer._Carrier._carry = fail  # type: ignore[method-assign]


def killed(number: int = signal.SIGKILL) -> None:
    """A signal behind the first file that is finished, when the host has heard of it."""
    finish = transfer._Carrier._finish

    def last(self: Any, shard: Any) -> None:
        finish(self, shard)
        name = shard.name
        while not any(name in path.read_text(errors="replace") for path in Path().glob(".out.partial-*/.journal")):
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    transfer._Carrier._finish = last  # type: ignore[method-assign]


def killed_first() -> None:
    """kill -9 before anything is written."""
    transfer._Carrier.open = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]


def interrupted() -> None:
    killed(signal.SIGINT)


FAULTS = {each.__name__: each for each in (slow, full, bug, killed, killed_first, interrupted)}


def rank(number: int, port: int, request: dict[str, Any]) -> NoReturn:
    """One rank; never comes back."""
    code: Any = 99
    try:
        os.chdir(request["folder"])
        for stream, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(f"{name}{number}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), stream)
        size = str(request["size"])
        os.environ.update(RANK=str(number), WORLD_SIZE=size, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        os.environ.update(LOCAL_RANK=str(number), LOCAL_WORLD_SIZE=size)
        for name in request["faults"].get(str(number), []):
            FAULTS[name]()
        sys.argv = ["gptkit", *request["argv"]]
        cli.main()
        code = 0
    except SystemExit as end:
        code = end.code
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 98)


def answer(request: dict[str, Any]) -> dict[str, Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    began = time.monotonic()
    pids = []
    for number in range(request["size"]):
        if (pid := os.fork()) == 0:
            rank(number, port, request)
        pids.append(pid)
    codes: dict[int, int] = {}
    while len(codes) < len(pids):
        for pid in pids:
            if pid not in codes and (found := os.waitpid(pid, os.WNOHANG))[0]:
                codes[pid] = os.waitstatus_to_exitcode(found[1])
        if time.monotonic() - began > PATIENCE:
            for pid in set(pids) - set(codes):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    said = {
        name: [Path(request["folder"], f"{name}{number}").read_text() for number in range(request["size"])]
        for name in ("stdout", "stderr")
    }
    return {"codes": [codes[pid] for pid in pids], **said}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)
