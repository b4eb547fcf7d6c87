"""Signals and closed streams, from a command's first moments to its last."""

import os
import signal
import subprocess
from pathlib import Path

import pytest
from helpers.covering import few
from helpers.processes import gptkit, python

# The process sends itself the signal where the module is about to be imported.
AT_IMPORT = """
import os, sys
_, module, number, *arguments = sys.argv
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == module:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), int(number))
sys.meta_path.insert(0, Finder())
from gptkit.__main__ import main
sys.argv[1:] = arguments
main()
"""
AT_EXIT = """
import atexit, os, sys
from gptkit.__main__ import main
number = int(sys.argv[1])
sys.argv[1:] = sys.argv[2:]
atexit.register(lambda: os.kill(os.getpid(), number))
main()
"""
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}


def ran(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return python("-c", code, *arguments)


@few(2)
@pytest.mark.parametrize("number", CODES, ids=lambda number: number.name)
@pytest.mark.parametrize("module", ["gptkit.cli", "typer", "gptkit.commands.verify", "numpy", "torch._C"])
def test_a_signal_while_something_is_imported(module: str, number: signal.Signals) -> None:
    """Before the command, and within it, where libraries turn what is raised into failures of their own."""
    done = ran(AT_IMPORT, module, str(int(number)), "load", "sample:gpt2")
    assert (done.returncode, done.stdout, done.stderr) == (CODES[number], "", "gptkit: interrupted\n")


@pytest.mark.parametrize("number", CODES, ids=lambda number: number.name)
def test_a_signal_when_all_is_done(number: signal.Signals) -> None:
    done = ran(AT_EXIT, str(int(number)), "--version")
    assert (done.returncode, done.stderr) == (CODES[number], "gptkit: interrupted\n")
    assert done.stdout.startswith("gptkit ")


def test_a_signal_that_is_ignored_stays_so() -> None:
    code = f"import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n{AT_IMPORT}"
    done = ran(code, "numpy", str(int(signal.SIGINT)), "diff", "sample:gpt2", "sample:gpt2")
    assert (done.returncode, done.stderr) == (0, "")


@few(2)
@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)], ids=str)
@pytest.mark.parametrize(("arguments", "code"), [(["params", "gpt2"], 0), (["params", "no-such-model"], 4)])
def test_closed_streams(arguments: list[str], code: int, closed: tuple[int, ...], tmp_path: Path) -> None:
    """What is written there is lost, and goes into no other file."""

    def close() -> None:
        for fd in closed:
            os.close(fd)

    done = gptkit(*arguments, preexec_fn=close, cwd=tmp_path, env={"HF_HUB_OFFLINE": "1"})
    assert done.returncode == code
    assert bool(done.stdout) == (code == 0 and 1 not in closed)
    assert bool(done.stderr) == (code != 0 and 2 not in closed) and "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


ENDING = """
import atexit, os, sys, torch
from gptkit import __main__, cli

class Kept:
    def __del__(self, write=os.write):
        write(1, b"taken down")

kept = Kept()

def command():
    atexit.register(print, "at exit")
    print("said")
    sys.exit(3)

cli.main = command
__main__.main()
"""


@pytest.mark.parametrize("several", [False, True])
def test_one_of_several_processes_is_not_taken_down(several: bool) -> None:
    """Threads of torch.distributed abort a process that is."""
    ranks = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "localhost"} if several else {}
    done = python("-c", ENDING, env=ranks)
    assert done.returncode == 3 and not done.stderr
    assert done.stdout.split("\n")[:2] == ["said", "at exit"]
    assert ("taken down" in done.stdout) is not several


@few(2)
@pytest.mark.parametrize("arguments", ["--help", "convert --help", "--version", "params gpt2", "params gpt2 --json"])
def test_a_full_disk_under_stdout(arguments: str) -> None:
    with Path("/dev/full").open("w") as full:
        done = gptkit(*arguments.split(), capture_output=False, stdout=full, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (1, "gptkit: No space left on device\n")


@few(2)
@pytest.mark.parametrize("arguments", ["--help", "convert --help", "--version", "params gpt2", "params gpt2 --json"])
def test_a_reader_that_has_gone(arguments: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = gptkit(*arguments.split(), capture_output=False, stdout=writer, stderr=subprocess.PIPE)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


@few(1)
@pytest.mark.parametrize("megabytes", [36, 44, 52, 60])
def test_a_library_that_memory_does_not_suffice_for(megabytes: int) -> None:
    """What a library says then is not taken for a fault of gptkit's."""
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_AS, ({megabytes} << 20,) * 2)"
    code = f"{limit}\nfrom gptkit.__main__ import main\nmain()"
    done = ran(code, "params", "sample:llama")
    assert done.returncode in (0, 1) and "bug in gptkit" not in done.stderr and done.stderr.count("\n") <= 2
