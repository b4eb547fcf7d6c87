"""Compare the stored tensors of two checkpoints byte by byte, and find the table rows that the probe must read.

A weight of a layer affects every logit. A row of an embedding or position table only matters if its token or position
is in the input. So the probe must read every row that differs. It may skip a row for which both models give the same
logits without their layers (`_front_to_back`), which is cheap to compute.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor, nn

from ..converter.checkpoint import Checkpoint
from ..converter.dtypes import to_float64
from ..converter.manifest import MANIFEST, check_manifest
from ..errors import CheckpointError
from ..modules.decoder import EmbeddingModule, PositionsModule
from ..modules.load import filled, tensor_of
from ..modules.registry import build_module
from .passes import hooked
from .probe import AFFORDABLE, EMBEDDING, POSITIONS, TABLES, ProbeBatch, longest
from .rows import final_norm, head_rows
from .tensor_diff import same_bytes

_Rows = Mapping[str, np.ndarray]
"""By table (embedding, positions), the indices of the rows that differ or that only one checkpoint has."""

_COLUMNS = 64  # the number of logits that are compared for a row of a table, without the layers
_WIDTH = 256  # rows of the embedding that a batch reads
_PIECE = 2048  # rows that are widened at once
_TIMES = 4.0
"""The allowed difference of two models without their layers, as a multiple of the rounding to fp32. It is the same
number as `verify.IMPRECISE`.
"""


@dataclass(frozen=True)
class BytesVerdict:
    """The result of comparing the bytes of all tensors of two checkpoints."""

    compared: int  # the number of compared tensors
    against: str  # the reference, in words
    different: tuple[str, ...]  # the tensors that differ
    cast: tuple[str, ...] = ()  # tensors with equal values in another dtype (a GGUF stores norms in fp32)
    required: bool = True  # whether the models need the same bytes; if not, only the logits count
    alone: tuple[str, ...] = ()  # tensors that only one side has, or whose shapes differ

    @property
    def hold(self) -> bool:
        """Return whether the check passes: all bytes are the same, or the two models need not have the same bytes."""
        return not (self.required and self.different)


def compare_bytes(source: Checkpoint, target: Checkpoint, required: bool) -> tuple[BytesVerdict, _Rows]:
    """Compare the bytes of all tensors that both checkpoints have, including those of draft heads.

    If both are the same checkpoint, it is compared with its own tensors after a conversion to gptkit's layout and back.
    If a table has a different number of rows in the two, the common rows are compared.

    Args:
        source: the reference.
        target: the candidate.
        required: whether the two models need the same bytes to compute the same function.

    Returns:
        The result, and for each table (embedding, positions) the indices of the rows that differ.

    Raises:
        CheckpointError: the files of a gptkit folder do not match its manifest.
    """
    if source is target:
        return _forth_and_back(source), {}
    ours, theirs = (
        {parameter.name: parameter.shape for parameter in side.spec.parameters()} for side in (source, target)
    )
    both = [
        name
        for name, shape in ours.items()
        if name in theirs and (theirs[name] == shape or (name in TABLES and theirs[name][1:] == shape[1:]))
    ]
    different, cast, rows = [], [], {}
    for name in both:
        (a, a_dtype), (b, b_dtype) = source.tensor(name), target.tensor(name)
        common = min(len(a), len(b))
        differs = _rows(a[:common], a_dtype, b[:common], b_dtype)
        if differs.any():
            different.append(name)
            if name in TABLES:
                rows[name] = differs.nonzero()[0]
        elif a_dtype != b_dtype:
            cast.append(name)
        source.release()
        target.release()
    for name in set(TABLES) & (set(ours) | set(theirs)) - set(both):  # on one side alone, or of another width
        rows[name] = np.arange(min(shapes[name][0] for shapes in (ours, theirs) if name in shapes))
    alone = [name for name in {**ours, **theirs} if name not in both]
    draft_leaves = [{leaf.checkpoint: leaf for leaf in side.carried_leaves} for side in (source, target)]
    in_both = [name for name in draft_leaves[0] if name in draft_leaves[1]]
    both += in_both
    for name in in_both:
        x, y = (np.ascontiguousarray(s.read(of[name])) for s, of in zip((source, target), draft_leaves, strict=True))
        different += [] if (x.shape, x.dtype) == (y.shape, y.dtype) and same_bytes(x, y) else [name]
    return BytesVerdict(len(both), source.reference, tuple(different), tuple(cast), required, tuple(alone)), rows


def _forth_and_back(source: Checkpoint) -> BytesVerdict:
    """Convert the checkpoint's tensors to gptkit's layout and back, and compare the result with the files."""
    different = []
    for leaf in source.leaves:
        stored = source.read(leaf)
        converted = leaf.to_checkpoint(leaf.to_shared(stored))
        if converted.shape != stored.shape or not same_bytes(*map(np.ascontiguousarray, (converted, stored))):
            different.append(leaf.checkpoint)
        source.release()
    # Only the manifest can reveal changed files here, because the reference comes from the same files.
    written = source.format == "local" and (source.folder / MANIFEST).is_file()
    if written and (problems := check_manifest(source.folder)):
        raise CheckpointError(
            f"{source.reference} does not match its manifest: {'; '.join(problems[:3])}",
            f"Convert the original again, or compare the two: gptkit verify ORIGINAL {source.reference}",
        )
    return BytesVerdict(
        len(source.leaves), ("the source, after its layout was changed and changed back"), tuple(different)
    )


def _rows(a: np.ndarray, a_dtype: str, b: np.ndarray, b_dtype: str) -> np.ndarray:
    """Return which rows of two tables differ, as booleans (rows,).

    Rows are compared by bytes or, if the dtypes differ, by value.
    """
    step = max(1, (1 << 20) // max(math.prod(a.shape[1:]), 1))
    differing = np.zeros(len(a), bool)
    for start in range(0, len(a), step):
        part = slice(start, start + step)
        x, y = a[part], b[part]
        if a_dtype != b_dtype:
            x, y = to_float64(x, a_dtype), to_float64(y, b_dtype)
        x, y = (np.ascontiguousarray(rows).reshape(len(rows), -1).view(np.uint8) for rows in (x, y))
        if not np.array_equal(x, y):
            differing[part] = (x != y).any(axis=1)
    return differing


def rows_to_probe(
    source: Checkpoint,
    target: Checkpoint,
    rows: _Rows,
    batches: Sequence[ProbeBatch],
    *,
    required: bool,
    long: bool,
    up_to: int | None,
) -> tuple[list[ProbeBatch], list[str]]:
    """Make batches for rows of the embedding and the position table that differ but are not yet in the test inputs.

    Args:
        source: the reference.
        target: the candidate.
        rows: the indices of the rows that differ, by table.
        batches: the test inputs (the probe).
        required: whether the two models need the same bytes. If so, a few rows are enough to show the effect.
        long: make batches for all differing rows.
        up_to: the longest sequence that the user cares about, in tokens.

    Returns:
        The new batches, and messages about the differing rows that remain without a batch.
    """
    tokens = max(batch.input_ids.shape[1] for batch in batches)
    supported = None if source.architecture is None else source.architecture.takes(source.spec)
    most = longest(source.spec, target.spec, supported=supported)
    # Only tokens whose own logits are compared count, because a row shows less through attention alone.
    ids = torch.cat([batch.valid(batch.input_ids[..., None]).flatten() for batch in batches]).numpy()
    embedding = np.setdiff1d(rows.get(EMBEDDING, ids[:0]), ids)
    first = 0 if source.spec.positions is None else source.spec.positions.offset  # before it is a row of padding
    positions = np.setdiff1d(rows.get(POSITIONS, ids[:0]) - first, np.arange(-first, tokens))
    if not required:
        if source.spec.tied and target.spec.tied:
            embedding = embedding[:0]  # every row of a tied table affects one logit of every input
        embedding = embedding[~_alike_at_the_ends(source, target, EMBEDDING, embedding)]
        positions = positions[~_alike_at_the_ends(source, target, POSITIONS, positions + first)]
    positions = positions[positions < min(most or 0, up_to or most or 0)]
    # If the bytes must be the same, that check has failed already, and a few rows show the effect.
    read, unread = np.split(embedding, [len(embedding) if long else _WIDTH if required else AFFORDABLE])
    width = min(_WIDTH, most or _WIDTH, up_to or _WIDTH)
    pieces = [torch.from_numpy(read[start : start + width])[None] for start in range(0, len(read), width)]
    more = [ProbeBatch("rows of the embedding", piece) for piece in pieces]
    limited = [_too_many(unread, EMBEDDING)] if len(unread) else []
    if len(positions) and (long or positions[-1] < AFFORDABLE):
        all_positions = torch.arange(int(positions[-1]) + 1) % source.spec.vocab_size
        more.append(ProbeBatch("rows of the position table", all_positions[None]))
    elif len(positions):
        limited.append(_too_many(positions + first, POSITIONS))
    return more, [] if required else limited


class Reached:
    """A record of the experts to which tokens were routed. The weights of other experts affect no logit."""

    def __init__(self) -> None:
        self.experts: set[str] = set()

    def watch(self, model: nn.Module) -> ExitStack:
        """Record the paths of the experts that compute. Returns a context that removes the hooks when it ends."""
        parts = [(path.rpartition("."), module) for path, module in model.named_modules() if ".experts." in path]
        last = [(expert, module) for (expert, _, name), module in parts if name == "down_proj"]
        return hooked(m.register_forward_hook(lambda *_, path=path: self.experts.add(path)) for path, m in last)

    def left_out(self, names: Sequence[str]) -> list[str]:
        """Return, in words, which experts own some of the tensors `names` but received no token."""
        owners = dict.fromkeys(name.rsplit(".", 2)[0] for name in names if ".experts." in name)
        idle = [path for path in owners if path not in self.experts]
        if not idle:
            return []
        more = f" and {len(idle) - 1} more" if len(idle) > 1 else ""
        return [f"{idle[0]}{more}, which have other values and receive no token of the probe"]


def _too_many(unread: np.ndarray, name: str) -> str:
    """Return a message about rows of the table `name` that differ and that no batch reads. `unread`
    are their indices.
    """
    if len(unread) == 1:
        return f"row {unread[0]:,} of {name}, which holds other values and which no batch reads: --long has it read"
    rows = f"{len(unread):,} rows of {name}, {unread[0]:,} the first"
    return f"{rows}, which have other values and which the probe does not read; --long includes them"


def _alike_at_the_ends(source: Checkpoint, target: Checkpoint, name: str, rows: np.ndarray) -> np.ndarray:
    """Compare two models without their layers: only embedding, last norm and head. Check some rows of a table.

    A swap may change the basis of the residual stream, and with it the table, the last norm and the head. Such a change
    cancels in these logits, but every other change of a row is visible.

    Args:
        source: the reference.
        target: the candidate.
        name: the name of the table: the embedding or the position table.
        rows: the indices of the rows to check, (N,).

    Returns:
        For each row, whether both models give the same logits, as booleans (N,).
    """
    # A norm would hide the size of a single row, so every row is added to the row of token 0. The logits are computed
    # in fp64. The allowed difference is a multiple of the reference's rounding to fp32.
    if not len(rows):
        return np.zeros(0, bool)
    outputs = source.spec.hidden_size if source.spec.head is None else source.spec.vocab_size
    columns = torch.linspace(0, outputs - 1, min(_COLUMNS, outputs)).round().long()
    gaps, noise = [], []
    for start in range(0, len(rows), _PIECE):
        piece = torch.from_numpy(rows[start : start + _PIECE])
        exact, rounded, candidate = (
            _front_to_back(checkpoint, name, piece, columns, dtype)
            for checkpoint, dtype in ((source, torch.float64), (source, torch.float32), (target, torch.float64))
        )
        noise.append((exact - rounded).abs().amax(dim=1))
        gaps.append((exact - candidate).abs().amax(dim=1))
    rounding = torch.cat(noise)
    allowed = _TIMES * rounding.maximum(rounding.nanmedian())  # the noise of one row does not excuse other rows
    return ((torch.cat(gaps) <= allowed) & rounding.isfinite()).numpy()


def _front_to_back(checkpoint: Checkpoint, name: str, rows: Tensor, columns: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the logits of a model without its layers: embedding, last norm and head.

    Args:
        checkpoint: the model.
        name: the table that `rows` belongs to, the embedding or the position table.
        rows: the indices of rows of this table, (N,).
        columns: the tokens whose logits are computed, (columns,).
        dtype: the dtype to compute in.

    Returns:
        The logits, (N, columns).
    """
    spec, indices, first = checkpoint.spec, torch.arange(len(rows)), torch.zeros_like(rows)

    def read(name: str, ids: Tensor) -> Tensor:
        """Read the rows `ids` of a table. Of a norm or a projection, read everything."""
        array, stored = checkpoint.tensor(name)
        return torch.from_numpy(
            to_float64(array if "norm" in name or "projection" in name else array[ids.numpy()], stored)
        )

    def embedded(ids: Tensor) -> Tensor:
        small_module = partial(EmbeddingModule, replace(spec.embedding, vocab_size=len(ids)))
        vectors: Tensor = filled(small_module, partial(read, ids=ids), dtype, "embedding")(torch.arange(len(ids)))
        return vectors

    with torch.inference_mode():
        x = embedded(first)
        if name == EMBEDDING:
            x = x + embedded(rows)
        if spec.positions is not None and spec.positions.shapes():
            small_module = partial(PositionsModule, replace(spec.positions, length=len(rows), offset=0))
            ids = rows if name == POSITIONS else first
            x = x + filled(small_module, partial(read, ids=ids), dtype, "positions")(indices, dtype)
        if spec.first_norm is not None:
            make: Callable[[], Any] = partial(build_module, spec.first_norm)
            x = filled(make, partial(tensor_of, checkpoint), dtype, "first_norm")(x)
        logits = next(head_rows(checkpoint, dtype, [columns]))(final_norm(checkpoint, dtype)(x))
    checkpoint.release()
    return logits
