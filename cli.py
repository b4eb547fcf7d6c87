"""The command line: `app`, to which the modules in `commands/` add their commands, and `main`, which runs it.

Commands import torch, transformers and rich inside their functions, so that --help and params answer at once.
"""

import io
import sys

from .commands import (
    ablate,
    audit,
    compare,
    convert,
    demo,
    diff,
    draft,
    generate,
    heal,
    params,
    recommend,
    show,
    swap,
    tokenize,
    train,
    verify,
)
from .commands import eval as evaluate
from .commands.base import app
from .process import answer_signals

_COMMANDS = (
    *(params, compare, diff, audit, draft, show, recommend, convert, swap, verify, generate),
    *(tokenize, train, heal, ablate, evaluate, demo),
)
"""The modules of commands. A module adds its commands to `app` when it is imported."""


def main() -> None:
    """Run the command that the process was started with."""
    answer_signals()  # `__main__` does this earlier, but `main` can also be called without it
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal may lack a character
    app(prog_name="gptkit")


if __name__ == "__main__":
    main()
