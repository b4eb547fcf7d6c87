"""A published folder is complete or absent, whatever stops the process on the way."""

import errno
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import xxhash
from helpers.covering import few

from gptkit.converter import publish
from gptkit.converter.files import copy_file, sha256_file, write_bytes
from gptkit.converter.manifest import MANIFEST, FileRecord, TensorRecord, check_manifest
from gptkit.converter.publish import Staging
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
    assert record["schema_version"] == 2
    assert record["files"]["sub/0.bin"] == {"sha256": sha256_file(target / "sub" / "0.bin"), "bytes": 3000}
    assert set(record["files"]) == {"config.json", "copy.json", "sub/0.bin", "sub/1.bin", "sub/2.bin"}
    build(target, "new", force=True)
    assert state(target) == "new"
    assert strays(tmp_path) == []


def test_known_hashes_are_taken_over(tmp_path: Path) -> None:
    with Staging(tmp_path / "out") as staging:
        write_bytes(staging.path / "a", b"xyz")
        staging.commit({"plan": 3}, files={"a": FileRecord("f" * 64, {"w": TensorRecord(1, 3, "0" * 32)})})
    record = json.loads((tmp_path / "out" / MANIFEST).read_text())
    tensors = {"w": {"start": 1, "end": 3, "xxh3_128": "0" * 32}}
    assert record["files"] == {"a": {"sha256": "f" * 64, "bytes": 3, "tensors": tensors}}
    assert record["plan"] == 3
    assert check_manifest(tmp_path / "out") == ["a: tensor w changed (bytes 1 to 3)"]


def commit(target: Path, manifest: dict[str, object], files: dict[str, FileRecord]) -> None:
    with Staging(target) as staging:
        write_bytes(staging.path / "a", b"xy")
        staging.commit(manifest, files=files)


def test_wrong_use_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    known = FileRecord("0" * 64, {"w": TensorRecord(0, 3, "0" * 32)})
    for files, manifest, message in (
        ({"absent": known}, {}, "not written"),
        ({}, {"files": 1}, "own keys"),
        ({"a": known}, {}, "beyond"),
    ):
        with pytest.raises(ValueError, match=message):
            commit(tmp_path / "out", manifest, files)
    with Staging(tmp_path / "out", key="k") as staging:
        write_bytes(staging.path / "a", b"xy")
        with pytest.raises(ValueError, match="beyond"):
            staging.finish("a", known)
        for name in ("", "..", "sub/a", "/a", MANIFEST, ".journal"):
            with pytest.raises(ValueError, match="plain"):
                staging.finish(name, known)
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
        ("photos", True, "gptkit did not write it"),
        ("clone", True, "git repository"),
        ("absent/out", False, "does not exist"),
        ("file/out", False, "is not a folder"),
    ]
    for name, force, message in refused:
        with pytest.raises(UsageError, match=message), Staging(tmp_path / name, force):
            pass
        with pytest.raises(UsageError, match=message):
            Staging(tmp_path / name, force).check()
    with pytest.raises(UsageError), Staging(Path("/")):
        pass
    Staging(tmp_path / "old", force=True).check()
    Staging(tmp_path / "new").check()
    assert not (tmp_path / "new").exists()
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
        build(tmp_path / "other", "quick")
        (tmp_path / "other").rename(tmp_path / "out")
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

    CALLS = ("pwrite", "fsync", "rename", "open", "mkdir", "unlink", "copy_file_range", "ftruncate")

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


@few(2)
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT], ids=errno.errorcode.get)
@pytest.mark.parametrize("over_old", [False, True])
@pytest.mark.usefixtures("any_rename")
def test_the_nth_call_fails_for_every_n(memory_path: Path, code: int, over_old: bool) -> None:
    for at in range(1000):
        target = memory_path / str(at) / "out"
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
            # A failure may only be swallowed while removing the replaced folder and the lock: the next run does it.
            assert state(target) == "new"
            assert fault.seen <= at or strays(target.parent)
        build(target, "again", force=True)
        assert state(target) == "again"
        assert strays(target.parent) == []
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


# --- one writer at a time


def test_a_second_writer_is_refused_at_once(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with Staging(target, key="k") as staging:
        write_bytes(staging.path / "config.json", b"one")
        for second in (Staging(target), Staging(target, force=True, key="k"), Staging(Path(f"{target}/../out"))):
            with pytest.raises(
                GptkitError, match=(rf"another gptkit process \(pid {os.getpid()}\) is " r"writing")
            ) as caught:
                second.__enter__()
            assert caught.value.exit_code == 1
            with pytest.raises(GptkitError, match="is writing"):
                second.check()
        build(tmp_path / "other", "other")  # which is another target
        assert (staging.path / "config.json").read_text() == "one"
        staging.commit({})
        with pytest.raises(GptkitError, match="is writing"):
            build(target, "early", force=True)
    assert strays(tmp_path) == []
    build(target, "two", force=True)
    assert state(target) == "two"


def test_a_target_is_reserved_while_the_work_is_prepared(tmp_path: Path) -> None:
    target = tmp_path / "out"
    interrupted(target, ["a"])
    staging = Staging(target)
    with staging.reserved():
        with pytest.raises(GptkitError, match="is writing"):
            Staging(target).check()
        staging.key = "k"
        with staging:
            assert list(staging.finished) == ["a"]
            staging.commit({})
        with pytest.raises(GptkitError, match="is writing"), Staging(target):
            pass
    assert strays(tmp_path) == []
    with pytest.raises(UsageError, match="exists"), staging.reserved():
        pass
    with pytest.raises(ValueError), Staging(tmp_path / "other").reserved():
        raise ValueError
    assert strays(tmp_path) == []


def test_many_at_once_write_one_after_another(tmp_path: Path) -> None:
    """Locks are taken, given back and their files removed by eight threads at once: no two ever hold one together."""
    inside, most, wins, failures = 0, 0, 0, []
    mutex, stop = threading.Lock(), threading.Event()

    def contend() -> None:
        nonlocal inside, most, wins
        while not stop.is_set():
            try:
                with Staging(tmp_path / "out"):
                    with mutex:
                        inside, wins = inside + 1, wins + 1
                        most = max(most, inside)
                    with mutex:
                        inside -= 1
            except GptkitError as error:
                if "is writing" not in error.message:
                    failures.append(error)

    threads = [threading.Thread(target=contend) for _ in range(8)]
    for thread in threads:
        thread.start()
    stop.wait(0.5)
    stop.set()
    for thread in threads:
        thread.join()
    assert (most, failures) == (1, []) and wins > 10
    assert strays(tmp_path) == []


def test_a_lock_on_a_file_that_was_just_removed_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its holder removes it between our open and our lock: whoever comes next would make another, and lock that."""
    flock, lock = fcntl.flock, tmp_path / ".out.lock"
    calls: list[int] = []

    def late(fd: int, how: int) -> None:
        calls.append(fd)
        if len(calls) == 1:
            lock.unlink()
        flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with Staging(tmp_path / "out"), pytest.raises(GptkitError, match="is writing"):
        Staging(tmp_path / "out").check()
    assert len(calls) == 3
    assert strays(tmp_path) == []


def test_without_locks_nothing_of_others_is_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    interrupted(tmp_path / "out", ["a"])
    before = strays(tmp_path)
    monkeypatch.setattr(fcntl, "flock", refuse)
    with Staging(tmp_path / "out", key="k") as staging:
        assert staging.finished == {}
        write_bytes(staging.path / "config.json", b"x")
        staging.commit({})
    assert check_manifest(tmp_path / "out") == []
    assert strays(tmp_path) == before


@pytest.mark.parametrize("kind", ["link", "dangling", "pipe", "folder"])
def test_something_else_where_the_lock_would_be(tmp_path: Path, kind: str) -> None:
    (tmp_path / "mine").write_text("mine")
    lock = tmp_path / ".out.lock"
    {
        "link": lambda: lock.symlink_to(tmp_path / "mine"),
        "dangling": lambda: lock.symlink_to(tmp_path / "absent"),
        "pipe": lambda: os.mkfifo(lock),
        "folder": lock.mkdir,
    }[kind]()
    with pytest.raises(GptkitError, match=r"\.out"):
        build(tmp_path / "out", "new")
    assert (tmp_path / "mine").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.lock", "mine"]


# --- what interrupted runs leave


GO_ON = "the same command continues from there"


def data_of(name: str) -> bytes:
    return name.encode() * 1000


def record_of(name: str) -> FileRecord:
    data = data_of(name)
    half = len(data) // 2
    places = {"first": (0, half), "second": (half, len(data))}
    tensors = {each: TensorRecord(a, b, xxhash.xxh3_128(data[a:b]).hexdigest()) for each, (a, b) in places.items()}
    return FileRecord(hashlib.sha256(data).hexdigest(), tensors)


def leave(target: Path, names: Sequence[str], key: str | None, force: bool, error: BaseException) -> None:
    """Finish these files and one half, then fail."""
    with Staging(target, force, key) as staging:
        for name in names:
            write_bytes(staging.path / name, data_of(name))
            staging.finish(name, record_of(name))
        write_bytes(staging.path / "half", b"half")
        raise error


def interrupted(target: Path, names: Sequence[str], key: str | None = "k", force: bool = False) -> list[str]:
    """The same, for Ctrl-C; returns what the user is told."""
    with pytest.raises(KeyboardInterrupt) as caught:
        leave(target, names, key, force, KeyboardInterrupt())
    return getattr(caught.value, "__notes__", [])


def partial(target: Path) -> Path:
    (found,) = target.parent.glob(f".{target.name}.partial-*")
    return found


@pytest.mark.parametrize("force", [False, True])
def test_an_interrupted_run_is_gone_on_with(tmp_path: Path, force: bool) -> None:
    target = tmp_path / "out"
    if force:
        build(target, "old")
    notes = interrupted(target, ["a", "b"], force=force)
    assert notes == [f"2 files of {target} finished so far: {GO_ON}"]
    assert state(target) == ("old" if force else None)
    before = {name: (partial(target) / name).stat() for name in "ab"}
    assert interrupted(target, ["c"], force=force)[0].startswith("3 files")
    with Staging(target, force, "k") as staging:
        assert staging.finished == {name: record_of(name) for name in "abc"}
        assert sorted(path.name for path in staging.path.iterdir()) == [".journal", "a", "b", "c"]
        write_bytes(staging.path / "d", data_of("d"))
        staging.finish("d", record_of("d"))
        staging.commit({"plan": 1})
    for name, info in before.items():
        now = (target / name).stat()
        assert (now.st_ino, now.st_mtime_ns) == (info.st_ino, info.st_mtime_ns)
    assert sorted(path.name for path in target.iterdir()) == ["a", "b", "c", "d", MANIFEST]
    assert check_manifest(target) == []
    listed = json.loads((target / MANIFEST).read_text())["files"]
    assert all(listed[name]["tensors"].keys() == {"first", "second"} for name in "abcd")
    assert strays(tmp_path) == []


def test_what_is_not_kept(tmp_path: Path) -> None:
    target = tmp_path / "out"
    assert interrupted(target, [], key="k") == []  # nothing finished
    assert strays(tmp_path) == []
    assert interrupted(target, ["a"], key=None) == []
    assert strays(tmp_path) == []
    for error in (ValueError(), GptkitError("disk full"), SystemExit()):  # it may be what fills the disk
        interrupted(target, ["a"])
        with pytest.raises(type(error)):
            leave(target, ["b"], "k", False, error)
        assert strays(tmp_path) == []
    for key in ("other", None):
        interrupted(target, ["a"])
        with Staging(target, key=key) as staging:
            assert staging.finished == {} and not (staging.path / "a").exists()
            assert strays(tmp_path) == [".out.lock", staging.path.name]
        assert strays(tmp_path) == []


def test_a_check_or_a_refusal_costs_nothing_that_is_finished(tmp_path: Path) -> None:
    interrupted(tmp_path / "out", ["a"])
    Staging(tmp_path / "out").check()
    build(tmp_path / "other", "old")
    (tmp_path / "other").rename(tmp_path / "out")
    with pytest.raises(UsageError, match="exists"), Staging(tmp_path / "out", key="k"):
        pass
    with Staging(tmp_path / "out", force=True, key="k") as staging:
        assert list(staging.finished) == ["a"]


def test_an_interruption_while_taking_over_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "out"
    interrupted(target, ["a", "b"])

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    for place in ("_is_right", "write_all"):
        with monkeypatch.context() as patch:
            patch.setattr(f"gptkit.converter.publish.{place}", interrupt)
            assert interrupted(target, ["c"]) == [f"2 files of {target} finished so far: {GO_ON}"]
    with Staging(target, key="k") as staging:
        assert set(staging.finished) == {"a", "b"}


def test_finished_means_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync, settled = os.fsync, []

    def note(fd: int) -> None:
        settled.append(os.fstat(fd).st_ino)
        fsync(fd)

    with Staging(tmp_path / "out", key="k") as staging:
        write_bytes(staging.path / "a", data_of("a"))
        monkeypatch.setattr(os, "fsync", note)
        staging.finish("a", record_of("a"))
        there = [staging.path / "a", staging.path, staging.path / ".journal"]
        assert settled == [path.stat().st_ino for path in there]


def finish_at_once(target: Path, names: Sequence[str]) -> None:
    with Staging(target, key="k") as staging:

        def work(name: str) -> None:
            write_bytes(staging.path / name, data_of(name))
            staging.finish(name, record_of(name))

        threads = [threading.Thread(target=work, args=(name,)) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        raise KeyboardInterrupt


def test_finishing_from_many_threads(tmp_path: Path) -> None:
    names = [f"shard-{at}" for at in range(24)]
    with pytest.raises(KeyboardInterrupt):
        finish_at_once(tmp_path / "out", names)
    with Staging(tmp_path / "out", key="k") as staging:
        assert staging.finished == {name: record_of(name) for name in names}


def line(data: object) -> bytes:
    """A journal line that somebody who knows the format would write."""
    text = json.dumps(data)
    return f"{hashlib.sha256(text.encode()).hexdigest()} {text}\n".encode()


def test_a_journal_is_not_trusted(tmp_path: Path) -> None:
    target, outside = tmp_path / "out", tmp_path / "outside"
    outside.mkdir()
    (outside / "a").write_bytes(data_of("a"))
    (outside / "z").write_bytes(data_of("a"))
    good = {"sha256": record_of("a").sha256, "bytes": len(data_of("a"))}
    interrupted(target, ["a", "b", "c", "d", "e", "f"])
    folder = partial(target)
    (folder / "b").write_bytes(data_of("b")[:-1] + b"!")
    (folder / "c").write_bytes(data_of("c")[:-1])
    (folder / "d").unlink()
    (folder / "d").symlink_to(outside / "a")
    (folder / "e").unlink()
    (folder / "e").hardlink_to(outside / "a")  # somebody else could change it later
    (folder / "f").unlink()
    os.mkfifo(folder / "f")
    (folder / "sub").symlink_to(outside)
    (folder / "deep").mkdir()
    (folder / "deep" / "down").touch()
    names = ["d", "e", "f", "../outside/z", str(outside / "z"), "sub/z", "..", "", "a\0", "\ud800", "x" * 300, 7, None]
    lines = [line({"name": name, **good}) for name in names]
    lines += [line({"name": "b", **good, "bytes": value}) for value in (-1, True, 1e3, "1", None)]
    lines += [line({"name": "b", **good, "tensors": {"w": each}}) for each in (1, {"start": 9, "end": 2, "sha256": ""})]
    lines += [line({"name": "b", **good, "sha256": 1}), line({}), line([])]
    with (folder / ".journal").open("ab") as file:
        file.write(b"".join(lines))
    with Staging(target, key="k") as staging:
        assert staging.finished == {"a": record_of("a")}
        assert sorted(path.name for path in staging.path.iterdir()) == [".journal", "a"]
    assert {path.name: path.read_bytes() for path in outside.iterdir()} == dict.fromkeys("az", data_of("a"))


@pytest.mark.parametrize("tail", [b"torn", b"\0" * 100, b"\n", b"[" * 100_000, b"f" * 64 + b" {}\n"])
def test_a_torn_journal_holds_up_to_the_tear(tmp_path: Path, tail: bytes) -> None:
    interrupted(tmp_path / "out", ["a", "b"])
    journal = partial(tmp_path / "out") / ".journal"
    whole = journal.read_bytes()
    journal.write_bytes(whole + tail + line({"name": "half", "sha256": sha256_file(journal), "bytes": 4}))
    assert interrupted(tmp_path / "out", [])[0].startswith("2 files")
    journal = partial(tmp_path / "out") / ".journal"
    assert sorted(journal.read_bytes().splitlines()) == sorted(whole.splitlines())
    journal.write_bytes(whole[:-1])
    assert interrupted(tmp_path / "out", [])[0].startswith("2 files")
    journal = partial(tmp_path / "out") / ".journal"
    journal.write_bytes(whole[:-2])
    assert interrupted(tmp_path / "out", [])[0].startswith("1 file ")


@pytest.mark.parametrize("how", ["link", "folder"])
def test_a_folder_or_a_journal_that_is_a_link_is_not_followed(tmp_path: Path, how: str) -> None:
    interrupted(tmp_path / "out", ["a"])
    folder, elsewhere = partial(tmp_path / "out"), tmp_path / "elsewhere"
    if how == "folder":
        folder.rename(elsewhere)
        folder.symlink_to(elsewhere)
    else:
        (folder / ".journal").rename(elsewhere)
        (folder / ".journal").symlink_to(elsewhere)
    with Staging(tmp_path / "out", key="k") as staging:
        assert staging.finished == {}
    assert elsewhere.exists()
    assert strays(tmp_path) == [folder.name]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_another_users_folders_are_left_alone(tmp_path: Path) -> None:
    for what in ("partial", "old"):
        interrupted(tmp_path / "out", ["a"])
        theirs = partial(tmp_path / "out").rename(tmp_path / f".out.{what}-7-00ff00ff")
        (theirs / "old").mkdir()
        os.chown(theirs, 65534, 65534)
        with Staging(tmp_path / "out", key="k") as staging:
            assert staging.finished == {}
        assert strays(tmp_path) == [theirs.name] and not (tmp_path / "out").exists()
        os.chown(theirs, 0, 0)
        if what == "partial":
            shutil.rmtree(theirs)
    with pytest.raises(UsageError, match="exists"), Staging(tmp_path / "out"):
        pass  # the old one, now ours, was put back


def test_orphans_are_swept_and_others_left(tmp_path: Path) -> None:
    gone = [".out.partial-1-00ff00ff", f".out.partial-{os.getpid()}-0a0a0a0a", ".out.old-1-00ff00ff"]
    kept = [
        ".other.partial-1-00ff00ff",
        ".out.partial-x-1",
        ".out.partial-1-00ff",
        ".out.partial-",
        ".out.partial-1-00ff00ff.partial-1-00ff00ff",
    ]
    for name in gone + kept:
        (tmp_path / name).mkdir()
        (tmp_path / name / "half").touch()
        (tmp_path / name / ".journal").write_bytes(line({"key": ""}))
    for name, content in ((".out.partial-2-00ff00ff", []), (".out.old-2-00ff00ff", [".journal.new"])):  # just begun
        (tmp_path / name).mkdir()
        for each in content:
            (tmp_path / name / each).touch()
    build(tmp_path / ".out.partial-3-00ff00ff", "whole")
    (tmp_path / ".out.partial-1-0000ffff").touch()
    (tmp_path / "out").mkdir()
    build(tmp_path / "out", "new", force=True)
    assert strays(tmp_path) == sorted([*kept, ".out.partial-1-0000ffff"])


@pytest.mark.parametrize("there", [True, False])
def test_folders_that_only_have_such_names_are_left_alone(there: bool, tmp_path: Path) -> None:
    """Those of the user's own, a checkpoint among them, and a file called as the lock is."""
    names = (".out.old-1-00ff00ff", ".out.partial-1-00ff00ff", ".out.old-2-00ff00ff", ".out.old-1-x")
    for name in names:
        (tmp_path / name / "old").mkdir(parents=True)
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / ".journal").write_text("Dear diary")
    build(tmp_path / "mine", "mine")
    shutil.copytree(tmp_path / "mine", tmp_path / names[2], dirs_exist_ok=True)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    if there:
        build(tmp_path / "out", "first")
    Staging(tmp_path / "out", force=True).check()
    assert (tmp_path / "out").exists() == there
    build(tmp_path / "out", "new", force=True)
    assert state(tmp_path / "out") == "new"
    assert strays(tmp_path) == sorted(names)
    assert {path: path.read_bytes() for path in before} == before
    (tmp_path / ".out.lock").write_text("mine\n")
    with pytest.raises(UsageError, match="lock file"):
        build(tmp_path / "out", "newer", force=True)
    assert (tmp_path / ".out.lock").read_text() == "mine\n" and state(tmp_path / "out") == "new"


def test_an_old_folder_set_aside_by_a_dead_process_comes_back(tmp_path: Path) -> None:
    build(tmp_path / "out", "old")
    aside = tmp_path / ".out.old-1-00ff00ff"
    aside.mkdir()
    (aside / ".journal").write_bytes(line({"key": ""}))
    (tmp_path / "out").rename(aside / "old")
    build(aside / "new", "new")
    with pytest.raises(UsageError, match="exists"):
        build(tmp_path / "out", "new")
    assert state(tmp_path / "out") == "old"
    assert strays(tmp_path) == []


# --- disks that are full


@few(4)
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


# --- checking a published folder


def test_check_tells_which_tensor(tmp_path: Path) -> None:
    target = tmp_path / "out"
    data = b"head" + b"a" * 100 + b"pad!" + b"b" * 100 + b"c" * 100
    places = {"c": (208, 308), "a": (4, 104), "b": (108, 208), "empty": (308, 308)}
    tensors = {name: TensorRecord(x, y, xxhash.xxh3_128(data[x:y]).hexdigest()) for name, (x, y) in places.items()}
    with Staging(target) as staging:
        write_bytes(staging.path / "weights.any", data)
        staging.commit({}, files={"weights.any": FileRecord(hashlib.sha256(data).hexdigest(), tensors)})
    assert check_manifest(target) == []

    def after(*flipped: int, size: int = len(data)) -> list[str]:
        changed = bytearray(data)
        for at in flipped:
            changed[at] ^= 1
        (target / "weights.any").write_bytes(changed[:size])
        return check_manifest(target)

    outside = ["weights.any: its header or padding changed; its 4 tensors' own bytes did not"]
    assert after(0) == after(3) == after(104) == outside
    assert after(4) == after(103) == after(4, 0) == ["weights.any: tensor a changed (bytes 4 to 104)"]
    assert after(307, 108) == [
        "weights.any: tensor b changed (bytes 108 to 208)",
        "weights.any: tensor c changed (bytes 208 to 308)",
    ]
    assert after(size=150) == ["weights.any: 308 bytes expected, 150 found; 3 of its 4 tensors are cut off"]
    assert after() == []


def test_every_flipped_byte_of_a_real_file_is_told(tmp_path: Path) -> None:
    """By the tensor that it is in, or as header."""
    from gptkit.converter.convert import convert

    convert("sample:gpt2", tmp_path / "out")
    weights = tmp_path / "out" / "model.safetensors"
    listed = json.loads((tmp_path / "out" / MANIFEST).read_text())["files"][weights.name]["tensors"]
    for name, place in [*list(listed.items())[::7], (None, {"start": 5})]:
        with weights.open("r+b") as file:
            file.seek(place["start"])
            old = file.read(1)
            file.seek(place["start"])
            file.write(bytes([old[0] ^ 1]))
        (problem,) = check_manifest(tmp_path / "out")
        assert ("header or padding" in problem) if name is None else (f"tensor {name} changed" in problem)
        with weights.open("r+b") as file:
            file.seek(place["start"])
            file.write(old)
    assert check_manifest(tmp_path / "out") == []


def test_manifests_of_the_first_schema_are_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"xyz")
    entry = {"sha256": sha256_file(tmp_path / "a"), "bytes": 3}
    record = {"schema_version": 1, "files": {"a": entry}, "tensors": {"w": "0" * 64}}
    (tmp_path / MANIFEST).write_text(json.dumps(record))
    assert check_manifest(tmp_path) == []
    (tmp_path / "a").write_bytes(b"xyZ")
    (problem,) = check_manifest(tmp_path)
    assert problem.startswith("a: its bytes changed (sha256 ")


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
        ('{"files": {}, "schema_version": 9}', "schema version 9, but this gptkit supports 1 to 2"),
        ('{"files": {}, "schema_version": true}', "schema version True"),
        ('{"files": {"a": {"sha256": "", "bytes": 1}}, "schema_version": 2}', "is damaged"),
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
