"""One conversion by several processes, as torchrun starts them: each writes some of the output's files.

    torchrun --nproc-per-node 2 -m gptkit convert MODEL OUT

Every process plans by itself, which costs headers only. The first (rank 0, the host) makes the partial folder and the
small files and tells the others (guests) where it is; whoever finishes a file says so with its hashes, and the host
alone publishes. One process that fails ends all, with its exit code: a thread always waits for the next message
(torch's object lists over gloo), so that a process that is killed is known by its closed connection, which neither
torch's store nor its elastic agent tells.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from ..errors import Elsewhere, GptkitError
from .checkpoint import TensorFiles
from .files import seal
from .manifest import FileRecord
from .publish import Staging
from .threads import available_cores
from .transfer import StoppedError, Transferred, transfer
from .write import FolderPlan, Shard, prepare

_FOREVER = timedelta(days=30)
"""How long a message may take to come: a conversion. That the other side is gone is known without it."""
_MEETING = timedelta(minutes=5)  # how long the processes wait for one another at the beginning
_ANSWER = timedelta(seconds=30)  # how long a process that is there takes to stop its work, or to take its leave

_P = ParamSpec("_P")
_R = TypeVar("_R")

_log = logging.getLogger(__name__)


def several() -> bool:
    """Whether torchrun, or something that sets what it sets, started this process as one of several."""
    size = os.environ.get("WORLD_SIZE", "")
    return size.isdigit() and int(size) > 1 and "RANK" in os.environ and "MASTER_ADDR" in os.environ


def leads() -> bool:
    """Whether this process is the one that speaks: all but the guests of a team."""
    return not several() or os.environ["RANK"] == "0"


class _Alone:
    def staging(self, target: Path, force: bool) -> Staging:
        return Staging(target, force)

    def transfer(self, plan: FolderPlan, source: TensorFiles, staging: Staging, **options: Any) -> Transferred:
        return transfer(plan, source, staging, **options)


_team = _Alone()
_joined = 0


def team() -> _Alone:
    """Who the conversion at hand is done with."""
    return _team


def together(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Let a team call a function that converts by `team()`; in all but the one that failed it raises `Elsewhere`."""

    @functools.wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        global _team
        if not several():
            return function(*args, **kwargs)
        group, rank, size = _meet()
        mates = _Guest(group, rank, size) if rank else _Host(group, rank, size)
        _team = mates
        try:
            result = function(*args, **kwargs)
        except BaseException as error:
            mates.leave(error)
            raise
        finally:
            _team = _Alone()
        mates.leave(None)
        return result

    return run


def deal_out(shards: Sequence[Shard], size: int) -> list[list[str]]:
    """The shards of each rank by name: the largest first, each to the one that has the fewest bytes so far."""
    shares: list[list[str]] = [[] for _ in range(size)]
    load = [0] * size
    for shard in sorted(shards, key=lambda shard: (-shard.size, shard.name)):
        rank = load.index(min(load))
        shares[rank].append(shard.name)
        load[rank] += shard.size
    return shares


def _not_met(error: Exception) -> GptkitError:
    """The error of processes that do not find one another."""
    message = f"the processes of this run could not connect to each other: {str(error).splitlines()[0]:.200}"
    return GptkitError(message, "Start the processes with torchrun, or unset RANK and WORLD_SIZE to run one process.")


def meet(backend: str) -> None:
    """Meet the others in a group that is torch's own from then on, and which waits for a message as long as it takes.
    Raises GptkitError where they stay away.
    """
    import torch.distributed as dist

    c10d: Any = dist  # which exports more than it says
    global _joined
    _joined += 1
    try:
        store, rank, size = next(c10d.rendezvous("env://", timeout=_MEETING))
        store = c10d.PrefixStore(f"gptkit/{_joined}", store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_FOREVER)
    except (RuntimeError, ValueError, OSError) as error:
        raise _not_met(error) from error


def _meet() -> tuple[Any, int, int]:
    """Meet the others: their group, this process's rank in it, its size. Raises GptkitError where they stay away."""
    import torch.distributed as dist

    group = None
    if dist.is_initialized():  # a program of the user's own that converts too
        try:
            group = dist.new_group(backend="gloo", timeout=_FOREVER)
        except (RuntimeError, ValueError, OSError) as error:
            raise _not_met(error) from error
    else:
        meet("gloo")
    return group, dist.get_rank(group), dist.get_world_size(group)


@dataclass(frozen=True)
class _Verdict:
    """What ended the run: a rank, its exit code and words. kind: "failed", "interrupted", "lost" without any."""

    rank: int
    code: int
    message: str
    kind: str = "failed"

    @classmethod
    def on(cls, rank: int, error: BaseException | None) -> _Verdict:
        """What an error of that rank means; None: its connection is closed."""
        if error is None:
            reason = f"the process of rank {rank} ended without reporting an error"
            return cls(rank, 1, reason, "lost")
        if isinstance(error, KeyboardInterrupt):
            return cls(rank, 130, "interrupted", "interrupted")
        if isinstance(error, GptkitError):
            return cls(rank, error.exit_code, str(error))
        return cls(rank, 1, f"{type(error).__name__}: {error}")


class _Interrupted(KeyboardInterrupt):
    """In the host, inside of its staging: somebody was interrupted or killed, and what is finished is to be kept."""


class _Team(_Alone):
    """What host and guests have in common. A message is a word and what belongs to it: "lost" of a closed connection.
    They `hear` it, with `changed` held, and `leave` at the end, with what ended the run where another process did.
    """

    hear: Callable[[int, str, Any], None]
    leave: Callable[[BaseException | None], None]

    def __init__(self, group: Any, rank: int, size: int) -> None:
        self.group, self.rank, self.size = group, rank, size
        self.verdict: _Verdict | None = None
        self.ended = False
        self.stop = threading.Event()
        self.changed = threading.Condition()
        others = [0] if rank else range(1, size)
        self.sending = {other: threading.Lock() for other in others}
        self.threads = [threading.Thread(target=self._listen, args=(other,), daemon=True) for other in others]
        for thread in self.threads:
            thread.start()

    def say(self, rank: int, word: str, about: Any = None) -> None:
        """Send a message; to a rank that is gone none, which its thread knows."""
        import torch.distributed as dist

        with suppress(RuntimeError), self.sending[rank]:
            dist.send_object_list([word, about], group=self.group, group_dst=rank)

    def _listen(self, rank: int) -> None:
        import torch.distributed as dist

        message: list[Any] = [None, None]
        while message[0] not in ("end", "lost"):
            try:
                dist.recv_object_list(message, group=self.group, group_src=rank)
            except Exception as error:  # of gloo's, for the most part: the connection is closed
                _log.debug("rank %d: %s", rank, error)
                message = ["lost", None]
            with self.changed:
                self.hear(rank, *message)
                self.changed.notify_all()

    def wait(self, until: Callable[[], object], limit: timedelta | None = None) -> None:
        """Until something is so, or the time is over; in steps, so that a signal is heard."""
        end = None if limit is None else time.monotonic() + limit.total_seconds()
        with self.changed:
            while not until() and (end is None or time.monotonic() < end):
                self.changed.wait(0.5)

    def check(self) -> None:
        """Raise Elsewhere where the run has failed."""
        if self.stop.is_set():
            raise Elsewhere("another process of this run failed; its own message says why")

    def carry(self, plan: FolderPlan, source: TensorFiles, staging: Staging, options: dict[str, Any]) -> Transferred:
        """Transfer this rank's share. Raises as `transfer`, and Elsewhere where the run failed meanwhile."""
        here = int(os.environ.get("LOCAL_WORLD_SIZE", "1") or 1)
        options["workers"] = options.get("workers") or max(1, available_cores() // here)
        share = deal_out([each for each in plan.shards if each.name not in staging.finished], self.size)[self.rank]
        only = frozenset(share if self.rank else [*share, *staging.finished])
        done = Transferred()
        with suppress(StoppedError):
            done = transfer(plan, source, staging, only=only, stop=self.stop, **options)
        self.check()
        return done

    def part(self, verdict: _Verdict | None, error: BaseException | None) -> None:
        """Take leave of the group; where somebody does not answer, see that his thread does not spoil our end. Then
        raise what ended the run, unless that is this process's own `error`.
        """
        import torch.distributed as dist

        end = time.monotonic() + _ANSWER.total_seconds()
        for thread in self.threads:
            thread.join(max(0.0, end - time.monotonic()))
        code = verdict.code if verdict is not None else None if error is None else 1
        if not any(thread.is_alive() for thread in self.threads):
            dist.destroy_process_group(self.group)
        elif code is not None:
            atexit.register(os._exit, code)
        if code is not None and threading.current_thread() is threading.main_thread():
            # torchrun ends the rest when the first ends; we are about to, with the exit code that tells why.
            with suppress(ValueError):
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if verdict is None or (verdict.rank == self.rank and error is not None):
            return
        if verdict.kind == "lost" and self.rank == (0 if verdict.rank else 1):  # the first that is left says so
            raise GptkitError(verdict.message, "\n".join(getattr(error, "__notes__", [])) or None) from error
        raise Elsewhere(f"rank {verdict.rank}: {verdict.message}", verdict.code) from error


def _digest(plan: FolderPlan, source: TensorFiles) -> str:
    """What must be the same for all ranks."""
    return plan.digest(source.revision, [path.stat().st_size for path in source.files])


class _Host(_Team):
    """Rank 0: makes the folder, hears of every file, publishes."""

    def __init__(self, *about: Any) -> None:
        self.finish: Callable[[str, FileRecord], None] = lambda name, record: None
        self.quiet: dict[int, Transferred | _Verdict | None] = {}  # what the ranks said that write nothing any more
        super().__init__(*about)

    def transfer(self, plan: FolderPlan, source: TensorFiles, staging: Staging, **options: Any) -> Transferred:
        progress: Callable[[int], None] = options.pop("progress", None) or (lambda nbytes: None)
        mutex, sizes = threading.Lock(), {shard.name: shard.nbytes for shard in plan.shards}

        def advance(nbytes: int) -> None:
            with mutex:
                progress(nbytes)

        def finish(name: str, record: FileRecord) -> None:
            staging.finish(name, record)
            advance(sizes[name])

        self.finish = finish
        if (idle := self.size - len(plan.shards)) > 0:
            source.notes.append(
                f"{idle} of {self.size} processes had no file to write; a smaller --max-shard-size gives more files"
            )
        try:
            prepare(plan, staging)
            self.tell("open", (str(staging.path), sorted(staging.finished), _digest(plan, source)))
            done = self.carry(plan, source, staging, {**options, "progress": advance})
            self.wait(lambda: self.verdict or len(self.quiet) == self.size - 1)
            self.check()
            for theirs in self.quiet.values():
                assert isinstance(theirs, Transferred)
                done.add(theirs)
        except BaseException as error:
            self._silence(error)
            if self.verdict is not None and self.verdict.kind != "failed" and not isinstance(error, KeyboardInterrupt):
                raise _Interrupted from error
            raise
        return done

    def leave(self, error: BaseException | None) -> None:
        if error is not None:
            self._silence(error)
        verdict = self.verdict if error is not None else None
        self.ended = True
        self.tell("end", verdict)
        self.part(verdict, error)

    def _silence(self, error: BaseException) -> None:
        """After an error: stop everybody, and wait until nobody writes any more."""
        if not isinstance(error, Elsewhere | _Interrupted):
            with self.changed:
                self._settle(_Verdict.on(0, error))
        self.wait(lambda: len(self.quiet) == self.size - 1, _ANSWER)

    def _settle(self, verdict: _Verdict) -> None:
        """The first failure counts; but an interruption is what torchrun does to the rest when one is lost."""
        first = self.verdict is None
        if self.verdict is None or (self.verdict.kind == "interrupted" and verdict.kind != "interrupted"):
            self.verdict = verdict
        self.stop.set()
        if first:
            self.tell("stop")

    def hear(self, rank: int, word: str, about: Any) -> None:
        if word == "lost":
            self.quiet.setdefault(rank, None)
            if not self.ended:
                self._settle(_Verdict.on(rank, None))
        elif word == "quiet":
            self.quiet.setdefault(rank, about)
            if isinstance(about, _Verdict):
                self._settle(about)
        else:  # a guest has put a file on the disk: it is noted, so that an interrupted run can go on from there
            try:
                self.finish(*about)
            except (GptkitError, OSError, RuntimeError, ValueError) as error:
                if not self.stop.is_set():  # else the folder may be gone already
                    self._settle(_Verdict.on(0, error))

    def tell(self, word: str, about: Any = None) -> None:
        for rank in self.sending:
            self.say(rank, word, about)


class _Guest(_Team):
    """Any other rank: writes its share into the host's folder."""

    offer: tuple[str, list[str], str] | None = None

    def staging(self, target: Path, force: bool) -> Staging:
        return _Shared(self, target, force)

    def opened(self) -> tuple[str, list[str], str]:
        """What the host offers once it has a folder: its path, the files finished in it, the digest of the work."""
        self.wait(lambda: self.offer or self.stop.is_set())
        self.check()
        assert self.offer is not None
        return self.offer

    def transfer(self, plan: FolderPlan, source: TensorFiles, staging: Staging, **options: Any) -> Transferred:
        if self.opened()[2] != _digest(plan, source):
            hint = "Give every process the same checkpoint, options and version of gptkit."
            raise GptkitError(f"rank {self.rank} and rank 0 see different files in {source.reference}", hint)
        done = self.carry(plan, source, staging, {**options, "progress": None})
        self.say(0, "quiet", done)
        return done

    def leave(self, error: BaseException | None) -> None:
        own = error is not None and not isinstance(error, Elsewhere)
        self.say(0, "quiet", _Verdict.on(self.rank, error) if own else None)
        self.wait(lambda: self.ended, _ANSWER if error is not None else None)
        self.part(self.verdict, error)

    def hear(self, rank: int, word: str, about: Any) -> None:
        if word == "open":
            self.offer = about
            return
        if word != "stop":
            self.ended, self.verdict = True, about if word == "end" else _Verdict.on(rank, None)
        self.stop.set()


class _Shared(Staging):
    """The host's folder, as a guest sees it: only files are put into it."""

    def __init__(self, guest: _Guest, target: Path, force: bool) -> None:
        super().__init__(target, force)
        self._guest = guest

    @contextmanager
    def reserved(self) -> Iterator[None]:
        """Wait until the host has opened the checkpoint, and fetched it where that was needed, and made its folder."""
        path, finished, _ = self._guest.opened()
        self._path = Path(path)
        if not self._path.is_dir():
            message = f"rank {self._guest.rank} cannot access the folder into which rank 0 writes: {self._path}"
            raise GptkitError(message, "Choose an output folder on a file system that all machines share.")
        self.finished = {name: FileRecord("") for name in finished}
        yield

    def __enter__(self) -> Staging:
        return self

    def __exit__(self, *about: object) -> None:
        self._path = None

    def finish(self, name: str, record: FileRecord) -> None:
        try:
            seal(self.path / name)
        except OSError as error:
            raise GptkitError(f"could not write {self.path / name}: {error.strerror}") from error
        self._guest.say(0, "finished", (name, record))

    def commit(self, manifest: Mapping[str, object], *, files: Mapping[str, FileRecord] | None = None) -> None:
        """The host does that."""
