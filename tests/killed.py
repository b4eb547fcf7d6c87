"""Kill conversions at random moments, look at what is left, run the same command again, and look once more.

    python tests/killed.py FOLDER [--kills 50] [--seed 1]

Every conversion is a process of its own, forked from this one, which never converts anything itself: that takes a tenth
of the time that starting Python does, and leaves no thread of a run behind in the next. Half of the runs replace an old
output. Prints a JSON object of counts; a finding is an AssertionError.
"""

import argparse
import hashlib
import json
import os
import random
import re
import shutil
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from gptkit.converter.convert import convert
from gptkit.converter.publish import read_journal

SHARD = 250_000  # bytes: half a dozen shards of a sample
LEFT_BESIDE = re.compile(r"\.out\.(lock|(partial|old)-\d+-[0-9a-f]{8})")


@dataclass(frozen=True)
class Work:
    """One command: a source and a target."""

    source: str
    target: Path

    def run(self) -> None:
        convert(self.source, self.target, force=True, offline=True, max_shard_bytes=SHARD, workers=2)

    def start(self) -> int:
        """Run it in a forked process; returns its pid."""
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            self.run()
            code = 0
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(code)

    def finish(self) -> float:
        """Run it to its end; returns the seconds it took."""
        began = time.monotonic()
        _, status = os.waitpid(self.start(), 0)
        assert status == 0, f"the run ended with {os.waitstatus_to_exitcode(status)}"
        return time.monotonic() - began


def killed(work: Work, after: float) -> bool:
    """Start it and kill it `after` these seconds; False where it was done before."""
    pid = work.start()
    time.sleep(after)
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert status in (0, signal.SIGKILL), f"the run ended with {os.waitstatus_to_exitcode(status)}"
    return status != 0


def contents(folder: Path) -> dict[str, str] | None:
    """sha256 by name of every file in a folder; None where there is no folder."""
    if not os.path.lexists(folder):
        return None
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if not path.is_dir()
    }


def beside(target: Path) -> list[Path]:
    return sorted(path for path in target.parent.iterdir() if path != target)


def noted(target: Path) -> dict[str, tuple[int, int]]:
    """Inode and time of the files that a killed run has noted as finished."""
    found: dict[str, tuple[int, int]] = {}
    for folder in beside(target):
        for entry in read_journal(folder)[1:]:
            info = (folder / str(entry["name"])).stat()
            found[str(entry["name"])] = (info.st_ino, info.st_mtime_ns)
    return found


class Trial:
    """One source: what the target may hold, and how long a run takes here."""

    def __init__(self, source: str, folder: Path) -> None:
        folder.mkdir()
        self.work = Work(source, folder / "room" / "out")
        self.old, self.target = folder / "old", self.work.target
        self.target.parent.mkdir()
        Work("sample:bloom", self.old).finish()
        self.work.finish()
        self.new_contents, self.old_contents = contents(self.target), contents(self.old)
        self.span = max(self._fresh() for _ in range(3))

    def _fresh(self) -> float:
        shutil.rmtree(self.target)
        return self.work.finish()

    def kill(self, moments: random.Random, over_old: bool, again: bool, counts: Counter[str]) -> None:
        shutil.rmtree(self.target, ignore_errors=True)
        if over_old:
            shutil.copytree(self.old, self.target)
        before = self.old_contents if over_old else None
        for _ in range(2 if again else 1):
            began = time.monotonic()
            if killed(self.work, moments.uniform(0, self.span)):
                self.span *= 1.02  # up until runs end before the kill, then down: the moments cover the whole run
                counts["kills"] += 1
            else:
                self.span = min(self.span, time.monotonic() - began) * 0.98
                counts["done before the kill"] += 1
            state = contents(self.target)
            assert state in (before, self.new_contents), f"neither old nor new: {state}"
            left = [path.name for path in beside(self.target)]
            assert all(map(LEFT_BESIDE.fullmatch, left)), left
            if state == self.new_contents:
                before = state
        finished = noted(self.target)
        published = before == self.new_contents
        counts[self._phase(published, len(finished))] += 1
        self.work.finish()
        assert contents(self.target) == self.new_contents, "another result than without the kill"
        assert beside(self.target) == [], "something was left"
        if not published:
            for name, same in finished.items():
                info = (self.target / name).stat()
                assert (info.st_ino, info.st_mtime_ns) == same, f"{name} was written again"
            counts["finished files kept"] += len(finished)
            counts["resumed"] += bool(finished)

    def _phase(self, published: bool, finished: int) -> str:
        if published:
            return "killed when published"
        if finished:
            return "killed with finished files"
        partial = any(".partial-" in path.name for path in beside(self.target))
        return "killed with a partial folder" if partial else "killed before anything"


def main() -> None:
    """Kill, and print what was met."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    moments = random.Random(arguments.seed)
    counts: Counter[str] = Counter({"kills": 0, "resumed": 0})
    began = time.monotonic()
    # Kernel copies, and tensors through layouts.
    trials = [Trial(f"sample:{name}", arguments.folder / name) for name in ("llama", "gpt2")]
    number = 0
    while counts["kills"] < arguments.kills:
        trials[number // 2 % 2].kill(moments, over_old=number % 2 == 0, again=number % 8 > 5, counts=counts)
        number += 1
    counts["seconds"] = round(time.monotonic() - began)
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
