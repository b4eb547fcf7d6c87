"""Trees with weights in memory for swaps that are looked at without files, and files of exact ones measured outside."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from trees import random_weights

import gptkit
from gptkit.parity.probe import probe
from gptkit.spec import ModelSpec
from gptkit.surgery.base import Exactly, Swapped, SwappedModel
from gptkit.surgery.measure import measure
from gptkit.surgery.registry import Step, apply
from gptkit.surgery.swap import SwapResult

BOUNDS = ((torch.float64, 1e-12), (torch.float32, 1e-5))


class Weights:
    """A tree with weights, all random but for those that are given; `change` may set parts of them."""

    reference = "weights"

    def __init__(
        self,
        spec: ModelSpec,
        given: Mapping[str, np.ndarray] | None = None,
        change: Callable[[str, np.ndarray], None] | None = None,
    ) -> None:
        self.spec = spec
        self.values = {name: each.numpy() for name, each in random_weights(spec).items()} | dict(given or {})
        for name, value in self.values.items():
            if change is not None:
                change(name, value)

    def dtype(self, _name: str) -> str:
        return "F64"

    def raw(self, name: str) -> tuple[np.ndarray, str]:
        return self.values[name], "F64"

    def wide(self, name: str) -> np.ndarray:
        return self.values[name]

    def read(self, name: str) -> torch.Tensor:
        return torch.tensor(self.values[name])

    def release(self) -> None:
        pass


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


def apart(before: Path, after: Path, dtype: torch.dtype = torch.float64) -> float:
    """The largest difference of logits on the probe, relative to the largest logit, of models from their files."""
    a, b = (gptkit.load(folder, dtype) for folder in (before, after))
    gaps, sizes = [], []
    with torch.inference_mode():
        for batch in probe(a.spec, b.spec):
            x, y = (batch.valid(each(batch.input_ids, batch.attention_mask)).double() for each in (a, b))
            gaps.append((x - y).abs().max())
            sizes.append(x.abs().max())
    return (torch.stack(gaps).max() / torch.stack(sizes).max()).item()


def exactly(source: Path, out: Path, *steps: Step, **asked: Any) -> SwapResult:
    """Carry out a swap that must be exact, and see from outside that it is."""
    result = gptkit.swap(source, out, steps, **asked)
    assert result.guarantee == "exact"
    assert result.measured is not None
    for dtype, bound in BOUNDS:
        assert apart(source, out, dtype) <= bound
    return result


def bytes_of(folder: Path) -> dict[str, bytes]:
    """Every tensor of a folder that gptkit wrote."""
    found = safetensors.torch.load_file(folder / "model.safetensors")
    return {name: each.view(torch.uint8).numpy().tobytes() for name, each in found.items()}
