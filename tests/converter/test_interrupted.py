"""A conversion that is killed, interrupted or refused by the disk: what is left, and that the same command goes on.

Everything here runs the real `convert`, on checkpoints small enough to do so hundreds of times.
"""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from killed import contents, noted

from gptkit.architectures import named
from gptkit.converter import publish
from gptkit.converter.convert import convert
from gptkit.converter.publish import check_manifest
from gptkit.converter.safetensors import SafetensorsWriter
from gptkit.errors import GptkitError

KILLED = Path(__file__).parents[1] / "killed.py"
SHARD = 1_000  # bytes: four shards of `tiny`
SMALL = {"model_type": "gpt2", "vocab_size": 11, "n_positions": 16, "n_embd": 8, "n_layer": 1, "n_head": 2}
# A lean process: one thread for numpy, no bytecode written where the test may not.
LEAN = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def make_tiny(folder: Path) -> Path:
    """A GPT-2 of sixteen tensors, all of them random."""
    folder.mkdir()
    config = {**SMALL, "architectures": ["GPT2LMHeadModel"], "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))
    generator = np.random.default_rng(0)
    leaves = named("gpt2").bind(named("gpt2").spec(config))
    with SafetensorsWriter(
        folder / "model.safetensors", [(leaf.checkpoint, "F32", leaf.shape) for leaf in leaves], {"format": "pt"}
    ) as writer:
        for leaf in leaves:
            writer.write(leaf.checkpoint, generator.standard_normal(leaf.shape, dtype=np.float32))
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture
def memory_path(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where the system has one: the failures are made up, so the disk need not be waited for."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if os.access(shared, os.W_OK) else tmp_path) as folder:
        yield Path(folder)


def beside(target: Path) -> list[str]:
    return sorted(path.name for path in target.parent.iterdir() if path != target)


# --- every call fails once


class Fault:
    """Makes the n-th call fail of those that may: writing, putting on the disk, renaming, opening, making, removing."""

    CALLS = (
        *("open", "mkdir", "unlink", "rmdir", "rename", "replace", "link", "ftruncate", "truncate", "posix_fallocate"),
        *("write", "writev", "pwrite", "pwritev", "copy_file_range", "sendfile", "fsync", "fdatasync"),
    )

    def __init__(self, patch: pytest.MonkeyPatch, at: int, code: int) -> None:
        self.at, self.code, self.seen, self.hit = at, code, 0, ""
        self._mutex = threading.Lock()
        for name in self.CALLS:
            if hasattr(os, name):
                patch.setattr(os, name, self.wrap(name, getattr(os, name)))
        patch.setattr(publish, "_renameat2", self.wrap("renameat2", publish._renameat2))
        patch.setattr("io.open", self.wrap("open", open))  # what Path.open calls

    def wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **named: Any) -> Any:
            with self._mutex:
                self.seen += 1
                fails = self.seen - 1 == self.at
            if fails:
                self.hit = name
                raise OSError(self.code, os.strerror(self.code))
            return call(*arguments, **named)

        return wrapped


@pytest.mark.parametrize("over_old", [False, True])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT], ids=errno.errorcode.get)
def test_the_nth_call_fails_for_every_n(memory_path: Path, code: int, over_old: bool) -> None:
    tiny, target = make_tiny(memory_path / "tiny"), memory_path / "room" / "out"
    target.parent.mkdir()
    convert(tiny, memory_path / "new", max_shard_bytes=SHARD, workers=1)
    convert(tiny, memory_path / "old", "hf", workers=1)
    new, old = contents(memory_path / "new"), contents(memory_path / "old") if over_old else None
    hits: list[str] = []
    for at in range(1000):
        if over_old:
            shutil.copytree(memory_path / "old", target)
        with pytest.MonkeyPatch.context() as patch:
            fault = Fault(patch, at, code)
            try:
                convert(tiny, target, force=over_old, max_shard_bytes=SHARD, workers=1)
                failed = False
            except GptkitError:
                failed = True
        if not fault.hit:
            assert not failed and contents(target) == new and beside(target) == []
            break
        hits.append(fault.hit)
        state = contents(target)
        assert state in (old, new), f"call {at}, {fault.hit}"
        assert failed or state == new, f"call {at}, {fault.hit}: silent"
        # Removing may be what failed, and the next run does it then; anything else leaves nothing.
        tidy = fault.hit not in ("unlink", "rmdir", "open", "fsync")
        assert not tidy or beside(target) == [], f"call {at}, {fault.hit}"
        convert(tiny, target, force=True, max_shard_bytes=SHARD, workers=1)
        assert contents(target) == new and beside(target) == [], f"call {at}, {fault.hit}"
        shutil.rmtree(target)
    # What the test is worth: the calls that it has seen fail.
    assert {"open", "mkdir", "pwrite", "fsync", "rename", "renameat2", "unlink", "ftruncate"} <= set(hits)
    assert len(hits) > 60


# --- kill -9


def kills(folder: Path, count: int, seed: int) -> dict[str, int]:
    killing = [sys.executable, str(KILLED), str(folder), "--kills", str(count), "--seed", str(seed)]
    done = subprocess.run(killing, env=LEAN, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    counts: dict[str, int] = json.loads(done.stdout)
    return counts


def test_kill_9_leaves_old_or_new_and_a_rerun_resumes(tmp_path: Path) -> None:
    counts = kills(tmp_path, 50, seed=int.from_bytes(os.urandom(4)))
    assert counts["kills"] >= 50
    # Whether the moments meant anything: some kills fall where files are finished, which then are not written again.
    assert counts["resumed"] >= 3 and counts["finished files kept"] >= counts["resumed"], counts


@pytest.mark.soak
def test_thousands_of_kills(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = int(os.environ.get("KILLS", "3000"))
    counts = kills(tmp_path, wanted, seed=int.from_bytes(os.urandom(4)))
    count = counts["kills"]
    with capsys.disabled():
        print(f"\n{json.dumps(counts)}\nNo failure in {count:,} kills bounds the rate below {3 / count:.2%} at 95 %.")


# --- signals that can be answered


COMMAND = f"""
import sys, time
from gptkit import cli
from gptkit.converter import convert
from gptkit.converter.publish import Staging
transfer, finish = convert.transfer, Staging.finish
convert.DEFAULT_SHARD_BYTES = {SHARD}
convert.transfer = lambda *arguments, **named: transfer(*arguments, **{{**named, "workers": 1}})
def slow(self, name, record):
    finish(self, name, record)
    print("finished", name, flush=True)
    time.sleep(1)
if sys.argv.pop(1) == "slow":
    Staging.finish = slow
cli.main()
"""


def command(speed: str, tiny: Path, target: Path) -> list[str]:
    """gptkit convert in shards, one after another; "slow" leaves a second between two of them."""
    return [sys.executable, "-c", COMMAND, speed, "convert", str(tiny), str(target), "-q"]


def begun(tiny: Path, target: Path) -> subprocess.Popen[bytes]:
    """A slow one that has just finished its first shard."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command("slow", tiny, target), env=LEAN, **pipes)
    assert process.stdout is not None
    assert process.stdout.readline().startswith(b"finished model-")
    return process


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_says_that_the_same_command_goes_on(tmp_path: Path, number: int, code: int) -> None:
    tiny, target = make_tiny(tmp_path / "tiny"), tmp_path / "room" / "out"
    target.parent.mkdir()
    process = begun(tiny, target)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code, err.decode()
    assert err.decode() == (
        f"gptkit: interrupted\n  1 file of {target} finished so far: the same command goes on from there\n"
    )
    ((shard, same),) = noted(target).items()
    assert subprocess.run(command("fast", tiny, target), env=LEAN).returncode == 0
    assert check_manifest(target) == [] and beside(target) == []
    assert ((target / shard).stat().st_ino, (target / shard).stat().st_mtime_ns) == same
    convert(tiny, tmp_path / "whole", max_shard_bytes=SHARD)
    assert contents(target) == contents(tmp_path / "whole")


def test_a_second_convert_to_the_same_place_is_refused_at_once(tmp_path: Path) -> None:
    tiny, target = make_tiny(tmp_path / "tiny"), tmp_path / "out"
    first = begun(tiny, target)
    second = subprocess.run(command("fast", tiny, target), env=LEAN, capture_output=True, text=True)
    assert second.returncode == 1
    assert f"{target} is being written by another gptkit (pid {first.pid})" in second.stderr
    first.communicate(timeout=60)
    assert first.returncode == 0
    assert check_manifest(target) == []


# --- disks and folders that refuse


@pytest.mark.parametrize("limit", [0, 300, 1_000, 1_500, 4_000])
def test_a_file_size_limit(tmp_path: Path, limit: int) -> None:
    tiny, target = make_tiny(tmp_path / "tiny"), tmp_path / "room" / "out"
    target.parent.mkdir()
    code = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit})); import gptkit.__main__"
    code += "; gptkit.__main__.main()"
    limited = [sys.executable, "-c", code, "convert", str(tiny), str(target), "-q"]
    done = subprocess.run(limited, env=LEAN, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert "File too large" in done.stderr and len(done.stderr.splitlines()) <= 2
    assert list(target.parent.iterdir()) == []


FULL = """
import gc, os, shutil, subprocess, sys
from collections import namedtuple
from pathlib import Path
from gptkit.converter.convert import convert
from gptkit.errors import GptkitError
tiny, room = sys.argv[1:3]
told = shutil.disk_usage
for size in map(int, sys.argv[3:]):
    for lied in (False, True):
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", room], check=True)
        shutil.disk_usage = (lambda path: namedtuple("Usage", "free")(1 << 60)) if lied else told
        try:
            convert(tiny, Path(room) / "out")
            print(size, lied, "done")
        except GptkitError as error:
            print(size, lied, error.exit_code, os.listdir(room), error.message.rpartition(":")[2].strip())
        gc.collect()  # what the error's frames hold open
        subprocess.run(["umount", room], check=True)
"""


def test_a_full_disk(tmp_path: Path) -> None:
    """tmpfs of five sizes in a namespace of its own: refused before the first byte, and where it fills on the way."""
    unshare = ["unshare", "--map-root-user", "--mount"]
    if not shutil.which("unshare") or subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("no mount namespaces here")
    room = tmp_path / "room"
    room.mkdir()
    sizes = [str(size) for size in (8, 64, 400, 1_000, 1_360)]  # KiB, of 1,400
    namespace = [*unshare, sys.executable, "-c", FULL, "sample:gpt2", str(room), *sizes]
    done = subprocess.run(namespace, env=LEAN, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 10
    for at, line in enumerate(lines):
        why = "No space left on device" if at % 2 else "needed, .* free"
        assert re.fullmatch(rf"{sizes[at // 2]} {bool(at % 2)} 1 \[\] .*{why}", line), line


READ_ONLY = """
import os, sys
from pathlib import Path
from gptkit.converter import checkpoint, convert, transfer
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
def read(*_):
    raise AssertionError("a weight was read")
checkpoint.Checkpoint.read = convert.transfer = convert.open_checkpoint = read
try:
    convert.convert(sys.argv[1], Path(sys.argv[2]) / "out")
except Exception as error:
    print(type(error).__name__, error)
"""


def test_a_read_only_folder_is_refused_before_a_weight_is_read(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:  # not tmp_path, which other users cannot enter
        Path(folder).chmod(0o555)
        done = subprocess.run(
            [sys.executable, "-c", READ_ONLY, "sample:gpt2", folder], env=LEAN, capture_output=True, text=True
        )
        assert done.stdout.startswith("UsageError"), done
        assert "is not writable\nChoose another place" in done.stdout
        assert list(Path(folder).iterdir()) == []
        Path(folder).chmod(0o700)
