"""The command line: `main` is the `gptkit` command, and `app` what it runs. A command is a file in `commands/`.

Imports of torch, transformers and rich wait inside the commands, so that --help and params answer at once.
"""

from __future__ import annotations

import io
import signal
import sys
from typing import NoReturn

from .commands import compare, convert, demo, diff, generate, params, recommend, show, swap, verify
from .commands.base import Terminated, app

__all__ = ["COMMANDS", "app", "main"]

COMMANDS = (params, compare, diff, show, recommend, convert, swap, verify, generate, demo)
"""The modules, each of which adds its commands to `app` when it is imported."""


def terminate(*_: object) -> NoReturn:
    """Leave in order at the first SIGTERM, at once at the second. Raises Terminated."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    raise Terminated


def main() -> None:
    """The `gptkit` command."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # else whoever started us decided on it
        signal.signal(signal.SIGTERM, terminate)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal may lack a character
    app(prog_name="gptkit")


if __name__ == "__main__":
    main()
