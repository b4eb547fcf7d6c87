"""Define the records of a comparison of two checkpoints A and B: one tensor, a group of tensors,
the whole comparison.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import msgspec

from ..components import without_rounding
from ..converter.checkpoint import Checkpoint, TensorFiles
from ..display import Shown
from .surroundings import FileChange, TreeChange
from .tensor_diff import TensorFigures

Status = Literal["same", "dtype", "rounded", "changed", "reshaped", "only_a", "only_b"]
STATUSES: dict[Status, str] = {
    "same": "same values",
    "dtype": "same values in another dtype",
    "rounded": "rounded",
    "changed": "changed",
    "reshaped": "of another shape",
    "only_a": "only in A",
    "only_b": "only in B",
}
_FEW_RUNS = 64  # the largest number of row runs that are listed; of more, only the number of rows is given
_Reading = Literal["low", "high", "unclear"]
""""low": the change is a product of two thin matrices; "high": it is not; "unclear": rounding hides its rank."""
_FEW_ROWS = 0.25  # if at most this share of the rows changed, the rows describe the change, not its rank
_HALF = 0.5  # if singular values above rounding explain less of the change than this, its rank is unclear
_CONCENTRATED = 0.5  # a change has low rank if its factors have at most this share of the matrix's numbers


@dataclass(frozen=True)
class TensorDiff:
    """The comparison of one tensor in checkpoints A and B. One of them may not have the tensor."""

    name: str  # gptkit's name of the parameter
    component: str  # the label of its component in tables of parameters
    layer: int | None  # None outside of layers
    status: Status  # "same", "changed", "only_a" and so on
    shape_a: tuple[int, ...] | None  # None if A does not have the tensor
    shape_b: tuple[int, ...] | None  # None if B does not have it
    dtype_a: str | None  # the dtype in which A stores it
    dtype_b: str | None  # the dtype in which B stores it
    figures: TensorFigures | None = None  # None if shapes differ, except in the number of rows of a table
    quantised: tuple[Literal["a", "b"], ...] = ()  # the sides that are quantised in blocks, which hides the rank

    @property
    def module(self) -> str:
        """Return the name of the module without its layer, such as "attention.q_proj".

        If gptkit does not know the module, the name in the file is used: "model.layers.*.query".
        """
        name = re.sub(r"\.experts\.[^.]+", ".experts", self.everywhere.removeprefix("blocks.*."))
        return name.rpartition(".")[0] or self.name

    @property
    def everywhere(self) -> str:
        """Return the tensor's name with a star instead of the layer number."""
        return self.name if self.layer is None else re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", self.name, count=1)

    @property
    def part(self) -> str:
        """Return the module's name, with ".bias" for a bias. All layers' tensors with this name form one group."""
        return f"{self.module}.bias" if self.name.endswith(".bias") else self.module

    @property
    def reading(self) -> _Reading | None:
        """Return whether the rank of the tensor's change B - A is "low", "high" or "unclear".

        Return None if the rank is unknown, or if the change has a simpler description: a few changed rows, or a factor.
        """
        figures = self.figures
        rank = None if figures is None else figures.rank
        if figures is None or rank is None or self.shape_a is None or self.status != "changed":
            return None
        if figures.scale is not None or figures.rows_changed <= _FEW_ROWS * figures.rows_all:
            return None
        if rank.more or rank.rank * sum(self.shape_a) > _CONCENTRATED * math.prod(self.shape_a):
            return "high"
        return "low" if rank.share is not None and rank.share >= _HALF else "unclear"

    def as_json(self) -> dict[str, Any]:
        """Return plain JSON values. Figures that fp64 cannot represent are null."""
        fields = {"name": self.name, "module": self.module, **vars(self)}
        figures = fields.pop("figures")
        data = {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}
        if figures is None:
            return {**data, "compared": None}
        rank, rounded = figures.rank, figures.rounded or (None, None)
        more = rank is not None and rank.more
        compared = {
            "elements": figures.elements,
            "changed": figures.changed,
            "same_bytes": figures.same_bytes,
            "relative": figures.relative,
            "max_abs": _finite(figures.largest),
            "cosine": figures.cosine if figures.square_a else None,
            "scale": figures.scale,
            "rows": figures.rows_all,
            "rows_changed": figures.rows_changed,
            "row_ranges": [list(run) for run in figures.rows] if len(figures.rows) <= _FEW_RUNS else None,
            "not_finite_a": figures.not_finite[0],
            "not_finite_b": figures.not_finite[1],
            "rounded_to": rounded[0],
            "rounded_side": rounded[1],
            "order": figures.order,
            "reading": self.reading,
            "rank": None if rank is None or more else rank.rank or None,
            "rank_above": rank.limit if rank is not None and more else None,
        }
        ranks = {"rank_of": "of", "rank_share": "share", "rank_99": "most"}
        return {**data, "compared": compared | {key: getattr(rank, name, None) for key, name in ranks.items()}}


@dataclass(frozen=True)
class ChangeGroup:
    """Tensors that are reported together: the weights of one module, its biases, or all tensors of one layer."""

    name: str  # the module, or "layer"
    layer: int | None  # the layer's index; None for a group over all layers or outside of layers
    tensors: tuple[TensorDiff, ...]

    @property
    def changed(self) -> tuple[TensorDiff, ...]:
        """Return the tensors that have the same shape in A and B but different values."""
        return tuple(tensor for tensor in self.tensors if tensor.status in ("changed", "rounded"))

    @property
    def same(self) -> int:
        """Return the number of tensors with the same values."""
        return sum(tensor.status in ("same", "dtype") for tensor in self.tensors)

    @property
    def relative(self) -> float | None:
        """Return ‖B - A‖ / ‖A‖ (Frobenius) over all changed tensors together; None if it is undefined."""
        return None if self._total is None else self._total.relative

    @property
    def cosine(self) -> float | None:
        """Return the cosine similarity of A and B over all changed tensors together; None if it is undefined."""
        return None if self._total is None else self._total.cosine

    @property
    def not_finite(self) -> bool:
        """Return whether the changed tensors contain NaN or infinite values."""
        return self._total is not None and any(self._total.not_finite)

    @cached_property
    def _total(self) -> TensorFigures | None:
        """Return one comparison for all changed tensors of the group, as if they were one tensor; None if there are
        none.
        """
        figures = [tensor.figures for tensor in self.changed if tensor.figures is not None]
        names = ("square_a", "square_b", "square", "product")
        total: dict[str, Any] = {name: math.fsum(getattr(x, name) for x in figures) for name in names}
        total |= {name: max((getattr(x, name) for x in figures), default=0) for name in ("largest", "not_finite")}
        return TensorFigures(0, **total) if figures else None

    @property
    def figures(self) -> dict[str, Any]:
        """Return the group's figures as JSON values. They are None if changed tensors contain NaN
        or infinite values.
        """
        largest = None if self._total is None else _finite(self._total.largest)
        data = {"relative": self.relative, "max_abs": largest, "cosine": self.cosine}
        return {**(dict.fromkeys(data) if self.not_finite else data), "not_finite": self.not_finite}

    def as_json(self) -> dict[str, Any]:
        counts = {"tensors": len(self.tensors), "same": self.same, "changed": len(self.changed)}
        return {"name": self.name, "layer": self.layer, **counts, **self.figures}


@dataclass(frozen=True)
class _LowRankChange:
    """A change of a model that looks like a merged LoRA adapter: some matrices changed with low rank, none with high
    rank.
    """

    alone: bool  # whether nothing else changed: no norm, bias, embedding row or shape, no new or missing tensor
    matrices: int  # the number of matrices with a change of low rank
    unclear: int  # the number of matrices whose change is too close to rounding to know its rank
    rank: int  # the largest of the low ranks
    modules: tuple[str, ...]  # the modules with low-rank changes


@dataclass(frozen=True)
class Diff(Shown):
    """The differences between the checkpoints A and B."""

    a: TensorFiles  #: the first checkpoint
    b: TensorFiles  #: the second checkpoint
    tensors: tuple[TensorDiff, ...]  #: the comparison of every tensor, in the order of computation
    tree: tuple[TreeChange, ...]  #: the differences of the component trees
    files: tuple[FileChange, ...]  #: the differences of config.json and of the tokenizer's files
    notes: tuple[str, ...] = ()  #: what the user needs to know to interpret the figures
    counts: Mapping[Status, int] = field(default_factory=dict)  #: the number of tensors by status

    def __repr__(self) -> str:
        counts = ", ".join(f"{number:,} {STATUSES[status]}" for status, number in self.counts.items() if number)
        return f"<diff of {self.a.reference} and {self.b.reference}: tensors {counts}>"

    @property
    def same(self) -> bool:
        """Return whether both models compute the same function with the same weights. Dtypes and other files may
        differ.
        """
        values = self.all.same == len(self.tensors)
        # Fields that only affect rounding, and the context length of the training, do not count.
        specs = [checkpoint.spec for checkpoint in (self.a, self.b) if isinstance(checkpoint, Checkpoint)]
        trees = [without_rounding(msgspec.structs.replace(spec, context_length=None)) for spec in specs]
        return values and (len(trees) < 2 or bool(trees[0] == trees[1]))

    @property
    def same_bytes(self) -> bool:
        """Return whether all tensors have the same values, dtypes and bits."""
        return all(tensor.figures is not None and tensor.figures.same_bytes for tensor in self.tensors)

    @property
    def all(self) -> ChangeGroup:
        """Return all tensors as one group."""
        return ChangeGroup("all", None, self.tensors)

    @property
    def changed(self) -> tuple[TensorDiff, ...]:
        """Return the tensors that have the same shape in A and B but different values, in the order of computation."""
        return self.all.changed

    @property
    def parameters(self) -> tuple[int, int]:
        """Return the numbers of parameters of A and of B, including tensors that belong to no known component."""
        shapes = [(tensor.shape_a, tensor.shape_b) for tensor in self.tensors]
        a, b = (sum(math.prod(shape) for shape in side if shape is not None) for side in zip(*shapes, strict=True))
        return a, b

    @property
    def rounded(self) -> tuple[str, Literal["a", "b"]] | None:
        """Return ("BF16", "b") if B's values are those of A rounded to bf16; ("BF16", "a") for the reverse.

        Other dtypes are returned in the same way. Return None if the models differ in another way.
        """
        kinds = {tensor.figures.rounded for tensor in self.changed if tensor.figures is not None}
        return kinds.pop() if len(kinds) == 1 and self.counts["changed"] == 0 else None

    @property
    def low_rank(self) -> _LowRankChange | None:
        """Return a summary of the change if it looks like a merged LoRA adapter, else None."""
        matrices = [tensor for tensor in self.changed if tensor.reading is not None]
        low = [tensor for tensor in matrices if tensor.reading == "low"]
        if not low or 2 * len(low) < len(matrices) or any(tensor.reading == "high" for tensor in matrices):
            return None
        figures = [tensor.figures for tensor in low if tensor.figures is not None]
        ranks = [figure.rank.rank for figure in figures if figure.rank is not None]
        unmatched = any(self.counts[status] for status in ("reshaped", "only_a", "only_b"))
        alone = not unmatched and self.counts["changed"] == len(matrices)
        modules = tuple(dict.fromkeys(tensor.module for tensor in low))
        return _LowRankChange(alone, len(low), len(matrices) - len(low), max(ranks), modules)

    def by_module(self) -> list[ChangeGroup]:
        """Return one group for the weights and one for the biases of each module, over all layers, in the order of
        computation.
        """
        return _groups(self.tensors, lambda tensor: (tensor.part, None))

    def by_layer(self) -> list[ChangeGroup]:
        """Return one group per layer. Tensors outside of layers are grouped by module."""
        return _groups(self.tensors, lambda tensor: (tensor.part if tensor.layer is None else "layer", tensor.layer))

    def by_place(self) -> list[ChangeGroup]:
        """Return the groups of `by_module`, but separate for every layer."""
        return _groups(self.tensors, lambda tensor: (tensor.part, tensor.layer))

    def as_json(self) -> dict[str, Any]:
        low, rounded = self.low_rank, self.rounded or (None, None)
        return {
            "schema_version": 1,
            "a": _side(self.a, self.parameters[0]),
            "b": _side(self.b, self.parameters[1]),
            "same": self.same,
            "same_bytes": self.same_bytes,
            "counts": dict(self.counts),
            **self.all.figures,
            "rounded_to": rounded[0],
            "rounded_side": rounded[1],
            "low_rank": None if low is None else {**vars(low), "modules": list(low.modules)},
            "tree": [vars(change) for change in self.tree],
            "files": [{**vars(file), "told": list(file.told)} for file in self.files],
            "notes": list(self.notes),
            "modules": [group.as_json() for group in self.by_module()],
            "layers": [group.as_json() for group in self.by_layer()],
            "tensors": [tensor.as_json() for tensor in self.tensors],
        }


def _groups(tensors: Iterable[TensorDiff], key: Callable[[TensorDiff], tuple[str, int | None]]) -> list[ChangeGroup]:
    """Group tensors by their `key`, in the order of first appearance.

    A key is (name of the group, layer). The layer is None for a group of tensors that do not belong to one layer.
    """
    groups: dict[tuple[str, int | None], list[TensorDiff]] = {}
    for tensor in tensors:
        groups.setdefault(key(tensor), []).append(tensor)
    return [ChangeGroup(name, layer, tuple(members)) for (name, layer), members in groups.items()]


def _side(checkpoint: TensorFiles, parameters: int) -> dict[str, Any]:
    """Return the JSON values that describe one checkpoint. `parameters` is its number of parameters."""
    return {
        "model": checkpoint.reference,
        "revision": checkpoint.revision,
        "format": checkpoint.format,
        "family": checkpoint.origin.family,
        "parameters": parameters,
        "dtypes": sorted(set(checkpoint.dtypes.values())),
    }


def _finite(value: float) -> float | None:
    """Return a number, or None for NaN and infinity."""
    return float(value) if math.isfinite(value) else None
