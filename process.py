"""The process that a command runs in: its signals and streams. It imports next to nothing, to be there first."""

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
_AGAIN = 0.002  # seconds after which a signal that met an import is looked at again


class Terminated(KeyboardInterrupt):
    """SIGTERM: what Ctrl-C would do, with an exit code of its own."""


def answer_signals() -> None:
    """Turn SIGINT and SIGTERM into KeyboardInterrupt and Terminated, unless whoever started us decided on them."""
    for number, default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
        if signal.getsignal(number) is default:
            signal.signal(number, _answer)


def _answer(number: int, frame: FrameType | None) -> None:
    """Raise, so that the command leaves in order; the same signal once more ends it at once.

    Within an import nothing is raised: libraries take it for a failure of their own. Its end is waited for.
    """
    signal.signal(number, _leave)

    def again(_: int, at: FrameType | None) -> None:
        if _importing(at):
            signal.setitimer(signal.ITIMER_REAL, _AGAIN)
            return
        # While it leaves, once more means at once.
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
    """From here on signals end the process at once: nothing is under way that could be left in order."""
    signal.setitimer(signal.ITIMER_REAL, 0)
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) not in (signal.SIG_IGN, None):
            signal.signal(number, _leave)


def end(code: int) -> NoReturn:
    """End the process as `sys.exit` does, but that the interpreter is not taken down: a thread of torch.distributed
    that lets go of a tensor meanwhile would abort the process (pytorch/pytorch#190489).
    """
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        code = code or 120  # as Python's own
    os._exit(code)


def leave_no_cache() -> None:
    """At exit, remove the folder for compiled code that torch makes in TMPDIR, unless it holds something."""
    before = os.environ.get(_COMPILED)

    def remove() -> None:
        if (path := os.environ.get(_COMPILED)) and path != before:  # torch notes there which one it made
            with suppress(OSError):
                os.rmdir(path)  # noqa: PTH106, as few imports as can be

    atexit.register(remove)


def open_streams() -> None:
    """Give what is written to a stream that was closed to nobody, and not to the next file that is opened."""
    for fd, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest that is free, this one
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(fd, mode))
