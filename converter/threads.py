"""How many threads a computation takes: as many as a model of its size is worth, and as there are cores free.

torch and OpenBLAS take a thread a core by themselves, and each of these waits for the others actively: on small models,
or where other programs run, that costs several times the processor's time of one thread, and is no faster.
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

_PARAMETERS = 16_000_000  # of a model, a thread: smaller matrices are computed before other threads have woken up
_SETTINGS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""Environment variables by which a person decides."""


def worth(parameters: int, free: int) -> int:
    """The threads for a model of so many parameters where so many cores are free."""
    return max(1, min(free, parameters // _PARAMETERS))


def free_cores(available: int, quota: float | None, cores: int, load: float) -> int:
    """The cores of those `available`, within the group's `quota`, that the machine's `load` leaves; 1 at least."""
    found = min(available, cores - load, available if quota is None else quota)
    return max(1, int(found))


def available_cores() -> int:
    """The cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def quota(root: Path = Path("/sys/fs/cgroup"), group: Path = Path("/proc/self/cgroup")) -> float | None:
    """How many cores' time the control group of this process has (Linux; versions 1 and 2), None for all."""
    try:
        groups = [line.split(":", 2) for line in group.read_text().splitlines()]
    except OSError:
        groups = []
    # A limit may be written of the group of this process, and of each that it is in.
    own = [root / kind / path.lstrip("/") for _, kind, path in groups if kind in ("", "cpu", "cpu,cpuacct")]
    found = []
    for folder in (each for path in own for each in (path, *path.parents) if each.is_relative_to(root)):
        try:
            if (folder / "cpu.max").exists():
                time, period = (folder / "cpu.max").read_text().split()
            else:
                time, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            if time != "max" and int(time) > 0:
                found.append(int(time) / int(period))
        except (OSError, ValueError, ZeroDivisionError):
            continue
    return min(found, default=None)


def _load() -> float:
    """How many processes wanted a core in the last minute."""
    try:
        return os.getloadavg()[0]
    except (OSError, AttributeError):
        return 0.0


def suit(spec: ModelSpec) -> None:
    """Set the threads of torch and BLAS for a model, unless a person has: by environment or `torch.set_num_threads`."""
    torch = sys.modules.get("torch")  # where somebody has imported it
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
    """On leaving, torch and BLAS have as many threads as they had; also a function's decorator."""
    blas = _blas()
    threads = None if blas is None else blas[0]()
    torch = sys.modules.get("torch")
    own = None if torch is None else torch.get_num_threads()
    try:
        yield
    finally:
        if blas is not None:
            blas[1](threads)
        if torch is not None and torch.get_num_threads() != own:
            torch.set_num_threads(own)


@cache
def _by_itself() -> frozenset[int]:
    """The threads that torch has where nobody has said: one a core, which MKL counts without their hyperthreads."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    files = [Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list") for core in cores]
    together = {file.read_text() for file in files if file.is_file()}
    return frozenset({len(cores), os.cpu_count() or 1, len(together) or len(cores)})


@cache
def _blas() -> tuple[ctypes._NamedFuncPointer, ctypes._NamedFuncPointer] | None:
    """How OpenBLAS, which lies in numpy's wheels, tells and takes its number of threads; None where it is not there."""
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
