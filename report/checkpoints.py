"""Reports on opening, initialising, counting or converting checkpoints. They are at most 80 columns wide."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from ..analysis.aspects import describe
from ..analysis.parameters import count
from ..components import ModelSpec
from .quantities import counted, rounded_bytes, scientific
from .sheets import plain_table

if TYPE_CHECKING:
    from ..analysis.params import ModelCount
    from ..converter.checkpoint import Checkpoint
    from ..converter.convert import Conversion
    from ..converter.outline import Outline
    from ..converter.transfer import Transferred

_SHOWN = 5  # the most tensors that are named
_Facts = Sequence[tuple[str, str]]


def _facts_report(title: str, before: _Facts, spec: ModelSpec, after: _Facts, notes: Iterable[str]) -> RenderableType:
    """Return a table of facts and the notes below it.

    The table has the facts `before`, then a description of the model's components, and then the facts `after`.
    """
    aspects = [(aspect, words) for aspect, words in describe(spec).items() if words not in ("none", "")]
    table = plain_table(("", False), ("", False), rows=[*before, *aspects, *after])
    return Group(Text(title, style="bold"), table, *(Text(f"note: {note}") for note in notes))


def load_summary(checkpoint: Checkpoint) -> RenderableType:
    """Return the family, components, dtypes, files and notes of a checkpoint."""
    spec, files, history = checkpoint.spec, checkpoint.files, checkpoint.origin.history
    stored = sorted({checkpoint.stored_of(leaf)[0] for leaf in checkpoint.leaves})
    where = f"{counted(len(files), 'file')}, {rounded_bytes(sum(path.stat().st_size for path in files))}"
    facts = [
        ("family", f"{checkpoint.origin.family or 'none'} ({checkpoint.format} format)"),
        *([("revision", checkpoint.revision)] if checkpoint.revision else []),
        ("parameters", f"{count(spec).total:,}"),
        ("stored as", f"{', '.join(stored)}, {len(checkpoint.leaves)} tensors in {where}"),
    ]
    steps = [("history", ", ".join(f"{key} {value}" for key, value in entry.items())) for entry in history]
    return _facts_report(str(checkpoint.reference), facts, spec, steps, checkpoint.notes)


def load_json(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the family, components, dtypes, files and notes of a checkpoint as plain JSON values."""
    return {
        "schema_version": 1,
        "model": checkpoint.reference,
        "family": checkpoint.origin.family,
        "format": checkpoint.format,
        "revision": checkpoint.revision,
        "parameters": count(checkpoint.spec).total,
        "dtype": checkpoint.dtype,
        "tensors": len(checkpoint.leaves),
        "files": [path.name for path in checkpoint.files],
        "components": describe(checkpoint.spec),
        "history": list(checkpoint.origin.history),
        "notes": checkpoint.notes,
    }


@dataclass(frozen=True)
class RandomModel:
    """A model with random weights, the result of `load --random`."""

    reference: str  # the model as the user named it
    tree: Outline  # the architecture and the history
    dtype: str
    seed: int
    initialisation: str  # how the weights were drawn, in words
    finite: bool | None  # whether a forward pass gave finite logits; None without a forward pass
    out: str | None = None  # the folder to which the weights were written
    nbytes: int = 0  # the size of the written weights
    notes: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the result as plain JSON values."""
        spec, nbytes = self.tree.spec, None if self.out is None else self.nbytes
        more = {"out": self.out, "bytes": nbytes, "components": describe(spec), "notes": list(self.notes)}
        data = {"schema_version": 1, "model": self.reference, "family": self.tree.origin.family}
        data |= {"parameters": count(spec).total, "dtype": self.dtype, "initialisation": self.initialisation}
        return {**data, "seed": self.seed, "finite_logits": self.finite, **more}

    def summary(self) -> RenderableType:
        """Return the report on this model for the terminal."""
        spec = self.tree.spec
        logits = {True: "logits are finite", False: "logits are NaN or infinite", None: "none"}[self.finite]
        facts = [
            ("family", self.tree.origin.family or "none"),
            ("parameters", f"{count(spec).total:,} as {self.dtype}"),
        ]
        after = [("weights", self.initialisation), ("seed", str(self.seed)), ("forward pass", logits)]
        after += [("written", f"{rounded_bytes(self.nbytes)} of weights")] if self.out is not None else []
        return _facts_report(f"{self.reference}, random weights", facts, spec, after, self.notes)


def source_lines(counts: Sequence[ModelCount]) -> list[str]:
    """Return lines on the hub commits, the stored dtypes and the notes of models whose parameters were counted."""
    lines = []
    for model in counts:
        name = f"{model.name}: " if len(counts) > 1 else ""
        if model.revision is not None:
            lines.append(f"{name}at commit {model.revision}")
        if model.stored is not None:
            kinds = ", ".join(
                f"{dtype} {rounded_bytes(sizes['bytes'])} in {counted(sizes['tensors'], 'tensor')}"
                for dtype, sizes in model.stored.dtypes.items()
            )
            lines.append(f"{name}stored as {kinds}, {counted(len(model.stored.files), 'file')}")
        lines += [f"note: {name}{note}" for note in model.notes]
    return lines


def conversion_lines(conversion: Conversion) -> list[str]:
    """Return lines on the files that a conversion wrote or would write."""
    source, plan, transferred = conversion.source, conversion.plan, conversion.transferred
    wrote, family = "wrote" if conversion.published else "would write", source.origin.family or "a model"
    size = f"{plan.tensors} tensors in {counted(len(plan.shards), 'file')}, {rounded_bytes(plan.nbytes)}"
    lines = [f"{wrote} {conversion.target}: {family} as {conversion.to}, {size}"]
    if source.revision is not None:
        lines.append(f"  from {source.reference} at commit {source.revision}")
    if transferred is None:
        sizes = [(shard.name, shard.size, f", {len(shard.outputs)} tensors") for shard in plan.shards]
        sizes += [(name, len(text), "") for name, text in plan.texts.items()]
        sizes += [(file.name, file.path.stat().st_size, "") for file in plan.companions]
        lines += [f"  {name}  {rounded_bytes(nbytes)}{more}" for name, nbytes, more in sizes]
        one_file = [shard.name for shard in plan.shards] == [conversion.target.name]
        lines.append(f"  disk: {rounded_bytes(plan.nbytes)}{'' if one_file else ', and a manifest'}")
        memory, largest = rounded_bytes(conversion.memory), rounded_bytes(plan.largest)
        lines.append(f"  memory: {memory} of tensors; the largest has {largest}")
    else:
        quantised = Counter(o.dtype for shard in plan.shards for o in shard.outputs if o.decode is not None)
        for dtype, tensors in quantised.items():
            lines.append(f"{tensors} of {plan.tensors} tensors are quantised to {dtype}")
        lines += _transfer_lines(transferred)
    return lines + [f"note: {note}" for note in source.notes]


def _transfer_lines(done: Transferred) -> list[str]:
    """Return lines on the error of quantisation and rounding, and on values that are NaN or infinite."""
    from ..converter.dtypes import Quantisation, Rounding  # imports numpy

    lines = []
    if done.quantised:
        loss = sum(done.quantised.values(), Quantisation())
        lines.append(
            f"  off by {scientific(loss.largest)} at most, with a relative RMS error of {scientific(loss.relative)}"
        )
    if done.resumed:
        lines.append(f"resumed: {rounded_bytes(done.resumed)} were already written by an earlier run")
    if done.rounded:
        cost = sum(done.rounded.values(), Rounding())
        tensors = f"{len(done.rounded)} {'other ' if done.quantised else ''}tensors"
        zeroed = f", {cost.zeroed:,} of them to zero" if cost.zeroed else ""
        lines.append(
            f"rounded {cost.changed:,} values of {tensors}{zeroed}, by {cost.relative:.1e} of their size at most"
        )
    for name, values in list(done.not_finite.items())[:_SHOWN]:
        lines.append(f"warning: {name} has {values:,} values that are NaN or infinite, copied unchanged")
    if len(done.not_finite) > _SHOWN:
        lines.append(f"warning: … and {len(done.not_finite) - _SHOWN} more tensors")
    return lines
