"""The entry of the pre-commit hook: audit the checkpoints that contain the given files.

    python -m gptkit.precommit [OPTION…] -- FILE…

Every folder that has one of the files is audited once, by `gptkit audit FOLDER OPTION…` in a process of its own. The
exit code is the largest one of these processes.
"""

import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path


def folders(files: Iterable[str]) -> list[Path]:
    """Return the folders to audit: those of the files. A .gguf file is a checkpoint of its own."""
    paths = map(Path, files)
    return sorted({path if path.suffix == ".gguf" else path.parent for path in paths if path.exists()})


def run(arguments: Sequence[str]) -> int:
    """Audit all folders, and return the exit code."""
    end = len(arguments) - arguments[::-1].index("--") if "--" in arguments else 0
    options = [option for option in arguments[:end] if option != "--"]
    audit = [sys.executable, "-m", __package__, "audit"]
    codes = [subprocess.run([*audit, str(folder), *options]).returncode for folder in folders(arguments[end:])]  # noqa: S603
    return max(codes, default=0)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
