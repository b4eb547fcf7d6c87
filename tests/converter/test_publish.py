"""A published folder is complete or absent, whatever stops the process on the way."""

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gptkit.converter import publish
from gptkit.converter.publish import MANIFEST, Staging, check_manifest, copy_file, sha256_file, write_bytes
from gptkit.errors import GptkitError, UsageError


def build(target: Path, text: str, force: bool = False, files: int = 3) -> None:
    """Publish a folder whose files all hold `text`."""
    with Staging(target, force) as staging:
        staging.require_space(1000)
        write_bytes(staging.path / "config.json", text.encode())
        (staging.path / "sub").mkdir()
        for at in range(files):
            write_bytes(staging.path / "sub" / f"{at}.bin", text.encode() * 1000)
        copy_file(staging.path / "config.json", staging.path / "copy.json")
        staging.commit({"source": text})


def state(target: Path) -> str | None:
    """What `target` holds: None where it is absent, else the text of all its files, checked for completeness."""
    if not os.path.lexists(target):
        return None
    assert check_manifest(target) == []
    text = (target / "config.json").read_text()
    assert json.loads((target / MANIFEST).read_text())["source"] == text
    assert (target / "copy.json").read_text() == text
    assert {path.read_text() for path in (target / "sub").iterdir()} == {text * 1000}
    return text


def strays(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("."))


@pytest.fixture(params=["renameat2", "plain rename"])
def any_rename(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways of renaming: with the kernel's exchange, and where the system lacks it."""
    if request.param == "plain rename":
        monkeypatch.setattr(publish, "_renameat2", lambda src, dst, flags: False)


@pytest.mark.usefixtures("any_rename")
def test_appears_with_its_manifest_and_is_replaced(tmp_path: Path) -> None:
    target = tmp_path / "out"
    build(target, "old")
    assert state(target) == "old"
    assert strays(target) == []
    record = json.loads((target / MANIFEST).read_text())
    assert record["schema_version"] == 1
    assert record["files"]["sub/0.bin"] == {"sha256": sha256_file(target / "sub" / "0.bin"), "bytes": 3000}
    assert set(record["files"]) == {"config.json", "copy.json", "sub/0.bin", "sub/1.bin", "sub/2.bin"}
    build(target, "new", force=True)
    assert state(target) == "new"
    assert strays(tmp_path) == []


def test_known_hashes_are_taken_over(tmp_path: Path) -> None:
    with Staging(tmp_path / "out") as staging:
        write_bytes(staging.path / "a", b"x")
        staging.commit({"plan": 3}, files={"a": "f" * 64}, tensors={"w": "0" * 64})
    record = json.loads((tmp_path / "out" / MANIFEST).read_text())
    assert record["files"]["a"]["sha256"] == "f" * 64
    assert record["tensors"] == {"w": "0" * 64}
    assert record["plan"] == 3
    assert check_manifest(tmp_path / "out") == [
        "a: its bytes changed (sha256 ffffffffffff… expected, 2d711642b726… found)"
    ]


def test_wrong_use_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    for files, manifest in (({"absent": "0" * 64}, {}), ({}, {"files": 1})):
        with pytest.raises(ValueError, match="files"), Staging(tmp_path / "out") as staging:
            staging.commit(manifest, files=files)
    with Staging(tmp_path / "out") as staging:
        (staging.path / "link").symlink_to(tmp_path)
        with pytest.raises(ValueError, match="not a plain file"):
            staging.commit({})
    with pytest.raises(RuntimeError):
        _ = Staging(tmp_path / "out").path
    assert list(tmp_path.iterdir()) == []


def write_half(target: Path, force: bool, error: type[BaseException]) -> None:
    with Staging(target, force) as staging:
        write_bytes(staging.path / "config.json", b"half")
        raise error


@pytest.mark.parametrize("force", [False, True])
def test_leaving_without_a_commit_changes_nothing(tmp_path: Path, force: bool) -> None:
    target = tmp_path / "out"
    if force:
        build(target, "old")
    for error in (ValueError, KeyboardInterrupt, SystemExit):
        with pytest.raises(error):
            write_half(target, force, error)
    with Staging(target, force) as staging:
        write_bytes(staging.path / "config.json", b"half")
    assert state(target) == ("old" if force else None)
    assert strays(tmp_path) == []


def test_targets_that_are_refused(tmp_path: Path) -> None:
    build(tmp_path / "old", "old")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "old")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").touch()
    (tmp_path / "clone").mkdir()
    (tmp_path / "clone" / ".git").mkdir()
    (tmp_path / "clone" / "config.json").touch()
    refused: list[tuple[str, bool, str]] = [
        ("old", False, "exists"),
        ("file", False, "is a file"),
        ("file", True, "is a file"),
        ("link", True, "symbolic link"),
        ("photos", False, "exists"),
        ("photos", True, "neither config.json nor gptkit.json"),
        ("clone", True, "git repository"),
        ("absent/out", False, "does not exist"),
        ("file/out", False, "is not a folder"),
    ]
    for name, force, message in refused:
        with pytest.raises(UsageError, match=message), Staging(tmp_path / name, force):
            pass
    with pytest.raises(UsageError), Staging(Path("/")):
        pass
    assert state(tmp_path / "old") == "old"
    assert strays(tmp_path) == []


@pytest.mark.parametrize("inside", [[], ["config.json"], ["gptkit.json", "other"]])
@pytest.mark.usefixtures("any_rename")
def test_force_replaces_a_checkpoint_or_an_empty_folder(tmp_path: Path, inside: list[str]) -> None:
    target = tmp_path / "out"
    target.mkdir()
    for name in inside:
        (target / name).touch()
    build(target, "new", force=True)
    assert state(target) == "new"


def test_a_read_only_parent_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As root every folder is writable: ask the question that Staging asks, with another answer.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(UsageError, match="not writable"), Staging(tmp_path / "out"):
        pass


def test_a_target_that_appears_meanwhile_is_kept(tmp_path: Path) -> None:
    with Staging(tmp_path / "out") as staging:
        write_bytes(staging.path / "config.json", b"slow")
        build(tmp_path / "out", "quick")
        with pytest.raises(UsageError, match="exists"):
            staging.commit({})
    assert state(tmp_path / "out") == "quick"
    assert strays(tmp_path) == []


def test_a_disk_too_small_is_refused_before_the_first_byte(tmp_path: Path) -> None:
    with (
        pytest.raises(GptkitError, match=r"not enough disk space .* GB needed, .* free"),
        Staging(tmp_path / "out") as staging,
    ):
        staging.require_space(1 << 60)
    assert list(tmp_path.iterdir()) == []


def test_modes_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        source = tmp_path / "source"
        source.write_bytes(b"x")
        source.chmod(0o444)
        with Staging(tmp_path / "out") as staging:
            copy_file(source, staging.path / "copy")
            staging.commit({})
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()}
    assert modes == {"copy": 0o640, MANIFEST: 0o640}
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o750


@pytest.mark.parametrize("code", [None, errno.EXDEV, errno.ENOSYS])
def test_copy_file_with_and_without_the_kernels_help(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int | None
) -> None:
    if code is not None:

        def refuse(*arguments: Any) -> int:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(os, "copy_file_range", refuse)
    source = tmp_path / "source"
    source.write_bytes(os.urandom(20_000_000))
    copy_file(source, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == source.read_bytes()
    with pytest.raises(GptkitError, match="File exists"):
        copy_file(source, tmp_path / "copy")
    with pytest.raises(GptkitError, match="No such file"):
        copy_file(tmp_path / "absent", tmp_path / "other")


# --- failures at every step


class Fault:
    """Makes the n-th call of the system calls that change the disk fail, counting across all of them."""

    CALLS = ("pwrite", "fsync", "rename", "open", "mkdir", "unlink", "copy_file_range")

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int, code: int) -> None:
        self.at, self.code, self.seen = at, code, 0
        for name in self.CALLS:
            monkeypatch.setattr(os, name, self.wrap(getattr(os, name)))
        monkeypatch.setattr(publish, "_renameat2", self.wrap(publish._renameat2))

    def wrap(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **named: Any) -> Any:
            self.seen += 1
            if self.seen - 1 == self.at:
                raise OSError(self.code, os.strerror(self.code))
            return call(*arguments, **named)

        return wrapped


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT], ids=errno.errorcode.get)
@pytest.mark.parametrize("over_old", [False, True])
@pytest.mark.usefixtures("any_rename")
def test_the_nth_call_fails_for_every_n(tmp_path: Path, code: int, over_old: bool) -> None:
    for at in range(1000):
        target = tmp_path / str(at) / "out"
        target.parent.mkdir()
        if over_old:
            build(target, "old")
        with pytest.MonkeyPatch.context() as monkeypatch:
            fault = Fault(monkeypatch, at, code)
            try:
                build(target, "new", force=over_old)
                failed = False
            except (GptkitError, OSError) as error:  # OSError: from the mkdir in build(), which is the caller's own
                failed = os.strerror(code) in str(error)
                if not failed:
                    raise
        assert state(target) in (["old", "new"] if over_old else [None, "new"]), f"call {at}"
        if not failed:
            assert state(target) == "new"
            # A failure may only be swallowed while removing the replaced folder: the next Staging sweeps that.
            assert fault.seen <= at or over_old
        build(target, "again", force=True)
        assert state(target) == "again"
        if fault.seen <= at:
            break
    assert at > 20


def test_an_interrupt_between_the_two_renames_puts_the_old_one_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(tmp_path / "out", "old")
    monkeypatch.setattr(publish, "_renameat2", lambda src, dst, flags: False)
    rename, seen = os.rename, iter(range(10))

    def interrupted(src: Path, dst: Path) -> None:
        if next(seen) == 1:
            raise KeyboardInterrupt
        rename(src, dst)

    monkeypatch.setattr(os, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / "out", "new", force=True)
    assert state(tmp_path / "out") == "old"
    assert strays(tmp_path) == []


# --- what dead processes leave


@pytest.fixture
def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_orphans_are_swept_and_others_left(tmp_path: Path, dead_pid: int) -> None:
    gone = [f".out.partial-{dead_pid}-00ff", f".out.partial-{dead_pid}-0a0a", f".out.old-{dead_pid}-00ff"]
    kept = [f".out.partial-{os.getpid()}-00ff", f".other.partial-{dead_pid}-00ff", ".out.partial-x-1", ".out.partial-"]
    for name in gone + kept:
        (tmp_path / name).mkdir()
        (tmp_path / name / "half").touch()
    (tmp_path / gone[0] / ".lock").touch()
    (tmp_path / f".out.partial-{dead_pid}-file").touch()
    (tmp_path / "out").mkdir()
    build(tmp_path / "out", "new", force=True)
    assert strays(tmp_path) == sorted([*kept, f".out.partial-{dead_pid}-file"])


def test_an_orphan_whose_lock_is_held_is_left(tmp_path: Path, dead_pid: int) -> None:
    # Its owner may live in another container, where this pid means something else.
    with Staging(tmp_path / "out") as staging:
        claimed = staging.path.rename(tmp_path / f".out.partial-{dead_pid}-00ff")
        build(tmp_path / "out", "new")
        assert claimed.exists()
        claimed.rename(staging.path)
    build(tmp_path / "out", "new", force=True)
    assert strays(tmp_path) == []


def test_an_old_folder_set_aside_by_a_dead_process_comes_back(tmp_path: Path, dead_pid: int) -> None:
    build(tmp_path / "out", "old")
    (tmp_path / "out").rename(tmp_path / f".out.old-{dead_pid}-00ff")
    with pytest.raises(UsageError, match="exists"):
        build(tmp_path / "out", "new")
    assert state(tmp_path / "out") == "old"


def test_two_writers_do_not_mix(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with Staging(target, force=True) as one, Staging(target, force=True) as two:
        for staging, text in ((one, "one"), (two, "two")):
            write_bytes(staging.path / "config.json", text.encode())
            write_bytes(staging.path / "copy.json", text.encode())
            (staging.path / "sub").mkdir()
            write_bytes(staging.path / "sub" / "0.bin", text.encode() * 1000)
        one.commit({"source": "one"})
        assert state(target) == "one"
        two.commit({"source": "two"})
    assert state(target) == "two"
    assert strays(tmp_path) == []


@pytest.mark.parametrize("limit", [0, 2, 1500, 3500])
@pytest.mark.parametrize("over_old", [False, True])
def test_a_file_size_limit(tmp_path: Path, limit: int, over_old: bool) -> None:
    # The kernel itself refuses here: config.json, the shards or the manifest, by the limit.
    target = tmp_path / "out"
    if over_old:
        build(target, "old", files=40)
    code = f"""
import resource, sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_publish import GptkitError, build
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
try:
    build(Path({str(target)!r}), "new", force=True, files=40)
except GptkitError as error:
    sys.exit(error.exit_code if "too large" in error.message else 99)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == 1
    assert state(target) == ("old" if over_old else None)
    assert strays(tmp_path) == []


CHILD = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from test_publish import build
print("ready", flush=True)
build(Path(sys.argv[1]), sys.argv[2], force=True, files=40)
"""


def killed_builds(target: Path, count: int) -> Iterator[None]:
    """Start a build and kill it, `count` times, at moments spread over the time that a whole build takes."""
    moments = random.Random(1)
    span = 0.02
    for number in range(count):
        process = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(target), f"new{number}", str(Path(__file__).parent)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        started = time.monotonic()
        try:
            process.wait(moments.uniform(0, span))
            span = time.monotonic() - started
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            span *= 1.2
        process.stdout.close()
        yield


@pytest.mark.parametrize("over_old", [False, True])
def test_kill_9_leaves_old_or_new(tmp_path: Path, over_old: bool) -> None:
    target = tmp_path / "out"
    if over_old:
        build(target, "old")
    for number, _ in enumerate(killed_builds(target, 6)):
        assert state(target) in ["old" if over_old else None, *(f"new{at}" for at in range(number + 1))]
        if not over_old and target.exists():
            shutil.rmtree(target)
    build(target, "last", force=True)
    assert state(target) == "last"
    assert strays(tmp_path) == []


# --- checking a published folder


def test_check_manifest_says_what_changed(tmp_path: Path) -> None:
    target = tmp_path / "out"
    build(target, "old")
    assert check_manifest(target) == []
    (target / "config.json").write_text("odd")
    (target / "copy.json").unlink()
    (target / "sub" / "0.bin").write_text("short")
    (target / "sub" / "1.bin").unlink()
    (target / "sub" / "1.bin").mkdir()
    (target / "stranger").touch()
    problems = check_manifest(target)
    assert [problem.split()[0] for problem in problems] == [
        "config.json:",
        "copy.json",
        "sub/0.bin:",
        "sub/1.bin",
        "stranger",
    ]
    assert "its bytes changed" in problems[0]
    assert problems[1:] == [
        "copy.json is missing",
        "sub/0.bin: 3000 bytes expected, 5 found",
        "sub/1.bin is not a file",
        "stranger is not in the manifest",
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (None, "is missing"),
        ("", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
        ("[]", "not a gptkit manifest"),
        ('{"files": []}', "not a gptkit manifest"),
        ('{"files": {}, "schema_version": 9}', "schema version 9, this gptkit knows 1"),
        ('{"files": {"a": 1}, "schema_version": 1}', "no sha256"),
        ('{"files": {"../a": {"sha256": "", "bytes": 1}}, "schema_version": 1}', "outside of its folder"),
        ('{"files": {"/etc/passwd": {"sha256": "", "bytes": 1}}, "schema_version": 1}', "outside of its folder"),
        ('{"files": {"a\\u0000": {"sha256": "", "bytes": 1}}, "schema_version": 1}', "outside of its folder"),
    ],
)
def test_check_manifest_of_a_bad_manifest(tmp_path: Path, text: str | None, problem: str) -> None:
    if text is not None:
        (tmp_path / MANIFEST).write_text(text)
    problems = check_manifest(tmp_path)
    assert len(problems) == 1
    assert problem in problems[0]
