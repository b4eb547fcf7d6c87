"""What the tests of feed-forward and block swaps share: files measured from outside, formulas broken."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from families import CONFIGS, save_hf

import gptkit
from gptkit.errors import GptkitError
from gptkit.parity.probe import probe
from gptkit.surgery.registry import Step
from gptkit.surgery.swap import SwapResult

BOUNDS = ((torch.float64, 1e-12), (torch.float32, 1e-5))

Mutation = tuple[Callable[[pytest.MonkeyPatch], None], tuple[str, ...]]
"""What breaks a formula, and the models on which that must show."""


def relative_error(before: Path, after: Path, dtype: torch.dtype) -> float:
    """Of the logits on the probe, both models from their files; nothing of gptkit's own measurement is used."""
    specs = [gptkit.open_checkpoint(folder).spec for folder in (before, after)]
    a, b = (gptkit.load(folder, dtype) for folder in (before, after))
    worst = largest = torch.zeros((), dtype=dtype)
    with torch.inference_mode():
        for batch in probe(*specs):
            x, y = (batch.valid(each(batch.input_ids, batch.attention_mask)) for each in (a, b))
            worst, largest = torch.maximum(worst, (x - y).abs().max()), torch.maximum(largest, x.abs().max())
    assert largest > 0
    return (worst / largest).item()


def exactly(source: Path, out: Path, *steps: Step, **asked: Any) -> SwapResult:
    """Carry out a swap that must be exact, and see from outside that it is."""
    result = gptkit.swap(source, out, steps, **asked)
    assert result.guarantee == "exact"
    assert result.measured is not None
    for dtype, bound in BOUNDS:
        assert relative_error(source, out, dtype) <= bound
    return result


def is_caught(name: str, mutations: Mapping[str, Mutation], asked: Mapping[str, str], folder: Path) -> None:
    """Break one formula, for good until the test ends, and see that the swap is refused on each of its models."""
    mutate, models = mutations[name]
    for model in models:
        save_hf(CONFIGS[model], folder / model)
    with pytest.MonkeyPatch.context() as patch:
        mutate(patch)
        for model in models:
            with pytest.raises(GptkitError, match="the swap is not exact on this checkpoint"):
                gptkit.swap(folder / model, folder / "out", **asked)
            assert not (folder / "out").exists()
