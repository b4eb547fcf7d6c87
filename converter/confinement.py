"""Processes of their own for what others wrote: with little memory and time, that write no file and start no other.

Read by both sides. The parent starts this file as a plain script, isolated (`command`): it limits itself and then runs
`serve` of a neighbour, `pickle_process` or `tokenizer_process`, which import nothing but the standard library and this
file. What is hostile in a file then takes down such a process at the most, and what a library has to say of it goes
nowhere.
"""

from __future__ import annotations

import importlib
import os
import sys
import types
from contextlib import suppress
from pathlib import Path

MEMORY = 256 * 2**20
"""Bytes of address space for a small file; the interpreter takes a tenth of it."""


def command(worker: str) -> list[str]:
    """What starts a worker. Nothing is imported from anywhere but the standard library, and it is quick."""
    return [sys.executable, "-I", "-S", str(Path(__file__).absolute()), worker]


def _limit(name: str, soft: int) -> None:
    """Set a soft limit of this process, where the system knows such a limit."""
    with suppress(ImportError, AttributeError, ValueError, OSError):
        import resource

        kind = getattr(resource, name)
        resource.setrlimit(kind, (soft, resource.getrlimit(kind)[1] if soft else 0))


def limit_memory(nbytes: int) -> None:
    """Let this process have no more address space than that."""
    _limit("RLIMIT_AS", nbytes)


def limit_time(seconds: float) -> None:
    """Let this process take so much more processor time, rounded up; it is killed then."""
    used = os.times()
    _limit("RLIMIT_CPU", int(used.user + used.system + seconds) + 1)


def _confine() -> None:
    """No core dumps, no files written, no other processes, little memory."""
    for name in ("RLIMIT_CORE", "RLIMIT_FSIZE", "RLIMIT_NPROC"):
        _limit(name, 0)
    limit_memory(MEMORY)


def main() -> None:
    """Confine this process, and be the worker that the command line names."""
    _confine()
    # Neighbours by their own names, and not this folder on the path, where some are called as other libraries are.
    package = types.ModuleType("confined")
    package.__path__ = [os.path.dirname(__file__)]  # noqa: PTH120, as few imports as can be
    sys.modules[package.__name__] = package
    importlib.import_module(f"{package.__name__}.{sys.argv[1]}").serve()


if __name__ == "__main__":
    main()
