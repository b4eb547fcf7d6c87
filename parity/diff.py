"""Compare two checkpoints tensor by tensor.

The checkpoints may have different formats, because the comparison uses gptkit's parameter names and orientation: fused
tensors are split, and transposed ones are transposed back. Several threads read some rows at a time, so the memory does
not grow with the checkpoint. Only the matrix products for ranks may run on a GPU. Without one, torch is not imported.
"""

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple, Unpack

from ..analysis.named import by_names
from ..architectures import BoundLeaf
from ..components import Parameter
from ..components.ranges import layer_ranges, range_label
from ..converter.checkpoint import Checkpoint, TensorFiles, open_files, open_tensors
from ..converter.dtypes import Array
from ..converter.opening import Opening
from ..converter.threads import available_cores
from ..converter.transfer import IN_FLIGHT, Scheduler, dependents, shared_tensors
from ..converter.weights import own_leaves
from ..signatures import takes
from .changes import STATUSES, Diff, Status, TensorDiff
from .surroundings import TreeChange, changed_files, changed_tree, same_layers
from .tensor_diff import CHUNK, TensorFigures, compare_tensors, same_bytes

_BY_ROW = ("embedding.weight", "positions.weight", "head.weight", "head.bias")
"""Tensors whose rows belong to token ids or positions. If their sizes differ, the common rows are compared."""
_SIDES: tuple[Literal["a", "b"], ...] = ("a", "b")
_MAPPED_BYTES = 32 * 2**20
"""The number of bytes read from memory-mapped files after which their pages are released."""


@takes(Opening)
def diff(
    a: str | Path,
    b: str | Path,
    *,
    allow_extra: bool = False,
    rank: bool = True,
    workers: int | None = None,
    device: str = "auto",
    progress: Callable[[int, int], None] | None = None,
    **opening: Unpack[Opening],
) -> Diff:
    """Return the differences between two checkpoints.

    Args:
        a: the first checkpoint: a folder, a file, or a repository on the hub.
        b: the second checkpoint, in the same or another format.
        offline, allow_pickle: see `Opening`.
        allow_extra: leave out tensors that have no place in the model, instead of comparing them by name.
        rank: compute the rank of each matrix's change too, which doubles the time.
        workers: the number of threads; by default one per available core. Set OPENBLAS_NUM_THREADS=1 before numpy is
            imported (the command does this), so that its threads do not compete with them.
        device: where to multiply the matrices of which the ranks are computed: "cpu", "cuda" or "cuda:1"; by default
            ("auto") on a GPU if there is one.
        progress: called with the number of bytes compared since the last call, and the total.

    Raises:
        InvalidInput: one of the checkpoints cannot be used.
        Offline: one of the checkpoints is not local, and there is no network.
        UsageError: the device is unknown.
    """
    place = _device(device)
    sides = [open_files(reference, allow_extra=allow_extra, partial=True, **opening) for reference in (a, b)]
    if not all(isinstance(side, Checkpoint) for side in sides):  # then only names can be compared
        pairs = zip((a, b), sides, strict=True)
        sides = [
            _by_names(open_tensors(path, **opening) if isinstance(side, Checkpoint) else side) for path, side in pairs
        ]
    first, second = sides
    run = _Comparison(first, second, rank, progress, workers or available_cores(), place).run
    if place is not None:
        from ..modules.devices import in_float32

        run = in_float32()(run)
    compared = run()
    tensors = tuple(sorted(compared, key=_order(_parameters(first), _parameters(second))))
    trees = [side.spec for side in (first, second) if isinstance(side, Checkpoint)]
    tree = changed_tree(*trees) if len(trees) == 2 else []
    return Diff(
        a=first,
        b=second,
        tensors=tensors,
        tree=tuple(tree),
        files=tuple(changed_files(first, second)),
        notes=tuple(_notes(first, second, tree)),
        counts={status: sum(tensor.status == status for tensor in tensors) for status in STATUSES},
    )


def _device(name: str) -> Any:
    """Return the torch device that multiplies matrices for ranks, or None for numpy.

    "auto" imports torch only if the machine seems to have a GPU.
    """
    seen = any(any(Path("/dev").glob(pattern)) for pattern in ("nvidia[0-9]*", "kfd", "dxg"))
    if name == "cpu" or (name == "auto" and not (seen and find_spec("torch"))):
        return None
    from ..modules.devices import device_of

    place = device_of(name, "diff")
    return None if place.type == "cpu" else place


class _DiffJob(NamedTuple):
    """Checkpoint tensors of A and B that have to be read together, because they store the same parameters.

    For example, a fused QKV tensor of A is read with the q, k and v tensors of B.
    """

    leaves: tuple[list[BoundLeaf], list[BoundLeaf]]  # the checkpoint tensors of A and of B
    memory: int  # the memory in bytes that reading them takes
    nbytes: int  # the number of bytes that are read


class _Comparison:
    """A running comparison of two checkpoints. Its threads share this state."""

    def __init__(
        self,
        a: TensorFiles,
        b: TensorFiles,
        rank: bool,
        progress: Callable[[int, int], None] | None,
        workers: int,
        device: Any,
    ) -> None:
        self.sides, self.rank, self.progress, self.device = (a, b), rank, progress, device
        self.parameters = [{parameter.name: parameter for parameter in _parameters(side)} for side in self.sides]
        self.dtypes = [side.shared_dtypes() for side in self.sides]
        self.quantised = [  # the shared tensors that are dequantised when they are read
            {name for leaf in side.leaves if side.stored_of(leaf)[0] != side.dtype_of(leaf) for name in leaf.shared}
            for side in self.sides
        ]
        self.jobs = self._jobs()
        self.total = sum(job.nbytes for job in self.jobs)
        self.lock = threading.Lock()
        self.scheduler = Scheduler(workers, max([IN_FLIGHT, *(job.memory for job in self.jobs)]))
        self.compared: list[TensorDiff] = []
        self.mapped = 0

    def run(self) -> list[TensorDiff]:
        """Compare all tensors and return the results, in any order. The first error stops all threads."""
        self.scheduler.run(self.jobs, self._compare)
        for side in self.sides:
            side.release()
        return self.compared

    def _jobs(self) -> list[_DiffJob]:
        """Return the jobs of the comparison, in the order of A's tensors.

        A job has as few tensors as possible, so that threads can share the work.
        """
        leaves = [(side, leaf) for side in (0, 1) for leaf in self.sides[side].leaves]
        at = {(side, name): index for index, (side, leaf) in enumerate(leaves) for name in leaf.shared}
        pairs = [(name, name) for _, name in at if (0, name) in at and (1, name) in at]
        tied = tuple(map(_is_tied, self.sides))
        if tied[0] != tied[1]:  # the tied embedding is compared with the separate head
            pairs.append(("embedding.weight", "head.weight") if tied[0] else ("head.weight", "embedding.weight"))
        known = ((at[0, name_a], at[1, name_b]) for name_a, name_b in pairs if (0, name_a) in at and (1, name_b) in at)
        groups = dependents(len(leaves), known)
        return [self._job([leaves[index] for index in group]) for group in groups]

    def _job(self, leaves: Sequence[tuple[int, BoundLeaf]]) -> _DiffJob:
        """Return one job for these checkpoint tensors, each given with its side (0 for A, 1 for B)."""
        nbytes = memory = 0
        for side, leaf in leaves:
            size = self.sides[side].nbytes_of(leaf)
            nbytes += size
            mapped = leaf.layout.is_identity and self.sides[side].span(leaf) is not None
            memory += min(size, _MAPPED_BYTES) if mapped else size
        parts = ([leaf for side, leaf in leaves if side == which] for which in (0, 1))
        return _DiffJob((next(parts), next(parts)), memory, nbytes)

    def _compare(self, job: _DiffJob) -> None:
        """Compare the tensors of one job and report the progress."""
        tensors = self._tensors(job)
        for side in self.sides:
            side.release()
        with self.lock:
            self.compared += tensors
            if self.progress is not None:
                self.progress(job.nbytes, self.total)

    def _tensors(self, job: _DiffJob) -> list[TensorDiff]:
        """Compare every parameter that a job's checkpoint tensors store."""
        names = [name for leaves in job.leaves for leaf in leaves for name in leaf.shared]
        if self._is_same_leaf(job):
            sizes = {name: math.prod(self.parameters[0][name].shape) for name in names}
            return [self._tensor_diff(name, TensorFigures(size, same_bytes=True)) for name, size in sizes.items()]
        tensors = [shared_tensors(side, leaves) for side, leaves in zip(self.sides, job.leaves, strict=True)]
        compared = []
        for name in dict.fromkeys(names):
            tensor_a, tensor_b = (tensors[side].get(name) for side in (0, 1))
            if name == "head.weight" and (tensor_a is None or tensor_b is None):
                tied = _is_tied(self.sides[0 if tensor_a is None else 1])
                embedding = tensors[0 if tensor_a is None else 1].get("embedding.weight") if tied else None
                tensor_a, tensor_b = tensor_a or embedding, tensor_b or embedding
            compared.append(self._tensor_diff(name, self._figures(name, tensor_a, tensor_b)))
        return compared

    def _is_same_leaf(self, job: _DiffJob) -> bool:
        """Return whether the job has one checkpoint tensor on each side, stored in the same way and with the same
        bytes.

        The parameters in them then need no further comparison.
        """
        if any(len(leaves) != 1 for leaves in job.leaves):
            return False
        (leaf_a,), (leaf_b,) = job.leaves
        a, b = self.sides
        alike = all(getattr(leaf_a, name) == getattr(leaf_b, name) for name in ("layout", "sizes", "shape", "shared"))
        if not alike or a.dtype_of(leaf_a) != b.dtype_of(leaf_b):
            return False
        places = a.span(leaf_a), b.span(leaf_b)
        if places[0] is None or places[1] is None:
            return False
        if places[0][1] == places[1][1] and places[0][0].resolve() == places[1][0].resolve():
            return True  # one file, given twice
        if leaf_a.layout.is_identity:
            return False
        x, y = (array.reshape(-1) for array in (a.read(leaf_a), b.read(leaf_b)))
        for start in range(0, x.size, 4 * CHUNK):
            part = x[start : start + 4 * CHUNK], y[start : start + 4 * CHUNK]
            if not same_bytes(*part):
                return False
            self._pause(2 * part[0].nbytes)
        return True

    def _figures(self, name: str, a: tuple[Array, str] | None, b: tuple[Array, str] | None) -> TensorFigures | None:
        """Return the comparison of two tensors; None if one is missing or their shapes cannot be compared.

        Tables such as the embedding may have different numbers of rows: the rows that both have are compared.
        """
        if a is None or b is None:
            return None
        x, y = a[0], b[0]
        if x.shape != y.shape:
            if name not in _BY_ROW or x.shape[1:] != y.shape[1:]:
                return None
            rows = min(len(x), len(y))
            x, y = x[:rows], y[:rows]
        rank = self.rank and not any(name in names for names in self.quantised)
        return compare_tensors(x, a[1], y, b[1], rank=rank, device=self.device, pause=self._pause)

    def _tensor_diff(self, name: str, figures: TensorFigures | None) -> TensorDiff:
        """Return the record of one tensor, given the comparison of its values (None if they were not compared)."""
        a, b = (parameters.get(name) for parameters in self.parameters)
        parameter = a or b
        assert parameter is not None
        dtypes = [dtype_by_name.get(name) for dtype_by_name in self.dtypes]
        return TensorDiff(
            name=name,
            component=parameter.component,
            layer=parameter.layer,
            status=_status(a, b, figures, dtypes[0] == dtypes[1]),
            shape_a=None if a is None else a.shape,
            shape_b=None if b is None else b.shape,
            dtype_a=dtypes[0],
            dtype_b=dtypes[1],
            figures=figures,
            quantised=tuple(side for side, names in zip(_SIDES, self.quantised, strict=True) if name in names),
        )

    def _pause(self, nbytes: int) -> None:
        """Stop this thread (raise StoppedError) if another one has failed, and from time to time release mapped pages.

        `nbytes` is the number of bytes that were read since the last call.
        """
        self.scheduler.check()
        self.mapped += nbytes  # without a lock, because a few lost counts do no harm
        if self.mapped > _MAPPED_BYTES:
            self.mapped = 0
            for side in self.sides:
                side.release()


def _by_names(side: TensorFiles) -> TensorFiles:
    """Return a checkpoint whose tensors all have their names in the files, for models that gptkit does not know.

    Booleans and four-bit values are compared as bytes.
    """
    weights = side._weights.numeric()
    leaves = own_leaves((name, shape) for name, (_, shape) in weights.info.items())
    return replace(side, leaves=leaves, _weights=weights)


def _is_tied(side: TensorFiles) -> bool:
    """Return whether the head is tied to the embedding."""
    return isinstance(side, Checkpoint) and side.spec.tied


def _parameters(checkpoint: TensorFiles) -> list[Parameter]:
    """Return all parameters in the order of computation, and after them the tensors that belong to no known component.

    The layer of the latter tensors is the first number in their name.
    """
    if not isinstance(checkpoint, Checkpoint):
        return list(by_names((leaf.checkpoint, leaf.shape) for leaf in checkpoint.leaves))
    missing = set(checkpoint.missing)
    parameters = [parameter for parameter in checkpoint.spec.parameters() if parameter.name not in missing]
    for leaf in checkpoint.extra:
        (name,) = leaf.shared
        layer = next((int(part) for part in name.split(".") if part.isdecimal()), None)
        parameters.append(Parameter(name, leaf.shape, "no place", layer))
    return parameters


def _status(a: Parameter | None, b: Parameter | None, figures: TensorFigures | None, one_dtype: bool) -> Status:
    """Return the status of a tensor: "same", "changed", "only_a" and so on.

    Args:
        a: the parameter in A; None if A does not have it.
        b: the parameter in B; None if B does not have it.
        figures: the comparison of the values, which is needed if the shapes are equal.
        one_dtype: whether both sides are stored in the same dtype.
    """
    if a is None or b is None:
        return "only_b" if a is None else "only_a"
    if a.shape != b.shape:
        return "reshaped"
    assert figures is not None
    if figures.changed == 0:
        return "same" if one_dtype else "dtype"
    return "rounded" if figures.rounded is not None else "changed"


def _order(a: Sequence[Parameter], b: Sequence[Parameter]) -> Callable[[TensorDiff], tuple[int, int]]:
    """Return a sort key for the order of tensors in A. A tensor that only B has comes after the one that precedes it in
    B.
    """
    places = {parameter.name: (index, 0) for index, parameter in enumerate(a)}
    last = -1
    for number, parameter in enumerate(b, 1):
        if parameter.name in places:
            last = places[parameter.name][0]
        else:
            places[parameter.name] = (last, number)
    return lambda parameter: places[parameter.name]


def _notes(a: TensorFiles, b: TensorFiles, tree: Sequence[TreeChange]) -> list[str]:
    """Return notes that help the user to interpret the figures, such as that RoPE rotates other pairs of dimensions."""
    notes = []
    family_a, family_b = (side.origin.family for side in (a, b))
    if None not in (family_a, family_b) and family_a != family_b:
        notes.append(
            f"A is of the family {family_a} and B of {family_b}: gptkit compares tensors with the same role and shape"
        )
    if any(change.path.endswith(".position.pairs") for change in tree):
        words = "so the rows of q_proj and k_proj are in a different order"
        notes.append(f"RoPE rotates different pairs of dimensions in A and B, {words}")
    moved = same_layers(a, b) if isinstance(a, Checkpoint) and isinstance(b, Checkpoint) else None
    if moved is not None:
        shifts = layer_ranges(None if layer is None else layer - index for index, layer in enumerate(moved))
        runs = [(first, last, shift) for first, last, shift in shifts if shift]
        pairs = [f"B's {range_label(i, j)} are A's {range_label(i + n, j + n)}" for i, j, n in runs]
        notes.append(f"layers are compared by number, but {', '.join(pairs)}")
    for name, side in (("A", a), ("B", b)):
        notes += [f"{name}: {note}" for note in side.notes]
    return notes
