"""The entry point of `gptkit` and `python -m gptkit`."""

import sys

from .process import (
    INTERRUPTED,
    TERMINATED,
    Terminated,
    answer_signals,
    end,
    leave_at_signals,
    leave_no_cache,
    open_streams,
)


def main() -> None:
    """Run the command line. It is imported after signal handlers are set, so that Ctrl-C works during imports."""
    open_streams()
    leave_no_cache()
    answer_signals()
    try:
        from . import cli

        cli.main()
    except KeyboardInterrupt as error:  # before a command began
        sys.stderr.write("gptkit: interrupted\n")
        sys.exit(TERMINATED if isinstance(error, Terminated) else INTERRUPTED)
    except SystemExit as ended:
        leave_at_signals()
        if "torch" in sys.modules and isinstance(ended.code, int):
            from .converter.distributed import several

            if several():
                end(ended.code)
        raise
    finally:
        leave_at_signals()


if __name__ == "__main__":
    main()
