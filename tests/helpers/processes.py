"""Python and gptkit in processes of their own, and how much processor time something takes.

No test asserts seconds on the wall, which a busy machine makes as long as it likes.
"""

import gc
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HANGS = 600.0
"""Seconds after which a process is taken to wait for something that never comes: a guard, and no bound on speed."""

HEAVY = ("torch", "transformers", "numpy", "tokenizers", "safetensors", "huggingface_hub", "rich", "plotly", "IPython")
"""What takes long to import, and is not for whatever does without."""


def python(
    *arguments: str | Path, env: Mapping[str, str] | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """A process of this Python with our environment and `env`; its exit code, and what it says on either stream."""
    command = [sys.executable, *map(str, arguments)]
    given = {"capture_output": True, "text": True, "timeout": HANGS, "check": False, **options}
    return subprocess.run(command, env={**os.environ, **(env or {})}, **given)


def gptkit(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own; options as of `python`."""
    return python("-m", "gptkit", *arguments, **options)


IMPORTED = """
import json, sys
try:
    exec(sys.argv[1], {})
except SystemExit as end:
    assert not end.code, end.code
print("\\n" + json.dumps(sorted(sys.modules)))
"""


def imported(code: str, *names: str) -> set[str]:
    """Those modules that a new process has imported after the code; without names, of all that are HEAVY."""
    done = python("-c", IMPORTED, code)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1])) & set(names or HEAVY)


MEASURED = """
import sys, time
from pathlib import Path
from gptkit.errors import GptkitError
{imports}
path = Path(sys.argv[1])
began = time.process_time()
try:
    print({expression})
except GptkitError as error:
    print(str(error)[:2000].replace("\\n", " "))
seconds = time.process_time() - began
# Not ru_maxrss, which begins with that of the process that forked.
peak = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")]
print(seconds, int(peak[0]) / 1024)
"""


def measured(path: Path, imports: str, expression: str) -> str:
    """What the expression of `path` gives, or the error's message, in less than two seconds of processor time of a
    process that takes less than 512 MB.
    """
    done = python("-c", MEASURED.format(imports=imports, expression=expression), path, check=True)
    said, figures = done.stdout.splitlines()
    seconds, megabytes = map(float, figures.split())
    assert seconds < 2 and megabytes < 512, (said, figures)
    return said


def processor_seconds() -> float:
    """Processor time of this process, and of its children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


@contextmanager
def at_most(seconds: float, of: object = "") -> Iterator[None]:
    """Assert that the block takes less processor time than this.

    Garbage is not collected meanwhile: after thousands of tests, one collection looks at gigabytes of their objects.
    """
    collects = gc.isenabled()
    gc.disable()
    began = processor_seconds()
    try:
        yield
        took = processor_seconds() - began
    finally:
        if collects:
            gc.enable()
    assert took < seconds, f"{took:.1f} seconds of processor time {of}"
