"""Trees with weights in memory, for swaps that are looked at without files."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from gptkit.components import ModelSpec
from gptkit.surgery.base import Exactly, Swapped, SwappedModel
from gptkit.surgery.measure import measure
from gptkit.surgery.registry import Step, apply
from helpers.held import Held
from helpers.trees import random_weights


class Weights(Held):
    """A tree of fp64 weights that swaps can be applied to, all random but for those that are given; `change` may set
    parts of them.
    """

    reference = "weights"

    def __init__(
        self,
        spec: ModelSpec,
        given: Mapping[str, np.ndarray] | None = None,
        change: Callable[[str, np.ndarray], None] | None = None,
    ) -> None:
        self.values = {name: each.numpy() for name, each in random_weights(spec).items()} | dict(given or {})
        for name, value in self.values.items():
            if change is not None:
                change(name, value)
        super().__init__(spec, {name: torch.tensor(value) for name, value in self.values.items()})

    def dtype(self, _name: str) -> str:
        return "F64"

    def tensor(self, name: str) -> tuple[np.ndarray, str]:
        return self.values[name], "F64"

    def wide(self, name: str) -> np.ndarray:
        return self.values[name]


def after(model: Any, *steps: Step) -> tuple[list[Swapped], Any]:
    """What some steps say, and the tree after them; nothing is written."""
    found = []
    for step in steps:
        found.append(apply(model, step))
        model = SwappedModel(model, found[-1])
    return found, model


def error(before: Any, after: Any, swapped: Swapped) -> float:
    """Relative, of the logits that were promised, in fp64."""
    found = measure(before, Exactly(after), promise=swapped.promise, dtypes=("float64",))
    return found.relative["float64"]
