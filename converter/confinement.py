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
from pathlib import Path

MEMORY = 256 * 2**20
"""Bytes of address space for a small file; the interpreter takes a tenth of it."""


def command(worker: str) -> list[str]:
    """What starts a worker. Nothing is imported from anywhere but the standard library, and it is quick."""
    return [sys.executable, "-I", "-S", str(Path(__file__).absolute()), worker]


def limit_memory(nbytes: int) -> None:
    """Let this process have no more address space than that, where the system knows such a limit."""
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (nbytes, resource.getrlimit(resource.RLIMIT_AS)[1]))
    except (ImportError, ValueError, OSError):
        pass


def limit_time(seconds: float) -> None:
    """Let this process take so much more processor time, rounded up; it is killed then."""
    try:
        import resource

        used = resource.getrusage(resource.RUSAGE_SELF)
        soft = int(used.ru_utime + used.ru_stime + seconds) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.getrlimit(resource.RLIMIT_CPU)[1]))
    except (ImportError, ValueError, OSError):
        pass


def confine() -> None:
    """No core dumps, no files written, no other processes, little memory."""
    try:
        import resource

        for name in ("RLIMIT_CORE", "RLIMIT_FSIZE", "RLIMIT_NPROC"):
            resource.setrlimit(getattr(resource, name), (0, 0))
    except (ImportError, AttributeError, ValueError, OSError):
        pass
    limit_memory(MEMORY)


def main() -> None:
    """Confine this process, and be the worker that the command line names."""
    confine()
    # Neighbours by their own names, and not this folder on the path, where some are called as other libraries are.
    package = types.ModuleType("confined")
    package.__path__ = [os.path.dirname(__file__)]  # noqa: PTH120, as few imports as can be
    sys.modules[package.__name__] = package
    importlib.import_module(f"{package.__name__}.{sys.argv[1]}").serve()


if __name__ == "__main__":
    main()
