"""Jobs on the tensors of a checkpoint, by several threads, in the memory that is allowed for them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np

from ..architectures import BoundLeaf
from .checkpoint import Checkpoint

IN_FLIGHT = 128 * 2**20
"""Bytes of tensors held at once by all workers together, unless a single job needs more."""


class StoppedError(Exception):
    """Another worker, or another process, failed, and its error is the one to be told."""


class Scheduler:
    """Runs jobs in their order, as many at once as there are threads and as their memory allows; one alone always."""

    def __init__(self, workers: int, limit: int, stop: threading.Event | None = None) -> None:
        """`limit` is the bytes that jobs hold together; `stop`, set from outside, ends the work soon."""
        self._workers, self._limit = workers, limit
        self._held, self._changed = 0, threading.Condition()
        self._failed, self._outside = threading.Event(), stop

    @property
    def stopped(self) -> bool:
        """Whether the work is to end: a job has failed, or somebody says so."""
        return self._failed.is_set() or (self._outside is not None and self._outside.is_set())

    def check(self) -> None:
        """Raise StoppedError where the work is to end: long jobs ask now and then."""
        if self.stopped:
            raise StoppedError

    def run(self, jobs: Iterable[Any], work: Callable[[Any], None]) -> None:
        """Do all jobs, each of which says the bytes that it holds (`memory`). The first error ends the rest."""
        running: list[Future[None]] = []
        with ThreadPoolExecutor(self._workers, thread_name_prefix="gptkit") as pool:
            try:
                for job in jobs:
                    self._enter(job.memory)
                    if self.stopped:
                        break
                    running.append(pool.submit(self._do, job, work))
                wait(running)
            finally:  # Ctrl-C in this thread included
                self._failed.set()
        errors = [error for future in running if (error := future.exception()) is not None]
        errors.sort(key=lambda error: isinstance(error, StoppedError))
        try:
            if errors:
                raise errors[0]
        finally:
            # The error's traceback holds this frame: what it names would live on, open files included.
            del errors, running

    def _enter(self, memory: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._held == 0 or self._held + memory <= self._limit)
            self._held += memory

    def _do(self, job: Any, work: Callable[[Any], None]) -> None:
        try:
            if not self.stopped:
                work(job)
        except BaseException:
            self._failed.set()
            raise
        finally:
            with self._changed:
                self._held -= job.memory
                self._changed.notify_all()


def dependents(count: int, pairs: Iterable[Sequence[int]]) -> list[list[int]]:
    """The numbers below `count` in sets that depend on one another, each rising, by its first: `pairs` (or more) do."""
    first = list(range(count))

    def root(index: int) -> int:
        while first[index] != index:
            first[index] = first[first[index]]
            index = first[index]
        return index

    for together in pairs:
        least, *others = sorted({root(index) for index in together})
        for other in others:
            first[other] = least
    members: dict[int, list[int]] = {}
    for index in range(count):
        members.setdefault(root(index), []).append(index)
    return [members[least] for least in sorted(members)]


def shared_tensors(checkpoint: Checkpoint, leaves: Iterable[BoundLeaf]) -> dict[str, tuple[np.ndarray[Any, Any], str]]:
    """The leaves' tensors under shared names, views of the files where layouts allow it, with their dtypes."""
    return {
        name: (array, checkpoint.dtype_of(leaf))
        for leaf in leaves
        for name, array in zip(leaf.shared, leaf.to_shared(checkpoint.read(leaf)), strict=True)
    }
