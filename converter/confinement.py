"""Processes of their own for what others wrote: with little memory and time, that write no file and start no other.

Read by both sides. The parent (`Confined`) starts this file as a plain script, isolated: it limits itself and gives
every question to the `answer` of a neighbour (`pickle_process`, `tokenizer_process`), which imports
nothing but the standard library and its neighbours. What is hostile in a file then takes down such a process at the
most, and what a library has to say of it goes nowhere. A message is eight bytes of length and JSON; an answer is
{"answer": …}, or {"error": …} with the worker's `reason`.
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

MEMORY = 256 * 2**20  # bytes of address space for a small file; the interpreter takes a tenth of it

_Costs = tuple[int, int, float, float]
"""Memory for any file or text and for each of its bytes, then seconds of processor time the same."""

_LENGTH = struct.Struct("<Q")
_CALM = {"TOKENIZERS_PARALLELISM": "false", "OPENBLAS_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
"""One thread: a thread's stack and heap count for memory, and nothing here takes long enough to share."""
_NO_CACHE = {"TORCHINDUCTOR_CACHE_DIR": os.sep}
"""The folder that torch makes for compiled code when it is imported: one that is there. Nothing is compiled here."""


_FIRST_THREAD = "GPTKIT_STARTED_BY"  # the parent's process number, where its first thread starts a worker


class Confined:
    """A worker, as the parent sees it; it ends with this object, or after so many seconds. Raises OSError."""

    def __init__(self, worker: str | Sequence[str], seconds: float | None = None) -> None:
        """Start a neighbour by its name, or another program of ours, which calls `work`, by its words for Python."""
        import subprocess  # here and below, because the worker has to begin quickly
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
            start_new_session=True,  # a terminal's Ctrl-C is for us to answer
        )
        timer = Timer(seconds or 0, self._process.kill)
        timer.daemon = True
        if seconds is not None:
            timer.start()
        self.end = weakref.finalize(self, _end, self._process, timer)

    def ask(self, question: Any, hook: Callable[[dict[str, Any]], Any] | None = None) -> dict[str, Any] | None:
        """The answer to a question, its objects as the `hook` makes them; None where it has died, now or before."""
        assert self._process.stdin is not None and self._process.stdout is not None
        data = None
        try:
            _send(self._process.stdin, json.dumps(question).encode())
            data = _receive(self._process.stdout)
        except (OSError, ValueError):
            pass
        except BaseException:  # an interrupt: what is still to come would be taken for the next answer
            self.end()
            raise
        if data is None:
            self.end()
            return None
        answer: dict[str, Any] = json.loads(data, object_hook=hook)
        return answer


def libraries() -> list[str]:
    """Where the parent imports from, for a worker that needs one of its libraries."""
    return [str(Path(each).absolute()) for each in sys.path if each]


def _end(process: Any, timer: Any) -> None:
    timer.cancel()
    process.kill()
    for pipe in (process.stdin, process.stdout):
        with suppress(OSError):  # what was still to be written
            pipe.close()
    process.wait()


def _send(pipe: IO[bytes], data: bytes) -> None:
    pipe.write(_LENGTH.pack(len(data)) + data)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> bytes | None:
    """Read a message; None at the end, or where the other side died within one. Raises OSError."""
    head = pipe.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    data = pipe.read(length)
    return data if len(data) == length else None


def allow(nbytes: int, most: _Costs, data: int | None = None) -> None:
    """Limit this process to what it has, and what so many bytes may take: it is killed where it takes more time.

    data: a limit of the memory that it may write to, in bytes, for a worker that imports torch: the address space that
    torch reserves says little of that.
    """
    memory, per_byte, seconds, seconds_per_byte = most
    with suppress(OSError, ValueError):  # where there is no /proc there is no such limit either
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        _limit("RLIMIT_AS", pages * os.sysconf("SC_PAGE_SIZE") + memory + nbytes * per_byte)
    if data is not None:
        _limit("RLIMIT_DATA", data)
    used = os.times()
    _limit("RLIMIT_CPU", int(used.user + used.system + seconds + nbytes * seconds_per_byte) + 1)


def _limit(name: str, soft: int) -> None:
    """Set a soft limit of this process, where the system knows such a limit."""
    with suppress(ImportError, AttributeError, ValueError, OSError):
        import resource

        kind = getattr(resource, name)
        resource.setrlimit(kind, (soft, resource.getrlimit(kind)[1] if soft else 0))


def _main() -> None:
    """Confine this process, and be the worker that the command line names, which answers every question on stdin."""
    _end_with_parent()
    for name in ("RLIMIT_CORE", "RLIMIT_FSIZE", "RLIMIT_NPROC"):
        _limit(name, 0)
    _limit("RLIMIT_AS", MEMORY)
    # Neighbours by their own names, and not this folder on the path, where some are called as other libraries are.
    package = types.ModuleType("confined")
    package.__path__ = [os.path.dirname(__file__)]  # noqa: PTH120, as few imports as can be
    sys.modules[package.__name__] = package
    worker = importlib.import_module(f"{package.__name__}.{sys.argv[1]}")
    _serve(worker.answer, worker.reason)


def work(answer: Callable[[Any], Any], reason: Callable[[BaseException], str]) -> None:
    """Be a worker that is no neighbour: answer every question on stdin, as long as the parent lives."""
    _end_with_parent()
    _limit("RLIMIT_CORE", 0)
    _serve(answer, reason)


def _serve(answer: Callable[[Any], Any], reason: Callable[[BaseException], str]) -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no answer
    while (question := _receive(sys.stdin.buffer)) is not None:
        try:
            data = json.dumps({"answer": answer(json.loads(question))}).encode()
        except BaseException as error:  # Rust code panics with a class of its own
            data = json.dumps({"error": reason(error)}).encode()
        _send(answers, data)


def _end_with_parent() -> None:
    """End this process once its parent has ended, by kill -9 too, in the middle of an answer.

    A thread waits for the hang-up of stdin, which the parent alone writes to. On Linux the kernel sends SIGKILL as
    well (prctl's PR_SET_PDEATHSIG), for a C function that lets no other thread run; not where a thread other than the
    parent's first one started this process, at whose end it would send that too.
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
