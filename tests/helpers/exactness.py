"""Exactness of a swap, looked at from outside: logits of both folders, loaded as anyone loads them."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import gptkit
from gptkit.errors import GptkitError
from gptkit.parity.probe import probe
from gptkit.surgery.guarantee import EXACT_FP32, EXACT_FP64
from gptkit.surgery.registry import Step
from gptkit.surgery.swap import SwapResult
from helpers import covering
from helpers.families import CONFIGS, save_hf
from helpers.inverses import inverse

Mutation = tuple[Callable[[pytest.MonkeyPatch], None], tuple[str, ...]]
"""What breaks a formula, and the models on which that must show."""

MODELS = ("gpt2", "llama", "mixtral", "qwen2", "qwen3", "bloom", "falcon-7b", "falcon-40b")
"""Trees that differ in what a swap of sizes meets: norms, biases, positions, groups, experts, parallel blocks."""


def saved(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """A checkpoint with all parameters random, written once a folder."""
    source = folder / name
    if not source.exists():
        save_hf(CONFIGS[name], source, dtype, seed=3)
    return source


def difference(a: str | Path, b: str | Path, dtype: torch.dtype = torch.float64, last: int = 0) -> tuple[float, float]:
    """The largest difference of logits on the probe (or on so many of its last batches), and the largest logit, both
    models from their files; nothing of a swap's own measurement is used.
    """
    one, other = gptkit.load(a, dtype=dtype), gptkit.load(b, dtype=dtype)
    found = largest = torch.zeros((), dtype=dtype)
    with torch.inference_mode():
        for batch in probe(one.spec, other.spec)[-last:]:
            x, y = (batch.valid(model(batch.input_ids, batch.attention_mask)) for model in (one, other))
            # Not Python's max, which loses a NaN that does not come first.
            found, largest = torch.maximum(found, (x - y).abs().max()), torch.maximum(largest, x.abs().max())
    assert largest > 0
    return found.item(), largest.item()


def gap(a: str | Path, b: str | Path, dtype: torch.dtype = torch.float64, last: int = 0) -> float:
    """The largest difference of logits on the probe, relative to the largest logit."""
    found, largest = difference(a, b, dtype, last)
    return found / largest


def exactly(source: str | Path, out: Path, *steps: Step, **asked: Any) -> SwapResult:
    """Swap, and hold the result to the bounds from inside and from outside. In `make test` only the longest batches
    are looked at from outside, and what is measured inside in fp32 is taken as it is: that it is what whole modules
    compute, tests/surgery/test_measure.py says.
    """
    result = gptkit.swap(source, out, steps, **asked)
    assert result.guarantee == "exact"
    assert EXACT_FP64 == 1e-12 and EXACT_FP32 == 1e-5
    assert result.measured is not None and result.measured.relative["float64"] <= 1e-12
    assert gap(source, out, last=2 if covering.quick else 0) <= 1e-12
    assert result.measured.relative["float32"] <= 1e-5
    assert covering.quick or gap(source, out, torch.float32) <= 1e-5
    return result


def undone(source: Path, step: Step, folder: Path) -> tuple[SwapResult, SwapResult]:
    """Carry an exact swap out in `folder`/there, then its inverse in `folder`/back, and see that what comes out is what
    there was, byte for byte.
    """
    gptkit.convert(source, folder / "local")
    there = exactly(source, folder / "there", step)
    spec = gptkit.open_checkpoint(source).spec
    undo = inverse(step, spec)
    assert undo is not None
    back = exactly(folder / "there", folder / "back", undo)
    assert back.spec == spec
    assert (folder / "back" / "model.safetensors").read_bytes() == (folder / "local" / "model.safetensors").read_bytes()
    return there, back


def same_values(a: str | Path, b: str | Path) -> bool:
    """Whether two folders have one tree and equal tensors."""
    one, other = gptkit.open_checkpoint(a), gptkit.open_checkpoint(b)
    names = [parameter.name for parameter in one.spec.parameters()]
    return one.spec == other.spec and all((one.tensor(n)[0] == other.tensor(n)[0]).all() for n in names)


def bytes_of(folder: Path) -> dict[str, bytes]:
    """Every tensor of a folder that gptkit wrote."""
    found = safetensors.torch.load_file(folder / "model.safetensors")
    return {name: each.view(torch.uint8).numpy().tobytes() for name, each in found.items()}


def caught(source: Path, out: Path, **asked: Any) -> None:
    """A wrong formula is not published."""
    with pytest.raises(GptkitError, match="the swap is not exact on this checkpoint"):
        gptkit.swap(source, out, **asked)
    assert not out.exists()


def is_caught(name: str, mutations: Mapping[str, Mutation], asked: Mapping[str, str], folder: Path) -> None:
    """Break one formula and see that the swap is refused on each of its models."""
    mutate, models = mutations[name]
    sources = [saved(model, folder) for model in (models[:1] if covering.quick else models)]
    with pytest.MonkeyPatch.context() as patch:
        mutate(patch)
        for source in sources:
            caught(source, folder / "out", **asked)
