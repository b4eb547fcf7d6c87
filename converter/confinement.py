"""Read untrusted files in separate processes with little memory and time, which can write no file and start no process.

The parent process (`Confined`) starts this file as an isolated script, the worker. The worker limits its own memory and
time. It passes every question of the parent to the function `answer` of a worker module in this folder, such as
`pickle_process`, which imports only the standard library and modules of this folder. So a hostile file can do no more
than end the worker. The output of libraries is discarded.

A message is JSON, preceded by its length in eight bytes. An answer is {"answer": …}, or {"error": …} with the text that
the worker module's `reason` returns.
"""

import importlib
import json
import os
import select
import struct
import sys
import types
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

MEMORY = 256 * 2**20  # bytes of address space for a small file; the interpreter takes a tenth of this

_Costs = tuple[int, int, float, float]
"""Limits for reading a file: (bytes of memory, additional bytes of memory per byte of the file, seconds of CPU time,
additional seconds per byte of the file)."""

_LENGTH = struct.Struct("<Q")
_CALM = {"TOKENIZERS_PARALLELISM": "false", "OPENBLAS_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
"""Environment variables of workers. They make libraries use one thread, because every thread needs memory."""
_NO_CACHE = {"TORCHINDUCTOR_CACHE_DIR": os.sep}
"""An existing folder for torch's compiled code, because importing torch makes this folder. Nothing is compiled."""


_FIRST_THREAD = "GPTKIT_STARTED_BY"  # the parent's process id, if its main thread starts the worker


class Confined:
    """A worker process that answers questions. It ends when this object is deleted, or after `seconds`.

    Raises OSError if the process cannot start.
    """

    def __init__(self, worker: str | Sequence[str], seconds: float | None = None) -> None:
        """Start the worker.

        Args:
            worker: the name of a worker module in this folder; or the command-line arguments for Python, to start
                another program, which must call `work`.
            seconds: the time after which the worker is killed; None for no limit.
        """
        import subprocess  # here and below, because the worker must start quickly
        import weakref
        from threading import Timer, current_thread, main_thread

        words = ["-I", "-S", str(Path(__file__).absolute()), worker] if isinstance(worker, str) else worker
        first = {_FIRST_THREAD: str(os.getpid())} if current_thread() is main_thread() else {}
        self._process = subprocess.Popen(  # noqa: S603
            [sys.executable, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=os.sep,
            env={**os.environ, **_CALM, **_NO_CACHE, **first},
            start_new_session=True,  # only the parent handles Ctrl-C
        )
        timer = Timer(seconds or 0, self._process.kill)
        timer.daemon = True
        if seconds is not None:
            timer.start()
        self.end = weakref.finalize(self, _end, self._process, timer)

    def ask(self, question: Any, hook: Callable[[dict[str, Any]], Any] | None = None) -> dict[str, Any] | None:
        """Ask the worker a question and return the answer, or None if the worker has died.

        `hook` converts the JSON objects in the answer, as the `object_hook` of `json.loads`.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        data = None
        try:
            _send(self._process.stdin, json.dumps(question).encode())
            data = _receive(self._process.stdout)
        except (OSError, ValueError):
            pass
        except BaseException:  # after an interrupt, the late answer would be taken for the next one
            self.end()
            raise
        if data is None:
            self.end()
            return None
        answer: dict[str, Any] = json.loads(data, object_hook=hook)
        return answer


def libraries() -> list[str]:
    """Return the import paths of this process (`sys.path`), for a question to a worker that needs a library."""
    return [str(Path(path).absolute()) for path in sys.path if path]


def _end(process: Any, timer: Any) -> None:
    timer.cancel()
    process.kill()
    for pipe in (process.stdin, process.stdout):
        with suppress(OSError):  # unwritten data
            pipe.close()
    process.wait()


def _send(pipe: IO[bytes], data: bytes) -> None:
    pipe.write(_LENGTH.pack(len(data)) + data)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> bytes | None:
    """Return the next message, or None if the other process has closed the pipe or died. Raises OSError."""
    head = pipe.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    data = pipe.read(length)
    return data if len(data) == length else None


def allow(nbytes: int, most: _Costs, data: int | None = None) -> None:
    """Limit the memory and CPU time that this process may use from now on. The limits grow with the size of a file.

    The system kills the process if it takes more time.

    Args:
        nbytes: the size of the file that will be read.
        most: the limits of memory and CPU time (`_Costs`).
        data: the limit of writable memory in bytes. Workers that import torch need it, because torch reserves much more
            address space than it uses.
    """
    memory, per_byte, seconds, seconds_per_byte = most
    with suppress(OSError, ValueError):  # systems without /proc do not have this limit either
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        _limit("RLIMIT_AS", pages * os.sysconf("SC_PAGE_SIZE") + memory + nbytes * per_byte)
    if data is not None:
        _limit("RLIMIT_DATA", data)
    used = os.times()
    _limit("RLIMIT_CPU", int(used.user + used.system + seconds + nbytes * seconds_per_byte) + 1)


def _limit(name: str, soft: int) -> None:
    """Set a soft limit of this process, if the system has this limit."""
    with suppress(ImportError, AttributeError, ValueError, OSError):
        import resource

        kind = getattr(resource, name)
        resource.setrlimit(kind, (soft, resource.getrlimit(kind)[1] if soft else 0))


def _main() -> None:
    """Confine this process, and answer every question on stdin with the worker module that the command line names."""
    _end_with_parent()
    for name in ("RLIMIT_CORE", "RLIMIT_FSIZE", "RLIMIT_NPROC"):
        _limit(name, 0)
    _limit("RLIMIT_AS", MEMORY)
    # Not sys.path, because some modules of this folder have the names of other libraries.
    package = types.ModuleType("confined")
    package.__path__ = [os.path.dirname(__file__)]  # noqa: PTH120, as few imports as can be
    sys.modules[package.__name__] = package
    worker = importlib.import_module(f"{package.__name__}.{sys.argv[1]}")
    _serve(worker.answer, worker.reason)


def work(answer: Callable[[Any], Any], reason: Callable[[BaseException], str]) -> None:
    """Answer every question on stdin until the parent ends, without limits on memory and time.

    This is for programs that `Confined` starts and that are not worker modules of this folder.

    Args:
        answer: called with every question, decoded from JSON. It returns the answer, which is encoded as JSON.
        reason: called with an exception that `answer` raised. It returns the error text for the parent.
    """
    _end_with_parent()
    _limit("RLIMIT_CORE", 0)
    _serve(answer, reason)


def _serve(answer: Callable[[Any], Any], reason: Callable[[BaseException], str]) -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # libraries may print, which must not mix with answers
    while (question := _receive(sys.stdin.buffer)) is not None:
        try:
            data = json.dumps({"answer": answer(json.loads(question))}).encode()
        except BaseException as error:  # panics of Rust code have their own class
            data = json.dumps({"error": reason(error)}).encode()
        _send(answers, data)


def _end_with_parent() -> None:
    """End this process when its parent ends, even if the parent is killed or this process is computing an answer.

    A thread waits until stdin is closed. A C function may keep this thread from running, so on Linux the kernel also
    sends SIGKILL (prctl's PR_SET_PDEATHSIG). The kernel sends it when the thread that started this process ends. So the
    signal is only requested if that was the parent's main thread.
    """
    import threading

    def wait() -> None:
        waiting = select.poll()
        waiting.register(0, select.POLLHUP)  # not POLLIN: questions may arrive
        while not any(event & (select.POLLHUP | select.POLLERR) for _, event in waiting.poll()):
            pass
        os._exit(1)

    threading.stack_size(2**17)
    threading.Thread(target=wait, daemon=True).start()
    threading.stack_size(0)
    if os.environ.get(_FIRST_THREAD) == str(os.getppid()):
        with suppress(ImportError, OSError, AttributeError):
            import ctypes
            import signal

            ctypes.CDLL(None).prctl(1, signal.SIGKILL)


if __name__ == "__main__":
    _main()
