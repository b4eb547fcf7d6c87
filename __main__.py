"""`python -m gptkit`, and the `gptkit` command: `main`."""

import sys

from .process import INTERRUPTED, TERMINATED, Terminated, answer_signals, leave_at_signals, open_streams


def main() -> None:
    """Run the command line, which is imported where signals are answered already."""
    open_streams()
    answer_signals()
    try:
        from . import cli

        cli.main()
    except KeyboardInterrupt as error:  # before a command began
        sys.stderr.write("gptkit: interrupted\n")
        sys.exit(TERMINATED if isinstance(error, Terminated) else INTERRUPTED)
    finally:
        leave_at_signals()


if __name__ == "__main__":
    main()
