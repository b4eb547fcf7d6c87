"""What is stored: two checkpoints' tensors byte by byte, and the rows of tables that only some inputs read.

A weight of a layer shows in every logit, a row of a table only where its token, or its position, is in the input. So a
row that holds other bytes is one that the probe has to read, unless both models are shown to make the same of it
without their layers (`_front_to_back`), which takes no pass through either.
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
"""Of each table the numbers of the rows that hold other bytes, or that one side alone has."""

_COLUMNS = 64  # logits that each row of a table is looked at by, without the layers
_WIDTH = 256  # rows of the embedding that a batch reads
_PIECE = 2048  # rows that are widened at once
_TIMES = 4.0
"""Of what rounding to fp32 makes without the layers, how much two tables may differ by: as `verify.IMPRECISE`."""


@dataclass(frozen=True)
class BytesVerdict:
    """How many tensors were compared byte by byte, against what, and the names of those that differ. cast: those stored
    in another dtype that hold the same values all the same (a GGUF keeps norms in fp32). required: whether the trees
    leave no reason for other bytes; where they do, what differs is held by the function alone. alone: tensors that one
    side has and the other has not, or has in another shape; of tables of two lengths the rows that both have are
    compared.
    """

    compared: int
    against: str
    different: tuple[str, ...]
    cast: tuple[str, ...] = ()
    required: bool = True
    alone: tuple[str, ...] = ()

    @property
    def hold(self) -> bool:
        """Whether all bytes are as they have to be."""
        return not (self.required and self.different)


def compare_bytes(source: Checkpoint, target: Checkpoint, required: bool) -> tuple[BytesVerdict, _Rows]:
    """Every tensor that both have, whatever else their trees differ in (tables of two lengths, as far as both go), and
    what drafts tokens in both; a source alone, forth and back. `required`: whether the trees call for the same bytes.
    Raises CheckpointError where a folder of gptkit's own, which nothing is held against, is not as its manifest says.
    """
    if source is target:
        return _forth_and_back(source), {}
    ours, theirs = ({each.name: each.shape for each in side.spec.parameters()} for side in (source, target))
    both = [
        name
        for name, shape in ours.items()
        if name in theirs and (theirs[name] == shape or (name in TABLES and theirs[name][1:] == shape[1:]))
    ]
    different, cast, rows = [], [], {}
    for name in both:
        (a, a_dtype), (b, b_dtype) = source.tensor(name), target.tensor(name)
        common = min(len(a), len(b))
        other = _rows(a[:common], a_dtype, b[:common], b_dtype)
        if other.any():
            different.append(name)
            if name in TABLES:
                rows[name] = other.nonzero()[0]
        elif a_dtype != b_dtype:
            cast.append(name)
        source.release()
        target.release()
    for name in set(TABLES) & (set(ours) | set(theirs)) - set(both):  # on one side alone, or of another width
        rows[name] = np.arange(min(each[name][0] for each in (ours, theirs) if name in each))
    alone = [name for name in {**ours, **theirs} if name not in both]
    beside = [{leaf.checkpoint: leaf for leaf in side.beside} for side in (source, target)]
    carried = [name for name in beside[0] if name in beside[1]]
    both += carried
    for name in carried:
        x, y = (np.ascontiguousarray(s.read(of[name])) for s, of in zip((source, target), beside, strict=True))
        different += [] if (x.shape, x.dtype) == (y.shape, y.dtype) and same_bytes(x, y) else [name]
    return BytesVerdict(len(both), source.reference, tuple(different), tuple(cast), required, tuple(alone)), rows


def _forth_and_back(source: Checkpoint) -> BytesVerdict:
    """The source's own tensors through their layouts."""
    different = []
    for leaf in source.leaves:
        stored = source.read(leaf)
        again = leaf.to_checkpoint(leaf.to_shared(stored))
        if again.shape != stored.shape or not same_bytes(*map(np.ascontiguousarray, (again, stored))):
            different.append(leaf.checkpoint)
        source.release()
    # Nothing else could tell here: the reference is made of the same files.
    written = source.format == "local" and (source.folder / MANIFEST).is_file()
    if written and (problems := check_manifest(source.folder)):
        raise CheckpointError(
            f"{source.reference} does not match its manifest: {'; '.join(problems[:3])}",
            "Convert it again, or compare it with its original: gptkit verify ORIGINAL THIS",
        )
    return BytesVerdict(
        len(source.leaves), ("the source, after its layout was changed and changed back"), tuple(different)
    )


def _rows(a: np.ndarray, a_dtype: str, b: np.ndarray, b_dtype: str) -> np.ndarray:
    """Which rows differ, (len,) of bool: in bytes, or in value where the dtypes do (fp64 holds every value of both)."""
    step = max(1, (1 << 20) // max(math.prod(a.shape[1:]), 1))
    found = np.zeros(len(a), bool)
    for start in range(0, len(a), step):
        part = slice(start, start + step)
        x, y = a[part], b[part]
        if a_dtype != b_dtype:
            x, y = to_float64(x, a_dtype), to_float64(y, b_dtype)
        x, y = (np.ascontiguousarray(each).reshape(len(each), -1).view(np.uint8) for each in (x, y))
        if not np.array_equal(x, y):
            found[part] = (x != y).any(axis=1)
    return found


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
    """Batches that read the rows which no batch of the probe does, and in words those that nothing looked at. Where the
    same bytes are `required` there is nothing to be shown of a row but its effect; `long` reads all of them, however
    many; `up_to` is the longest sequence that matters.
    """
    tokens = max(batch.input_ids.shape[1] for batch in batches)
    taken = None if source.architecture is None else source.architecture.takes(source.spec)
    most = longest(source.spec, target.spec, taken=taken)
    # Of tokens whose own logits are compared: through attention alone a row shows less.
    ids = torch.cat([batch.valid(batch.input_ids[..., None]).flatten() for batch in batches]).numpy()
    embedding = np.setdiff1d(rows.get(EMBEDDING, ids[:0]), ids)
    first = 0 if source.spec.positions is None else source.spec.positions.offset  # before it is a row of padding
    positions = np.setdiff1d(rows.get(POSITIONS, ids[:0]) - first, np.arange(-first, tokens))
    if not required:
        if source.spec.tied and target.spec.tied:
            embedding = embedding[:0]  # each row is a token's logit, whatever is read
        embedding = embedding[~_alike_at_the_ends(source, target, EMBEDDING, embedding)]
        positions = positions[~_alike_at_the_ends(source, target, POSITIONS, positions + first)]
    positions = positions[positions < min(most or 0, up_to or most or 0)]
    # Where bytes are called for they have failed already, and a few rows show what it comes to.
    read, left = np.split(embedding, [len(embedding) if long else _WIDTH if required else AFFORDABLE])
    width = min(_WIDTH, most or _WIDTH, up_to or _WIDTH)
    pieces = [torch.from_numpy(read[start : start + width])[None] for start in range(0, len(read), width)]
    more = [ProbeBatch("rows of the embedding", piece) for piece in pieces]
    limited = [_too_many(left, EMBEDDING)] if len(left) else []
    if len(positions) and (long or positions[-1] < AFFORDABLE):
        every = torch.arange(int(positions[-1]) + 1) % source.spec.vocab_size
        more.append(ProbeBatch("rows of the position table", every[None]))
    elif len(positions):
        limited.append(_too_many(positions + first, POSITIONS))
    return more, [] if required else limited


class Reached:
    """Which experts of a mixture were given tokens: what lies in the others is in no logit."""

    def __init__(self) -> None:
        self.experts: set[str] = set()

    def watch(self, model: nn.Module) -> ExitStack:
        """While open, passes of the model leave the paths of its experts that compute."""
        parts = [(path.rpartition("."), module) for path, module in model.named_modules() if ".experts." in path]
        last = [(expert, module) for (expert, _, name), module in parts if name == "down_proj"]
        return hooked(m.register_forward_hook(lambda *_, path=path: self.experts.add(path)) for path, m in last)

    def left_out(self, names: Sequence[str]) -> list[str]:
        """In words, the experts among the owners of these tensors that nothing was given to."""
        owners = dict.fromkeys(name.rsplit(".", 2)[0] for name in names if ".experts." in name)
        idle = [path for path in owners if path not in self.experts]
        if not idle:
            return []
        more = f" and {len(idle) - 1} more" if len(idle) > 1 else ""
        return [f"{idle[0]}{more}, which have other values and receive no token of the probe"]


def _too_many(left: np.ndarray, name: str) -> str:
    if len(left) == 1:
        return f"row {left[0]:,} of {name}, which holds other values and which no batch reads: --long has it read"
    rows = f"{len(left):,} rows of {name}, {left[0]:,} the first"
    return f"{rows}, which have other values and which the probe does not read; --long includes them"


def _alike_at_the_ends(source: Checkpoint, target: Checkpoint, name: str, rows: np.ndarray) -> np.ndarray:
    """Which rows of a table give the same logits where the layers are left out of both models, (len(rows),) of bool. A
    swap that changes a table changes the residual stream's basis, for all that reads and writes it: what tables put
    into the stream the last norm and the head take out again, and a row that is out of line with the others shows. Each
    row is looked at on top of token 0, so that its size counts behind a norm, in fp64, and may be off by what rounding
    to fp32 makes in the reference, in this row or in most of them.
    """
    if not len(rows):
        return np.zeros(0, bool)
    outputs = source.spec.hidden_size if source.spec.head is None else source.spec.vocab_size
    columns = torch.linspace(0, outputs - 1, min(_COLUMNS, outputs)).round().long()
    gaps, noise = [], []
    for start in range(0, len(rows), _PIECE):
        here = torch.from_numpy(rows[start : start + _PIECE])
        exact, rounded, other = (
            _front_to_back(checkpoint, name, here, columns, dtype)
            for checkpoint, dtype in ((source, torch.float64), (source, torch.float32), (target, torch.float64))
        )
        noise.append((exact - rounded).abs().amax(dim=1))
        gaps.append((exact - other).abs().amax(dim=1))
    rounding = torch.cat(noise)
    allowed = _TIMES * rounding.maximum(rounding.nanmedian())  # one loud row excuses no other
    return ((torch.cat(gaps) <= allowed) & rounding.isfinite()).numpy()


def _front_to_back(checkpoint: Checkpoint, name: str, rows: Tensor, columns: Tensor, dtype: torch.dtype) -> Tensor:
    """The logits (N, columns) of a tree without its layers, for rows (N,) of one of its tables."""
    spec, every, first = checkpoint.spec, torch.arange(len(rows)), torch.zeros_like(rows)

    def read(name: str, taken: Tensor) -> Tensor:
        """The rows taken of a parameter, or all of a norm's or a projection's."""
        array, stored = checkpoint.tensor(name)
        return torch.from_numpy(
            to_float64(array if "norm" in name or "projection" in name else array[taken.numpy()], stored)
        )

    def embedded(taken: Tensor) -> Tensor:
        few = partial(EmbeddingModule, replace(spec.embedding, vocab_size=len(taken)))
        found: Tensor = filled(few, partial(read, taken=taken), dtype, "embedding")(torch.arange(len(taken)))
        return found

    with torch.inference_mode():
        x = embedded(first)
        if name == EMBEDDING:
            x = x + embedded(rows)
        if spec.positions is not None and spec.positions.shapes():
            few = partial(PositionsModule, replace(spec.positions, length=len(rows), offset=0))
            taken = rows if name == POSITIONS else first
            x = x + filled(few, partial(read, taken=taken), dtype, "positions")(every, dtype)
        if spec.first_norm is not None:
            make: Callable[[], Any] = partial(build_module, spec.first_norm)
            x = filled(make, partial(tensor_of, checkpoint), dtype, "first_norm")(x)
        logits = next(head_rows(checkpoint, dtype, [columns]))(final_norm(checkpoint, dtype)(x))
    checkpoint.release()
    return logits
