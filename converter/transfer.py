"""Write a checkpoint's tensors into the files of a plan, with several threads.

A tensor that has the same bytes in the source and in the output is copied. The elements of other tensors are rearranged
and cast a few rows at a time, as views of the memory-mapped source file. The tensors are written in the order of the
source. The memory that the threads use together is limited.
"""

from __future__ import annotations

import math
import os
import threading
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..architectures import BoundLeaf
from ..errors import CheckpointError, UsageError
from .block_file import CHUNK, BlockFile
from .checkpoint import TensorFiles
from .dtypes import Quantisation, Rounding, cast, not_finite, quantisation, rounding, widest
from .manifest import FileRecord
from .publish import Staging
from .threads import available_cores
from .weights import PIECE
from .write import FolderPlan, Output, Shard, prepare, writer

IN_FLIGHT = 128 * 2**20  # the most bytes of tensors in memory for all workers, unless a single job needs more


class StoppedError(Exception):
    """This thread stops because another thread or process has failed. The other error is the one to report."""


class Scheduler:
    """Runs jobs in threads, in the given order, within a memory limit. A job that needs more memory runs alone."""

    def __init__(self, workers: int, limit: int, stop: threading.Event | None = None) -> None:
        """Set the limits.

        Args:
            workers: the number of threads.
            limit: the number of bytes of memory that all running jobs may use together.
            stop: an event that the caller may set to end the work soon.
        """
        self._workers, self._limit = workers, limit
        self._held, self._changed = 0, threading.Condition()
        self._failed, self._outside = threading.Event(), stop

    @property
    def stopped(self) -> bool:
        """Whether the work should end, because a job has failed or `stop` is set."""
        return self._failed.is_set() or (self._outside is not None and self._outside.is_set())

    def check(self) -> None:
        """Raise StoppedError if the work should end. Long jobs call this from time to time."""
        if self.stopped:
            raise StoppedError

    def run(self, jobs: Iterable[Any], work: Callable[[Any], None]) -> None:
        """Call `work` with every job. The attribute `memory` of a job is the number of bytes of memory that it uses.

        After the first error no further job is started, and the error is raised.
        """
        running: list[Future[None]] = []
        with ThreadPoolExecutor(self._workers, thread_name_prefix="gptkit") as pool:
            try:
                for job in jobs:
                    self._enter(job.memory)
                    if self.stopped:
                        break
                    running.append(pool.submit(self._do, job, work))
                wait(running)
            finally:  # also after Ctrl-C in this thread
                self._failed.set()
        errors = [error for future in running if (error := future.exception()) is not None]
        errors.sort(key=lambda error: isinstance(error, StoppedError))  # the cause first
        try:
            if errors:
                raise errors[0]
        finally:
            # The error's traceback refers to this frame, which would keep these objects and their open files alive.
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
    """Return the connected components of a graph with the nodes 0 to `count` - 1.

    Every item of `pairs` is a list of nodes that are connected with each other.
    """
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


def shared_tensors(checkpoint: TensorFiles, leaves: Iterable[BoundLeaf]) -> dict[str, tuple[np.ndarray[Any, Any], str]]:
    """Return the parameters that some checkpoint tensors store: array and dtype, by gptkit's name of the parameter.

    If possible, the arrays are views of the files.
    """
    return {
        name: (array, checkpoint.dtype_of(leaf))
        for leaf in leaves
        for name, array in zip(leaf.shared, leaf.to_shared(checkpoint.read(leaf)), strict=True)
    }


_ROWS = 1 << 20  # bytes of a view to gather, cast and write at a time
_READ = 1 << 23  # bytes to produce before the pages of their sources are released


@dataclass(frozen=True)
class _TransferJob:
    """The task of writing all outputs that are made of the same source tensors."""

    sources: tuple[BoundLeaf, ...]
    """The source tensors."""
    outputs: tuple[tuple[Shard, Output], ...]
    """The tensors to write, with their files."""
    copied: bool
    """Whether the bytes are just copied."""
    memory: int
    """The number of bytes of memory that the job uses, including pages of memory-mapped files."""
    pieced: bool = False
    """Whether the source tensor is dequantised and written some rows at a time."""


@dataclass
class Transferred:
    """The result of writing the tensors of a checkpoint: hashes of the files, and the effects of rounding."""

    files: dict[str, FileRecord] = field(default_factory=dict)
    """The hashes of the written files, by file name."""
    rounded: dict[str, Rounding] = field(default_factory=dict)
    """The effect of casting to a narrower dtype, by tensor name, if values changed."""
    quantised: dict[str, Quantisation] = field(default_factory=dict)
    """The error of quantising, by tensor name."""
    not_finite: dict[str, int] = field(default_factory=dict)
    """The number of NaN and infinite values, by tensor name, if there are any."""
    resumed: int = 0
    """The size in bytes of all files that an earlier, interrupted run had already written."""

    def add(self, other: Transferred) -> None:
        """Add the result of another process of the same conversion."""
        for name in ("files", "rounded", "quantised", "not_finite"):
            getattr(self, name).update(getattr(other, name))


def jobs_of(plan: FolderPlan, source: TensorFiles) -> list[_TransferJob]:
    """Return the jobs that write the files of a plan, in the order of the source's tensors."""
    holder = {name: index for index, leaf in enumerate(source.leaves) for name in leaf.shared}
    outputs = [(shard, output) for shard in plan.shards for output in shard.outputs]
    outputs_of: dict[int, list[tuple[Shard, Output]]] = {}
    for shard, output in outputs:
        outputs_of.setdefault(holder[output.leaf.shared[0]], []).append((shard, output))
    jobs = []
    for group in dependents(len(source.leaves), ([holder[name] for name in o.leaf.shared] for _, o in outputs)):
        if of_group := [pair for index in group for pair in outputs_of.get(index, ())]:
            jobs.append(_job(source, [source.leaves[index] for index in group], of_group))
    return jobs


def _job(source: TensorFiles, leaves: Sequence[BoundLeaf], outputs: Sequence[tuple[Shard, Output]]) -> _TransferJob:
    alike = len(leaves) == len(outputs) == 1 and _same_layout(leaves[0], outputs[0][1])
    copied = alike and _same_bytes(source, leaves[0], outputs[0][1])
    pieced = alike and not copied and source.pieces(leaves[0]) is not None
    if copied:
        memory = 2 * min(CHUNK, outputs[0][1].nbytes)
    elif pieced:
        nbytes = source.nbytes_of(leaves[0])
        memory = 16 * PIECE + min(_READ, nbytes) + nbytes // max(1, math.prod(leaves[0].shape[:-2])) // 8  # its scales
    else:
        memory = sum(source.nbytes_of(leaf) for leaf in leaves)
        memory += 4 * min(_ROWS, max(output.nbytes for _, output in outputs))
        if not all(leaf.layout.is_identity for leaf in (*leaves, *(output.leaf for _, output in outputs))):
            memory += max(output.nbytes for _, output in outputs)  # reshaping or concatenating may copy
    return _TransferJob(tuple(leaves), tuple(outputs), copied, memory, pieced)


def _same_bytes(source: TensorFiles, leaf: BoundLeaf, output: Output) -> bool:
    """Return whether the source tensor's bytes can be copied, provided that the output has the same layout."""
    if output.encode is not None or output.around is not None or source.dtype_of(leaf) != output.dtype:
        return False
    return source.span(leaf) is not None


def _same_layout(leaf: BoundLeaf, output: Output) -> bool:
    """Return whether an output has the same elements in the same order as a source tensor."""
    if (leaf.shared, leaf.shape) != (output.leaf.shared, output.leaf.shape):
        return False
    ours, theirs = leaf.layout, output.leaf.layout
    return (ours.is_identity and theirs.is_identity) or (ours == theirs and leaf.sizes == output.leaf.sizes)


def memory_of(jobs: Sequence[_TransferJob], max_memory: int | None = None) -> int:
    """Return the number of bytes of memory that the running jobs may use together.

    Raises UsageError if a job needs more than `max_memory`.
    """
    worst = max(jobs, key=lambda job: job.memory)
    if max_memory is not None and worst.memory > max_memory:
        names = ", ".join(output.leaf.checkpoint for _, output in worst.outputs[:3])
        raise UsageError(
            f"--max-memory {max_memory:,} is too small: converting {names} needs {worst.memory:,} bytes",
            f"Give at least --max-memory {-(-worst.memory // 2**20)}MiB.",
        )
    return min(sum(job.memory for job in jobs), max_memory or max(IN_FLIGHT, worst.memory))


def transfer(
    plan: FolderPlan,
    source: TensorFiles,
    staging: Staging,
    *,
    workers: int | None = None,
    max_memory: int | None = None,
    only: Collection[str] | None = None,
    stop: threading.Event | None = None,
    progress: Callable[[int], None] | None = None,
) -> Transferred:
    """Write the files of a plan into a staging folder, except weight files that an interrupted run has finished.

    Args:
        plan: the plan.
        source: the checkpoint whose tensors are written.
        staging: the folder.
        workers: the number of threads; by default one per core.
        max_memory: the maximum number of bytes of memory for tensors.
        only: the names of the weight files to write, if other processes write the others and all small files.
        stop: an event that the caller may set to end the transfer.
        progress: called with the number of bytes of every tensor that was written.

    Raises:
        CheckpointError, GptkitError: reading or writing fails. UsageError: `max_memory` is too small.
        StoppedError: `stop` is set.
    """
    done = Transferred()
    jobs = jobs_of(plan, source)
    limit = memory_of(jobs, max_memory)
    if only is None:
        prepare(plan, staging)
    scheduler = Scheduler(workers or available_cores(), limit, stop)
    carrier = _Carrier(source, staging, done, progress, scheduler)
    try:
        for shard in plan.shards:
            if only is not None and shard.name not in only:
                continue
            if shard.name not in staging.finished:
                carrier.open(shard)
                continue
            done.files[shard.name] = staging.finished[shard.name]
            done.resumed += shard.size
            if progress is not None:
                progress(shard.nbytes)
        # The first error stops the rest.
        scheduler.run([job for job in jobs if any(s.name in carrier.writers for s, _ in job.outputs)], carrier._carry)
    finally:
        carrier.close()
    return done


@dataclass
class _Carrier:
    """The state that the threads of a transfer share."""

    source: TensorFiles
    staging: Staging
    done: Transferred
    progress: Callable[[int], None] | None
    scheduler: Scheduler
    writers: dict[str, BlockFile] = field(default_factory=dict)
    """The weight files that are written, by file name."""
    remaining: dict[str, int] = field(default_factory=dict)
    """The number of tensors that are not yet written, by file name."""
    crcs: dict[tuple[str, str], int] = field(default_factory=dict)
    """(file name, tensor name) -> the crc32 of the tensor, in archives of torch.save."""
    sources: dict[Path, int] = field(default_factory=dict)
    """The file descriptors of the opened source files, by path."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def open(self, shard: Shard) -> None:
        self.writers[shard.name], self.remaining[shard.name] = writer(shard, self.staging), len(shard.outputs)
        if not shard.outputs:
            self._finish(shard)

    def close(self) -> None:
        """Close all files that are still open."""
        for file in self.writers.values():
            file.release()
        for fd in self.sources.values():
            os.close(fd)

    def _carry(self, job: _TransferJob) -> None:
        (self._copy if job.copied else self._rewrite)(job)
        for shard, output in job.outputs:
            if shard.name not in self.writers:
                continue
            with self.lock:
                self.remaining[shard.name] -= 1
                last = self.remaining[shard.name] == 0
                if self.progress is not None:
                    self.progress(output.nbytes)
            if last:
                self._finish(shard)

    def _finish(self, shard: Shard) -> None:
        file = self.writers[shard.name]
        crcs = [self.crcs.get((shard.name, output.leaf.checkpoint), 0) for output in shard.outputs]
        file.close(shard.ending(crcs) if shard.ending is not None else b"")
        self.staging.finish(shard.name, file.record)
        with self.lock:
            self.done.files[shard.name] = file.record

    def _copy(self, job: _TransferJob) -> None:
        (shard, output), bad = job.outputs[0], 0
        span = self.source.span(job.sources[0])
        assert span is not None

        def look(chunk: np.ndarray) -> None:
            nonlocal bad
            bad += not_finite(chunk, output.dtype)
            self.scheduler.check()

        self.writers[shard.name].copy(output.leaf.checkpoint, self._fd(span[0]), span[1], look)
        self._note(output, bad)

    def _rewrite(self, job: _TransferJob) -> None:
        if job.pieced:
            (shard, output), leaf = job.outputs[0], job.sources[0]
            decoded = self.source.pieces(leaf)
            assert decoded is not None
            self._write(self.writers[shard.name], output, self._released(decoded, leaf), self.source.dtype_of(leaf))
            return
        tensors = shared_tensors(self.source, job.sources)
        for shard, output in job.outputs:
            if shard.name in self.writers:
                dtype = widest([tensors[name][1] for name in output.leaf.shared])
                array = output.leaf.to_checkpoint([cast(*tensors[name], dtype) for name in output.leaf.shared])
                pieces = (contiguous(array[rows] if array.ndim else array) for rows in _row_slices(array, output.rows))
                self._write(self.writers[shard.name], output, pieces, dtype)
        del tensors
        self.source.release()

    def _released(self, pieces: Iterable[np.ndarray], leaf: BoundLeaf) -> Iterator[np.ndarray]:
        """Yield the pieces of a source tensor.

        From time to time, release the memory of pages that were read for them.
        """
        read = 0
        for piece in pieces:
            yield piece
            read += piece.nbytes
            if read >= _READ:
                self.source.release(leaf)
                read = 0
        self.source.release()

    def _write(self, file: BlockFile, output: Output, pieces: Iterable[np.ndarray], dtype: str) -> None:
        """Cast or quantise the pieces of a tensor, which have the type `dtype`, and write them."""
        bad, cost, loss, crc, around, name = 0, Rounding(), Quantisation(), 0, output.around, output.leaf.checkpoint
        with file.pieces(name) as piece:
            if around is not None:
                piece(around[0])
            for chunk in pieces:
                self.scheduler.check()
                bad += not_finite(chunk, dtype)
                if output.encode is not None:
                    blocks = output.encode(chunk, dtype)
                    piece(blocks.reshape(-1).view(np.uint8))
                    if output.decode is not None:
                        loss += quantisation(chunk, dtype, output.decode(blocks, chunk, dtype))
                    continue
                try:
                    narrow = cast(chunk, dtype, output.dtype)
                except CheckpointError as error:
                    raise CheckpointError(
                        f"{name}: {error.message}", "Choose a dtype with a larger range: bfloat16 or float32."
                    ) from error
                if dtype != output.dtype:
                    cost += rounding(chunk, dtype, narrow, output.dtype)
                data = narrow.reshape(-1).view(np.uint8)
                piece(data)
                if around is not None:
                    crc = zlib.crc32(data.data, crc)
            if around is not None:
                piece(around[1](crc))
                with self.lock:
                    self.crcs[file.path.name, name] = crc
        self._note(output, bad, cost, loss)

    def _note(self, output: Output, bad: int, cost: Rounding = Rounding(), loss: Quantisation = Quantisation()) -> None:  # noqa: B008
        name = output.leaf.checkpoint
        with self.lock:
            if bad:
                self.done.not_finite[name] = bad
            if cost.changed:
                self.done.rounded[name] = cost
            if output.decode is not None:
                self.done.quantised[name] = loss

    def _fd(self, path: Path) -> int:
        with self.lock:
            if path not in self.sources:
                try:
                    self.sources[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                except OSError as error:
                    raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
            return self.sources[path]


def _row_slices(array: np.ndarray, multiple: int) -> Iterator[Any]:
    """Yield slices that divide the first axis of an array into parts of about `_ROWS` bytes.

    The number of rows of a part is a multiple of `multiple`. For a scalar or an empty array, yield one index of
    everything.
    """
    if array.ndim == 0 or array.size == 0:
        yield ...
        return
    rows = max(1, _ROWS // max(array.nbytes // array.shape[0], 1) // multiple) * multiple
    for start in range(0, array.shape[0], rows):
        yield slice(start, start + rows)


def contiguous(array: np.ndarray) -> np.ndarray:
    """Return the array in contiguous memory. A transposed matrix is copied in strips, which is faster than in numpy."""
    if array.ndim != 2 or array.flags.c_contiguous or array.strides[0] != array.itemsize:
        return np.ascontiguousarray(array)
    out = np.empty(array.shape, array.dtype)
    strip = max(1, 64 // array.itemsize)
    for start in range(0, array.shape[1], strip):
        out[:, start : start + strip] = array[:, start : start + strip]
    return out
