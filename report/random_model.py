"""What `load --random` tells: the tree, how its weights were drawn, that it computes, where it lies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType

from ..analysis.parameters import count, describe
from ..converter.outline import Outline
from .summaries import component_facts, facts_report, human_bytes

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
        told = {True: "logits are finite", False: "logits are NaN or infinite", None: "none"}[self.finite]
        facts = [
            ("family", self.tree.origin.family or "none"),
            ("parameters", f"{count(spec).total:,} as {self.dtype}"),
            *component_facts(spec),
            ("weights", self.initialisation),
            ("seed", str(self.seed)),
            ("forward pass", told),
            *([("written", f"{human_bytes(self.nbytes)} of weights")] if self.out is not None else []),
        ]
        return facts_report(f"{self.reference}, random weights", facts, self.notes)
