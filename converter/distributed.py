"""One conversion by several processes, as torchrun starts them: each writes some of the output's files.

    torchrun --nproc-per-node 2 -m gptkit convert MODEL OUT

Every process opens the checkpoint and plans by itself, which costs headers only. The first (rank 0, the host) makes the
partial folder and the small files, and tells the others (guests) where it is and what an earlier run has finished;
whoever finishes a file says so with its hashes, and the host alone publishes, once all files are there.

One process that fails ends all of them. Between the host and each guest a thread always waits for the next message
(gloo, over TCP), so that a process that is killed is known at once, by its closed connection. The first failure is the
one that is told, by the process that had it, and all end with its exit code.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from ..errors import Elsewhere, GptkitError, UsageError
from ..version import __version__
from .checkpoint import Checkpoint
from .dtypes import Quantisation, Rounding
from .files import seal
from .manifest import FileRecord, file_entry, read_entry
from .publish import Staging
from .transfer import StoppedError, Transferred, available_cores, transfer
from .write import Plan, Shard, prepare

__all__ = ["deal_out", "leads", "team", "together"]

FOREVER = timedelta(days=30)
"""How long a message may take to come: a conversion. That the other side is gone is known without it."""
MEETING = timedelta(minutes=5)
"""How long the processes wait for one another at the beginning."""
ANSWER = timedelta(seconds=30)
"""How long a process that is there takes to receive a message, to stop its work, or to take its leave."""

ENDED = "the process of rank {} ended without a word: it was killed, or its machine is gone"

P = ParamSpec("P")
R = TypeVar("R")

_log = logging.getLogger(__name__)


def _several() -> bool:
    """Whether torchrun, or something that sets what it sets, started this process as one of several."""
    size = os.environ.get("WORLD_SIZE", "")
    return size.isdigit() and int(size) > 1 and "RANK" in os.environ and "MASTER_ADDR" in os.environ


def leads() -> bool:
    """Whether this process is the one that speaks: all but the guests of a team."""
    return not _several() or os.environ["RANK"] == "0"


class Alone:
    """A conversion in this process alone."""

    def staging(self, target: Path, force: bool) -> Staging:
        return Staging(target, force)

    def transfer(self, plan: Plan, source: Checkpoint, staging: Staging, **options: Any) -> Transferred:
        return transfer(plan, source, staging, **options)

    def require_one(self, to: str) -> None:
        """Refuse formats that only a single process writes. Raises UsageError."""


_team: Alone | Team = Alone()
_joined = 0


def team() -> Alone | Team:
    """Who the conversion at hand is done with."""
    return _team


def together(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function that converts, through `team()`, one that a team can call: each process with the same arguments.

    It ends alike in all of them: with an exception in the one that failed and `Elsewhere` in the others.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        global _team
        if not _several():
            return function(*args, **kwargs)
        mates: Team = _join()
        _team = mates
        try:
            result = function(*args, **kwargs)
        except BaseException as error:
            mates.leave(error)
            raise
        finally:
            _team = Alone()
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


# --- messages --------------------------------------------------------------------------------------------------------


def _join() -> Host | Guest:
    """Meet the other processes. Raises GptkitError where they do not come."""
    import torch.distributed as dist

    c10d: Any = dist  # which exports more than it says
    global _joined
    _joined += 1
    try:
        if dist.is_initialized():  # a program of the user's own that converts too
            links = _Links(dist.new_group(backend="gloo", timeout=FOREVER))
        else:
            store, rank, size = next(c10d.rendezvous("env://", timeout=MEETING))
            store = c10d.PrefixStore(f"gptkit/{_joined}", store)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=FOREVER)
            links = _Links(None)
    except (RuntimeError, ValueError, OSError) as error:
        raise GptkitError(
            f"the processes of this run did not find one another: {str(error).splitlines()[0]:.200}",
            "Start them with torchrun; gptkit alone needs no RANK and WORLD_SIZE.",
        ) from error
    return Host(links) if links.rank == 0 else Guest(links)


class _Links:
    """Messages (JSON objects) to and from other ranks; each in two gloo messages: its length, its bytes."""

    def __init__(self, group: Any) -> None:
        import torch.distributed as dist

        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._locks = [threading.Lock() for _ in range(self.size)]

    def send(self, rank: int, message: Mapping[str, Any]) -> None:
        """Raises RuntimeError where that rank is gone, or does not take it."""
        import torch
        import torch.distributed as dist

        data = torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8)
        with self._locks[rank]:
            for tensor in (torch.tensor([data.numel()]), data):
                work = dist.isend(tensor, group=self._group, group_dst=rank)
                assert work is not None
                work.wait(ANSWER)

    def receive(self, rank: int) -> dict[str, Any]:
        """The next message of that rank, however long it takes. Raises RuntimeError where the rank is gone."""
        import torch
        import torch.distributed as dist

        length = torch.zeros(1, dtype=torch.int64)
        dist.recv(length, group=self._group, group_src=rank)
        data = torch.empty(int(length), dtype=torch.uint8)
        dist.recv(data, group=self._group, group_src=rank)
        message: dict[str, Any] = json.loads(data.numpy().tobytes())
        return message

    def close(self) -> None:
        import torch.distributed as dist

        dist.destroy_process_group(self._group)


# --- what ends a run -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """What ended the run: the rank that failed, its exit code and its words.

    kind: "failed"; "interrupted", after which finished files are kept; "lost": it ended without a word.
    """

    rank: int
    code: int
    message: str
    kind: str = "failed"

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Verdict:
        if isinstance(error, GptkitError):
            return cls(rank, error.exit_code, str(error))
        if isinstance(error, KeyboardInterrupt):
            return cls(rank, 130, "interrupted", "interrupted")
        return cls(rank, 1, f"{type(error).__name__}: {error}")


class _Interrupted(KeyboardInterrupt):
    """In the host, inside of its staging: somebody was interrupted or killed, and what is finished is to be kept."""


class Team:
    """What host and guests have in common."""

    def __init__(self, links: _Links, others: Sequence[int]) -> None:
        self.links = links
        self.verdict: Verdict | None = None
        self.stop = threading.Event()
        self._changed = threading.Condition()
        self._threads = {
            rank: threading.Thread(target=self._listen, args=(rank,), name=f"rank {rank}", daemon=True)
            for rank in others
        }
        for thread in self._threads.values():
            thread.start()

    def staging(self, target: Path, force: bool) -> Staging:
        raise NotImplementedError

    def transfer(self, plan: Plan, source: Checkpoint, staging: Staging, **options: Any) -> Transferred:
        raise NotImplementedError

    def require_one(self, to: str) -> None:
        raise UsageError(f"{to} is written by a single process", "Run it without torchrun.")

    def leave(self, error: BaseException | None) -> None:
        raise NotImplementedError

    def _heard(self, rank: int, message: dict[str, Any]) -> bool:
        """Take a message; False after the last. In the thread of that rank."""
        raise NotImplementedError

    def _gone(self, rank: int) -> None:
        raise NotImplementedError

    def _listen(self, rank: int) -> None:
        try:
            while self._heard(rank, self.links.receive(rank)):
                pass
        except Exception as error:  # of gloo's, for the most part: the connection is closed
            _log.debug("rank %d: %s", rank, error)
            self._gone(rank)

    def _wait(self, until: Callable[[], object], limit: timedelta | None = None) -> None:
        """Until something is so, or the run has failed; in steps, so that a signal is heard."""
        end = None if limit is None else time.monotonic() + limit.total_seconds()
        with self._changed:
            while not until() and (end is None or time.monotonic() < end):
                self._changed.wait(0.5)

    def _carry(
        self, plan: Plan, source: Checkpoint, staging: Staging, share: Sequence[str], options: dict[str, Any]
    ) -> Transferred:
        """Transfer this rank's share. Raises as `transfer`, and Elsewhere where the run failed meanwhile."""
        here = int(os.environ.get("LOCAL_WORLD_SIZE", "1") or 1)
        workers = options.pop("workers", None) or max(1, available_cores() // here)
        try:
            done = transfer(plan, source, staging, workers=workers, only=frozenset(share), stop=self.stop, **options)
        except StoppedError as error:
            raise Elsewhere("another process of this run failed") from error
        self._check()
        return done

    def _check(self) -> None:
        if self.stop.is_set():
            raise Elsewhere("another process of this run failed")

    def _shares(self, plan: Plan, finished: Mapping[str, FileRecord]) -> list[list[str]]:
        return deal_out([shard for shard in plan.shards if shard.name not in finished], self.links.size)

    def _part(self, code: int | None) -> None:
        """Take leave of the group; where somebody does not answer, see that his thread does not spoil our end."""
        end = time.monotonic() + ANSWER.total_seconds()
        for thread in self._threads.values():
            thread.join(max(0.0, end - time.monotonic()))
        if not any(thread.is_alive() for thread in self._threads.values()):
            self.links.close()
        elif code is not None:
            atexit.register(os._exit, code)
        if code is not None and threading.current_thread() is threading.main_thread():
            # torchrun ends the rest when the first ends; we are about to, with the exit code that tells why.
            with suppress(ValueError):
                signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _digest(plan: Plan, source: Checkpoint) -> str:
    """What must be the same for all ranks: the files planned, and the commit or the sizes of what they are made of."""
    digest = hashlib.sha256(f"{__version__} {source.revision}".encode())
    for shard in plan.shards:
        digest.update(repr((shard.name, shard.size)).encode() + shard.header)
    digest.update(repr([path.stat().st_size for path in source.files]).encode())
    return digest.hexdigest()


# --- rank 0 ----------------------------------------------------------------------------------------------------------


class Host(Team):
    """Rank 0: makes the folder, hears of every file, publishes."""

    def __init__(self, links: _Links) -> None:
        self._staging: Staging | None = None
        self._progress: Callable[[int], None] | None = None
        self._sizes: dict[str, int] = {}
        self._carried: dict[int, dict[str, Any]] = {}
        self._quiet: set[int] = set()  # ranks that write nothing any more
        self._mutex = threading.Lock()
        super().__init__(links, range(1, links.size))

    def staging(self, target: Path, force: bool) -> Staging:
        return Staging(target, force)

    def transfer(self, plan: Plan, source: Checkpoint, staging: Staging, **options: Any) -> Transferred:
        self._staging, self._progress = staging, options.pop("progress", None)
        self._sizes = {shard.name: shard.nbytes for shard in plan.shards}
        if (idle := self.links.size - len(plan.shards)) > 0:
            source.notes.append(
                f"{idle} of {self.links.size} processes had no file to write: a smaller --max-shard-size makes more"
            )
        try:
            prepare(plan, staging)
            offer = {"is": "open", "path": str(staging.path), "finished": sorted(staging.finished)}
            self._tell({**offer, "digest": _digest(plan, source)})
            names = [*staging.finished, *self._shares(plan, staging.finished)[0]]
            done = self._carry(plan, source, staging, names, {**options, "progress": self._advance})
            self._wait(lambda: self.verdict or len(self._carried) == self.links.size - 1)
            self._check()
            for message in self._carried.values():
                self._add(done, message)
        except BaseException as error:
            self._silence(error)
            if self.verdict is not None and self.verdict.kind != "failed" and not isinstance(error, KeyboardInterrupt):
                raise _Interrupted from error
            raise
        return done

    def leave(self, error: BaseException | None) -> None:
        """End the run for all. Raises what ended it, where something did."""
        if error is not None:
            self._silence(error)
        verdict = self.verdict if error is not None else None
        said = None if verdict is None else asdict(verdict)
        for rank in self._threads:
            self._send(rank, {"is": "end", "verdict": said})
        self._part(None if verdict is None else verdict.code)
        if verdict is None or error is None or verdict.rank == 0:
            return
        if verdict.kind == "lost":
            raise GptkitError(verdict.message, "\n".join(getattr(error, "__notes__", [])) or None) from error
        raise Elsewhere(f"rank {verdict.rank}: {verdict.message}", verdict.code) from error

    def _silence(self, error: BaseException) -> None:
        """After an error: stop everybody, and wait until nobody writes any more."""
        if not isinstance(error, Elsewhere | _Interrupted):
            self._settle(Verdict.of(0, error))
        self._wait(lambda: len(self._quiet) == self.links.size - 1, ANSWER)

    def _settle(self, verdict: Verdict) -> None:
        """The first failure counts; but an interruption is what torchrun does to the rest when one is lost."""
        with self._changed:
            first = self.verdict is None
            if self.verdict is None or (self.verdict.kind == "interrupted" and verdict.kind != "interrupted"):
                self.verdict = verdict
            self.stop.set()
            self._changed.notify_all()
        if first:
            self._tell({"is": "stop"})

    def _heard(self, rank: int, message: dict[str, Any]) -> bool:
        kind = message["is"]
        if kind == "finished":
            self._finished(message)
        elif kind == "failed":
            self._settle(Verdict(**message["verdict"]))
        elif kind == "carried":
            with self._changed:
                self._carried[rank] = message
        if kind != "finished":  # all the others say that this rank writes nothing any more
            with self._changed:
                self._quiet.add(rank)
                self._changed.notify_all()
        return bool(kind != "bye")

    def _gone(self, rank: int) -> None:
        with self._changed:
            self._quiet.add(rank)
            self._changed.notify_all()
        self._settle(Verdict(rank, 1, ENDED.format(rank), "lost"))

    def _finished(self, message: dict[str, Any]) -> None:
        """A guest has put a file on the disk: note it, so that an interrupted run can go on from there."""
        known = read_entry(message["entry"])
        assert known is not None and self._staging is not None
        try:
            self._staging.finish(message["name"], known[0])
        except (GptkitError, OSError, RuntimeError, ValueError) as error:
            if not self.stop.is_set():  # else the folder may be gone already
                self._settle(Verdict.of(0, error))
            return
        self._advance(self._sizes[message["name"]])

    def _advance(self, nbytes: int) -> None:
        if self._progress is not None:
            with self._mutex:
                self._progress(nbytes)

    def _add(self, done: Transferred, message: dict[str, Any]) -> None:
        for name, entry in message["files"].items():
            known = read_entry(entry)
            assert known is not None
            done.files[name] = known[0]
        done.rounded.update({name: Rounding(**cost) for name, cost in message["rounded"].items()})
        done.quantised.update({name: Quantisation(**loss) for name, loss in message["quantised"].items()})
        done.not_finite.update(message["not_finite"])

    def _tell(self, message: Mapping[str, Any]) -> None:
        for rank in self._threads:
            self._send(rank, message)

    def _send(self, rank: int, message: Mapping[str, Any]) -> None:
        try:
            self.links.send(rank, message)
        except RuntimeError as error:
            _log.debug("rank %d: %s", rank, error)
            if message["is"] != "end":
                self._gone(rank)


# --- the other ranks -------------------------------------------------------------------------------------------------


class Guest(Team):
    """Any other rank: writes its share into the host's folder."""

    def __init__(self, links: _Links) -> None:
        self.offer: dict[str, Any] | None = None
        self._ended = False
        super().__init__(links, [0])

    def staging(self, target: Path, force: bool) -> Staging:
        return _Shared(self, target, force)

    def opened(self) -> dict[str, Any]:
        """What the host offers, once it has a folder. Raises Elsewhere where it never will."""
        self._wait(lambda: self.offer or self.stop.is_set())
        if self.offer is None or self.stop.is_set():
            raise Elsewhere("another process of this run failed")
        return self.offer

    def transfer(self, plan: Plan, source: Checkpoint, staging: Staging, **options: Any) -> Transferred:
        options.pop("progress", None)
        if self.opened()["digest"] != _digest(plan, source):
            raise GptkitError(
                f"rank {self.links.rank} and rank 0 plan different files from {source.reference}",
                "Give every process the same checkpoint, options and version of gptkit.",
            )
        done = self._carry(plan, source, staging, self._shares(plan, staging.finished)[self.links.rank], options)
        sizes = {shard.name: shard.size for shard in plan.shards}
        carried = {
            "files": {name: file_entry(record, sizes[name]) for name, record in done.files.items()},
            "rounded": {name: asdict(cost) for name, cost in done.rounded.items()},
            "quantised": {name: asdict(loss) for name, loss in done.quantised.items()},
            "not_finite": done.not_finite,
        }
        self.say({"is": "carried", **carried})
        return done

    def say(self, message: Mapping[str, Any]) -> None:
        with suppress(RuntimeError):  # the host is gone, which its thread knows
            self.links.send(0, message)

    def leave(self, error: BaseException | None) -> None:
        """Wait for the end of the run. Raises what ended it, where something did."""
        if error is None or isinstance(error, Elsewhere):
            self.say({"is": "idle"})
        else:
            self.say({"is": "failed", "verdict": asdict(Verdict.of(self.links.rank, error))})
        self._wait(lambda: self._ended, ANSWER if error is not None else None)
        verdict = self.verdict
        self._part(verdict.code if verdict is not None else None if error is None else 1)
        if verdict is None or (verdict.rank == self.links.rank and error is not None):
            return
        if verdict.kind == "lost" and verdict.rank == 0 and self.links.rank == 1:
            raise GptkitError(verdict.message) from error
        raise Elsewhere(f"rank {verdict.rank}: {verdict.message}", verdict.code) from error

    def _heard(self, rank: int, message: dict[str, Any]) -> bool:  # noqa: ARG002, it is the host's
        kind = message["is"]
        if kind == "end":
            self.say({"is": "bye"})
        with self._changed:
            if kind == "open":
                self.offer = message
            elif kind == "end":
                self._ended = True
                self.verdict = Verdict(**message["verdict"]) if message["verdict"] else None
            if kind == "stop" or self.verdict is not None:
                self.stop.set()
            self._changed.notify_all()
        return bool(kind != "end")

    def _gone(self, rank: int) -> None:  # noqa: ARG002
        with self._changed:
            if not self._ended:
                self._ended = True
                self.verdict = Verdict(0, 1, ENDED.format(0), "lost")
            self.stop.set()
            self._changed.notify_all()


class _Shared(Staging):
    """The host's folder, as a guest sees it: only files are put into it."""

    def __init__(self, guest: Guest, target: Path, force: bool) -> None:
        super().__init__(target, force)
        self._guest = guest

    @contextmanager
    def reserved(self) -> Iterator[None]:
        """Wait until the host has opened the checkpoint, and fetched it where that was needed, and made its folder."""
        offer = self._guest.opened()
        self._path = Path(offer["path"])
        if not self._path.is_dir():
            raise GptkitError(
                f"rank {self._guest.links.rank} does not see the folder that rank 0 writes into: {self._path}",
                "Write to a file system that all machines share.",
            )
        self.finished = {name: FileRecord("") for name in offer["finished"]}
        yield

    def __enter__(self) -> Staging:
        return self

    def __exit__(self, *about: object) -> None:
        self._path = None

    def finish(self, name: str, record: FileRecord) -> None:
        try:
            nbytes = seal(self.path / name)
        except OSError as error:
            raise GptkitError(f"could not write {self.path / name}: {error.strerror}") from error
        self._guest.say({"is": "finished", "name": name, "entry": file_entry(record, nbytes)})

    def commit(self, manifest: Mapping[str, object], *, files: Mapping[str, FileRecord] | None = None) -> None:
        """The host does that."""
