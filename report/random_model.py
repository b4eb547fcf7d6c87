"""What `load --random` tells: the tree, how its weights were drawn, that it computes, where it lies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from ..analysis.parameters import count, describe
from ..converter.outline import Outline
from .summaries import human_bytes, plain_table

__all__ = ["RandomModel"]


@dataclass(frozen=True)
class RandomModel:
    """A tree with random weights.

    initialisation: in words. finite: whether a forward pass gave logits that are numbers, None where there was none.
    out, nbytes: the folder that they were written to, and how large its weights are. notes: for a person.
    """

    reference: str
    tree: Outline
    dtype: str
    seed: int
    initialisation: str
    finite: bool | None
    out: str | None = None
    nbytes: int = 0
    notes: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "schema_version": 1,
            "model": self.reference,
            "family": self.tree.origin.family,
            "parameters": count(self.tree.spec).total,
            "dtype": self.dtype,
            "initialisation": self.initialisation,
            "seed": self.seed,
            "finite_logits": self.finite,
            "out": self.out,
            "bytes": self.nbytes if self.out is not None else None,
            "components": describe(self.tree.spec),
            "notes": list(self.notes),
        }

    def summary(self) -> RenderableType:
        """For a terminal."""
        spec = self.tree.spec
        table = plain_table(("", "left"), ("", "left"))
        table.show_header = False
        table.add_row("family", self.tree.origin.family or "none")
        table.add_row("parameters", f"{count(spec).total:,} as {self.dtype}")
        for aspect, words in describe(spec).items():
            if words not in ("none", ""):
                table.add_row(aspect, words)
        table.add_row("weights", self.initialisation)
        table.add_row("seed", str(self.seed))
        told = {True: "logits are finite", False: "logits are NaN or infinite", None: "none"}[self.finite]
        table.add_row("forward pass", told)
        if self.out is not None:
            table.add_row("written", f"{human_bytes(self.nbytes)} of weights")
        lines = [Text(f"note: {note}") for note in self.notes]
        return Group(Text(f"{self.reference}, random weights", style="bold"), table, *lines)
