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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import covering
from helpers.covering import exhaustive, few
from helpers.processes import HANGS
from helpers.writing import SafetensorsWriter
from killed import contents, noted

from gptkit.architectures import named
from gptkit.converter import publish
from gptkit.converter.convert import convert
from gptkit.converter.manifest import check_manifest
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


@pytest.mark.parametrize("over_old", [pytest.param(False, marks=exhaustive), True])
@pytest.mark.parametrize(
    "code",
    [errno.ENOSPC, *(pytest.param(each, marks=exhaustive) for each in (errno.EIO, errno.EDQUOT))],
    ids=errno.errorcode.get,
)
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


@pytest.mark.exhaustive
@pytest.mark.parametrize("over_old", [False, True])
def test_the_nth_call_fails_for_every_n_of_a_single_file(memory_path: Path, over_old: bool) -> None:
    tiny, target = make_tiny(memory_path / "tiny"), memory_path / "room" / "out.gguf"
    (tiny / "tokenizer.json").unlink()
    target.parent.mkdir()
    convert(tiny, memory_path / "new.gguf", "gguf", workers=1)
    convert(tiny, memory_path / "old.gguf", "gguf", dtype="float16", workers=1)
    new, old = (memory_path / "new.gguf").read_bytes(), (memory_path / "old.gguf").read_bytes()
    assert new != old
    hits: list[str] = []
    for at in range(1000):
        if over_old:
            target.write_bytes(old)
        with pytest.MonkeyPatch.context() as patch:
            fault = Fault(patch, at, errno.ENOSPC)
            try:
                convert(tiny, target, "gguf", force=over_old, workers=1)
                failed = False
            except GptkitError:
                failed = True
        state = target.read_bytes() if target.exists() else None
        if not fault.hit:
            assert not failed and state == new and beside(target) == []
            break
        hits.append(fault.hit)
        assert state in ((old if over_old else None), new), f"call {at}, {fault.hit}"
        assert failed or state == new, f"call {at}, {fault.hit}: silent"
        tidy = fault.hit not in ("unlink", "rmdir", "open", "fsync")
        assert not tidy or beside(target) == [], f"call {at}, {fault.hit}"
        convert(tiny, target, "gguf", force=True, workers=1)
        assert target.read_bytes() == new and beside(target) == [], f"call {at}, {fault.hit}"
        target.unlink()
    assert {"open", "mkdir", "pwrite", "fsync", "unlink", "replace" if over_old else "renameat2"} <= set(hits)


STRACED = "import sys; from gptkit.converter.convert import convert; convert(*sys.argv[1:], force=True, workers=1)"


@pytest.mark.soak
def test_the_kernel_refuses_the_nth_call_for_every_n(memory_path: Path) -> None:
    """The same from outside, by strace: no call that the process makes can pass by."""
    strace, log = ["strace", "-f", "-qq", "-o", str(memory_path / "log")], memory_path / "log"
    if not shutil.which("strace") or subprocess.run([*strace, "true"], capture_output=True).returncode:
        pytest.skip("no strace here")
    tiny, target = make_tiny(memory_path / "tiny"), memory_path / "room" / "out"
    target.parent.mkdir()
    calls = ("write", "pwrite64", "copy_file_range", "ftruncate", "fsync", "mkdir", "rename", "renameat2", "unlink")
    run = [sys.executable, "-c", STRACED, str(tiny), str(target)]
    subprocess.run([*strace, "-e", f"trace={','.join(calls)}", *run], env=LEAN, check=True)
    seen = [line.split("(")[0].split()[-1] for line in log.read_text().splitlines() if "(" in line]
    new = contents(target)
    codes = ("ENOSPC", "EIO", "EDQUOT")
    assert {"pwrite64", "copy_file_range", "ftruncate", "fsync", "mkdir", "renameat2", "unlink"} <= set(seen)
    for over_old in (False, True):
        shutil.rmtree(target)
        convert(tiny, memory_path / f"old-{over_old}", "hf")
        old = contents(memory_path / f"old-{over_old}") if over_old else None
        for call in sorted(set(seen)):
            for number in range(1, seen.count(call) + 1):
                if over_old:
                    shutil.copytree(memory_path / f"old-{over_old}", target)
                fault = ["-e", f"trace={call}", "-e", f"inject={call}:error={codes[number % 3]}:when={number}"]
                done = subprocess.run([*strace, *fault, *run], env=LEAN, capture_output=True, text=True)
                state = contents(target)
                assert state in (old, new), f"{call} {number}"
                assert done.returncode or state == new, f"{call} {number}: silent"
                subprocess.run(run, env=LEAN, check=True)
                assert contents(target) == new and beside(target) == [], f"{call} {number}"
                shutil.rmtree(target)
        target.mkdir()


# --- what is on the disk by when: kill -9 leaves the kernel's memory, a power cut does not


class Trace:
    """Notes what is done to the disk, in its order: (what, path), with the text of what is written to a journal."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.events: list[tuple[str, str]] = []
        self.noted: list[tuple[int, str]] = []  # (index of the event, name) of every file a journal says is finished
        for name, sink in (("pwrite", 0), ("write", 0), ("ftruncate", 0), ("copy_file_range", 1)):
            patch.setattr(os, name, self.wrap(getattr(os, name), "write", sink))
        patch.setattr(os, "fsync", self.wrap(os.fsync, "fsync", 0))
        for name in ("open", "mkdir", "unlink", "rmdir"):
            patch.setattr(os, name, self.wrap(getattr(os, name), "open" if name == "open" else "entry", None))
        patch.setattr("io.open", self.wrap(open, "open", None))
        for module, name in ((os, "rename"), (publish, "_renameat2")):
            patch.setattr(module, name, self.wrap(getattr(module, name), "rename", None))

    def wrap(self, call: Callable[..., Any], what: str, sink: int | None) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **named: Any) -> Any:
            opened = arguments[0] if what == "open" else None
            there = isinstance(opened, int) or (isinstance(opened, str | Path) and os.path.lexists(opened))
            result = call(*arguments, **named)
            if sink is not None:
                path = str(Path(f"/proc/self/fd/{arguments[sink]}").readlink())
                if what == "write" and path.endswith(".journal"):
                    entry = json.loads(bytes(arguments[1]).split(b" ", 1)[1])
                    self.noted.append((len(self.events), entry["name"]))
                self.events.append((what, path))
            elif what == "rename":
                if result is not False:
                    self.events += [("entry", str(arguments[0])), ("renamed", str(arguments[1]))]
            elif not there:  # opened what was there before: no entry of a folder changes
                folder = named.get("dir_fd")
                base = "" if folder is None else f"{Path(f'/proc/self/fd/{folder}').readlink()}/"
                self.events.append(("entry", f"{base}{arguments[0]}"))
            return result

        return wrapped

    def last(self, what: Callable[[str, str], bool], before: int) -> int:
        return max((at for at, event in enumerate(self.events[:before]) if what(*event)), default=-1)

    def on_disk(self, path: str, before: int) -> bool:
        """Whether nothing was written to a file, or changed in a folder, since it was last put on the disk."""
        changed = self.last(
            lambda what, other: (
                (what == "write" and other == path) or (what in ("entry", "renamed") and os.path.dirname(other) == path)  # noqa: PTH120
            ),
            before,
        )
        return changed < self.last(lambda what, other: what == "fsync" and other == path, before)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="Linux says which file a descriptor is")
@pytest.mark.parametrize("exchange", [True, False])
@pytest.mark.parametrize("over_old", [False, True])
def test_the_order_of_fsync_stands_a_power_cut(tmp_path: Path, over_old: bool, exchange: bool) -> None:
    tiny, target = make_tiny(tmp_path / "tiny"), tmp_path / "room" / "out"
    target.parent.mkdir()
    if over_old:
        convert(tiny, target, "hf")
    with pytest.MonkeyPatch.context() as patch:
        if not exchange:
            patch.setattr(publish, "_renameat2", lambda src, dst, flags: False)
        trace = Trace(patch)
        convert(tiny, target, force=over_old, max_shard_bytes=SHARD, workers=1)
    published = trace.last(lambda what, path: (what, path) == ("renamed", str(target)), len(trace.events))
    folder = trace.events[published - 1][1]
    if over_old:  # its last name but one: it was moved into a folder of ours, to change places with the old one
        published = trace.last(lambda what, path: (what, path) == ("renamed", folder), published)
        folder = trace.events[published - 1][1]
    # All of the folder, before it gets the target's name.
    written = {path for what, path in trace.events[:published] if what == "write" and path.startswith(folder)}
    assert {f"{folder}/{path.name}" for path in target.iterdir()} <= written
    for path in [*written, folder]:
        assert path.endswith((".journal", ".journal.new")) or trace.on_disk(path, published - 1), path
    # The new name, before anything of the old folder goes.
    published = trace.last(lambda what, path: (what, path) == ("renamed", str(target)), len(trace.events))
    settled = trace.events.index(("fsync", str(target.parent)), published)
    gone = [
        at
        for at, (what, path) in enumerate(trace.events)
        if at > published and what == "entry" and not path.endswith(".lock")
    ]
    # And the folder for the old one, with its mark, before the old one leaves its place.
    if over_old:
        aside = os.path.dirname(trace.events[published - 1][1])  # noqa: PTH120
        left = trace.events.index(("renamed", f"{aside}/old")) if not exchange else published
        assert trace.on_disk(f"{aside}/.journal", left)
        made = trace.events.index(("entry", aside))
        assert ("fsync", str(target.parent)) in trace.events[made:left] and ("fsync", aside) in trace.events[made:left]
    assert bool(gone) == over_old and all(at > settled for at in gone)
    # A finished file and its name, before the journal says so.
    assert len(trace.noted) == len(list(target.glob("*.safetensors")))
    for at, name in trace.noted:
        assert trace.on_disk(f"{folder}/{name}", at), name
        assert trace.last(lambda what, path: (what, path) == ("fsync", folder), at) > trace.last(
            lambda what, path, name=name: (what, path) == ("entry", f"{folder}/{name}"), at
        )


# --- kill -9


def kills(folder: Path, count: int, seed: int) -> dict[str, int]:
    killing = [sys.executable, str(KILLED), str(folder), "--kills", str(count), "--seed", str(seed)]
    done = subprocess.run(killing, env=LEAN, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    counts: dict[str, int] = json.loads(done.stdout)
    return counts


def test_kill_9_leaves_old_or_new_and_a_rerun_resumes(tmp_path: Path) -> None:
    wanted = 25 if covering.quick else 50
    counts = kills(tmp_path, wanted, seed=int.from_bytes(os.urandom(4)))
    assert counts["kills"] >= wanted
    # Whether the moments meant anything: some kills fall where files are finished, which then are not written again.
    assert counts["resumed"] >= (1 if covering.quick else 3) and counts["finished files kept"] >= counts["resumed"], (
        counts
    )


@pytest.mark.soak
def test_thousands_of_kills(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = int(os.environ.get("KILLS", "3000"))
    counts = kills(tmp_path, wanted, seed=int.from_bytes(os.urandom(4)))
    count = counts["kills"]
    with capsys.disabled():
        print(f"\n{json.dumps(counts)}\nNo failure in {count:,} kills bounds the rate below {3 / count:.2%} at 95 %.")


# --- signals that can be answered


COMMAND = """
import sys, time
from pathlib import Path
from gptkit import cli
from gptkit.converter.transfer import _Carrier
finish = _Carrier._finish
go_on = sys.argv.pop(1)
def held(self, shard):
    finish(self, shard)
    print("finished", shard.name, flush=True)
    while not (self.scheduler.stopped or Path(go_on).exists()):
        time.sleep(0.01)
if go_on:
    _Carrier._finish = held
cli.main()
"""


def command(tiny: Path, target: Path, go_on: Path | str = "") -> list[str]:
    """gptkit convert in shards, one after another; behind the first it waits for the file `go_on`, if one is named."""
    options = ["--max-shard-size", str(SHARD), "--workers", "1", "-q"]
    return [sys.executable, "-c", COMMAND, str(go_on), "convert", str(tiny), str(target), *options]


def begun(tiny: Path, target: Path) -> subprocess.Popen[bytes]:
    """One that has just finished its first shard, and waits for the file go-on beside `tiny`."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command(tiny, target, tiny.with_name("go-on")), env=LEAN, **pipes)
    assert process.stdout is not None
    assert process.stdout.readline().startswith(b"finished model-")
    return process


@few(1)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_says_that_the_same_command_goes_on(tmp_path: Path, number: int, code: int) -> None:
    tiny, target = make_tiny(tmp_path / "tiny"), tmp_path / "room" / "out"
    target.parent.mkdir()
    process = begun(tiny, target)
    process.send_signal(number)
    _, err = process.communicate(timeout=HANGS)
    assert process.returncode == code, err.decode()
    assert err.decode() == (
        f"gptkit: interrupted\n  1 file of {target} finished so far: the same command continues from there\n"
    )
    ((shard, same),) = noted(target).items()
    assert subprocess.run(command(tiny, target), env=LEAN).returncode == 0
    assert check_manifest(target) == [] and beside(target) == []
    assert ((target / shard).stat().st_ino, (target / shard).stat().st_mtime_ns) == same
    convert(tiny, tmp_path / "whole", max_shard_bytes=SHARD)
    assert contents(target) == contents(tmp_path / "whole")


def test_a_second_convert_to_the_same_place_is_refused_at_once(tmp_path: Path) -> None:
    tiny, target = make_tiny(tmp_path / "tiny"), tmp_path / "out"
    first = begun(tiny, target)
    second = subprocess.run(command(tiny, target), env=LEAN, capture_output=True, text=True)
    assert second.returncode == 1
    assert f"another gptkit process (pid {first.pid}) is writing {target}" in second.stderr
    tiny.with_name("go-on").touch()
    first.communicate(timeout=HANGS)
    assert first.returncode == 0
    assert check_manifest(target) == []


# --- disks and folders that refuse


@few(1)
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
        assert "is not writable\nChoose a folder that you may write to" in done.stdout
        assert list(Path(folder).iterdir()) == []
        Path(folder).chmod(0o700)
