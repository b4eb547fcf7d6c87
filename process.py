"""Signals and streams of the process of a command. Imports little, so that it takes effect early."""

import atexit
import os
import signal
import sys
from contextlib import suppress
from types import FrameType
from typing import NoReturn

INTERRUPTED = 130
TERMINATED = 143
_COMPILED = "TORCHINDUCTOR_CACHE_DIR"
_AGAIN = 0.002  # seconds until a signal that arrived during an import is handled again


class Terminated(KeyboardInterrupt):
    """An interruption by SIGTERM. It is handled like Ctrl-C, with another exit code."""


def answer_signals() -> None:
    """Turn SIGINT and SIGTERM into KeyboardInterrupt and Terminated, unless the parent process set other handlers."""
    for number, default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
        if signal.getsignal(number) is default:
            signal.signal(number, _answer)


def _answer(number: int, frame: FrameType | None) -> None:
    """Raise an exception, so that the command can clean up. A second signal ends the process at once.

    During an import, the exception is delayed until the import ends, because libraries would treat it as their failure.
    """
    signal.signal(number, _leave)

    def again(_: int, at: FrameType | None) -> None:
        if _importing(at):
            signal.setitimer(signal.ITIMER_REAL, _AGAIN)
            return
        # A second signal during the clean-up ends the process.
        signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.default_int_handler)
        raise KeyboardInterrupt if number == signal.SIGINT else Terminated

    signal.signal(signal.SIGALRM, again)
    again(number, frame)


def _importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def _leave(number: int, _: FrameType | None = None) -> NoReturn:
    """End the process at once, with the exit code of the signal."""
    os.write(2, b"gptkit: interrupted\n")
    os._exit(TERMINATED if number == signal.SIGTERM else INTERRUPTED)


def leave_at_signals() -> None:
    """Let signals end the process at once from now on, because there is nothing more to clean up."""
    signal.setitimer(signal.ITIMER_REAL, 0)
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) not in (signal.SIG_IGN, None):
            signal.signal(number, _leave)


def end(code: int) -> NoReturn:
    """End the process like `sys.exit`, but without finalising the interpreter.

    During finalisation, a thread of torch.distributed that frees a tensor would abort the process
    (pytorch/pytorch#190489).
    """
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        code = code or 120  # the exit code that Python uses in this case
    os._exit(code)


def leave_no_cache() -> None:
    """At exit, remove the folder for compiled code that torch creates in TMPDIR, if it is empty."""
    before = os.environ.get(_COMPILED)

    def remove() -> None:
        if (path := os.environ.get(_COMPILED)) and path != before:  # torch stores the path in this variable
            with suppress(OSError):
                os.rmdir(path)  # noqa: PTH106, to import as little as possible

    atexit.register(remove)


def open_streams() -> None:
    """Connect closed standard streams to /dev/null, so that output does not go into the next file that is opened."""
    for fd, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is `fd`
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(fd, mode))
