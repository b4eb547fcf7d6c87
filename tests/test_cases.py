"""Faults that were reported from outside, as the scripts that showed them: ../shared/cases, where that folder is there.

A script of `cases/` or `cases/parity/` exits with 1 while its fault stands. A script of `cases/attacks/` prints what
happens, and the tests read what it prints: no command may hang, use more than 600 MB, print a traceback, show the text
of a file outside the model, lose a file, or publish a run whose state was edited. `make cases` runs them all.
"""

import os
import re
import shutil
import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path

import pytest
from helpers.processes import HANGS

CASES = Path(__file__).parents[2] / "shared" / "cases"
CHECKED = sorted([*CASES.glob("*.py"), *CASES.glob("parity/*.py")])
ATTACKS = sorted(path for path in CASES.glob("attacks/*") if path.name[0] != "_" and path.suffix in (".py", ".sh"))
MEGABYTES = 600
OPTIONAL = ("gguf", "peft", "sentencepiece")
BIN = Path(sys.executable).parent

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not CASES.is_dir(), reason="needs the project's shared cases")]


def names(path: Path) -> str:
    return str(path.relative_to(CASES))


class Memory(threading.Thread):
    """Watches gptkit's processes below a process, and records their largest peak of resident memory in megabytes.

    The scripts themselves, and the `python -c` with which they prepare files, do not count.
    """

    def __init__(self, root: int) -> None:
        super().__init__(daemon=True)
        self.root, self.peak, self.ended = root, 0.0, threading.Event()

    def run(self) -> None:
        while not self.ended.wait(0.05):
            self.peak = max([self.peak, *map(self._megabytes, self._descendants())])

    def _descendants(self) -> list[int]:
        parents = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
            except OSError:  # the process has ended
                continue
        below = [self.root]
        for pid in below:
            below += [child for child, parent in parents.items() if parent == pid]
        return below

    @staticmethod
    def _megabytes(pid: int) -> float:
        try:
            command, status = Path(f"/proc/{pid}/cmdline").read_text(), Path(f"/proc/{pid}/status").read_text()
        except OSError:
            return 0.0
        peak = re.search(r"VmHWM:\s+(\d+)", status)
        words = command.split("\0")
        ours = words[0].startswith(str(BIN)) and "-c" not in words and not any("/cases/" in word for word in words[:3])
        return int(peak[1]) / 1024 if peak and ours else 0.0


def output_of(script: Path, folder: Path) -> tuple[int, str, float]:
    """Run a script with this environment's gptkit; return its exit code, its output and the peak memory of gptkit."""
    # torch, which pytest has imported, sets variables that a new shell does not have.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("TORCH", "TRITON"))}
    environment = {
        **inherited,
        "GPTKIT": str(BIN / "gptkit"),
        "GPTKIT_PY": sys.executable,
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "TMPDIR": str(folder),
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = ["bash" if script.suffix == ".sh" else sys.executable, str(script)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, cwd=folder
    ) as process:
        memory = Memory(process.pid)
        memory.start()
        printed, _ = process.communicate(timeout=HANGS)
        memory.ended.set()
    return process.returncode, printed, memory.peak


@pytest.mark.parametrize("script", CHECKED, ids=names)
def test_a_reported_fault_is_gone(script, tmp_path):
    lacking = [name for name in OPTIONAL if name in script.read_text() and find_spec(name) is None]
    if lacking:
        pytest.skip(f"needs {', '.join(lacking)}")
    code, printed, _ = output_of(script, tmp_path)
    assert code == 0, printed


FORBIDDEN = {
    "force_loses_user_files.py": ("README lost: True",),
    "latest_symlink_leak.py": ("SECRETHASH",),
    "model_card_injection.py": ("\nlicense: evil", "\nlibrary_name: evil", "<script>", "\x1b[", "\n# pwned"),
    "tmpdir_leftover.sh": ("torchinductor",),
    "draft_layers_1e7.py": ("kill -9: True",),
}
"""Per script, what it must not print."""
TAMPERED = ("str", "neg", "huge", "empty")
"""Edits of a run's state after which resume_tampered_state.py may not publish."""


@pytest.mark.parametrize("script", ATTACKS, ids=names)
def test_an_attack_fails(script, tmp_path):
    _, printed, peak = output_of(script, tmp_path)
    common = ("bug in gptkit", "rc TIMEOUT") + (() if "draft_layers" in script.name else ("Traceback",))
    assert not [text for text in (*common, *FORBIDDEN.get(script.name, ())) if text in printed], printed
    assert peak < MEGABYTES, f"{peak:.0f} MB\n{printed}"
    if script.name == "resume_tampered_state.py":
        runs = dict(re.findall(r"^== (\w+)\n(?:.*\n)*?published: (\w+)$", printed, re.M))
        assert [runs[name] for name in TAMPERED] == ["False"] * len(TAMPERED), printed


def test_there_are_cases():
    assert len(CHECKED) >= 19 and len(ATTACKS) >= 11
    assert shutil.which("bash")
