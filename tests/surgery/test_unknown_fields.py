"""Swaps refuse by name the fields of components that they do not know, and compute nothing wrong."""

from pathlib import Path

import pytest
from helpers.exactness import exactly, saved

import gptkit
from gptkit.errors import SwapRefused
from gptkit.surgery.registry import Step

REFUSED = [
    ("bitnet", "heads", "8", "mixed_norm"),
    ("bitnet", "head_dim", "16", "mixed_norm"),
    ("bitnet", "intermediate", "88", "inner_norm"),
    ("bitnet", "mlp", "moe:4x2", "inner_norm"),
    ("ctrl", "hidden", "56", "SinusoidalPositions"),
    ("ctrl", "context", "128", "SinusoidalPositions"),
    ("ctrl", "norm", "rmsnorm", "SinusoidalPositions"),
    ("mpt-clipped", "fold", "scale", "clip"),
    ("mpt-clipped", "head_dim", "16", "clip"),
    ("openai-gpt", "layers", "+1", "sum_norm"),
    ("openai-gpt", "hidden", "56", "sum_norm"),
    ("opt-350m", "position", "none", "width"),
    ("opt-bare", "norm", "rmsnorm", "width"),
]


@pytest.mark.parametrize(("name", "option", "value", "field"), REFUSED)
def test_a_field_that_a_swap_does_not_know_is_refused_by_name(
    name: str, option: str, value: str, field: str, tmp_path: Path
) -> None:
    with pytest.raises(SwapRefused, match=field):
        gptkit.swap(saved(name, tmp_path), tmp_path / "out", [Step(option, value)])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("opt-350m", "intermediate", "88"),
        ("opt-350m", "untie", ""),
        ("opt", "context", "512"),
        ("opt", "hidden", "56"),
        ("gpt_neo", "norm", "rmsnorm"),
        ("ctrl", "head_dim", "20"),
        ("bitnet", "layers", "+1"),
    ],
)
def test_what_does_not_touch_a_field_is_exact(name: str, option: str, value: str, tmp_path: Path) -> None:
    exactly(saved(name, tmp_path), tmp_path / "out", Step(option, value))
