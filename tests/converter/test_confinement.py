"""Processes that read what others wrote end with the process that started them, whatever they do at that moment."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.covering import few
from helpers.processes import HANGS

import gptkit

PRODUCT = Path(gptkit.__file__).parent
BUSY = {
    "computing": "[x for x in iter(int, 1)]",
    "asleep": "time.sleep(1000)",
    "in C, which lets no thread run": "re.match('(a+)+$', 'a' * 60 + 'b')",
}
PARENT = """
import sys, threading
from gptkit.converter.confinement import Confined

program = "import re, time; from gptkit.converter.confinement import work; work(lambda _: {}, repr)"

def ask():
    worker = Confined(["-c", program.format(sys.argv[1])])
    print(worker._process.pid, flush=True)
    worker.ask(1)

if sys.argv[2] == "thread":
    threading.Thread(target=ask).start()
else:
    ask()
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@few(2)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("what", "where"), [(what, "main") for what in BUSY] + [("computing", "thread"), ("asleep", "thread")]
)
def test_a_worker_ends_with_its_parent(what: str, where: str) -> None:
    command = [sys.executable, "-c", PARENT, BUSY[what], where]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        time.sleep(1)  # so that it is at work
        assert alive(worker)
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    began = time.monotonic()
    while alive(worker) and time.monotonic() - began < HANGS / 10:
        time.sleep(0.05)
    assert not alive(worker)


def test_every_process_of_the_product_is_confined() -> None:
    """No module starts a process but `confinement`, whose workers have bounds and end with their parent."""
    folders = ("analysis", "architectures", "commands", "components", "converter", "drafting", "modules", "parity")
    paths = [
        path for folder in (*folders, "report", "surgery", "training") for path in (PRODUCT / folder).rglob("*.py")
    ]
    assert len(paths) > 200
    starting = ("subprocess", "multiprocessing", "os.fork", "ProcessPool", "posix_spawn", "os.system", "os.exec")
    found = {path.name for path in paths if any(word in path.read_text(encoding="utf-8") for word in starting)}
    assert found == {"confinement.py"}
