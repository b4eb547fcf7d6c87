"""Share a conversion between several processes that torchrun starts. Each writes some of the output's files.

    torchrun --nproc-per-node 2 -m gptkit convert MODEL OUT

Every process plans the whole output, for which it reads only headers. Rank 0 (the host) makes the partial folder and
the small files, and sends the folder's path to the other ranks (the guests). A guest that has finished a weight file
sends its hashes to the host. At the end only the host publishes the folder. If one process fails, all end with its exit
code.

Messages are torch's object lists over gloo. In every process, a thread waits for the next message. So it notices a
killed process, because the connection is closed; torch's store and its elastic agent do not report this.
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
"""The timeout for a message.

A conversion may take this long. Lost processes are noticed by their closed connections.
"""
_MEETING = timedelta(minutes=5)  # the time in which all processes must connect
_ANSWER = timedelta(seconds=30)  # the time in which a process must stop its work or end

_P = ParamSpec("_P")
_R = TypeVar("_R")

_log = logging.getLogger(__name__)


def several() -> bool:
    """Return whether torchrun, or a program that sets the same variables, started this process as one of several."""
    size = os.environ.get("WORLD_SIZE", "")
    return size.isdigit() and int(size) > 1 and "RANK" in os.environ and "MASTER_ADDR" in os.environ


def leads() -> bool:
    """Return whether this process prints: rank 0, or a single process."""
    return not several() or os.environ["RANK"] == "0"


class _Alone:
    """Makes and writes the output folder in a single process. `_Team` does the same in several processes."""

    def staging(self, target: Path, force: bool) -> Staging:
        return Staging(target, force)

    def transfer(self, plan: FolderPlan, source: TensorFiles, staging: Staging, **options: Any) -> Transferred:
        return transfer(plan, source, staging, **options)


_team = _Alone()
_joined = 0


def team() -> _Alone:
    """Return the object that makes and writes the output folder, in a single process or in several."""
    return _team


def together(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate a function that converts with `team()`, so that it can run in several processes.

    If one process fails, the others raise `Elsewhere`.
    """

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
    """Divide weight files among `size` ranks. Return the names of the files of every rank.

    The largest files come first. Each goes to the rank that has the fewest bytes so far.
    """
    shares: list[list[str]] = [[] for _ in range(size)]
    load = [0] * size
    for shard in sorted(shards, key=lambda shard: (-shard.size, shard.name)):
        rank = load.index(min(load))
        shares[rank].append(shard.name)
        load[rank] += shard.size
    return shares


def _not_met(error: Exception) -> GptkitError:
    """Return the error for processes that could not connect."""
    return GptkitError(
        f"the processes of this run could not connect to each other: {str(error).splitlines()[0]:.200}",
        "Start the processes with torchrun, or unset RANK and WORLD_SIZE to run one process.",
    )


def meet(backend: str) -> None:
    """Connect to the other processes as the default process group of torch, without a timeout. Raises GptkitError."""
    import torch.distributed as dist

    c10d: Any = dist  # its stubs do not have all names
    global _joined
    _joined += 1
    try:
        store, rank, size = next(c10d.rendezvous("env://", timeout=_MEETING))
        store = c10d.PrefixStore(f"gptkit/{_joined}", store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_FOREVER)
    except (RuntimeError, ValueError, OSError) as error:
        raise _not_met(error) from error


def _meet() -> tuple[Any, int, int]:
    """Connect to the other processes. Return the group, this process's rank in it, and its size. Raises GptkitError."""
    import torch.distributed as dist

    group = None
    if dist.is_initialized():  # the user's own program calls gptkit
        try:
            group = dist.new_group(backend="gloo", timeout=_FOREVER)
        except (RuntimeError, ValueError, OSError) as error:
            raise _not_met(error) from error
    else:
        meet("gloo")
    return group, dist.get_rank(group), dist.get_world_size(group)


@dataclass(frozen=True)
class _Verdict:
    """The reason why a run of several processes failed."""

    rank: int
    """The rank of the process that failed."""
    code: int
    """The exit code of all processes."""
    message: str
    kind: str = "failed"
    """ "failed", "interrupted", or "lost" if the process ended without a message."""

    @classmethod
    def on(cls, rank: int, error: BaseException | None) -> _Verdict:
        """Return the reason for a failed run, given the error that the process of this rank raised.

        `error` is None if the process ended without a message.
        """
        if error is None:
            reason = f"the process of rank {rank} ended without reporting an error"
            return cls(rank, 1, reason, "lost")
        if isinstance(error, KeyboardInterrupt):
            return cls(rank, 130, "interrupted", "interrupted")
        if isinstance(error, GptkitError):
            return cls(rank, error.exit_code, str(error))
        return cls(rank, 1, f"{type(error).__name__}: {error}")


class _Interrupted(KeyboardInterrupt):
    """Another process was interrupted or killed.

    The host raises this, so that its `Staging` keeps the finished files.
    """


class _Team(_Alone):
    """One process of a run of several: the code that rank 0 (the host) and the other ranks (the guests) share.

    A message is a word and its content. The word "lost" means that the connection to the sender is closed.
    """

    hear: Callable[[int, str, Any], None]
    """Handle a message (sender's rank, word, content). The caller holds the lock `changed`."""
    leave: Callable[[BaseException | None], None]
    """End this process's part in the run, with its own error or None. Raise if another process has failed."""

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
        """Send a message, a `word` with the content `about`, to a rank.

        A closed connection raises no error here, because the thread that listens to the rank reports it.
        """
        import torch.distributed as dist

        with suppress(RuntimeError), self.sending[rank]:
            dist.send_object_list([word, about], group=self.group, group_dst=rank)

    def _listen(self, rank: int) -> None:
        import torch.distributed as dist

        message: list[Any] = [None, None]
        while message[0] not in ("end", "lost"):
            try:
                dist.recv_object_list(message, group=self.group, group_src=rank)
            except Exception as error:  # usually gloo's, because the connection is closed
                _log.debug("rank %d: %s", rank, error)
                message = ["lost", None]
            with self.changed:
                self.hear(rank, *message)
                self.changed.notify_all()

    def wait(self, until: Callable[[], object], limit: timedelta | None = None) -> None:
        """Wait until `until()` is true, but at most as long as `limit`. By default there is no limit.

        It waits in short steps, so that signals are handled.
        """
        end = None if limit is None else time.monotonic() + limit.total_seconds()
        with self.changed:
            while not until() and (end is None or time.monotonic() < end):
                self.changed.wait(0.5)

    def check(self) -> None:
        """Raise Elsewhere if another process has failed."""
        if self.stop.is_set():
            raise Elsewhere("another process of this run failed; its own message says why")

    def carry(self, plan: FolderPlan, source: TensorFiles, staging: Staging, options: dict[str, Any]) -> Transferred:
        """Write the weight files that belong to this rank, and return the result of the transfer.

        `options` are further arguments of `transfer`. By default the ranks on this machine share its cores.

        Raises the errors of `transfer`, and Elsewhere if another process has failed.
        """
        here = int(os.environ.get("LOCAL_WORLD_SIZE", "1") or 1)
        options["workers"] = options.get("workers") or max(1, available_cores() // here)
        share = deal_out([shard for shard in plan.shards if shard.name not in staging.finished], self.size)[self.rank]
        only = frozenset(share if self.rank else [*share, *staging.finished])
        done = Transferred()
        with suppress(StoppedError):
            done = transfer(plan, source, staging, only=only, stop=self.stop, **options)
        self.check()
        return done

    def part(self, verdict: _Verdict | None, error: BaseException | None) -> None:
        """Close the connections to the other processes. Raise an error if another process made the run fail.

        If another process does not answer, the thread that listens to it may still wait when this process exits.

        Args:
            verdict: the reason why the run failed; None if it did not.
            error: the error of this process, or None. The caller raises it.
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
            # torchrun ends the others when one ends. This process will end by itself, with the right exit code.
            with suppress(ValueError):
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if verdict is None or (verdict.rank == self.rank and error is not None):
            return
        if verdict.kind == "lost" and self.rank == (0 if verdict.rank else 1):  # one rank reports it
            raise GptkitError(verdict.message, "\n".join(getattr(error, "__notes__", [])) or None) from error
        raise Elsewhere(f"rank {verdict.rank}: {verdict.message}", verdict.code) from error


def _digest(plan: FolderPlan, source: TensorFiles) -> str:
    """Return a hash of the plan and of the source, with which the ranks check that they do the same work."""
    return plan.digest(source.revision, [path.stat().st_size for path in source.files])


class _Host(_Team):
    """The process of rank 0. It makes the output folder, records every finished file, and publishes the folder."""

    def __init__(self, *about: Any) -> None:
        self.finish: Callable[[str, FileRecord], None] = lambda name, record: None
        self.quiet: dict[int, Transferred | _Verdict | None] = {}  # the results of the ranks that no longer write
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
        """Stop all processes because of an error in this one, and wait until none of them writes any more."""
        if not isinstance(error, Elsewhere | _Interrupted):
            with self.changed:
                self._settle(_Verdict.on(0, error))
        self.wait(lambda: len(self.quiet) == self.size - 1, _ANSWER)

    def _settle(self, verdict: _Verdict) -> None:
        """Record why the run failed, and stop all processes. Later failures are usually ignored.

        A later failure replaces an interruption, because torchrun interrupts all processes if one of them fails.
        """
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
        else:  # a guest has finished a file, which is recorded in the journal
            try:
                self.finish(*about)
            except (GptkitError, OSError, RuntimeError, ValueError) as error:
                if not self.stop.is_set():  # otherwise the folder may be removed already
                    self._settle(_Verdict.on(0, error))

    def tell(self, word: str, about: Any = None) -> None:
        for rank in self.sending:
            self.say(rank, word, about)


class _Guest(_Team):
    """The process of a rank other than 0. It writes some of the weight files into the folder of rank 0 (the host)."""

    offer: tuple[str, list[str], str] | None = None
    """The path of the host's folder, the finished files in it, and `_digest` of the host.

    None until the host sends it.
    """

    def staging(self, target: Path, force: bool) -> Staging:
        return _Shared(self, target, force)

    def opened(self) -> tuple[str, list[str], str]:
        """Wait until the host has made its folder.

        Return its path, the names of the finished files in it, and `_digest` of the host.

        Raises Elsewhere if another process has failed.
        """
        self.wait(lambda: self.offer or self.stop.is_set())
        self.check()
        assert self.offer is not None
        return self.offer

    def transfer(self, plan: FolderPlan, source: TensorFiles, staging: Staging, **options: Any) -> Transferred:
        if self.opened()[2] != _digest(plan, source):
            raise GptkitError(
                f"rank {self.rank} and rank 0 see different files in {source.reference}",
                "Give every process the same checkpoint, options and version of gptkit.",
            )
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
    """The `Staging` of a guest. It adds files to the folder that the host has made and will publish."""

    def __init__(self, guest: _Guest, target: Path, force: bool) -> None:
        super().__init__(target, force)
        self._guest = guest

    @contextmanager
    def reserved(self) -> Iterator[None]:
        """Wait until the host has made its folder. Before that, the host fetches the checkpoint if needed."""
        path, finished, _ = self._guest.opened()
        self._path = Path(path)
        if not self._path.is_dir():
            raise GptkitError(
                f"rank {self._guest.rank} cannot access the folder into which rank 0 writes: {self._path}",
                "Choose an output folder on a file system that all machines share.",
            )
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
        """Do nothing, because the host publishes the folder."""
