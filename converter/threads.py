"""Choose the number of threads for a computation from the size of the model and the number of free cores.

By default torch and OpenBLAS use one thread per core, and waiting threads use CPU time. For small models, or if other
programs run on the machine, this takes several times the CPU time of one thread and is not faster.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from ..components import ModelSpec

_PARAMETERS = 16_000_000  # per thread: smaller matrices are computed before other threads have woken up
_SETTINGS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""Environment variables with which the user sets the number of threads."""


def worth(parameters: int, free: int) -> int:
    """Return the number of threads to use for a model with this number of parameters, if `free` cores are free."""
    return max(1, min(free, parameters // _PARAMETERS))


def free_cores(available: int, quota: float | None, cores: int, load: float) -> int:
    """Return the number of free cores, at least 1.

    Args:
        available: the number of cores that this process may use.
        quota: the CPU limit in cores; None without one.
        cores: the number of cores of the machine.
        load: the load average of the machine.
    """
    free = min(available, cores - load, available if quota is None else quota)
    return max(1, int(free))


def available_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def quota(root: Path = Path("/sys/fs/cgroup"), group: Path = Path("/proc/self/cgroup")) -> float | None:
    """Return the CPU limit, in cores, of this process's control group (Linux; v1 and v2), or None without a limit."""
    try:
        groups = [line.split(":", 2) for line in group.read_text().splitlines()]
    except OSError:
        groups = []
    # The group of this process and every parent group may have a limit.
    group_paths = [root / kind / path.lstrip("/") for _, kind, path in groups if kind in ("", "cpu", "cpu,cpuacct")]
    limits = []
    for folder in (parent for path in group_paths for parent in (path, *path.parents) if parent.is_relative_to(root)):
        try:
            if (folder / "cpu.max").exists():
                time, period = (folder / "cpu.max").read_text().split()
            else:
                time, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            if time != "max" and int(time) > 0:
                limits.append(int(time) / int(period))
        except (OSError, ValueError, ZeroDivisionError):
            continue
    return min(limits, default=None)


def _load() -> float:
    """Return the load average of the last minute."""
    try:
        return os.getloadavg()[0]
    except (OSError, AttributeError):
        return 0.0


def suit(spec: ModelSpec) -> None:
    """Set the number of threads of torch and BLAS for a model, unless the user has set it.

    Users set it with environment variables or `torch.set_num_threads`.
    """
    torch = sys.modules.get("torch")  # if it is imported
    if any(os.environ.get(name) for name in _SETTINGS) or (torch and torch.get_num_threads() not in _by_itself()):
        return
    free = free_cores(available_cores(), quota(), os.cpu_count() or 1, _load())
    count = worth(sum(parameter.count for parameter in spec.parameters()), free)
    if torch is not None:
        torch.set_num_threads(count)
    if (blas := _blas()) is not None:
        blas[1](count)


@contextmanager
def as_before() -> Iterator[None]:
    """Restore the number of threads of torch and BLAS at the end of a `with` or of a decorated function."""
    blas = _blas()
    blas_threads = None if blas is None else blas[0]()
    torch = sys.modules.get("torch")
    torch_threads = None if torch is None else torch.get_num_threads()
    try:
        yield
    finally:
        if blas is not None:
            blas[1](blas_threads)
        if torch is not None and torch.get_num_threads() != torch_threads:
            torch.set_num_threads(torch_threads)


@cache
def _by_itself() -> frozenset[int]:
    """Return the numbers of threads that torch may have chosen by itself.

    Depending on its libraries, torch uses the number of cores of this process, that of the machine, or (with MKL) the
    number of cores without hyperthreads.
    """
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    files = [Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list") for core in cores]
    together = {file.read_text() for file in files if file.is_file()}
    return frozenset({len(cores), os.cpu_count() or 1, len(together) or len(cores)})


@cache
def _blas() -> tuple[ctypes._NamedFuncPointer, ctypes._NamedFuncPointer] | None:
    """Return the functions of numpy's OpenBLAS that get and set the number of threads, or None without OpenBLAS."""
    numpy = sys.modules.get("numpy")
    if numpy is None or numpy.__file__ is None:
        return None
    inside = Path(numpy.__file__).parent
    for file in [*(inside.parent / "numpy.libs").glob("*openblas*"), *(inside / ".dylibs").glob("*openblas*")]:
        library = ctypes.CDLL(str(file))
        for prefix in ("scipy_openblas", "openblas"):
            for suffix in ("64_", ""):
                names = (f"{prefix}_get_num_threads{suffix}", f"{prefix}_set_num_threads{suffix}")
                if all(hasattr(library, name) for name in names):
                    return getattr(library, names[0]), getattr(library, names[1])
    return None
